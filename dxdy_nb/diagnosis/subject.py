"""The set-up under diagnosis: the reader's own objects, and a way to leave them exactly as they were."""

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from dxdy_nb.errors import DxdyError

MANY = 10_000  # entries: of a longer list only the entries themselves are put back, not what is in them
SOURCES = (DataLoader, Dataset, Sampler)
SMALL = 16 * 2**20  # bytes: of a data set only tensors up to this size are put back
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor: what its gradient is given to
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
        """The parameters of the model and of the loss, by name; as they are now."""
        found = dict(self.model.named_parameters())
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
    loader = given.get("loader")
    if loader is not None and not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise DxdyError(f"diagnose: loader= gives batches in a for loop; got {type(loader).__name__}.")
    if not isinstance(given.get("accumulation_steps", 1), int) or given.get("accumulation_steps", 1) < 1:
        raise DxdyError(f"diagnose: accumulation_steps= is a number from 1 on, got {given['accumulation_steps']!r}.")
    return Subject(**{**given, "optimizers": optimizers})


def batches_of(loader: Any) -> Iterable[Any]:
    """Return what a for loop reads, nothing without a loader; one without a length has no truth value."""
    return () if loader is None else loader


def _words(value: Any) -> str:
    return f"the class {value.__name__}: make one of it" if isinstance(value, type) else type(value).__name__


def is_one_shot(loader: Any) -> bool:
    """Return whether a loader is an iterator: what is read from it is gone."""
    return hasattr(loader, "__next__") and iter(loader) is loader


@contextmanager
def preserved(subject: Subject) -> Iterator[None]:
    """Put everything back at the end that belongs to the subject, bit by bit, and the random generators too.

    That is parameters, their gradients, buffers and attributes of every module, training modes, hooks; state and groups
    of optimizers; scheduler and scaler; generators and counters of loaders and data sets (but not the data); and what
    the functions hold: their closures, and the globals that they name. What another library keeps for itself, a thread,
    a file or an iterator is left alone.
    """
    kept = _Kept()
    things = [subject.model, subject.loss_fn, subject.ema_model, *subject.all_optimizers, subject.scheduler]
    restore = [kept.keep(thing) for thing in (*things, subject.scaler, subject.best_state)]
    restore += [kept.keep(source, light=True) for source in (subject.loader, subject.val_loader, subject.dataset)]
    kept.held = True
    functions = (subject.train_step, subject.on_epoch_end, subject.validate, subject.save, subject.resume)
    restore += [kept.keep(function) for function in functions]
    generators = _generators()
    try:
        yield
    finally:
        for put_back in restore:
            put_back()
        for put_back in generators:
            put_back()


