"""Some real steps of a training, recorded in detail: what was called with what, in which order, and what moved.

``dx.watch`` keeps numbers of every step of a long run. This keeps objects of a few steps: the tensors that went into
the model and the loss, which gradients were there when, and which weights changed at whose hands. Rules about event
order and object identity need no threshold.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dxdy_nb.diagnosis.subject import Subject

KEPT = 6  # steps whose tensors are kept; of later ones only facts


@dataclass
class Call:
    """The outermost call of a module, or a call of the loss function."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    training: bool = True
    grad: bool = True  # whether operations were recorded
    autocast: torch.dtype | None = None
    rng: Tensor | None = None  # torch's generator when it began


@dataclass
class Backward:
    """One call of backward: on which value, and what it did to the gradients."""

    value: float
    root: str  # grad_fn's name; "" for a leaf
    repeated: bool  # the same tensor as at an earlier backward, whose gradients are still there
    reached: tuple[str, ...]  # parameters whose gradient it changed
    share: float  # value / that of the loss function: 1/k where the loss was divided, the scale where it was scaled
    strangers: tuple[tuple[int, ...], ...] = ()  # shapes of leaves that got a gradient, and are no parameters


@dataclass
class Seen:
    """A parameter at an optimizer's step."""

    norm: float  # of its gradient; NaN where there is none
    nonfinite: bool
    moved: bool
    nonzero: float = 0.0  # share of its gradient's elements
    update: float = 0.0  # norms
    weight: float = 0.0
    slope: float = 0.0  # update · gradient: negative on the way down
    stuck: float = 0.0  # share of elements with a gradient that did not change
    spoilt: bool = False  # weights that are not finite now, and were before


@dataclass
class Update:
    """One optimizer step."""

    optimizer: torch.optim.Optimizer
    lrs: tuple[float, ...]
    parameters: dict[str, Seen]
    outside: dict[str, float]  # weights that changed since the update before, and by how much
    dirty: tuple[str, ...]  # gradients that still hold those of an earlier update
    cleared: tuple[str, ...]  # gradients that a backward gave, and that were gone before this update
    training: bool = True
    state_steps: float = math.nan  # the optimizer's own count, where it has one
    scaled: bool = False  # gradients still multiplied by the scaler's scale


@dataclass
class Step:
    """One call of the training step: its batch, what was called, and in which order things happened."""

    index: int
    epoch: int
    batch: Any
    calls: list[Call] = field(default_factory=list)
    losses: list[Call] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    clips: list[tuple[float, float, bool]] = field(default_factory=list)  # norm, bound, whether still scaled
    value: float = math.nan  # of the loss
    error: BaseException | None = None
    graphs: int = 0  # of earlier steps that are alive after this one
    passed: tuple[str, ...] = ()  # where an error came from: names of functions, the outermost first


@dataclass
class Observation:
    """All steps, and what went wrong outside them."""

    steps: list[Step] = field(default_factory=list)
    epochs: int = 0
    error: BaseException | None = None
    error_place: str = ""
    notes: list[str] = field(default_factory=list)
    moved: set[str] = field(default_factory=set)  # parameters that are others at the end
    final: dict[str, Any] = field(default_factory=dict)  # facts of the end, before all was put back

    @property
    def events(self) -> list[str]:
        """All events in order: forward, loss, backward, zero_grad, clip, unscale, step, scheduler, …"""
        return [event for step in self.steps for event in step.events]

    @property
    def updates(self) -> list[Update]:
        """All optimizer steps in order."""
        return [update for step in self.steps for update in step.updates]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.value for step in self.steps]


class _Marker:
    """Lives as long as the node of the graph that it is hung on."""

    def __call__(self, *gradients: Any) -> None:
        return None


