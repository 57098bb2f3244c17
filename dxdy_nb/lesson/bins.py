"""A record of any length in a bounded number of bins: what a picture needs of it, and no more.

A picture is some hundred pixels wide, and a run may have a million steps. Of the steps that share a bin the smallest
and the largest loss are kept, so that a spike of one step stays visible, and so are the largest gradient norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MOST = 256  # bins: about one for every pixel of a small panel
LINES = ("loss", "grad_norm")
PHASES = ("data", "forward", "backward", "update")
# How the rows of a table that share a bin become one.
MERGE = {"low": "min", "high": "max", "spoilt": "max", "seconds": "sum", "norms": "max", "bad": "max", "ratios": "last"}


class Record(Protocol):
    """What a picture of training reads: a watched loop and a run both have it."""

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step."""

    @property
    def gradients(self) -> pd.DataFrame:
        """One row a step and parameter."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of elements of each parameter."""


@dataclass(frozen=True)
class Bins:
    """Tables with one row a bin; the index is the bin's first step, a multiple of ``width``.

    ``last`` is the last step that is in them.
    ``low`` and ``high`` hold the smallest and the largest finite loss and gradient norm, ``spoilt`` a 1 where one was
    not finite. ``seconds`` holds sums over the bin's steps: of each phase, of what is left of the step (``other``),
    and the number of ``steps``. ``norms``, ``bad`` and ``ratios`` have a column for each parameter: its largest
    finite gradient norm, a 1 where a gradient held a value that is not finite, its newest update ratio (the largest of
    several would stand above the rule of thumb where none of its fellows does).
    """

    width: int
    last: int
    sizes: Mapping[str, int]
    low: pd.DataFrame
    high: pd.DataFrame
    spoilt: pd.DataFrame
    seconds: pd.DataFrame
    norms: pd.DataFrame
    bad: pd.DataFrame
    ratios: pd.DataFrame


def binned(record: Record | Bins, most: int = MOST, before: Bins | None = None) -> Bins:
    """Return a record in at most ``most`` bins of equal width, a power of two.

    With ``before``, the bins of earlier steps, the result is the same as that of the whole record at once, in a time
    that depends only on the number of new steps.

    Examples
    --------
    >>> import torch
    >>> from dxdy_nb.observe.observer import watch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, optimizer) as w:
    ...     for _ in range(10):
    ...         model(torch.ones(4, 2)).square().mean().backward()
    ...         optimizer.step()
    >>> bins = binned(w, most=4)
    >>> bins.width, bins.low.index.tolist(), bins.seconds["steps"].tolist()
    (4, [0, 4, 8], [4.0, 4.0, 2.0])
    """
    bins = record if isinstance(record, Bins) else _one_a_step(record)
    if before is not None:
        bins = _joined(before, bins)
    steps = bins.low.index
    if not len(steps):
        return bins
    width = bins.width
    while steps[-1] // width - steps[0] // width >= most:
        width *= 2
    if width == 1:
        return bins
    merged = {name: _merged(getattr(bins, name), width, how) for name, how in MERGE.items()}
    return Bins(width, bins.last, bins.sizes, **merged)


def _one_a_step(record: Record) -> Bins:
    steps = record.steps
    lines = steps[list(LINES)]
    finite = lines.where(np.isfinite(lines))
    seconds = steps[[f"{phase}_time" for phase in PHASES]].set_axis(list(PHASES), axis="columns").fillna(0.0)
    rest = steps["step_time"] - seconds.sum(axis="columns")
    seconds = seconds.assign(other=rest.clip(lower=0).fillna(0.0), steps=1.0)
    gradients = record.gradients
    columns = ("norm", "nonfinite", "update_ratio")
    norms, bad, ratios = (gradients[name].unstack("parameter", sort=False) for name in columns)
    norms, ratios = (table.where(np.isfinite(table)) for table in (norms, ratios))
    if "full" in steps:  # rows without any number were not measured; others without one have no gradient
        norms = norms[norms.notna().any(axis="columns") | steps["full"].reindex(norms.index)]
    bad = (bad > 0).astype(float)
    spoilt = finite.isna().astype(float)
    last = int(steps.index[-1]) if len(steps) else -1
    return Bins(1, last, record.sizes, finite, finite, spoilt, seconds, norms, bad, ratios)


def _joined(before: Bins, after: Bins) -> Bins:
    both = {name: pd.concat([getattr(before, name), getattr(after, name)]) for name in MERGE}
    return Bins(max(before.width, after.width), after.last, {**before.sizes, **after.sizes}, **both)


def _merged(table: pd.DataFrame, width: int, how: str) -> pd.DataFrame:
    return table.groupby(table.index // width * width).agg(how)


def layers(table: pd.DataFrame, most: int) -> dict[str, list[str]]:
    """Return the columns of a table of parameters by layer: each its own, or where there are many, by module.

    The modules are those as deep in the model as leaves at most ``most`` of them; when even the outermost are more,
    these.

    Examples
    --------
    >>> import pandas as pd
    >>> layers(pd.DataFrame(columns=["a.0.weight", "a.0.bias", "a.1.weight", "b.weight"]), most=3)
    {'a.0': ['a.0.weight', 'a.0.bias'], 'a.1': ['a.1.weight'], 'b': ['b.weight']}
    """
    names = [str(name) for name in table.columns]
    if len(names) <= most:
        return {name: [name] for name in names}
    paths = [name.split(".")[:-1] or [name] for name in names]
    found: dict[str, list[str]] = {}
    for depth in range(max(map(len, paths)), 0, -1):
        found = {}
        for name, path in zip(names, paths, strict=True):
            found.setdefault(".".join(path[:depth]), []).append(name)
        if len(found) <= most:
            break
    return found


def layer_norms(bins: Bins, most: int) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the gradient norm of each layer, a row a bin, and the number of elements of each layer.

    Where a layer holds a value that is not finite, or no gradient at all, its norm is missing.
    """
    values, bad = bins.norms.to_numpy(dtype=float), bins.bad.reindex(bins.norms.index).to_numpy() > 0
    place = {name: place for place, name in enumerate(bins.norms.columns)}
    norms, sizes = {}, {}
    for layer, names in layers(bins.norms, most).items():
        its = [place[name] for name in names]
        norms[layer] = np.where(bad[:, its].any(axis=1), np.nan, _norm(values[:, its]))
        sizes[layer] = sum(bins.sizes[name] for name in names)
    return pd.DataFrame(norms, index=bins.norms.index), sizes


def _norm(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the norm of several tensors together, a row a bin; without any of them it is missing, not 0."""
    largest = np.fmax.reduce(norms, axis=1)
    scaled = norms / np.where(largest > 0, largest, 1.0)[:, None]  # squares of tiny and huge norms leave float64
    return np.sqrt(np.nansum(scaled**2, axis=1)) * largest
