"""Many runs, each in a process of its own: limited, recorded whatever ends them, and none of them run twice.

Linux and macOS. A run's folder is named after what distinguishes the run, so that a sweep that was ended goes on where
it was: what stands there is not run again.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import psutil
import yaml
from tqdm.auto import tqdm

from dxdy_nb.config import RunConfig, as_number
from dxdy_nb.errors import DxdyError
from dxdy_nb.ranks.pool import threads_each
from dxdy_nb.runs import lessons, record
from dxdy_nb.runs.environment import attended
from dxdy_nb.training.loop import train

if TYPE_CHECKING:
    import pandas as pd

PULSE = 0.1  # seconds between two looks at the processes
GRACE = 10.0  # seconds in which a run that is interrupted may write its record
AGAIN = ("killed", "interrupted")  # such a run is half done: it is run again beside its record, which stays
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dxdy_nb.training.sweep import run_here; run_here({parent})"


@dataclass(frozen=True)
class Lesson:
    """A notebook and all its parameters."""

    notebook: Path
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Planned:
    """One run to be: what distinguishes it from the others of its sweep, and what is run."""

    changed: Mapping[str, Any]
    work: RunConfig | Lesson

    @property
    def name(self) -> str:
        """The name of its folder."""
        name = ",".join(f"{field}={value}" for field, value in self.changed.items())
        clean = re.sub(r"[^\w.=+,-]", "_", name)[:120]
        return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep that is over: its folder and its ``result.json``."""

    planned: Planned
    folder: Path
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """What one run may take: seconds from the start of its process, and megabytes resident in all its processes.

    Memory is looked at ten times a second, so that a run may exceed it for so long; pages that processes share count
    once for each.

    Raises
    ------
    DxdyError
        A limit that is not above zero.
    """

    seconds: float | None = None
    megabytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("time limit", self.seconds), ("memory limit", self.megabytes)):
            if value is not None and not 0 < value < math.inf:
                raise DxdyError(f"{name}: expected a number above 0, got {value!r}.")


def parse_grid(items: Sequence[str]) -> dict[str, list[Any]]:
    """Return ``["lr=1e-3,1e-2"]`` as a mapping of lists; values are read as in a YAML list.

    Raises
    ------
    DxdyError
        Items that are not ``name=value,value`` or are given twice: all of them, a line each.

    Examples
    --------
    >>> parse_grid(["lr=1e-3,1e-2", "optimizer=sgd,adam"])
    {'lr': [0.001, 0.01], 'optimizer': ['sgd', 'adam']}
    """
    grid: dict[str, list[Any]] = {}
    problems = []
    for item in items:
        name, _, text = (part.strip() for part in item.partition("="))
        try:
            values = [as_number(value) for value in yaml.safe_load(f"[{text}]")]
        except (yaml.YAMLError, ValueError, RecursionError, TypeError):
            values = []
        if not name or not values:
            problems.append(f"{item!r}: expected name=value,value, like lr=1e-3,1e-2")
        elif name in grid:
            problems.append(f"{name}: given twice")
        grid[name] = values
    if problems:
        raise DxdyError("\n".join(problems))
    return grid


def plan(target: str, grid: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any]) -> list[Planned]:
    """Return the runs of a sweep over all combinations of a grid's values, the last name's changing fastest.

    Parameters
    ----------
    target : the name of a lesson, or the path of a configuration (``.yaml``)
    grid : names of fields or parameters, and the values that they take
    fixed : values that all runs have

    Raises
    ------
    DxdyError
        No such target, unknown names, values out of range, runs that would be the same: all of them, a line each.
    """
    if not grid:
        raise DxdyError("sweep: name what varies, like -g lr=1e-3,1e-2")
    configuration = target.endswith((".yaml", ".yml"))
    base = RunConfig.load(target) if configuration else lessons.resolve(target)
    planned: list[Planned] = []
    problems = [f"{name}: is in the grid, and fixed too. Give one of both." for name in grid if name in fixed]
    for point in itertools.product(*grid.values()):
        try:
            work = _work(base, {**fixed, **dict(zip(grid, point, strict=True))})
        except DxdyError as error:
            problems += str(error).splitlines()
            continue
        values = work.to_dict() if isinstance(work, RunConfig) else work.values
        one = Planned({name: values[name] for name in grid}, work)
        if one in planned:
            problems.append(f"{one.name}: the grid names this run twice.")
        planned.append(one)
    if problems:
        raise DxdyError("\n".join(dict.fromkeys(problems)))  # what is wrong with many runs is said once
    return planned


