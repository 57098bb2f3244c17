"""WeightedRandomSampler is given the class frequencies instead of their inverse: the rare class is drawn rarer still.

source: https://github.com/pytorch/pytorch/issues/116117, https://github.com/deep-voice/soundbay/pull/49
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


# measured: validation loss after 40 steps 1 against 0.37
def make(bug=True):
    torch.manual_seed(0)
    y = (torch.arange(400) % 10 == 0).long()
    x = torch.randn(400, 6)
    x[:, 0] += 2.0 * y
    data = TensorDataset(x, y)
    count = torch.bincount(y).double()
    weight = count[y] if bug else 1 / count[y]
    yv = torch.arange(200) % 2
    xv = torch.randn(200, 6)
    xv[:, 0] += 2.0 * yv
    model = nn.Linear(6, 2)
    loader = DataLoader(data, 40, sampler=WeightedRandomSampler(weight, len(data)))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": loader,
        "dataset": data,
        "val_loader": DataLoader(TensorDataset(xv, yv), 50),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
    }


def make_fixed():
    return make(bug=False)
