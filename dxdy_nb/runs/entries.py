"""The entries of a folder of runs, each read as far as it can be: one bad folder breaks no list."""

import difflib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import yaml

from dxdy_nb.config import RunConfig, as_number
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import trace
from dxdy_nb.runs.record import FILES, read_result, steps_of

EFFICIENCY = ("seconds", "steps_taken", "step_time", "samples_per_second", "memory", "validation_time")
OWN = ("id", "status", "reason", "kind", "name", "parent", "started", *EFFICIENCY)  # columns of every row


@dataclass(frozen=True)
class Entry:
    """A run's folder as it is found, of whatever kind and from whatever version.

    ``id`` is the folder's name; of a run of a sweep the sweep's comes first (``sweep/run``). ``result``, ``config`` and
    ``environment`` are what is stored, empty where that cannot be read; ``problems`` says why, a sentence each. The
    configuration of a script is its options.
    """

    id: str
    folder: Path
    result: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """One of the eight statuses, or ``unreadable``."""
        return str(self.result.get("status", "unreadable"))

    @property
    def reason(self) -> str:
        """Why the run ended as it did, and what is wrong with its folder; empty where all is well."""
        return printable("; ".join([*filter(None, [self.result.get("reason")]), *self.problems]))

    @property
    def metrics(self) -> dict[str, Any]:
        """The results that are single values; of a watched script, which names none, the losses and what was found."""
        told = self.result.get("metrics", {})
        of_scripts = {"first_loss", "last_loss", "found"} if self.script else told.keys()
        return {name: value for name, value in told.items() if _single(value) and name in of_scripts}

    def efficiency(self) -> dict[str, float]:
        """Return the figures of efficiency: seconds, bytes, samples a second; NaN where they were not recorded."""
        rows, validating = self.result.get("validation"), _number(self.result.get("validation_seconds"))
        found = dict.fromkeys(EFFICIENCY, math.nan)
        found |= {
            "seconds": _number(self.result.get("seconds")),
            "validation_time": validating / max(1, len(rows or ())),
        }
        try:
            steps = steps_of(self.folder, trace.glance)
        except DxdyError:  # it is among the problems, if there is a trace at all
            return found
        usual = (
            steps.iloc[1:] if len(steps) > 1 else steps
        )  # the first step warms up caches, and is no figure of the run
        total, samples = float(usual["step_time"].sum()), float(usual["effective_batch"].sum())
        return found | {
            "steps_taken": len(steps),
            "step_time": float(steps["step_time"].median()),
            "samples_per_second": samples / total if total else math.nan,
            "memory": float(steps["memory"].max()),
        }

    @property
    def script(self) -> dict[str, Any]:
        """Name and arguments of the script that was watched, if one was."""
        told = self.result.get("script")
        return told if isinstance(told, dict) else {}

    def row(self) -> dict[str, Any]:
        """Return the entry as a row of the table of runs."""
        row = dict.fromkeys(OWN) | {name: self.result.get(name) for name in ("kind", "parent", "started")}
        row |= {"id": self.id, "status": self.status, "reason": self.reason}
        told = (self.result.get("lesson"), self.script.get("name"), self.result.get("target"), self.config.get("data"))
        row["name"] = next(filter(None, told), None)
        row |= self.efficiency() | {column(name): value for name, value in self.config.items()}
        return row | {(f"metric_{name}" if name in row else name): value for name, value in self.metrics.items()}


def entry(folder: Path, name: str | None = None) -> Entry:
    """Return what a folder holds; what cannot be read is a problem of the entry, and no error."""
    name = printable(name or folder.name)
    try:
        os.listdir(folder)
    except OSError as error:
        problem = f"{folder}: cannot be read ({error.strerror}). Does it belong to another user?"
        return Entry(name, folder, {}, {}, {}, (problem,))
    found: dict[str, dict[str, Any]] = {"result": {}, "config": {}, "environment": {}}
    problems: list[str] = []
    try:
        found["result"] = _plain(read_result(folder))
    except DxdyError as error:
        problems.append(str(error))
    for part, file, parse in (("config", "config.yaml", _yaml), ("environment", "environment.json", json.loads)):
        try:
            if not isinstance(values := parse((folder / file).read_text()), dict):
                raise ValueError
            found[part] = _plain(values)
        except FileNotFoundError:  # a run that ended before it began has none
            pass
        except OSError as error:
            problems.append(f"{folder / file}: cannot be read ({error.strerror})")
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.append(f"{folder / file}: is damaged")
    try:
        if found["result"].get("kind") == "training" and found["config"]:  # with fields that came into being later
            found["config"] = RunConfig.load(folder / "config.yaml").to_dict()
    except DxdyError as error:
        problems.append(str(error).splitlines()[0])
    try:
        if os.path.exists(folder / "trace.json"):  # Path.exists raises where the folder is another user's
            trace.glance(folder)
    except DxdyError as error:
        problems.append(str(error))
    kept = Entry(name, folder, found["result"], {}, found["environment"], tuple(problems))
    given = kept.script.get("arguments")
    config = options([*map(str, given)] if isinstance(given, list) else []) if kept.script else found["config"]
    return replace(kept, config={str(name): value for name, value in config.items() if name != "fingerprint"})


