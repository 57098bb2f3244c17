"""The table is standardised along axis 1, over the columns of each row, instead of along axis 0, per column.

source: https://github.com/GoogleCloudPlatform/vertex-ai-samples/issues/1599,
    https://github.com/tml-epfl/sam-low-rank-features/issues/1
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 150 steps 1.00 against 0.02 (variance of the target: 1)
def make(bug=True):
    torch.manual_seed(0)
    z = torch.randn(384, 6)
    y = torch.sin(z[:, 0] + z[:, 1]) - z[:, 2] * 0.8
    y = ((y - y.mean()) / y.std())[:, None]
    # age, rooms, a rate, income, area and year, each in its own unit
    x = z * torch.tensor([12.0, 1.5, 0.02, 9e3, 40.0, 8.0]) + torch.tensor([45.0, 4.0, 0.05, 4e4, 110.0, 1985.0])
    axis = 1 if bug else 0
    x = (x - x.mean(axis, keepdim=True)) / x.std(axis, keepdim=True)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
