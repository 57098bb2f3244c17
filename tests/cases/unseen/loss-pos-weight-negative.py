"""pos_weight is computed as (positives - total) / positives: it is negative, so positives are pushed the wrong way.

source: https://github.com/automl/Auto-PyTorch/pull/263
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy on positives after 40 steps 0.014 against 0.96
def make(bug=True):
    torch.manual_seed(0)
    y = (torch.rand(256, 1) < 0.25).float()
    x = torch.randn(256, 6)
    x[:, :1] += 2.5 * y
    positives = y.sum(0)
    negatives = positives - len(y) if bug else len(y) - positives
    model = nn.Linear(6, 1)
    loss_fn = nn.BCEWithLogitsLoss(pos_weight=negatives / positives)
    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