def column(name: str) -> str:
    """Return what a field of a configuration is called in the table of runs, which has columns of its own."""
    return f"config_{name}" if name in OWN else name


def options(arguments: Sequence[str]) -> dict[str, Any]:
    """Return a script's options by name, as far as they can be told without it.

    Examples
    --------
    >>> options(["--lr", "0.1", "--amp", "--model=mlp", "data.csv"])
    {'lr': 0.1, 'amp': True, 'model': 'mlp', 'arguments': ['data.csv']}
    """
    values: dict[str, Any] = {}
    name = ""  # of the option that waits for its value
    for argument in arguments:
        if argument.startswith("-") and as_number(argument) is argument:
            name, _, value = argument.lstrip("-").partition("=")
            values[name] = as_number(value) if value else True
            name = "" if value else name
        elif name:
            values[name], name = as_number(argument), ""
        else:
            values.setdefault("arguments", []).append(argument)
    return values


def entries(parent: str | Path) -> list[Entry]:
    """Return all runs in a folder, those of its sweeps too, in the order of their names, which begin with their time.

    Raises
    ------
    DxdyError
        There is no such folder.
    """
    return [entry(folder, name) for name, folder in _folders(Path(parent))]


def outermost(found: Sequence[Entry]) -> list[Entry]:
    """Return the runs but those that are a part of another one: that were made inside a lesson's run."""
    ids = {one.id for one in found}

    def inside(one: Entry) -> bool:
        parent = PurePosixPath(one.result.get("parent") or ".")
        return not ids.isdisjoint(map(str, (parent, *parent.parents)))

    return [one for one in found if not inside(one)]


def find(parent: str | Path, name: str) -> Entry:
    """Return the run of a name, of any part of a name that only one run has, or of a path.

    Raises
    ------
    DxdyError
        No run, or several, are called so.
    """
    if Path(name).is_dir() and _holds_a_run(Path(name)):
        return entry(Path(name))
    known = dict(_folders(Path(parent)))
    matches = [one for one in known if one.startswith(name)] or [one for one in known if name in one]
    if name in known or len(matches) == 1:
        name = name if name in known else matches[0]
        return entry(known[name], name)
    if matches:
        raise DxdyError(f"{name}: {len(matches)} runs in {parent} are called so: {', '.join(matches[:8])}. Write more.")
    parts = {part: one for one in known for part in (one, *re.split("[-/]", one))}
    near = [parts[part] for part in difflib.get_close_matches(name, parts, n=1)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DxdyError(f"{name}: no run in {parent} is called so.{hint} `dxdy runs` lists them.")


def _folders(parent: Path, depth: int = 3) -> Iterator[tuple[str, Path]]:
    """Return name and folder of each run; where there is none, a sweep's runs may stand inside."""
    try:
        inside = sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError as error:
        raise DxdyError(f"{parent}: cannot be read ({error.strerror}). Give a folder that holds runs.") from None
    for folder in inside:
        if _holds_a_run(folder):
            yield folder.name, folder
        elif depth > 1:
            yield from ((f"{folder.name}/{name}", path) for name, path in _folders(folder, depth - 1))


def printable(text: str) -> str:
    """Return a text that any stream and any JSON takes: half characters, as of names in other encodings, become "?"."""
    return text.encode("utf-8", "replace").decode()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return what was stored as texts, numbers, lists and mappings, all of it printable.

    Raises
    ------
    ValueError
        It holds itself.
    """
    plain: dict[str, Any] = json.loads(printable(json.dumps(values, default=str, skipkeys=True, ensure_ascii=False)))
    return plain


def _yaml(text: str) -> Any:
    # The loader in C, where there is one, takes a tenth of the time; both are safe.
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _holds_a_run(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in FILES)
    except OSError:  # of another user: it is shown, with the reason
        return True


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max else math.nan


def _single(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, np.generic))
