"""What only the record of a whole loop tells, of the steps behind the first ones: modes, losses, gradients."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch.nn.parameter import is_lazy

from dxdy_nb.diagnosis.lost import before, not_finite
from dxdy_nb.diagnosis.probes import FEW
from dxdy_nb.diagnosis.report import Finding, Report, found, listed
from dxdy_nb.diagnosis.reproduce import cares, trained_by
from dxdy_nb.diagnosis.sequel import owned_by
from dxdy_nb.observe.blackbox import SKIPS

if TYPE_CHECKING:
    from dxdy_nb.observe.observer import Watch


def completed(report: Report, watch: "Watch", known: int) -> Report:
    """Return the report on the ``known`` first updates of a watched loop, with what its whole record adds.

    An error that was found there stands for what follows from it: then losses and gradients are not asked again.
    """
    in_eval = {error.cause for error in report.errors} & {"left-in-eval", "eval-mode-stuck"}
    more = [*(() if in_eval else _modes(watch))]
    more += [] if report.errors else [*_gradients(watch)] or [*_losses(watch)]
    every, updates = len(watch.steps), [event for event in watch.events if event.kind == "step"]
    known = updates[min(known, len(updates)) - 1].step + 1 if updates else known
    if report.saw and known < every:
        whole = "modes" if report.errors else "losses, gradients and modes"
        told = f"the first {known} of {every} steps; of the later ones only {whole}, as they were recorded"
        report = replace(report, saw={**report.saw, "judged": told})
    return replace(report, findings=(*report.findings, *more))


def _modes(watch: "Watch") -> Iterator[Finding]:
    """A model trains in eval mode to the end, and trained in train mode before."""
    events = watch.events
    for name, model in watch.models.items():
        weights = {id(p) for p in model.parameters()}
        owners = {of: held for of, one in watch.optimizers.items() if weights & (held := owned_by(one))}
        stepped = {event.step: event.where for event in events if event.kind == "step" and event.where in owners}
        # The last forward before a step: one before it may be a validation's, with gradients.
        modes = {e.step: e.value for e in events if e.kind == "forward" and e.where == name and e.step in stepped}
        last = max((step for step, training in modes.items() if training), default=math.inf)
        later = [step for step in modes if step > last]
        held = set().union(*(owners[stepped[step]] for step in later))
        modal = (m for m in model.named_modules() if cares(m[1]))
        if len(later) >= FEW and any(p.requires_grad and id(p) in held for m in modal for p in trained_by(model, *m)):
            between = {*range(int(last) + 1, min(later))} - {event.step for event in events}  # of a long run not kept
            until = "at" if between else "up to"
            yield found(
                "eval-mode-stuck",
                "model",
                f"{name} trained in train mode {until} step {last}, and in eval mode from step {min(later)} to "
                f"{max(later)}, the last: dropout is off and BatchNorm does not learn",
            )


def _begun(watch: "Watch") -> set[int]:
    """Return the steps whose backward began at a loss; where any did, with those whose events were not kept."""
    events = watch.events
    begun = {event.step for event in events if event.kind == "loss"}
    return begun | ({*watch.steps.index} - {event.step for event in events} if begun else set())


def _losses(watch: "Watch") -> Iterator[Finding]:
    """A loss is not finite; a step that a scaler left out blames its scale."""
    table, events = watch.steps, watch.events
    left_out = table["skipped"] & ~table.index.isin({event.step for event in events})  # those that are not kept
    left_out |= table.index.isin({event.step for event in events if event.kind == "skip"})
    losses = table["loss"]
    bad = ~np.isfinite(losses) & losses.index.isin(_begun(watch))  # else a backward did not begin at a number
    if any(event.kind == "scale" for event in events):
        bad &= ~np.isfinite(table["grad_norm"])  # else only its multiple was too large
        bad &= ~left_out | (bad.tail(SKIPS).sum() == SKIPS)
    if not bad.any():
        return
    step = int(bad.idxmax())
    told, ids, earlier = [f"step {step}: the loss is {losses[step]}"], table["bad_samples"][step], table.index < step
    told += [f"samples {listed(ids, 8)}"] if ids else []
    told += before([*losses[earlier]])
    told += [f"the gradient's norm before it: {norm:.4g}" for norm in table["grad_norm"][earlier].tail(1)]
    yield not_finite([*told, "its tensors were not looked at: it lies behind the first steps, or in a closure"])


def _gradients(watch: "Watch") -> Iterator[Finding]:
    """Weights are not finite at the end, and the first gradient that was not came of a loss that was, or of none."""
    table, events = watch.steps, watch.events
    weights = (p for m in watch.models.values() for p in m.parameters() if not (is_lazy(p) or p.is_meta))
    spoilt = any(p.requires_grad and not bool(p.isfinite().all()) for p in weights)
    if not spoilt or any(event.kind == "scale" for event in events):
        return
    lost = table.index[~np.isfinite(table["grad_norm"])]
    if not len(lost):
        return
    rows = watch.since(int(lost[0])).gradients
    bad = [(int(step), str(name)) for step, name in rows[rows["nonfinite"] > 0].index]
    if not bad:
        return
    step = bad[0][0]
    names, loss = [name for at, name in bad if at == step], table["loss"][step]
    heard = step in _begun(watch)
    if heard and not math.isfinite(loss):
        return
    told = [f"step {step}: {f'the loss is {loss:.4g}' if heard else 'no loss was heard'}"]
    told += [f"the gradient of {listed(names)} is not finite", "weights are not finite since"]
    told += before([*table["loss"][table.index < step]])
    yield found("nan-gradient", listed(names), "; ".join(told))
