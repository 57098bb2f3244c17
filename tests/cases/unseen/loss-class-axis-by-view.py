"""(batch, time, class) logits are viewed, not permuted, to (batch, class, time): scores and labels are scrambled.

source: https://github.com/weirme/FCSN/issues/32, https://github.com/yihong-97/Source-free-IAPC/pull/6
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy after 40 steps 0.51 against 1
def make(bug=True):
    torch.manual_seed(0)
    y = torch.randint(0, 5, (192, 7))
    x = torch.randn(5, 10)[y] * 1.5 + torch.randn(192, 7, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))

    def loss_fn(out, target):
        scores = out.reshape(len(out), 5, 7) if bug else out.permute(0, 2, 1)
        return F.cross_entropy(scores, target)

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
