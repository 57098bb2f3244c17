"""The fewest hooks and stand-ins that show what a training loop does: they turn torch's calls into calls of receivers.

A *stand-in* is a function in the place of one of torch's own, which it calls. One set of them serves all receivers; it
goes when the last receiver leaves. Models are not touched, and neither are their copies and the files they are saved
to: torch's module hooks stand in the model, its global ones make ``torch.compile`` warn and break the graph.

``torch.compile`` sees nothing of a stand-in: what it traces calls the original at once, the frame of a stand-in is one
that it passes over (as it passes over torch's own ``_call_impl``), and receivers run with it switched off.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

Around = AbstractContextManager[None] | None  # what is to happen around a call: before it, and after it
_NOTHING = nullcontext()


class Receiver(Protocol):
    """Who wants to know; what each method returns is entered before the call it tells of and left after it."""

    given: frozenset[int]
    """Ids of modules whose calls count even inside the forward of another."""

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Around:
        """Tell of the forward of an outermost module."""

    def forwarded(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Tell what came of the forward of an outermost module."""

    def loss(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Tell what came of a loss of ``torch.nn.functional`` that was called outside of any module."""

    def backward(self, tensors: Any) -> Around:
        """Tell of a backward pass from these tensors."""

    def iterate(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return what the loop shall iterate over instead of what ``begin`` returns."""

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """Tell that an optimizer's step begins."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Tell that an optimizer's step has ended."""

    def scaled_step(self, scaler: GradScaler, optimizer: Optimizer) -> Around:
        """Tell of a scaler's step, which takes the optimizer's step or leaves it out."""

    def scale(self, scaler: GradScaler) -> Around:
        """Tell that a scaler multiplies a loss."""

    def unscale(self, scaler: GradScaler, optimizer: Optimizer) -> Around:
        """Tell that a scaler divides the gradients of an optimizer."""

    def reading_gradients(self) -> Around:
        """Tell that the gradients are about to be clipped."""

    def clip(self, norm: Tensor, bound: float) -> Around:
        """Tell of clipping to a bound, and the norm before."""

    def zero_grad(self, owner: nn.Module | Optimizer) -> Around:
        """Tell that a model or an optimizer drops its gradients."""

    def load(self, module: nn.Module, state: Any) -> Around:
        """Tell that a model loads a state."""

    def schedule(self, scheduler: lr_scheduler.LRScheduler) -> Around:
        """Tell of a scheduler's step."""

    def item(self) -> None:
        """Tell that a number is taken out of a tensor."""

    def copied(self, seconds: float) -> None:
        """Tell that a tensor of the host was copied to a device, and how long the loop waited."""

    def forked(self) -> None:
        """Tell that this is now another process, which has nothing to record."""


class Careful:
    """Tells a receiver what it is told until it fails: its errors are no reason for a loop to stop.

    ``lost`` is told of the first of them. The batches that a receiver hands on it has to look after itself.
    """

    def __init__(self, receiver: Any, lost: Callable[[Exception], None]) -> None:
        self.given: frozenset[int] = receiver.given
        self.forked = receiver.forked
        self._receiver, self._lost = receiver, lost
        self._failed = False

    def fail(self, error: Exception) -> None:
        """Tell the receiver no more."""
        if not self._failed:
            self._failed = True
            self._lost(error)

    def iterate(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return what the loop shall iterate over: what ``begin`` returns, where the receiver fails."""
        begun: list[Iterator[Any]] = []

        def begin_once() -> Iterator[Any]:
            begun.append(begin())
            return begun[0]

        try:
            return begin() if self._failed else self._receiver.iterate(loader, begin_once)
        except Exception as error:
            if self._failed:
                raise
            batches = begun[0] if begun else begin()  # which raises anew what was its own error
            self.fail(error)
            return batches

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._receiver, name)

        def tell(*told: Any, **named: Any) -> Any:
            if self._failed:
                return None
            try:
                around = method(*told, **named)
            except Exception as error:
                self.fail(error)
                return None
            return around and _Guarded(around, self.fail)

        setattr(self, name, tell)  # so that it is made once
        return tell


class _Guarded:
    """What a receiver does around a call; of its errors the call learns nothing."""

    def __init__(self, around: Any, fail: Callable[[Exception], None]) -> None:
        self._around, self._fail = around, fail

    def __enter__(self) -> None:
        try:
            self._around.__enter__()
        except Exception as error:
            self._around = _NOTHING
            self._fail(error)

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        try:
            self._around.__exit__(kind, error, where)
        except Exception as ours:
            if ours is not error:
                self._fail(ours)


class _StandIn(NamedTuple):
    owner: Any
    name: str
    function: Callable[..., Any]
    original: Callable[..., Any]
    own: bool  # whether the owner had the original itself, or inherited it


class _Set(NamedTuple):
    """One set of hooks and stand-ins, and who hears of them; without receivers each stand-in is its original."""

    receivers: list[Receiver]
    given: set[int]  # what any of them was given
    stand_ins: list[_StandIn]
    hooks: ExitStack


_sets: list[_Set] = []  # the one in place, if any


class _Depth(threading.local):
    """How deep the running forward is; the autograd engine may run one in a thread of its own."""

    forward = 0
    scheduler = 0


_depth = _Depth()


@contextmanager
def listening(receiver: Receiver) -> Iterator[None]:
    """Let a receiver hear what torch is called for; whatever was put in place for it is gone at the end."""
    if not _sets:
        _sets.append(_install())
    here = _sets[0]
    _change(here, [*here.receivers, receiver])
    try:
        yield
    finally:
        # By identity, and perhaps not there: after a fork this is another process.
        _change(here, [r for r in here.receivers if r is not receiver])
        if not here.receivers and here in _sets:
            _sets.remove(here)
            _uninstall(here)


def _change(here: _Set, receivers: list[Receiver]) -> None:
    here.receivers[:] = receivers
    here.given.clear()
    here.given.update(*(receiver.given for receiver in receivers))


def _install() -> _Set:
    here = _Set([], set(), [], ExitStack())
    _pass_over(_around)
    _pass_over(_tell_all)
    for owner, name, make in _places():
        if hasattr(owner, name):  # some are private: without them less is seen
            original = getattr(owner, name)
            function = functools.wraps(original)(make(original, here))
            _pass_over(function)
            here.stand_ins.append(_StandIn(owner, name, function, original, name in vars(owner)))
            setattr(owner, name, function)
            _tell_dynamo(original, function)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            closure = any(map(callable, (*args[1:], *kwargs.values())))
            _tell_all(here, lambda receiver: receiver.before_step(optimizer, closure))

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            _tell_all(here, lambda receiver: receiver.after_step(optimizer))

    here.hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
    here.hooks.callback(register_optimizer_step_post_hook(after_step).remove)
    return here


def _uninstall(here: _Set) -> None:
    here.hooks.close()
    for owner, name, function, original, own in reversed(here.stand_ins):
        if vars(owner).get(name) is not function:
            continue  # somebody else put theirs over ours, which calls the original from now on
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
        _tell_dynamo(function, original)


def _places() -> Iterator[tuple[Any, str, Callable[..., Callable[..., Any]]]]:
    """Name each function that gets a stand-in, and who makes it."""
    yield nn.Module, "_call_impl", _observed_forward
    # Tensor.backward looks this name up at every call, so one stand-in sees both ways of calling it.
    yield torch.autograd, "backward", _observed_backward
    yield DataLoader, "__iter__", _observed_iter
    for name in dir(F):
        if name.endswith(("_loss", "_entropy", "_with_logits")) or name == "kl_div":
            yield F, name, _observed_loss
    yield GradScaler, "scale", _told(lambda r, scaler, *_, **__: r.scale(scaler))
    yield GradScaler, "unscale_", _told(lambda r, scaler, optimizer: r.unscale(scaler, optimizer))
    yield GradScaler, "step", _told(lambda r, scaler, optimizer, *_, **__: r.scaled_step(scaler, optimizer))
    for owner in (nn.Module, Optimizer):
        yield owner, "zero_grad", _told(lambda r, owner, *_, **__: r.zero_grad(owner))
    yield nn.Module, "load_state_dict", _told(lambda r, module, state_dict, *_, **__: r.load(module, state_dict))
    # However the functions that clip were imported, they look these names up in their own module.
    yield clip_grad, "_group_tensors_by_device_and_dtype", _told(lambda r, *_, **__: r.reading_gradients())
    yield clip_grad, "_clip_grads_with_norm_", _told(_clip)
    for scheduler in _kinds(lr_scheduler.LRScheduler):
        if "step" in vars(scheduler):
            yield scheduler, "step", _observed_scheduler
    yield Tensor, "item", _observed_item
    if torch.accelerator.is_available():
        for name in ("to", "cuda"):
            yield Tensor, name, _observed_copy


def _kinds(kind: type) -> set[type]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _told(tell: Callable[..., Around]) -> Callable[..., Callable[..., Any]]:
    """Return a maker of stand-ins that tell each receiver of a call, then do what the original does."""

    def make(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if not here.receivers or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return _around(here.receivers, tell, original, *args, **kwargs)

        return stand_in

    return make


def _around(
    receivers: list[Receiver], tell: Callable[..., Around], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    callback = _set_eval_frame(None)
    try:
        # Nearly always there is one receiver: to spare it the stack saves a third of what an observed call costs.
        around = tell(receivers[0], *args, **kwargs) if len(receivers) == 1 else _all(receivers, tell, args, kwargs)
        with around or _NOTHING:
            _set_eval_frame(callback)
            try:
                return original(*args, **kwargs)
            finally:
                _set_eval_frame(None)
    finally:
        _set_eval_frame(callback)


@contextmanager
def _all(
    receivers: list[Receiver], tell: Callable[..., Around], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    with ExitStack() as stack:
        for receiver in tuple(receivers):
            around = tell(receiver, *args, **kwargs)
            if around is not None:
                stack.enter_context(around)
        yield


def _observed_forward(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def tell(receiver: Receiver, module: nn.Module, *inputs: Any, **named: Any) -> Around:
        if _depth.forward > 1 and id(module) not in receiver.given:
            return None
        return receiver.forward(module, inputs, named)

    def stand_in(module: nn.Module, /, *inputs: Any, **named: Any) -> Any:
        if not here.receivers or torch.compiler.is_compiling():
            return original(module, *inputs, **named)
        if _depth.forward and id(module) not in here.given:
            return original(module, *inputs, **named)
        if torch.jit.is_tracing() or type(module).__hash__ is None:  # a dataclass, as a loss may be one
            return original(module, *inputs, **named)
        _depth.forward += 1
        try:
            output = _around(here.receivers, tell, original, module, *inputs, **named)
            if _depth.forward == 1:
                _tell_all(here, lambda receiver: receiver.forwarded(module, inputs, named, output))
            return output
        finally:
            _depth.forward -= 1

    return stand_in


def _observed_loss(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def stand_in(*inputs: Any, **named: Any) -> Any:
        output = original(*inputs, **named)
        if not torch.compiler.is_compiling() and not _depth.forward and here.receivers:
            _tell_all(here, lambda receiver: receiver.loss(original, inputs, named, output))
        return output

    # What torch.jit.script looks for, to compile the original instead.
    vars(stand_in).update(__script_if_tracing_wrapper=True, __original_fn=original)
    return stand_in


def _observed_backward(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def tell(receiver: Receiver, tensors: Any, *_: Any, **__: Any) -> Around:
        return receiver.backward(tensors)

    def stand_in(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not here.receivers or torch.compiler.is_compiling():
            return original(tensors, *args, **kwargs)
        if not isinstance(tensors, (Tensor, tuple, list)) and hasattr(tensors, "__iter__"):
            tensors = list(tensors)  # a generator can be read only once
        return _around(here.receivers, tell, original, tensors, *args, **kwargs)

    return stand_in


def _observed_iter(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def stand_in(loader: DataLoader[Any]) -> Iterator[Any]:
        begin = functools.partial(original, loader)
        for receiver in here.receivers:
            begin = functools.partial(receiver.iterate, loader, begin)
        return begin()

    return stand_in


def _observed_scheduler(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def tell(receiver: Receiver, scheduler: lr_scheduler.LRScheduler, *_: Any, **__: Any) -> Around:
        return receiver.schedule(scheduler)

    def stand_in(scheduler: lr_scheduler.LRScheduler, *args: Any, **kwargs: Any) -> Any:
        if not here.receivers or _depth.scheduler:  # a scheduler made of others calls theirs
            return original(scheduler, *args, **kwargs)
        _depth.scheduler += 1
        try:
            return _around(here.receivers, tell, original, scheduler, *args, **kwargs)
        finally:
            _depth.scheduler -= 1

    return stand_in


def _observed_item(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def stand_in(tensor: Tensor) -> Any:
        if here.receivers and not torch.compiler.is_compiling():
            for receiver in here.receivers:
                receiver.item()
        return original(tensor)

    return stand_in


def _observed_copy(original: Callable[..., Any], here: _Set) -> Callable[..., Any]:
    def stand_in(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not here.receivers or torch.compiler.is_compiling() or kwargs.get("non_blocking") or not tensor.is_cpu:
            return original(tensor, *args, **kwargs)
        started = perf_counter()
        copy = original(tensor, *args, **kwargs)
        if not copy.is_cpu:
            for receiver in here.receivers:
                receiver.copied(perf_counter() - started)
        return copy

    return stand_in


def _clip(receiver: Receiver, parameters: Any, max_norm: float, total_norm: Tensor, *_: Any, **__: Any) -> Around:
    return receiver.clip(total_norm, max_norm)


def _tell_dynamo(before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Have ``torch.compile`` take the stand-in of ``_call_impl`` for the original: it knows that by identity.

    Where these private names are missing it traces through the stand-in, which does the same with more steps.
    """
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call_impl", None) is before:
            module.unpatched_nn_module_call_impl = after  # type: ignore[union-attr]


_dynamo: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
# Sets who looks at the frames that Python runs, and returns who did until now.
_set_eval_frame: Callable[[Any], Any] = getattr(_dynamo, "set_eval_frame", lambda callback: callback)


def _tell_all(here: _Set, tell: Callable[[Receiver], None]) -> None:
    """Tell every receiver, while ``torch.compile`` looks at no frame."""
    callback = _set_eval_frame(None)
    try:
        for receiver in tuple(here.receivers):
            tell(receiver)
    finally:
        _set_eval_frame(callback)


def _pass_over(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` pass over the frame of a function, but not over those it calls."""
    with contextlib.suppress(AttributeError):  # private names
        skip, default = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT
        _dynamo.set_code_exec_strategy(function.__code__, _dynamo._FrameExecStrategy(skip, default))


def _after_fork() -> None:
    for here in _sets:
        for receiver in here.receivers:
            receiver.forked()
        _change(here, [])


if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
    os.register_at_fork(after_in_child=_after_fork)
