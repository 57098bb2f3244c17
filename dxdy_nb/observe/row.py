"""One step under way: what is noted of it until it is stored."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dxdy_nb.observe.statistics import Measured, any_nonfinite, total_norm
from dxdy_nb.observe.trace import Layout

GROWING = [0, 1, 2, 3]  # the columns that grow with the gradient: mean, max, min, norm


@dataclass
class Row:
    """What was seen of a step. A number that a GPU has not told yet is a tensor."""

    number: int = 0
    # Seconds.
    started: float = 0.0
    ended: float = 0.0  # when the last optimizer's step ended
    own: float = 0.0  # what monitoring took
    own_until: float = 0.0  # what it had taken when that step ended: it goes on after it
    data_time: float = 0.0
    forward_time: float = 0.0
    backward_time: float = 0.0
    update_time: float = 0.0
    step_time: float = 0.0
    copied: float = 0.0
    # Forward and backward.
    samples: dict[int, int] = field(default_factory=dict)  # that each outermost module (by id) has seen
    aside: bool = False  # whether a model ran without gradients: for validation, or for a training step's target
    batches: list[Any] = field(default_factory=list)  # those that name their samples
    backwards: int = 0
    losses: list[tuple[Any, Any]] = field(default_factory=list)  # each with its batch
    dropped: int = 0  # how many of them came before gradients were dropped; the others add up to the row's
    losses_elsewhere: list[tuple[Any, Any]] = field(default_factory=list)  # of backward calls that reached no parameter
    scale: Any = 1.0  # by which a scaler multiplied the loss
    # Gradients.
    touched: set[int] = field(default_factory=set)  # ids of parameters that backward brought a gradient
    unscaled: bool = False
    measured: Measured | None = None
    measured_scale: Any = 1.0
    full: bool = True
    layout: Layout | None = None
    parameters: list[Tensor] = field(default_factory=list)
    stamps: list[tuple[int, int] | None] = field(default_factory=list)  # of the gradients that were measured
    versions: list[int] = field(default_factory=list)  # of the weights then
    others: set[int] = field(default_factory=set)  # ids of parameters that only other optimizers hold
    missing: list[int] = field(default_factory=list)  # their places: their gradients are another step's
    # Update.
    weights: tuple[list[Tensor], list[Tensor]] | None = None  # parameters, and copies from before
    ratios: NDArray[np.float64] | None = None
    stepped: list[int] = field(default_factory=list)  # ids of optimizers
    outcomes: list[Any] = field(default_factory=list)  # whether each step was taken
    lr: float = math.nan
    items: int = 0
    memory: float = 0.0
    # What `settle` reads.
    rows: NDArray[np.float64] | None = None
    norm: float = math.nan
    nonfinite: bool = False
    loss: float = math.nan
    bad_batches: list[Any] = field(default_factory=list)  # with a loss that is not finite
    judged: bool = False  # whether black box and replay were told

    @property
    def begun(self) -> bool:
        """Whether a training forward or a backward belongs to it."""
        return bool(self.samples or self.backwards)

    def end(self, now: float) -> None:
        """Note when the last optimizer's step has ended."""
        self.ended, self.own_until = now, self.own

    def inside(self) -> float:
        """Return the seconds of what may happen within an optimizer's step and is counted elsewhere."""
        return self.forward_time + self.backward_time + self.own

    def settle(self) -> NDArray[np.float64]:
        """Return the statistics, and read the loss, both without a scaler's scale; this waits for a GPU."""
        assert self.measured is not None
        if self.rows is None:
            self.rows = self.measured.rows
            if (scale := float(self.measured_scale)) != 1:
                self.rows[:, GROWING] /= scale or math.nan  # a scaler halves its scale until it is 0
            self.norm, self.nonfinite = total_norm(self.rows), any_nonfinite(self.rows)
            # Another model's loss is not this one's; a lone one may be.
            scale = float(self.scale) or math.nan
            losses = [(float(loss) / scale, batch) for loss, batch in self.losses or self.losses_elsewhere]
            if len(losses) == len(self.batches):  # of which some may have been fetched ahead
                losses = [(loss, batch) for (loss, _), batch in zip(losses, self.batches, strict=True)]
            self.loss = sum(loss for loss, _ in losses[self.dropped :] or losses) if losses else math.nan
            self.bad_batches = [batch for loss, batch in losses if not math.isfinite(loss)]
        return self.rows

    def stamp(self) -> None:
        """Keep what tells whether gradients and weights were changed since."""
        self.stamps, self.versions = stamps(self.parameters), [version(p) for p in self.parameters]

    def gradients_changed(self) -> bool:
        """Return whether gradients were changed since they were stamped."""
        return self.stamps != stamps(self.parameters)

    def weights_changed(self) -> bool:
        """Return whether weights were changed since they were stamped."""
        return self.versions != [version(p) for p in self.parameters]

    @property
    def skipped(self) -> bool:
        """Whether no optimizer took its step; this waits for a GPU."""
        return not any(map(bool, self.outcomes))

    def spoilt(self) -> list[Any]:
        """Return the batches to blame for numbers that are not finite."""
        self.settle()
        if self.bad_batches or not self.nonfinite:
            return self.bad_batches
        # A scaler that left the step out blames its scale.
        return [] if self.skipped and float(self.scale) != 1 else self.batches

    def values(self) -> dict[str, float]:
        """Return the numbers of the table of steps, once it is settled."""
        return {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.norm,
            "effective_batch": max(self.samples.values(), default=0),
            "step_time": self.step_time,
            "data_time": self.data_time,
            "forward_time": self.forward_time,
            "backward_time": self.backward_time,
            "update_time": self.update_time,
            "memory": self.memory,
        }


def stamps(parameters: Iterable[Tensor]) -> list[tuple[int, int] | None]:
    """Return which tensors the gradients are, and how often each was changed."""
    return [None if (g := p.grad) is None else (id(g), version(g)) for p in parameters]


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed; 0 for one of inference mode, which does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor that several share (FSDP2)."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def kept(number: Tensor) -> Any:
    """Return a number's value, NaN on the device meta; on a GPU a copy, to be read when it is there."""
    number = number.detach()
    if number.is_meta:
        return math.nan
    return float(number) if number.is_cpu else number.clone()


def is_loss(value: Any) -> bool:
    """Return whether a backward begins at a real number; it may also begin at a tensor or at an edge of the graph."""
    return torch.is_tensor(value) and value.numel() == 1 and not value.is_complex()
