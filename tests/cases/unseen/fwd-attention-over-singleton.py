"""softmax runs over an axis of size 1: every attention weight is exactly 1 and the scorer gets no gradient.

source: https://github.com/DEEP-PolyU/KEQA_WSDM19/issues/2
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
        weight = self.score(x).softmax(self.dim)  # (batch, time, 1)
        return self.head((weight * x).sum(1))


# measured: loss after 40 steps 1.2 against 0.044
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(192) % 3
    x = 2 * torch.randn(192, 8, 9)
    x[..., 8] = 0
    at = torch.randint(0, 8, (192,))
    x[torch.arange(192), at] = 0.3 * torch.randn(192, 9) + 2 * torch.eye(9)[y]
    x[torch.arange(192), at, 8] = 4.0
    model = Pool(-1 if bug else 1)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-1),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
