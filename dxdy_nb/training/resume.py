"""Where a run begins: anew, or at the last good checkpoint of its folder; and how it ends in time for one."""

import contextlib
import dataclasses
import os
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import trace
from dxdy_nb.ranks.session import Session
from dxdy_nb.runs.folder import FILES, RANKS, folder_of, held, new_folder
from dxdy_nb.runs.record import Run, read_result, take_over
from dxdy_nb.training import checkpoint

# What decides which sample comes at which step, and what a state belongs to: no run can go on with another one.
FIXED = ("seed", "data", "model", "optimizer", "batch_size", "accumulation_steps", "world_size")


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    ``state`` is the checkpoint that it goes on from, ``resumed`` whether its folder held a run (perhaps without a
    checkpoint), ``completed`` whether there is nothing left to do, ``changes`` what is configured otherwise now.
    """

    folder: Path
    state: checkpoint.Checkpoint | None = None
    resumed: bool = False
    completed: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of optimizer steps before it."""
        return self.state.step if self.state else 0

    def run(self, model: nn.Module) -> Run:
        """Return the run that its folder holds, with its last weights in a model."""
        if self.state is None:
            return Run.load(self.folder)
        model.load_state_dict(self.state.model)
        return dataclasses.replace(Run.load(self.folder), model=model)


def start(config: RunConfig, out: str | Path | None, resume: bool, allow_changes: bool) -> Start:
    """Return what a run in a folder begins with; nothing is written yet but the folder itself.

    Raises
    ------
    DxdyError
        The folder cannot be written or holds something else; its run still goes on, or was configured otherwise; all
        its checkpoints are damaged, or its trace is.
    """
    taken = [name for name in FILES if resume and os.path.exists(folder_of(out, "out") / name)]
    if not taken:
        return Start(new_folder(config.data, out))
    folder = Path(str(out))
    if "result.json" not in taken and "config.yaml" not in taken:  # a process may have died between the two
        raise held(folder, *taken)
    died: dict[str, Any] = {"kind": "training", "status": "killed"}
    try:
        result = read_result(folder) if "result.json" in taken else died
    except DxdyError as error:
        raise DxdyError(f"resume: {error} Without it the run goes on from its last checkpoint: move it away.") from None
    if result.get("kind") != "training":
        raise held(folder, *taken)
    if result["status"] == "running":
        take_over(folder)  # which tells whose it is
    before = RunConfig.load(folder / "config.yaml") if "config.yaml" in taken else config
    changes = changed(before, config, allow_changes)
    state = checkpoint.newest(folder / checkpoint.FOLDER, {name: before.to_dict()[name] for name in FIXED})
    completed = result["status"] == "completed" and not changes
    if state and completed:  # its last checkpoint may be damaged: then what lies behind the one before is made again
        completed = state.step == max(_validated(result), default=state.step)
    for place in () if completed else (folder, *folder.glob(f"{RANKS}/rank*/")):
        _check_trace(place, state.step if state else 0)
    return Start(folder, state, True, completed, changes)


def _check_trace(folder: Path, step: int) -> None:
    try:
        trace.check(folder, step)
    except DxdyError as error:
        aside, here = shlex.quote(str(folder / "damaged-trace")), shlex.quote(str(folder))
        raise DxdyError(
            f"resume: {error} The run can go on from step {step} without this record of the steps before. Set it "
            f"aside, where what is whole of it can still be read, and resume again:\nmkdir {aside} && "
            f"mv {here}/trace.* {aside}"
        ) from None


def _validated(result: Mapping[str, Any]) -> list[int]:
    return [step for row in result.get("validation", []) if isinstance(step := row.get("step"), int)]


