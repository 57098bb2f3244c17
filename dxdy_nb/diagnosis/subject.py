"""The set-up under diagnosis: the reader's own objects, and a way to leave them exactly as they were."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dxdy_nb.errors import DxdyError, in_a_line
from dxdy_nb.observe.kept import kept

TrainStep = Callable[[Any, Any, Any, Any, int], Any]


@dataclass(frozen=True)
class Subject:
    """What ``diagnose`` was given. Only the model is certain to be there; ``train_step`` is the reader's own step."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None = None
    loader: Iterable[Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    train_step: TrainStep | None = None
    val_loader: Iterable[Any] | None = None
    dataset: Any = None
    scheduler: Any = None
    scaler: Any = None
    accumulation_steps: int = 1
    causal: bool = False
    batch_coupled: bool = False
    pad_id: int | None = None
    on_epoch_end: Callable[[], Any] | None = None
    validate: Callable[[], Any] | None = None
    save: Callable[[], Any] | None = None
    resume: Callable[[Any], Any] | None = None
    ema_model: nn.Module | None = None
    best_state: Mapping[str, Any] | None = None

    @cached_property
    def all_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Every optimizer, each once."""
        given = ([self.optimizer] if self.optimizer is not None else []) + list(self.optimizers)
        return tuple({id(o): o for o in given}.values())

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each parameter of the model, and of the loss where that is a module, by the tensor's id."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        if isinstance(self.loss_fn, nn.Module):
            for name, p in self.loss_fn.named_parameters():
                names.setdefault(id(p), f"loss_fn.{name}")
        return names

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model and of the loss that hold numbers, by name; as they are now."""
        named = ((n, p) for n, p in self.model.named_parameters() if isinstance(p, nn.Parameter))
        found = {n: p for n, p in named if not (is_lazy(p) or p.is_meta)}
        if isinstance(self.loss_fn, nn.Module):
            known = {id(p) for p in found.values()}
            found |= {f"loss_fn.{n}": p for n, p in self.loss_fn.named_parameters() if id(p) not in known}
        return found

    @property
    def owned(self) -> set[int]:
        """The ids of all tensors that an optimizer owns."""
        return {id(p) for o in self.all_optimizers for group in o.param_groups for p in group["params"]}

    def name_of(self, module: nn.Module) -> str:
        """Return a module's path, "model" for the model itself and "loss_fn" for the loss."""
        if module is self.model:
            return "model"
        if module is self.loss_fn:
            return "loss_fn"
        for name, found in self.model.named_modules():
            if found is module:
                return name
        return type(module).__name__


NAMES = tuple(f.name for f in fields(Subject))


def subject_of(given: Mapping[str, Any]) -> Subject:
    """Return the subject of keywords as ``diagnose`` takes them.

    Raises
    ------
    DxdyError
        No model; a loader that can be read only once; something that is not what its keyword says.
    """
    model = given.get("model")
    if not isinstance(model, nn.Module):
        raise DxdyError(f"diagnose: expected a torch.nn.Module as model=, got {_words(model)}.")
    if any(is_lazy(p) for p in model.parameters()):
        raise DxdyError("diagnose: the model has weights without a shape. Call it once on a batch, then diagnose it.")
    if any(p.is_meta for p in model.parameters()):
        raise DxdyError("diagnose: the model is on the device 'meta', where tensors hold no numbers. Move it first.")
    if (loss_fn := given.get("loss_fn")) is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise DxdyError(f"diagnose: loss_fn= is called as loss_fn(output, target); got {_words(loss_fn)}.")
    optimizers = given.get("optimizers") or ()
    optimizers = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    optimizers = (optimizers,) if hasattr(optimizers, "param_groups") else tuple(optimizers)
    for optimizer in (*optimizers, *filter(None, [given.get("optimizer")])):
        if not hasattr(optimizer, "param_groups"):
            raise DxdyError(f"diagnose: expected an optimizer, got {_words(optimizer)}.")
    for name in ("train_step", "on_epoch_end", "validate", "save", "resume"):
        if not callable(given.get(name) or callable):
            raise DxdyError(f"diagnose: expected a function as {name}=, got {_words(given[name])}.")
    for name, kinds in (("ema_model", (nn.Module, dict)), ("best_state", (Mapping,))):
        if not isinstance(given.get(name), (*kinds, type(None))):
            raise DxdyError(f"diagnose: expected weights as {name}=, got {_words(given[name])}.")
    for name in ("loader", "val_loader"):
        loader = given.get(name)
        batches = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if loader is not None and (not batches or isinstance(loader, (str, bytes))):
            raise DxdyError(f"diagnose: {name}= gives batches in a for loop; got {type(loader).__name__}.")
    if not isinstance(given.get("accumulation_steps", 1), int) or given.get("accumulation_steps", 1) < 1:
        raise DxdyError(f"diagnose: accumulation_steps= is a number from 1 on, got {given['accumulation_steps']!r}.")
    return Subject(**{**given, "optimizers": optimizers})


def made(make: Callable[[], Any]) -> dict[str, Any]:
    """Return what a function of the reader's makes: the keywords of ``diagnose``.

    Raises
    ------
    DxdyError
        It raised, or returned something else.
    """
    name = getattr(make, "__name__", "make")
    try:
        given = make()
    except (Exception, SystemExit) as error:
        raise DxdyError(f"{name}() raised {in_a_line(error)}") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise DxdyError(
            f"{name}() returns a dictionary of dx.diagnose's keywords, like {{'model': model, 'loader': loader, ...}}; "
            f"got {type(given).__name__}."
        )
    return given


def batches_of(loader: Any) -> Iterable[Any]:
    """Return what a for loop reads, nothing without a loader; one without a length has no truth value."""
    return () if loader is None else loader


def _words(value: Any) -> str:
    return f"the class {value.__name__}: make one of it" if isinstance(value, type) else type(value).__name__


def preserved(subject: Subject) -> AbstractContextManager[None]:
    """Put everything back at the end that belongs to the subject, and the random generators: see ``kept``."""
    return kept(
        *(subject.model, subject.loss_fn, subject.ema_model, *subject.all_optimizers),
        *(subject.scheduler, subject.scaler, subject.best_state),
        sources=(subject.loader, subject.val_loader, subject.dataset),
        functions=(subject.train_step, subject.on_epoch_end, subject.validate, subject.save, subject.resume),
    )