@contextmanager
def same_randomness() -> Iterator[None]:
    """Put the global random generators back at the end."""
    restore = _generators()
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _generators() -> list[Callable[[], None]]:
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    restore: list[Callable[[], None]] = [
        lambda: random.setstate(python),
        lambda: np.random.set_state(arrays),
        lambda: torch.set_rng_state(tensors),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
        restore.append(lambda: torch.cuda.set_rng_state_all(cuda))
    return restore


@dataclass
class _Kept:
    """Takes notes of mutable things, each once, and returns what puts the notes back into the same objects."""

    seen: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)  # an id is only unique while its object lives
    held: bool = False  # by a function: then a large tensor that is no parameter is data

    def keep(self, value: Any, *, light: bool = False) -> Callable[[], None]:
        """Return a function that gives ``value`` its present content again; light: without copying tensors."""
        if id(value) in self.seen or isinstance(value, (str, bytes, int, float, complex, tuple, type(None))):
            return self._items(value, light) if isinstance(value, tuple) else _nothing
        self.seen.add(id(value))
        self.alive.append(value)
        if isinstance(value, Tensor):
            data = light or (self.held and not isinstance(value, nn.Parameter))
            return _nothing if data and value.numel() * value.element_size() > SMALL else self._tensor(value)
        if isinstance(value, SOURCES):
            return self.keep(vars(value), light=True)
        if isinstance(value, nn.Module):
            return _nothing if light else self.keep(vars(value))
        if isinstance(value, dict):
            return self._dict(value, light)
        if isinstance(value, (list, set, collections.deque)):
            return self._sequence(value, light)
        if isinstance(value, types.FunctionType):
            ours = str(value.__globals__.get("__name__")).startswith("dxdy_nb.")  # a probe's, whose notes are to stay
            return _nothing if light or ours else self._function(value)
        if isinstance(value, (types.MethodType, functools.partial)):
            inside = (
                [value.__self__] if isinstance(value, types.MethodType) else [value.func, value.args, value.keywords]
            )
            return self._items(inside, light)
        if _is_own(value):
            return self.keep(vars(value), light=light)
        return _state(value, light)

    def _function(self, function: types.FunctionType) -> Callable[[], None]:
        cells = [cell for cell in function.__closure__ or () if _filled(cell)]
        before = [cell.cell_contents for cell in cells]
        world = function.__globals__
        named = (
            {name: world[name] for name in _names_in(function.__code__) if name in world} if _is_own(function) else {}
        )
        inner = self._items([*before, *named.values()], light=False)

        def put_back() -> None:
            for cell, content in zip(cells, before, strict=True):
                cell.cell_contents = content
            world.update(named)
            inner()

        return put_back

    def _items(self, values: Iterable[Any], light: bool) -> Callable[[], None]:
        inner = [one for item in values if (one := self.keep(item, light=light)) is not _nothing]

        def put_back() -> None:
            for one in inner:
                one()

        return put_back if inner else _nothing

    def _dict(self, value: dict[Any, Any], light: bool) -> Callable[[], None]:
        before = dict(value)
        inner = self._items(before.values(), light)
        keys = self._items([key for key in before if isinstance(key, Tensor)], light)

        def put_back() -> None:
            same = len(value) == len(before) and all(
                a is c and b is d for (a, b), (c, d) in zip(value.items(), before.items(), strict=True)
            )
            if not same:
                value.clear()
                value.update(before)
            inner()
            keys()

        return put_back

    def _sequence(self, value: Any, light: bool) -> Callable[[], None]:
        before = list(value)
        inner = self._items(before, light) if len(before) < (100 if light else MANY) else _nothing

        def put_back() -> None:
            if len(value) != len(before) or any(a is not b for a, b in zip(value, before, strict=True)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(before)
            inner()

        return put_back

    def _tensor(self, value: Tensor) -> Callable[[], None]:
        alias, asks, grad = value.detach(), value.requires_grad, value.grad if value.is_leaf else None
        content = alias.clone()
        hooks = {name: getattr(value, name, None) for name in HOOKS}
        put_grad_back = self._items([grad, *hooks.values()], light=False)

        def put_back() -> None:
            with torch.no_grad():
                if value.data_ptr() != alias.data_ptr() or value.dtype != alias.dtype or value.shape != alias.shape:
                    value.data = alias
                if not torch.equal(alias, content):
                    alias.copy_(content)
            if value.is_leaf:
                if value.requires_grad != asks:
                    value.requires_grad_(asks)
                if value.grad is not grad:
                    value.grad = grad
                for name, before in hooks.items():
                    if (now := getattr(value, name, None)) is not before:
                        (now or {}).clear()  # autograd may hold on to it
                        setattr(value, name, before)
                put_grad_back()

        return put_back


def void(result: object) -> None:
    """Drop a result."""


def _is_own(value: Any) -> bool:
    """Return whether a thing's attributes are its state: it says so, or its code is the reader's."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    if hasattr(type(value), "state_dict") or hasattr(type(value), "to_dict"):
        return True
    function = isinstance(value, types.FunctionType)
    module = str(value.__globals__.get("__name__") if function else type(value).__module__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    others = {"dxdy_nb", *sys.stdlib_module_names}
    return module.split(".")[0] not in others and "site-packages" not in file


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its variable has no value yet
        return False


def _names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _nothing() -> None:
    """Put nothing back."""


def _state(value: Any, light: bool) -> Callable[[], None]:
    """Return what gives a random generator or an array its present state again."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: void(value.set_state(state))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, random.Random):
        python = value.getstate()
        return lambda: value.setstate(python)
    if isinstance(value, np.ndarray) and not light and value.flags.writeable and value.nbytes <= SMALL:
        content = value.copy()
        return lambda: void(value.__setitem__(..., content))
    return _nothing
