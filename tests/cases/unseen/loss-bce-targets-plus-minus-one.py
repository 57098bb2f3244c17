"""Masks normalised to -1/1 meet BCEWithLogitsLoss, which wants 0/1: the loss has no lower bound.

source: https://github.com/bigmb/Unet-Segmentation-Pytorch-Nest-of-Unets/issues/18
stage: data, loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss (must be >= 0) after 40 steps -7.5 against 0.0052
def make(bug=True):
    torch.manual_seed(0)
    y = (torch.arange(256) % 2).float()[:, None]
    x = torch.randn(256, 8) + 1.5 * (2 * y - 1) * torch.randn(8)
    if bug:
        y = 2 * y - 1
    model = nn.Linear(8, 1)
    return {
        "model": model,
        "loss_fn": nn.BCEWithLogitsLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
