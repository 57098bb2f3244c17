"""The dice loss is computed on logits where it wants probabilities: it has no lower bound and a pole to fall into.

source: https://github.com/ScrollPrize/villa/pull/1644, https://github.com/jakeret/tf_unet/issues/15
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 80 steps 0.74 and erratic against 0.02; intersection over union 0.86 against 0.98
def make(bug=True):
    torch.manual_seed(0)
    x, y = 0.3 * torch.randn(192, 1, 16, 16), torch.zeros(192, 1, 16, 16)
    for i, (top, left, side) in enumerate(torch.randint(0, 9, (192, 3)).tolist()):
        y[i, 0, top : top + 3 + side, left : left + 3 + side] = 1
    x += y
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )

    def dice_loss(out, target):
        p = out if bug else torch.sigmoid(out)
        overlap = (p * target).sum((1, 2, 3))
        return (1 - (2 * overlap + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

    return {
        "model": model,
        "loss_fn": dice_loss,
        "optimizer": torch.optim.Adam(model.parameters(), 5e-3),
        "loader": DataLoader(TensorDataset(x, y), 16, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
