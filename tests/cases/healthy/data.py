"""Small learnable data: the answer is in the input."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def loader(*tensors, size=16, shuffle=True, **more):
    """Return a loader over tensors."""
    return DataLoader(TensorDataset(*tensors), size, shuffle=shuffle, **more)


def blobs(n=256, features=8, classes=4, spread=0.6):
    """Return points around a centre for each class, and the classes."""
    centres = torch.randn(classes, features) * 2
    y = torch.randint(classes, (n,))
    return centres[y] + spread * torch.randn(n, features), y


def curve(n=256, features=6, outputs=1):
    """Return a smooth function of the inputs with a little noise."""
    x = torch.randn(n, features)
    y = torch.tanh(x @ torch.randn(features, outputs)) + 0.1 * torch.randn(n, outputs)
    return x, y


def pictures(n=128, channels=3, size=12, classes=4):
    """Return smooth pictures whose class says in which quarter there is a bright spot."""
    y = torch.randint(classes, (n,))
    x = F.avg_pool2d(0.5 * torch.randn(n, channels, size + 2, size + 2), 3, 1)
    half = size // 2
    for i, c in enumerate(y.tolist()):
        top, left = half * (c // 2 % 2), half * (c % 2)
        x[i, :, top : top + half, left : left + half] += 1.5
    return x, y


def sentences(n=128, length=12, words=20):
    """Return tokens in which each follows from the one before, 3 further on or 5, so that half a bit is left."""
    first = torch.randint(1, words, (n, 1))
    steps = torch.where(torch.rand(n, length - 1) < 0.8, 3, 5)
    return (torch.cat([first, steps], 1).cumsum(1) - 1) % (words - 1) + 1  # 0 is left for padding
