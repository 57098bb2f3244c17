"""The reader's own gradient, checked from both ends: one entry by hand, and the whole model by finite differences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dxdy_nb.autograd.check import Check, check_gradients
from dxdy_nb.diagnosis.observation import Call, leading, main_call
from dxdy_nb.diagnosis.probes import Experiment, usual_loss
from dxdy_nb.diagnosis.sameness import same_tensor
from dxdy_nb.diagnosis.subject import preserved
from dxdy_nb.errors import DxdyError
from dxdy_nb.nested import mapped, tensors_in

SAME_LOSS = 1e-4  # relative: whether a formula is the loss that was computed
SCREENS = 60  # forward and backward passes in float64 that a screen may take, as a guess of its time


@dataclass(frozen=True)
class HandCase:
    """One gradient twice: by a formula and by autograd. ``error`` is their largest difference, relative to both."""

    where: str
    formula: str
    entry: int
    by_hand: float
    by_autograd: float
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the two agree as far as the arithmetic allows."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.where}[{self.entry}] = {self.formula}: by hand {self.by_hand:.6g}, by autograd "
            f"{self.by_autograd:.6g}; largest difference of all entries {self.error:.1e} of the largest"
        )


def hand_case(experiment: Experiment) -> HandCase | None:
    """Return the bias gradient of the last layer twice, or that of the output where no layer with a bias ends there.

    By hand it is a formula in the output and the target alone: (softmax - onehot) / n for cross-entropy,
    (sigmoid - target) / n for binary cross-entropy on logits, 2 (output - target) / n for the squared error. A formula
    counts where it gives the value of the loss, too, here and for other outputs. None: no formula does.
    """
    call, step = experiment.call, experiment.first
    if call is None or step is None or not step.losses or experiment.target is None:
        return None
    ends: list[tuple[str, nn.Parameter, Tensor, int]] = []

    def note(name: str, module: nn.Module) -> Any:
        bias = getattr(module, "bias", None)
        channel = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and bias is not None and bias.requires_grad:
            return module.register_forward_hook(lambda _m, _i, out: ends.append((name, bias, out, channel)))
        return None

    with preserved(experiment.subject):
        hooks = [note(name, module) for name, module in experiment.subject.model.named_modules()]
        try:
            for p in experiment.subject.parameters.values():
                p.grad = None
            output = leading(call.module(*call.args, **call.kwargs))
            if output is None or not output.requires_grad:
                return None
            output.retain_grad()
            loss = experiment.loss_of(output)
            if loss is None or loss.numel() != 1:
                return None
            loss.backward()
            # Near the chance level many losses are alike, as with and without label smoothing: these are far from it.
            other = (3 * torch.randn_like(output)).detach()
            elsewhere = experiment.loss_of(other)
        finally:
            for hook in filter(None, hooks):
                hook.remove()
        known = {} if elsewhere is None else dict(_formulas(other, experiment.target, float(elsewhere)))
        for formula, slope in _formulas(output.detach(), experiment.target, float(loss.detach())):
            if formula not in known:
                continue
            last = next((end for end in reversed(ends) if same_tensor(end[2], output)), None)
            if last is None:
                return _compared("dloss/doutput", formula, slope, output.grad)
            name, bias, out, channel = last
            over = [axis for axis in range(out.dim()) if axis != channel % out.dim()]
            return _compared(f"{name or 'model'}.bias.grad", formula, slope.reshape(out.shape).sum(over), bias.grad)
    return None


def _compared(where: str, formula: str, by_hand: Tensor, by_autograd: Tensor | None) -> HandCase:
    hand = by_hand.double().flatten().cpu()
    auto = torch.zeros_like(hand) if by_autograd is None else by_autograd.detach().double().flatten().cpu()
    size = max(float(hand.abs().max()), float(auto.abs().max()), 1e-30)
    entry = int(hand.abs().argmax())
    dtype = torch.float32 if by_autograd is None else by_autograd.dtype
    tolerance = math.sqrt(torch.finfo(dtype).eps)
    error = float((hand - auto).abs().max()) / size
    return HandCase(where, formula, entry, float(hand[entry]), float(auto[entry]), error, tolerance)


def _formulas(output: Tensor, target: Tensor, value: float) -> Iterator[tuple[str, Tensor]]:
    """Yield what a loss is by its formula, and the formula's slope at the output, where it gives the loss's value."""
    out, y = output.double(), target.detach().to(output.device)
    if not y.is_floating_point():
        for axis in {1 % out.dim(), out.dim() - 1}:
            rows = out.movedim(axis, -1).reshape(-1, out.shape[axis])
            given = y.flatten().long()
            counted = given >= 0  # ignored ones are -100
            if len(given) != len(rows) or not counted.any() or int(given.max()) >= rows.shape[1]:
                continue
            p, hot = rows.softmax(-1), nn.functional.one_hot(given.clamp(min=0), rows.shape[1])
            loss = -(p.log() * hot).sum(-1)[counted].mean()
            if _near(loss, value):
                slope = (p - hot) * counted[:, None] / counted.sum()
                shape = out.movedim(axis, -1).shape
                yield "mean(softmax - onehot)", slope.reshape(shape).movedim(-1, axis)
    elif y.numel() == out.numel():
        y = y.double().reshape(out.shape)
        if _near((out - y).square().mean(), value):
            yield "mean of 2 (output - target)", 2 * (out - y) / out.numel()
        if _near((nn.functional.softplus(out) - out * y).mean(), value):
            yield "mean(sigmoid - target)", (out.sigmoid() - y) / out.numel()


def _near(a: Tensor, b: float) -> bool:
    return abs(float(a) - b) <= SAME_LOSS * max(abs(b), 1e-12)


class _Whole(nn.Module):
    """A recorded step's loss as a module of what was given: its forward, and its loss of that output."""

    def __init__(self, module: nn.Module, loss_fn: Any, places: list[int | None]) -> None:
        super().__init__()
        self.module, self.loss_fn, self.places = module, loss_fn, places

    def forward(self, given: Any) -> Tensor:
        args, kwargs, loss_args, loss_kwargs = given
        found = tensors_in(self.module(*args, **kwargs))
        turn = iter(self.places)

        def fill(old: Tensor) -> Tensor:
            place = next(turn)
            return old if place is None else found[place].reshape(old.shape)

        loss_args, loss_kwargs = mapped((loss_args, loss_kwargs), fill)
        return self.loss_fn(*loss_args, **loss_kwargs)


