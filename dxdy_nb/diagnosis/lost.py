"""A loss that is not finite, and that no rule explains: what is known of the step at which it was lost."""

import math
from collections.abc import Iterator
from dataclasses import replace

from dxdy_nb.diagnosis.observation import main_call
from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.report import Finding, found, listed
from dxdy_nb.nested import tensors_in

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
    told += before([s.value for s in steps[: step.index]])
    yield found("log-of-zero", told[0].partition(":")[0], "; ".join(told)) if operation == "log" else not_finite(told)


def not_finite(told: list[str]) -> Finding:
    """Return the error of a loss that is not finite, with what is told of it; the first part begins with its step."""
    finding = found("loss-not-finite", told[0].partition(":")[0], "; ".join(told), path="", lines="")
    return replace(finding, fix=FIX, check=CHECK)


def before(losses: list[float]) -> list[str]:
    """Return what is told of the last of the losses before it."""
    return [f"losses before it: {', '.join(f'{v:.4g}' for v in losses[-LAST:])}"] if losses else []
