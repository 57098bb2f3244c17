"""The mean is subtracted while the pixels are still uint8: every pixel below the mean wraps round to a bright one.

source: https://github.com/ybarancan/efficient_spectral_cnn/issues/5, https://github.com/LCAV/LenslessPiCam/pull/173
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 2.6 against 0.18
def make(bug=True):
    torch.manual_seed(0)
    pixels = torch.randint(60, 196, (256, 16)).to(torch.uint8)
    y = (pixels.float() - 128) @ torch.randn(16, 1) / 64
    centred = pixels - 128 if bug else pixels.float() - 128
    x = centred.float() / 64
    model = nn.Linear(16, 1)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 5e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
