"""What loaders hand on to a loop: batches, how long each took, and which samples are in them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


@dataclass(frozen=True)
class Loader:
    """A ``DataLoader`` that a loop used, and how often it began to go through it."""

    batch_size: int | None
    workers: int
    persistent: bool
    pinned: bool
    epochs: int

    @property
    def restarts(self) -> bool:
        """Whether its worker processes are started anew for each epoch."""
        return self.workers > 0 and not self.persistent


def described(loader: DataLoader[Any], epochs: int) -> Loader:
    """Return what is to be known of a loader."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return Loader(size, loader.num_workers, loader.persistent_workers, loader.pin_memory, epochs)


def likeness(loader: DataLoader[Any]) -> object:
    """Return what a loader has in common with one that is built anew for the same purpose."""
    data = loader.dataset
    try:
        length = None if isinstance(data, IterableDataset) else len(data)  # type: ignore[arg-type]
    except Exception:  # with a sampler of its own a dataset needs no length
        length = None
    return type(data), length, loader.batch_size, type(loader.sampler)


def is_one_shot(loader: Any) -> bool:
    """Return whether a loader is an iterator: what is read from it is gone."""
    return hasattr(loader, "__next__") and iter(loader) is loader


class Fetches:
    """A loader's iterator whose batches are fetched by ``fetch(iterator)``; everything else is the iterator's own."""

    def __init__(self, iterator: Iterator[Any], fetch: Callable[[Iterator[Any]], Any]) -> None:
        self._iterator, self._fetch = iterator, fetch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._fetch(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def sample_ids(batch: Any) -> Tensor | None:
    """Return the ids of a batch's samples: its field ``ids``, if it is a named tuple with one; else nobody knows."""
    ids = getattr(batch, "ids", None) if isinstance(batch, tuple) else None  # another may know no AttributeError
    return ids.reshape(-1) if torch.is_tensor(ids) else None  # of a single sample: 0-d


def bad_samples(batch: Any) -> list[int]:
    """Return the ids of a batch's samples whose own values are not finite; all its ids when every value is finite."""
    ids = sample_ids(batch)
    if ids is None:
        return []
    bad = torch.zeros(len(ids), dtype=torch.bool, device="cpu")  # whatever the default is
    for part in batch:
        if torch.is_tensor(part) and part.is_floating_point() and part.dim() and len(part) == len(ids):
            bad |= ~torch.isfinite(part.cpu()).flatten(1).all(1) if part.dim() > 1 else ~torch.isfinite(part.cpu())
    chosen = ids[bad] if bad.any() else ids
    return [int(i) for i in chosen]


def batch_size(values: Iterable[Any]) -> int:
    """Return the first dimension of the first tensor that a forward was called with; 0 when there is none."""
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return value.size(0)  # a nested tensor has no shape
    return 0
