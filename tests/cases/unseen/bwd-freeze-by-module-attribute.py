"""backbone.requires_grad = False sets an attribute on the Module and freezes no parameter: the backbone is trained.

source: https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18
stage: backward, update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: largest change of a backbone weight in 40 steps 0.37 against 0
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = 1.5 * torch.randn(4, 10)[y] + torch.randn(256, 10)
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 48), nn.ReLU()), nn.Linear(48, 4))
    if bug:
        model[0].requires_grad = False
    else:
        model[0].requires_grad_(False)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 2e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
