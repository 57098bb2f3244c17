"""Is this gradient right? Autograd against finite differences, and a name for each way in which the two can differ.

First the whole model along a few random directions: where the two agree, and every tensor's share of the slope stands
out, all is right. Else tensors are taken by halves, down to those that disagree. One of these that agrees at a point
beside is a kink; one that agrees once all that the loss detaches is held constant is detached.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dxdy_nb.autograd import copies, slopes
from dxdy_nb.autograd.copies import Loss
from dxdy_nb.autograd.slopes import EPS, Comparison, Point
from dxdy_nb.errors import DxdyError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Verdict = Literal["wrong", "nondeterministic", "precision", "kink", "detached", "right", "frozen"]
SEVERITY: tuple[Verdict, ...] = ("wrong", "nondeterministic", "precision", "kink", "detached", "right", "frozen")

MOVE = 1e-3  # relative: off a kink, yet still in the same regime
SWEEP = [10.0**-k for k in range(1, 10)]
KINK = 4  # the place in the sweep where a kink is read off: 1e-5
FEW = 8  # so many tensors are swept one by one even when all is well,
MANY = 16  # and at most so many when it is not


@dataclass(frozen=True)
class Row:
    """What is known about the gradient of one input or parameter; NaN where it was not measured on its own.

    ``analytic`` is autograd's slope along a random direction in this tensor alone, ``numeric`` that of finite
    differences, ``left`` and ``right`` the one-sided ones, at the ``step`` that can be trusted most. A step is relative
    to the tensor's root mean square. ``detects`` is the smallest fault that would show in a typical direction, relative
    to this gradient's norm; infinite where the gradient is zero. ``curve`` holds steps and their relative errors.
    """

    name: str
    verdict: Verdict
    error: float = math.nan
    step: float = math.nan
    analytic: float = math.nan
    numeric: float = math.nan
    left: float = math.nan
    right: float = math.nan
    detects: float = math.nan
    curve: tuple[Sequence[float], Sequence[float]] = ((), ())


@dataclass(frozen=True, repr=False)
class Check:
    """What ``check_gradients`` found: a verdict, the tensor it is worst for, and a row for each tensor."""

    verdict: Verdict
    worst: str
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def table(self) -> "pd.DataFrame":
        """One row for each input or parameter, by name: see ``Row`` for the columns."""
        import pandas as pd

        return pd.DataFrame([vars(row) for row in self.rows]).set_index("name").drop(columns="curve")

    def plot(self) -> "Figure":
        """Return the error of one-sided slopes over their step: a V for a right gradient, a plateau for a wrong one.

        A line for each suspicious tensor, or for each one that was measured when none is suspicious.
        """
        from dxdy_nb.lesson import plots

        measured = [row for row in self.rows if row.curve[0]]
        drawn = [row for row in measured if row.verdict != "right"] or measured
        curves = {f"{row.name}: {row.verdict}": row.curve for row in drawn}
        alt = f"error of finite differences over their step, verdict {self.verdict}"
        return plots.curves(curves, alt=alt, x="step / size of tensor", y="relative error", log_x=True, log_y=True)

    def __repr__(self) -> str:
        row = next(row for row in self.rows if row.name == self.worst)
        judged = [row for row in self.rows if row.verdict != "frozen"]
        hit = sum(row.verdict == self.verdict for row in judged)
        count = f" ({hit} of {len(judged)} tensors)" if len(judged) > 1 else ""
        return f"{self.verdict}: {_sentence(row, judged)}{count}{f'; {self.note}' if self.note else ''}"


def _sentence(row: Row, judged: Sequence[Row]) -> str:
    """Return what the worst row says."""
    if row.verdict == "right":
        seen = [r.detects for r in judged if r.detects < 1]  # the others' gradients are zero, or zero but for rounding
        zero = f", {len(judged) - len(seen)} of them zero" if len(seen) < len(judged) else ""
        shows = f"; a fault of {max(seen):.0e} of any one gradient would show" if seen else ""
        return f"autograd and finite differences agree{zero}{shows}"
    if row.verdict == "nondeterministic":
        return "the same inputs and the same seed give different values"
    if row.verdict == "precision":
        return f"no fault seen, but the arithmetic is coarse: {row.name} is verified to {row.detects:.0e} only"
    autograd = f"autograd says {row.analytic:.6g}"
    if row.verdict == "kink":
        return f"{row.name} has slopes {row.left:.6g} and {row.right:.6g}; {autograd}; no fault beside this point"
    cut = ", which takes a part as constant" if row.verdict == "detached" else ""
    return f"{row.name} has slope {row.numeric:.6g}; {autograd}{cut}"


def check_gradients(
    fn: Callable[..., Tensor] | None = None,
    *inputs: Tensor,
    model: nn.Module | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    batch: tuple[Any, Any] | None = None,
    order: Literal[1, 2] = 1,
    seed: int = 0,
) -> Check:
    """Return whether autograd's gradient is that of the function: of ``fn(*inputs)``, or of a model's loss.

    All is computed on copies in float64, with the same seed and the same buffers each time, so dropout counts as
    deterministic. A model's loss is ``loss_fn(model(x), y)`` with ``batch = (x, y)``. A vector-valued ``fn`` is checked
    along one random direction of its result.

    Parameters
    ----------
    order : 2 checks the derivative of gradient · v for a fixed random v; it takes the first derivative as given
    seed : of the directions, and of what the function draws from torch's own generators

    Raises
    ------
    DxdyError
        Inputs without a gradient (integers, inference mode), a result that is no number, a loss that depends on
        nothing, a function that changes its inputs, a model that cannot work in float64.

    Notes
    -----
    Tolerances follow from the function's own differences (``autograd.slopes``). Missed is a fault smaller than
    ``detects`` of its row, one in a gradient that is zero at this point, one that needs other inputs, and a hook on a
    parameter, which copies leave behind. Reentrant checkpoints hide their parameters and so count as detached.

    Examples
    --------
    >>> x = torch.tensor([0.5, -2.0], dtype=torch.float64)
    >>> check_gradients(lambda x: (x * x.detach()).sum(), x).verdict
    'detached'
    >>> check_gradients(torch.abs, 0 * x).table.loc["input", "verdict"]
    'kink'
    """
    _ask(fn, inputs, model, loss_fn, batch, order, seed)
    with copies.untouched():
        if fn is not None:
            loss = copies.of_function(fn, inputs, seed)
        else:
            assert model is not None and loss_fn is not None and batch is not None
            loss = copies.of_model(model, loss_fn, batch, seed)
        return _check(copies.second_order(loss) if order == 2 else loss, order)


def _ask(fn: Any, inputs: Sequence[Any], model: Any, loss_fn: Any, batch: Any, order: Any, seed: Any) -> None:
    """Raise what is wrong with the arguments themselves."""
    given = [name for name, value in {"model": model, "loss_fn": loss_fn, "batch": batch}.items() if value is not None]
    if order not in (1, 2):
        raise DxdyError(f"order: expected 1 or 2, got {order!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise DxdyError(f"seed: expected a whole number, got {seed!r}.")
    if fn is not None and not callable(fn):
        raise DxdyError(f"fn: expected a function of tensors, got {type(fn).__name__}.")
    if torch.is_inference_mode_enabled():
        raise DxdyError("check_gradients ran inside torch.inference_mode(), which records nothing. Call it outside.")
    if isinstance(fn, nn.Module):
        raise DxdyError("got a model as fn. Pass model=, loss_fn= and batch=(x, y): that checks its parameters.")
    if len(given) < 3 if fn is None else given or not inputs:
        seen = ", ".join((["fn"] if fn else []) + [f"{len(inputs)} inputs"] * bool(inputs) + given) or "nothing"
        raise DxdyError(f"expected fn and its tensors, or model=, loss_fn= and batch= together; got {seen}.")
    if fn is None and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise DxdyError(f"batch: expected a pair (x, y), got {type(batch).__name__}.")
    if fn is None and not callable(loss_fn):
        raise DxdyError(f"loss_fn: expected a function of (model(x), y), got {type(loss_fn).__name__}.")


def _check(loss: Loss, order: int) -> Check:
    rows, here = range(len(loss.names)), slopes.point_at(loss, loss.flat.clone())
    if here is None:
        return _result(loss, [Row(name, "nondeterministic") for name in loss.names])
    eps, verdicts, detects = EPS, dict[int, Verdict](), dict[int, float]()
    screen = slopes.compare(here, rows, range(slopes.SCREEN), EPS)
    settled = dict.fromkeys(rows, screen)
    if not screen.agrees or screen.step != EPS ** (1 / 3) or not all(map(screen.sees, here.shares)):
        loss.value(here.at, mode=(replay := copies.Replay()))
        eps = replay.eps
        settled = slopes.examine(here, rows, eps)
        verdicts, detects = _explain(loss, here, settled, eps)
    if order == 1 and not here.graph and not verdicts:
        raise DxdyError("the loss has no graph and does not change with its inputs. Is it a count, as of argmax?")
    detects = {row: _ratio(c.tolerance, here.shares[row]) for row, c in settled.items()} | detects
    found = [Row(name, verdicts.get(row, "right"), detects=detects[row]) for row, name in enumerate(loss.names)]
    suspects = [row for row in rows if found[row].verdict != "right"]
    gravest = sorted(suspects, key=lambda row: SEVERITY.index(found[row].verdict))[:MANY]
    for row in rows if len(rows) <= FEW else gravest:
        found[row] = _swept(found[row], here, row, eps)
    return _result(loss, found)


def _explain(
    loss: Loss, here: Point, settled: dict[int, Comparison], eps: float
) -> tuple[dict[int, Verdict], dict[int, float]]:
    """Return the verdict on each tensor that is not simply right, and what shows in those that are beside a kink."""
    suspects = {row: c for row, c in settled.items() if not (c.agrees and c.sees(here.shares[row]))}
    there = _beside(loss, here)
    beside = slopes.examine(there, [*suspects], eps)
    noise = {row: c.tolerance for row, c in suspects.items() if c.coarse}  # it is there beside, too, even if unseen
    bad = [row for row, c in beside.items() if not c.agrees and max(c.errors) > noise.get(row, 0.0)]
    for row, c in beside.items():  # where kinks are too many beside to tell, what was clear here counts
        if suspects[row].sees(here.shares[row]) and not (c.noisy or c.sees(there.shares[row]) or row in bad):
            bad.append(row)
    held = slopes.examine(_held_constant(loss, there), bad, eps) if bad else {}
    verdicts: dict[int, Verdict] = dict.fromkeys(settled, "precision") if eps > EPS else {}
    detects: dict[int, float] = {}
    for row, found in suspects.items():
        if row in bad:
            cut = held[row].agrees and not beside[row].agrees
            cut = cut or not there.gradient[loss.pieces[row]].any()
            verdicts[row] = "detached" if cut else "wrong"
        elif found.coarse and here.shares[row] > slopes.RESOLUTION * found.tolerance:
            verdicts[row] = "precision"
        elif eps == EPS and (not found.agrees or slopes.has_kink(here, row, eps)):
            verdicts[row] = "kink"
        else:
            ratios = ((c.tolerance, point.shares[row]) for c, point in ((found, here), (beside[row], there)))
            detects[row] = min(itertools.starmap(_ratio, ratios))
    return verdicts, detects


def _beside(loss: Loss, here: Point) -> Point:
    """Return a point nearby, where the loss is smooth unless kinks are everywhere; the same point if there is none."""
    for sign in (1, -1):
        with suppress(DxdyError):  # not finite: outside the function's domain
            return slopes.point_at(loss, here.at + sign * MOVE * loss.direction(slopes.DIRECTIONS)) or here
    return here


def _held_constant(loss: Loss, point: Point) -> Point:
    """Return the point with all that the loss detaches there held constant: what autograd differentiates."""
    mode = copies.Replay()
    loss.value(point.at, mode=mode)

    def near(v: Tensor, step: float) -> float:
        with suppress(IndexError):
            mode.next, mode.off = 0, False
            return loss.value(point.at, v, step, mode).item()
        return math.nan

    return replace(point, near=near)


def _swept(row: Row, point: Point, index: int, eps: float) -> Row:
    """Return a row with its slopes over many steps, and read off where they can be trusted most."""
    (v,) = point.loss.along([index], [0])
    lines = [slopes.line_at(point, v, step, eps) for step in SWEEP]
    # Noise does not shrink with the step: what a smaller step finds of it was there before.
    tolerances = [
        slopes.SAFETY * (max(line.doubt, smaller.doubt * smaller.step / line.step) + line.rounding)
        for line, smaller in itertools.pairwise(lines)
    ]
    best = KINK if row.verdict == "kink" else min(range(len(tolerances)), key=tolerances.__getitem__)
    line, tolerance = lines[best], tolerances[best]
    size = max(abs(line.analytic), abs(line.left), abs(line.right))
    error = _ratio(abs(line.slope - line.analytic), max(size, tolerance if math.isfinite(tolerance) else 0.0))
    detects = _ratio(tolerance, point.shares[index])
    # The larger one-sided error: a plateau for a kink, too, where the slope of both sides may be right.
    errors = [_ratio(max(abs(at.left - at.analytic), abs(at.right - at.analytic)), size) for at in lines]
    measured = (line.step, line.analytic, line.slope, line.left, line.right)
    return Row(row.name, row.verdict, error, *measured, detects, (SWEEP, errors))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf if a else 0.0


def _result(loss: Loss, rows: list[Row]) -> Check:
    worst = min(rows, key=lambda row: (SEVERITY.index(row.verdict), -row.error if row.error == row.error else 0.0))
    return Check(worst.verdict, worst.name, (*rows, *(Row(name, "frozen") for name in loss.frozen)), loss.note)
