"""A set-up to begin with: copy it, put your own model in, and try ``dxdy preflight my_setup:make``."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dxdy_nb.training import datasets, models


def make():
    """Build everything that a training needs, anew in each process; what is random is seeded here."""
    torch.manual_seed(0)
    data = datasets.load("spirals")
    model = models.MLP(features=2, classes=3)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), lr=3e-3),
        "loader": DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=32, shuffle=True),
        "val_loader": DataLoader(TensorDataset(data.validation.x, data.validation.y), batch_size=64),
    }
