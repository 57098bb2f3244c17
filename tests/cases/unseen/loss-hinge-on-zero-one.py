"""A hinge loss wants labels -1/1 and gets 0/1: for label 0 it is the constant 1, so negatives never train.

source: https://github.com/bfortuner/ml-glossary/pull/113, https://github.com/deepchem/deepchem/issues/5017
stage: loss, data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy on label 0 after 40 steps 0.27 against 0.95
def make(bug=True):
    torch.manual_seed(0)
    y = (torch.arange(256) % 2).float()[:, None]
    x = torch.randn(256, 8)
    x[:, :1] += 3 * y - 1.5
    model = nn.Linear(8, 1)

    def loss_fn(out, target):
        sign = target if bug else 2 * target - 1
        return (1 - sign * out).clamp(min=0).mean()

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
