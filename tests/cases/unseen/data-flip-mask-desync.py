"""The random horizontal flip is applied to the image but not to its mask, so half of the pixel labels are wrong.

source: https://github.com/albumentations-team/albumentations/issues/549
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, bug):
        self.bug = bug
        self.mask = torch.zeros(64, 1, 12, 12)
        for i in range(64):
            top, left = int(torch.randint(0, 7, ())), int(torch.randint(0, 4, ()))
            self.mask[i, :, top : top + 5, left : left + 4] = 1.0
        self.image = 2 * self.mask + 0.5 * torch.randn(64, 1, 12, 12)

    def __len__(self):
        return 64

    def __getitem__(self, i):
        image, mask = self.image[i], self.mask[i]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
            mask = mask if self.bug else mask.flip(-1)
        return image, mask


# measured: loss after 40 steps 0.36 against 0.018
def make(bug=True):
    torch.manual_seed(0)
    data = Pairs(bug)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    return {
        "model": model,
        "loss_fn": nn.BCEWithLogitsLoss(),
        "loader": DataLoader(data, 16, shuffle=True),
        "dataset": data,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
    }


def make_fixed():
    return make(bug=False)
