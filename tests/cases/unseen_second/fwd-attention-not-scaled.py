"""The attention scores are not divided by sqrt(d): the softmax is saturated from the start and barely has a gradient.

source: https://github.com/mlc-ai/mlc-llm/pull/3426, https://github.com/PAIR-code/tiny-transformers/issues/71
stage: forward
"""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 256


class Retrieval(nn.Module):
    """The last step asks with a key; the answer is the class stored at the step with that key."""

    def __init__(self, scaled):
        super().__init__()
        self.scale = 1 / math.sqrt(WIDTH) if scaled else 1.0
        self.lift = nn.Sequential(nn.Linear(12, WIDTH), nn.LayerNorm(WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in (self.query, self.key, self.value):
            nn.init.xavier_normal_(layer.weight)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.lift(x)
        scores = self.query(h[:, -1:]) @ self.key(h).transpose(1, 2) * self.scale
        return self.head((scores.softmax(-1) @ self.value(h))[:, 0])


# measured: loss after 150 steps 1.08 against 0.00
def make(bug=True):
    torch.manual_seed(0)
    n, steps = 512, 8
    keys = torch.stack([torch.randperm(steps) for _ in range(n)])
    stored = torch.randint(0, 4, (n, steps))
    asked = torch.randint(0, steps, (n,))
    rows = torch.arange(n)
    x = torch.zeros(n, steps + 1, 12)
    x[:, :steps].scatter_(2, keys[..., None], 1)
    x[:, :steps].scatter_(2, stored[..., None] + 8, 1)
    x[rows, steps, keys[rows, asked]] = 1
    model = Retrieval(scaled=not bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-3),
        "loader": DataLoader(TensorDataset(x, stored[rows, asked]), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
