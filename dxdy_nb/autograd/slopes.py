"""Autograd's slope against that of finite differences, with a tolerance that comes from the function itself.

Five values on a line, f(-2h) to f(2h), give a slope with an error of order h⁴. Their third and fourth differences tell
how far to trust it: for a smooth f they vanish with h, rounding and kinks keep them up.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dxdy_nb.autograd.copies import Loss
from dxdy_nb.errors import DxdyError

EPS = torch.finfo(torch.float64).eps
SCREEN = 2  # directions for the first look,
DIRECTIONS = 3  # and for a closer one
# A slope errs by at most its doubt where one kink is near, and by about 0.4 of it from rounding. Doubt is known from a
# handful of samples: Student's t then asks for about ten times as much, for one false alarm in 10,000.
SAFETY = 10.0
# The tolerance must be this small a part of a tensor's share of the slope. Then a fault of 1 % stands 30 times above
# it, and is missed where both random directions have less than a 30th of their typical part along it: 7 of 10,000.
RESOLUTION = 3e-4
# Noise relative to the value that float64 does not make by itself: halfway between its precision and float32's.
COARSE = math.sqrt(EPS * torch.finfo(torch.float32).eps)
FACTORS = (1, 64, 1 / 64, 1 / 4096)  # of the first step
LOUD = 1e-3  # relative noise that may be none: a function that turns many times within a step looks like that, too


@dataclass(frozen=True)
class Point:
    """Where a gradient is judged: value and gradient there, each tensor's typical share of a slope, values nearby."""

    loss: Loss
    at: Tensor
    value: float
    gradient: Tensor
    shares: list[float]
    graph: bool
    near: Callable[[Tensor, float], float]  # (direction, step) → value


@dataclass(frozen=True)
class Line:
    """Slopes along a direction: autograd's, that of five values, one-sided ones; and how far off these may be.

    ``doubt`` bounds the error from one kink, at the point or beside it; ``rounding`` is what rounding must do at least.
    """

    step: float
    analytic: float
    slope: float
    left: float
    right: float
    doubt: float
    rounding: float
    size: float  # of the values


@dataclass(frozen=True)
class Comparison:
    """Lines along several directions, taken together: by how much the two slopes differ, and by how much they may."""

    slopes: list[float]
    errors: list[float]  # infinite for NaN
    tolerance: float
    floor: float  # below it no step could bring the tolerance, for rounding
    smooth: bool  # little doubt, or no more than rounding makes
    noise: float  # relative to the values
    step: float
    noisy: bool = False  # a larger step met less of it: noise, where a kink's doubt is the same for all steps

    @property
    def agrees(self) -> bool:
        """Whether the slopes are the same as far as can be told."""
        return max(self.errors) <= self.tolerance and max(self.errors) < math.inf

    @property
    def coarse(self) -> bool:
        """Whether there is more noise than float64 makes by itself."""
        return self.noisy and self.noise > COARSE

    def sees(self, share: float) -> bool:
        """Return whether a fault in a tensor with this share would show, or is too small to show at any step."""
        return self.smooth and (self.tolerance <= RESOLUTION * share or RESOLUTION * share <= self.floor)


def point_at(loss: Loss, x: Tensor) -> Point | None:
    """Return the point, with values taken without a graph where they are the same; None where they are random."""
    result = loss.value(x)
    if not math.isfinite(result.item()):
        raise DxdyError(f"the value is {result.item()} here, so it has no slope. Look for the first operation with it.")
    parts: Sequence[Tensor | None] = [None] * len(loss.leaves)
    if result.requires_grad:
        parts = torch.autograd.grad(result, loss.leaves, allow_unused=True)
    dense = [torch.zeros_like(leaf) if g is None else g.to_dense() for g, leaf in zip(parts, loss.leaves, strict=True)]
    gradient = torch.cat([g.detach().reshape(-1) for g in dense])
    shares = [(gradient[piece] * loss.scale[piece]).norm().item() for piece in loss.pieces]

    def bare(v: Tensor | None = None, step: float = 0.0) -> float:
        with torch.no_grad():
            return loss.value(x, v, step).item()

    plain = math.nan
    with suppress(RuntimeError):  # a function that differentiates something itself needs a graph
        plain = bare()
    point = Point(loss, x, plain, gradient, shares, result.requires_grad, bare)
    if _same(plain, result.item()):
        return point
    again = loss.value(x).item()  # some kernels are others without a graph
    point = replace(point, value=again, near=lambda v, step: loss.value(x, v, step).item())
    return point if _same(again, result.item()) else None


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 64 * EPS * max(abs(a), abs(b))  # the order of a sum may differ, as on a GPU


