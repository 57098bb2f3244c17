"""Small data: real digits with a fixed split, and seeded synthetic sets."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dxdy_nb.errors import DxdyError, suggestion
from dxdy_nb.runs.environment import digest

DATA = Path(__file__).resolve().parents[2] / "data"


class Batch(NamedTuple):
    """One batch, or one sample: inputs, targets, and the ids by which a finding names a sample."""

    x: Tensor
    y: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Samples(Dataset[Batch]):
    """A data set in memory, in index order.

    Parameters
    ----------
    x : inputs, (N, ...)
    y : targets, (N,), int64
    ids : where each sample stands in the whole data set, (N,), int64
    """

    x: Tensor
    y: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int | slice) -> Batch:
        return Batch(self.x[index], self.y[index], self.ids[index])


@dataclass(frozen=True)
class Splits:
    """Training, validation and test samples of one data set, and how many classes it has."""

    train: Samples
    validation: Samples
    test: Samples
    classes: int

    def described(self) -> dict[str, dict[str, Any]]:
        """Return how many samples each part has, and a digest of what they are.

        Examples
        --------
        >>> load("digits").described()["test"]["samples"]
        299
        """
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: {"samples": len(p), "sha256": digest([p.x, p.y, p.ids])} for name, p in parts.items()}


def load(name: str, seed: int = 0) -> Splits:
    """Return a data set by name: ``digits``, ``spirals`` or ``sequences`` (the last two are drawn from ``seed``).

    Raises
    ------
    DxdyError
        An unknown name, or a data file that is missing or damaged.

    Examples
    --------
    >>> splits = load("digits")
    >>> len(splits.train), len(splits.validation), len(splits.test)
    (1199, 299, 299)
    """
    makers = {"digits": lambda: digits(), "spirals": lambda: spirals(seed), "sequences": lambda: sequences(seed)}
    if name not in makers:
        raise DxdyError(f"no data set is called {name!r}.{suggestion(name, makers)}")
    return makers[name]()


class Shuffled(DistributedSampler[Batch]):
    """A rank's share of an order that seed and epoch alone decide, from a position of it on."""

    start = 0  # samples of this rank that are left out, since they were read before

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Name the epoch, and where in it to start."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(super().__iter__(), self.start, None)


def loader(
    samples: Samples,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> DataLoader[Batch]:
    """Return batches of ``Batch``: in index order, or shuffled in an order that seed and epoch alone decide.

    ``loader.sampler.set_epoch(epoch)`` names the epoch; without it every epoch has the order of the first. Of several
    ranks each reads its share of one order, and samples are read twice where their number is no multiple of the ranks.
    """
    # A generator in any case: without one each pass over the loader would draw from torch's global random state.
    generator = torch.Generator().manual_seed(0)
    if shuffle_seed is None:
        return DataLoader(samples, batch_size, generator=generator)
    return DataLoader(
        samples,
        batch_size,
        sampler=Shuffled(samples, world_size, rank, seed=shuffle_seed),
        generator=generator,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def digits() -> Splits:
    """Return the 1,797 handwritten digits, (N, 1, 8, 8) float32 in [0, 1], in their fixed split.

    Source: Alpaydin and Kaynak 1998; see ``data/DATA_CARD.md``.
    """
    with np.load(verified(DATA / "digits.npz"), allow_pickle=False) as stored:
        x = torch.from_numpy(stored["images"]).float().unsqueeze(1) / 16  # counts of 0..16 ink pixels
        y = torch.from_numpy(stored["labels"]).long()
        parts = {name: torch.from_numpy(stored[name]).long() for name in ("train", "validation", "test")}
    return Splits(**{name: Samples(x[ids], y[ids], ids) for name, ids in parts.items()}, classes=10)


def verified(path: Path) -> Path:
    """Return the path of a data file after comparing its sha256 with ``SHA256SUMS`` beside it.

    Raises
    ------
    DxdyError
        One of the two is missing or damaged.
    """
    known = path.with_name("SHA256SUMS")
    restore = f"Restore it with: git checkout -- {path.parent.name}"
    try:
        sums = {name: digest for digest, name in (line.split() for line in known.read_text().splitlines())}
        expected = sums[path.name]
    except OSError as error:
        raise DxdyError(f"{known}: cannot be read ({error.strerror}). {restore}/{known.name}") from None
    except (ValueError, KeyError):
        raise DxdyError(f"{known}: damaged, it holds no sha256 of {path.name}. {restore}/{known.name}") from None
    try:
        seen = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise DxdyError(f"{path}: missing. {restore}/{path.name}") from None
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}). {restore}/{path.name}") from None
    if seen != expected:
        raise DxdyError(
            f"{path}: damaged. Its sha256 is {seen[:12]}…, SHA256SUMS says {expected[:12]}…. {restore}/{path.name}"
        )
    return path


def spirals(seed: int = 0, per_class: int = 200, classes: int = 3, noise: float = 0.15) -> Splits:
    """Return points on interleaved spiral arms, (N, 2) float32: no straight line separates them."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat_interleave(per_class)
    radius = torch.linspace(0.05, 1, per_class).repeat(classes)
    wobble = noise * torch.randn(len(y), generator=generator)
    angle = 4 * radius + y * (2 * torch.pi / classes) + wobble
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)  # (N, 2)
    return _split(x, y, classes, generator)


def sequences(seed: int = 0, count: int = 1500, length: int = 12, symbols: int = 8) -> Splits:
    """Return token sequences, (N, length) int64; the target is the first token, so the net must carry it to the end."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(symbols, (count, length), generator=generator)
    return _split(x, x[:, 0].clone(), symbols, generator)


def _split(x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> Splits:
    order = torch.randperm(len(y), generator=generator)
    sixth = len(y) // 6
    parts = {"validation": order[:sixth], "test": order[sixth : 2 * sixth], "train": order[2 * sixth :]}
    return Splits(**{name: Samples(x[ids], y[ids], ids) for name, ids in parts.items()}, classes=classes)
