"""What a table of losses still tells: which kind of spike, rise or standstill it shows, and what it cannot say."""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dxdy_nb.diagnosis.report import Finding, Report, Severity, found, listed
from dxdy_nb.errors import DxdyError, counted

Numbers = np.ndarray[Any, np.dtype[np.float64]]
PERIODS = 6  # fewer are no rhythm
FEW = 20  # rows, of which nothing is said
WINDOW = 50  # rows that a row is compared with, those before it
SPIKE = 10.0  # times the usual deviation of those rows from their median: once in 10^15 rows of Gaussian noise
# Classes whose chance level, ln(classes), is told at sight.
CLASSES = (*range(2, 13), 20, 50, 100, 1000, 21841, 30522, 32000, 50257)
NAMES = ("loss", "train_?loss", "training_?loss", "(?!val|test|eval|dev).*loss.*", ".*loss.*", "value")  # best first
STEPS = ("(global|train)?_?steps?", "iter(ation)?s?", "batch", "epoch")
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """The losses of a table, in its order, with the step and the line of the file that each stands at."""

    path: Path
    column: str
    steps: Numbers
    losses: Numbers
    lines: np.ndarray[Any, np.dtype[np.int64]]
    empty: int

    def at(self, row: int) -> str:
        """Return the step and the loss of a row."""
        return f"step {self.steps[row]:.15g} ({self.losses[row]:.4g})"

    def found(self, cause: str, row: int, evidence: str, error: bool = False) -> Finding:
        """Return a finding at a row; its check shows the lines about it."""
        lines = f"{max(0, self.lines[row] - 10)}:{self.lines[row] + 10}"
        where = f"{self.path.name}, column {self.column}, step {self.steps[row]:.15g}"
        severity: Severity = "error" if error else "hint"
        return found(cause, where, evidence, severity=severity, path=repr(str(self.path)), lines=lines)

    def cut(self, rows: Any) -> "Curve":
        """Return some of the rows."""
        return replace(self, steps=self.steps[rows], losses=self.losses[rows], lines=self.lines[rows])


@np.errstate(all="ignore")  # losses near the end of a float's range have infinite sums and differences
def report(path: Path) -> Report:
    """Return what a table of losses tells, all of it hints but for a loss that stays not finite."""
    whole = _read(path)
    curve = whole.cut(np.isfinite(whole.losses))
    findings = [*_not_finite(whole), *_restarted(whole)]
    if len(curve.losses) >= FEW:
        findings += list(_flat(curve)) or list(_sawtooth(curve)) or list(_jumps_and_rise(curve))
    ends = " → ".join(f"{np.median(part):.4g}" for part in (curve.losses[:10], curve.losses[-10:]))
    saw = {
        "column": f"{whole.column}: {len(whole.losses):,} losses, {len(whole.losses) - len(curve.losses)} not finite",
        "steps": f"{whole.steps[0]:.15g} to {whole.steps[-1]:.15g}",
        "loss": f"{ends} (medians of the first and the last 10), lowest {curve.losses.min():.4g}",
        "curve": _picture(curve.losses),
    }
    short = f"kinds of spikes, rises and standstills: {len(curve.losses)} losses are too few"
    unknown = [
        *([short] if len(curve.losses) < FEW else []),
        "why: which batch, gradient or rate was behind it is not in a loss. Record them: dxdy watch train.py",
        "whether it holds for data that the model has not seen: that takes a validation loss",
    ]
    if whole.empty:
        unknown.append(f"{whole.empty} empty cells: not logged there, or NaN, which pandas writes so")
    return Report(tuple(findings), saw, tuple(unknown))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read(path: Path) -> Curve:
    columns, lines = _table(path)
    numeric = {n: c for n, c in columns.items() if any(c) and all(not x or _number(x) is not None for x in c)}
    column = _named(numeric, NAMES) or next((name for name in numeric if list(columns) == [name]), None)
    if column is None and (named := _named(columns, NAMES)) is not None:
        at, odd = next(
            ((n, x) for n, x in zip(lines, columns[named], strict=True) if _number(x) is None and x), (0, "")
        )
        seen = (
            f"line {at + 1} has {odd!r}, and a number is written like 1234.5, or nan" if odd else "no cell has a number"
        )
        raise DxdyError(f"inspect: {path}: column {named} cannot be read: {seen}.")
    if column is None:
        raise DxdyError(
            f"inspect: {path}: no column of numbers is called loss or like it. Columns: {listed(columns, 8)}."
        )
    counted = _named({name: cells for name, cells in numeric.items() if name != column}, STEPS)
    kept = [row for row, cell in enumerate(numeric[column]) if cell]
    losses = np.array([float(numeric[column][row]) for row in kept])
    if np.isfinite(losses).sum() < 2:
        raise DxdyError(f"inspect: {path}: {len(losses)} losses in column {column}, fewer than two of them finite.")
    rows = np.array(kept, float)
    steps = np.array([float(numeric[counted][row] or "nan") for row in kept]) if counted else rows
    # An epoch's number, or a step that begins anew in each epoch, does not say where in the run a row stands.
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if not np.isfinite(steps).all() or len(set(steps)) < len(steps) / 2 or (len(back) > 1 and not np.ptp(steps[back])):
        steps = rows
    return Curve(path, column, steps, losses, lines[kept], len(lines) - len(kept))


