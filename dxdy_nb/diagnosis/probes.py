"""Experiments on the reader's own set-up: the same steps again with one thing changed, all of it undone afterwards."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.observation import Call, Observation, Step, leading, main_call, output_of, target_of
from dxdy_nb.diagnosis.reading import Reading, last_operation, read_loss
from dxdy_nb.diagnosis.sameness import equal, replaced, same_tensor
from dxdy_nb.diagnosis.sequel import hooks_on
from dxdy_nb.diagnosis.subject import Subject, batches_of, preserved
from dxdy_nb.diagnosis.witness import Witness, recording
from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.nested import mapped, tensors_in

EPOCH_BYTES = 256 * 2**20  # of an epoch that are kept for reading
FEWEST, MOST = 4, 24  # steps that are watched
EPOCHS = 3
SHORT, LONG = 8, 40  # steps of a counterfactual
RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # in an optimizer's groups; all but the first are a schedule's
FEW = 3  # updates in a row that make a habit of what could happen once


class NotRepeatable(Exception):
    """The training step cannot be run again: what was heard of it does not say how."""


class OutOfTime(Exception):
    """The time that was allowed is used up; what was not checked is said in the report."""


@dataclass
class Experiment:
    """A subject, what was seen of it, and ways to run it again."""

    subject: Subject
    deadline: float  # of time.monotonic()
    steps: int | None = None
    seen: Observation = field(default_factory=Observation)
    initial: dict[str, Tensor] = field(default_factory=dict)  # parameters as they were given
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)  # of parameters and buffers, then
    driven: bool = True  # whether the step is the reader's own, and not what was heard of a loop

    def left(self) -> float:
        """Return the seconds that may still be used."""
        return self.deadline - time.monotonic()

    # ---- the steps themselves ----

    def observe(self) -> Observation:
        """Run the real steps once, record them, and put everything back."""
        with preserved(self.subject), recording(self.subject) as witness:
            self.seen = witness.seen
            before = {name: p.detach().clone() for name, p in self.subject.parameters.items()}
            witness.initial = before
            buffers = {name: b.detach().clone() for name, b in self.subject.model.named_buffers()}
            self.kinds = {name: (t.dtype, t.device) for name, t in {**before, **buffers}.items()}
            ema = _values(self.subject.ema_model)
            hooks = {name: hooks_on(p) for name, p in self.subject.parameters.items()}
            self._epochs(witness)
            now = self.subject.parameters
            self.seen.moved = {n for n, p in before.items() if n not in now or not equal(p, now[n].detach())}
            self.seen.final = self._facts(buffers, ema)
            self.initial = before
            self.seen.final["hooks"] = {n: hooks_on(p) - hooks.get(n, 0) for n, p in now.items()}
        return self.seen

    def _facts(self, buffers: dict[str, Tensor], ema: dict[str, Tensor]) -> dict[str, Any]:
        """Return what can only be seen at the end of the steps, while it is the end."""
        now = dict(self.subject.model.named_buffers())
        moved = [n for n, b in buffers.items() if n in now and not equal(b, now[n])]
        after = _values(self.subject.ema_model)
        facts: dict[str, Any] = {"buffers": moved, "modes": _modes(self.subject.model)}
        facts["ema_still"] = [n for n, v in ema.items() if equal(v, after[n])]
        model = {n: p.detach() for n, p in self.subject.parameters.items() if n in ema and p.shape == ema[n].shape}
        if model and all(v.is_floating_point() for v in model.values()):
            went, gap = (torch.cat([(to[n] - ema[n]).flatten() for n in model]) for to in (after, model))
            facts["ema_towards"] = float(torch.cosine_similarity(went, gap, 0))
        if self.subject.validate is not None:
            with suppress(Exception), random_states():
                marks = {n: b.detach().clone() for n, b in self.subject.model.named_buffers()}
                self.subject.validate()
                now = dict(self.subject.model.named_buffers())
                facts["validated"] = [n for n, b in marks.items() if not equal(b, now[n])]
        return facts

    def _epochs(self, witness: Witness) -> None:
        index, most, began = 0, self.steps or MOST, time.monotonic()
        share = self.left() / 3
        for epoch in range(EPOCHS):
            found = False
            for batch in self._batches():
                found = True
                if not self._one(witness, index, epoch, batch):
                    return
                index += 1
                if index >= most or (index >= FEWEST and time.monotonic() - began > share):
                    return
            if not found:
                self._none_came(epoch)
                return
            self.seen.epochs += 1
            witness.step.events.append("epoch")
            if self.subject.on_epoch_end is not None and not self._epoch_end(witness):
                return

    def _none_came(self, epoch: int) -> None:
        if self.subject.loader is None:
            self.seen.notes.append("all stages: without a loader no step could be run")
        elif epoch:
            self.seen.notes.append("data: the loader can be read only once; it gave no batch in the next epoch")
        elif self.seen.error is None:
            self.seen.error, self.seen.error_place = DxdyError("no batch came: it is empty, or used up"), "loader"

    def _epoch_end(self, witness: Witness) -> bool:
        buffers = {n: b.detach().clone() for n, b in self.subject.model.named_buffers()}
        assert self.subject.on_epoch_end is not None
        try:
            self.subject.on_epoch_end()
        except Exception as error:
            self.seen.error, self.seen.error_place = error, "on_epoch_end"
            return False
        now = dict(self.subject.model.named_buffers())
        if any(n not in now or not equal(b, now[n]) for n, b in buffers.items()):
            witness.step.events.append("buffers")
        return True

    def _given(self) -> Iterable[Any]:
        # Not `or`: that asks for a length, which a stream has not.
        return self.subject.loader if self.subject.loader is not None else ()

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self._given()
        except Exception as error:
            self.seen.error, self.seen.error_place = error, "loader"

    def _one(self, witness: Witness, index: int, epoch: int, batch: Any) -> bool:
        witness.begin(index, epoch, batch)
        warned = len(witness.caught)
        value = None
        try:
            value = self.train(batch, index, witness)
        except NotRepeatable:
            raise
        except Exception as error:
            witness.step.error = error
        witness.step.warned = [str(w.message) for w in witness.caught[warned:]]
        witness.end(value)
        return witness.step.error is None

    def train(self, batch: Any, index: int = 0, witness: Witness | None = None) -> Any:
        """Run one training step on a batch: the reader's own, or the usual one."""
        subject = self.subject
        loss_fn = subject.loss_fn
        if witness is not None and loss_fn is not None:
            loss_fn = witness.wrapped_loss(loss_fn)
        if subject.train_step is not None:
            return subject.train_step(subject.model, batch, subject.optimizer, loss_fn, index)
        for optimizer in subject.all_optimizers:
            optimizer.zero_grad()
        if not subject.all_optimizers:
            subject.model.zero_grad()
        loss = usual_loss(subject.model, loss_fn, batch)
        loss.backward()
        for optimizer in subject.all_optimizers:
            optimizer.step()
        return loss

    # ---- again, with one thing changed ----

    def rewind(self) -> None:
        """Set weights and learning rates to what they were at first; optimizers forget what they learnt."""
        parameters = self.subject.parameters
        with torch.no_grad():
            for name, first in self.initial.items():
                if name in parameters and parameters[name].shape == first.shape:
                    parameters[name].copy_(first)
        for optimizer in self.subject.all_optimizers:
            optimizer.state.clear()
            update = next((u for u in self.seen.updates if u.optimizer is optimizer), None)
            for group, lr in zip(optimizer.param_groups, update.lrs if update else (), strict=False):
                group["lr"] = lr
        for p in parameters.values():
            p.grad = None

    def again(
        self,
        steps: int,
        *,
        prepare: Callable[[Subject], None] | None = None,
        batch: Callable[[Any], Any] | None = None,
        fixed: bool = False,
    ) -> list[float]:
        """Return the losses of steps from the start, on the same random numbers, with one thing changed.

        Parameters
        ----------
        prepare : changes the set-up first (a learning rate, a flag); it is put back at the end
        batch : changes each batch
        fixed : the same first batch at every step
        """
        if self.left() < 0:
            raise OutOfTime
        losses: list[float] = []
        with preserved(self.subject), recording(self.subject, held=0) as witness, torch.enable_grad():
            if prepare is not None:
                prepare(self.subject)
            for index, given in enumerate(self._stream(steps, fixed)):
                if self.left() < 0:
                    raise OutOfTime
                witness.begin(index, 0, given)
                try:
                    value = self.train(batch(given) if batch else given, index, witness)
                except NotRepeatable:
                    raise
                except Exception:
                    losses.append(math.nan)
                    break
                witness.end(value)
                losses.append(witness.step.value)
        return losses

    def ending(self, steps: int, **changes: Any) -> float:
        """Return the lowest of the last four losses of ``again``, infinity where a loss was not finite."""
        losses = finite(self.again(steps, **changes))
        return min(losses[-4:]) if len(losses) == steps else math.inf

    def _stream(self, steps: int, fixed: bool) -> Iterator[Any]:
        if fixed:
            yield from [self.batches[0]] * steps
            return
        while steps > 0:
            before = steps
            for batch in self._given():
                yield batch
                steps -= 1
                if steps <= 0:
                    return
            if steps == before:
                return

    def trial(self, batch: Any, *, prepare: Callable[[Subject], None] | None = None) -> Step:
        """Return one recorded training step from the start on a batch of one's own."""
        if self.left() < 0:
            raise OutOfTime
        with preserved(self.subject), recording(self.subject) as witness:
            if prepare is not None:
                prepare(self.subject)
            self._one(witness, 0, 0, batch)
            return witness.step

    @contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Inside the block the set-up is as it is after some real steps."""
        with preserved(self.subject):
            for index, batch in enumerate(self._stream(steps, fixed=False)):
                if self.left() < 0:
                    raise OutOfTime
                self.train(batch, index)
            yield

    # ---- what was read ----

    @cached_property
    def batches(self) -> list[Any]:
        """The batches whose tensors were kept."""
        return [step.batch for step in self.seen.steps if step.batch is not None]

    @cached_property
    def first(self) -> Step | None:
        """The first step."""
        return self.seen.steps[0] if self.seen.steps else None

    @cached_property
    def call(self) -> Call | None:
        """The call whose output the loss took: the last one before the loss that gave a part of it."""
        return main_call(self.first) if self.first is not None else None

    @property
    def output(self) -> Tensor | None:
        """The first floating-point tensor of the first step's output."""
        return leading(self.call.output) if self.call is not None else None

    @cached_property
    def last_operation(self) -> str:
        """The operation that made the output, behind those that only hand it on."""
        out = leading(self.forward(grad=True))
        return last_operation(out) if out is not None else ""

    @cached_property
    def target(self) -> Tensor | None:
        """What the first step's output was compared with."""
        return target_of(self.first) if self.first is not None else None

    @cached_property
    def input(self) -> Tensor | None:
        """The first tensor that the model was given at the first step."""
        given = tensors_in((self.call.args, self.call.kwargs)) if self.call is not None else []
        return given[0] if given else None

    @cached_property
    def places(self) -> tuple[int, int]:
        """Where among a batch's tensors input and target stand; -1 where they are not the batch's own."""
        found = tensors_in(self.first.batch) if self.first is not None else []

        def place(wanted: Tensor | None, usual: int) -> int:
            if wanted is None or not found:
                return -1
            own = [i for i, t in enumerate(found) if t is wanted or t.data_ptr() == wanted.data_ptr()]
            like = [
                i
                for i, t in enumerate(found)
                if t.numel() == wanted.numel()
                and torch.equal(t.detach().cpu().double().flatten(), wanted.detach().cpu().double().flatten())
            ]
            return (own or like or [usual])[0]

        x, y = place(self.input, 0), place(self.target, len(found) - 1)
        return x, (-1 if x == y and len(found) == 1 else y)

    @property
    def coupled(self) -> bool:
        """Whether rows of the input may depend on each other: by design, or as parts of the one sample at a time."""
        loader = self.subject.loader
        one = isinstance(loader, DataLoader) and (loader.batch_sampler is None or loader.batch_size == 1)
        return self.subject.batch_coupled or one

    @cached_property
    def epoch(self) -> list[tuple[Any, Tensor | None, Tensor | None]]:
        """Every batch of an epoch with its input and target, as far as time and memory allow."""
        return list(self.read(self.subject.loader))

    @cached_property
    def held(self) -> list[tuple[Any, Tensor | None, Tensor | None]]:
        """Likewise of the validation set."""
        return list(self.read(self.subject.val_loader))

    def read(self, loader: Any) -> Iterator[tuple[Any, Tensor | None, Tensor | None]]:
        """Yield batch, input and target for one pass over a loader, within limits that are noted."""
        began, total, allowed = time.monotonic(), 0, max(1.0, self.left() / 8)
        x_place, y_place = self.places
        with preserved(self.subject), suppress(Exception):
            for number, batch in enumerate(batches_of(loader)):
                found = tensors_in(batch)
                total += sum(t.numel() * t.element_size() for t in found)
                if number and (total > EPOCH_BYTES or time.monotonic() - began > allowed):
                    self.seen.notes.append(f"data: no more than {counted(number, 'batch')} could be read")
                    return
                x = found[x_place] if 0 <= x_place < len(found) else None
                y = found[y_place] if 0 <= y_place < len(found) else None
                yield batch, x, y

    @cached_property
    def reading(self) -> Reading | None:
        """What the loss function does with the output, read from its own graph and gradient."""
        return read_loss(self)

    def forward(self, x: Tensor | None = None, *, batch: Any = None, evaluate: bool = True, grad: bool = False) -> Any:
        """Return the first step's output again, for another input if one is given; nothing is changed by it.

        What else the model is given (masks, its targets) is that of ``batch``; without one it is the first step's, its
        rows cut or repeated to as many samples as ``x`` has.
        """
        call = self.call
        if call is None or self.first is None:
            raise DxdyError("no forward of the model was seen")
        place, own, others = self.input, tensors_in(self.first.batch), tensors_in(batch)

        def given(t: Tensor) -> Tensor:
            if x is None or place is None or t is place:
                return t if x is None or place is None else x.to(t.device)
            for first, other in zip(own, others, strict=False):
                if same_tensor(t, first):
                    return other.to(t.device)
            if t.dim() and place.dim() and len(t) == len(place) != len(x):
                return t[torch.arange(len(x)) % len(t)]
            return t

        args, kwargs = mapped((call.args, call.kwargs), given)
        with preserved(self.subject), torch.set_grad_enabled(grad):
            if evaluate:
                self.subject.model.eval()
            return call.module(*args, **kwargs)

    def loss_of(self, output: Any, step: Step | None = None) -> Tensor | None:
        """Return the loss function's value for another output in the place of the recorded one."""
        step = step or self.first
        if step is None or not step.losses:
            return None
        loss, old, new = step.losses[-1], output_of(step), leading(output)
        if old is None or new is None:
            return None
        if not any(same_tensor(t, old) for t in tensors_in((loss.args, loss.kwargs))):
            return None
        args, kwargs = replaced((loss.args, loss.kwargs), old, new)
        with random_states():
            return loss.module(*args, **kwargs)


