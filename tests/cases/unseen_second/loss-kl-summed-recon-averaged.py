"""The VAE averages the squared error over pixels but sums the KL term: the code is worth nothing and collapses.

source: https://github.com/zdebruine/MMVAE/pull/19, https://github.com/keras-team/keras/pull/3383
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    """Return the reconstruction, the mean and the log-variance of the code."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return self.decoder(code), mean, logvar


# measured: after 300 steps KL 0.00 nats and squared error a pixel 1.00, against 4.7 nats and 0.12
def make(bug=True):
    torch.manual_seed(0)
    x = torch.tanh(torch.randn(512, 3) @ torch.randn(3, 64))
    x = x / x.std()
    model = VAE()

    def loss_fn(out, target):
        recon, mean, logvar = out
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()
        if bug:
            return F.mse_loss(recon, target) + kl
        return (F.mse_loss(recon, target, reduction="sum") / 2 + kl) / len(target)

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-3),
        "loader": DataLoader(TensorDataset(x, x), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
