"""Fixes, tried: some real steps with one thing changed, and the rule that found the cause asked again."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dxdy_nb.diagnosis.fixes import USUAL, Fix, fixes_for, usual
from dxdy_nb.diagnosis.probes import Experiment, OutOfTime, finite
from dxdy_nb.diagnosis.report import Finding, Trial
from dxdy_nb.diagnosis.sameness import equal
from dxdy_nb.diagnosis.subject import Subject, preserved
from dxdy_nb.errors import counted

LIMIT = 10.0  # seconds for the set-up as it is, and for each one that is changed
STEPS = 16  # on one batch, for the loss before and after
Rule = Callable[[Experiment], Iterator[Finding]]


@dataclass(frozen=True)
class _Outcome:
    """What came of a set-up's steps: the evidence of the cause, the loss of one batch, and what went wrong."""

    experiment: Experiment
    number: int = 0
    evidence: str = ""
    losses: tuple[float, float] = (math.nan, math.nan)
    failure: str = ""

    def __str__(self) -> str:
        words = self.failure or self.evidence or f"not found in {counted(len(self.experiment.seen.steps), 'step')}"
        return f"{words}; loss of one batch from {self.losses[0]:.4g} to {self.losses[1]:.4g} in {self.number} steps"

    @property
    def trains(self) -> bool:
        """Whether the steps could be made and their loss falls."""
        return not self.failure and self.losses[1] < self.losses[0] < math.inf


def with_trial(finding: Finding, rule: Rule, experiment: Experiment) -> Finding:
    """Return a finding with a trial: its own, or one of what may help against its cause."""
    fixes, experiment = fixes_for(finding.cause), replace(experiment)  # without the data that it has read
    own = finding.trial or (partial(tried, experiment, rule, finding, fixes) if fixes else None)
    return finding if own is None else replace(finding, trial=partial(_as_diagnosed, experiment, own))


def _as_diagnosed(experiment: Experiment, trial: Callable[[], Trial]) -> Trial:
    """Return what came of a trial, and leave everything as it was found, bit for bit.

    It starts from the objects as they are when it is asked for. Weights that are no longer those of the diagnosis are
    set to what they were then, the learning rates with them, and the optimizers' memory is cleared.
    """
    subject = experiment.subject
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad(), preserved(subject):
        warnings.simplefilter("ignore")
        if not all(equal(p.detach(), experiment.initial.get(n, p)) for n, p in subject.parameters.items()):
            experiment.rewind()
        return trial()


def tried(experiment: Experiment, rule: Rule, finding: Finding, fixes: Sequence[Fix]) -> Trial:
    """Return what came of some fixes: of the first that is confirmed, else of the last.

    Confirmed is a fix without which the rule finds the cause, and with which it does not, while the loss of one batch
    falls.
    """
    subject, cause = experiment.subject, finding.cause
    before = _outcome(experiment, subject, rule, cause)
    if not experiment.driven and not before.evidence and fixes[-1].change is usual:  # which it is already
        return Trial(USUAL, finding.evidence, str(before), before.trains)
    trial = Trial(fixes[0].tried, str(before), "it does not apply to this set-up", False)
    for fix in fixes:
        with preserved(subject):
            try:
                changed = fix.change(before.experiment)
            except Exception:
                continue
            after = _outcome(experiment, changed, rule, cause, before.number)
        gone = bool(before.evidence) and not after.evidence and after.trains
        better = not fix.better or not after.losses[1] >= before.losses[1]
        trial = Trial(fix.tried, str(before), str(after), gone and better)
        if trial.confirmed:
            break
    return trial


def _outcome(origin: Experiment, subject: Subject, rule: Rule, cause: str, number: int = 0) -> _Outcome:
    """Return what comes of a set-up; ``number`` is how many steps on one batch the other one had."""
    made, began = Experiment(subject, time.monotonic() + LIMIT, origin.steps, driven=origin.driven), time.monotonic()
    try:
        made.observe()
        each = (time.monotonic() - began) / (len(made.seen.steps) or 1)
        errors = [made.seen.error, *(step.error for step in made.seen.steps)]
        failures = [f"raised {type(error).__name__}: {error}" for error in errors if error is not None]
        failure = failures[0].splitlines()[0] if failures else ""
        with preserved(subject):
            evidence = next((found.evidence for found in rule(made) if found.cause == cause), "")
        number = number or max(4, min(STEPS * subject.accumulation_steps, int(made.left() / each / 2)))
        losses = made.again(number, fixed=True)
        end = sum(losses[-(number // 4) :]) / (number // 4) if len(finite(losses)) == number else math.nan
        return _Outcome(made, number, evidence, (losses[0], end), failure)
    except OutOfTime:
        return _Outcome(made, failure="no time was left")
    except Exception as error:
        return _Outcome(made, failure=f"raised {type(error).__name__}: {error}")
