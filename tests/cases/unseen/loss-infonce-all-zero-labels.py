"""In-batch InfoNCE uses labels 0 for every row (right only when the positive is column 0) instead of the diagonal.

source: https://github.com/wangyuxinwhy/uniem/issues/99
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 3.4 against 0.68
def make(bug=True):
    torch.manual_seed(0)
    base = torch.randn(256, 12)
    views = torch.stack([base + 0.3 * torch.randn(256, 12), base + 0.3 * torch.randn(256, 12)], 1)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss_fn(out, _):
        a, b = F.normalize(out, dim=-1).unbind(1)
        labels = torch.zeros(len(a), dtype=torch.long) if bug else torch.arange(len(a))
        return F.cross_entropy(a @ b.T / 0.2, labels)

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 5e-3),
        "batch_coupled": True,
        "loader": DataLoader(TensorDataset(views, torch.arange(256)), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
