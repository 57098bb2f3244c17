"""LambdaLR's function returns the learning rate itself, not a factor: the base lr is multiplied in twice.

source: https://github.com/lhoyer/MIC/issues/60, https://github.com/pytorch/pytorch/issues/78917
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LR = 2e-2


# measured: loss after 40 steps 0.99 against 0.11; lr 0.00031 against 0.016
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    scale = LR if bug else 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: scale * (1 + 0.1 * e) ** -0.75)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "on_epoch_end": scheduler.step,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
