"""The log-variance term of the VAE's KL has the wrong sign: the loss falls without bound as the variance goes to 0.

source: https://github.com/FluxML/model-zoo/pull/147
stage: loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))
        self.dec = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 10))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.dec(z), mu, logvar


# measured: posterior std after 40 steps 0.036 against 0.46
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 3) @ torch.randn(3, 10)

    def loss_fn(out, target):
        recon, mu, logvar = out
        sign = 1 if bug else -1
        kl = 0.5 * (logvar.exp() + mu**2 - 1 + sign * logvar).sum(1).mean()
        return F.mse_loss(recon, target, reduction="sum") / len(target) + kl

    model = VAE()
    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, x), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
