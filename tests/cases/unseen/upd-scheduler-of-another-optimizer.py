"""The optimizer is rebuilt after the scheduler was made: the scheduler turns the lr of an optimizer nobody steps.

source: https://github.com/airaria/TextBrewer/issues/12
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss on all data after 40 steps 0.97 against 0.81; lr 0.12 against 0.015
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(80, 10)
    y = x @ torch.randn(10, 1) + torch.randn(80, 1)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.12)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if bug:
        optimizer = torch.optim.SGD(model.parameters(), 0.12)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "on_epoch_end": scheduler.step,
        "loader": DataLoader(TensorDataset(x, y), 8, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
