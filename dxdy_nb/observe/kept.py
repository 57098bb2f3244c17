"""Things of the reader's that are used and left exactly as they were: the same objects, with the content they had."""

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from dxdy_nb.autograd.copies import random_states

MANY = 10_000  # entries: of a longer list only the entries themselves are put back, not what is in them
SOURCES = (DataLoader, Dataset, Sampler)
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor: what its gradient is given to
SMALL = 16 * 2**20  # bytes: of a data set only tensors up to this size are put back


@contextmanager
def kept(*things: Any, sources: Iterable[Any] = (), functions: Iterable[Any] = ()) -> Iterator[None]:
    """Put back at the end what belongs to things, sources and functions, bit by bit, and the random generators.

    That is parameters, their gradients, buffers and attributes of every module, training modes, hooks; state and groups
    of optimizers; schedulers and scalers; generators and counters of loaders and data sets (but not the data); and what
    the functions hold: their closures, and the globals that they name. What another library keeps for itself, a thread,
    a file or an iterator is left alone.

    Examples
    --------
    >>> layer = nn.Linear(2, 1)
    >>> before = layer.weight.clone()
    >>> with kept(layer):
    ...     _ = nn.init.zeros_(layer.weight)
    >>> torch.equal(layer.weight, before)
    True
    """
    notes = _Notes()
    restore = [notes.keep(thing) for thing in things]
    restore += [notes.keep(source, light=True) for source in sources]
    notes.held = True
    restore += [notes.keep(function) for function in functions]
    with random_states():
        try:
            yield
        finally:
            for put_back in restore:
                put_back()


@dataclass
class _Notes:
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
            if value.is_nested or is_lazy(value) or value.is_meta:
                return _nothing
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
                moved = value.layout is torch.strided and value.data_ptr() != alias.data_ptr()
                if moved or value.dtype != alias.dtype or value.shape != alias.shape:
                    value.data = alias
                if value.layout is not torch.strided or not torch.equal(alias, content):
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
