"""A loss that is not finite, and that no rule explains: what is known of the step at which it was lost."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dxdy_nb.diagnosis.observation import main_call
from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.report import Finding, found, listed
from dxdy_nb.nested import tensors_in
from dxdy_nb.observe.blackbox import SKIPS

if TYPE_CHECKING:
    from dxdy_nb.observe.observer import Watch

LAST = 3  # losses before it that are told
FIX = (
    "print what this loss is made of at that step: a logarithm, exponential or division needs a bound (log_softmax, "
    "logsumexp, clamp); where the losses before it grow, lower the rate (lesson 05)"
)
CHECK = "print(torch.isfinite(model(x)).all(), [n for n, p in model.named_parameters() if not p.isfinite().all()])"


def heard(experiment: Experiment) -> Iterator[Finding]:
    """A backward of the first steps began at a loss that is not finite."""
    steps = experiment.seen.steps
    step = next((s for s in steps if s.lost is not None), None)
    if step is None or (lost := step.lost) is None:
        return
    call = main_call(step)
    told, finite = [f"step {step.index}: the loss is {lost.value}"], {}
    given, output = ((call.args, call.kwargs), call.output) if call is not None else (None, None)
    for name, part in {"inputs and targets": (step.batch, given), "outputs": output}.items():
        sizes = [float(t.detach().abs().max()) for t in tensors_in(part) if t.is_floating_point() and t.numel()]
        if sizes:
            finite[name] = all(map(math.isfinite, sizes))
            told.append(f"{name} are finite, up to {max(sizes):.3g}" if finite[name] else f"{name} are not finite")
    told.append("parameters are " + (f"not finite: {listed(lost.parameters)}" if lost.parameters else "finite"))
    operation = lost.operation if finite.get("outputs", True) else ""
    told += [f"the first operation whose result is not finite is {operation}"] if operation else []
    told += _before([s.value for s in steps[: step.index]])
    yield found("log-of-zero", told[0].partition(":")[0], "; ".join(told)) if operation == "log" else _found(told)


def recorded(watch: "Watch") -> Iterator[Finding]:
    """The record of a whole loop has a loss that is not finite; a step that a scaler left out blames its scale."""
    table, events = watch.steps, watch.events
    begun, left_out = ({event.step for event in events if event.kind == kind} for kind in ("loss", "skip"))
    losses = table["loss"]
    bad = ~np.isfinite(losses) & losses.index.isin(begun)  # else a backward did not begin at a number
    if any(event.kind == "scale" for event in events):
        bad &= ~np.isfinite(table["grad_norm"])  # else only its multiple was too large
        bad &= ~losses.index.isin(left_out) | (bad.tail(SKIPS).sum() == SKIPS)
    if not bad.any():
        return
    step = int(bad.idxmax())
    told, ids, earlier = [f"step {step}: the loss is {losses[step]}"], table["bad_samples"][step], table.index < step
    told += [f"samples {listed(ids, 8)}"] if ids else []
    told += _before([*losses[earlier]])
    told += [f"the gradient's norm before it: {norm:.4g}" for norm in table["grad_norm"][earlier].tail(1)]
    yield _found([*told, "its tensors were not looked at: it lies behind the first steps, or in a closure"])


def _found(told: list[str]) -> Finding:
    finding = found("loss-not-finite", told[0].partition(":")[0], "; ".join(told), path="", lines="")
    return replace(finding, fix=FIX, check=CHECK)


def _before(losses: list[float]) -> list[str]:
    return [f"losses before it: {', '.join(f'{v:.4g}' for v in losses[-LAST:])}"] if losses else []
