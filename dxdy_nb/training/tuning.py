"""Which learning rate? A range test gives a bracket, and short runs in it give an answer.

The known rules that read a single number off a range test differ from each other by up to sixty times, and none of them
is safe (``benchmarks/tuning.py``): so they only bound the search, and validation decides.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.batches import is_one_shot
from dxdy_nb.observe.kept import kept
from dxdy_nb.ranks.session import pick_device
from dxdy_nb.runs.environment import attended
from dxdy_nb.runs.record import Run
from dxdy_nb.training import datasets, models
from dxdy_nb.training.loop import train, train_step
from dxdy_nb.training.parts import pick_loss, pick_optimizer, seed_everything

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SMOOTHING = 0.98  # of the losses of a range test, as fastai does it
LAST = 5  # as many of its last losses, where it blows up, are left out, and the first tenth, where nothing happens
FEWEST = 50  # steps of a range test
# A loss falls if its mean over some tenth of the steps is so far below that over the first, where rates are tiny: in
# standard errors of the difference, and relative to the loss.
SURE, FLAT = 3, 1e-3
DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # the rates that are tried without a bracket
MOST = 11  # short runs: five of a grid, and six more around the best


class Bracket(NamedTuple("Ends", [("low", float), ("high", float)])):
    """Two learning rates, ``(low, high)``, between which to search; and the range test that they were read off.

    ``rates`` and ``losses`` (smoothed) are its curve; ``rules`` is what three known rules would have said, by name.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    rules: Mapping[str, float]

    def plot(self) -> "Figure":
        """Return the smoothed loss over the learning rate, the bracket shaded."""
        from dxdy_nb.lesson import plots

        return plots.lr_range(self)


