"""The global seed is set again at the end of every epoch: each epoch repeats the same order and the same dropout.

source: https://github.com/pytorch/ignite/issues/851, https://github.com/EleutherAI/bergson/pull/352
stage: reproduce, data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: distinct orders in 3 epochs 1 against 3
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(128) % 4
    x = 1.5 * torch.randn(4, 10)[y] + torch.randn(128, 10)
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4))

    def on_epoch_end():
        if bug:
            torch.manual_seed(0)

    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 16, shuffle=True),
        "on_epoch_end": on_epoch_end,
    }


def make_fixed():
    return make(bug=False)
