"""The sampler permutes only the first half of the indices: two of the four classes are never seen in training.

source: https://github.com/milesial/Pytorch-UNet/pull/46
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Shuffled(Sampler):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


# measured: validation loss after 40 steps 1 against 0.014
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) // 64
    x = 2 * torch.randn(4, 12)[y] + torch.randn(256, 12)
    data = TensorDataset(x, y)
    sampler = Shuffled(len(data) // 2 if bug else len(data))
    model = nn.Linear(12, 4)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": DataLoader(data, 32, sampler=sampler),
        "dataset": data,
        "val_loader": DataLoader(data, 64),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
    }


def make_fixed():
    return make(bug=False)
