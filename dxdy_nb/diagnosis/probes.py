"""Experiments on the reader's own set-up: the same steps again with one thing changed, all of it undone afterwards."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dxdy_nb.diagnosis.observation import Call, Observation, Recorder, Step, mapped, recording, tensors_in
from dxdy_nb.diagnosis.subject import Subject, preserved, same_randomness
from dxdy_nb.errors import DxdyError

EPOCH_BYTES = 256 * 2**20  # of an epoch that are kept for reading
FEWEST, MOST = 4, 24  # steps that are watched
EPOCHS = 3


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

    def left(self) -> float:
        """Return the seconds that may still be used."""
        return self.deadline - time.monotonic()

    # ---- the steps themselves ----

    def observe(self) -> Observation:
        """Run the real steps once, record them, and put everything back."""
        with preserved(self.subject), recording(self.subject) as recorder:
            self.seen = recorder.seen
            before = {name: p.detach().clone() for name, p in self.subject.parameters.items()}
            buffers = {name: b.detach().clone() for name, b in self.subject.model.named_buffers()}
            ema = _values(self.subject.ema_model)
            self._epochs(recorder)
            now = self.subject.parameters
            self.seen.moved = {n for n, p in before.items() if n not in now or not _equal(p, now[n].detach())}
            self.seen.final = self._facts(buffers, ema)
            self.initial = before
        return self.seen

    def _facts(self, buffers: dict[str, Tensor], ema: dict[str, Tensor]) -> dict[str, Any]:
        """Return what can only be seen at the end of the steps, while it is the end."""
        now = dict(self.subject.model.named_buffers())
        moved = [n for n, b in buffers.items() if n in now and not _equal(b, now[n])]
        after = _values(self.subject.ema_model)
        facts: dict[str, Any] = {"buffers": moved, "modes": _modes(self.subject.model)}
        facts["ema_still"] = [n for n, v in ema.items() if _equal(v, after[n])]
        if self.subject.validate is not None:
            with suppress(Exception), same_randomness():
                marks = {n: b.detach().clone() for n, b in self.subject.model.named_buffers()}
                self.subject.validate()
                now = dict(self.subject.model.named_buffers())
                facts["validated"] = [n for n, b in marks.items() if not _equal(b, now[n])]
        return facts

    def _epochs(self, recorder: Recorder) -> None:
        index, most, began = 0, self.steps or MOST, time.monotonic()
        share = self.left() / 3
        for epoch in range(EPOCHS):
            found = False
            for batch in self._batches():
                found = True
                if not self._one(recorder, index, epoch, batch):
                    return
                index += 1
                if index >= most or (index >= FEWEST and time.monotonic() - began > share):
                    return
            if not found:
                return
            self.seen.epochs += 1
            recorder.step.events.append("epoch")
            if self.subject.on_epoch_end is not None and not self._epoch_end(recorder):
                return

    def _epoch_end(self, recorder: Recorder) -> bool:
        buffers = {n: b.detach().clone() for n, b in self.subject.model.named_buffers()}
        assert self.subject.on_epoch_end is not None
        try:
            self.subject.on_epoch_end()
        except Exception as error:
            self.seen.error, self.seen.error_place = error, "on_epoch_end"
            return False
        now = dict(self.subject.model.named_buffers())
        if any(n not in now or not _equal(b, now[n]) for n, b in buffers.items()):
            recorder.step.events.append("buffers")
        return True

    def _batches(self) -> Iterator[Any]:
        try:
            yield from self.subject.loader or ()
        except Exception as error:
            self.seen.error, self.seen.error_place = error, "loader"

    def _one(self, recorder: Recorder, index: int, epoch: int, batch: Any) -> bool:
        recorder.begin(index, epoch, batch)
        warned = len(recorder.caught)
        value = None
        try:
            value = self.train(batch, index, recorder)
        except Exception as error:
            recorder.step.error = error
        recorder.step.warned = [str(w.message) for w in recorder.caught[warned:]]
        recorder.end(value)
        return recorder.step.error is None

    def train(self, batch: Any, index: int = 0, recorder: Recorder | None = None) -> Any:
        """Run one training step on a batch: the reader's own, or the usual one."""
        subject = self.subject
        loss_fn = subject.loss_fn
        if recorder is not None and loss_fn is not None:
            loss_fn = recorder.wrapped_loss(loss_fn)
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
        with preserved(self.subject), recording(self.subject) as recorder, torch.enable_grad():
            if prepare is not None:
                prepare(self.subject)
            for index, given in enumerate(self._stream(steps, fixed)):
                recorder.begin(index, 0, given)
                try:
                    value = self.train(batch(given) if batch else given, index, recorder)
                except Exception:
                    losses.append(math.nan)
                    break
                recorder.end(value)
                losses.append(recorder.step.value)
        return losses

    def _stream(self, steps: int, fixed: bool) -> Iterator[Any]:
        if fixed:
            yield from [self.batches[0]] * steps
            return
        while steps > 0:
            before = steps
            for batch in self.subject.loader or ():
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
        with preserved(self.subject), recording(self.subject) as recorder:
            if prepare is not None:
                prepare(self.subject)
            self._one(recorder, 0, 0, batch)
            return recorder.step

    @contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Inside the block the set-up is as it is after some real steps."""
        with preserved(self.subject):
            for index, batch in enumerate(self._stream(steps, fixed=False)):
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

    @cached_property
    def epoch(self) -> list[tuple[Any, Tensor | None, Tensor | None]]:
        """Every batch of an epoch with its input and target, as far as time and memory allow."""
        return list(self.read(self.subject.loader))

    def read(self, loader: Any) -> Iterator[tuple[Any, Tensor | None, Tensor | None]]:
        """Yield batch, input and target for one pass over a loader, within limits that are noted."""
        began, total, allowed = time.monotonic(), 0, max(1.0, self.left() / 8)
        x_place, y_place = self.places
        with preserved(self.subject), suppress(Exception):
            for number, batch in enumerate(loader or ()):
                found = tensors_in(batch)
                total += sum(t.numel() * t.element_size() for t in found)
                if number and (total > EPOCH_BYTES or time.monotonic() - began > allowed):
                    self.seen.notes.append(f"data: only the first {number} batches were read")
                    return
                x = found[x_place] if 0 <= x_place < len(found) else None
                y = found[y_place] if 0 <= y_place < len(found) else None
                yield batch, x, y

    @cached_property
    def reading(self) -> "Reading | None":
        """What the loss function does with the output, read from its own graph and gradient."""
        return read_loss(self)

    def forward(self, x: Tensor | None = None, *, evaluate: bool = True, grad: bool = False) -> Any:
        """Return the first step's output again, for another input if one is given; nothing is changed by it."""
        call = self.call
        if call is None:
            raise DxdyError("no forward of the model was seen")
        place = self.input
        args, kwargs = mapped((call.args, call.kwargs), lambda t: x if x is not None and t is place else t)
        with preserved(self.subject), torch.set_grad_enabled(grad):
            if evaluate:
                self.subject.model.eval()
            return call.module(*args, **kwargs)

    def loss_of(self, output: Any, step: Step | None = None) -> Tensor | None:
        """Return the loss function's value for another output in the place of the recorded one."""
        step = step or self.first
        if step is None or not step.losses:
            return None
        loss, call = step.losses[-1], main_call(step)
        old = leading(call.output) if call is not None else None
        new = leading(output)
        if old is None or new is None:
            return None
        args, kwargs = mapped((loss.args, loss.kwargs), lambda t: new if same_tensor(t, old) else t)
        with same_randomness():
            return loss.module(*args, **kwargs)


