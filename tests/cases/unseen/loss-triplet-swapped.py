"""Positive and negative are swapped in the triplet loss: items of one class are pushed apart.

source: https://github.com/clovaai/voxceleb_trainer/issues/113
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


# measured: share of anchors closer to their positive after 40 steps 0.32 against 0.98
def make(bug=True):
    torch.manual_seed(0)
    kind = torch.arange(240) % 4
    other = (kind + torch.randint(1, 4, (240,))) % 4
    centre = 1.5 * torch.randn(4, 10)
    anchor, positive, negative = (centre[k] + 1.2 * torch.randn(240, 10) for k in (kind, kind, other))
    x = torch.stack([anchor, positive, negative], 1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))

    def loss_fn(out, kinds):  # out: (batch, 3, 4); kinds: the class of anchor, positive, negative
        a, p, n = out.unbind(1)
        return F.triplet_margin_loss(a, n, p) if bug else F.triplet_margin_loss(a, p, n)

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 5e-3),
        "loader": DataLoader(TensorDataset(x, torch.stack([kind, kind, other], 1)), 40, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
