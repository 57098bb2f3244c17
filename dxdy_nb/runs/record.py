"""A run's folder: what is written while it runs, and the run as it is read back."""

import contextlib
import errno
import json
import math
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil
import torch

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import trace
from dxdy_nb.runs import environment
from dxdy_nb.runs.folder import FILES as FILES
from dxdy_nb.runs.folder import RANKS, held, not_writable
from dxdy_nb.runs.folder import new_folder as new_folder

if TYPE_CHECKING:
    import pandas as pd

    from dxdy_nb.diagnosis.report import Report

STATUSES = (
    *("running", "completed", "diverged", "failed"),
    *("out_of_memory", "timed_out", "interrupted", "killed"),
)
# What is read of a result, where it is there; another version may have more.
FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("reason", "kind", "lesson", "parent", "started"), (str, type(None))),
    **dict.fromkeys(("seconds", "validation_seconds"), (int, float, type(None))),
    **dict.fromkeys(("process", "metrics", "weights", "verdict"), dict),
    **dict.fromkeys(("validation", "resumed"), list),
    **dict.fromkeys(("traceback", "report"), str),
}
LESSON_FOLDER = "DXDY_RUN_FOLDER"  # the environment variable by which a lesson's kernel knows where its record is
LONGEST_TRACEBACK = 5000  # characters, of the end
PARENT = "DXDY_PARENT"  # the environment variable that names the sweep, ablation or lesson that a run is a part of


@dataclass(frozen=True)
class Run:
    """A finished, failed or still running run, read from its folder.

    Examples
    --------
    >>> run = Run.load("runs/20261130-120000-digits-1f2e")  # doctest: +SKIP
    >>> run.status, run.metrics["test_accuracy"]  # doctest: +SKIP
    ('completed', 0.9833)
    """

    folder: Path
    status: str
    reason: str | None
    config: RunConfig
    metrics: dict[str, Any]
    validation_rows: list[dict[str, Any]] = field(repr=False)
    model: torch.nn.Module | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Read a run back; one whose process is gone without a word is ``killed``.

        Raises
        ------
        DxdyError
            The folder holds no run, or one of a lesson or a script.
        """
        folder = Path(folder)
        result = read_result(folder)
        if (kind := result.get("kind")) in ("lesson", "script"):
            raise DxdyError(f"{folder}: holds a {kind}, no training run. Look at it with `dxdy runs show {folder}`.")
        return cls.of(folder, result, RunConfig.load(folder / "config.yaml"))

    @classmethod
    def of(
        cls, folder: Path, result: Mapping[str, Any], config: RunConfig, model: torch.nn.Module | None = None
    ) -> "Run":
        """Return the run that a result tells of."""
        plain = _plain(result)
        validation = plain.get("validation", [])
        return cls(folder, plain["status"], plain.get("reason"), config, plain.get("metrics", {}), validation, model)

    @property
    def trace(self) -> trace.Trace:
        """The record of every step."""
        return trace.read(self.folder)

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step: of several ranks the loss over all samples, and their number together."""
        return steps_of(self.folder)

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row for each step and parameter."""
        return self.trace.gradients

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return self.trace.sizes

    @property
    def validation(self) -> "pd.DataFrame":
        """One row for each validation: loss and accuracy, index ``step`` (steps taken before it)."""
        import pandas as pd

        return pd.DataFrame(self.validation_rows, columns=["step", "loss", "accuracy"]).set_index("step")

    def diagnose(self, time_limit: float = 40.0) -> "Report":
        """Return what is wrong with the run: its configuration is set up again and judged, and its record.

        The first steps are taken again, on one process, as ``dx.diagnose`` does; where that finds no error, a loss of
        the record that is not finite is one. ``time_limit`` is in seconds. The run's folder and random states are left
        as they are.

        Examples
        --------
        >>> run.diagnose()  # doctest: +SKIP
        data → forward → loss → backward → update → comm → reproduce
        no error found
        """
        from dxdy_nb.diagnosis.rerun import judge_run

        return judge_run(self, time_limit)

    def plot(self) -> Any:
        """Return a figure of the run's record."""
        from dxdy_nb.lesson import plots

        return plots.training(self)