def lr_range_test(
    *,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    max_grad_norm: float | None = None,
) -> Bracket | None:
    """Return a bracket of learning rates from a short training whose rate grows at each step.

    Afterwards all is as it was, bit by bit: model, optimizer, gradients, random generators, the loader's own too. The
    bracket reaches from two thirds down the smoothed loss's longest valley, a rule that is rarely too high, to the rate
    of its minimum, above which it rises. It is a place to search in, no answer: see ``lr_search``.

    Parameters
    ----------
    loss_fn : called as ``loss_fn(model(x), y)``
    loader : gives batches ``(x, y, ...)``; it is read anew whenever it ends
    optimizer : one whose groups have different rates keeps their proportions; ``low`` and ``high`` are the largest's
    low, high, steps : the ramp from the lowest rate to the highest, in at least 50 steps
    max_grad_norm : clip as the training will

    Returns
    -------
    The bracket, or None where the curve has none: then a warning says why.

    Raises
    ------
    DxdyError
        A ramp that does not rise, a loader without at least two batches or one that can be read only once, an optimizer
        that owns none of the model's trainable parameters or is LBFGS, a bound on gradients that is not above zero, a
        loss that is no single number.

    Notes
    -----
    Sources: Smith 2015, "Cyclical learning rates"; rules, smoothing and what is left out at both ends are fastai's.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> loader = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 16, 2)]
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> low, high = lr_range_test(model=model, loss_fn=nn.functional.mse_loss, loader=loader, optimizer=optimizer)
    >>> 0.01 < low < high < 10
    True
    """
    _ask(model, loader, optimizer, low, high, steps)
    if not callable(loss_fn):
        raise DxdyError(f"loss_fn: expected a function of (model(x), y), got {type(loss_fn).__name__}.")
    if not (max_grad_norm is None or (isinstance(max_grad_norm, Real) and max_grad_norm > 0)):
        raise DxdyError(f"max_grad_norm: expected a number above 0, or None, got {max_grad_norm!r}.")

    def number(output: Any, target: Any) -> Tensor:
        loss = loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise DxdyError(f"loss_fn: expected it to return one number, got {seen}. Reduce it: .mean().")
        return loss

    with kept(model, loss_fn, optimizer, sources=(loader,)), torch.enable_grad():
        if not model.training:  # parts that are in eval mode while the whole is not are frozen: they stay so
            model.train()
        rates, losses = _ramp(model, number, loader, optimizer, np.geomspace(low, high, steps).tolist(), max_grad_norm)
    if reason := _no_bracket(losses, steps):
        warnings.warn(f"lr_range_test: no bracket. {reason}", stacklevel=2)
        return None
    smooth = smoothed(losses)
    said = rules(rates[steps // 10 : -LAST], smooth[steps // 10 : -LAST])
    bracket = Bracket(min(said["valley"], said["min/10"]), 10 * said["min/10"])  # in a smooth curve the valley is lower
    bracket.rates, bracket.losses, bracket.rules = rates, smooth, said
    return bracket


def _ask(model: Any, loader: Any, optimizer: Any, low: float, high: float, steps: int) -> None:
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(given, kind):
            raise DxdyError(f"{name}: expected a {kind.__name__}, got {type(given).__name__}.")
    numbers = isinstance(low, Real) and isinstance(high, Real) and isinstance(steps, Integral)
    if not numbers or not 0 < low < high < math.inf or steps < FEWEST:
        seen = f"{low!r}, {high!r} and {steps!r}"
        raise DxdyError(f"low, high, steps: expected 0 < low < high and at least {FEWEST} steps, got {seen}.")
    if not hasattr(loader, "__iter__") or is_one_shot(loader):
        seen = type(loader).__name__
        raise DxdyError(f"loader: expected batches that can be read again, as a DataLoader's or a list's; got {seen}.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise DxdyError("optimizer: LBFGS asks for the loss several times a step. Give another, or a rate by hand.")
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if not trainable:
        raise DxdyError("model: no parameter requires a gradient. Call requires_grad_() on those that are to learn.")
    if trainable.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise DxdyError("optimizer: owns no trainable parameter of the model. Make it anew, of model.parameters().")


def _ramp(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    rates: Sequence[float],
    max_grad_norm: float | None,
) -> tuple[list[float], list[float]]:
    """Train with one rate after the other; return rates and losses up to where the loss is not finite or blows up."""
    largest = max(float(group["lr"]) for group in optimizer.param_groups)
    shares = [float(group["lr"]) / largest if largest > 0 else 1.0 for group in optimizer.param_groups]
    device = next(model.parameters()).device
    losses: list[float] = []
    ramp = tqdm(rates, desc="range test", unit="step", disable=not attended(), leave=False)
    for rate, (x, y) in zip(ramp, _endless(loader), strict=False):
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate * share
        x, y = (part.to(device) if isinstance(part, Tensor) else part for part in (x, y))
        loss = train_step(model, x, y, loss_fn, optimizer, max_grad_norm)
        if not math.isfinite(loss):
            break
        losses.append(loss)
        now, best = smoothed(losses)[-1], min(smoothed(losses))
        if len(losses) > len(rates) // 10 and now - best > 3 * max(abs(best), losses[0] - best):
            break
    return list(rates[: len(losses)]), losses


def _endless(loader: Iterable[Any]) -> Iterator[Sequence[Any]]:
    while True:
        count = 0
        for batch in loader:
            count += 1
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                seen = type(batch).__name__
                raise DxdyError(f"loader: expected batches (x, y, ...), got {seen}. Wrap it in one that gives pairs.")
            yield batch[:2]
        if count < 2:
            raise DxdyError(f"loader: expected at least two batches a pass, got {count}. Make the batches smaller.")


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average of losses, without the bias towards zero at its start.

    Examples
    --------
    >>> [round(mean, 2) for mean in smoothed([2.0, 4.0])]
    [2.0, 3.01]
    """
    mean, result = 0.0, []
    for place, loss in enumerate(losses, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        result.append(mean / (1 - SMOOTHING**place))
    return result


def _no_bracket(losses: Sequence[float], steps: int) -> str | None:
    """Return why the losses of a range test have no bracket."""
    tenth = steps // 10
    if len(losses) <= tenth:
        return f"The loss is not finite at step {len(losses)}, where the rate is still tiny. Try dx.diagnose."
    if len(losses) < tenth + 2 * LAST:
        return f"The loss blew up at step {len(losses)} of {steps}: too early to read anything. Give a lower low."
    means = np.convolve(losses, np.full(tenth, 1 / tenth), "valid")
    fall, noise = means[0] - means.min(), np.std(losses[:tenth])
    if fall <= max(SURE * math.sqrt(2 / tenth) * noise, FLAT * abs(means[0])):
        return (
            f"The loss does not fall at any rate: from {means[0]:.4g} by {fall:.2g} at most, its noise is {noise:.2g}. "
            "Give more steps, or try dx.diagnose."
        )
    if len(losses) == steps and means.argmin() == len(means) - 1:
        return "The loss still falls at the highest rate: where it rises is not seen. Raise high."
    return None


def rules(rates: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """Return the rates that the three known rules read off a smoothed curve: ``steep``, ``min/10`` and ``valley``.

    Source: fastai's ``lr_find``. Its valley is the longest falling subsequence, of which it takes the point after two
    thirds of the length, counted back from the end even where the subsequence has gaps.

    Examples
    --------
    >>> rules([1e-3, 1e-2, 1e-1, 1.0], [2.0, 1.5, 0.5, 3.0])
    {'steep': 0.01, 'min/10': 0.01, 'valley': 0.001}
    """
    slopes = np.diff(losses) / np.diff(np.log(rates))
    lengths: list[int] = []
    for place, loss in enumerate(losses):
        lengths.append(1 + max((lengths[i] for i in range(place) if losses[i] > loss), default=0))
    end = int(np.argmax(lengths))
    third = lengths[end] / 3
    valley = max(end - lengths[end] + int(third) + int(third / 2), 0)
    return {"steep": rates[int(slopes.argmin())], "min/10": rates[int(np.argmin(losses))] / 10, "valley": rates[valley]}


@dataclass(frozen=True)
class Search:
    """Short runs at several learning rates, diverged ones too, in the order of their rates.

    ``best`` is the rate with the smallest validation loss, None where no run completed.
    """

    best: float | None
    bracket: Bracket | None
    runs: tuple[Run, ...] = field(repr=False)

    @property
    def table(self) -> "pd.DataFrame":
        """One row a run, index ``rate``: validation_loss (infinite unless completed), status and folder."""
        import pandas as pd

        rows = [(run.config.lr, validation_loss(run), run.status, str(run.folder)) for run in self.runs]
        return pd.DataFrame(rows, columns=["rate", "validation_loss", "status", "folder"]).set_index("rate")

    def plot(self) -> "Figure":
        """Return the validation loss over the learning rate: the best marked, diverged runs as red crosses."""
        from dxdy_nb.lesson import plots

        return plots.lr_search(self)


def lr_search(config: RunConfig, *, steps: int = 150, out: str | Path | None = None) -> Search:
    """Return short runs at three to five rates of a range test's bracket, and up to six more around the best.

    All have the configuration's seed, data, validation and schedule, the latter squeezed into ``steps``. Those around
    the best are at about three times and a third of its rate, to see both edges, then at the square roots of these;
    where the best is still at an edge after six of them, a warning says so. Without a bracket decades are searched.

    Parameters
    ----------
    steps : of each run, at most; ``config.max_steps`` counts where it is smaller
    out : a folder for the runs, which must not hold them already; without it each goes to ``runs/<id>/``

    Raises
    ------
    DxdyError
        As ``train`` and ``lr_range_test`` do.

    Examples
    --------
    >>> search = lr_search(RunConfig(data="spirals", model="mlp"), steps=30, out=tmp_path)
    >>> 0.01 < search.best < 10
    True
    """
    if not isinstance(config, RunConfig):
        raise DxdyError(f"lr_search: expected a dx.RunConfig as config, got {type(config).__name__}.")
    short = config.override({"max_steps": steps}).max_steps  # a number now, or refused
    config = config.override({"max_steps": min(filter(None, (short, config.max_steps)), default=None)})
    bracket = _bracket(config)
    runs: dict[float, Run] = {}
    waiting = _grid(bracket)
    with tqdm(desc="short runs", unit="run", disable=not attended(), leave=False) as bar:
        while waiting:
            rate = float(f"{waiting.pop(0):.2g}")  # as exact as anybody needs a rate
            folder = Path(out) / f"lr-{rate:g}" if out else None
            runs[rate] = train(config.override({"lr": rate}), out=folder)
            bar.update()
            waiting = waiting or _missing(runs)
    best = _best(runs)
    found = math.isfinite(validation_loss(runs[best]))
    if not found:
        warnings.warn(f"lr_search: no run completed, down to a rate of {min(runs):g}.", stacklevel=2)
    elif best in (min(runs), max(runs)):
        edge = "lower" if best == min(runs) else "upper"
        warnings.warn(f"lr_search: the best rate, {best:g}, is at the {edge} edge of what was tried.", stacklevel=2)
    return Search(best if found else None, bracket, tuple(runs[rate] for rate in sorted(runs)))


def validation_loss(run: Run) -> float:
    """Return the last validation loss of a completed run; infinity for any other run."""
    loss = run.metrics.get("validation_loss")
    return loss if run.status == "completed" and loss is not None and math.isfinite(loss) else math.inf


def _bracket(config: RunConfig) -> Bracket | None:
    """Return the range test of a configuration, set up as ``train`` does it."""
    data = datasets.load(config.data, config.seed)
    seed_everything(config.seed)
    model = models.build(config.model, data.train.x[0], data.classes)
    models.initialise(model, config.init)
    model.to(pick_device(config.device))
    return lr_range_test(
        model=model,
        loss_fn=pick_loss(config.loss),
        loader=datasets.loader(data.train, config.batch_size, shuffle_seed=config.seed),
        optimizer=pick_optimizer(config, model),
        max_grad_norm=config.max_grad_norm,
    )


def _grid(bracket: Bracket | None) -> list[float]:
    """Return three to five rates, a factor of three apart where the bracket allows it; decades without one."""
    if bracket is None:
        return list(DECADES)
    return np.geomspace(*bracket, min(max(1 + math.ceil(math.log(bracket.high / bracket.low, 3)), 3), 5)).tolist()


def _missing(runs: Mapping[float, Run]) -> list[float]:
    """Return a rate to try next, while the runs show neither both edges of the best nor what is close to it."""
    best = _best(runs)
    for factor, slack in ((3, 2), (1 / 3, 2), (3**0.5, 1.3), (3**-0.5, 1.3)):
        wanted = factor * best
        if len(runs) < MOST and all(max(rate / wanted, wanted / rate) > slack for rate in runs):
            return [wanted]
    return []


def _best(runs: Mapping[float, Run]) -> float:
    return min(runs, key=lambda rate: (validation_loss(runs[rate]), rate))