class Recorder:
    """Takes the notes; ``recording`` puts its hooks in place."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.seen = Observation()
        self.step = Step(-1, 0, None)
        self.caught: list[Any] = []
        self._depth = 0
        self._begun: list[tuple[Any, Tensor]] = []
        self._in_backward = self._in_scaler = self._scaling = self._unscaled = False
        self._roots: dict[int, weakref.ref[Tensor]] = {}  # tensors that backward began at, since gradients were cleared
        self._markers: list[weakref.ref[_Marker]] = []
        self._loss_values: list[float] = []
        self._left: dict[str, Tensor] = {}  # weights as the last update left them
        self._at_update: dict[str, tuple[int, int]] = {}  # gradients that an update has used
        self._dirty: set[str] = set()
        self._reached: set[str] = set()  # since the last update
        self._before: dict[str, Tensor] = {}

    # ---- steps ----

    def begin(self, index: int, epoch: int, batch: Any) -> None:
        """Begin a step on a batch."""
        self.step = Step(index, epoch, batch)
        self.seen.steps.append(self.step)
        self._loss_values = []
        self._depth = 0

    def end(self, value: Any = None) -> None:
        """End the step; ``value`` is what the training step returned."""
        step = self.step
        candidates = [_number(value), *(b.value for b in step.backwards[-1:]), *self._loss_values[-1:]]
        step.value = next((v for v in candidates if not math.isnan(v)), math.nan)
        for call in (*step.calls, *step.losses):
            if step.index >= KEPT and step.error is None:
                call.args, call.kwargs, call.output = (), {}, None
            call.args, call.kwargs, call.output = map(detached, (call.args, call.kwargs, call.output))
        if step.index >= KEPT and step.error is None:
            step.batch = None
        step.graphs = sum(marker() is not None for marker in self._markers[:-2])

    # ---- modules and losses ----

    def before_module(self, module: nn.Module, args: Any) -> None:
        """Note the call of a module, if no other module is running."""
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            self.step.events.append("loss" if self._is_loss(module) else "forward")
            self._begun = [(module, torch.get_rng_state())]

    def after_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what it was given and what came out."""
        if torch.compiler.is_compiling() or not self._depth:
            return
        self._depth -= 1
        if self._depth == 0 and not self._in_backward:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            rng = self._begun[0][1] if self._begun else None
            call = Call(module, args, kwargs, output, module.training, torch.is_grad_enabled(), dtype, rng)
            if self._is_loss(module):
                self._note_loss(call)
            else:
                self.step.calls.append(call)

    def _is_loss(self, module: Any) -> bool:
        return module is self.subject.loss_fn or isinstance(module, nn.modules.loss._Loss)

    def wrapped_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss function, recorded; a module is returned as it is, since its hooks tell."""
        if isinstance(loss_fn, nn.Module):
            return loss_fn

        @functools.wraps(loss_fn)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.step.events.append("loss")
            result = loss_fn(*args, **kwargs)
            self._note_loss(Call(loss_fn, args, kwargs, result, grad=torch.is_grad_enabled()))
            return result

        return recorded

    def _note_loss(self, call: Call) -> None:
        self.step.losses.append(call)
        self._loss_values.append(_number(call.output))

    # ---- backward ----

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward that notes what it does to the gradients."""

        @functools.wraps(original)
        def observed(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if torch.is_tensor(tensors) else list(tensors)
            if self._in_backward or not roots or not torch.is_tensor(roots[0]):
                return original(roots if not torch.is_tensor(tensors) else tensors, *args, **kwargs)
            root, parameters = roots[0], self.subject.parameters
            before = _versions(parameters)
            self._dirty -= {n for n in self._dirty if n not in before}
            self._dirty |= {n for n, v in before.items() if self._at_update.get(n) == v and _any(parameters[n].grad)}
            strangers = _strangers(root, self.subject)
            self.step.events.append("backward")
            self._in_backward = True
            try:
                original(roots if not torch.is_tensor(tensors) else tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            known = self._roots.get(id(root))
            repeated = known is not None and known() is root
            self._roots[id(root)] = weakref.ref(root)
            self._mark(root)
            after = _versions(parameters)
            reached = tuple(n for n, v in after.items() if before.get(n) != v)
            self._reached.update(n for n in reached if _any(parameters[n].grad))
            value, whole = _number(root), self._loss_values[-1] if self._loss_values else math.nan
            share = value / whole if whole else math.nan
            name = "" if root.grad_fn is None else type(root.grad_fn).__name__
            self.step.backwards.append(Backward(value, name, repeated, reached, share, strangers))
            return None

        return observed

    def _mark(self, root: Tensor) -> None:
        if root.grad_fn is not None:
            marker = _Marker()
            root.grad_fn.register_hook(marker)
            self._markers.append(weakref.ref(marker))

    # ---- updates ----

    def before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note gradients and weights as an update finds them."""
        parameters = self.subject.parameters
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = {n: p for n, p in parameters.items() if id(p) in owned}
        outside = {}
        for name, left in self._left.items():
            p = parameters.get(name)
            if p is not None and p.shape == left.shape and not torch.equal(p.detach(), left):
                outside[name] = float((p.detach().double() - left.double()).abs().max())
        lrs = tuple(_number(group.get("lr", math.nan)) for group in optimizer.param_groups)
        seen = {n: _gradient(p) for n, p in mine.items()}
        cleared = tuple(n for n, s in seen.items() if n in self._reached and not s.norm > 0 and not s.nonfinite)
        dirty = tuple(n for n in self._dirty if n in mine and _any(mine[n].grad))
        update = Update(optimizer, lrs, seen, outside, dirty, cleared, self.subject.model.training)
        update.scaled = self._scaling and not self._unscaled and not self._in_scaler
        self._before = {n: p.detach().clone() for n, p in mine.items()}
        self.step.updates.append(update)

    def after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note what the update did."""
        if not self.step.updates:
            return
        update, parameters = self.step.updates[-1], self.subject.parameters
        for name, before in self._before.items():
            p = parameters.get(name)
            if p is not None and p.shape == before.shape:
                _movement(update.parameters[name], before, p.detach(), p.grad)
                self._left[name] = p.detach().clone()
        now = _versions({n: parameters[n] for n in self._before if n in parameters})
        self._at_update |= now
        self._dirty -= set(self._before)
        self._reached -= set(self._before)
        self._before = {}
        states = [s for s in optimizer.state.values() if isinstance(s, dict) and "step" in s]
        update.state_steps = max((_number(s["step"]) for s in states), default=math.nan)
        self.step.events.append("step")
        self._unscaled = False

    def plain(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes an event and does what the original does."""

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0], torch.amp.GradScaler) and not args[0].is_enabled():
                return original(*args, **kwargs)
            self.step.events.append(kind)
            if kind == "clip":
                self.step.clips.append((_number(args[2]), _number(args[1]), self._scaling and not self._unscaled))
            elif kind == "unscale":
                self._unscaled = True
            elif kind == "scale":
                self._scaling = True
            elif kind == "scaler_step":
                return self._scaler_step(original, args, kwargs)
            result = original(*args, **kwargs)
            if kind == "zero_grad":
                self._roots.clear()
            return result

        return observed

    def _scaler_step(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self._in_scaler = len(self.step.updates), True
        try:
            result = original(*args, **kwargs)
        finally:
            self._in_scaler = False
        if len(self.step.updates) == before:
            self.step.events.append("skip")
        self._unscaled = False
        return result


@contextmanager
def recording(subject: Subject) -> Iterator[Recorder]:
    """Record what runs inside the block; everything that is put in place is taken away at the end."""
    recorder = Recorder(subject)
    with ExitStack() as undo, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for handle in (
            register_module_forward_pre_hook(recorder.before_module),
            register_module_forward_hook(recorder.after_module, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(recorder.before_update),
            register_optimizer_step_post_hook(recorder.after_update),
        ):
            undo.callback(handle.remove)
        _stand_in(undo, torch.autograd, "backward", recorder.backward)
        for owner, name, kind in _noted():
            _stand_in(undo, owner, name, lambda original, kind=kind: recorder.plain(kind, original))
        recorder.caught = caught
        yield recorder


def _noted() -> list[tuple[Any, str, str]]:
    """Return whose functions are noted as which event."""
    places: list[tuple[Any, str, str]] = [
        (torch.optim.Optimizer, "zero_grad", "zero_grad"),
        (nn.Module, "zero_grad", "zero_grad"),
        (torch.amp.GradScaler, "scale", "scale"),
        (torch.amp.GradScaler, "unscale_", "unscale"),
        (torch.amp.GradScaler, "step", "scaler_step"),
        (torch.amp.GradScaler, "update", "scaler_update"),
        (torch.optim.lr_scheduler.LRScheduler, "step", "scheduler"),
    ]
    for kind in vars(torch.optim.lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler) and "step" in vars(kind):
            places.append((kind, "step", "scheduler"))
    from torch.nn.utils import clip_grad

    places += [(clip_grad, name, "clip") for name in ("_clip_grads_with_norm_",) if hasattr(clip_grad, name)]
    return list(dict.fromkeys(places))


def _stand_in(undo: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(original))
    undo.callback(setattr, owner, name, original) if own else undo.callback(delattr, owner, name)


def _versions(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(p.grad), p.grad._version) for name, p in parameters.items() if p.grad is not None}


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _strangers(root: Tensor, subject: Subject) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the leaves of a graph that nobody trains: neither registered parameters nor owned."""
    known = {id(p) for p in subject.parameters.values()} | subject.owned
    found, seen, todo = [], set(), [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found.append(tuple(leaf.shape))
        todo += [child for child, _ in node.next_functions]
    return tuple(found)


def _gradient(p: Tensor) -> Seen:
    if p.grad is None:
        return Seen(math.nan, False, False)
    dense = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach()
    norm = float(torch.linalg.vector_norm(dense.float()))
    nonfinite = not math.isfinite(norm) and not bool(torch.isfinite(dense).all())
    return Seen(norm, nonfinite, False, float((dense != 0).float().mean()) if dense.numel() else 0.0)


def _movement(seen: Seen, before: Tensor, after: Tensor, grad: Tensor | None) -> None:
    changed = before != after
    seen.moved = bool(changed.any())
    change = (after.float() - before.float()).flatten()
    seen.update = float(change.norm())
    seen.weight = float(before.float().norm())
    seen.spoilt = bool(torch.isfinite(before).all()) and not bool(torch.isfinite(after).all())
    if grad is not None and not seen.nonfinite:
        dense = (grad.to_dense() if grad.is_sparse else grad).float()
        if dense.shape == before.shape:
            seen.slope = float(change @ dense.flatten())
            pushed = dense != 0
            count = int(pushed.sum())
            seen.stuck = float((pushed & ~changed).sum()) / count if count else 0.0


def _number(value: Any) -> float:
    if torch.is_tensor(value):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else math.nan
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def detached(value: Any) -> Any:
    """Return a nested structure with its tensors cut from the graph."""
    return mapped(value, lambda t: t.detach())


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a nested structure with a function applied to each tensor; what holds no tensor stays what it is."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        items = {key: mapped(item, function) for key, item in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(**items) if hasattr(value, "to_tuple") else type(value)(items)
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, function) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    mapped(value, note)
    return found
