"""The configuration of a run: every field is honoured by the training loop today."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

import yaml

from dxdy_nb.errors import DxdyError, suggestion

# What people call these fields elsewhere; difflib alone would not find them.
ALIASES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "dataset": "data",
    "network": "model",
    "optim": "optimizer",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "criterion": "loss",
    "loss_fn": "loss",
    "warmup": "warmup_steps",
    "steps": "max_steps",
    "num_epochs": "epochs",
    "random_seed": "seed",
    "amp": "precision",
    "dtype": "precision",
    "ranks": "world_size",
    "nproc": "world_size",
    "workers": "num_workers",
    "dataloader_num_workers": "num_workers",
    "save_every": "checkpoint_every",
    "save_steps": "checkpoint_every",
    "fp16": "precision",
    "bf16": "precision",
    "mixed_precision": "precision",
    "grad_accum": "accumulation_steps",
    "accumulate_grad_batches": "accumulation_steps",
    "gradient_accumulation_steps": "accumulation_steps",
}


def _number(default: float | None, low: float, high: float, *, open_low: bool = False) -> Any:
    """Return a field whose value lies in [low, high], or in (low, high] where zero makes no sense."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run of the reference loop, as plain values.

    ``max_steps`` ends a run early whatever ``epochs`` says; ``validate_every`` counts epochs; ``max_steps``,
    ``schedule``, ``warmup_steps`` and ``checkpoint_every`` count optimizer steps, each over ``accumulation_steps``
    batches. ``checkpoint_every`` adds checkpoints on the way, there and after each validation, to the one at the end of
    a run (at null the only one). ``num_workers`` processes of each rank fetch its batches, and change no number (at 0
    the rank does it itself). ``momentum`` is
    that of sgd and muon; muon moves the matrices of hidden layers, and leaves the rest to adamw. ``precision`` is that
    of training, with weights in fp32; validation and test run in fp32 always, so that their numbers compare.
    ``batch_size`` is that of one of ``world_size`` ranks. Values may come from YAML or a command line: ``1e-3`` as text
    is a number.

    Raises
    ------
    DxdyError
        Unknown names, wrong types, values out of range: all of them in one message, a line each.

    Examples
    --------
    >>> RunConfig(lr="1e-3").lr
    0.001
    >>> RunConfig(lr=-1)
    Traceback (most recent call last):
    ...
    dxdy_nb.errors.DxdyError: lr: expected a number above 0 and at most 1000, got -1
    """

    seed: int = _number(0, 0, 2**32 - 1)
    data: Literal["digits", "spirals", "sequences"] = "digits"
    model: Literal["cnn", "mlp", "gru"] = "cnn"
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "sgd"
    lr: float = _number(0.05, 0, 1000, open_low=True)
    momentum: float = _number(0.9, 0, 1)
    weight_decay: float = _number(0.0, 0, 1000)
    schedule: Literal["constant", "cosine", "linear", "step", "one_cycle"] = "cosine"
    warmup_steps: int = _number(0, 0, 10**9)
    batch_size: int = _number(64, 1, 10**6)
    accumulation_steps: int = _number(1, 1, 10**6)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_grad_norm: float | None = _number(None, 0, 10**12, open_low=True)
    init: Literal["default", "xavier", "kaiming"] = "kaiming"
    epochs: int = _number(20, 1, 10**6)
    max_steps: int | None = _number(None, 1, 10**9)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    world_size: int = _number(1, 1, 4096)
    num_workers: int = _number(0, 0, 1024)
    checkpoint_every: int | None = _number(None, 1, 10**9)
    validate_every: int = _number(1, 1, 10**6)

    def __new__(cls, **values: Any) -> Self:
        """Refuse unknown names as ``from_dict`` does; the constructor of a dataclass would raise a bare TypeError."""
        if not values.keys() <= cls.__dataclass_fields__.keys():
            cls.from_dict(values)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        problems = []
        for name, kind in get_type_hints(type(self)).items():
            value, problem = _coerce(name, kind, getattr(self, name), self.__dataclass_fields__[name].metadata)
            object.__setattr__(self, name, value)
            problems += [problem] if problem else []
        if not problems:
            problems = self._conflicts()
        if problems:
            raise DxdyError("\n".join(problems))

    def _conflicts(self) -> list[str]:
        """Return what is wrong between fields that are right one by one."""
        problems = []
        if self.model == "cnn" and self.data != "digits":
            problems.append(f"model: 'cnn' needs images, data: {self.data!r} has none. Take another model.")
        if (self.model == "gru") != (self.data == "sequences"):
            problems.append(
                f"model: {self.model!r} does not fit data: {self.data!r}. 'gru' and 'sequences' go together."
            )
        if self.optimizer not in ("sgd", "muon") and self.momentum != type(self).momentum:
            problems.append(f"momentum: only sgd and muon have one, {self.optimizer!r} would ignore {self.momentum}.")
        if self.schedule == "one_cycle" and self.warmup_steps:
            problems.append("warmup_steps: schedule='one_cycle' begins with a warm-up of its own. Expected 0.")
        return problems

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "") -> "RunConfig":
        """Return the configuration of a mapping; ``source`` (a path) opens each line of an error."""
        names = [f.name for f in dataclasses.fields(cls)]
        problems = [f"{key}: unknown.{_suggest(str(key), names)}" for key in values if key not in names]
        try:
            config = cls(**{key: value for key, value in values.items() if key in names})
        except DxdyError as error:
            problems += str(error).splitlines()
        if problems:
            raise DxdyError("\n".join(f"{source}: {line}" if source else line for line in problems))
        return config

    @classmethod
    def load(cls, path: str | Path) -> "RunConfig":
        """Read a YAML file; a key that ``save`` adds for people (``fingerprint``) is checked, not taken."""
        try:
            values = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise DxdyError(f"{path}: cannot be read ({error.strerror}). Is the path right?") from None
        # A ValueError: no UTF-8, or a date that is none; the other one: brackets in brackets, thousands deep.
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise DxdyError(f"{path}: not YAML. {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise DxdyError(f"{path}: expected lines like 'lr: 0.1', got {type(values).__name__}.")
        kept = values.pop("fingerprint", None)
        config = cls.from_dict(values, source=str(path))
        # Of the fields in the file: a record from before a field came into being lacks it.
        now = _fingerprint({name: value for name, value in config.to_dict().items() if name in values})
        if kept not in (None, now):
            raise DxdyError(f"{path}: was edited after it was recorded (fingerprint {kept}, now {now}).")
        return config

    def save(self, path: str | Path) -> None:
        """Write the configuration and its fingerprint as YAML that ``load`` reads back equal."""
        text = yaml.safe_dump({**self.to_dict(), "fingerprint": self.fingerprint}, sort_keys=False)
        target = Path(path)
        temporary = target.parent / f".{target.name}.{os.getpid()}"
        try:  # a reader sees nothing or all of it, and a full disk leaves what was there
            temporary.write_text(text)
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise DxdyError(f"{path}: cannot be written ({error.strerror}). Give a path that can be.") from None

    def override(self, changes: Mapping[str, Any]) -> "RunConfig":
        """Return a configuration with some fields changed: flat names, as papermill and a command line give them.

        Examples
        --------
        >>> RunConfig().override({"lr": "0.1", "seed": 3}).lr
        0.1
        """
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that differ when any field differs."""
        return _fingerprint(self.to_dict())


