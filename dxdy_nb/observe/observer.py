"""``dx.watch``: any training loop under observation; the loop is not changed, and neither is its result."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.observe.batches import Loader
from dxdy_nb.observe.blackbox import BlackBox, Replay
from dxdy_nb.observe.events import Event
from dxdy_nb.observe.found import Found
from dxdy_nb.observe.hooks import Careful, listening
from dxdy_nb.observe.recorder import Recorder
from dxdy_nb.observe.trace import Trace, TraceWriter

if TYPE_CHECKING:
    import pandas as pd

    from dxdy_nb.diagnosis.report import Report
    from dxdy_nb.diagnosis.witness import Witness


def watch(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    out: str | Path | None = None,
    budget: float | None = 0.03,
) -> "Watch":
    """Observe whatever loop runs inside the ``with`` block, one record a step.

    Models, optimizers, schedulers, gradient scalers and loaders are found by themselves; with ``model`` or
    ``optimizer`` only these are observed.

    Parameters
    ----------
    model : the module whose forward the loop calls
    optimizer : the optimizer whose ``step`` ends a step
    out : a folder to keep the record in while it runs; without it the record stays in memory
    budget : the share of a step's time that monitoring may take; where complete statistics cost more, they are
        sampled, and ``steps["full"]`` says where they stand. None: every step is measured completely, and nothing is
        kept for ``diagnose`` (which needs models, optimizers and some batches of the first steps)

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
    >>> with watch() as w:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         loss = model(torch.ones(4, 2)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    >>> w.steps["effective_batch"].tolist()
    [4, 4, 4]
    >>> print(w)
    3 steps of Linear (3 parameters in 2 tensors) with SGD
    """
    out = None if out is None else Path(out)
    return Watch(model, optimizer, out, budget, blackbox=BlackBox(out), witness=budget is not None)


class Watch:
    """A loop under observation, and its tables afterwards (or meanwhile).

    ``steps`` and ``gradients`` are DataFrames. The gradients are those at the end of backward: before clipping, and
    without the scale of a ``GradScaler``. A row ends with an optimizer's step; where another optimizer holds
    parameters that the same backward reached, the row waits for that step until the next forward or backward. A step
    that a scaler leaves out has its row, with ``skipped``. A step's time runs from the fetch of its first batch to the
    end of its last optimizer's step, without what monitoring takes, so validation in between is in no step.

    What a row cannot tell: a step that the loop itself leaves out joins the next one. An optimizer that calls a
    closure several times has one row for all of them, with the gradients of the last. A step of an optimizer that
    ``torch.compile`` has compiled is not seen; neither is a loop that uses ``torch.autograd.grad`` alone. Where a
    library fetches batches a step ahead, the ids of bad samples are those of the batch fetched last.

    Parameters are those of ``watch``, and

    blackbox, replay : what keeps the last steps, and what puts recorded ones in the loop's place
    witness : whether the first steps are heard in such detail that ``diagnose`` can judge them
    stop_after : the number of steps after which ``Enough`` (a ``SystemExit`` with code 0) ends the loop
    first : the step from which the record in ``out`` goes on, where an earlier process made one
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        out: Path | None = None,
        budget: float | None = 0.03,
        *,
        blackbox: BlackBox | None = None,
        replay: Replay | None = None,
        stop_after: int | None = None,
        witness: bool = False,
        first: int | None = None,
    ) -> None:
        _check(model, optimizer)
        self.model, self.optimizer, self.out, self.budget = model, optimizer, out, budget
        self._found = Found(model, optimizer)
        self.blackbox: BlackBox | None = blackbox
        self._more: dict[str, Any] = {"blackbox": blackbox, "replay": replay, "stop_after": stop_after}
        self._first = first
        self._recorder: Recorder | None = None
        self._wants_witness = witness
        self._witness: Witness | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise DxdyError("watch: this one was used already. Call dx.watch(...) again for another loop.")
        writer = TraceWriter(self._found.layout, self.out, self._first)
        self._recorder = Recorder(self._found, writer, self.budget, **self._more, first=self._first or 0)
        if self._wants_witness:
            from dxdy_nb.diagnosis.witness import Witness, witnessing

            self._witness = self._cleanup.enter_context(witnessing(Witness()))
        # A replay's errors are for people: it is another script than the recorded one.
        told = self._recorder if self._more["replay"] else Careful(self._recorder, self._recorder.lost)
        self._cleanup.enter_context(listening(told))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._cleanup.__exit__(kind, error, where)
        self._known.end(error)

    def diagnose(self, time_limit: float = 40.0) -> "Report":
        """Return what is wrong with the loop: from what was heard of its first steps, and from those steps run again.

        Models, optimizers and random states are left as they are now. ``time_limit`` is in seconds.

        Raises
        ------
        DxdyError
            The loop is still under way; or every step was measured in full (``budget=None``), and nothing kept that
            a judgement needs.
        """
        from dxdy_nb.diagnosis.recorded import completed
        from dxdy_nb.diagnosis.watched import judge

        if self.active:
            raise DxdyError("diagnose: the loop is still watched. Call it behind the block: with dx.watch() as w: ...")
        if self._witness is None:
            raise DxdyError(
                "diagnose: this watch kept only numbers (budget=None). Watch with a budget, or call "
                "dx.diagnose(model=..., loss_fn=..., loader=..., optimizer=...)."
            )
        report, seen = judge(self._witness, time_limit), self._witness.seen
        return completed(report, self, len(seen.updates) or len(seen.steps))

    @property
    def _known(self) -> Recorder:
        if self._recorder is None:
            raise DxdyError("watch: nothing was observed yet. Train inside `with dx.watch(...) as w:`.")
        return self._recorder

    @property
    def active(self) -> bool:
        """True inside the ``with`` block."""
        return self._recorder is not None and self._recorder.active

    @property
    def trace(self) -> Trace:
        """All records so far."""
        self._known.flush()
        return self._known.writer.read()

    def since(self, step: int) -> Trace:
        """Return the records from a step on."""
        return self.trace.since(step)

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step.

        Loss (what the gradients are of: the sum over the backward calls that reached a parameter, since gradients were
        last dropped), lr (of the first group of parameters), grad_norm (before clipping), effective_batch (samples that
        one module has seen; the most of any outermost one), times in seconds, memory in bytes, skipped (a backward that
        no step followed), bad_samples (ids), full (whether all statistics were measured; else norm and nonfinite).
        """
        return self.trace.steps

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row for each step and parameter: mean, max, min, norm, nonzero, nonfinite, update_ratio.

        The update ratio is measured at every 10th step and NaN between. A parameter without a gradient is a row of
        NaN, and so is one that only an optimizer holds which had no part in the step; one whose gradient holds NaN
        has its count in ``nonfinite``.
        """
        return self.trace.gradients

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, in its order; of a long run the first and the last 20,000 events."""
        return self._known.events.all()

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return self._found.layout.sizes

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name, without what wraps them."""
        return self._found.models.alive()

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, without what wraps them."""
        return self._found.optimizers.alive()

    @property
    def schedulers(self) -> dict[str, LRScheduler]:
        """The schedulers that have stepped, by name."""
        return self._known.schedulers.alive()

    @property
    def scalers(self) -> dict[str, Any]:
        """The gradient scalers by name."""
        return self._known.scalers.alive()

    @property
    def loaders(self) -> dict[str, Loader]:
        """What is to be known of the loaders, by name."""
        return dict(self._known.loaders)

    def __str__(self) -> str:
        if self._recorder is None:
            return "nothing observed yet"
        sizes, count = self.sizes, self._recorder.count
        models = ", ".join(self._found.models.names()) or "no model"
        what = f"{models} ({counted(sum(sizes.values()), 'parameter')} in {counted(len(sizes), 'tensor')})"
        if count:
            return (
                f"{counted(count, 'step')} of {what} with {', '.join(self._found.optimizers.names()) or 'no optimizer'}"
            )
        seen = {event.kind for event in self.events}
        if "forward" in seen:
            return f"no step of {what}: it ran with gradients, and no backward was called that reached it"
        if "no_grad_forward" in seen:
            return f"no step of {what}: it ran without gradients only"
        return "no step: no model ran here, and no backward was called"


def _check(model: object, optimizer: object) -> None:
    if model is not None:
        if not isinstance(model, nn.Module):
            raise DxdyError(f"watch: expected a torch.nn.Module as model, got {type(model).__name__}.")
        parameters = list(model.parameters())
        if not parameters:
            raise DxdyError("watch: the model has no parameters, so there are no gradients to observe.")
        if any(map(is_lazy, parameters)):
            raise DxdyError("watch: the model has weights without a shape. Call it once on a batch, then watch it.")
        if any(p.is_meta for p in parameters):
            raise DxdyError("watch: the model is on the device 'meta', where tensors hold no numbers. Move it first.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise DxdyError(f"watch: expected a torch.optim.Optimizer as optimizer, got {type(optimizer).__name__}.")
