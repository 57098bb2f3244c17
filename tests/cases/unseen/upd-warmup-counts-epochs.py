"""A warm-up of 4000 steps is advanced once per epoch: the learning rate never leaves the bottom of the ramp.

source: https://github.com/coqui-ai/TTS/issues/1611
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 1.2 against 0.15; lr 2.5e-05 against 0.02
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    warmup = 4000 if bug else 4  # epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: min(1.0, (e + 1) / warmup))
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