def _fingerprint(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def parse_assignments(items: Iterable[str]) -> dict[str, Any]:
    """Return ``["lr=0.1", "model=mlp"]`` as a mapping; values are read as YAML, so numbers are numbers.

    Raises
    ------
    DxdyError
        An item without ``=``, without a name, or named twice.

    Examples
    --------
    >>> parse_assignments(["lr=0.1", "optimizer=sgd", "max_steps=null"])
    {'lr': 0.1, 'optimizer': 'sgd', 'max_steps': None}
    """
    values: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise DxdyError(f"{item!r}: expected name=value, like lr=0.1")
        if name.strip() in values:
            raise DxdyError(f"{name.strip()}: given twice")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        values[name.strip()] = as_number(value)
    return values


def as_number(value: Any) -> Any:
    """Return a text that is a number as that number: YAML 1.1 reads ``1e-3`` as text. Anything else stays as it is."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _suggest(key: str, names: list[str]) -> str:
    alias = ALIASES.get(key.lower())
    return f" Did you mean {alias!r}?" if alias else suggestion(key, names)


def _coerce(name: str, kind: Any, value: Any, limits: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Return a field's value as its type asks, and what is wrong with it."""
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        if isinstance(value, str) and value in choices:
            return choices[choices.index(value)], None  # a plain text, whatever kind of text was given
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        allowed = f"one of {', '.join(choices)}"
        return value, f"{name}: expected {allowed}; got {value!r}.{hint}"
    if value is None and type(None) in choices:
        return None, None
    whole = int in (kind, *choices)
    number = as_number(value)
    fits = isinstance(number, numbers.Real) and not isinstance(number, bool)  # numpy's numbers too
    fits = fits and limits["low"] <= number <= limits["high"] and not (limits["open_low"] and number == limits["low"])
    fits = fits and (not whole or number == int(number))
    if fits:
        number = int(number) if whole else float(number)
    allowed = f"{_range(limits, whole)}{', or null' if type(None) in choices else ''}"
    return number, None if fits else f"{name}: expected {allowed}, got {value!r}"


def _range(limits: Mapping[str, Any], whole: bool) -> str:
    low = f"above {limits['low']}" if limits["open_low"] else f"from {limits['low']}"
    join = " and at most" if limits["open_low"] else " to"
    return f"a {'whole ' if whole else ''}number {low}{join} {limits['high']}"