class _Usual(nn.Module):
    """The loss of a batch in one of the usual forms."""

    def __init__(self, module: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.module, self.loss_fn = module, loss_fn

    def forward(self, batch: Any) -> Tensor:
        return usual_loss(self.module, self.loss_fn, batch)


def screen(experiment: Experiment, seconds: float) -> Check:
    """Return whether autograd's gradient of the first step's loss is that of finite differences, for every parameter.

    ``seconds`` is what one forward and backward takes.

    Raises
    ------
    DxdyError
        There is no time, or the model cannot be computed in float64.
    """
    step = experiment.first
    if step is None or step.batch is None:
        raise DxdyError("no step was seen")
    if SCREENS * seconds > experiment.left():
        raise DxdyError(f"about {SCREENS} passes of {seconds:.2g} s take longer than the time that is left")
    call, subject = main_call(step), experiment.subject
    whole: nn.Module = _Usual(subject.model, subject.loss_fn)
    given = step.batch
    if subject.train_step is not None and step.losses and call is not None:
        whole, given = _again(call, step.losses[-1])
    check = check_gradients(model=whole, loss_fn=_itself, batch=(given, None))
    rows = tuple(replace(row, name=row.name.removeprefix("module.")) for row in check.rows)
    return replace(check, worst=check.worst.removeprefix("module."), rows=rows)


def _itself(loss: Tensor, _: None) -> Tensor:
    return loss


def _again(call: Call, loss: Call) -> tuple[nn.Module, Any]:
    """Return a recorded forward and loss as one module, and what it is given."""
    outputs = tensors_in(call.output)
    given = tensors_in((loss.args, loss.kwargs))
    places = [next((i for i, out in enumerate(outputs) if same_tensor(t, out)), None) for t in given]
    if not any(place is not None for place in places):
        raise DxdyError("the loss was given something else than the model's output")
    return _Whole(call.module, loss.module, places), (call.args, call.kwargs, loss.args, loss.kwargs)
