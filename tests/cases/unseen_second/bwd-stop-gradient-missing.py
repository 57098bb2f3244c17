"""The target branch of SimSiam is not detached: both branches agree at once on one constant embedding.

source: https://github.com/lightly-ai/lightly/issues/559, https://github.com/PatrickHua/SimSiam/issues/39
stage: backward, loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class SimSiam(nn.Module):
    """Return predictions and projections of two views, (batch, 2, dim) each."""

    def __init__(self, detach):
        super().__init__()
        self.detach = detach
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, x):
        z = [self.encoder(x[:, i]) for i in range(2)]
        p = [self.predictor(v) for v in z]
        z = torch.stack(z, 1)
        return torch.stack(p, 1), z.detach() if self.detach else z


# measured: spread of the unit embeddings after 150 steps 0.05 against 0.22 (0.25 is full)
def make(bug=True):
    torch.manual_seed(0)
    thing = torch.randn(512, 6) @ torch.randn(6, 24)
    x = thing[:, None] + 0.5 * torch.randn(512, 2, 24)
    model = SimSiam(detach=not bug)

    def loss_fn(out, target):
        p, z = out
        return -(F.cosine_similarity(p[:, 0], z[:, 1]).mean() + F.cosine_similarity(p[:, 1], z[:, 0]).mean()) / 2

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "loader": DataLoader(TensorDataset(x, torch.arange(512)), 64, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
