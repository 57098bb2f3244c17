"""What a person reads of runs in a terminal: the list of all, and the story of one."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.observe import trace
from dxdy_nb.runs.entries import OWN, Entry
from dxdy_nb.runs.record import steps_of

if TYPE_CHECKING:
    import pandas as pd

LAST = 5  # steps that are shown
LONGEST_CAUSE = 60  # characters of a cause that has something after it
STEP_COLUMNS = ["loss", "lr", "grad_norm", "effective_batch", "skipped", "step_time"]


def listing(table: "pd.DataFrame", width: int | None = None) -> str:
    """Return the table of runs as lines that fit a terminal: what differs in the configuration, results or the cause.

    Examples
    --------
    >>> import pandas as pd
    >>> print(listing(pd.DataFrame({"id": ["a"], "status": ["completed"], "lr": [0.1]}).set_index("id")))
    id  status     what  seconds  configuration and results, or the cause
    a   completed                 lr=0.1
    """
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize)
    rows = [("id", "status", "what", "seconds", "configuration and results, or the cause")]
    for name, row in table.iterrows():
        own = {str(key): _word(value) for key, value in row.items()}
        rest = [f"{key}={quote(value)}" for key, value in own.items() if key not in OWN and value]
        reason = own.get("reason", "")
        cause = reason[:LONGEST_CAUSE] + "…" if rest and len(reason) > LONGEST_CAUSE else reason
        last = "  ".join(filter(None, [cause, " ".join(rest)]))
        rows.append((str(name), own["status"], own.get("name", ""), own.get("seconds", ""), last))
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in columns(rows))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines in which columns stand one below the other.

    Examples
    --------
    >>> columns([("status", "seconds"), ("completed", "0.1")])
    ['status     seconds', 'completed  0.1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def story(one: Entry) -> str:
    """Return all that a run's folder tells, from its status and cause to the last steps and where it failed."""
    told = one.result
    parts = [f"{one.id}: {one.status}{f', {one.reason}' if one.reason else ''}"]
    facts = {"folder": one.folder, "script": one.script.get("name")}
    parts[0] += _block(facts | {name: told.get(name) for name in ("parent", "lesson", "started", "seconds", "verdict")})
    for title, values in (("configuration", one.config), ("environment", one.environment), ("results", one.metrics)):
        parts.append(f"{title}{_block(values)}" if values else f"{title}: none recorded")
    parts.append(_last_steps(one))
    parts += [f"where it failed\n{told['traceback'].rstrip()}"] if told.get("traceback") else []
    parts += [f"what was found\n{told['report']}"] if told.get("report") else []
    return "\n\n".join(parts)


def _last_steps(one: Entry) -> str:
    try:
        steps = steps_of(one.folder, trace.glance)
    except DxdyError:
        return "steps: none recorded"
    return f"the last of {counted(len(steps), 'step')}\n{steps[STEP_COLUMNS].tail(LAST).to_string()}"


def _block(values: Mapping[str, Any]) -> str:
    width = max(map(len, values), default=0)
    shown: Iterable[tuple[str, Any]] = ((name, value) for name, value in values.items() if value not in (None, {}, []))
    return "".join(f"\n  {name.ljust(width)}  {_word(value)}" for name, value in shown)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_word(one)}" for name, one in value.items())
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
