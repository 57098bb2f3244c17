"""Statistics of many gradients, in few reads of memory and on one thread; and how often they are worth taking.

Measured on CPUs, within a training step: half of the cost is reading, half is calling operations whose code the step
has pushed out of the cache. So a large tensor is read in blocks that stay in a core's own cache while a few plain
reductions go over them, small tensors are joined and reduced together, and nothing is allocated on the way.

An ``isfinite`` over the data would cost more than all the rest. Any NaN or infinity poisons the sums, so those few
numbers are tested instead, and values are counted only where a sum is out of range.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import accelerator

Values = NDArray[np.floating]
Rows = NDArray[np.float64]

# The order of the numbers in a row; `observe.trace` stores rows as they are.
COLUMNS = ("mean", "max", "min", "norm", "nonzero", "nonfinite")
BLOCK = 131072  # elements: 512 kB of float32, half of a core's own cache
SMALL = 10_000  # elements: below, joining two tensors costs less than calling for each
# Each row of so many elements has a sum of its own, for two reasons: a float32 sum keeps its digits, and a BLAS that
# shares a dot product among threads (OpenBLAS above 10,000 elements) makes the training wait for the monitor.
ROW = 2048
ONES: dict[np.dtype[Any], Values] = {np.dtype(kind): np.ones(ROW, kind) for kind in (np.float32, np.float64)}
# Sums of float32 squares between these are right to more digits than float32 has; outside they may have lost some.
TINY, HUGE = 1e-24, 1e36
FLOAT32 = np.dtype(np.float32)


class Measured:
    """The statistics of some tensors: a row for each, in the order of ``COLUMNS``.

    Those of tensors on an accelerator arrive later: ``ready`` tells whether they have, and reading ``rows`` waits.
    """

    def __init__(self, rows: Rows, pending: Sequence[accelerator.Pending]) -> None:
        self._rows, self._pending = rows, pending

    @property
    def ready(self) -> bool:
        """Whether reading ``rows`` would not wait."""
        return all(part.ready for part in self._pending)

    @property
    def rows(self) -> Rows:
        """The numbers, float64, of shape (tensors, 6)."""
        for part in self._pending:
            self._rows[part.places] = part.rows()
        self._pending = ()
        return self._rows


class Statistics(threading.local):
    """Measures tensors again and again; its working memory is kept, one for each thread.

    Examples
    --------
    >>> rows = Statistics().measure([torch.tensor([3.0, 0.0, -4.0]), None]).rows
    >>> rows[0].round(3).tolist()
    [-0.333, 3.0, -4.0, 5.0, 0.667, 0.0]
    """

    def __init__(self) -> None:
        self._joined = np.empty(BLOCK, np.float32)
        self._mask = np.empty(BLOCK, bool)

    def measure(self, tensors: Sequence[Tensor | None]) -> Measured:
        """Return mean, max, min, L2 norm, share of non-zero and count of non-finite values, a row for each tensor.

        A missing tensor is a row of NaN, not of zeros. A sparse tensor counts as the dense one it stands for, a
        sharded one (DTensor) as the part that lies on this rank. Complex values count as pairs of real ones.
        """
        rows, small, large, pending = _sort(tensors)
        if len(small) == 1:
            large |= {place: (values, values.size) for place, values in small.items()}
            small = {}
        with np.errstate(all="ignore"):
            for places, arrays in _groups(small):
                rows[places] = self._rows(arrays)
            for place, (values, size) in large.items():
                rows[place] = self._row(values, size)
        return Measured(rows, pending)

    def glance(self, tensors: Sequence[Tensor | None]) -> Measured:
        """Return the norm and the count of non-finite values only, at about one read; the rest is NaN.

        They are those of ``measure``, to the last bit. On an accelerator a glance is as dear as all, so it gives all.

        Examples
        --------
        >>> Statistics().glance([torch.tensor([3.0, 0.0, -4.0])]).rows.tolist()
        [[nan, nan, nan, 5.0, nan, 0.0]]
        """
        rows, small, large, pending = _sort(tensors)
        with np.errstate(all="ignore"):
            for place, values in small.items():
                rows[place, 3], rows[place, 5] = _norm(values, float(np.dot(values, values)))  # as `_squares` does
            for place, (values, _) in large.items():
                squares = [s for block in _blocks(values) for s in _squares(block)]
                rows[place, 3], rows[place, 5] = _norm(values, sum(squares))
        return Measured(rows, pending)

    def describe(self, tensors: Sequence[Tensor | None]) -> Rows:
        """Return the rows of ``measure``."""
        return self.measure(tensors).rows

    def _row(self, values: Values, size: int) -> Sequence[float]:
        """Return the row of one array, block by block; ``size`` exceeds its length for a sparse tensor."""
        if size == 0:
            return math.nan, math.nan, math.nan, 0.0, math.nan, 0.0
        squares: list[float] = []
        totals: list[float] = []
        highs, lows = ([], []) if values.size == size else ([0.0], [0.0])
        nonzero, ones = 0, ONES[values.dtype]
        for block in _blocks(values):
            squares += _squares(block)
            totals += _totals(block, ones)
            mask = np.not_equal(block, 0, self._mask[: block.size])
            nonzero += int(np.count_nonzero(mask))  # ten times as fast as to count the values themselves
            highs.append(np.maximum.reduce(block).item())
            lows.append(np.minimum.reduce(block).item())
        mean, square, nonfinite = sum(totals) / size, sum(squares), 0
        norm = math.sqrt(square)
        if not TINY < square < HUGE and nonzero:
            mean, norm, nonfinite = _exactly(values, size)
        high, low = (math.nan, math.nan) if math.isnan(norm) else (max(highs), min(lows))
        return mean, high, low, norm, nonzero / size, nonfinite

    def _rows(self, arrays: Sequence[Values]) -> Rows:
        """Return the rows of small arrays that together fit into a block."""
        squares = [float(np.dot(a, a)) for a in arrays]  # as `_squares` does
        sizes = np.array([a.size for a in arrays])
        ends = np.add.accumulate(sizes)
        starts = ends - sizes
        joined = np.concatenate(arrays, out=self._joined[: ends[-1]])
        mask = np.not_equal(joined, 0, self._mask[: ends[-1]])
        rows = np.zeros((len(arrays), len(COLUMNS)))
        rows[:, 0] = np.add.reduceat(joined, starts) / sizes
        rows[:, 1] = np.maximum.reduceat(joined, starts)
        rows[:, 2] = np.minimum.reduceat(joined, starts)
        rows[:, 3] = np.sqrt(squares)
        rows[:, 4] = 1 if mask.all() else np.add.reduceat(mask.view(np.uint8), starts, dtype=np.uint32) / sizes
        for place, square in enumerate(squares):
            if not TINY < square < HUGE and rows[place, 4]:
                rows[place, [0, 3, 5]] = _exactly(arrays[place], arrays[place].size)
        return rows


class Budget:
    """Decides at which steps full statistics are taken, so that the monitor keeps within its share of a step's time.

    A leaky bucket. Each step fills in its share of seconds and takes out what the monitor spent, and the bucket holds
    nothing beyond the moment: what a step leaves over is lost, unless there is a debt to pay. A step without debt is
    measured in full, which may bring the next debt. A step that is not full pays what it leaves over, and is never
    blamed for costing more: a glance is not refused. So over any stretch of steps::

        monitor <= share * steps' time + one full row + what glances cost beyond the share

    Beside that the first 3 steps are full, and free, since what is new is slow; and when 100 steps have passed
    without one, the next is full. Whoever takes a full row that was not asked for (because of an anomaly) says so to
    ``spent``, and it counts.

    Parameters
    ----------
    share : the monitor's part of a step's time, above 0 and at most 1; None measures every step in full

    Raises
    ------
    DxdyError
        A share that is none.

    Examples
    --------
    A step takes 100 ms, a full row 12 ms and a glance 1 ms; 3 % of the time is allowed:

    >>> budget, taken = Budget(0.03), []
    >>> for step in range(20):
    ...     full = budget.full(step)
    ...     budget.spent(0.012 if full else 0.001, 0.1, full)
    ...     taken += [step] if full else []
    >>> taken
    [0, 1, 2, 3, 9, 15]
    """

    FIRST, EVERY = 3, 100  # steps

    def __init__(self, share: float | None) -> None:
        if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise DxdyError(
                f"budget: expected the monitor's share of a step's time, above 0 and at most 1, got {share!r}. "
                "0.03 allows 3 %; None measures every step in full."
            )
        self.share = share
        self._step = self._last_full = 0
        self._debt = 0.0  # seconds

    def full(self, step: int) -> bool:
        """Return whether this step is to be measured in full."""
        self._step = step
        unasked = self.share is None or step < self.FIRST or step - self._last_full > self.EVERY
        return unasked or self._debt <= 0

    def spent(self, monitor_seconds: float, step_seconds: float, full: bool) -> None:
        """Count the step just asked for: the monitor's seconds, those of the whole step, and whether it was full."""
        if full:
            self._last_full = self._step
        if self.share is None or self._step < self.FIRST:
            return
        left = self.share * step_seconds - monitor_seconds
        if full or left > 0:
            self._debt = max(0.0, self._debt - left)


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
    return np.array([_update_ratio(old, new) for old, new in zip(before, after, strict=True)])


