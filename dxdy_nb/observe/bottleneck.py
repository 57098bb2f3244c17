"""What a loop's time goes to, in plain words: only what its steps and events carry, with the figures behind it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dxdy_nb.errors import counted

if TYPE_CHECKING:
    import pandas as pd

FEW = 5  # steps: a median of fewer says nothing
# A part that is a fifth of the time can make training at most 1 / (1 - 0.2) = 1.25 times faster: less is not worth it.
WORTH_IT = 0.2
# Half of a step does not depend on the batch: twice the batch then takes at most 1.5 times as long.
FIXED = 0.5
RARE = 10  # times the median: longer than the spread of a busy machine, shorter than a checkpoint or a worker's start
# Dispatching an operation costs microseconds, and a small net has hundreds of them: below, that may be all there is.
SHORT_STEP = 2e-3  # seconds
PHASES = ("data", "forward", "backward", "update", "other", "between")


@dataclass(frozen=True)
class Bottleneck:
    """Where the time goes: a name, a sentence for people, and the figures that the sentence rests on.

    ``name`` is ``data``, ``pauses``, ``fixed costs``, ``copies``, ``own code``, ``update``, ``compute`` or ``unknown``;
    ``share`` is the part of the time (0 to 1, NaN when unknown) that is gone at best when it is cured.
    """

    name: str
    sentence: str
    share: float = float("nan")
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.sentence


def bottleneck(record: Any) -> Bottleneck:
    """Return what a loop's time goes to.

    Parameters
    ----------
    record : anything with ``steps`` as a watch or a run has it; its ``events`` and ``loaders`` are used where present

    Notes
    -----
    The first step is left out: it starts workers, compiles and warms up. Of several causes the one with the largest
    part of the time is named. On a GPU the phases are times of the process that launches its work.

    Examples
    --------
    >>> import pandas as pd
    >>> times = {"data_time": 0.09, "forward_time": 0.002, "backward_time": 0.003, "update_time": 0.001}
    >>> class Record:
    ...     steps = pd.DataFrame([{"step_time": 0.1, "effective_batch": 32, **times}] * 20)
    >>> found = bottleneck(Record)
    >>> found.name, round(found.share, 2)
    ('data', 0.9)
    """
    times, events = phase_times(record), getattr(record, "events", ())
    if len(times) < FEW:
        return Bottleneck("unknown", f"{counted(len(record.steps), 'step')}: too few to tell what takes the time.")
    found = [
        _data(times, list(getattr(record, "loaders", {}).values())),
        _restarts(times, list(getattr(record, "loaders", {}).values())),
        _pauses(times, events),
        _fixed_costs(times, record.steps["effective_batch"].loc[times.index]),
        _copies(times, events),
        _own_code(times, events),
        _update(times),
    ]
    sure = [one for one in found if one is not None]
    return max(sure, key=lambda one: one.share) if sure else _compute(times)


def phase_times(record: Any) -> "pd.DataFrame":
    """Return seconds for each step and phase: data, forward, backward, update, other, and what passed before the step.

    ``other`` is what a step has besides its four phases: the loss, zero_grad, clipping, moving a batch. ``between``
    runs from the end of the step before, without the time of the watch itself; only steps of which the events tell it
    are in the table, or all but the first with 0 where no event does.
    """
    steps = record.steps
    table = steps[[f"{phase}_time" for phase in PHASES[:4]]].set_axis(list(PHASES[:4]), axis=1)
    table["other"] = (steps["step_time"] - table.sum(axis=1)).clip(lower=0)
    events = getattr(record, "events", ())
    ends = {event.step: event.time for event in events if event.kind in ("step", "skip")}
    ended = steps.index.to_series().map(ends).astype(float)
    watching = steps.index.to_series().map(_values(events, "watch")).fillna(0.0)  # it is in no other phase
    table["between"] = (ended - steps["step_time"] - ended.shift() - watching).clip(lower=0)
    known = table.dropna()
    return known if len(known) else table[1:].fillna(0.0)


def shares(times: "pd.DataFrame") -> dict[str, float]:
    """Return each phase's part of the whole time, 0 to 1."""
    whole = float(times.to_numpy().sum())
    return {phase: float(times[phase].sum()) / whole if whole else 0.0 for phase in times.columns}


