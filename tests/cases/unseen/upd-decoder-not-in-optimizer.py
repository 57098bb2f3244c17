"""The optimizer is given the encoder's parameters only: the decoder keeps its random weights.

source: https://github.com/zdebruine/MMVAE/issues/39, https://github.com/zjunlp/HVPNeT/issues/5
stage: update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, x):
        return self.decoder(self.encoder(x))


# measured: loss after 40 steps 4.3 against 0.53
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 4) @ torch.randn(4, 16)
    model = AutoEncoder()
    trained = model.encoder if bug else model
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(trained.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, x), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
