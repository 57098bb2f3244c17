"""Dropout is applied to the output logits: half of the class scores are zeroed at random in every step.

source: https://github.com/maddin79/darch/issues/12, https://github.com/PaddlePaddle/Parakeet/pull/75
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 0.59 against 0.055
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 5
    x = 2 * torch.randn(5, 12)[y] + torch.randn(256, 12)
    layers = [nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5)]
    if bug:
        layers[2:] = [layers[3], layers[2]]
    model = nn.Sequential(*layers)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