def agreed(
    config: RunConfig, model: nn.Module, s: Session, out: str | Path | None, resume: bool, allow_changes: bool
) -> Start:
    """Return what all ranks begin with: rank 0 looks, and the others get what it has read.

    Raises
    ------
    DxdyError
        As ``start`` does; or the checkpoint is of another model.
    """
    found = [start(config, out, resume, allow_changes) if s.is_main else None]
    if s.world_size > 1:
        dist.broadcast_object_list(found)
    (one,) = found
    assert one is not None
    if one.state is not None:
        checkpoint.fits(one.state.model, model)
    return one


def changed(before: RunConfig, now: RunConfig, allow_changes: bool) -> dict[str, Any]:
    """Return what differs between the configurations that a run began with and is to go on with.

    Raises
    ------
    DxdyError
        Something differs, and no change is allowed, or not this one.

    Examples
    --------
    >>> changed(RunConfig(), RunConfig(lr=0.1), allow_changes=True)
    {'lr': [0.05, 0.1]}
    >>> changed(RunConfig(), RunConfig(lr=0.1), allow_changes=False)
    Traceback (most recent call last):
    ...
    dxdy_nb.errors.DxdyError: resume: the run in this folder is configured otherwise.
    lr: 0.05 there, 0.1 here
    Give its own configuration, or allow_changes=True to go on with this one.
    """
    old, new = before.to_dict(), now.to_dict()
    changes = {name: [old[name], new[name]] for name in new if old[name] != new[name]}
    refused = [name for name in changes if not allow_changes or name in FIXED]
    if refused:
        lines = [f"{name}: {old[name]!r} there, {new[name]!r} here" for name in refused]
        way_out = "Give its own configuration, or allow_changes=True to go on with this one."
        if set(refused) & set(FIXED):
            fixed = [name for name in refused if name in FIXED]
            way_out = f"Give its own configuration, or another folder: {', '.join(fixed)} cannot change within a run."
        raise DxdyError("\n".join(["resume: the run in this folder is configured otherwise.", *lines, way_out]))
    return changes


def own_folder(begin: Start, s: Session) -> Path:
    """Return where this rank keeps its record: rank 0 in the run's folder, the others in folders inside."""
    ranks = begin.folder / RANKS
    if s.world_size == 1:
        return begin.folder
    ranks.mkdir(exist_ok=True)
    log = ranks / f"rank{s.rank}.jsonl"
    if log.exists():  # ranks are compared update by update, and may have died at different ones
        log.replace(log.with_suffix(".before"))
    own = begin.folder if s.is_main else ranks / f"rank{s.rank}"
    own.mkdir(exist_ok=True)
    return own


def taken_over(folder: Path, begin: Start) -> dict[str, Any]:
    """Make room for the next record of a resumed run, and return what is to be said of it."""
    if not begin.resumed:
        return {}
    before = take_over(folder)
    for place in (folder, folder / checkpoint.FOLDER):
        for left in place.glob(".*.*[0-9]"):  # what a process was writing when it died
            left.unlink(missing_ok=True)
    now = {"step": begin.step, "after": before.get("status"), "changes": begin.changes}
    return {
        "resumed": [*before.get("resumed", []), now],
        "validation_seconds": before.get("validation_seconds") or 0.0,
    }


@contextlib.contextmanager
def patient(s: Session) -> Iterator[list[signal.Signals]]:
    """Let Ctrl-C and SIGTERM wait: what came is in the list, and comes through at the end of the block.

    So a loop can end its step and save. A second one comes through at once. Where no signals arrive (not in the main
    thread) or they are ignored, nothing changes; nor on several ranks, which would have to agree on the step.
    """
    came: list[signal.Signals] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            _give_back(before)
            signal.raise_signal(number)
        came.append(signal.Signals(number))

    if s.world_size == 1 and threading.current_thread() is threading.main_thread():
        found = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
        before = {one: handler for one, handler in found.items() if handler not in (None, signal.SIG_IGN)}
    for one in before:
        signal.signal(one, note)
    try:
        yield came
    finally:
        _give_back(before)
        for one in came[:1]:
            signal.raise_signal(one)


def _give_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for one, handler in handlers.items():
        signal.signal(one, handler)
