"""Masks are stored width by height and images height by width: every square target is transposed.

source: https://github.com/dattran2346/chestX-ray-14/issues/6, https://github.com/pytorch/vision/pull/6433
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 0.33 against 0.013
def make(bug=True):
    torch.manual_seed(0)
    mask = torch.zeros(96, 16, 16, dtype=torch.long)
    for i in range(96):
        top, left = int(torch.randint(0, 12, ())), int(torch.randint(0, 6, ()))
        mask[i, top : top + 3, left : left + 9] = 1
    image = 2.0 * mask[:, None] + 0.5 * torch.randn(96, 1, 16, 16)
    if bug:
        mask = mask.transpose(1, 2).contiguous()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(image, mask), 16, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
