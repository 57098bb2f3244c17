"""The generator's loss asks the discriminator for the label "fake": it learns to be found out.

source: https://github.com/ptran1203/pytorch-animeGAN/issues/17,
    https://github.com/shaohua0116/DCGAN-Tensorflow/issues/5
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(nn.Module):
    """A generator of points in the plane and its discriminator."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z):
        return self.generator(z)


# measured: distance of the mean fake from the mean real point after 300 steps 8.8 against 0.2
def make(bug=True):
    torch.manual_seed(0)
    points = torch.tensor([2.0, -1.5]) + 0.5 * torch.randn(512, 2)
    model = GAN()
    opt_g = torch.optim.Adam(model.generator.parameters(), 2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(model.discriminator.parameters(), 2e-3, betas=(0.5, 0.9))

    def train_step(model, batch, optimizer, loss_fn, step):
        n = len(batch[0])
        real, fake = torch.ones(n, 1), torch.zeros(n, 1)
        made = model.generator(torch.randn(n, 4))
        opt_d.zero_grad()
        loss_d = loss_fn(model.discriminator(batch[0]), real) + loss_fn(model.discriminator(made.detach()), fake)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = loss_fn(model.discriminator(made), fake if bug else real)
        loss_g.backward()
        opt_g.step()
        return loss_g

    return {
        "model": model,
        "loss_fn": nn.BCEWithLogitsLoss(),
        "optimizer": opt_g,
        "optimizers": [opt_g, opt_d],
        "loader": DataLoader(TensorDataset(points), 64, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
