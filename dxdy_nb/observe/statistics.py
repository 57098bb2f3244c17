"""Statistics of many gradients in one pass of numpy, on one thread.

Measured on CPUs, numpy over blocks that stay in cache is cheaper than torch's own reductions, and an ``isfinite``
over the data costs more than all of the rest. Any NaN or infinity poisons the sums, so those few numbers are tested
instead, and values are counted only where a sum is not finite.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The order of the numbers in a row; `observe.trace` stores rows as they are.
COLUMNS = ("mean", "max", "min", "norm", "nonzero", "nonfinite")
BLOCK = 65536  # elements: 256 kB of float32, which stays in a core's own cache
SMALL = 16384  # tensors up to this size are joined first: a call per tensor would cost more than its data


def describe(tensors: Sequence[Tensor | None]) -> NDArray[np.float64]:
    """Return mean, max, min, L2 norm, share of non-zero and count of non-finite values, a row for each tensor.

    A missing tensor is a row of NaN, not of zeros. A sparse tensor counts as the dense one it stands for. Complex
    values count as pairs of real ones.

    Examples
    --------
    >>> describe([torch.tensor([3.0, 0.0, -4.0]), None])[0].round(3).tolist()
    [-0.333, 3.0, -4.0, 5.0, 0.667, 0.0]
    """
    rows = np.full((len(tensors), len(COLUMNS)), np.nan)
    small: list[tuple[int, NDArray[np.floating]]] = []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        values, size = _flat(tensor)
        if size != values.size or values.size > SMALL or values.size == 0 or values.dtype != np.float32:
            rows[place] = _row(values, size)
        else:
            small.append((place, values))
    if small:
        rows[[place for place, _ in small]] = _rows([values for _, values in small])
    return rows


def total_norm(rows: NDArray[np.float64]) -> float:
    """Return the L2 norm over all tensors together, as ``clip_grad_norm_`` would; NaN when there is none."""
    norms = rows[:, COLUMNS.index("norm")]
    known = norms[~np.isnan(norms) | (rows[:, COLUMNS.index("nonfinite")] > 0)]
    return float(np.sqrt(np.dot(known, known))) if len(known) else float("nan")


def _flat(tensor: Tensor) -> tuple[NDArray[np.floating], int]:
    """Return a tensor's values as a flat array without copying where that is possible, and its number of elements."""
    tensor = tensor.detach()
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()  # numpy knows no bfloat16
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # the same values in the order in which they lie
    return tensor.cpu().contiguous().view(-1).numpy(), size


def _rows(arrays: list[NDArray[np.floating]]) -> NDArray[np.float64]:
    """Return the rows of many small float32 arrays: joined, then reduced piece by piece."""
    flat = np.concatenate(arrays)
    sizes = np.array([len(a) for a in arrays])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    wide = flat.astype(np.float64)  # float32 sums of small pieces would lose digits that float64 keeps
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(wide, starts)
        squares = np.add.reduceat(wide * wide, starts)
    rows = np.empty((len(arrays), len(COLUMNS)))
    rows[:, 0] = sums / sizes
    rows[:, 1] = np.maximum.reduceat(flat, starts)
    rows[:, 2] = np.minimum.reduceat(flat, starts)
    rows[:, 3] = np.sqrt(squares)
    rows[:, 4] = np.add.reduceat(flat != 0, starts, dtype=np.intp) / sizes
    rows[:, 5] = 0
    for place in np.flatnonzero(~np.isfinite(sums) | ~np.isfinite(squares)):
        rows[place, 5] = np.count_nonzero(~np.isfinite(arrays[place]))
    return rows


def _row(values: NDArray[np.floating], size: int) -> NDArray[np.float64]:
    """Return the row of one large array, block by block; ``size`` exceeds its length for a sparse tensor."""
    if size == 0:
        return np.array([np.nan, np.nan, np.nan, 0.0, np.nan, 0.0])
    total, squares, nonzero = 0.0, 0.0, 0
    low, high = (np.inf, -np.inf) if values.size == size else (0.0, 0.0)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            ones = np.ones(block.size, block.dtype)
            total += float(np.dot(block, ones))  # dot is vectorised, add.reduce is not
            squares += float(np.dot(block, block))
            nonzero += int(np.count_nonzero(block))
            low, high = np.minimum(low, block.min()), np.maximum(high, block.max())  # both keep a NaN
        nonfinite = 0
        if not np.isfinite(total) or not np.isfinite(squares):
            nonfinite = int(np.count_nonzero(~np.isfinite(values)))
            if nonfinite == 0:  # finite values whose squares overflow: once more in float64
                wide = values.astype(np.float64)
                total, squares = float(wide.sum()), float(np.dot(wide, wide))
    return np.array([total / size, high, low, np.sqrt(squares), nonzero / size, nonfinite])