def _work(base: RunConfig | Path, values: Mapping[str, Any]) -> RunConfig | Lesson:
    if isinstance(base, RunConfig):
        return base.override(values)
    return Lesson(base, {**lessons.parameters(base), **lessons.typed(base, values)})


def run_all(
    planned: Sequence[Planned], out: Path, *, jobs: int = 1, limits: Limits | None = None, log: TextIO | None = None
) -> list[Outcome]:
    """Run what is planned and not done yet, ``jobs`` runs at once, and return how all of it ended.

    Each run has a folder of its own in ``out``, with what it prints in ``output.log``. Whatever ends a run is in its
    record, and the others go on. A run whose record says ``killed`` or ``interrupted`` is run again, in a folder of the
    same name with ``~2``; any other one counts as done, a failed one too, until its folder is removed. If this process
    ends, its runs end with it. ``log`` gets a line for each that is over.

    Raises
    ------
    DxdyError
        Another sweep is at work in the folder, or it holds runs of these names with other settings.
    KeyboardInterrupt
        After all runs have ended, as ``interrupted``.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise DxdyError(f"jobs: expected a whole number above 0, got {jobs!r}.")
    limits = limits or Limits()
    if not isinstance(limits, Limits):
        raise DxdyError(f"limits: expected Limits(seconds=..., megabytes=...), got {limits!r}.")
    with _claimed(out):
        places = [_place(out, one) for one in planned]
        others = [folder for folder, _, same in places if not same]
        problems = [f"{folder}: holds a run with other settings. Give another folder." for folder in others]
        if problems:
            raise DxdyError("\n".join(problems))
        waiting = [(one, folder) for one, (folder, over, _) in zip(planned, places, strict=True) if not over]
        running: list[_Child] = []
        before, quiet = len(planned) - len(waiting), not attended()
        bar = tqdm(total=len(planned), initial=before, desc=out.name, unit="run", disable=quiet)
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Child.start(*waiting.pop(0), threads_each(jobs)))
                time.sleep(PULSE)
                for child in [one for one in running if one.over(limits)]:
                    running.remove(child)
                    bar.update()
                    if log:
                        told = f"{child.folder.name}: {record.read_result(child.folder)['status']}"
                        bar.write(f"{told} after {time.monotonic() - child.began:.0f} s", file=log)
        finally:
            bar.close()
            _interrupt(running)
    return [Outcome(one, folder, record.read_result(folder)) for one, (folder, *_) in zip(planned, places, strict=True)]


def table(outcomes: Sequence[Outcome]) -> "pd.DataFrame":
    """Return one row a run: its folder's name, what distinguishes it, its status, and its metrics."""
    import pandas as pd

    rows = [
        {"run": one.folder.name, **one.planned.changed, "status": one.result["status"], **one.result.get("metrics", {})}
        for one in outcomes
    ]
    return pd.DataFrame(rows).set_index("run")


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Have a folder for this process alone; the claim ends with the process, whatever ends it."""
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise DxdyError(f"{out}: another sweep is at work there. Wait for its end, or give another folder.") from None
    try:
        yield
    finally:
        os.close(handle)


def _place(out: Path, planned: Planned) -> tuple[Path, bool, bool]:
    """Return the folder of a run, whether the run is done, and whether it is the planned one."""
    for attempt in itertools.count(1):
        folder = out / (planned.name if attempt == 1 else f"{planned.name}~{attempt}")
        if not any((folder / name).exists() for name in record.FILES):
            return folder, False, True
        if _status(folder) not in AGAIN:
            return folder, True, _holds(folder, planned.work)
    raise AssertionError


def _status(folder: Path) -> str:
    """Return how a run ended; one that lost its sweep a moment ago is about to end."""
    until = time.monotonic() + GRACE
    try:
        while (status := record.read_result(folder)["status"]) == "running" and time.monotonic() < until:
            time.sleep(PULSE)
    except DxdyError:
        return "killed"  # before its record was written to the end
    if status == "running":
        raise DxdyError(f"{folder}: its record says that it still runs. Wait for its end, or give another folder.")
    return status


def _holds(folder: Path, work: RunConfig | Lesson) -> bool:
    """Return whether a run was one of this configuration, or these parameters; one that never began may be."""
    path = folder / "config.yaml"
    if not path.exists():
        return True
    with contextlib.suppress(DxdyError, OSError, ValueError, yaml.YAMLError, RecursionError):
        if isinstance(work, RunConfig):
            return RunConfig.load(path) == work
        return bool(yaml.safe_load(path.read_text()) == dict(work.values))
    return False


@dataclass
class _Child:
    """The process of one run."""

    planned: Planned
    folder: Path
    process: psutil.Popen
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, planned: Planned, folder: Path, threads: int) -> Self:
        """Start a run, and do not wait for it."""
        record.new_folder("", folder)
        work: dict[str, Any] = {"out": str(folder)}
        if isinstance(planned.work, RunConfig):
            work["config"] = planned.work.to_dict()
        else:
            work |= {"notebook": str(planned.work.notebook), "values": planned.work.values}
        program = _PROGRAM.format(path=[str(one) for one in sys.path], parent=os.getpid())
        with open(folder / "output.log", "ab") as log:
            process = psutil.Popen(
                [sys.executable, "-c", program, json.dumps(work)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), record.PARENT: _parent(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches the sweep alone, which passes it on
            )
        return cls(planned, folder, process)

    def over(self, limits: Limits) -> bool:
        """Return whether the run is over, ended here where it is beyond its limits; then its record says how."""
        error: Exception | None = None
        if self.process.poll() is None:
            error = self._beyond(limits)
            if error is None:
                return False
            _end_tree(self.process)
            self.process.wait()
        try:
            silent = record.read_result(self.folder)["status"] == "killed"
        except DxdyError:
            silent = True
        if error or silent:
            self._record(error or ChildProcessError(self._last_words()))
        return True

    def _beyond(self, limits: Limits) -> Exception | None:
        if limits.seconds is not None and time.monotonic() - self.began > limits.seconds:
            return TimeoutError(f"took longer than {limits.seconds:g} s")
        if limits.megabytes is not None and (used := _resident(self.process) / 1e6) > limits.megabytes:
            return MemoryError(f"its processes held {used:.0f} MB; the limit is {limits.megabytes:g} MB")
        return None

    def _record(self, error: Exception) -> None:
        """Write down what ended the run, from outside of it; it may have come to an end, or to no record, meanwhile."""
        with contextlib.suppress(DxdyError):
            return record.end(self.folder, error)
        (self.folder / "result.json").unlink(missing_ok=True)  # it holds nothing
        work = self.planned.work
        if isinstance(work, RunConfig):
            kind = "training"
            work.save(self.folder / "config.yaml")
        else:
            kind = "lesson"
            lessons.write_parameters(self.folder, work.values)
        with contextlib.suppress(type(error)), record.Recorder(self.folder, kind=kind, parent=_parent(self.folder)):
            raise error

    def _last_words(self) -> str:
        code = self.process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = (self.folder / "output.log").read_text(errors="replace").strip().splitlines()[-1:]
        return f"the process {how} and left no record. {' '.join(words)}".strip()


def _parent(folder: Path) -> str:
    """Return what a run is a part of: its sweep, behind the lesson that made the sweep, if one did."""
    return "/".join(filter(None, [os.environ.get(record.PARENT), folder.resolve().parent.name]))


def _interrupt(running: Sequence[_Child]) -> None:
    """Ask runs to end, give them a moment to write their records, and end all that they have started."""
    trees = [process for child in running for process in _tree(child.process)]
    try:
        for child in running:
            with contextlib.suppress(psutil.Error):
                child.process.send_signal(signal.SIGINT)
        psutil.wait_procs([child.process for child in running], timeout=GRACE)
    finally:
        for process in trees:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, in whatever session: a kernel has one of its own."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(process: psutil.Process) -> int:
    """Return the bytes that a process and all that it has started have in memory."""
    total = 0
    for one in _tree(process):
        with contextlib.suppress(psutil.Error):
            total += one.memory_info().rss
    return total


def _end_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.suspend()  # it starts no others while they are counted
    for one in _tree(process):
        with contextlib.suppress(psutil.Error):
            one.kill()


def run_here(parent: int) -> None:
    """Do the run that the command line tells of; end, with all that was started here, when the parent does."""
    if os.getppid() != parent:  # it ended while torch was loaded here; another sweep may be at work by now
        return
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    work = json.loads(sys.argv[1])
    if "config" in work:
        train(RunConfig.from_dict(work["config"]), out=work["out"])
    else:
        lessons.run_notebook(Path(work["notebook"]), work["values"], work["out"])


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PULSE)
    me = psutil.Process()
    for one in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            one.kill()
    me.kill()
