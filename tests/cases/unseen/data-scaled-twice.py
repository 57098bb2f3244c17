"""Pixels are divided by 255 twice (ToTensor has already scaled them): the inputs lie between 0 and 0.004.

source: https://github.com/facebookresearch/InterHand2.6M/issues/110
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 1.4 against 0.1
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    pixels = (torch.randint(0, 200, (4, 1, 8, 8))[y] + torch.randint(0, 56, (256, 1, 8, 8))).to(torch.uint8)
    x = pixels.float() / 255  # what ToTensor does
    if bug:
        x = x / 255
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "optimizer": torch.optim.SGD(model.parameters(), 0.2),
    }


def make_fixed():
    return make(bug=False)
