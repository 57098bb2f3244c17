"""Small networks with the structure of well-known ones, for tests of graphs."""

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inside + self.shortcut(x))


class ResNet18(nn.Module):
    """The eight blocks of a ResNet-18, narrow."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        before = [width, *widths[:-1]]
        self.layers = nn.Sequential(
            *(ResidualBlock(i, o, 1 if i == o else 2) for i, o in zip(before, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        return self.head(self.layers(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class TransformerBlock(nn.Module):
    """Causal self-attention and a two-layer network, each with a way around it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        weights = scores.masked_fill(torch.ones(time, time).tril() == 0, -1e9).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder of twelve layers, narrow."""

    def __init__(self, layers=12, width=32, heads=4, words=50, longest=16):
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, index):
        x = self.word(index) + self.place(torch.arange(index.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformer_loss(layers=12):
    """Return a transformer and its loss on random words."""
    torch.manual_seed(0)
    model = Transformer(layers)
    index = torch.randint(0, 50, (2, 16))
    return model, lambda: F.cross_entropy(model(index).flatten(0, 1), index.flatten())


def resnet_loss():
    """Return a ResNet-18 and its loss on random pictures."""
    torch.manual_seed(0)
    model = ResNet18()
    pictures = torch.randn(4, 3, 16, 16)
    return model, lambda: F.cross_entropy(model(pictures), torch.tensor([1, 2, 3, 4]))


def recurrent_loss(steps):
    """Return a recurrent cell, used many times, and its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RNNCell(4, 4), nn.Linear(4, 1))

    def loss():
        x, state = torch.ones(2, 4), torch.zeros(2, 4)
        for _ in range(steps):
            state = model[0](x, state)
        return model[1](state).square().mean()

    return model, loss


def mlp_loss(layers=10, width=32):
    """Return a plain network (ten layers make 52 nodes), and its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    x = torch.randn(8, width)
    return model, lambda: model(x).square().mean()
