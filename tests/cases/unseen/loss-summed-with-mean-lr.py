"""reduction='sum' with a learning rate meant for the mean: each step is 64 times too long and training blows up.

source: https://github.com/ai-safety-foundation/sparse_autoencoder/issues/63
stage: loss, update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps nan against 0.18
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 1))
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    loss_fn = nn.MSELoss(reduction="sum" if bug else "mean")
    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.SGD(model.parameters(), 0.05),
        "loader": DataLoader(TensorDataset(x, y), 64, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