def usual_loss(model: nn.Module, loss_fn: Any, batch: Any) -> Tensor:
    """Return the loss of a batch in the usual forms: ``(x, y)``, a dictionary of keywords, or one tensor."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        output = model(**batch)
        if loss_fn is None:
            return output["loss"] if isinstance(output, dict) else output.loss
        labels = batch.get("labels", batch.get("label", batch.get("target")))
        return loss_fn(output, labels)
    if torch.is_tensor(batch):
        output = model(batch)
        if loss_fn is None:
            return output
        return loss_fn(output, batch)
    *inputs, target = batch
    output = model(*inputs)
    return loss_fn(output, target) if loss_fn is not None else output


def _values(module: Any) -> dict[str, Tensor]:
    if module is None:
        return {}
    values = module if isinstance(module, dict) else module.state_dict()
    return {n: v.detach().clone() for n, v in values.items() if torch.is_tensor(v)}


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def set_lr(factor: float) -> Callable[[Subject], None]:
    """Return what multiplies the learning rate of every group, and what a schedule makes the next ones from."""

    def prepare(subject: Subject) -> None:
        for optimizer in subject.all_optimizers:
            for group in optimizer.param_groups:
                group.update({name: group[name] * factor for name in RATES if name in group})
        if hasattr(subject.scheduler, "base_lrs"):
            subject.scheduler.base_lrs = [lr * factor for lr in subject.scheduler.base_lrs]

    return prepare


def lower_by(share: float, other: float, usual: float) -> bool:
    """Return whether a loss is lower than the usual one by a share of its size, of whichever sign it is."""
    return other < usual * (1 - math.copysign(share, usual))


def finite(values: Iterable[float]) -> list[float]:
    """Return the finite ones."""
    return [value for value in values if math.isfinite(value)]
