"""Gradients are clipped after optimizer.step(): the raw ones are applied and the clipped ones thrown away.

source: https://github.com/jongwook/onsets-and-frames/issues/24, https://github.com/awslabs/graphstorm/issues/1366
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 129 against 29
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = 20 * torch.tanh(x @ torch.randn(10, 1))
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        if bug:
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if not bug:
            optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.05),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
