"""The mean over the batch is divided by the batch size once more: gradients are 64 times too small for the lr.

source: https://github.com/jfzhang95/pytorch-deeplab-xception/issues/55
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy after 40 steps 0.46 against 1
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = 1.5 * torch.randn(4, 10)[y] + torch.randn(256, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss_fn(out, target):
        loss = F.cross_entropy(out, target)
        return loss / len(out) if bug else loss

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.SGD(model.parameters(), 0.2),
        "loader": DataLoader(TensorDataset(x, y), 64, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