def _data(times: "pd.DataFrame", loaders: list[Any]) -> Bottleneck | None:
    share = shares(times)["data"]
    if share < WORTH_IT:
        return None
    data, typical = times["data"], float(times["data"].median())
    length = float(times.sum(axis=1).median())
    slow = data[data > max(RARE * typical, length)]  # a fetch that is longer than a whole step
    figures = {"share": share, "median_fetch": typical, "median_step": length, "slow_fetches": len(slow)}
    every = _period(slow.index)
    if every and slow.sum() > data.sum() / 2:
        text = f"Waiting for data: every {every} steps a fetch takes {_time(slow.median())}, else {_time(typical)}"
        figures |= {"slow_fetch": float(slow.median()), "every": every}
        return Bottleneck("data", f"{text}. {_at_best(share)}", share, figures)
    text = f"Waiting for data: {_percent(share)} of the time; a fetch takes {_time(typical)} of {_time(length)} a step"
    workers = {one.workers for one in loaders}
    if workers == {0}:
        text += ". The loop itself makes each batch (num_workers=0): workers make them meanwhile"
    elif len(workers) == 1:
        text += f". With {counted(max(workers), 'worker')} it cannot keep up: more of them, or less work for a sample"
    return Bottleneck("data", f"{text}. {_at_best(share)}", share, figures)


def _restarts(times: "pd.DataFrame", loaders: list[Any]) -> Bottleneck | None:
    """Name workers that are started for each epoch: partly before the first fetch is asked for, partly during it."""
    start, length = times["data"] + times["between"], float(times.sum(axis=1).median())
    # The first epoch began before the first step. If the longest starts, as many as there were epochs, come at equal
    # distances, it is no chance.
    counts = [one.epochs - 1 for one in loaders if one.restarts]
    slow = start.nlargest(max(counts, default=0)).sort_index()
    share, every = float(slow.sum()) / float(times.to_numpy().sum()), _period(slow.index)
    if share < WORTH_IT or every is None or slow.min() < length:
        return None
    text = f"Waiting for data: every {every} steps, where an epoch begins, {_time(slow.median())} pass until its first "
    text += "batch is there. The loader starts its workers anew each time, which persistent_workers=True spares"
    figures = {"share": share, "every": every, "median_start": float(slow.median())}
    return Bottleneck("data", f"{text}. {_at_best(share)}", share, figures)


def _pauses(times: "pd.DataFrame", events: Iterable[Any]) -> Bottleneck | None:
    """Name what comes between steps now and then: saving, validation, logging."""
    between = times["between"]
    within = times.drop(columns="between").sum(axis=1)
    rare = between[between > RARE * max(float(between.median()), float(within.median()))]
    share = float(rare.sum()) / float(times.to_numpy().sum())
    if share < WORTH_IT:
        return None
    every = _period(rare.index)
    when = f"every {every} steps" if every else counted(len(rare), "time")
    text = (
        f"Pauses between steps: {when} about {_time(rare.median())}, as long as {rare.median() / within.median():.0f} "
    )
    text += "steps"
    if rare.index.isin(evaluated := {event.step for event in events if event.kind == "no_grad_forward"}).mean() > 0.5:
        if times.index.isin(evaluated).mean() < 0.5:  # a loop that does so at each step says nothing by it
            text += "; a model ran there without gradients, as in validation"
    else:
        text += "; no model ran there, so it is no validation: saving or logging, perhaps"
    figures = {"share": share, "pauses": len(rare), "median_pause": float(rare.median())}
    return Bottleneck("pauses", f"{text}. {_at_best(share)}", share, figures | ({"every": every} if every else {}))


