"""The same statistics of tensors on an accelerator: few kernels, no waiting, read later.

There a kernel costs its launch and a number costs the wait for it, while reading memory costs next to nothing. So the
tensors are joined, cut into rows of one length, and reduced row by row; the results travel while training goes on.

Nothing here is particular to a device, and all of it is tested on tensors in a CPU's memory. It has not been run on a
GPU.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW = 4096  # elements
GROUP = 4096 * ROW  # elements that are joined at once: 64 MB


@dataclass(frozen=True)
class Pending:
    """Statistics that are on their way: of some tensors of one device and type, which have these places in a list."""

    places: list[int]
    sizes: list[int]  # elements; more than the values that are stored, for a sparse tensor
    stored: list[int]
    found: Tensor  # (6, rows), in this machine's memory once the event has happened
    happened: torch.Event | None

    @property
    def ready(self) -> bool:
        """Whether they have arrived."""
        return self.happened is None or self.happened.query()

    def rows(self) -> NDArray[np.float64]:
        """Return mean, max, min, norm, share of non-zero and count of non-finite values; wait if need be."""
        if self.happened is not None:
            self.happened.synchronize()
        cuts = np.cumsum([-(-n // ROW) for n in self.stored])[:-1]
        parts = np.split(self.found.double().numpy(), cuts, axis=1)
        with np.errstate(all="ignore"):
            return np.array([_row(*each) for each in zip(parts, self.sizes, self.stored, strict=True)])


def _row(part: NDArray[np.float64], size: int, stored: int) -> list[float]:
    """Return the row of one tensor, from what was found in its pieces."""
    if not size:
        return [np.nan, np.nan, np.nan, 0.0, np.nan, 0.0]
    total, square, high, low, nonzero, nonfinite = part
    scale = _scale(torch.from_numpy(high), torch.from_numpy(low)).numpy()
    peak = scale.max(initial=0.0) or 1.0
    norm = peak * np.sqrt((square * (scale / peak) ** 2).sum())
    unstored = [0.0] if stored < size else []
    high, low = np.append(high, unstored).max(), np.append(low, unstored).min()
    return [(total * scale).sum() / size, high, low, norm, nonzero.sum() / size, nonfinite.sum()]


def reduce(tensors: Mapping[int, Tensor]) -> list[Pending]:
    """Start to reduce the tensors at some places of a list."""
    values = {place: _values(tensor.detach()) for place, tensor in tensors.items()}
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, (flat, _) in values.items():
        kinds.setdefault((flat.device, flat.dtype), []).append(place)
    return [_start(places, [values[place] for place in places]) for places in kinds.values()]


def _start(places: list[int], values: list[tuple[Tensor, int]]) -> Pending:
    flats = [flat for flat, _ in values]
    device = flats[0].device
    parts = [_reduce(group) for group in _groups(flats)]
    found = torch.cat(parts, 1) if parts else torch.empty(6, 0)
    arrived = found.to("cpu", non_blocking=True)  # from an accelerator this allocates pinned memory
    happened = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
    return Pending(places, [size for _, size in values], [flat.numel() for flat in flats], arrived, happened)


def _groups(flats: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield pieces of the tensors, as many at a time as may be joined."""
    group: list[Tensor] = []
    filled = 0
    for piece in itertools.chain.from_iterable(flat.split(GROUP) for flat in flats if flat.numel()):
        length = -(-piece.numel() // ROW) * ROW
        if filled + length > GROUP:
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += length
    if group:
        yield group


def _reduce(pieces: list[Tensor]) -> Tensor:
    """Return sum, sum of squares, max, min, number of non-zero and of non-finite values of each row.

    The two sums are in units of the row's largest value and of its square: nothing overflows.
    """
    device = pieces[0].device
    zeros = pieces[0].new_zeros(ROW)
    joined = torch.cat([part for piece in pieces for part in (piece, zeros[: -piece.numel() % ROW])])
    rows = joined.view(-1, ROW)
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()
    low, high = rows.aminmax(dim=1)
    # The zeros that fill up a last row are none of its values.
    last = torch.tensor(list(itertools.accumulate(-(-piece.numel() // ROW) for piece in pieces)), device=device) - 1
    used = torch.tensor([(piece.numel() - 1) % ROW + 1 for piece in pieces], device=device)
    filling = torch.arange(ROW, device=device) >= used[:, None]
    high[last] = rows[last].masked_fill(filling, -torch.inf).amax(1)
    low[last] = rows[last].masked_fill(filling, torch.inf).amin(1)
    scaled = rows / _scale(high, low)[:, None]
    nonfinite = ROW - rows.isfinite().sum(1)  # by the time the sums are read the gradient is gone: count now
    return torch.stack([scaled.sum(1), scaled.square().sum(1), high, low, rows.count_nonzero(1), nonfinite])


def _scale(high: Tensor, low: Tensor) -> Tensor:
    scale = torch.maximum(high.abs(), low.abs())
    return torch.where((scale > 0) & (scale < torch.inf), scale, 1)


def _values(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor's values as a flat tensor, in the order in which they lie, and its number of elements."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1), size
