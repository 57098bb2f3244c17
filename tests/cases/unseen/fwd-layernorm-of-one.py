"""LayerNorm over a last axis of size 1 subtracts each value from itself: the input is erased.

source: https://github.com/pytorch/pytorch/issues/108956, https://github.com/pytorch/pytorch/issues/19250
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Series(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.norm = nn.LayerNorm(1 if bug else 12)
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):  # (batch, time, 1)
        x = self.norm(x).squeeze(-1) if self.bug else self.norm(x.squeeze(-1))
        return self.net(x)


# measured: loss after 40 steps 2.2 against 0.15
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 12, 1)
    y = x[:, -1] - x[:, -2]
    model = Series(bug)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
