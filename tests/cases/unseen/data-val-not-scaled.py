"""Training inputs are standardised, validation inputs are left raw: the validation loss is meaningless.

source: https://github.com/JeasunLok/ResNet-pytorch/issues/1, https://github.com/nttcslab/byol-a/issues/5
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: validation loss after 40 steps 25 against 0.0027
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(384) % 4
    raw = 40 + 20 * (torch.randn(4, 10)[y] + 0.5 * torch.randn(384, 10))
    mean, std = raw[:256].mean(0), raw[:256].std(0)
    x = (raw[:256] - mean) / std
    xv = raw[256:] if bug else (raw[256:] - mean) / std
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 2e-2),
        "loader": DataLoader(TensorDataset(x, y[:256]), 32, shuffle=True),
        "val_loader": DataLoader(TensorDataset(xv, y[256:]), 64),
    }


def make_fixed():
    return make(bug=False)
