"""Many runs as one table, and two runs side by side: what was different, and where they first went apart."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from dxdy_nb.config import as_number
from dxdy_nb.errors import DxdyError, counted, suggestion
from dxdy_nb.observe import trace
from dxdy_nb.runs.entries import OWN, Entry, column, entries, entry
from dxdy_nb.runs.folder import folder_of
from dxdy_nb.runs.record import Run, steps_of

if TYPE_CHECKING:
    import pandas as pd

# What is compared of a step, in the order in which a step makes it: the first that differs is the nearest to the cause.
BEFORE, AFTER = ("effective_batch", "loss"), ("grad_norm", "skipped", "lr")
MOST_NOTES = 8  # that a person reads
DERIVED = ("uncommitted_changes",)  # told by the files that changed


@dataclass(frozen=True)
class Divergence:
    """The first step at which two runs differ: what differs first in it, both values, and what else does.

    ``parameter`` is None where a column of the table of steps differs. ``others`` names all that differs at this step
    after it, in the order in which a step makes them.
    """

    step: int
    column: str
    parameter: str | None
    values: tuple[float, float]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.column} of {self.parameter}" if self.parameter else self.column
        first, second = self.values
        text = f"step {self.step}: {what}, {first!r} and {second!r}"
        return f"{text}\n  there too: {_some(self.others)}" if self.others else text


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; each table has a column for either, and only rows that say something.

    Parameters
    ----------
    runs : the two folders
    config, environment : what differs, absent values as None
    metrics : all results; with several runs of one configuration apart from the seed, ``mean``, ``sd`` and ``seeds``
    efficiency : seconds, bytes, samples a second, and the share of runs with this configuration that did not complete
    notes : what else is to be said, a sentence each: parameters that are not in both, folders with a problem
    divergence : the first step that differs, None where no common one does
    steps : the number of steps of each run
    weights : the final weights that are not bit-equal, by name; None where they were not recorded
    """

    runs: tuple[Path, Path]
    config: "pd.DataFrame"
    environment: "pd.DataFrame"
    metrics: "pd.DataFrame"
    efficiency: "pd.DataFrame"
    notes: tuple[str, ...]
    divergence: Divergence | None
    steps: tuple[int, int]
    weights: tuple[str, ...] | None

    @property
    def equal(self) -> bool:
        """Whether all steps are bit-equal, and the final weights where they are known."""
        return not self.divergence and not self.notes and not self.weights and self.steps[0] == self.steps[1] > 0

    def __str__(self) -> str:
        first, second = (folder.name for folder in self.runs)
        parts = [f"A  {first}\nB  {second}"]
        for title, table in (("configuration", self.config), ("environment and code", self.environment)):
            parts.append(f"{title}: {'the same' if table.empty else f'{chr(10)}{_text(table)}'}")
        for title, table in (("metrics", self.metrics), ("efficiency (seconds, bytes, samples)", self.efficiency)):
            parts += [] if table.empty else [f"{title}:\n{_text(table)}"]
        return "\n\n".join([*parts, self.verdict])

    @property
    def verdict(self) -> str:
        """Where the two runs went apart, in words."""
        steps = f"{self.steps[0]} and {self.steps[1]} steps" if any(self.steps) else "no steps"
        if self.equal:
            weights = "" if self.weights is None else ", the final weights too"
            return f"bit-equal: all {counted(self.steps[0], 'step')}{weights}"
        lines = list(self.notes[:MOST_NOTES])
        if len(self.notes) > MOST_NOTES:
            lines.append(f"and {len(self.notes) - MOST_NOTES} more")
        if self.divergence:
            lines.append(f"first difference at {self.divergence}")
        elif not min(self.steps):
            lines.append(f"{steps} recorded: there is nothing to compare step by step")
        elif self.steps[0] != self.steps[1]:
            lines.append(f"{steps}: bit-equal as far as both go")
        if self.weights is not None:
            lines.append(f"final weights: {_some(self.weights) or 'bit-equal'}{' differ' if self.weights else ''}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all of it for a program."""
        apart = self.divergence and {**vars(self.divergence), "others": list(self.divergence.others)}
        tables = ("config", "environment", "metrics", "efficiency")
        return json.dumps(
            {
                "runs": [str(folder) for folder in self.runs],
                "equal": self.equal,
                **{
                    name: json.loads(getattr(self, name).to_json(orient="index", double_precision=15))
                    for name in tables
                },
                "notes": self.notes,
                "first_difference": apart and {k: _finite(v) for k, v in apart.items()},
                "steps": self.steps,
                "different_weights": self.weights,
            },
            indent=1,
        )

    def plot(self) -> Any:
        """Return a figure of both runs: loss, how far it went apart, and where the time went."""
        from dxdy_nb.lesson import plots

        first, second = (steps_of(folder) for folder in self.runs)
        return plots.comparison(first, second, self.divergence.step if self.divergence else None)


@overload
def compare(first: str | Path) -> "pd.DataFrame": ...
@overload
def compare(first: str | Path | Run, second: str | Path | Run) -> Comparison: ...
def compare(first: str | Path | Run, second: str | Path | Run | None = None) -> "pd.DataFrame | Comparison":
    """Return a table of all runs in a folder, failed ones too, or what differs between two runs.

    The table has a row for each run: status and cause, efficiency (seconds, bytes, samples a second), the fields of the
    configuration that are not the same in all of them, and the results. A folder that cannot be read is a row that says
    why. Two runs are compared number by number, bit for bit.

    Parameters
    ----------
    first, second : a folder of runs alone, or two runs or their folders

    Raises
    ------
    DxdyError
        There is no such folder; one of two folders holds no run that can be read.

    Examples
    --------
    >>> import dxdy_nb as dx
    >>> a, b = (dx.train(dx.RunConfig(max_steps=2, lr=lr), out=tmp_path / str(lr)) for lr in (0.1, 0.2))
    >>> compare(a, b).config.to_dict("index")
    {'lr': {'A': 0.1, 'B': 0.2}}
    >>> compare(tmp_path).loc["0.1", "status"]
    'completed'
    """
    if second is None:
        if isinstance(first, Run):
            raise DxdyError("compare: expected a folder of runs, or two runs; got one run.")
        return table(entries(folder_of(first, "compare")))
    a, b = (entry(folder_of(one, "compare")) for one in (first, second))
    for one in (a, b):
        if not one.result:
            raise DxdyError(one.reason)
    traces = [_trace(one.folder) for one in (a, b)]
    steps = [steps_of(one.folder) if seen.segments else seen.steps for one, seen in zip((a, b), traces, strict=True)]
    notes = (*a.problems, *b.problems, *_other_parameters(*traces))
    weights = [one.result.get("weights", {}) for one in (a, b)]
    groups = [_seeds(one) for one in (a, b)]
    return Comparison(
        runs=(a.folder, b.folder),
        config=_side_by_side("field", a.config, b.config),
        environment=_side_by_side("what", *(_surroundings(one) for one in (a, b))),
        metrics=_metrics(a, b, groups),
        efficiency=_efficiency(a, b, groups),
        notes=notes,
        divergence=_divergence(traces[0], traces[1], steps[0], steps[1]),
        steps=(len(steps[0]), len(steps[1])),
        weights=tuple(_side_by_side("tensor", *weights).index) if all(weights) else None,
    )


def table(found: Sequence[Entry], wanted: Mapping[str, Any] | None = None, sort: str | None = None) -> "pd.DataFrame":
    """Return the table of some runs: those with the wanted values (any of a list), sorted by a column.

    A minus before the column: the largest first.

    Raises
    ------
    DxdyError
        No run has a column that is asked for.
    """
    import pandas as pd

    rows = [one.row() for one in found]
    frame = pd.DataFrame(rows, columns=None if found else list(OWN))
    wanted, sort = (wanted or {}, sort) if found else ({}, None)  # of no runs there is nothing to say
    sort, descending = (sort.removeprefix("-"), sort.startswith("-")) if sort else (None, False)
    for name in [*wanted, *([sort] if sort else [])]:
        if name not in frame:
            raise DxdyError(f"{name}: no run has it.{suggestion(name, frame.columns)}")
    for name, value in wanted.items():
        accepted = value if isinstance(value, list) else [value]
        # Asked of the rows: pandas makes NaN of a None among numbers.
        frame = frame[[as_number(rows[place].get(name, ...)) in accepted for place in frame.index]]
    if sort:
        texts = None if pd.api.types.is_numeric_dtype(frame[sort]) else lambda values: values.astype(str)
        frame = frame.sort_values(sort, kind="stable", key=texts, ascending=not descending)
    shown = [one for one in found if one.config and one.id in {*frame["id"]}]

    def same(name: str) -> bool:
        # All training runs have the same fields, unless one was recorded by another version.
        told = [one for one in shown if name in one.config or one.result.get("kind") == "training"]
        return len({repr(one.config.get(name, ...)) for one in told}) < 2

    fields = {name for one in shown for name in one.config}
    unseen = {column(name) for name in fields if same(name)} - {*wanted, sort}
    return frame.drop(columns=[*unseen]).set_index("id")


def _trace(folder: Path) -> trace.Trace:
    """Return the record of a run's steps, an empty one where there is none that can be read."""
    try:
        return trace.read(folder)
    except DxdyError:  # it is among the problems of the run, if there is a trace at all
        return trace.Trace()


def _other_parameters(first: trace.Trace, second: trace.Trace) -> Iterator[str]:
    a, b = (
        {
            name: shape
            for segment in one.segments
            for name, shape in zip(segment.layout.parameters, segment.layout.shapes, strict=True)
        }
        for one in (first, second)
    )
    if a and b:
        for name in dict.fromkeys([*a, *b]):
            if a.get(name) != b.get(name):
                shapes = [str(one[name]) if name in one else "absent" for one in (a, b)]
                yield f"parameter {name}: {shapes[0]} in A, {shapes[1]} in B"


def _surroundings(one: Entry) -> dict[str, Any]:
    """Return what a run was made of and where it ran, besides its configuration, as a flat table."""
    told: dict[str, Any] = {name: one.result[name] for name in ("kind", "lesson") if name in one.result}
    told |= {"script": one.script.get("name"), "host": dict(one.result.get("process") or {}).get("host")}
    for name, value in one.environment.items():
        if name not in DERIVED:
            told |= dict(_flat(name.replace("files", "file"), value))
    return told


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name} {key}", part)
    else:
        yield name, value


