"""log_softmax(dim=0) normalises each class over the batch: what a sample should score depends on its neighbours.

source: https://github.com/DonkeyShot21/UNO/issues/4, https://github.com/perone/euclidesdb/issues/2
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 2.2 against 0.006
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = 1.5 * torch.randn(4, 10)[y] + torch.randn(256, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss_fn(out, target):
        return F.nll_loss(F.log_softmax(out, dim=0 if bug else 1), target)

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
