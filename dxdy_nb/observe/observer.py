"""Hooks that turn a running loop into records; the loop is not changed, and neither is its result."""

import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.statistics import Statistics, any_nonfinite, total_norm, update_ratios
from dxdy_nb.observe.trace import Layout, Trace, TraceWriter

if TYPE_CHECKING:
    import pandas as pd

# The update ratio needs a copy of the weights, which costs more than all other statistics together.
UPDATE_EVERY = 10  # steps
# Each function that stands in the place of another: whose it is, the other, and whether its owner had that one itself.
_STAND_INS: dict[Callable[..., Any], tuple["Watch", Callable[..., Any], bool]] = {}


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, *, out: str | Path | None = None) -> "Watch":
    """Observe whatever loop runs inside the ``with`` block: one model, one optimizer, one record a step.

    Parameters
    ----------
    model : the module whose forward the loop calls
    optimizer : the optimizer whose ``step`` ends a step
    out : a folder to keep the record in while it runs; without it the record stays in memory

    Raises
    ------
    DxdyError
        A model without parameters, something that is no model or no optimizer, a folder that cannot be written or
        that already holds a record.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, optimizer) as w:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         loss = model(torch.ones(4, 2)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    >>> w.steps["effective_batch"].tolist()
    [4, 4, 4]
    """
    return Watch(model, optimizer, None if out is None else Path(out))


@dataclass
class _Step:
    """What was seen of the step that is under way."""

    started: float = 0.0
    data_time: float = 0.0
    forward_time: float = 0.0
    backward_time: float = 0.0
    batch: int = 0
    aside: bool = False  # whether the model ran without gradients: for validation, or for a training step's target
    losses: list[float] = field(default_factory=list)
    losses_elsewhere: list[float] = field(default_factory=list)  # of backward calls that brought this model nothing
    gradients: NDArray[np.float64] | None = None
    bad_samples: list[int] = field(default_factory=list)


