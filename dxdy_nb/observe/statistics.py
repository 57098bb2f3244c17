"""Statistics of many gradients in one pass of numpy, on one thread.

Measured on CPUs, within a training step: what costs is neither the data nor the arithmetic but calling many small
operations whose code the step has pushed out of the cache. So the tensors are joined in memory that is kept, and
each statistic is one call for all of them; only large tensors are read on their own, in blocks that stay in cache.

An ``isfinite`` over the data would cost more than all the rest. Any NaN or infinity poisons the sums, so those few
numbers are tested instead, and values are counted only where a sum is out of range.
"""

import contextvars
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.floating]
Rows = NDArray[np.float64]

# The order of the numbers in a row; `observe.trace` stores rows as they are.
COLUMNS = ("mean", "max", "min", "norm", "nonzero", "nonfinite")
BLOCK = 65536  # elements: 256 kB of float32, which stays in a core's own cache
UNTHREADED = 8192  # elements: OpenBLAS shares a dot product among threads from 10,000 on
# Sums of float32 squares between these are right to more digits than float32 has; outside they may have lost some.
TINY, HUGE = 1e-24, 1e36
FLOAT32 = np.dtype(np.float32)


class Statistics:
    """Describes the same tensors again and again; what it needs besides them is made once and kept.

    Examples
    --------
    >>> rows = Statistics().describe([torch.tensor([3.0, 0.0, -4.0]), None])
    >>> rows[0].round(3).tolist()
    [-0.333, 3.0, -4.0, 5.0, 0.667, 0.0]
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, ...] = ()
        # A context in which numpy is silent about overflow; to enter `np.errstate` at each step would cost more.
        self._quiet = contextvars.copy_context()
        self._quiet.run(np.seterr, all="ignore")

    def describe(self, tensors: Sequence[Tensor | None]) -> Rows:
        """Return mean, max, min, L2 norm, share of non-zero and count of non-finite values, a row for each tensor.

        A missing tensor is a row of NaN, not of zeros. A sparse tensor counts as the dense one it stands for. Complex
        values count as pairs of real ones.
        """
        apart: dict[int, Rows] = {}
        joined: dict[int, Values] = {}
        for place, tensor in enumerate(tensors):
            if tensor is None:
                continue
            values, size = flat(tensor)
            if 0 < values.size == size <= BLOCK and values.dtype is FLOAT32:
                joined[place] = values
            else:
                apart[place] = _row(values, size)
        if len(joined) == len(tensors) > 0:  # the usual case for small nets, and the one where every call counts
            return self._rows(list(joined.values()))
        rows = np.full((len(tensors), len(COLUMNS)), np.nan)
        if joined:
            rows[list(joined)] = self._rows(list(joined.values()))
        for place, row in apart.items():
            rows[place] = row
        return rows

    def _rows(self, arrays: list[Values]) -> Rows:
        sizes = tuple([a.size for a in arrays])
        if sizes != self._sizes:
            self._make_room(sizes)
        rows = self._quiet.copy().run(self._reduce, arrays)  # two threads cannot be in one context
        squares = rows[:, 3].tolist()
        rows /= self._divisors
        np.sqrt(rows[:, 3], out=rows[:, 3])
        for place, total in enumerate(squares):
            if not TINY < total < HUGE:
                _put_right(rows[place], arrays[place], sizes[place])
        return rows

    def _reduce(self, arrays: list[Values]) -> Rows:
        """Return sum, max, min, sum of squares, and number of non-zero values of each array."""
        joined, starts = self._joined, self._starts
        rows = np.zeros((len(arrays), len(COLUMNS)))
        np.concatenate(arrays, out=joined)
        rows[:, 0] = np.add.reduceat(joined, starts)
        rows[:, 1] = np.maximum.reduceat(joined, starts)
        rows[:, 2] = np.minimum.reduceat(joined, starts)
        np.multiply(joined, joined, out=self._squares)
        rows[:, 3] = np.add.reduceat(self._squares, starts)
        np.not_equal(joined, 0, out=self._nonzero)
        rows[:, 4] = [np.count_nonzero(piece) for piece in self._nonzero_pieces]
        return rows

    def _make_room(self, sizes: tuple[int, ...]) -> None:
        self._sizes, self._starts = sizes, np.cumsum((0, *sizes[:-1]))
        self._joined, self._squares = np.empty((2, sum(sizes)), np.float32)
        self._nonzero = np.empty(sum(sizes), bool)
        self._nonzero_pieces = np.split(self._nonzero, self._starts[1:])
        self._divisors = np.ones((len(sizes), len(COLUMNS)))
        self._divisors[:, 0] = self._divisors[:, 4] = sizes


def total_norm(rows: Rows) -> float:
    """Return the L2 norm over all tensors together, as ``clip_grad_norm_`` would; NaN when there is none."""
    known = [row[3] for row in rows.tolist() if row[3] == row[3] or row[5] > 0]
    if not known or any(norm != norm for norm in known):  # hypot would let an infinity outweigh a NaN
        return math.nan
    return math.hypot(*known)


def any_nonfinite(rows: Rows) -> bool:
    """Return whether any value of any tensor is NaN or infinite."""
    return any(count > 0 for count in rows[:, 5].tolist())


def update_ratios(before: Sequence[Tensor], after: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return |after − before| / |before| of each tensor; NaN where a tensor was all zeros.

    Examples
    --------
    >>> update_ratios([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])]).tolist()
    [0.1]
    """
    return np.array([_update_ratio(flat(b)[0], flat(a)[0]) for a, b in zip(after, before, strict=True)])


