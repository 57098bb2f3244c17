"""Whether the learning rate goes the way that its schedule was made for."""

import math
from collections.abc import Iterator

from torch.optim import lr_scheduler

from dxdy_nb.diagnosis.probes import FEW, Experiment, finite
from dxdy_nb.diagnosis.report import Finding, found

STEPWISE = (lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ExponentialLR)  # mostly for epochs


def lr_is_no_number(experiment: Experiment) -> Iterator[Finding]:
    """A learning rate is NaN or infinite."""
    for place, update in enumerate(experiment.seen.updates):
        bad = [i for i, lr in enumerate(update.lrs) if not math.isfinite(lr)]
        known = [i for i in bad if "lr" in update.optimizer.param_groups[i]]
        if known:
            yield found(
                "warmup-zero-division",
                f"param_groups[{known[0]}]",
                f"update {place} was made with the learning rate {update.lrs[known[0]]}",
            )
            return


def scheduler_first(experiment: Experiment) -> Iterator[Finding]:
    """The schedule moved on before the first update, so the first learning rate was never used."""
    events = [e for e in experiment.seen.events if e in ("scheduler", "step", "skip")]
    if "step" in events and events[:1] == ["scheduler"]:
        yield found(
            "scheduler-before-optimizer",
            "the training step",
            f"scheduler.step() ran before the first optimizer.step(); the first update used {_first_lr(experiment)}",
        )


def _first_lr(experiment: Experiment) -> str:
    updates = experiment.seen.updates
    return f"lr {updates[0].lrs[0]:.3g}" if updates and updates[0].lrs else "another lr"


def schedule_pace(experiment: Experiment) -> Iterator[Finding]:
    """A schedule for epochs is stepped with every batch; or one runs on after its end."""
    updates, scheduler = experiment.seen.updates, experiment.subject.scheduler
    lrs = [max(finite(u.lrs), default=math.nan) for u in updates]
    steps = experiment.seen.events.count("scheduler")
    if len(lrs) < FEW or steps < len(lrs) - 1:
        return
    peak = max(finite(lrs), default=0.0)
    low = next((place for place, lr in enumerate(lrs) if place > lrs.index(peak) and lr < 1e-3 * peak), 0)
    if isinstance(scheduler, STEPWISE) and low and experiment.seen.epochs <= 3:
        yield found(
            "scheduler-per-batch",
            type(scheduler).__name__,
            f"scheduler.step() ran {steps} times for {len(lrs)} updates: lr {peak:.3g} → {lrs[low]:.3g} at update "
            f"{low}",
            severity="hint" if isinstance(scheduler, lr_scheduler.ExponentialLR) else "error",  # it is used for both
        )
    horizon = getattr(scheduler, "T_max", None)
    low = lrs.index(min(lrs))
    if (
        isinstance(scheduler, lr_scheduler.CosineAnnealingLR)
        and horizon
        and len(lrs) > horizon
        and lrs[-1] > 2 * lrs[low]
    ):
        yield found(
            "cosine-past-tmax",
            type(scheduler).__name__,
            f"{steps} scheduler steps for T_max={horizon}: lr fell to {lrs[low]:.3g} and rose to {lrs[-1]:.3g}",
            severity="hint",
        )
