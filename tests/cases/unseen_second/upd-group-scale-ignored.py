"""The layer-wise factor lr_scale is put into the parameter groups, but no optimizer reads it: all share one rate.

source: https://github.com/facebookresearch/ConvNeXt-V2/issues/40
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LR = 0.2


# measured: loss after 40 steps 0.67 against 0.09
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(384, 16)
    backbone = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())  # stands for a trained one
    for layer in (backbone[0], backbone[2]):
        nn.init.orthogonal_(layer.weight, 1.4)
    with torch.no_grad():
        y = (backbone(x) @ torch.randn(64, 4)).argmax(1)
    model = nn.Sequential(backbone, nn.Linear(64, 4))
    groups = [
        {"params": backbone[0].parameters(), "lr_scale": 0.0025},
        {"params": backbone[2].parameters(), "lr_scale": 0.01},
        {"params": model[1].parameters(), "lr_scale": 1.0},
    ]
    if not bug:
        for group in groups:
            group["lr"] = LR * group["lr_scale"]
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(groups, LR),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
