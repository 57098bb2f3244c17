"""Where the time of ranks that train together goes, and what more of them would win: from their logs alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.ranks.log import Event
from dxdy_nb.ranks.pool import usable_cores
from dxdy_nb.ranks.verify import Ranks, of_folder, windows
from dxdy_nb.runs.folder import RANKS, folder_of

if TYPE_CHECKING:
    import pandas as pd

    from dxdy_nb.runs.record import Run

WARM_UP = 2  # steps: torch lays out its buckets anew after the first
WORTH_IT = 0.1  # of a step: to win less is not worth a change
PAUSE = 3.0  # times the median of what a rank does by itself: a validation, a checkpoint
LARGE = 1 << 20  # bytes: torch's first bucket, below which latency decides
COLUMNS = ("compute", "data", "pauses", "exposed", "waiting", "hidden", "step")


@dataclass(frozen=True)
class Scaling:
    """Where a step's time goes on each rank, what that means, and what more ranks would win.

    ``table`` has a row for each rank, seconds a step. Its first five columns add up to ``step``: ``compute`` (with the
    optimizer and all code of one's own), ``data`` (fetching batches), ``pauses`` (rare long ones: validation, saves),
    ``exposed`` (communication that nothing hides) and ``waiting`` (for later ranks). ``hidden`` is communication during
    the backward pass. ``predicted`` has a row for each number of ranks, with ``step``, ``speedup`` and ``efficiency``.
    """

    table: "pd.DataFrame"
    predicted: "pd.DataFrame"
    steps: int  # that were measured
    samples: int  # a step, of all ranks
    bytes: int  # of gradients a step, of each rank; 0: not seen
    buckets: int
    speedup: float  # in samples a second, over one rank
    against: str  # what the speed-up was measured against
    why: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        shown, told = (self.table * 1e3).round(2), self.predicted.round({"speedup": 2, "efficiency": 2})
        told["step"] = (told["step"] * 1e3).round(2)
        return "\n".join(
            [
                f"milliseconds a step, mean of {self.steps} steps",
                shown.to_string(),
                f"{len(self.table)} ranks are {self.speedup:.2f} times as fast as one ({self.against})",
                *self.why,
                *(f"→ {line}" for line in self.advice),
                "prediction, not a measurement: a core or a GPU for each rank, and links as fast as these",
                told.to_string(),
            ]
        )

    def plot(self) -> Any:
        """Return a figure: a bar for each rank, and the predicted speed-up."""
        from dxdy_nb.lesson import plots

        return plots.scaling(self.table, self.predicted)


def explain_scaling(run: "Run | Ranks | str | Path", baseline: "Run | None" = None) -> Scaling:
    """Return where the time of each rank went, why these ranks are or are not faster than one, and what to change.

    Of what all ranks do together the one that comes last waits least, so the shortest of the ranks' times is taken for
    the communication itself and what a rank spent beyond it for waiting. Clocks of different machines need not agree.
    Times of the gradients' reduction are those that torch keeps of the first ten updates and each hundredth, from the
    first bucket's start to the last one's end. The prediction takes compute and waiting as measured, scales the
    gradients' time with the traffic of a ring, 2 (n - 1) / n of their bytes, and that of small messages with its length
    n - 1 (Patarasuk and Yuan 2009).

    Parameters
    ----------
    run : of ``dx.train`` on several ranks, its folder, or the ranks' logs
    baseline : a run on one device to measure the speed-up against, whose times of steps leave out what lies between
        them; without it a rank's own share of the time is taken

    Raises
    ------
    DxdyError
        There are no logs of several ranks, or they hold too few steps.

    Examples
    --------
    >>> from dxdy_nb.ranks.scaling import explain_scaling
    >>> print(explain_scaling(run))  # doctest: +SKIP
    """
    import pandas as pd

    ranks = run if isinstance(run, Ranks) else of_folder(folder_of(run, "explain_scaling") / RANKS)
    if len(ranks.logs) < 2:
        raise DxdyError("explain_scaling: no logs of several ranks here. Train with RunConfig(world_size=2).")
    steps = [windows(log, "updated")[WARM_UP:-1] for log in ranks.logs]
    count = min(map(len, steps))
    if count < 3:
        raise DxdyError(
            f"explain_scaling: {counted(max(0, count), 'step')} after the first {WARM_UP}; expected at least 3."
        )
    begins = [windows(log, "updated")[WARM_UP - 1][-1]["at"] for log in ranks.logs]
    ends = np.array([[step[-1]["at"] for step in own[:count]] for own in steps])
    length = np.diff(ends, axis=1, prepend=np.array(begins)[:, None])  # (ranks, steps)
    meetings, late = _meetings(steps, count)
    reduced = _reductions(ranks)
    waited = np.minimum(reduced["comm"] - reduced["comm"].min(axis=0), reduced["comm"] - reduced["hidden"])
    exposed = _mean(reduced["comm"] - reduced["hidden"] - waited)
    own = np.maximum(length - meetings - late - (exposed + _mean(waited))[:, None], 0)
    data = np.minimum([[step[-1].get("fetched", 0.0) for step in one[:count]] for one in steps], own)
    own = own - data
    typical = np.median(own, axis=1, keepdims=True)
    pauses = np.where(own > PAUSE * typical, own - typical, 0)
    parts = [one.mean(axis=1) for one in (own - pauses, data, pauses)]
    parts += [exposed + meetings.mean(axis=1), _mean(waited) + late.mean(axis=1), _mean(reduced["hidden"])]
    table = pd.DataFrame([*parts, length.mean(axis=1)], index=list(COLUMNS)).T
    table["step"] = table[list(COLUMNS[:5])].sum(axis=1)
    table.index.name = "rank"
    samples = sum(e["samples"] for one in steps for step in one[:count] for e in step if _trains(e)) / count
    told = [{"bytes": 0, "buckets": 0}, *ranks.any("reduced")][-1]
    share = samples / len(steps)  # of a rank
    alone, against = _alone(table, share, baseline)
    speedup = samples / table["step"].mean() / alone
    latency = float(meetings.mean())
    return Scaling(
        table,
        _predicted(table, latency, float(_mean(reduced["comm"] - waited).mean()), share / alone),
        count,
        round(samples),
        told["bytes"],
        told["buckets"],
        float(speedup),
        against,
        tuple(_why(table, told)),
        tuple(_advice(table, told)),
    )


def _trains(event: Event) -> bool:
    return bool(event["event"] == "forward" and event["grad"])


def _mean(times: Any) -> Any:
    """Return the mean over steps, 0 where none was seen."""
    return times.mean(axis=1) if times.size else np.zeros(len(times))


def _meetings(steps: Sequence[Sequence[Sequence[Event]]], count: int) -> tuple[Any, Any]:
    """Return seconds of the calls that all ranks meet in, and of waiting in them: (ranks, steps) each."""
    together, late = np.zeros((2, len(steps), count))
    for number in range(count):
        calls = [_calls(one[number]) for one in steps]
        for seconds in np.array(list(zip(*calls, strict=False))).reshape(-1, len(steps)):
            together[:, number] += seconds.min()
            late[:, number] += seconds - seconds.min()
    return together, late


def _calls(step: Sequence[Event]) -> list[float]:
    """Return how long each call of a step took in which all ranks meet."""
    begun = [e for e in step if e["event"] == "collective"]
    ended = [e["at"] for e in step if e["event"] == "collected"]
    return [end - begin["at"] for begin, end in zip(begun, ended, strict=False) if begin["world"]]


def _reductions(ranks: Ranks) -> dict[str, Any]:
    """Return the times of those reductions that every rank has told of: (ranks, reductions) each."""
    told = [{e["iteration"]: e for e in events if e["iteration"] > WARM_UP} for events in ranks.all("reduced")]
    known = sorted(set(told[0]).intersection(*told[1:]))
    return {name: np.array([[one[i][name] for i in known] for one in told]) for name in ("comm", "hidden")}


def _alone(table: "pd.DataFrame", samples: float, baseline: "Run | None") -> tuple[float, str]:
    """Return the samples a second of one rank, and how that is known."""
    if baseline is None:
        own = table[["compute", "data", "pauses"]].sum(axis=1).mean()
        return samples / own, "its own share of the time, without the others"
    steps = baseline.steps[WARM_UP:]
    return float(steps["effective_batch"].sum() / steps["step_time"].sum()), "the run on one device"


def _predicted(table: "pd.DataFrame", latency: float, comm: float, alone: float) -> "pd.DataFrame":
    """Return a row for each number of ranks; ``alone`` is the seconds that one takes for a rank's share."""
    import pandas as pd

    ranks, mean = len(table), table.mean()
    own = mean["compute"] + mean["data"] + mean["pauses"]
    rows = [(1, alone, 1.0, 1.0)]
    for n in (ranks * 2**k for k in range(4)):
        traffic = comm * ((n - 1) / n) / ((ranks - 1) / ranks)
        together = max(0.0, traffic - mean["hidden"]) + latency * (n - 1) / (ranks - 1)
        step = own + together + mean["waiting"]
        rows.append((n, step, n * alone / step, alone / step))
    return pd.DataFrame(rows, columns=["ranks", "step", "speedup", "efficiency"]).set_index("ranks")


def _why(table: "pd.DataFrame", told: Event) -> Iterator[str]:
    mean = table.mean()
    shares = {name: f"{100 * mean[name] / mean['step']:.0f} %" for name in COLUMNS[:5]}
    yield ", ".join(f"{name} {share}" for name, share in shares.items())
    if told["bytes"]:
        n = len(table)
        sent = 2 * (n - 1) / n * told["bytes"] / 1e6
        hidden = mean["hidden"] / max(mean["hidden"] + mean["exposed"], 1e-12)
        yield (
            f"a step computes {1e3 * mean['compute']:.2f} ms and sends {sent:.3g} MB from each rank, "
            f"in {told['buckets']} bucket(s); {100 * hidden:.0f} % of the communication is hidden behind the backward"
        )


def _advice(table: "pd.DataFrame", told: Event) -> Iterator[str]:
    mean = table.mean()
    if mean["exposed"] > WORTH_IT * mean["step"]:
        factor = math.ceil((1 - WORTH_IT) / WORTH_IT * mean["exposed"] / max(mean["compute"] + mean["data"], 1e-12))
        yield f"{factor} times the batch of a rank, or accumulation_steps, makes communication a tenth of the time"
        if told["bytes"] > 2 * LARGE and told["buckets"] == 1:
            cap = max(1, round(told["bytes"] / 4 / LARGE))
            yield f"all gradients are in one bucket, and none can start early: bucket_cap_mb={cap}"
        if told["bytes"] > LARGE:
            yield "gradients of half the bytes (bf16: a DDP comm hook, on GPUs) halve the traffic"
        elif told["bytes"]:
            yield "so few bytes take their time by latency: fewer messages help, and neither buckets nor precision"
    if mean["waiting"] > WORTH_IT * mean["step"]:
        late = int(table["waiting"].argmin())
        cures = {
            "pauses": "validate and save less often, or on all ranks",
            "data": "give it loader workers (num_workers)",
            "compute": "give it as many samples, and a core or GPU as fast, as the others",
        }
        more = {name: table[name].iloc[late] - table[name].drop(late).mean() for name in cures}
        reason, seconds = max(more.items(), key=lambda one: one[1])
        if seconds > WORTH_IT * mean["waiting"]:
            yield f"the others wait for rank {late}: {1e3 * seconds:.2f} ms more {reason} a step: {cures[reason]}"
        else:
            yield "the ranks wait for one another in turn: other work on their cores, or batches of unequal length"
    if mean["data"] > WORTH_IT * mean["step"]:
        yield f"fetching takes {100 * mean['data'] / mean['step']:.0f} % of the time: loader workers (num_workers)"
    if mean["pauses"] > WORTH_IT * mean["step"]:
        yield f"pauses take {100 * mean['pauses'] / mean['step']:.0f} % of the time: validate and save less often"
    if len(table) > (cores := usable_cores()):
        yield f"{len(table)} ranks on {counted(cores, 'core')} win nothing, where they train on CPUs: fewer ranks"