def _update_ratio(before: Tensor, after: Tensor) -> float:
    if before.stride() != after.stride():  # else both are read in the same order
        before, after = before.contiguous(), after.contiguous()
    if (was := _read(before)) is None or (now := _read(after)) is None:
        return math.nan
    old, new = was[0], now[0]
    with np.errstate(all="ignore"):
        change, size = _change(old, new)
        if not (TINY < change < HUGE and TINY < size < HUGE):  # float32 squares of small updates would vanish
            change, size = _change(old, new, np.float64)
    return math.sqrt(change / size) if size > 0 and change >= 0 else math.nan


def _change(before: Values, after: Values, kind: type[np.floating] = np.float32) -> tuple[float, float]:
    """Return the sums of squares of after − before and of before, in numbers at least so wide."""
    change = size = 0.0
    for was, now in zip(_blocks(before), _blocks(after), strict=True):
        was = was.astype(np.result_type(was, kind), copy=False)
        change, size = change + sum(_squares(now - was)), size + sum(_squares(was))
    return change, size


def flat(tensor: Tensor) -> tuple[Values, int]:
    """Return a tensor's values as a flat array, without copying where that is possible, and its number of elements.

    The values stand in the order in which they lie in memory.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor; to import its class would take longer than all of this package
        tensor = tensor.to_local()
    size = tensor.numel() * (2 if tensor.is_complex() else 1)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()  # numpy knows no bfloat16
    return tensor.resolve_neg().cpu().numpy().ravel("K"), size


def _read(tensor: Tensor) -> tuple[Values, int] | None:
    """Return what ``flat`` does; None for a tensor of somebody's own class that shows its values to nobody."""
    try:
        return flat(tensor)
    except (RuntimeError, TypeError):
        if type(tensor) in (Tensor, torch.nn.Parameter):
            raise
        return None


