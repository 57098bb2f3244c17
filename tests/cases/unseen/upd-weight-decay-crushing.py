"""weight_decay=0.5 (0.0005 was meant): the weights are pulled to zero and the output becomes a constant.

source: https://github.com/BVLC/caffe/issues/1396
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 1.4 against 0.0014
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = torch.randn(4, 10)[y] + 0.7 * torch.randn(256, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.5 if bug else 5e-4)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": optimizer,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