def _fixed_costs(times: "pd.DataFrame", batches: "pd.Series[int]") -> Bottleneck | None:
    """Compare steps of small batches (the last of an epoch) with the others: an experiment that most loops make."""
    working = times[["forward", "backward", "update", "other"]].sum(axis=1)
    usual = int(batches.median())
    whole, small = working[batches == usual], working[batches <= usual / 2]
    if min(len(whole), len(small)) < FEW or usual < 2:
        return None
    size = float(batches[batches <= usual / 2].median())
    slope = (whole.median() - small.median()) / (usual - size)
    part = min(1.0, 1 - slope * usual / whole.median())
    if part < FIXED:
        return None
    text = f"Fixed costs: a step with {size:.0f} samples takes {_time(small.median())}, one with {usual} "
    text += f"{_time(whole.median())}: {_percent(part)} of it does not depend on the batch. Try a larger batch"
    figures = {"fixed": part, "small_batch": size, "batch": float(usual)}
    figures |= {"median_small": float(small.median()), "median": float(whole.median())}
    share = part * float(working.sum()) / float(times.to_numpy().sum()) / 2  # with twice the batch half of it is gone
    return Bottleneck("fixed costs", f"{text}.", share, figures)


def _copies(times: "pd.DataFrame", events: Iterable[Any]) -> Bottleneck | None:
    """Name the waiting for copies to a device."""
    waited = sum(_values(events, "copy").get(step, 0.0) for step in times.index)
    share = waited / float(times.to_numpy().sum())
    if share < WORTH_IT:
        return None
    text = f"Copies to the device: the loop waits {_time(waited / len(times))} a step, {_percent(share)} of the time. "
    text += "pin_memory=True in the loader and non_blocking=True in .to() let it go on; part of the waiting may be for "
    text += "earlier work of the device"
    return Bottleneck("copies", f"{text}.", share, {"share": share, "seconds_per_step": waited / len(times)})


def _own_code(times: "pd.DataFrame", events: Iterable[Any]) -> Bottleneck | None:
    """Name what passes outside the four phases at a typical step."""
    typical = times.median()
    outside = float(typical["other"] + typical["between"])
    share = outside / float(times.sum(axis=1).median())
    if share < WORTH_IT:
        return None
    text = f"The loop's own code: {_time(outside)} of a typical step, {_percent(share)}, pass outside loading, "
    text += "forward, backward and update: the loss, zero_grad, clipping, moving the batch, metrics, logging"
    if not any(event.kind == "fetch" for event in events):
        text += ", and making the batch, which comes from no DataLoader"
    items = sum(event.value or 0.0 for event in events if event.kind == "item" and event.step in times.index) / len(
        times
    )
    if items >= 1:
        text += f". It takes a number out of a tensor {items:.0f} times a step (.item(), float(), print); on a GPU each"
        text += " waits until the work before it is done"
    return Bottleneck("own code", f"{text}.", share, {"share": share, "outside": outside, "items_per_step": items})


def _update(times: "pd.DataFrame") -> Bottleneck | None:
    part = shares(times)
    if part["update"] < max(WORTH_IT, part["forward"], part["backward"]):
        return None
    text = f"The optimizer's step: {_percent(part['update'])} of the time, more than forward or backward. "
    text += "fused=True or a larger batch may help"
    return Bottleneck("update", f"{text}.", part["update"], {"share": part["update"]})


def _compute(times: "pd.DataFrame") -> Bottleneck:
    """Say that it is computing, unless that is the smaller part."""
    part, length = shares(times), float(times.sum(axis=1).median())
    share = part["forward"] + part["backward"]
    if share < 0.5:
        parts = ", ".join(f"{phase} {_percent(one)}" for phase, one in part.items())
        return Bottleneck("unknown", f"No part stands out: {parts}.", figures=part)
    text = f"Computing: forward and backward take {_percent(share)} of the time; nothing else holds training up"
    if length < SHORT_STEP:
        text += f". A step takes only {_time(length)}: see whether twice the batch takes longer at all"
    return Bottleneck("compute", f"{text}.", share, {"share": share, "median_step": length})


def _values(events: Iterable[Any], kind: str) -> dict[int, float]:
    """Return the values of events of which there is at most one a step."""
    return {event.step: event.value or 0.0 for event in events if event.kind == kind}


def _period(places: Any) -> int | None:
    """Return the distance of places that come at least three times, and always at the same distance."""
    distances = set(np.diff(np.asarray(places)).tolist())
    return int(distances.pop()) if len(places) >= 3 and len(distances) == 1 else None


def _at_best(share: float) -> str:
    return f"Without it training would be at most {1 / max(1 - share, 0.01):.1f} times faster."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
