"""Checkpoints: all that the rest of a run depends on, in one file that is there as a whole or not at all.

They stand in ``checkpoints/`` of the run's folder, each named after the optimizer steps before it, with its sha256
beside it (``sha256sum -c step-00000021.pt.sha256`` compares). A flipped byte would be loaded without a word otherwise.
"""

import contextlib
import hashlib
import io
import math
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import torch
import torch.distributed as dist
from torch import nn

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError, counted, in_a_line
from dxdy_nb.observe.plain import plain, restored, with_tensors
from dxdy_nb.observe.snapshot import RandomStates, put_random
from dxdy_nb.ranks.session import Session

FOLDER = "checkpoints"  # in a run's folder
LAST = 2  # checkpoints kept besides the best


@dataclass(frozen=True)
class Checkpoint:
    """A run between two optimizer steps, as tensors and plain values.

    ``epoch`` and ``windows`` say what was consumed of the data, whatever workers had fetched by then: so many whole
    passes, and so many optimizer steps' batches of the one under way. ``random`` has the states of every rank's
    generators; ``code`` is what bit-identity hinges on besides.
    """

    step: int
    epoch: int
    windows: int
    config: dict[str, Any]
    code: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    random: list[Any]
    validation: list[dict[str, float]]
    best: dict[str, float] | None  # the validation with the lowest loss

    def restore(self, parts: Mapping[str, Any], s: Session, code: Mapping[str, Any]) -> None:
        """Put all states where they were taken from; the settings of optimizer and schedule are those of now.

        Parameters
        ----------
        parts : model, optimizer, schedule and scaler by these names
        code : what ``environment.json`` says; what differs is told

        Raises
        ------
        DxdyError
            A state does not belong to what it is for.
        """
        try:
            self._put(parts, s, code)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise DxdyError(
                f"resume: the checkpoint of step {self.step} does not fit what is trained here: {in_a_line(error)}. "
                "Remove it from the folder's checkpoints, and the one before it is used."
            ) from None

    def _put(self, parts: Mapping[str, Any], s: Session, code: Mapping[str, Any]) -> None:
        pairs = [(name, self.code.get(name), now) for name, now in hinges(code).items()]
        other = [f"{name} {then}, now {now}" for name, then, now in pairs if then != now]
        if other:
            text = f"resume: the checkpoint was made with {'; '.join(other)}. The run may go on with other numbers."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        parts["model"].load_state_dict(self.model)
        settings = parts["optimizer"].state_dict()["param_groups"]
        parts["optimizer"].load_state_dict({**self.optimizer, "param_groups": settings})
        schedule = parts["schedule"]
        schedule.load_state_dict({**self.schedule, "base_lrs": schedule.base_lrs})
        rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, base, factor in rates:
            group["lr"] = base * factor(schedule.last_epoch)
        if self.scaler:  # it is empty where nothing was scaled
            parts["scaler"].load_state_dict(self.scaler)
        put_random(restored(self.random[s.rank], None))


def save(
    folder: Path,
    parts: Mapping[str, Any],
    s: Session,
    *,
    config: RunConfig,
    code: Mapping[str, Any],
    validation: Sequence[dict[str, float]],
    **place: Any,
) -> None:
    """Save a run as it is now, and remove its older checkpoints but the last two and the one with the best validation.

    Every rank must call it; rank 0 writes. Whatever ends the process meanwhile, a file is whole or not there. A disk
    that is full is no reason to end a run: it is told, and what was saved before stays.

    Examples
    --------
    >>> from dxdy_nb import train
    >>> run = train(RunConfig(max_steps=4, checkpoint_every=1), out=tmp_path / "run")
    >>> sorted(path.name for path in (run.folder / FOLDER).glob("*.pt"))
    ['step-00000003.pt', 'step-00000004.pt']
    """
    # Not numpy's own uint32, which torch packs for another rank in a way that it cannot unpack.
    mine = with_tensors(plain(RandomStates().read()), lambda t: t.long() if t.dtype == torch.uint32 else t)
    random = [mine] * s.world_size
    if s.world_size > 1:
        dist.all_gather_object(random, mine)
    if s.is_main:
        states = {name: part.state_dict() for name, part in parts.items()}
        best = min(validation, key=_loss, default=None)
        facts: dict[str, Any] = {"config": config.to_dict(), "code": hinges(code), "random": random}
        write(folder, Checkpoint(**place, **states, **facts, validation=list(validation), best=best))


