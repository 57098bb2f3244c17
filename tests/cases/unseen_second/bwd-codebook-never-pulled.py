"""The VQ loss has only the commitment term, with the codes detached: nothing ever moves the codebook.

source: https://github.com/facebookresearch/multimodal/pull/29
stage: backward, loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VQVAE(nn.Module):
    """Return the reconstruction, the code before quantisation and the chosen codebook entry."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False))
        self.codebook = nn.Embedding(16, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        nn.init.normal_(self.codebook.weight, std=0.02)

    def forward(self, x):
        z = self.encoder(x)
        code = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
        return self.decoder(z + (code - z).detach()), z, code


# measured: squared error a feature after 300 steps 0.55 against 0.09
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(8, 32)[torch.randint(0, 8, (512,))] + 0.3 * torch.randn(512, 32)
    model = VQVAE()

    def loss_fn(out, target):
        recon, z, code = out
        loss = F.mse_loss(recon, target) + 0.25 * F.mse_loss(z, code.detach())
        return loss if bug else loss + F.mse_loss(code, z.detach())

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 5e-3),
        "loader": DataLoader(TensorDataset(x, x), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
