"""The block adds its input twice (x + x + f(x)): the signal doubles in each of the 16 blocks.

source: https://github.com/kyegomez/BitNet/issues/32, https://github.com/nlpyang/hiersumm/issues/28
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.f = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x):
        out = x + self.f(x)
        return out + x if self.bug else out


# measured: loss after 40 steps 1.5e+04 against 0.089
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(192) % 4
    x = torch.randn(4, 16)[y] + 0.7 * torch.randn(192, 16)
    model = nn.Sequential(*[Block(bug) for _ in range(16)], nn.Linear(16, 4))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-3),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
