"""The models and optimizers that a loop uses, and the parameters that a record of it is about."""

import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dxdy_nb.observe.trace import Layout

T = TypeVar("T")
MANY = 100_000  # modules
# Attributes in which wrappers keep the model they wrap; a parameter's name does not tell of them.
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
INSIDE = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Named(Generic[T]):
    """Objects by name, each held only as long as the loop itself holds it."""

    def __init__(self, gone: Callable[[Any], None] | None = None) -> None:
        self._references: dict[str, weakref.ref[Any]] = {}
        self._like: dict[str, object] = {}
        self._gone = gone

    def add(self, thing: T, like: object = None) -> str:
        """Return the name of a thing: its class, and a number if it is not the first of its kind.

        It takes the name of one that is gone and was ``like`` it.
        """
        for name, known in self.items():
            if known is thing:
                return name
        kind = name = type(thing).__name__
        number = 1
        while name in self._references and (self._references[name]() is not None or self._like[name] != like):
            number += 1
            name = f"{kind}{number}"
        self._references[name], self._like[name] = weakref.ref(thing, self._gone), like
        return name

    def names(self) -> list[str]:
        """Return the names, also of things that are gone."""
        return list(self._references)

    def drop(self, name: str) -> None:
        """Forget a thing."""
        del self._references[name]

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over names and things that are still there."""
        for name, reference in list(self._references.items()):
            thing = reference()
            if thing is not None:
                yield name, thing

    def alive(self) -> dict[str, T]:
        """Return the things by name."""
        return dict(self.items())


class Found:
    """Models and optimizers, given or found, and the parameters they hold.

    ``parameters`` are those that a model trains or an optimizer holds, each once; ``layout`` has their names. With
    several models each name begins with its model's, and a parameter that only an optimizer knows has the optimizer's
    name and its place there.
    """

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self.models: Named[nn.Module] = Named(self._forget)
        self.optimizers: Named[Optimizer] = Named()
        self.given = None if model is None else unwrapped(model)
        self.given_optimizer = optimizer
        self.parameters: list[Tensor] = []
        self.layout = Layout((), ())
        self._without: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # losses, activations: they have no parameters
        self._parts: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        if self.given is not None:
            self._parts[self.given] = self.models.add(self.given)
        if optimizer is not None:
            self.optimizers.add(optimizer)
        self._seen: list[Any] = []
        self.refresh()

    def model(self, module: nn.Module) -> str | None:
        """Return the name of the model that an outermost module is, or is a part of; None if it is none of ours."""
        known = self._parts.get(module)
        if known is not None:
            return known
        if module in self._without and not (module._parameters or module._modules):  # else it may have got some
            return None
        inner = unwrapped(module)
        if self.given is not None:
            name = self._parts.get(self.given) if inner is self.given else None
        else:
            name = self._added(inner)
        if name is None:
            self._without.add(module)
        else:
            self._parts[module] = name
        return name

    def _added(self, module: nn.Module) -> str | None:
        if isinstance(module, torch.jit.ScriptModule) or not any(True for _ in module.parameters()):
            return None
        for name, model in self.models.items():
            if any(part is module for part in model.modules()):
                return name
        parts = set(map(id, module.modules()))
        for name, model in self.models.items():
            if id(model) in parts:  # what looked like a model of its own is a part of this one
                self.models.drop(name)
                for part in [part for part, of in self._parts.items() if of == name]:
                    del self._parts[part]
        self._seen = []  # its parameters are to be looked for
        return self.models.add(module)

    def optimizer(self, optimizer: Optimizer) -> str | None:
        """Return the name of an optimizer, without what wraps it; None if it is none of ours."""
        optimizer = unwrapped_optimizer(optimizer)
        if self.given_optimizer is not None and optimizer is not self.given_optimizer:
            return None
        if self.given is not None and self.given_optimizer is None:
            ours = set(map(id, self.given.parameters()))
            if not any(id(p) in ours for p in held_by(optimizer)):
                return None
        return self.optimizers.add(optimizer)

    def refresh(self, forward: bool = False) -> bool:
        """Look for the parameters anew; return whether they are others than before.

        In a forward that ``functional_call`` gave other weights, these go with it: then they are looked for later.
        """
        optimizers = self.optimizers.alive()
        models = self.models.alive()
        held = {id(p) for optimizer in optimizers.values() for p in held_by(optimizer)}
        seen = [held, *map(_contents, models.values())]
        if seen == self._seen:  # nearly always; to name the parameters costs more
            return False
        if forward and not all(isinstance(p, nn.Parameter) for m in models.values() for p in m.parameters()):
            self._seen = []
            return False
        self._seen = seen
        found: dict[int, tuple[str, str, Tensor]] = {}  # the model it is of, its name there, itself
        for name, model in models.items():
            for path, p in model.named_parameters():
                trained = isinstance(p, nn.Parameter) and (p.requires_grad or id(p) in held)
                if trained and not (is_lazy(p) or p.is_meta):
                    found.setdefault(id(p), (name, INSIDE.sub("", path), p))
        several = len({name for name, _, _ in found.values()}) > 1
        if self.given is None:
            for name, optimizer in optimizers.items():
                for number, group in enumerate(optimizer.param_groups):
                    for place, p in enumerate(group["params"]):
                        if not (is_lazy(p) or p.is_meta):
                            found.setdefault(id(p), ("", f"{name}.{number}.{place}", p))
        before, self.parameters = self.parameters, [p for _, _, p in found.values()]
        names = tuple(f"{name}.{path}" if several and name else path for name, path, _ in found.values())
        layout = Layout(names, tuple(tuple(p.shape) for p in self.parameters))
        if layout != self.layout:
            self.layout = layout
        elif len(before) == len(self.parameters) and all(map(operator.is_, before, self.parameters)):
            self.parameters = before
            return False
        return True

    @property
    def stale(self) -> bool:
        """Whether the parameters are to be looked for anew."""
        return not self._seen

    def _forget(self, reference: Any) -> None:
        """Let go of the parameters of a model that is gone."""
        self.parameters, self._seen = [], []

    def untouched(self, touched: set[int]) -> set[int]:
        """Return the ids of parameters that only optimizers hold of which backward touched no parameter (by id)."""
        if not touched:
            return set()
        return self.beside([id(o) for _, o in self.optimizers.items() if any(id(p) in touched for p in held_by(o))])

    def beside(self, optimizers: Iterable[int]) -> set[int]:
        """Return the ids of parameters that only other optimizers hold than these (by id)."""
        known = list(self.optimizers.items())
        chosen = set(optimizers)
        if all(id(optimizer) in chosen for _, optimizer in known):
            return set()
        ours: set[int] = set()
        others: set[int] = set()
        for _, optimizer in known:
            (ours if id(optimizer) in chosen else others).update(map(id, held_by(optimizer)))
        return others - ours

    def holds(self, optimizers: Iterable[int], parameters: set[int]) -> bool:
        """Return whether optimizers hold all of these parameters (all by id), or are the only ones that matter."""
        chosen = set(optimizers)
        return self.given_optimizer is not None or parameters.issubset(
            id(p) for _, o in self.optimizers.items() if id(o) in chosen for p in held_by(o)
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that compile it, or share it among processes."""
    while (inside := WRAPPERS.get(type(module).__name__)) and isinstance(getattr(module, inside, None), nn.Module):
        module = getattr(module, inside)
    return module


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers that libraries put around one (Accelerate's, Lightning's)."""
    for name in ("optimizer", "_optimizer"):
        inside = vars(optimizer).get(name)
        if isinstance(inside, Optimizer):
            return unwrapped_optimizer(inside)
    return optimizer


def held_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the parameters that an optimizer holds."""
    return (p for group in optimizer.param_groups for p in group["params"])


def _contents(model: nn.Module) -> list[Any]:
    """Return what changes when a model gets other modules or parameters, or a parameter is frozen or shaped.

    ``model.parameters()`` takes five times as long, at each step.
    """
    contents: list[Any] = []
    modules = [model]
    for module in modules:  # which grows meanwhile
        for p in module._parameters.values():
            if p is not None:
                contents.append((id(p), p.requires_grad, type(p)))
        modules += [m for m in module._modules.values() if m is not None]
        if len(modules) > MANY:  # a module that holds itself
            return [object()]
    return contents
