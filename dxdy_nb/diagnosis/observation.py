"""Some real steps of a training, recorded in detail: what was called with what, in which order, and what moved.

``dx.watch`` keeps numbers of every step of a long run. This keeps objects of a few steps: the tensors that went into
the model and the loss, which gradients were there when, and which weights changed at whose hands. Rules about event
order and object identity need no threshold.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dxdy_nb.diagnosis.sameness import same_tensor
from dxdy_nb.nested import tensors_in


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
    multiple: bool = False  # whether it is nothing but that value times a number
    strangers: tuple[tuple[int, ...], ...] = ()  # shapes of leaves that got a gradient, and are no parameters


@dataclass
class Root:
    """What a backward began at, as a function of the model's output: read from the graph between the two."""

    kind: str
    value: float
    saved: Any  # what its operation had kept
    direct: bool  # whether nothing but the loss stands between the two
    gradient: Tensor | None = None  # at the output


@dataclass
class Lost:
    """A loss that is not finite, as a backward began at it."""

    value: float
    operation: str  # the first on the way to it whose result cannot be finite, where that can be told
    parameters: tuple[str, ...]  # that are not finite


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
    undone: bool  # they are again about what they were at the first update, or unlike any before
    dirty: tuple[str, ...]  # gradients that still hold those of an earlier update
    cleared: tuple[str, ...]  # gradients that a backward gave, and that were gone before this update
    training: bool = True
    state_steps: float = math.nan  # the optimizer's own count, where it has one
    scaled: bool = False  # gradients still multiplied by the scaler's scale
    closure: bool = False  # whether it was given what computes the loss


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
    root: Root | None = None
    key: int = 0  # of its batch: equal batches have equal keys
    clips: list[tuple[float, float, bool]] = field(default_factory=list)  # norm, bound, whether still scaled
    value: float = math.nan  # of the loss
    lost: Lost | None = None
    misfed: tuple[str, str] | None = None  # a cause, and its evidence: what a loss of it is given
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
        """All events in order: forward, loss, backward, zero_grad, clip, unscale, step, scheduler and more."""
        return [event for step in self.steps for event in step.events]

    @property
    def updates(self) -> list[Update]:
        """All optimizer steps in order."""
        return [update for step in self.steps for update in step.updates]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.value for step in self.steps]


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


def output_of(step: Step) -> Tensor | None:
    """Return the tensor that the loss of a step is most likely about."""
    call = main_call(step)
    return leading(call.output) if call is not None else None


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
