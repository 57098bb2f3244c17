"""``diagnose``: some real steps, then every stage's rules in order."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis import backward, crash, data, forward, loss, lost, reproduce, update
from dxdy_nb.diagnosis.probes import Experiment, NotRepeatable, OutOfTime
from dxdy_nb.diagnosis.report import Finding, Report, ordered
from dxdy_nb.diagnosis.repro import save
from dxdy_nb.diagnosis.sameness import is_plain
from dxdy_nb.diagnosis.saw import saw
from dxdy_nb.diagnosis.subject import NAMES, preserved, subject_of
from dxdy_nb.diagnosis.trials import Rule, with_trial
from dxdy_nb.errors import DxdyError
from dxdy_nb.nested import tensors_in
from dxdy_nb.observe.batches import is_one_shot

TIME = 40.0  # seconds
# Every stage has a tuple RULES. A rule reads the experiment and yields findings.
STAGE_MODULES = (crash, data, forward, loss, backward, update, reproduce)


def diagnose(*, batches: int | None = None, steps: int | None = None, time_limit: float = TIME, **given: Any) -> Report:
    """Return what is wrong with a training set-up: the stage, the cause, the evidence and the fix.

    Some real steps are run and recorded; then each stage's rules are tried in order, on the same objects. At the end
    everything is put back: weights, gradients, buffers, optimizer, scheduler, scaler, random generators.

    Parameters
    ----------
    batches : how many batches of a one-shot iterator may be used up
    steps : how many steps to watch; without it at most 24, as time allows
    time_limit : seconds; what could not be checked within them is said in the report
    given : ``model``, ``loss_fn``, ``loader``, ``optimizer``; where there are such things also ``optimizers``,
        ``train_step(model, batch, optimizer, loss_fn, step)``, ``val_loader``, ``dataset``, ``scheduler``, ``scaler``,
        ``accumulation_steps``, ``causal`` (next-token training), ``batch_coupled`` (samples interact by design),
        ``pad_id``, ``on_epoch_end``, ``validate``, ``save`` and ``resume``, ``ema_model``, ``best_state``. Without a
        ``train_step`` a step is: zero_grad, ``loss_fn(model(x), y)``, backward, step.

    Raises
    ------
    DxdyError
        An unknown keyword, no model, a loader that can be read only once.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> batch = torch.ones(8, 2), torch.ones(8)  # the target lacks a dimension
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> report = diagnose(model=model, loss_fn=torch.nn.MSELoss(), loader=[batch] * 4, optimizer=optimizer)
    >>> report.healthy
    False
    """
    experiment = experiment_on(given, batches, steps, time_limit)
    began = experiment.deadline - time_limit
    with torch.inference_mode(False), torch.enable_grad():
        experiment.observe()
        with preserved(experiment.subject):
            report = replace(report_on(experiment), seconds=time.monotonic() - began)
    return replace(report, repro=partial(save, experiment, report.errors[0])) if report.errors else report


def experiment_on(
    given: Mapping[str, Any], batches: int | None = None, steps: int | None = None, time_limit: float = TIME
) -> Experiment:
    """Return the experiment that ``diagnose`` makes of its keywords, before its first step; see there."""
    began = time.monotonic()
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise DxdyError(f"diagnose: unknown {', '.join(unknown)}. Known: {', '.join(NAMES)}.")
    for name, value in (("batches", batches), ("steps", steps), ("time_limit", time_limit)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise DxdyError(f"diagnose: {name}= is a number above 0, got {value!r}.")
    subject = subject_of(given)
    if subject.loader is not None and is_one_shot(subject.loader):
        if batches is None:
            raise DxdyError(
                "diagnose: loader= is an iterator, and what is read from it is gone. Pass a DataLoader or a list, or "
                "say how many batches may be used up: batches=8."
            )
        with random_states():
            read = [batch for _, batch in zip(range(batches), subject.loader, strict=False)]
        subject = replace(subject, loader=read)
    return Experiment(subject, began + time_limit, steps)


def report_on(experiment: Experiment) -> Report:
    """Return the report of all rules on what was seen."""
    began = time.monotonic()
    findings, unchecked = judged(experiment)
    if not any(finding.severity == "error" for finding in findings):
        findings += (with_trial(finding, lost.heard, experiment) for finding in lost.heard(experiment))
    return Report(tuple(ordered(findings)), saw(experiment), tuple(unchecked), time.monotonic() - began)


def judged(experiment: Experiment) -> tuple[list[Finding], list[str]]:
    """Return the findings of all rules, and what could not be checked."""
    findings: list[Finding] = []
    missed: dict[str, list[str]] = {}  # why, and which rules
    with warnings.catch_warnings():
        # What torch has to say was recorded in the steps; where warnings are errors it would end the probes.
        warnings.simplefilter("ignore")
        for rule in (rule for module in STAGE_MODULES for rule in module.RULES):
            try:
                findings += (with_trial(finding, rule, experiment) for finding in rule(experiment))
            except NotRepeatable:
                continue  # said once, in the notes
            except OutOfTime:
                missed.setdefault("no time was left", []).append(_words(rule))
            except Exception as error:
                if unusual := _layouts(experiment):
                    why = f"the batches hold {unusual} tensors, which these rules do not read"
                    missed.setdefault(why, []).append(_words(rule))
                    continue
                first = (str(error).strip().splitlines() or [""])[0]
                own = isinstance(error, DxdyError)
                missed.setdefault(first if own else f"raised {type(error).__name__}: {first}", []).append(_words(rule))
    notes = dict.fromkeys(experiment.seen.notes)
    return findings, [*notes, *(f"{', '.join(rules)}: {why}" for why, rules in missed.items())]


def _layouts(experiment: Experiment) -> str:
    """Return which tensors of the first step have another layout than rows and columns."""
    found = tensors_in(experiment.first.batch) if experiment.first is not None else []
    names = ["nested" if t.is_nested else "sparse" for t in found if not is_plain(t)]
    return " and ".join(dict.fromkeys(names))


def _words(rule: Rule) -> str:
    return rule.__name__.replace("_", " ")
