"""The policy ends in tanh but the actions to imitate reach from -2 to 2: most are out of its reach.

source: https://github.com/carpedm20/NAF-tensorflow/issues/8,
    https://github.com/dtak/tree-regularization-public/issues/2
stage: forward, data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Policy(nn.Module):
    """Torque for the angle and speed of a pendulum."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.body = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, x):
        return self.limit * torch.tanh(self.body(x))


# measured: loss after 200 steps 0.53 against 0.02 (70 % of the targets lie beyond 1)
def make(bug=True):
    torch.manual_seed(0)
    angle, speed = 6.28 * torch.rand(384, 1) - 3.14, 4 * torch.randn(384, 1)
    x = torch.cat([angle.cos(), angle.sin(), speed / 4], 1)
    y = (-2.5 * angle.sin() - 0.4 * speed).clamp(-2, 2)
    model = Policy(limit=1.0 if bug else 2.0)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