def _table(path: Path) -> tuple[dict[str, list[str]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the columns of a text table, and the number of each row's line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        mark = max(",;\t", key=lines[0].count)
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=mark)]
    except (UnicodeDecodeError, csv.Error):
        raise DxdyError(f"inspect: {path} is neither a checkpoint nor a text table.") from None
    if len(rows[0]) == 1:  # perhaps columns with spaces in between
        rows = [row[0].split() if row else row for row in rows]
    filled = [(number, row) for number, row in enumerate(rows) if any(row)]
    head = filled[0][1] if filled else []
    if any(_number(cell) is None for cell in head):
        filled = filled[1:]
    else:
        head = {1: ["loss"], 2: ["step", "loss"]}.get(len(head), [f"{i}" for i in range(len(head))])
    columns = {name: [row[i] if i < len(row) else "" for _, row in filled] for i, name in enumerate(head)}
    return columns, np.array([number for number, _ in filled], int)


def _named(columns: dict[str, Any], patterns: tuple[str, ...]) -> str | None:
    names = {re.sub(r"[^a-z]+", "_", name.lower()).strip("_"): name for name in reversed(columns)}
    return next((names[n] for pattern in patterns for n in reversed(names) if re.fullmatch(pattern, n)), None)


def _picture(losses: Numbers) -> str:
    middles = np.array([np.median(part) for part in np.array_split(losses, min(60, len(losses)))])
    middles = middles / max(np.abs(middles).max(), 1.0)  # the difference of two numbers of 1e308 is infinite
    low, high = middles.min(), middles.max()
    return "".join(BARS[int(7.99 * (value - low) / (high - low))] if high > low else BARS[0] for value in middles)


def _level(value: float) -> str:
    """Return a level of loss, and the number of classes whose chance level it is."""
    classes = [n for n in CLASSES if abs(value - math.log(n)) < 0.015 * math.log(n)]
    near = min(classes, key=lambda n: abs(value - math.log(n)), default=0)
    return f"{value:.4g}" + (f", the chance level of {near} classes, ln({near})" if near else "")


def _means(y: Numbers, window: int) -> Numbers:
    return pd.Series(y).rolling(window, center=True, min_periods=1).mean().to_numpy()


def _noise(losses: Numbers) -> float:
    """Return the standard deviation of Gaussian noise about a slowly changing level."""
    return float(1.4826 * np.median(np.abs(np.diff(losses))) / math.sqrt(2))


def _not_finite(curve: Curve) -> Iterator[Finding]:
    bad = np.flatnonzero(~np.isfinite(curve.losses))
    if not len(bad):
        return
    first, stays = int(bad[0]), len(bad) == len(curve.losses) - bad[0]
    before = ", ".join(f"{value:.4g}" for value in curve.losses[max(0, first - 10) : first]) or "none"
    after = "and in every row after it" if stays else f"in {counted(len(bad), 'row')}, with finite ones after it"
    words = f"{curve.losses[first]} first at step {curve.steps[first]:.15g}, {after}; the rows before: {before}"
    yield curve.found("loss-not-finite", first, words, error=stays)


