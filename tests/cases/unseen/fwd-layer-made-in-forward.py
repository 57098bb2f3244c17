"""A Linear is created inside forward(): it is new and random at every call and never trained.

source: https://github.com/graykode/nlp-tutorial/issues/29
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.first = nn.Linear(10, 24)
        self.middle = None if bug else nn.Linear(24, 24)
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        middle = nn.Linear(24, 24) if self.bug else self.middle
        return self.last(torch.relu(middle(torch.relu(self.first(x)))))


# measured: loss after 40 steps 1.3 against 0.0016
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = 1.5 * torch.randn(4, 10)[y] + torch.randn(256, 10)
    model = Net(bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