def line_at(point: Point, v: Tensor, step: float, eps: float) -> Line:
    """Return the slopes along v, from values that are precise to eps."""
    a, b, c, d = (point.near(v, k * step) for k in (-2, -1, 1, 2))
    middle, size = point.value, max(map(abs, (a, b, c, d, point.value)))
    doubt = (abs(d - 2 * c + 2 * b - a) + abs(d - 4 * c + 6 * middle - 4 * b + a)) / (4 * step)
    return Line(
        step,
        analytic=float(point.gradient @ v),
        slope=(8 * (c - b) - (d - a)) / (12 * step),
        left=(3 * middle - 4 * b + a) / (2 * step),
        right=(4 * c - 3 * middle - d) / (2 * step),
        doubt=doubt if math.isfinite(doubt) else math.inf,
        rounding=eps * (size / step + float(point.gradient.norm() * v.norm())),
        size=size,
    )


def has_kink(point: Point, row: int, eps: float) -> bool:
    """Return whether the slopes on both sides stay apart on the way to the point, as far as rounding lets them be seen.

    Where they meet, a kink is only near; where the gap is not clear, or grows, it is one of rounding.
    """
    (v,) = point.loss.along([row], [0])
    gaps: list[float] = []
    for factor in sorted(FACTORS, reverse=True)[1:]:
        line = line_at(point, v, eps ** (1 / 3) * factor, eps)
        bound = SAFETY * line.rounding
        if gaps and gaps[0] <= bound:
            break
        gaps.append(abs(line.right - line.left))
        if not max(bound, gaps[0] / 2) < gaps[-1] < 2 * gaps[0] + bound:
            return False
    return len(gaps) > 1


def _compare_at(point: Point, along: list[Tensor], step: float, eps: float) -> Comparison:
    lines = [line_at(point, v, step, eps) for v in along]
    errors = [abs(line.slope - line.analytic) for line in lines]
    rounding = SAFETY * max(line.rounding for line in lines)
    tolerance = SAFETY * max(line.doubt for line in lines) + rounding
    slope = max(max(abs(line.left), abs(line.right)) for line in lines)
    return Comparison(
        [line.slope for line in lines],
        [error if error == error else math.inf for error in errors],
        tolerance,
        floor=rounding * step / (FACTORS[1] * eps ** (1 / 3)),
        smooth=tolerance <= RESOLUTION * slope or tolerance <= SAFETY * rounding,
        noise=max(line.doubt * step / line.size if line.size else 0.0 for line in lines),
        step=step,
    )


def compare(point: Point, rows: Sequence[int], directions: Iterable[int], eps: float) -> Comparison:
    """Return the comparison along directions in some tensors, at the step whose tolerance is smallest.

    Who agrees plays no part in that choice. The first step balances rounding, eps / h, against curvature, h². Where it
    is not clear enough, a larger one meets less noise; if there is none, smaller ones meet fewer kinks.
    """
    along, shares = point.loss.along(rows, directions), [point.shares[row] for row in rows]
    at = [functools.partial(_compare_at, point, along, eps ** (1 / 3) * k, eps) for k in FACTORS]
    best = first = at[0]()
    if all(map(first.sees, shares)):
        if first.agrees or len(rows) > 1:
            return first
        spreads = [_spread(first, make()) for make in at[1:3]]  # a fault is a plateau: the same at another step
        return replace(first, tolerance=max(first.tolerance, 2 * min((s for s in spreads if s == s), default=0.0)))
    larger = at[1]()
    noisy = larger.tolerance < first.tolerance / 8
    if noisy and larger.noise < LOUD:  # no smaller steps: there a coarse function is a staircase, flat and smooth
        return replace(larger, noisy=True)
    for make in at[2:]:
        best = min(best, larger, make(), key=lambda c: c.tolerance)
        if all(map(best.sees, shares)):
            return best
    return replace(best, noisy=noisy)


def _spread(one: Comparison, other: Comparison) -> float:
    return max(abs(a - b) for a, b in zip(one.slopes, other.slopes, strict=True))


def examine(
    point: Point, rows: Sequence[int], eps: float, directions: Sequence[int] = range(DIRECTIONS)
) -> dict[int, Comparison]:
    """Return for each tensor the comparison that settles it: of a whole group where all is clear, else of smaller ones.

    A fault is found by halves, so its price grows with the logarithm of the number of tensors.
    """
    if not rows:
        return {}
    found = compare(point, rows, directions, eps)
    unseen = [row for row in rows if not found.sees(point.shares[row])]
    settled = dict.fromkeys(rows, found)
    if len(rows) == 1 or (found.agrees and not unseen):
        return settled
    groups = [[row] for row in unseen] if found.agrees else [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    worst = [directions[found.errors.index(max(found.errors))]]
    for group in groups:
        settled |= examine(point, group, eps, worst)
    return settled
