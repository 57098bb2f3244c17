"""Training images are RGB, validation images come from another reader in BGR: red and blue objects change places.

source: https://github.com/TreB1eN/InsightFace_Pytorch/issues/92, https://github.com/richzhang/colorization/issues/30
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def images(n):
    """Noise with a reddish cast and one square whose colour is the class."""
    y = torch.randint(0, 3, (n,))
    x = 0.15 * torch.rand(n, 3, 12, 12) + torch.tensor([0.40, 0.30, 0.20]).view(3, 1, 1)
    for i, (top, left) in enumerate(torch.randint(0, 8, (n, 2)).tolist()):
        x[i, y[i], top : top + 4, left : left + 4] += 0.5
    return x, y


# measured: validation accuracy after 80 steps 0.60 against 1.00, at one and the same training loss
def make(bug=True):
    torch.manual_seed(0)
    x, y = images(384)
    xv, yv = images(96)
    if bug:
        xv = xv.flip(1)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "val_loader": DataLoader(TensorDataset(xv, yv), 32),
    }


def make_fixed():
    return make(bug=False)
