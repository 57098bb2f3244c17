"""Are the ranks really doing the same thing? Their logs, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.ranks.log import Event, read
from dxdy_nb.runs.folder import RANKS, folder_of

if TYPE_CHECKING:
    import pandas as pd

    from dxdy_nb.runs.record import Run

SMALL = 8  # elements of a tensor that holds counts or losses rather than gradients


@dataclass(frozen=True)
class Ranks:
    """The logs of all ranks, and how those ended that did not return."""

    logs: tuple[Sequence[Event], ...]
    failures: Mapping[int, str]

    def all(self, kind: str) -> list[list[Event]]:
        """Return the events of one kind, rank by rank."""
        return [[e for e in log if e["event"] == kind] for log in self.logs]

    def rounds(self, kind: str) -> list[tuple[Event, ...]]:
        """Return the first such event of every rank, the second of every rank, ..., as long as all have one."""
        return list(zip(*self.all(kind), strict=False))

    def any(self, kind: str) -> list[Event]:
        """Return the events of one kind of all ranks."""
        return [event for events in self.all(kind) for event in events]

    @property
    def names(self) -> dict[str, bool]:
        """Parameters that DistributedDataParallel was given on rank 0, and whether they were trained then."""
        return {n: trained for event in self.all("wrapped")[0] for n, trained in event["parameters"].items()}

    @property
    def averaged(self) -> bool:
        """Whether gradients are reduced at all, by DistributedDataParallel or by hand."""
        return any(e["reduces"] for e in self.any("backward")) or any(e["gradients"] for e in self.any("collective"))


def differing(values: Sequence[Any]) -> bool:
    """Return whether ranks have different values."""
    return any(value != values[0] for value in values[1:])


def is_number(event: Event) -> bool:
    """Return whether an event is a collective over a count, a loss or a few of them."""
    return event["event"] == "collective" and 0 < event["size"] <= SMALL and not event["gradients"]


def windows(log: Sequence[Event], kind: str) -> list[list[Event]]:
    """Return a log in pieces that each end with an event of a kind; the last piece may not."""
    pieces: list[list[Event]] = [[]]
    for event in log:
        pieces[-1].append(event)
        if event["event"] == kind:
            pieces.append([])
    return pieces


def of_folder(folder: Path) -> Ranks:
    """Return the logs that a folder holds, rank by rank."""
    paths = sorted(folder.glob("rank*.jsonl"), key=lambda p: int(p.stem[4:]))
    return Ranks(tuple(read(path) for path in paths), {})


def verify_ranks(run: "Run | str | Path") -> "pd.DataFrame":
    """Return what the ranks of a run did alike and what not, in the order in which odd results are looked for.

    Gradients and parameters are compared by the bits at every update. Of a tensor of more than 65,536 elements each
    update reads a quarter, another each time; at the end the parameters are compared whole.

    Parameters
    ----------
    run : of ``dx.train`` on several ranks, or its folder

    Returns
    -------
    pandas.DataFrame
        Index ``check``; ``verdict`` is equal, different, apart (as it should be) or not seen; ``seen`` has the numbers.

    Raises
    ------
    DxdyError
        The run was made on one rank, or its folder holds no logs, or these no step.
    """
    import pandas as pd

    folder = folder_of(run, "verify_ranks") / RANKS
    ranks = of_folder(folder)
    if len(ranks.logs) < 2:
        raise DxdyError(f"{folder}: no logs of several ranks here. Train with RunConfig(world_size=2).")
    if not ranks.any("forward"):
        raise DxdyError(f"{folder}: the logs hold no step of any rank: the run ended before its first one.")
    rows = [(check, *verdict) for check, verdict in _checks(ranks)]
    return pd.DataFrame(rows, columns=["check", "verdict", "seen"]).set_index("check")


def _checks(ranks: Ranks) -> Iterator[tuple[str, tuple[str, str]]]:
    forwards = ranks.all("forward")
    devices = [next((e["device"] for e in events), "") for events in forwards]
    shared = [d for d in set(devices) if d.startswith("cuda") and devices.count(d) > 1]
    yield "device", ("different" if shared else "equal" if set(devices) == {"cpu"} else "apart", _each(devices))
    yield "samples", _samples(ranks)
    batches = [next((e["samples"] for e in events if e["grad"]), 0) for events in forwards]
    yield "batch", (_verdict(batches), f"{_each(batches)}; together {sum(batches)}")
    yield "updates", _compared([len(events) for events in ranks.all("updated")])
    ends = ranks.rounds("end")
    for what in ("gradients", "parameters"):
        rounds = ranks.rounds("update")
        wrong = [i for i, events in enumerate(rounds) if differing([e[f"all_{what}"] for e in events])]
        seen = f"bit-identical at {len(rounds) - len(wrong)} of {counted(len(rounds), 'update')}"
        seen += f", first not at update {wrong[0]}" if wrong else ""
        same_length = not differing([len(events) for events in ranks.all("update")])
        if what == "parameters" and ends and same_length and differing([e["parameters"] for e in ends[-1]]):
            wrong, seen = [len(rounds)], f"{seen}, not alike at the end"
        yield what, ("different" if wrong else "equal" if rounds else "not seen", seen)
    yield "loss", _loss(ranks)
    states = [e["buffers"] for e in ends[-1]] if ends else [{}]
    apart = [name for name in states[0] if differing([s.get(name) for s in states])]
    seen = f"{len(states[0]) - len(apart)} of {len(states[0])} alike" + (f"; not {apart[0]}" if apart else "")
    yield "buffers", ("different" if apart else "equal" if states[0] else "not seen", seen)
    yield "rate", _compared([[f"{lr:.4g}" for e in events for lr in e["lr"]][-1:] for events in ranks.all("update")])
    states = [e["rng"] for e in ends[-1]] if ends else []
    yield "random numbers", ("apart" if differing(states) else "equal", "torch's generators at the end")
    writers = {rank: {e["path"] for e in events} for rank, events in enumerate(ranks.all("saved")) if events}
    names = [name for paths in writers.values() for name in paths]
    twice = len(set(names)) < len(names)
    told = "; ".join(f"rank {rank} {len(paths)}" for rank, paths in writers.items())
    yield "files", ("different" if twice else "apart" if writers else "not seen", told)


def _each(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))


def _verdict(values: Sequence[Any]) -> str:
    return "different" if differing(values) else "equal"


def _compared(values: Sequence[Any]) -> tuple[str, str]:
    return _verdict(values), _each(values)


def _samples(ranks: Ranks) -> tuple[str, str]:
    """Return which samples the first pass of each rank's training read, and how many of them two ranks read."""
    read = [events[0]["ids"] if events else None for events in ranks.all("sampler")]
    if any(ids is None for ids in read):
        return "not seen", "no DistributedSampler was read"
    sets = [set(ids) for ids in read if ids is not None]
    twice = sum(map(len, sets)) - len(set().union(*sets))
    allowed = ranks.all("sampler")[0][0]["padded"]
    seen = f"{_each([len(s) for s in sets])}; on two ranks {twice}" + (f" (padding {allowed})" if allowed else "")
    return "apart" if twice <= allowed else "different", seen


def _loss(ranks: Ranks) -> tuple[str, str]:
    """Return whether a number was reduced between backward and the next one: a global loss, or a rank's own."""
    own = [e for e in ranks.all("collective")[0] if 0 < e["size"] <= 8 and not e["gradients"]]
    return (
        ("equal", f"reduced {counted(len(own), 'time')}")
        if own
        else ("different", "each rank has its own, and none is reduced")
    )
