"""padding_idx=0 although 0 is a real entity: its embedding is stuck at zero and its scores can never be learned.

source: https://github.com/ibalazevic/TuckER/issues/17, https://github.com/bowang-lab/scGPT/issues/266
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Factors(nn.Module):
    def __init__(self, padding_idx):
        super().__init__()
        self.left = nn.Embedding(4, 8, padding_idx=padding_idx)
        self.right = nn.Embedding(24, 8)

    def forward(self, pair):
        return (self.left(pair[:, 0]) * self.right(pair[:, 1])).sum(-1)


# measured: squared error on entity 0 after 40 steps 4.3 against 0.3
def make(bug=True):
    torch.manual_seed(0)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(24))
    truth = 2 * nn.functional.normalize(torch.randn(4, 3)) @ torch.randn(3, 24)
    model = Factors(0 if bug else None)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 5e-2),
        "loader": DataLoader(TensorDataset(pairs, truth.flatten()), 24, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