def _is_here(tensor: Tensor) -> bool:
    """Return whether a tensor lies in this machine's memory and not on an accelerator."""
    return tensor.is_cpu


def _sort(
    tensors: Sequence[Tensor | None],
) -> tuple[Rows, dict[int, Values], dict[int, tuple[Values, int]], list[accelerator.Pending]]:
    """Return rows of NaN; by place the values of small tensors, values and size of others; what is on its way."""
    rows = np.full((len(tensors), len(COLUMNS)), np.nan)
    if (arrays := _plain(tensors)) is not None:
        small = {place: values for place, values in enumerate(arrays) if 0 < values.size <= SMALL}
        large = {place: (values, values.size) for place, values in enumerate(arrays) if place not in small}
        pending = []
    else:
        given = {place: tensor for place, tensor in enumerate(tensors) if tensor is not None}
        here = {place: _read(tensor) for place, tensor in given.items() if _is_here(tensor)}
        large = {place: found for place, found in here.items() if found is not None}
        small = {p: v for p, (v, size) in large.items() if 0 < v.size == size <= SMALL and v.dtype is FLOAT32}
        large = {place: found for place, found in large.items() if place not in small}
        pending = accelerator.reduce({p: tensor for p, tensor in given.items() if not _is_here(tensor)})
    return rows, small, large, pending


def _plain(tensors: Sequence[Tensor | None]) -> list[Values] | None:
    """Return all values if each tensor is plain float32 memory, the usual case; otherwise None."""
    try:
        arrays = [t.numpy().ravel("K") for t in tensors]  # type: ignore[union-attr]  # numpy refuses all that is not
    except (AttributeError, TypeError, RuntimeError):
        return None
    return arrays if {a.dtype for a in arrays} <= {FLOAT32} else None


def _groups(small: dict[int, Values]) -> Iterator[tuple[list[int], list[Values]]]:
    """Yield places and values of neighbours that together fit into a block."""
    places: list[int] = []
    filled = 0
    for place, values in small.items():
        if filled + values.size > BLOCK:
            yield places, [small[p] for p in places]
            places, filled = [], 0
        places.append(place)
        filled += values.size
    if places:
        yield places, [small[p] for p in places]


def _blocks(values: Values) -> Iterator[Values]:
    return (values[start : start + BLOCK] for start in range(0, values.size, BLOCK))


def _squares(values: Values) -> list[float]:
    """Return the sum of the squares of each row; of few values, of all of them."""
    if values.size <= SMALL:
        return [float(np.dot(values, values))]
    whole = values.size - values.size % ROW
    rows, rest = values[:whole].reshape(-1, ROW), values[whole:]
    return [*np.vecdot(rows, rows).tolist(), float(np.dot(rest, rest))]


def _totals(values: Values, ones: Values) -> list[float]:
    """Return the sum of each row; the last may be shorter."""
    whole = values.size - values.size % ROW
    rest = values[whole:]
    totals = [float(np.dot(rest, ones[: rest.size]))]
    return np.vecdot(values[:whole].reshape(-1, ROW), ones).tolist() + totals if whole else totals


def _norm(values: Values, square: float) -> tuple[float, int]:
    """Return the norm and the count of non-finite values, given the sum of squares."""
    if TINY < square < HUGE or not values.size or values.max() == 0 == values.min():
        return math.sqrt(square), 0
    return _exactly(values, values.size)[1:]


def _exactly(values: Values, size: int) -> tuple[float, float, int]:
    """Return mean, norm and count of non-finite values of what left the range of float32 squares."""
    total, peak, nonfinite = 0.0, 0.0, 0
    for block in _blocks(values):
        total += float(np.add.reduce(block, dtype=np.float64))
        peak = max(peak, float(np.abs(block).max()))
        nonfinite += block.size - int(np.count_nonzero(np.isfinite(block)))
    if nonfinite:
        return total / size, math.nan if np.isnan(values).any() else math.inf, nonfinite
    square = sum(float(np.square(block / np.float64(peak)).sum()) for block in _blocks(values))
    return total / size, peak * math.sqrt(square), 0
