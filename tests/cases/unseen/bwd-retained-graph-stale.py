"""Losses are summed over the steps and backward(retain_graph=True) runs through graphs whose weights have changed.

source: https://github.com/quark0/darts/issues/56, https://github.com/Eurus-Holmes/MNMT/issues/7
stage: backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: raises RuntimeError in step 2; the twin's loss after 40 steps is 0.16
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = torch.tanh(x @ torch.randn(8, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    running = []

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        running.append(loss if bug else loss.detach())
        optimizer.zero_grad()
        if bug:
            (sum(running) / len(running)).backward(retain_graph=True)
        else:
            loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
