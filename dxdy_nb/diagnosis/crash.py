"""A step that raised: where the exception came from names the stage, and torch's own words name the cause."""

import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from dxdy_nb.diagnosis.observation import Step
from dxdy_nb.diagnosis.probes import Experiment, NotRepeatable, OutOfTime
from dxdy_nb.diagnosis.report import Finding, Stage, found

# Torch's words (2.13), and the cause they stand for.
WORDS = {
    "expected target dtype to be Long": "label-dtype-float",
    "is out of bounds": "label-out-of-range",
    "Expected more than 1 value per channel": "last-batch-of-one-bn",
    "modified by an inplace operation": "inplace-residual",
    "does not require grad and does not have a grad_fn": "whole-forward-no-grad",
    "all elements of input should be between 0 and 1": "bce-on-logits",
    "only for scalar outputs": "not-scalar",
    "unscale_() has already been called": "scaler-order",
    "unscale_() is being called after step()": "scaler-order",
    "No inf checks were recorded": "scaler-order",
    "Attempted unscale_ but _scale is None": "scaler-order",
    "since the last update()": "scaler-update-missing",
    "Trying to backward through the graph a second time": "graph-used-twice",
    "Expected all tensors to be on the same device": "device-mismatch",
}


def crashed(experiment: Experiment) -> Iterator[Finding]:
    """The step, the loader or the end of an epoch raised an exception."""
    seen = experiment.seen
    step = next((step for step in seen.steps if step.error is not None), None)
    error = step.error if step is not None else seen.error
    if error is None:
        return
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    cause = next((cause for words, cause in WORDS.items() if words in str(error)), "")
    stage = _stage(experiment, error)
    if cause == "label-out-of-range" and stage != "loss":  # the words are also an index's in the model
        cause = ""
    if cause == "inplace-residual" and step is not None and step.index and _runs_alone(experiment, step):
        cause = "graph-used-twice"  # what was overwritten belongs to a step before
    if not cause and stage in ("loss", "backward") and _squeezed(experiment):
        cause = "squeeze-batch-dim"
    when = f"step {step.index}" if step is not None else seen.error_place
    finding = found(cause or "exception", _line(error), f"{when} raised {text}")
    yield finding if cause else replace(finding, stage=stage)


def _runs_alone(experiment: Experiment, step: Step) -> bool:
    with suppress(NotRepeatable, OutOfTime):
        return step.batch is not None and experiment.trial(step.batch).error is None
    return False


def _stage(experiment: Experiment, error: BaseException) -> Stage:
    """Return the stage of an exception: of the innermost call on its way that belongs to one."""
    names = [(frame.filename.replace("\\", "/"), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if experiment.seen.error is error:
        return "data" if experiment.seen.error_place == "loader" else "reproduce"
    if _is_call_of_loss(experiment, error):
        return "loss"
    loss_fn = experiment.subject.loss_fn
    code = getattr(getattr(loss_fn, "forward", loss_fn), "__code__", None)
    stage: Stage = "forward"
    for filename, name in names:
        if "torch/optim/" in filename or "/amp/grad_scaler" in filename:
            return "update"
        if name == "backward" and ("autograd/__init__" in filename or filename.endswith("_tensor.py")):
            return "backward"
        if filename.endswith("nn/modules/loss.py") or (
            code is not None and (filename, name) == (code.co_filename.replace("\\", "/"), code.co_name)
        ):
            stage = "loss"
        if filename.endswith("nn/functional.py") and ("loss" in name or "entropy" in name):
            stage = "loss"
        if "torch/utils/data/" in filename:
            return "data"
    return stage


def _is_call_of_loss(experiment: Experiment, error: BaseException) -> bool:
    """Return whether something was called with other arguments than it takes when the model had answered."""
    step = next((step for step in experiment.seen.steps if step.error is error), None)
    called = str(error).partition(" ")[0].partition(".")[0].rstrip("()")
    parts = {type(module).__name__ for module in experiment.subject.model.modules()}
    wrong = isinstance(error, TypeError) and "argument" in str(error) and called not in parts
    return wrong and step is not None and bool(step.calls) and not step.backwards


def _line(error: BaseException) -> str:
    """Return the last line outside torch that the exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "/torch/" not in f.filename.replace("\\", "/") and "dxdy_nb" not in f.filename]
    return f"{mine[-1].filename.rsplit('/', 1)[-1]}:{mine[-1].lineno}" if mine else ""


def _squeezed(experiment: Experiment) -> bool:
    """Return whether the output of a single sample has fewer dimensions than that of a batch."""
    output, x = experiment.output, experiment.input
    if output is None or x is None or not x.dim() or len(x) < 2:
        return False
    one = experiment.forward(x[:1])
    return hasattr(one, "dim") and one.dim() < output.dim()


RULES = (crashed,)