def _restarted(curve: Curve) -> Iterator[Finding]:
    for row in map(int, np.flatnonzero(np.diff(curve.steps) < 0)[:3] + 1):
        words = f"the counter goes from {curve.steps[row - 1]:.15g} back to {curve.steps[row]:.15g}"
        again, first, second = np.intersect1d(curve.steps[:row], curve.steps[row:], return_indices=True)
        old, new = (
            (float(np.mean(part)) for part in (curve.losses[first], curve.losses[row:][second]))
            if len(again)
            else (curve.losses[row - 1], curve.losses[row])
        )
        made = f" in {counted(len(again), 'step')} that it made twice" if len(again) else ""
        yield curve.found("resumed-earlier", row, f"{words}; the loss is {old:.4g} and then {new:.4g}{made}")


def _jumps_and_rise(curve: Curve) -> Iterator[Finding]:
    start = _rise(curve)
    if start != 0:
        yield from _jumps(curve.cut(slice(start)))
    if start is not None:
        words = f"from {curve.at(start)} to {curve.at(-1)}"
        if (curve.losses[start:] > 0).all():
            slope = np.polyfit(curve.steps[start:], np.log(curve.losses[start:]), 1)[0]
            words += f", by a factor of {np.exp(slope):.4g} a step"
        yield curve.found("loss-rises", start, words)


def _rise(curve: Curve) -> int | None:
    """Return the row from which on the loss rises to the end, by more than one jump."""
    smooth = pd.Series(curve.losses).rolling(5, center=True, min_periods=1).median().to_numpy()
    height = np.log(smooth) if (smooth > 0).all() else smooth
    rise, span = height[-1] - height.min(), smooth[-1] - smooth.min()
    start = int(np.flatnonzero(height <= height.min() + max(0.05 * rise, 2 * _noise(height)))[-1])
    tail = height[start:]
    little = len(tail) < 8 or span < max(5 * _noise(curve.losses), 0.25 * np.ptp(smooth))
    if little or tail[-1] < tail.max() - 0.1 * rise or np.diff(tail).max() > 0.5 * rise:
        return None
    return start if np.corrcoef(np.arange(len(tail)), tail)[0, 1] > 0.9 else None


def _flat(curve: Curve) -> Iterator[Finding]:
    """The loss stays what it was at the beginning."""
    y, quarters = curve.losses, [float(np.mean(part)) for part in np.array_split(curve.losses, 4)]
    level, doubt = float(np.median(y)), 8 * float(np.std(y)) / math.sqrt(len(y))
    if np.ptp(quarters) <= min(doubt, 0.02 * abs(level)):
        means = f"its quarters have the means {listed((f'{m:.4g}' for m in quarters), 4)}"
        words = f"{_level(level)}, from the first row to the last: {means if np.ptp(y) else 'the same number'}"
        yield curve.found("loss-flat", 0, words)


def _events(y: Numbers) -> Iterator[tuple[int, int, float]]:
    """Yield where the loss jumps up: the row, the first row at which it is back (or the end), the level before."""
    series, count = pd.Series(y), len(y)
    before = series.shift(1).rolling(9, min_periods=5).median()
    moves = series.diff().abs().rolling(WINDOW, center=True, min_periods=20)
    noise = pd.concat([1.05 * moves.median(), 0.43 * moves.quantile(0.9), 1e-3 * before.abs()], axis=1).max(axis=1)
    ahead = series[::-1].rolling(5, min_periods=1).median()[::-1].to_numpy()  # of a row and the four after it
    high = (y - before > 0.05 * np.subtract(*np.percentile(y, (95, 5)))).to_numpy()
    score = ((series - before) / noise).where(high, 0.0).to_numpy(copy=True)
    events, row = [], 0
    while (onsets := row + np.flatnonzero(score[row:] > SPIKE)).size:
        start = int(onsets[0])
        calm = before[start] + max(3 * noise[start], 0.1 * (y[start : start + WINDOW].max() - before[start]))
        back = start + 1 + np.flatnonzero(ahead[start + 1 :] <= calm)
        row = int(back[0] + np.argmax(y[back[0] :] <= calm)) if len(back) else count
        events.append((start, row, float(before[start])))
    peaks = [score[start:end].max() for start, end, _ in events]
    for start, end, _ in events:
        score[start:end] = 0.0
    # What stands out by less than that is the far end of what the noise does anyway.
    yield from (event for event, peak in zip(events, peaks, strict=True) if peak > 2.5 * score.max())


