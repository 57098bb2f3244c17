"""A gradient hook is registered inside the training loop: one more each step, and the gradient shrinks to nothing.

source: https://github.com/utkuozbulak/pytorch-cnn-visualizations/pull/68
stage: backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 0.55 against 0.12
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1)) + 1
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def halve():
        for p in model.parameters():
            p.register_hook(lambda g: 0.5 * g)

    if not bug:
        halve()  # once, as meant

    def train_step(model, batch, optimizer, loss_fn, step):
        if bug:
            halve()
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
