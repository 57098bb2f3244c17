"""What a watched loop did, in a dozen lines: for people as text, for programs as JSON."""

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dxdy_nb.errors import counted
from dxdy_nb.observe.bottleneck import Bottleneck, bottleneck, phase_times, shares

if TYPE_CHECKING:
    import pandas as pd

TENTH = 10  # the first and the last loss are means over a tenth of the steps: one batch's loss is noise
WIDTH = 100  # characters of a sentence in a line
SHOWN = 8  # ids, or models, in a line; the JSON holds all of them


@dataclass(frozen=True)
class Summary:
    """What was seen, and how it went; ``str()`` gives the lines, ``to_dict()`` plain values.

    ``models`` has the number of trained parameters of each. Losses are means over the first and the last tenth of the
    steps; ``phases`` are parts of the time, 0 to 1, without the first step; ``nonfinite_step`` is the first step that
    was taken although its loss or a gradient was not finite.
    """

    models: Mapping[str, int]
    optimizers: tuple[str, ...]
    loaders: Mapping[str, str]
    steps: int
    skipped: int
    steps_per_second: float
    first_lr: float
    last_lr: float
    first_loss: float
    last_loss: float
    phases: Mapping[str, float]
    bottleneck: Bottleneck
    nonfinite_step: int | None
    bad_samples: tuple[int, ...]
    nothing: str

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.steps:
            return _line("steps", self.nothing) + _line("", "Only steps in this very process can be seen.")
        skipped = f", {self.skipped} of them skipped" if self.skipped else ""
        models = [f"{name} ({counted(count, 'parameter')})" for name, count in self.models.items()]
        lr = dict.fromkeys(f"{one:.3g}" for one in (self.first_lr, self.last_lr) if not math.isnan(one))
        data = [f"{name} ({words})" for name, words in self.loaders.items()]
        seen = (
            ("model", models),
            ("optimizer", self.optimizers),
            ("lr", [" → ".join(lr)] if lr else []),
            ("data", data),
        )
        text = "".join(_line(title, _some(names)) for title, names in seen if names)
        text += _line("steps", f"{self.steps:,}{skipped}, {self.steps_per_second:.3g} a second")
        if not math.isnan(self.first_loss):
            text += _line("loss", f"{self.first_loss:.4g} → {self.last_loss:.4g}")
        text += _line("time", "  ".join(f"{name} {100 * part:.0f} %" for name, part in self.phases.items() if part))
        text += "".join(_line("", line) for line in textwrap.wrap(self.bottleneck.sentence, WIDTH))
        if self.nonfinite_step is not None:
            samples = f", samples {_some(self.bad_samples)}" if self.bad_samples else ""
            text += _line("not finite", f"first at step {self.nonfinite_step}{samples}")
        return text


def summary(record: Any) -> Summary:
    """Return the summary of what a watch saw.

    Parameters
    ----------
    record : a watch; anything that has ``steps``, ``gradients``, ``sizes`` and perhaps ``events``, ``loaders``

    Examples
    --------
    >>> import torch
    >>> from dxdy_nb.observe.observer import watch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, optimizer) as w:
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(4, 2)).square().mean().backward()
    ...         optimizer.step()
    >>> seen = summary(w)
    >>> seen.steps, seen.first_loss > seen.last_loss, seen.nonfinite_step
    (20, True, None)
    """
    steps = record.steps  # a long one is read from its file: once
    loaders = getattr(record, "loaders", {})
    seen = SimpleNamespace(steps=steps, events=getattr(record, "events", ()), loaders=loaders, sizes=record.sizes)
    times = phase_times(seen)
    whole = float(times.to_numpy().sum())
    bad = _nonfinite_step(seen, record)
    tenth = max(1, len(steps) // TENTH)
    return Summary(
        models=_models(seen),
        optimizers=_seen(seen.events, "step", "skip"),
        loaders={name: _loader(one) for name, one in loaders.items()},
        steps=len(steps),
        skipped=int(steps["skipped"].sum()),
        steps_per_second=len(times) / whole if whole else math.nan,
        first_lr=float(steps["lr"].head(1).mean()),
        last_lr=float(steps["lr"].tail(1).mean()),
        first_loss=float(steps["loss"].head(tenth).mean()),
        last_loss=float(steps["loss"].tail(tenth).mean()),
        phases=shares(times),
        bottleneck=bottleneck(seen),
        nonfinite_step=bad,
        bad_samples=() if bad is None else tuple(steps["bad_samples"][bad]),
        nothing="" if len(steps) else str(record),
    )


def _nonfinite_step(seen: SimpleNamespace, record: Any) -> int | None:
    steps: pd.DataFrame = seen.steps
    taken = steps[~steps["skipped"].astype(bool)]
    odd = taken[["loss", "grad_norm"]].isin([math.inf, -math.inf]).any(axis=1) | taken["bad_samples"].map(bool).astype(
        bool
    )
    odd |= taken.index.isin([e.step for e in seen.events if e.kind == "loss" and not _finite(e)])
    doubtful = taken.index[taken["grad_norm"].isna() & ~odd]  # NaN stands for no gradient, too
    if len(doubtful):
        counts = record.gradients["nonfinite"]
        wrong = counts[counts > 0].index.get_level_values("step")
        odd |= taken.index.isin(wrong)
    return int(taken.index[odd][0]) if odd.any() else None


def _finite(event: Any) -> bool:
    return not isinstance(event.value, (int, float)) or math.isfinite(event.value)


def _models(seen: SimpleNamespace) -> dict[str, int]:
    """Return how many parameters each model trains; their names begin with the model's where there are several."""
    names, sizes = _seen(seen.events, "forward"), seen.sizes
    if len(names) == 1:
        only_held = tuple(f"{name}." for name in _seen(seen.events, "step", "skip"))  # by an optimizer, in no model
        return {names[0]: sum(n for path, n in sizes.items() if not path.startswith(only_held))}
    return {name: sum(n for path, n in sizes.items() if path.startswith(f"{name}.")) for name in names}


def _loader(loader: Any) -> str:
    batches = f"batches of {loader.batch_size}" if loader.batch_size else "its own batches"
    return f"{batches}, {counted(loader.workers, 'worker') if loader.workers else 'no workers'}"


def _seen(events: Iterable[Any], *kinds: str) -> tuple[str, ...]:
    """Return by name what took part in events: things themselves may be gone when a script has ended."""
    return tuple(dict.fromkeys(event.where for event in events if event.kind in kinds and event.where))


def _some(things: Iterable[Any]) -> str:
    every = [str(one) for one in things]
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def _line(title: str, text: str) -> str:
    return f"  {title:<11}{text}\n"