def _jumps(curve: Curve) -> Iterator[Finding]:
    """Single rows stand out; the loss comes back slowly from a jump; or it stays up."""
    y, kinds = curve.losses, dict[str, list[tuple[int, str]]]()
    for start, end, level in _events(y):
        top, last, after = (
            y[start:end].max(),
            float(np.median(y[-max(5, (len(y) - start) // 4) :])),
            y[start : start + 10],
        )
        words = f"at {curve.at(start)} from {level:.4g} to {top:.4g}"
        if end - start <= 3:
            cause = "loss-spike"
        elif end < len(y) or last - level < 0.5 * (np.median(after) - level):
            cause, half = (
                "loss-spike-decays",
                int(np.argmax(y[start + int(np.argmax(y[start:end])) :] <= (level + top) / 2)),
            )
            ends = f"back at step {curve.steps[end]:.15g}" if end < len(y) else f"{last:.4g} when the table ends"
            words += f", half of it gone after {counted(half, 'row')}, {ends}"
        else:
            cause, words = (
                "loss-steps-up",
                f"{words}; {counted(len(y) - start, 'row')} later, at the end, {_level(last)}",
            )
        kinds.setdefault(cause, []).append((start, words))
    for cause, seen in kinds.items():
        gaps = np.diff([start for start, _ in seen])
        every = f"every {min(gaps)} rows: " if len(gaps) > 1 and np.ptp(gaps) <= 2 else ""
        if cause != "loss-spike" or len(seen) <= max(3, len(y) // 50):  # more of them are noise with a heavy tail
            yield curve.found(cause, seen[0][0], every + listed(words for _, words in seen))


def _sawtooth(curve: Curve) -> Iterator[Finding]:
    """The loss repeats one shape, period after period."""
    y = curve.losses[len(curve.losses) // 5 :]  # without the first fall
    for window in (len(y) // share for share in (50, 16, 5)):
        period = _period(y, window)
        if period is None:
            continue
        best = max(np.arange(period - 0.5, period + 0.51, 0.1), key=lambda p: float(np.ptp(_shapes(y, p).mean(0))))
        shapes = _shapes(y, best)
        others = (shapes.sum(0) - shapes) / (len(shapes) - 1)
        alike = [np.corrcoef(one, other)[0, 1] for one, other in zip(shapes, others, strict=True)]
        if len(shapes) < PERIODS or np.quantile(alike, 0.1) < 0.2 or np.mean(alike) < 0.6:
            continue
        turns = np.diff(shape := shapes.mean(0), append=shape[0]) / np.ptp(shape)
        how = "falls at once and rises in between" if -turns.min() > 0.5 else "goes up and down"
        how = "rises at once and falls in between" if turns.max() > 0.5 else how
        words = f"it {how} every {best:.4g} rows, {len(shapes)} times, by {np.ptp(shape):.3g}"
        yield curve.found("loss-periodic", 0, f"{words}; compare with the rows of an epoch")
        return


def _period(y: Numbers, window: int) -> int | None:
    """Return the lag, below the window, at which losses without what changes more slowly are most alike."""
    if window < 12:
        return None
    rest = (y - _means(y, window))[window // 2 : -(window // 2)]
    rest = np.clip(rest, *np.percentile(rest, (2, 98)))
    rest -= rest.mean()
    alike = np.fft.irfft(np.abs(np.fft.rfft(rest, 2 * len(rest))) ** 2)[:window]  # autocorrelation
    alike[: int(np.argmax(alike < 0)) or window] = 0.0  # a row is like those next to it
    first = int(np.argmax(alike > 0.75 * alike.max()))  # and as much as after one period, after two
    lag = first + int(np.argmax(alike[first : first + first // 4 + 1]))
    return lag if lag >= 4 and alike[lag] > 0.3 * float(np.sum(rest**2)) else None


def _shapes(y: Numbers, period: float, most: int = 12) -> Numbers:
    """Return each period's mean course, without the trend, in a few bins: shape (periods, bins)."""
    rest, bins = y - _means(y, round(period)), min(most, int(period))
    phase = np.arange(len(y)) / period
    index = phase.astype(int) * bins + (phase % 1 * bins).astype(int)
    whole = int(len(y) / period) * bins
    totals = np.bincount(index, rest)[:whole] / np.maximum(np.bincount(index)[:whole], 1)
    return totals.reshape(-1, bins)
