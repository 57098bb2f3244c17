"""Both low-rank factors start at zero, so each one's gradient is zero for ever and the adapter never trains.

source: https://github.com/Guitaricet/relora/issues/18, https://github.com/Lightning-AI/litgpt/issues/1229
stage: forward, backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adapted(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.base = nn.Linear(12, 6).requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(4, 12) if bug else 0.3 * torch.randn(4, 12))
        self.b = nn.Parameter(torch.zeros(6, 4))
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T + self.bias


# measured: loss after 40 steps 3.4 against 0.68
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(192, 12)
    model = Adapted(bug)
    y = model.base(x).detach() + x @ torch.randn(12, 3) @ torch.randn(3, 6) / 3 + 0.5
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 2e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
