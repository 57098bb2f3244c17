"""The embeddings are normalised with dim=0, over the batch, so a sample's embedding depends on its neighbours.

source: https://github.com/alireza-nasiri/SoundCLR/issues/4, https://github.com/gabeur/mmt/issues/1
stage: forward
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class CosineClassifier(nn.Module):
    """Class scores are cosines between the embedding and one learnt vector a class."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6))
        self.classes = nn.Parameter(torch.randn(10, 6))

    def forward(self, x):
        return 12 * F.normalize(self.body(x), dim=self.dim) @ F.normalize(self.classes, dim=1).T


# measured: accuracy after 80 steps, one sample at a time, 0.86 against 1.00
def make(bug=True):
    torch.manual_seed(0)
    y = torch.randint(0, 10, (384,))
    x = torch.randn(10, 16)[y] + 0.6 * torch.randn(384, 16)
    model = CosineClassifier(dim=0 if bug else 1)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 5e-3),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
