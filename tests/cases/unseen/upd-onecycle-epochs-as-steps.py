"""OneCycleLR is stepped per batch but its total_steps is the number of epochs: it raises when the cycle is over.

source: https://github.com/ScrollPrize/villa/pull/1495, https://github.com/vLAR-group/GrowSP/issues/11
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: raises ValueError in step 16; the twin's loss after 40 steps is 0.13
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    total = 15 if bug else 150 * len(loader)  # the bug: a count of epochs
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=total, pct_start=0.02)

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
        "loader": loader,
    }


def make_fixed():
    return make(bug=False)
