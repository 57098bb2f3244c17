"""Tiny set-ups that the cases change in one place."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases.registry import Setup


def batches(x: Tensor, y: Tensor, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Return the samples in batches, in their order."""
    return list(zip(x.split(size), y.split(size), strict=True))


def shuffled(x: Tensor, y: Tensor, size: int = 16, **options: Any) -> DataLoader:
    """Return a loader that shuffles."""
    return DataLoader(TensorDataset(x, y), size, shuffle=True, **options)


def mlp(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these widths with an activation between them."""
    layers = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), between())]
    return nn.Sequential(*layers[:-1])


def clusters(classes: int = 3, samples: int = 96, width: int = 8, apart: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return points around one centre for each class, in turn, and their classes."""
    y = torch.arange(samples) % classes
    return apart * torch.randn(classes, width)[y] + torch.randn(samples, width), y


def quadrants(samples: int = 256) -> tuple[Tensor, Tensor]:
    """Return points of a square and whether their coordinates have one sign: no straight line parts them."""
    x = 2 * torch.rand(samples, 2) - 1
    return x, (x[:, 0] * x[:, 1] > 0).long()


def regression(
    *, x: Tensor | None = None, y: Tensor | None = None, model: nn.Module | None = None, lr: float = 0.04, **more: Any
) -> Setup:
    """Return a small regression: a linear target of six numbers, one hidden layer, plain SGD."""
    x = torch.randn(64, 6) if x is None else x
    y = x @ torch.randn(x.shape[1], 1) if y is None else y
    model = mlp(x.shape[1], 20, 1) if model is None else model
    optimizer = more.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": batches(x, y), "optimizer": optimizer, **more}


def classification(
    *, x: Tensor | None = None, y: Tensor | None = None, model: nn.Module | None = None, lr: float = 0.01, **more: Any
) -> Setup:
    """Return a small classification: three clusters, one hidden layer, Adam."""
    if x is None or y is None:
        x, y = clusters()
    model = mlp(x.shape[1], 24, int(y.max()) + 1) if model is None else model
    optimizer = more.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": batches(x, y), "optimizer": optimizer, **more}


def plain_step(model: nn.Module, batch: Any, optimizer: Any, loss_fn: Any, step: int) -> Tensor:
    """Train on one batch, as every loop does."""
    optimizer.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