def _update_ratio(before: Values, after: Values) -> float:
    change = size = 0.0
    with np.errstate(all="ignore"):
        for start in range(0, before.size, BLOCK):
            old = before[start : start + BLOCK].astype(np.float64)  # float32 squares of small updates would vanish
            new = after[start : start + BLOCK] - old
            change, size = change + _dot(new, new), size + _dot(old, old)
    return math.sqrt(change / size) if size > 0 and change >= 0 else math.nan


def flat(tensor: Tensor) -> tuple[Values, int]:
    """Return a tensor's values as a flat array, without copying where that is possible, and its number of elements."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.float32 and tensor.layout is torch.strided and tensor.is_cpu:
        if tensor.is_contiguous():  # nearly always
            return tensor.numpy().reshape(-1), tensor.numel()
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            return tensor.permute(0, 2, 3, 1).numpy().reshape(-1), tensor.numel()  # in the order in which they lie
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()  # numpy knows no bfloat16
    return tensor.cpu().contiguous().view(-1).numpy(), size


def _row(values: Values, size: int) -> Rows:
    """Return the row of one large array, block by block; ``size`` exceeds its length for a sparse tensor."""
    if size == 0:
        return np.array([np.nan, np.nan, np.nan, 0.0, np.nan, 0.0])
    total, squares, nonzero = 0.0, 0.0, 0
    low, high = (np.inf, -np.inf) if values.size == size else (0.0, 0.0)
    ones = _ones(values.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, BLOCK):
            block = values[start : start + BLOCK]
            total += _dot(block, ones[: block.size])  # dot is vectorised, add.reduce is not
            squares += _dot(block, block)
            nonzero += int(np.count_nonzero(block != 0))  # counting the comparison is five times as fast
            low, high = np.minimum(low, block.min()), np.maximum(high, block.max())  # both keep a NaN
        row = np.array([total / size, high, low, np.sqrt(squares), nonzero / size, 0.0])
        if not TINY < squares < HUGE:
            _put_right(row, values, size)
    return row


def _dot(a: Values, b: Values) -> float:
    """Return the dot product on one thread: a BLAS that starts more of them makes the training wait for the monitor."""
    if a.size <= UNTHREADED:
        return float(np.dot(a, b))
    whole = a.size - a.size % UNTHREADED
    rows = np.vecdot(a[:whole].reshape(-1, UNTHREADED), b[:whole].reshape(-1, UNTHREADED))
    return float(rows.sum()) + float(np.dot(a[whole:], b[whole:]))


@functools.cache
def _ones(dtype: np.dtype[np.floating]) -> Values:
    return np.ones(BLOCK, dtype)


def _put_right(row: Rows, values: Values, size: int) -> None:
    """Correct a row whose squares left the range of float32: by NaN or infinity, or because they are tiny or huge."""
    row[5] = np.count_nonzero(~np.isfinite(values))
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        row[0] = wide.sum() / size
        if not row[5]:
            scale = float(np.abs(wide).max(initial=0.0)) or 1.0
            row[3] = scale * np.linalg.norm(wide / scale)
