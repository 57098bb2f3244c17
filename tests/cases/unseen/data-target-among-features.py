"""The target column was left among the features; at validation time it is unknown (0), so the model is useless there.

source: https://github.com/neurodata/SPORF/issues/355, https://github.com/alteryx/predict-taxi-trip-duration/issues/2
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: validation loss after 40 steps 5.2 against 0.41
def make(bug=True):
    torch.manual_seed(0)
    w = torch.randn(8, 1)
    x = torch.randn(320, 8)
    y = x @ w + 0.3 * torch.randn(320, 1)
    last = torch.zeros(320, 1)
    last[:256] = y[:256] if bug else torch.randn(256, 1)  # the ninth column: price, or an honest feature
    if not bug:
        last[256:] = torch.randn(64, 1)
    x = torch.cat([x, last], 1)
    model = nn.Linear(9, 1)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 5e-2),
        "loader": DataLoader(TensorDataset(x[:256], y[:256]), 32, shuffle=True),
        "val_loader": DataLoader(TensorDataset(x[256:], y[256:]), 64),
    }


def make_fixed():
    return make(bug=False)