@dataclass(frozen=True)
class Reading:
    """The loss of the first step as a function of the output alone: its kind, and its gradient at the output."""

    kind: str  # cross_entropy, soft_cross_entropy, nll, bce, bce_logits, mse, l1, kl_div, or "" for a formula
    node: Any  # the operation it was read from
    output: Tensor
    value: float
    gradient: Tensor | None
    target: Tensor | None


# The operations that torch's losses end in, and what they are called.
KINDS = {
    "NllLossBackward0": "nll",
    "NllLoss2DBackward0": "nll",
    "BinaryCrossEntropyWithLogitsBackward0": "bce_logits",
    "BinaryCrossEntropyBackward0": "bce",
    "MseLossBackward0": "mse",
    "SmoothL1LossBackward0": "l1",
    "HuberLossBackward0": "l1",
    "KlDivBackward0": "kl_div",
}


def read_loss(experiment: Experiment) -> Reading | None:
    """Return the reading of the first step's loss; None where the loss function was not seen at work."""
    output = experiment.output
    if output is None or not output.is_floating_point():
        return None
    leaf = output.detach().clone().requires_grad_()
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = experiment.loss_of(leaf)
    if loss is None or not torch.is_tensor(loss) or loss.numel() != 1:
        return None
    if loss.grad_fn is None:
        return Reading("", None, leaf, float(loss.detach()), None, experiment.target)
    nodes = graph_nodes(loss)
    node = next((n for n in nodes if type(n).__name__ in KINDS), None)
    kind = KINDS.get(type(node).__name__, "")
    names = {type(n).__name__ for n in nodes}
    if kind == "nll" and "LogSoftmaxBackward0" in names:
        kind = "cross_entropy"
    elif not kind and "LogSoftmaxBackward0" in names:
        kind = "soft_cross_entropy"
    elif not kind and "AbsBackward0" in names and names <= {"AbsBackward0", "SubBackward0", "MeanBackward0"}:
        kind = "l1"
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)
    return Reading(kind, node, leaf.detach(), float(loss.detach()), gradient, experiment.target)


