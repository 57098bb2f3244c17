"""__getitem__ augments the stored sample in place, so the noise of every epoch piles up in the data set.

source: https://github.com/facebookresearch/pycls/pull/21, https://github.com/mindee/doctr/issues/840
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Jittered(Dataset):
    def __init__(self, bug):
        self.bug = bug
        self.y = torch.arange(64) % 4
        self.x = torch.randn(4, 16)[self.y] + 0.3 * torch.randn(64, 16)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = self.x[i] if self.bug else self.x[i].clone()
        x += 0.8 * torch.randn(16)
        return x, self.y[i]


# measured: loss after 40 steps 0.96 against 0.099
def make(bug=True):
    torch.manual_seed(0)
    data = Jittered(bug)
    model = nn.Linear(16, 4)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": DataLoader(data, 16, shuffle=True),
        "dataset": data,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
    }


def make_fixed():
    return make(bug=False)