class Watch:
    """A loop under observation, and its tables afterwards (or meanwhile).

    ``steps`` and ``gradients`` are DataFrames. The gradients are those at the end of backward: before clipping. A
    step's time runs from the fetch of its first batch to the end of the optimizer's step, so validation in between
    is in no step.

    What a row cannot tell: a loss that a ``GradScaler`` has scaled is recorded as it is, and so are its gradients; the
    step that it leaves out joins the next one. An optimizer that calls a closure several times has one row for all of
    them. A parameter or an optimizer that the loop puts in another's place is not seen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, out: Path | None) -> None:
        if not isinstance(model, nn.Module):
            raise DxdyError(f"watch: expected a torch.nn.Module as model, got {type(model).__name__}.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise DxdyError(f"watch: expected a torch.optim.Optimizer as optimizer, got {type(optimizer).__name__}.")
        parameters = dict(model.named_parameters())
        if not parameters:
            raise DxdyError("watch: the model has no parameters, so there are no gradients to observe.")
        if any(map(is_lazy, parameters.values())):
            raise DxdyError("watch: the model has weights without a shape. Call it once on a batch, then watch it.")
        if any(p.is_meta for p in parameters.values()):
            raise DxdyError("watch: the model is on the device 'meta', where tensors hold no numbers. Move it first.")
        self.model, self.optimizer, self.out = model, optimizer, out
        self._tensors = list(parameters.values())
        self._layout = Layout(tuple(parameters), tuple(tuple(p.shape) for p in self._tensors))
        self._statistics = Statistics()
        self._writer: TraceWriter | None = None
        self.active = False  # True inside the `with` block
        self._cleanup = ExitStack()
        self._memory = _memory_reader(self._tensors[0].device)
        self._count = 0
        self._step = _Step()
        self._batch: Any = None
        self._in_backward = False
        self._update_started = 0.0
        self._weights: list[Tensor] | None = None

    def __enter__(self) -> Self:
        if self._writer is not None:
            raise DxdyError("watch: this one was used already. Call dx.watch(...) again for another loop.")
        self._writer = TraceWriter(self._layout, self.out)
        handles = [
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        ]
        for handle in handles:
            self._cleanup.callback(handle.remove)
        # The class and not a hook in the model: copies of the model, and files it is saved to, would carry the hook.
        kind = type(self.model)
        self._replace(kind, "__call__", self._observed_call)
        # Tensor.backward looks this name up at every call, so one wrapper sees both ways of calling it.
        self._replace(torch.autograd, "backward", self._observed_backward)
        self._replace(DataLoader, "__iter__", self._observed_iter)
        self.active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.active = False
        self._cleanup.close()
        step = self._step
        if step.gradients is not None or (step.losses_elsewhere and step.batch):
            # A backward that no step followed: the loop ended before it, or broke.
            self._record(update_time=0.0, ratios=None, skipped=True)
        if self._writer is not None:
            self._writer.close()

    @property
    def trace(self) -> Trace:
        """All records so far."""
        if self._writer is None:
            raise DxdyError("watch: nothing was observed yet. Train inside `with dx.watch(...) as w:`.")
        return self._writer.read()

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step.

        Loss (mean over the backward calls that reached the model), lr (of the first group of parameters), grad_norm
        (before clipping), effective_batch (samples of all forwards), times in seconds, memory in bytes, skipped (a
        backward that no step followed), bad_samples (ids).
        """
        return self.trace.steps

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row for each step and parameter: mean, max, min, norm, nonzero, nonfinite, update_ratio.

        The update ratio is measured at every 10th step and NaN between. A parameter without a gradient is a row of
        NaN; one whose gradient holds NaN has its count in ``nonfinite``.
        """
        return self.trace.gradients

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return self._layout.sizes

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        stand_in = make(original)
        _STAND_INS[stand_in] = self, original, name in vars(owner)
        setattr(owner, name, stand_in)
        self._cleanup.callback(_put_back, owner, name)

    def _observed_iter(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        @functools.wraps(original)
        def observed(loader: Any) -> Iterator[Any]:
            if not self.active:
                return original(loader)
            return _Fetches(original(loader), self._after_fetch, self._drop_validation)

        return observed

    def _observed_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        model = self.model

        @functools.wraps(original)
        def observed(module: nn.Module, *inputs: Any, **named: Any) -> Any:
            if module is not model or not self.active or torch.compiler.is_compiling() or torch.jit.is_tracing():
                return original(module, *inputs, **named)
            if not torch.is_grad_enabled():
                self._step.aside = True
                return original(module, *inputs, **named)
            started = self._begin()
            output = original(module, *inputs, **named)
            self._step.forward_time += perf_counter() - started
            self._step.batch += _batch_size(inputs) or _batch_size(named.values())
            return output

        return observed

    def _observed_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._in_backward or not self.active:  # a re-entrant checkpoint calls it for a part of the graph
                original(tensors, *args, **kwargs)
                return
            if not isinstance(tensors, (Tensor, tuple)):
                tensors = list(tensors)  # a generator can be read only once
            before = [p.grad for p in self._tensors]
            versions = [g._version for g in before if g is not None]
            started = self._begin()
            self._in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            self._step.backward_time += perf_counter() - started
            new = any(p.grad is not g for p, g in zip(self._tensors, before, strict=True))
            self._after_backward(tensors, new or versions != [g._version for g in before if g is not None])

        return observed

    def _begin(self) -> float:
        now = perf_counter()
        if not self._step.started:
            self._step.started = now
        return now

    def _after_fetch(self, started: float, ended: float, batch: Any) -> None:
        self._drop_validation()
        if not self._step.started:
            self._step.started = started
        self._step.data_time += ended - started
        self._batch = batch

    def _drop_validation(self) -> None:
        """Forget what validation fetched, now that it fetches more or has come to its end: it belongs to no step."""
        step = self._step
        if step.aside and not step.batch and step.gradients is None:
            self._step, self._batch = _Step(), None

    def _after_backward(self, tensors: Any, reached: bool) -> None:
        step = self._step
        losses = [t.item() for t in ((tensors,) if torch.is_tensor(tensors) else tensors) if _is_loss(t)]
        sound = all(map(math.isfinite, losses))
        if losses:
            (step.losses if reached else step.losses_elsewhere).append(sum(losses))
        if reached:
            spoilt_before = step.gradients is not None and any_nonfinite(step.gradients)
            step.gradients = self._statistics.describe([p.grad for p in self._tensors])
            sound = sound and (spoilt_before or not any_nonfinite(step.gradients))
        if not sound:
            step.bad_samples += bad_samples(self._batch)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._begin()
        if self._count % UPDATE_EVERY == 0:
            self._weights = [p.detach().clone() for p in self._tensors]
        self._update_started = perf_counter()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        update_time = perf_counter() - self._update_started
        ratios = None
        if self._weights is not None:
            ratios = update_ratios(self._weights, [p.detach() for p in self._tensors])
            self._weights = None
        self._record(update_time, ratios, skipped=False)

    def _record(self, update_time: float, ratios: NDArray[np.float64] | None, *, skipped: bool) -> None:
        step, self._step = self._step, _Step()
        rows = step.gradients
        if rows is None:  # gradients that came from elsewhere than backward
            rows = self._statistics.describe([p.grad for p in self._tensors])
        losses = step.losses or step.losses_elsewhere  # another model's loss is not this one's; a lone one may be
        lr = self.optimizer.param_groups[0].get("lr")  # an optimizer of one's own may have none
        values = {
            "loss": sum(losses) / len(losses) if losses else math.nan,
            "lr": math.nan if lr is None else float(lr),
            "grad_norm": total_norm(rows),
            "effective_batch": step.batch,
            "step_time": perf_counter() - step.started,
            "data_time": step.data_time,
            "forward_time": step.forward_time,
            "backward_time": step.backward_time,
            "update_time": update_time,
            "memory": self._memory(),
        }
        assert self._writer is not None  # hooks exist only after __enter__
        self._writer.append(self._count, values, rows, ratios, skipped=skipped, bad_samples=step.bad_samples)
        self._count += 1


class _Fetches:
    """A loader's iterator that tells how long each fetch took; everything else is the iterator's own."""

    def __init__(
        self, iterator: Iterator[Any], tell: Callable[[float, float, Any], None], tell_end: Callable[[], None]
    ) -> None:
        self._iterator, self._tell, self._tell_end = iterator, tell, tell_end

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        started = perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._tell_end()
            raise
        self._tell(started, perf_counter(), batch)
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _put_back(owner: Any, name: str) -> None:
    """Take away what watches put in a function's place, as far as they have ended.

    Watches may end in another order than they began: one in a generator that was left half-way ends with the
    generator. What stands under one that is still running is taken away with that one.
    """
    while (found := _STAND_INS.get(vars(owner).get(name))) and not found[0].active:
        _, original, own = _STAND_INS.pop(vars(owner)[name])
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def bad_samples(batch: Any) -> list[int]:
    """Return the ids of a batch's samples whose own values are not finite; all its ids when every value is finite.

    A batch tells its ids by a field ``ids`` (a named tuple); without one nobody knows them, and the list is empty.
    """
    ids = getattr(batch, "ids", None)
    if not isinstance(batch, tuple) or not torch.is_tensor(ids):
        return []
    ids = ids.reshape(-1)  # of a single sample it is a number
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for part in batch:
        if torch.is_tensor(part) and part.is_floating_point() and part.dim() and len(part) == len(ids):
            bad |= ~torch.isfinite(part.cpu()).flatten(1).all(1) if part.dim() > 1 else ~torch.isfinite(part.cpu())
    chosen = ids[bad] if bad.any() else ids
    return [int(i) for i in chosen]


def _memory_reader(device: torch.device) -> Callable[[], float]:
    """Return a function for the bytes in use: what torch holds on a GPU, else what the process has resident.

    Where Linux tells it in a file, that file is kept open: it is read at every step.
    """
    if device.type == "cuda":
        return lambda: float(torch.cuda.memory_allocated(device))
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return lambda: float(psutil.Process().memory_info().rss)

    def resident() -> float:
        return float(os.pread(file, 64, 0).split()[1]) * mmap.PAGESIZE

    weakref.finalize(resident, os.close, file)
    return resident


def _is_loss(value: Any) -> bool:
    """Return whether a backward begins at a real number; it may also begin at a tensor or at an edge of the graph."""
    return torch.is_tensor(value) and value.numel() == 1 and not value.is_complex()


def _batch_size(values: Iterable[Any]) -> int:
    """Return the first dimension of the first tensor that a forward was called with; 0 when there is none."""
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return value.size(0)  # a nested tensor has no shape
    return 0