def graph_nodes(tensor: Tensor) -> list[Any]:
    """Return the nodes of the graph behind a tensor, from it on, breadth first."""
    seen, order, todo = set(), [], [tensor.grad_fn]
    while todo:
        node = todo.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        order.append(node)
        todo += [child for child, _ in node.next_functions]
    return order


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


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory seen in the same way (one may be cut from the graph)."""
    return a is b or (
        a.layout == b.layout == torch.strided
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.numel() > 0
    )


def leading(output: Any) -> Tensor | None:
    """Return what the loss is most likely about: ``logits`` where there are some, else the first float tensor."""
    if hasattr(output, "logits") and torch.is_tensor(output.logits):
        return output.logits
    if isinstance(output, dict) and torch.is_tensor(output.get("logits")):
        return output["logits"]
    return next((t for t in tensors_in(output) if t.is_floating_point()), None)


def main_call(step: Step) -> Call | None:
    """Return the call of a step whose output the loss took, else the first one."""
    if not step.calls:
        return None
    for loss in reversed(step.losses):
        for call in reversed(step.calls):
            for out in tensors_in(call.output):
                if any(same_tensor(out, given) for given in tensors_in((loss.args, loss.kwargs))):
                    return call
    return step.calls[0]


def target_of(step: Step) -> Tensor | None:
    """Return the tensor that the loss compared the output with, or the batch's own last tensor."""
    if step.losses:
        outputs = [t for call in step.calls for t in tensors_in(call.output)]
        for given in tensors_in((step.losses[-1].args[1:], step.losses[-1].kwargs)):
            if not any(same_tensor(given, out) for out in outputs):
                return given
        return None
    found = tensors_in(step.batch)
    return found[-1] if len(found) > 1 else None


def _values(module: Any) -> dict[str, Tensor]:
    if module is None:
        return {}
    values = module if isinstance(module, dict) else module.state_dict()
    return {n: v.detach().clone() for n, v in values.items() if torch.is_tensor(v)}


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same, NaN being equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def set_lr(factor: float) -> Callable[[Subject], None]:
    """Return what multiplies the learning rate of every group."""

    def prepare(subject: Subject) -> None:
        for optimizer in subject.all_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    return prepare


def finite(values: Iterable[float]) -> list[float]:
    """Return the finite ones."""
    return [value for value in values if math.isfinite(value)]
