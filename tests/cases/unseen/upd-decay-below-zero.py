"""A linear decay is not clamped and its horizon is too short: the learning rate turns negative and training climbs.

source: https://github.com/junyanz/pytorch-CycleGAN-and-pix2pix/issues/1126
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps nan against 0.13; lr -0.3 against 0.09
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    horizon, floor = (10, -1e9) if bug else (400, 0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(floor, 1 - s / horizon))

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "train_step": train_step,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
