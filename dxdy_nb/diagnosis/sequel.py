"""What a script does with its models beside training them: loads weights, evaluates, goes on with another."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dxdy_nb.diagnosis.observation import Observation, Step, main_call
from dxdy_nb.diagnosis.sameness import batch_key, equal, same_tensor
from dxdy_nb.diagnosis.subject import Subject

RENAMED = 0.9  # share of a model's weights that a state has under names with another beginning


@dataclass
class Resumed:
    """What a run that was resumed has otherwise than the run it goes on with."""

    tensors: int = 0  # of the model
    other: list[str] = field(default_factory=list)
    moments: int = 0  # parameters that the optimizer held state for
    lost: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    lrs: tuple[list[float], list[float]] = ([], [])
    positions: tuple[Any, Any] = (None, None)  # of the scheduler
    replays: bool = False  # its first batch is the first one of all, and straight on it is another

    def compare_moments(self, before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]]) -> None:
        """Compare an optimizer's state by the names of the parameters."""
        self.moments = len(before)
        self.lost = [n for n in before if n not in after]
        self.swapped = [n for n in before if n in after and not same_state(before[n], after[n])]


@dataclass
class Loading:
    """A ``load_state_dict`` of a model that did not do what it looks like."""

    weights: int
    matched: int  # names that model and state share
    example: str  # a name of the state
    shared: int  # tensors of the state that are the model's own memory