def _side_by_side(index: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> "pd.DataFrame":
    """Return what differs between two mappings, a row each; what is absent from one is None there."""
    import pandas as pd

    apart = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    rows = {"A": [a.get(name) for name in apart], "B": [b.get(name) for name in apart]}
    return pd.DataFrame(rows, index=pd.Index(apart, name=index, dtype=object), dtype=object)


def _seeds(one: Entry) -> list[Entry]:
    """Return the runs beside a run, itself among them, that differ from it by their seed alone: no line of code."""

    def apart_from_seed(other: Entry) -> tuple[Any, ...]:
        config = {name: value for name, value in other.config.items() if name != "seed"}
        return config, _surroundings(other).get("script"), *(other.environment.get(key) for key in ("commit", "files"))

    same = [other for other in entries(one.folder.resolve().parent) if apart_from_seed(other) == apart_from_seed(one)]
    return list({repr(other.config["seed"]): other for other in same if "seed" in other.config}.values())


def _metrics(a: Entry, b: Entry, groups: Sequence[Sequence[Entry]]) -> "pd.DataFrame":
    import pandas as pd

    rows = {}
    completed = [[one.metrics for one in group if one.status == "completed"] for group in groups]
    for name in dict.fromkeys([*a.metrics, *b.metrics]):
        row = {"A": a.metrics.get(name), "B": b.metrics.get(name)}
        if all(isinstance(value, (int, float)) for value in row.values()):
            row["B - A"] = row["B"] - row["A"]  # type: ignore[operator]
        for side, group in zip("AB", completed, strict=True):
            values = [one[name] for one in group if isinstance(one.get(name), (int, float))]
            if len(values) > 1:
                row |= {f"mean {side}": np.mean(values), f"sd {side}": np.std(values, ddof=1)}
                row[f"seeds {side}"] = len(values)
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("metric")


def _efficiency(a: Entry, b: Entry, groups: Sequence[Sequence[Entry]]) -> "pd.DataFrame":
    import pandas as pd

    columns = {}
    for side, run, group in zip("AB", (a, b), groups, strict=True):
        ended = [one.status for one in group if one.status != "running"] or [run.status]
        columns[side] = {**run.efficiency(), "failure_rate": 1 - ended.count("completed") / len(ended)}
    frame = pd.DataFrame(columns).dropna(how="all").rename_axis("figure")
    return frame.assign(ratio=frame["B"] / frame["A"].where(frame["A"] != 0))


def _divergence(
    first: trace.Trace, second: trace.Trace, steps: "pd.DataFrame", others: "pd.DataFrame"
) -> Divergence | None:
    """Return the first of the common steps in which anything but time and memory is not the same, bit for bit."""
    common = steps.index.intersection(others.index)
    a, b = steps.loc[common], others.loc[common]
    apart = {name: ~_same(a[name].to_numpy(), b[name].to_numpy()) for name in (*BEFORE, *AFTER)}
    apart["grad_norm"] &= a["full"].to_numpy() & b["full"].to_numpy()
    ends = [common[int(np.argmax(values))] for values in apart.values() if values.any()]
    tensors = _first_gradients(first, second, min(ends, default=math.inf))
    ends += [one.step for one in tensors]
    if not ends:
        return None
    step = int(min(ends))

    def columns(names: Iterable[str]) -> list[Divergence]:
        place = common.get_loc(step)
        values = {
            name: (a[name].iloc[place].item(), b[name].iloc[place].item()) for name in names if apart[name][place]
        }
        return [Divergence(step, name, None, pair) for name, pair in values.items()]

    here = [one for one in tensors if one.step == step]
    gradients, updates = ([o for o in here if (o.column == "update_ratio") is late] for late in (False, True))
    # A backward pass reaches the last parameter first.
    found = [*columns(BEFORE), *reversed(gradients), *columns(AFTER), *updates]
    return replace(found[0], others=tuple(one.parameter or one.column for one in found[1:]))


def _first_gradients(first: trace.Trace, second: trace.Trace, until: float) -> list[Divergence]:
    """Return what differs between two tables of gradients at the first step where anything does, up to a step.

    A step of which not all was measured in both is left out, as is an update that was not measured.
    """
    found: list[Divergence] = []
    for one, two in itertools.product(first.segments, second.segments):
        both = [name for name in one.layout.parameters if name in two.layout.parameters]
        heads = [segment.records["head"] for segment in (one, two)]
        steps, *places = np.intersect1d(heads[0][:, 0], heads[1][:, 0], return_indices=True)
        full = [head[place, trace.HEAD.index("full")] == 1 for head, place in zip(heads, places, strict=True)]
        a, b = (
            segment.records["gradients"][place][:, [segment.layout.parameters.index(name) for name in both]]
            for segment, place in zip((one, two), places, strict=True)
        )
        apart = ~_same(a, b) & ((steps <= until) & full[0] & full[1])[:, None, None]
        apart[..., -1] &= ~np.isnan(a[..., -1]) & ~np.isnan(b[..., -1])
        if apart.any():
            at = int(np.argmax(apart.any(axis=(1, 2))))  # the first
            until = steps[at]
            for row, column in _told(apart[at]):
                values = float(a[at, row, column]), float(b[at, row, column])
                found.append(Divergence(int(until), trace.GRADIENT_COLUMNS[column], both[row], values))
    return found


def _told(apart: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Return what is told of each parameter: its norm, or else the first number that differs, and its update."""
    norm = trace.GRADIENT_COLUMNS.index("norm")
    for row, columns in enumerate(apart):
        if columns[:-1].any():
            yield row, norm if columns[norm] else int(np.argmax(columns))
        if columns[-1]:
            yield row, len(columns) - 1


def _same(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where two tables hold the same, NaN and NaN too."""
    return np.asarray((a == b) | ((a != a) & (b != b)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _finite(value: Any) -> Any:
    """Return a value without NaN and infinity, which JSON has not."""
    return [_finite(one) for one in value] if isinstance(value, tuple) else value if value == value else None


def _text(frame: "pd.DataFrame") -> str:
    def short(value: Any) -> str:
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else f"{value:.4g}" if isinstance(value, float) else str(value)

    shown = frame.map(short)
    for side in "AB":
        if f"seeds {side}" in shown:
            mean, sd, seeds = (shown.pop(f"{name} {side}") for name in ("mean", "sd", "seeds"))
            shown[f"{side} over seeds"] = (mean + " ± " + sd + " (" + seeds + ")").where(seeds != "", "")
    return "\n".join(f"  {line}" for line in shown.to_string().splitlines() if line.strip() != str(frame.index.name))
