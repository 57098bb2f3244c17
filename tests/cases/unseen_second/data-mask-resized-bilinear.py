"""Class masks are resized with bilinear interpolation: the rim of every object gets classes that are not there.

source: https://github.com/divamgupta/image-segmentation-keras/issues/11,
    https://github.com/shekkizh/FCN.tensorflow/issues/4
stage: data
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def scenes(n):
    """Return images and masks of 24 x 24: two small squares, of class 1 (dim), 2 (striped) or 4 (bright)."""
    x, y = 0.1 * torch.randn(n, 1, 24, 24), torch.zeros(n, 24, 24)
    stripes = (torch.arange(24) % 4 < 2).float()
    for i in range(n):
        for _ in range(2):
            kind, top, left = torch.randint(0, 3, ()).item(), *torch.randint(0, 17, (2,)).tolist()
            box = (slice(top, top + 7), slice(left, left + 7))
            x[i, 0][box] = (0.5, stripes[box[1]], 1.5)[kind]
            y[i][box] = (1, 2, 4)[kind]
    return x, y


# measured: 31 % of the object pixels mislabelled; pixel accuracy there after 150 steps 0.72 against 0.95
def make(bug=True):
    torch.manual_seed(0)
    x, y = scenes(192)
    x = F.interpolate(x, (16, 16), mode="bilinear", align_corners=False)
    mode = {"mode": "bilinear", "align_corners": False} if bug else {"mode": "nearest-exact"}
    y = F.interpolate(y[:, None], (16, 16), **mode)[:, 0].long()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1)
    )
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 16, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