class Sequel:
    """Takes notes of what comes after the first steps, too: each costs next to nothing while nothing is wrong."""

    def __init__(self) -> None:
        self.loadings: list[Loading] = []
        self.resumed: Resumed | None = None
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # since training began
        self._moved: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._statistics: dict[int, tuple[Tensor, Tensor]] = {}  # of norm layers, and their first values
        self._hooks: dict[int, tuple[Tensor, int]] = {}
        self._pairs: list[tuple[str, Tensor, Tensor]] = []  # parameters of a run and of the one that goes on
        self._paired: set[int] = set()
        self._goes_on = False
        self._stale: list[str] = []

    def meet(self, module: nn.Module) -> None:
        """Note the statistics of a model that is about to train."""
        for layer in _norms(module):
            for buffer in (layer.running_mean, layer.running_var):
                self._statistics.setdefault(id(buffer), (buffer, buffer.clone()))
        self._hooks |= {id(p): (p, hooks_on(p)) for p in module.parameters()}
        self._known.add(module)

    def loads(self, module: nn.Module, state: Any, trained: bool) -> None:
        """Note what a model is told to load."""
        if not isinstance(state, Mapping):
            return
        own = dict(module.named_parameters(remove_duplicate=False))
        given = {name: t for name, t in state.items() if torch.is_tensor(t)}
        both = own.keys() & given.keys()
        shared = sum(not own[name].is_meta and same_tensor(own[name], given[name]) for name in both)
        if trained:
            self._loaded.update(module.modules())
        renamed = sum(_tails(name, p, given) for name, p in own.items()) if own and given and not both else 0
        if (trained and own and shared == len(own)) or renamed > RENAMED * len(own):
            self.loadings.append(Loading(len(own), len(both), next(iter(given)), shared))

    def evaluates(self, module: nn.Module, place: int | None, models: Sequence[nn.Module]) -> None:
        """Note statistics that a forward without gradients changes, or uses though nobody keeps them up to date.

        ``place`` is None in a step of training, and behind one its number, where no loader tells that an epoch ended.
        """
        if module.training and place is not None:
            if any(layer.training for layer in _norms(module)):
                self._moved.setdefault(module, set()).add(place)
        elif not module.training and not any(module is m for m in models) and not self._stale:
            inside = getattr(module, "module", None)
            average = inside if isinstance(inside, nn.Module) else module
            for model in models:
                if _alike(model, average):
                    self._stale = self._left_behind(model, average)

    def _left_behind(self, model: nn.Module, average: nn.Module) -> list[str]:
        """Return the layers of an average whose statistics are the model's first ones, though its weights moved."""
        theirs = dict(average.named_modules())
        if all(equal(p, q) for p, q in zip(model.parameters(), average.parameters(), strict=True)):
            return []
        return [
            name
            for name, layer in model.named_modules()
            if (known := self._statistics.get(id(getattr(layer, "running_mean", None)))) is not None
            and not equal(known[1], known[0])
            and equal(known[1], theirs[name].running_mean)
        ]

    def resumes(
        self,
        module: nn.Module,
        subject: Subject,
        models: Sequence[nn.Module],
        initial: Mapping[str, Tensor],
    ) -> bool:
        """Return whether a model goes on where one that was trained ended: its weights are those, and were loaded."""
        if module in self._known:
            return self._goes_on
        self._known.add(module)
        if module not in self._loaded:
            return False
        names = subject.names
        for model in models:
            if not _alike(model, module):
                continue
            pairs = [(names[id(p)], p, q) for p, q in zip(model.parameters(), module.parameters(), strict=True)]
            other = [(name, p) for name, p, q in pairs if not equal(p.detach(), q.detach())]
            moved = [name for name, p, _ in pairs if not equal(initial[name], p.detach())]
            if not moved or any(name in moved or p.requires_grad for name, p in other):
                continue
            if not self._paired.isdisjoint(map(id, model.parameters())):  # branches of one run are no resumption
                self.resumed = None
                return True
            self._paired.update(map(id, model.parameters()))
            resumed = self.resumed = self.resumed or Resumed()
            resumed.tensors += len(pairs)
            resumed.other += [name for name, _ in other]
            self._pairs += pairs
            for layer, again in zip(_norms(model), _norms(module), strict=False):
                known = self._statistics.get(id(layer.running_mean))
                if known and not equal(known[1], known[0]) and equal(known[1], again.running_mean):
                    resumed.other.append(f"running statistics of {type(layer).__name__}")
            self._goes_on = True
            return True
        return self._goes_on

    def steps(self, optimizer: torch.optim.Optimizer, seen: Observation, subject: Subject, batch: Any) -> None:
        """Compare the optimizer of a run that goes on, before its first step, with the one before."""
        resumed, owned = self.resumed, owned_by(optimizer)
        pairs, self._pairs = self._pairs, []
        mine = [(n, p, q) for n, p, q in pairs if id(q) in owned]
        before = next((u for u in seen.updates if mine and id(mine[0][1]) in owned_by(u.optimizer)), None)
        if resumed is None or before is None or type(before.optimizer) is not type(optimizer):
            return
        lrs = [[float(group["lr"]) for group in o.param_groups if "lr" in group] for o in (before.optimizer, optimizer)]
        anew = lrs[1] == list(before.lrs)
        if subject.scheduler is not None and anew:
            resumed.lrs = lrs[0], lrs[1]
        if anew or lrs[0] == lrs[1]:
            states = [
                {n: dict(o.state[t]) for n, *both in mine if o.state.get(t := both[place])}
                for place, o in enumerate((before.optimizer, optimizer))
            ]
            resumed.compare_moments(*states)
        firsts = list({step.epoch: step.key for step in reversed(seen.steps)}.values())[::-1]
        first = batch_key(batch) if batch is not None and len(firsts) > 1 else 0
        resumed.replays = first == firsts[0] and first not in firsts[1:] if first else False

    def facts(self, model: nn.Module, steps: Iterable[Step]) -> dict[str, Any]:
        """Return what is to be known at the end."""
        compared = [call.module for step in steps if (call := main_call(step)) is not None]
        moved = [
            name
            for module, places in self._moved.items()
            if any(module is c for c in compared) and len(places) <= len(compared) / 2  # else it is a part of each step
            for name, layer in module.named_modules()
            if any(layer is norm for norm in _norms(module))
        ]
        buffers = {
            name for name, b in model.named_buffers() if (k := self._statistics.get(id(b))) and not equal(b, k[1])
        }
        added = {n: hooks_on(p) - self._hooks[id(p)][1] for n, p in model.named_parameters() if id(p) in self._hooks}
        told = {
            "hooks": added,
            "validated": moved,
            "loadings": self.loadings,
            "resumed": self.resumed,
            "stale": self._stale,
        }
        return {"buffers": buffers, **told}


def hooks_on(p: Tensor) -> int:
    """Return how many hooks change a parameter's gradient."""
    return len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())


def _norms(module: nn.Module) -> list[Any]:
    norms = nn.modules.batchnorm._NormBase
    return [m for m in module.modules() if isinstance(m, norms) and m.running_mean is not None]


def _alike(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have parameters of the same names and shapes."""
    if model is other:
        return False
    these, those = ({n: p.shape for n, p in m.named_parameters()} for m in (model, other))
    return these == those


def _tails(name: str, p: Tensor, given: Mapping[str, Tensor]) -> bool:
    """Return whether a state has a parameter under a name that only begins otherwise."""
    return any((n.endswith(f".{name}") or name.endswith(f".{n}")) and t.shape == p.shape for n, t in given.items())


def owned_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of all tensors that an optimizer owns."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two states hold the same under the same names, tensors bit for bit."""
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k])
        if torch.is_tensor(v) and torch.is_tensor(b[k]) and v.shape == b[k].shape
        else v is b[k]
        if torch.is_tensor(v) != torch.is_tensor(b[k])
        else not torch.is_tensor(v) and v == b[k]
        for k, v in a.items()
    )
