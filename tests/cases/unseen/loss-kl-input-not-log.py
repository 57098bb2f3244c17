"""kl_div gets probabilities as input where it wants log-probabilities: it is negative and almost blind to the target.

source: https://github.com/lightly-ai/lightly/pull/1341, https://github.com/pytorch/pytorch/issues/5282
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: true KL after 40 steps 1.1 against 0.13
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    target = (2 * torch.tanh(x @ torch.randn(10, 6))).softmax(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 6))

    def loss_fn(out, soft):
        return F.kl_div(out.softmax(1) if bug else out.log_softmax(1), soft, reduction="batchmean")

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, target), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
