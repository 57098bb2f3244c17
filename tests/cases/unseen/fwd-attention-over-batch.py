"""Attention weights are normalised with softmax(dim=0), over the batch instead of over the time steps.

source: https://github.com/PetrochukM/PyTorch-NLP/issues/2, https://github.com/catalyst-team/catalyst/pull/285
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.score = nn.Linear(9, 1)
        self.head = nn.Linear(9, 3)

    def forward(self, x):
        weight = self.score(x).squeeze(-1).softmax(self.dim)  # (batch, time)
        return self.head((weight[..., None] * x).sum(1))


# measured: accuracy on samples fed one by one after 40 steps 0.35 against 1
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(192) % 3
    x = 2 * torch.randn(192, 8, 9)
    x[..., 8] = 0
    at = torch.randint(0, 8, (192,))
    x[torch.arange(192), at] = 0.3 * torch.randn(192, 9) + 2 * torch.eye(9)[y]
    x[torch.arange(192), at, 8] = 4.0  # the marker that attention must find
    model = Pool(0 if bug else 1)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-1),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
