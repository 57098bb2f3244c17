"""ReduceLROnPlateau(mode="max") is fed the loss: every epoch in which the loss falls counts as no improvement.

source: https://github.com/FunctionLab/selene/issues/115, https://github.com/facebookresearch/fairseq/issues/2205
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 0.39 against 0.22; lr 3e-06 against 0.03
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(128, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.03)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max" if bug else "min", factor=0.1, patience=1)
    loss_fn = nn.MSELoss()

    def on_epoch_end():
        with torch.no_grad():
            scheduler.step(loss_fn(model(x), y).item())

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "on_epoch_end": on_epoch_end,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