class Recorder:
    """Writes ``result.json`` of one run: running at first, then how it ended, whatever ends it.

    An exception inside the ``with`` block is recorded and goes on its way. ``status`` may be set inside the block
    when a run ends by a return.

    Raises
    ------
    DxdyError
        At the start: the folder cannot be written, or already holds a run.
    """

    def __init__(self, folder: Path, **facts: Any) -> None:
        self.path = folder.absolute() / "result.json"  # the loop may go to another directory
        self.result: dict[str, Any] = {
            "status": "running",
            "reason": None,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": None,
            "process": _identity(psutil.Process()),
            "parent": os.environ.get(PARENT),
            **facts,
        }
        self._began = time.perf_counter()
        self._told = False
        try:
            with open(self.path, "x", encoding="utf-8") as file:  # of two that ask for one folder, one gets it
                file.write(_json(self.result))
        except FileExistsError:
            raise held(folder, self.path.name) from None
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise not_writable(folder, error) from None

    def write(self, **facts: Any) -> None:
        """Store what is known. A disk that is full is no reason to end a run: it is told once."""
        self.result.update(facts)
        try:
            write_json(self.path, self.result)
        except OSError as error:
            self._write_last_word()
            if not self._told:
                self._told = True
                warnings.warn(
                    f"{self.path}: {error.strerror}. The run goes on; its newest metrics are not stored.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _write_last_word(self) -> None:
        """Store the status beside the metrics that were stored before: where they fit, it nearly always fits too."""
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads(self.path.read_text())
            write_json(self.path, stored | {name: self.result[name] for name in ("status", "reason", "seconds")})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self.result |= {"status": status_of(error), "reason": _reason(error)}
            self.result["traceback"] = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        elif self.result["status"] == "running":
            self.result["status"] = "completed"
        self.result["seconds"] = round(time.perf_counter() - self._began, 3)
        try:
            self.write()
        except KeyboardInterrupt:  # an impatient second Ctrl-C must not leave a run that says it is running
            self.write()
            raise


def steps_of(folder: Path, read: Callable[[Path], trace.Trace] = trace.read) -> "pd.DataFrame":
    """Return the table of a run's steps: of several ranks the loss over all samples, and their number together."""
    steps = read(folder).steps
    others = [read(path.parent).steps for path in sorted(folder.glob(f"{RANKS}/*/trace.json"))]
    if others:
        counts = [one["effective_batch"] for one in (steps, *others)]
        losses = [one["loss"] * count for one, count in zip((steps, *others), counts, strict=True)]
        steps = steps.assign(loss=sum(losses) / sum(counts), effective_batch=sum(counts))
    return steps


def write_environment(
    folder: Path, model: torch.nn.Module | None = None, data: Any = None, **facts: Any
) -> dict[str, Any]:
    """Write ``environment.json`` with more facts and, where there are uncommitted changes, ``diff.patch``; return it.

    Raises
    ------
    DxdyError
        The folder cannot be written.
    """
    described, diff = {**environment.describe(model, data), **facts}, environment.uncommitted_diff()
    try:
        write_json(folder / "environment.json", described)
        if diff:
            write_text(folder / "diff.patch", diff)
    except OSError as error:
        raise not_writable(folder, error) from None
    return described


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as ``write_text`` writes a text; NaN and infinity become null."""
    write_text(path, _json(value))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a text so that a reader sees the old or the new content, never half of it.

    On a full disk the old file is overwritten in place, which needs no new space as long as it fits.

    Raises
    ------
    OSError
        There is no room; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # its room may be what is missing
        if not path.exists():
            raise
        _overwrite(path, text.encode())
    finally:
        temporary.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    before = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.seek(0)
            file.write(before)
            file.truncate(len(before))
            raise
        file.truncate()


def read_result(folder: Path) -> dict[str, Any]:
    """Return a run's ``result.json``; ``running`` becomes ``killed`` where the process is gone.

    Raises
    ------
    DxdyError
        There is no readable result.
    """
    path = folder / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        known = all(isinstance(result[name], kinds) for name, kinds in FORMS.items() if name in result)
        if result["status"] not in STATUSES or not known or not all(isinstance(r, dict) for r in _rows_of(result)):
            raise ValueError
        if result["status"] == "running" and not _alive(result["process"]):
            result["status"], result["reason"] = "killed", "the process ended without a word"
        elif result["status"] == "running" and result["process"]["host"] != socket.gethostname():
            result["reason"] = f"on {result['process']['host']}: whether it still runs cannot be seen from here"
    except OSError as error:
        raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is {folder} a run's folder?") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DxdyError(f"{path}: is no run's result. Is it damaged?") from None
    return result


def _rows_of(result: Mapping[str, Any]) -> list[Any]:
    return [*result.get("validation", ()), *result.get("resumed", ())]


def result(**metrics: float | int | str | bool) -> None:
    """Report a lesson's named results, which ``dxdy run`` keeps in ``result.json``; elsewhere they are only checked.

    Raises
    ------
    DxdyError
        A value that is no number, text or truth value.

    Examples
    --------
    >>> result(accuracy=0.97)
    """
    plain = {
        name: value.item() if isinstance(value, (torch.Tensor, np.generic)) and math.prod(value.shape) == 1 else value
        for name, value in metrics.items()
    }
    for name, value in plain.items():
        if not isinstance(value, (bool, int, float, str)):
            raise DxdyError(f"result: {name} is a {type(value).__name__}; expected a number, a text or a truth value.")
    folder = os.environ.get(LESSON_FOLDER)
    if folder:
        path = Path(folder) / "result.json"
        try:
            known = read_result(path.parent)
            write_json(path, known | {"metrics": known.get("metrics", {}) | plain})
        except (DxdyError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            text = f"{path}: {reason}. The lesson goes on; not stored: {', '.join(plain)}."
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def recorded(parent: Path) -> Iterator[Run]:
    """Return the training runs whose folders stand in a folder; what cannot be read is passed over."""
    for path in sorted(parent.glob("*/config.yaml")):
        with contextlib.suppress(DxdyError):
            yield Run.load(path.parent)


def take_over(folder: Path) -> dict[str, Any]:
    """Make room in a run's folder for its next process, and return what the last one told; of several, one gets it.

    Raises
    ------
    DxdyError
        A process still trains there, or the folder is another kind of record.
    """
    path = folder / "result.json"
    if not path.exists():
        return {}
    result = read_result(folder)
    if result.get("kind") != "training":
        raise held(folder, path.name)
    claimed = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if result["status"] != "running":
            os.rename(path, claimed)
            if json.loads(claimed.read_text()).get("process") == result.get("process"):
                claimed.unlink()
                return result
            os.rename(claimed, path)  # of somebody who was faster
    except FileNotFoundError:
        pass  # likewise
    except OSError as error:
        raise not_writable(folder, error) from None
    process = result.get("process", {})
    which = f"process {process.get('pid')} on {process.get('host')}"
    raise DxdyError(f"{folder}: {which} still trains there. Wait for its end, or end it.")


def end(folder: Path, error: BaseException) -> None:
    """Write down what ended a run, from outside of it: ``TimeoutError`` where a driver stopped it at its time limit."""
    result = read_result(folder)
    if result["status"] not in ("completed", "diverged"):
        write_json(folder / "result.json", {**result, "status": status_of(error), "reason": _reason(error)})


def add_verdict(folder: Path, **verdict: Any) -> None:
    """Write down how a run compares with its baseline; where that cannot be written, all else of it stays."""
    with contextlib.suppress(DxdyError, OSError):
        write_json(folder / "result.json", {**read_result(folder), "verdict": verdict})


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def status_of(error: BaseException) -> str:
    """Return the run status that an exception stands for."""
    return status_named({kind.__name__ for kind in type(error).__mro__}, str(error))


def status_named(kinds: Collection[str], text: str) -> str:
    """Return the run status that an exception of another process stands for, by the names of its classes and its text.

    Examples
    --------
    >>> status_named(["TimeoutError"], "stopped after 60 s")
    'timed_out'
    """
    if "KeyboardInterrupt" in kinds:
        return "interrupted"
    # Torch has no class of its own for a CPU without memory.
    if {"OutOfMemoryError", "MemoryError"} & set(kinds) or "allocate memory" in text:
        return "out_of_memory"
    return "timed_out" if "TimeoutError" in kinds else "failed"


def _identity(process: psutil.Process) -> dict[str, Any]:
    """Return what tells a process from all others: a number is given anew, and a clock is set."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux: another one after each start of the machine
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else None,
        "pid": process.pid,
        "started": process.create_time() - psutil.boot_time(),  # both move with the clock, their distance does not
    }


def _alive(recorded: Mapping[str, Any]) -> bool:
    """Return whether a recorded process still runs."""
    if recorded["host"] != socket.gethostname():
        return True  # nobody can tell from here
    try:
        found = psutil.Process(recorded["pid"])
        now = _identity(found)
        # A dead process stays in the table until its parent asks for it, in a container often for ever.
        same = recorded.get("boot") == now["boot"] and abs(recorded["started"] - now["started"]) < 1
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
