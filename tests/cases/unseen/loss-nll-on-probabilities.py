"""NLLLoss is fed softmax probabilities, not their logarithm: the loss is -p and wrong samples get almost no gradient.

source: https://github.com/clvrai/ACGAN-PyTorch/issues/3
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy after 40 steps 0.54 against 0.99
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 12
    x = 1.5 * torch.randn(12, 12)[y] + torch.randn(256, 12)
    last = nn.Softmax(dim=1) if bug else nn.LogSoftmax(dim=1)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12), last)
    return {
        "model": model,
        "loss_fn": nn.NLLLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.3),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
