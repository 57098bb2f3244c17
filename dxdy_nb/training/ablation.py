"""One change at a time against a baseline: whether the difference is larger than what another seed makes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.runs.folder import new_folder
from dxdy_nb.runs.record import add_verdict
from dxdy_nb.training.loop import DECIMALS
from dxdy_nb.training.sweep import Limits, Outcome, Planned, run_all

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Student's t, two-sided at 5 %, by the number of seeds. For more than ten that for ten, which is a little stricter.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
METRICS = {"validation_loss": "lower", "validation_accuracy": "higher"}  # and which is better
OWN = {"seed": "ablate varies it for every change", "data": "other data have other losses: that compares nothing"}


@dataclass(frozen=True)
class Effect:
    """What one change did to the metric: its value less the baseline's, for each seed that tells.

    ``mean`` plus and minus ``margin`` is the 95 % interval of the difference; ``steps`` is the small budget where the
    runs were judged by it, None where they ran in full; ``runs`` counts those that ended as the key says.
    """

    change: str
    verdict: str
    mean: float
    margin: float
    differences: Mapping[int, float]
    steps: int | None
    runs: Mapping[str, int]


@dataclass(frozen=True)
class Ablation:
    """The effect of each change, and the folder with the runs of all of them and of the baseline."""

    baseline: RunConfig
    metric: str
    effects: tuple[Effect, ...]
    folder: Path
    outcomes: tuple[Outcome, ...] = field(repr=False)

    @property
    def table(self) -> "pd.DataFrame":
        """One row a change: verdict, difference and margin (in the metric's unit), steps, and how the runs ended."""
        import pandas as pd

        rows = [
            {
                "change": one.change,
                "verdict": one.verdict,
                "difference": one.mean,
                "margin": one.margin,
                "steps": one.steps or "all",
                "runs": ", ".join(f"{count} {status}" for status, count in one.runs.items()),
            }
            for one in self.effects
        ]
        return pd.DataFrame(rows).set_index("change").round(DECIMALS)

    def plot(self) -> "Figure":
        """Return the difference to the baseline of each change: a dot a seed, and the interval of their mean."""
        from dxdy_nb.lesson import plots

        return plots.ablation(self)


def ablate(
    baseline: RunConfig,
    changes: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    budget: int | None = 100,
    *,
    seeds: int = 3,
    metric: str = "validation_loss",
    jobs: int = 1,
    limits: Limits | None = None,
    out: str | Path | None = None,
) -> Ablation:
    """Return what single changes do to a baseline, each against it with several seeds.

    First all run for a small budget, their schedules squeezed into it; the changes that are worse there for sure, or
    did not come to an end, are judged by that. The others run in full. Each run is a process and a record of its own,
    the baseline's too; that of a changed run keeps the verdict, and which run it is against.

    A verdict is that of the paired t test at 5 %: with one seed a change and the baseline see the same samples, weights
    and order, so that the differences by seed spread less than the values themselves. ``better`` and ``worse``: their
    mean is further from zero than their standard error times Student's t, and than the metric's last digit. Else ``no
    difference`` larger than the seeds' spread, which is not the same as none: three seeds show large ones only. With
    twenty changes without any effect, one is called an effect. ``worse`` too: it diverged where the baseline did not.
    ``not judged``: fewer than two seeds came to an end.

    Parameters
    ----------
    baseline : on one device, in fp32
    changes : one change each, like ``[{"precision": "bf16"}, {"world_size": 2, "batch_size": 32}]``; with names of
        their own ``{"two ranks": {"world_size": 2, "batch_size": 32}}``, or ``{"precision": "bf16"}`` for single fields
    budget : optimizer steps of the small runs; None: all run in full at once
    seeds : how many, from the baseline's upwards
    metric : ``validation_loss`` or ``validation_accuracy``
    jobs : runs at once; with more than one their step times do not compare
    limits : of time and memory, for each run
    out : the folder of the runs: what is done there already is not run again; without it ``runs/<id>/``

    Raises
    ------
    DxdyError
        Before anything starts, all of them, a line each: a baseline on several ranks or not in fp32, unknown fields or
        values out of range, changes that change nothing or compare nothing. Later: the baseline came to no end.

    Notes
    -----
    Sources: Student 1908, "The probable error of a mean"; Bouthillier et al. 2021, "Accounting for variance in machine
    learning benchmarks", for pairing.

    Examples
    --------
    >>> config = RunConfig(data="spirals", model="mlp", max_steps=10)
    >>> found = ablate(config, {"lr": 1e-6}, budget=None, seeds=2, out=tmp_path / "ablation")  # doctest: +SKIP
    >>> found.table.verdict["lr=1e-06"]  # doctest: +SKIP
    'worse'
    """
    changed = _ask(baseline, changes, budget, seeds, metric)
    limits = limits or Limits()
    folder = new_folder(f"{baseline.data}-ablation", out)
    outcomes: list[Outcome] = []
    judged: dict[str, Effect] = {}
    for steps in (None,) if budget is None else (budget, None):
        waiting = {name: fields for name, fields in changed.items() if name not in judged}
        if not waiting:
            break
        plans = {name: _plans(baseline, fields, seeds, steps) for name, fields in {"": {}, **waiting}.items()}
        done = run_all([one for plan in plans.values() for one in plan], folder, jobs=jobs, limits=limits)
        outcomes += done
        base, *others = (done[place : place + seeds] for place in range(0, len(done), seeds))
        if sum(one.result["status"] == "completed" for one in base) < 2:
            last = next(one for one in base if one.result["status"] != "completed")
            reason = f"{last.result['status']}: {last.result['reason']}"
            raise DxdyError(f"baseline: fewer than two of its runs completed. {last.folder}: {reason}")
        for name, group in zip(waiting, others, strict=True):
            effect = _effect(name, base, group, metric, steps)
            told = {"verdict": effect.verdict, "difference": effect.mean, "margin": effect.margin}
            told["seeds"] = len(effect.differences)
            for before, one in zip(base, group, strict=True):
                add_verdict(one.folder, baseline=before.folder.name, metric=metric, **told)
            if steps is None or effect.verdict in ("worse", "not judged"):
                judged[name] = effect
    return Ablation(baseline, metric, tuple(judged[name] for name in changed), folder, tuple(outcomes))


def judge(differences: Sequence[float], lower_is_better: bool = True) -> tuple[str, float, float]:
    """Return the verdict on differences by seed, their mean, and the margin that it is compared with.

    Examples
    --------
    >>> judge([-0.10, -0.12, -0.11])  # mean -0.11, standard deviation 0.01: margin 4.303 * 0.01 / 3**0.5 + 0.0001
    ('better', -0.11, 0.0249)
    >>> judge([-0.10, 0.12, -0.11])[0]
    'no difference'
    """
    count = len(differences)
    if count < 2:
        return "not judged", math.nan, math.nan
    worst = math.inf if lower_is_better else -math.inf
    if worst in differences:
        return "worse", worst, math.nan
    mean = statistics.fmean(differences)
    margin = STUDENT[min(count, max(STUDENT))] * statistics.stdev(differences) / math.sqrt(count) + 10**-DECIMALS
    verdict = "no difference" if abs(mean) <= margin else "better" if (mean < 0) == lower_is_better else "worse"
    return verdict, round(mean, DECIMALS), round(margin, DECIMALS)


def _ask(baseline: Any, changes: Any, budget: Any, seeds: Any, metric: Any) -> dict[str, Mapping[str, Any]]:
    """Return the changes by name, or refuse what cannot be compared."""
    if not isinstance(baseline, RunConfig):
        raise DxdyError(f"baseline: expected a dx.RunConfig, got {type(baseline).__name__}.")
    problems = []
    for name, value in {"world_size": 1, "precision": "fp32"}.items():
        if (seen := getattr(baseline, name)) != value:
            problems.append(f"baseline: expected {name}={value!r}, got {seen!r}. Make that one of the changes.")
    whole = isinstance(seeds, int) and not isinstance(seeds, bool)
    if not whole or seeds < 2:
        problems.append(f"seeds: expected at least 2, to see how much a seed changes; got {seeds!r}.")
    if metric not in [*METRICS]:
        problems.append(f"metric: expected {' or '.join(METRICS)}, got {metric!r}.")
    if budget is not None:
        problems += _refused(baseline, {"max_steps": budget}, "budget")
    changed = _named(changes)
    for name, fields in changed.items():
        problems += [f"{name}: {field}: {OWN[field]}." for field in fields if field in OWN]
        if "loss" in fields and metric == "validation_loss":
            problems.append(f"{name}: another loss has another scale. Give metric='validation_accuracy'.")
        problems += _refused(baseline, fields, name) or (
            [f"{name}: changes nothing."] if baseline.override(fields) == baseline else []
        )
    if not changed:
        problems.append('changes: expected at least one, like {"precision": "bf16"}.')
    if problems:
        raise DxdyError("\n".join(problems))
    return changed


def _named(changes: Any) -> dict[str, Mapping[str, Any]]:
    if not isinstance(changes, (Mapping, list, tuple)):
        raise DxdyError(f"changes: expected a list, like [{{'precision': 'bf16'}}]; got {changes!r}.")
    pairs = changes.items() if isinstance(changes, Mapping) else [(None, one) for one in changes]
    named: dict[str, Mapping[str, Any]] = {}
    for name, fields in pairs:
        if name is not None and not isinstance(fields, Mapping):
            name, fields = None, {name: fields}
        if not isinstance(fields, Mapping):
            raise DxdyError(f"changes: expected fields and values, like {{'precision': 'bf16'}}; got {fields!r}.")
        name = name if name is not None else ", ".join(f"{field}={value}" for field, value in fields.items())
        if name in named:
            raise DxdyError(f"changes: {name} is given twice.")
        named[str(name)] = fields
    return named


def _refused(baseline: RunConfig, fields: Mapping[str, Any], name: str) -> list[str]:
    try:
        baseline.override(fields)
    except DxdyError as error:
        return [f"{name}: {line}" for line in str(error).splitlines()]
    return []


def _plans(baseline: RunConfig, fields: Mapping[str, Any], seeds: int, steps: int | None) -> list[Planned]:
    """Return the runs of one change, a seed each."""
    config = baseline.override(fields)
    short = {} if steps is None else {"max_steps": min(steps, config.max_steps or steps)}
    changed = [{**fields, **short, "seed": baseline.seed + place} for place in range(seeds)]
    return [Planned(one, config.override(one)) for one in changed]


def _effect(name: str, base: Sequence[Outcome], group: Sequence[Outcome], metric: str, steps: int | None) -> Effect:
    lower = METRICS[metric] == "lower"
    differences = {}
    for before, after in zip(base, group, strict=True):
        old, new = _value(before, metric), _value(after, metric)
        if old is not None and after.result["status"] == "diverged":
            new = math.inf if lower else -math.inf
        if old is not None and new is not None:
            differences[after.planned.changed["seed"]] = new - old
    statuses = [one.result["status"] for one in group]
    runs = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    return Effect(name, *judge([*differences.values()], lower), differences, steps, runs)


def _value(outcome: Outcome, metric: str) -> float | None:
    return outcome.result["metrics"].get(metric) if outcome.result["status"] == "completed" else None
