"""The EMA update adds the gap instead of subtracting it: the average runs away from the weights it should follow.

source: https://github.com/ostris/ai-toolkit/issues/1034
stage: update, reproduce
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: largest gap between EMA and weights after 40 steps 4.3 against 0.062
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    ema = copy.deepcopy(model).requires_grad_(False)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for s, p in zip(ema.parameters(), model.parameters(), strict=True):
                gap = 0.1 * (s - p)
                s.add_(gap if bug else -gap)
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
        "ema_model": ema,
    }


def make_fixed():
    return make(bug=False)
