"""From what torch is called for to events and rows."""

import math
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from dxdy_nb.observe.batches import Fetches, Loader, bad_samples, batch_size, described, likeness, sample_ids
from dxdy_nb.observe.events import Events
from dxdy_nb.observe.found import Found, Named, held_by, unwrapped_optimizer
from dxdy_nb.observe.row import Row, is_loss, kept, local, version
from dxdy_nb.observe.statistics import Budget, Statistics, any_nonfinite, total_norm, update_ratios
from dxdy_nb.observe.trace import Layout, TraceWriter

# The update ratio needs a copy of the weights, which costs more than all other statistics together.
UPDATE_EVERY = 10  # steps
# A gradient norm so many times that of the step before is worth complete statistics.
JUMP = 10.0


class Enough(SystemExit):
    """The loop has made the steps that were asked for."""


class Recorder:
    """Hears of a loop through ``hooks``, and writes its rows.

    A row is under way from the first fetch, forward or backward that comes after the last one. It ends with an
    optimizer's step; where another optimizer holds parameters that the same backward reached, it waits for that step
    until the next forward or backward.
    """

    def __init__(
        self,
        found: Found,
        writer: TraceWriter,
        budget: float | None,
        blackbox: Any = None,
        replay: Any = None,
        stop_after: int | None = None,
        first: int = 0,
    ) -> None:
        self.found, self.writer, self.events = found, writer, Events()
        self.schedulers: Named[LRScheduler] = Named()
        self.scalers: Named[Any] = Named()
        self.loaders: dict[str, Loader] = {}
        self.given = frozenset() if found.given is None else frozenset({id(found.given)})
        self.active = True
        self.count = first  # rows, with those of an earlier process
        self._statistics, self._budget = Statistics(), Budget(budget)
        self._blackbox, self._replay, self._stop_after = blackbox, replay, stop_after
        self._named_loaders: Named[DataLoader[Any]] = Named()
        self._row = Row(first)
        self._late: list[Row] = []  # rows whose numbers are still on their way from a GPU
        self._batch: Any = None  # the last one, if it names its samples
        self._loader = 0  # it came from
        self._modes: dict[str, bool] = {}
        self._scales: dict[str, float] = {}
        self._looked: set[str] = set()  # optimizers whose parameters were looked at
        self._seen: set[str] = set()  # optimizers that have stepped
        self._stepping: list[Optimizer] = []  # the optimizer that makes its step, and those it is made of
        self._steps = 0  # of optimizers
        self._calls: list[str] = []  # that are under way: "forward", "backward", perhaps of several threads
        self._hidden = 0  # above 0 inside of torch's functions, and of ours
        self._expected = 1  # backward calls a step
        self._norm = math.inf  # of the last row
        self._over = False  # whether a replay is
        self._memory: tuple[torch.device | None, Callable[[], float]] = (None, lambda: math.nan)

    @property
    def _inside(self) -> str:
        """The innermost call that is under way: "forward", "backward" or neither."""
        return self._calls[-1] if self._calls else ""

    def lost(self, error: Exception) -> None:
        """Record no more after an error of our own; what was recorded stays."""
        self.active = False
        if self._blackbox is not None:
            self._blackbox.close()
        self._row, self._late, self._blackbox = Row(self.count), [], None
        text = f"watch: nothing is recorded from step {self.count} on ({type(error).__name__}: {error})."
        with suppress(Warning):  # where warnings are errors
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def end(self, error: BaseException | None) -> None:
        """Write what is under way, now that the loop has ended."""
        self.active = False
        try:
            self._end(error)
        except Exception as ours:
            self.lost(ours)
        self.writer.close()
        self._row, self._batch = Row(), None  # what they hold of the loop may go

    def _end(self, error: BaseException | None) -> None:
        self._next_row()
        row = self._row
        if row.touched or (row.backwards and row.samples):
            self._close()  # a backward that no step followed: the loop ended before it, or broke
        self.flush()
        failed = error is not None and not isinstance(error, Enough)
        if self._replay is not None and failed:
            self._replay.failed(error)
        if self._blackbox is not None:
            if failed:
                self._blackbox.failed(row.number, error)
            self._blackbox.close()

    # What the hooks tell. Each method returns what is to be entered before the call and left after it.

    @contextmanager
    def forward(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
        """Observe the forward of an outermost module."""
        name = None if self._inside else self.found.model(module)
        if name is None:  # a forward within a backward is a checkpoint's
            yield
            return
        if self._modes.get(name) is not module.training:
            self._modes[name] = module.training
            self._tell("train" if module.training else "eval", name)
        if not torch.is_grad_enabled():
            self._tell("no_grad_forward", name, float(module.training))
            self._row.aside = True
            with _Within(self, "forward"):
                yield
            return
        self._next_row()
        self._tell("forward", name, float(module.training))
        row = self._row
        if not row.begun:
            self._first_forward(row)
        started = self._begin()
        with _Within(self, "forward"):
            yield
        row.forward_time += perf_counter() - started
        samples = batch_size(inputs) or batch_size(named.values())
        row.samples[id(module)] = row.samples.get(id(module), 0) + samples

    def forwarded(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Nothing to observe: outputs are no business of a row."""

    def loss(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Nothing to observe: a row's loss is what backward begins at."""

    @contextmanager
    def backward(self, tensors: Any) -> Iterator[None]:
        """Observe a backward pass."""
        if self._inside == "backward":  # a re-entrant checkpoint calls it for a part of the graph
            yield
            return
        self._next_row()
        row = self._row
        if not row.begun or self.found.stale:
            with _Own(self, row):
                self.found.refresh()
        parameters = self.found.parameters
        before = [(g, 0 if g is None else version(g)) for g in [p.grad for p in parameters]]
        started = self._begin()
        with _Within(self, "backward"):
            yield
        seconds = perf_counter() - started
        row.backward_time += seconds
        row.backwards += 1
        with _Own(self, row):
            touched = [
                id(p)
                for p, (g, was) in zip(parameters, before, strict=True)
                if (now := p.grad) is not g or (now is not None and version(now) != was)
            ]
            row.touched.update(touched)
            self._after_backward(row, tensors, bool(touched))
        self._tell("backward", value=seconds)

    def iterate(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Observe what a loader fetches."""
        name = self._named_loaders.add(loader, likeness(loader))
        known = self.loaders.get(name)
        self.loaders[name] = described(loader, 1 + (known.epochs if known else 0))
        with _Unseen(self):
            return Fetches(begin(), partial(self._fetch, name))

    def _fetch(self, loader: str, batches: Iterator[Any]) -> Any:
        if not self.active:
            return next(batches)
        started = perf_counter()
        try:
            with _Unseen(self):
                batch = next(batches)
        except StopIteration:
            self._drop_validation()
            raise
        try:
            return self._fetched(loader, batch, started, perf_counter() - started)
        except Exception as error:
            if self._replay is not None:
                raise
            self.lost(error)
            return batch

    def _fetched(self, loader: str, batch: Any, started: float, seconds: float) -> Any:
        """Note a batch, and return what the loop gets."""
        self._drop_validation()
        self._next_row()
        row = self._row
        row.started = row.started or started
        row.data_time += seconds
        self._loader = list(self.loaders).index(loader)
        if self._replay is not None:
            batch = self._replay.batch(batch, self._loader)
        if self._blackbox is not None:
            with _Own(self, row):
                self._blackbox.batch(self.count, batch, self._loader)
        ids = sample_ids(batch)
        self._tell("fetch", loader, seconds, () if ids is None else tuple(ids.tolist()))
        self._batch = None if ids is None else batch
        if ids is not None:
            row.batches.append(batch)
        return batch

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """Measure the gradients where that was not done yet, before the optimizer uses them."""
        name = self.found.optimizer(optimizer)
        if name is None:
            return
        optimizer = unwrapped_optimizer(optimizer)
        # An error may have ended an earlier step.
        self._stepping = [one for one in self._stepping if one is not optimizer and _is_stepping(one)] + [optimizer]
        if len(self._stepping) > 1:  # an optimizer made of others
            return
        if id(optimizer) in self._row.stepped:
            self._next_row()
        row = self._row
        self._begin()
        with _Own(self, row):
            if closure or name not in self._looked:
                self._look(name)
            if not closure:
                self._before_update(row, name)
            if self.count % UPDATE_EVERY == 0 and row.weights is None:
                row.weights = self.found.parameters, [local(p.detach()).clone() for p in self.found.parameters]
        row.update_time -= perf_counter() - row.inside()

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has made its step."""
        optimizer = unwrapped_optimizer(optimizer)
        if not any(known is optimizer for known in self._stepping):
            return
        while self._stepping.pop() is not optimizer:
            pass
        if self._stepping:  # an optimizer made of others
            return
        row = self._row
        row.end(perf_counter())
        row.update_time += row.ended - row.inside()
        self._steps += 1
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer decides by itself, on the device
        self._stepped(row, optimizer, True if found_inf is None else kept(found_inf == 0))

    @contextmanager
    def scaled_step(self, scaler: Any, optimizer: Optimizer) -> Iterator[None]:
        """Observe a scaler's step, and note where it leaves out the optimizer's."""
        if self.found.optimizer(optimizer) is None:
            yield
            return
        optimizer = unwrapped_optimizer(optimizer)
        if id(optimizer) in self._row.stepped:
            self._next_row()
        steps, row = self._steps, self._row
        self._begin()
        with _Unseen(self):
            yield
        if self._steps == steps:
            row.end(perf_counter())
            self._stepped(row, optimizer, False)

    @contextmanager
    def scale(self, scaler: Any) -> Iterator[None]:
        """Note by what a scaler multiplies the loss."""
        yield
        name = self.scalers.add(scaler)
        scale = getattr(scaler, "_scale", None)  # get_scale() would wait for a GPU
        self._row.scale = scale = kept(scale) if isinstance(scale, Tensor) else scaler.get_scale()
        if isinstance(scale, float) and scale != self._scales.get(name):
            self._scales[name] = scale
            self._tell("scale", name, scale)

    @contextmanager
    def unscale(self, scaler: Any, optimizer: Optimizer) -> Iterator[None]:
        """Measure the gradients where that was not done yet, before a scaler divides them."""
        name = self.found.optimizer(optimizer)
        if name is None:
            yield
            return
        row = self._row
        self._measure_once(row)
        yield
        row.unscaled = True
        row.stamp()
        self._tell("unscale", name)

    def reading_gradients(self) -> None:
        """Measure the gradients where that was not done yet, before they are clipped."""
        if not self._row.touched:  # then they came of no backward
            self.found.refresh()
        if self._row.touched or any(p.grad is not None for p in self.found.parameters):
            self._measure_once(self._row)

    @contextmanager
    def clip(self, norm: Tensor, bound: float) -> Iterator[None]:
        """Note a clip, and the norm that it was decided by."""
        yield
        if self._row.measured is not None:
            self._row.stamp()
            self._tell("clip", value=kept(norm) if norm.is_cpu else None)

    def zero_grad(self, owner: nn.Module | Optimizer) -> None:
        """Note that gradients are dropped; also a first sight of an optimizer."""
        name = self.found.optimizer(owner) if isinstance(owner, Optimizer) else self.found.model(owner)
        if name is not None:
            held = held_by(owner) if isinstance(owner, Optimizer) else owner.parameters()
            if self._row.touched and not self._row.touched.isdisjoint(map(id, held)):
                self._row.dropped = len(self._row.losses)
            self._tell("zero_grad", name)

    def load(self, module: nn.Module, state: Any) -> None:
        """Nothing to note."""

    @contextmanager
    def schedule(self, scheduler: LRScheduler) -> Iterator[None]:
        """Note a scheduler's step, but not the one that it makes when it is made."""
        yield
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, Optimizer) or getattr(scheduler, "_is_initial", False):
            return
        if self.found.optimizer(optimizer) is not None:
            self._tell("scheduler", self.schedulers.add(scheduler), float(optimizer.param_groups[0]["lr"]))

    def item(self) -> None:
        """Count the numbers that the loop takes out of tensors."""
        if not self._hidden and not self._stepping:
            self._row.items += 1

    def copied(self, seconds: float) -> None:
        """Add up how long the loop waited for copies to a device."""
        if not self._hidden and not self._stepping:
            self._row.copied += seconds

    def forked(self) -> None:
        """Leave the record to the process that began it."""
        self.active = False
        self._row, self._late, self._blackbox = Row(), [], None

    # The row under way.

    def _tell(self, kind: str, where: str = "", value: float | None = None, samples: tuple[int, ...] = ()) -> None:
        self.events.add(kind, self.count, where, value, samples)

    def _begin(self) -> float:
        now = perf_counter()
        self._row.started = self._row.started or now
        return now

    def _next_row(self) -> None:
        """End a row that is complete, now that something new begins."""
        row = self._row
        if row.measured is not None and not (self._seen or self._stepping) and self._moved(row):
            row.outcomes.append(True)
            row.end(perf_counter())
        if row.outcomes:
            self._close()

    def _moved(self, row: Row) -> bool:
        """Return whether a loop whose optimizers were never seen to step did by hand (or compiled) what they would."""
        return row.weights_changed() or (not self.found.optimizers.names() and row.gradients_changed())

    def _first_forward(self, row: Row) -> None:
        with _Own(self, row):
            # Before the forward: within it FSDP2 has other parameters in the model than the optimizer has.
            self.found.refresh(forward=True)
            if self._replay is not None:
                self._replay.forward(*self._objects())
            if self._blackbox is not None:
                if self._blackbox.due:  # to take a snapshot, for which earlier steps should have ended
                    self.flush()
                self._blackbox.forward(row.number, *self._objects())

    def _objects(self) -> tuple[dict[str, nn.Module], dict[str, Optimizer], dict[str, Any]]:
        return self.found.models.alive(), self.found.optimizers.alive(), self.scalers.alive()

    def _look(self, name: str) -> None:
        """Look at the parameters again, for an optimizer that may hold others than were known."""
        self._looked.add(name)
        if self.found.refresh() and self._row.measured is not None:
            self._measure(self._row)
        if self._replay is not None:
            self._replay.restore(*self._objects())

    def _drop_validation(self) -> None:
        """Forget what validation fetched, now that it fetches more or has come to its end: it belongs to no step."""
        row = self._row
        if row.aside and not row.begun and not row.stepped:
            self._row, self._batch = Row(self.count), None
            if self._blackbox is not None:
                self._blackbox.forget(self._loader)

    def _after_backward(self, row: Row, tensors: Any, reached: bool) -> None:
        starts = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        losses = [kept(tensor) for tensor in starts if is_loss(tensor)]
        if losses:
            loss = sum(losses)
            (row.losses if reached else row.losses_elsewhere).append((loss, self._batch))
            known = isinstance(loss, float) and isinstance(row.scale, float)
            self._tell("loss", value=loss / (row.scale or math.nan) if known else None)
        if reached:
            row.measured = None
            # What comes before the last backward of a step is no step's gradient.
            if row.backwards >= self._expected or self._stepping:
                self._measure(row)

    def _measure_once(self, row: Row) -> None:
        if row.measured is None:
            with _Own(self, row):
                self._measure(row)

    def _measure(self, row: Row) -> None:
        row.parameters, row.rows = self.found.parameters, None
        row.layout = self.found.layout if row.parameters else Layout((), ())  # those of a model that is gone are gone
        row.measured_scale = 1.0 if row.unscaled else row.scale
        others = self.found.untouched(row.touched)
        gradients = [None if p.grad is None or id(p) in others else local(p.grad) for p in row.parameters]
        row.full = self._budget.full(self.count)
        row.measured = self._statistics.measure(gradients) if row.full else self._statistics.glance(gradients)
        if not row.full and row.measured.ready:
            rows = row.measured.rows
            if any_nonfinite(rows) or total_norm(rows) > JUMP * self._norm * float(row.measured_scale):
                row.full, row.measured = True, self._statistics.measure(gradients)
        row.stamp()

    def _before_update(self, row: Row, name: str) -> None:
        if row.measured is None:
            self.found.refresh()
            self._measure(row)
        elif row.gradients_changed():
            self._tell("edited", name)
            row.stamp()
        if row.measured is not None and row.measured.ready:  # always, but on a GPU
            self._judge(row)

    def _stepped(self, row: Row, optimizer: Optimizer, outcome: Any) -> None:
        """Note that an optimizer's step was taken or left out, and end the row if no other's is to come."""
        name = self.found.optimizers.add(optimizer)
        if not row.stepped:
            lr = optimizer.param_groups[0].get("lr")  # an optimizer of one's own may have none
            row.lr = math.nan if lr is None else float(lr)
        row.stepped.append(id(optimizer))
        row.outcomes.append(outcome)
        if not isinstance(outcome, Tensor):
            self._tell("step" if outcome else "skip", name, row.update_time)
        if row.weights is not None:
            with _Own(self, row):
                row.ratios = update_ratios(row.weights[1], [local(p.detach()) for p in row.weights[0]])
        row.others = self.found.beside(row.stepped)
        waiting = not row.others.isdisjoint(row.touched)
        if name not in self._seen:  # then another that shares the backward may not have been seen yet either
            self._seen.add(name)
            waiting = waiting or not self.found.holds(row.stepped, row.touched)
        if not waiting:
            self._close()

    def _close(self) -> None:
        """End the row that is under way, and begin another."""
        row = self._row
        self._measure_once(row)
        if not row.ended:
            row.end(perf_counter())
        row.step_time = row.ended - row.started - row.own_until
        row.memory = self._memory_now()
        if row.items:
            self._tell("item", value=row.items)
        if row.copied:
            self._tell("copy", value=row.copied)
        if row.backwards:
            self._expected = row.backwards
        row.missing = [place for place, p in enumerate(row.parameters) if id(p) in row.others] if row.others else []
        if row.weights is not None and row.weights[0] is not row.parameters:
            row.ratios = None  # of another set of parameters
        row.parameters, row.weights = [], None  # nobody but the loop may keep a model's weights
        self.count += 1
        self._row = Row(self.count)
        self._late.append(row)
        with _Own(self, row):
            self.flush(1)
        self.events.add("watch", row.number, value=row.own)
        self._budget.spent(row.own, row.step_time, row.full)
        if self.active and (self._over or self.count == self._stop_after):
            raise Enough(0)

    def _memory_now(self) -> float:
        device = self.found.parameters[0].device if self.found.parameters else torch.device("cpu")
        if device != self._memory[0]:
            self._memory = device, _memory_reader(device)
        return self._memory[1]()

    def flush(self, late: int = 0) -> None:
        """Store the rows that have ended, but for as many as may wait for their numbers to come from a GPU."""
        while self._late and (len(self._late) > late or (m := self._late[0].measured) is None or m.ready):
            with _Unseen(self):
                self._store(self._late.pop(0))

    def _judge(self, row: Row) -> None:
        """Tell black box and replay how a step goes: before the update, where the numbers are there by then."""
        if row.judged:
            return
        row.judged = True
        row.settle()
        loss = row.loss if row.losses or row.losses_elsewhere else None
        if self._blackbox is not None:
            self._blackbox.ended(row.number, loss, row.norm, row.nonfinite, row.full)
        if self._replay is not None:
            self._over = self._replay.ended(loss, row.norm, row.full)

    def _store(self, row: Row) -> None:
        assert row.layout is not None
        self._judge(row)
        rows = row.settle()
        if row.missing:
            rows[row.missing] = math.nan
            row.norm, row.nonfinite = total_norm(rows), any_nonfinite(rows)
        for outcome in row.outcomes:
            if isinstance(outcome, Tensor):
                self.events.add("step" if bool(outcome) else "skip", row.number)
        values = row.values()
        self._norm = values["grad_norm"]
        if row.layout is not self.writer.layout:
            self.writer.relayout(row.layout)
        ids = [number for batch in row.spoilt() for number in bad_samples(batch)]
        ratios = None if row.skipped else row.ratios
        self.writer.append(row.number, values, rows, ratios, skipped=row.skipped, bad_samples=ids, full=row.full)


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is under way in this thread."""
    frame: Any = sys._getframe()
    while frame is not None:
        # What torch puts around each optimizer's step.
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


class _Unseen:
    """What the loop does meanwhile is not its own: torch's functions, or ours."""

    # Classes, since they are entered a dozen times a step and a generator would cost five times as much.

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._hidden += 1

    def __exit__(self, *error: object) -> None:
        self._recorder._hidden -= 1


class _Own(_Unseen):
    """As ``_Unseen``, and the time counts as that of monitoring."""

    def __init__(self, recorder: Recorder, row: Row) -> None:
        self._recorder, self._row = recorder, row

    def __enter__(self) -> None:
        self._started = perf_counter()
        self._recorder._hidden += 1

    def __exit__(self, *error: object) -> None:
        self._recorder._hidden -= 1
        self._row.own += perf_counter() - self._started


class _Within:
    """A forward or a backward is under way."""

    def __init__(self, recorder: Recorder, what: str) -> None:
        self._recorder, self._what = recorder, what

    def __enter__(self) -> None:
        self._recorder._calls.append(self._what)

    def __exit__(self, *error: object) -> None:
        self._recorder._calls.remove(self._what)


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