def hinges(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return what of an environment the bits of a run hinge on."""
    return {name: str(environment[name]) for name in ("dxdy_nb", "commit", "torch", "threads")}


def _loss(row: Mapping[str, float]) -> float:
    return row["loss"] if math.isfinite(row["loss"]) else math.inf


def write(folder: Path, state: Checkpoint) -> None:
    """Write a checkpoint to its file, and remove those that nobody needs any more."""
    path = folder / f"step-{state.step:08d}.pt"
    buffer = io.BytesIO()
    torch.save(vars(state), buffer)
    data = buffer.getvalue()
    best = f"step-{state.best['step']:08d}" if state.best else ""
    try:
        folder.mkdir(exist_ok=True)
        _write(_sum_of(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
        _write(path, data)
        for old in [one for one in _paths(folder) if one <= path][:-LAST]:  # later ones are damaged, and told
            if old.stem != best:
                old.unlink()
                _sum_of(old).unlink(missing_ok=True)
    except OSError as error:
        if not path.exists():
            with contextlib.suppress(OSError):
                _sum_of(path).unlink()  # one for each attempt would be left
        text = f"{folder}: {error.strerror}. Training goes on, without a new checkpoint."
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _write(path: Path, data: bytes) -> None:
    """Write a file so that nobody ever sees half of it, not even after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # its new name too
    finally:
        os.close(folder)


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def _sum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def newest(folder: Path, config: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """Return the last good checkpoint of a folder, or None where there is none at all; each damaged one is told.

    ``config`` has what a run's checkpoints were all made with; one that was made otherwise is another run's.

    Raises
    ------
    DxdyError
        There are checkpoints, and none of them is good.
    """
    paths = _paths(folder)
    for path in reversed(paths):
        try:
            state = read(path)
            seen = state.config
            other = [f"{name} {seen.get(name)!r}" for name, value in (config or {}).items() if seen.get(name) != value]
            if other:
                raise DxdyError(f"{path}: is of another run ({', '.join(other)}).")
            return state
        except DxdyError as error:
            warnings.warn(f"{error} The one before it is looked at.", RuntimeWarning, stacklevel=2)
    if paths:
        raise DxdyError(
            f"{folder}: none of its {counted(len(paths), 'checkpoint')} can be used. Train anew in another folder."
        )
    return None


def read(path: str | Path) -> Checkpoint:
    """Return a checkpoint after comparing its sha256.

    Raises
    ------
    DxdyError
        It cannot be read, is empty, truncated or damaged, or is of another version of this package.
    """
    path = Path(path)
    try:
        data, known = path.read_bytes(), _sum_of(path).read_text().split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise DxdyError(f"{getattr(error, 'filename', None) or _sum_of(path)}: cannot be read ({reason}).") from None
    if not data:
        raise DxdyError(f"{path}: is empty.")
    seen = hashlib.sha256(data).hexdigest()
    if [seen] != known[:1]:
        whole = zipfile.is_zipfile(io.BytesIO(data))
        what = "damaged" if whole else "truncated"
        raise DxdyError(f"{path}: is {what}. Its sha256 is {seen[:12]}…, and was {''.join(known[:1])[:12]}….")
    try:
        state = Checkpoint(**torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        if not _sound(state) or path.stem != f"step-{state.step:08d}":
            raise ValueError
    except Exception:  # what torch raises on what is no checkpoint is of many kinds
        raise DxdyError(f"{path}: is no checkpoint of this version of dxdy_nb.") from None
    return state


def _sound(state: Checkpoint) -> bool:
    """Return whether the fields are of their kinds."""
    hints: dict[str, Any] = {one.name: one.type for one in fields(Checkpoint)}
    kinds = {name: get_origin(hint) or hint for name, hint in hints.items() if name != "best"}
    rows = [*state.validation, *([state.best] if state.best is not None else [])]
    return (
        all(isinstance(getattr(state, name), kind) for name, kind in kinds.items())
        and min(state.step, state.epoch, state.windows) >= 0
        and all(isinstance(row, dict) and {"step", "loss", "accuracy"} <= row.keys() for row in rows)
        and all(map(torch.is_tensor, state.model.values()))
    )


def fits(state: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a state dict that is of another model.

    Raises
    ------
    DxdyError
        Its names are not those of the model, or a shape is another one.

    Examples
    --------
    >>> fits({"weight": torch.zeros(1, 2), "scale": torch.zeros(1)}, nn.Linear(2, 1))
    Traceback (most recent call last):
    ...
    dxdy_nb.errors.DxdyError: the checkpoint is of another model. missing: bias; unexpected: scale
    """
    here = model.state_dict()
    apart = {
        "missing": [name for name in here if name not in state],
        "unexpected": [name for name in state if name not in here],
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, here {tuple(here[name].shape)}"
            for name in here
            if name in state and state[name].shape != here[name].shape
        ],
    }
    told = "; ".join(f"{what}: {', '.join(names)}" for what, names in apart.items() if names)
    if told:
        raise DxdyError(f"the checkpoint is of another model. {told}")
