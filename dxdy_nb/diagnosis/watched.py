"""Anybody's loop, judged at its end: from what was heard of its first steps, and from those steps run again."""

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dxdy_nb.diagnosis.diagnose import TIME, report_on
from dxdy_nb.diagnosis.observation import Call, Step, main_call
from dxdy_nb.diagnosis.probes import Experiment, NotRepeatable
from dxdy_nb.diagnosis.report import Finding, Report, found
from dxdy_nb.diagnosis.repro import save
from dxdy_nb.diagnosis.sameness import same_tensor
from dxdy_nb.diagnosis.subject import NAMES, TrainStep, preserved
from dxdy_nb.diagnosis.witness import Witness
from dxdy_nb.errors import DxdyError
from dxdy_nb.nested import mapped, tensors_in
from dxdy_nb.observe.batches import is_one_shot
from dxdy_nb.observe.found import held_by


def judge(witness: Witness, time_limit: float = TIME) -> Report:
    """Return the report on what a witness has heard."""
    seen = witness.seen
    if seen.final.get("no graph") and not witness.initial:
        told = "every model ran with gradients switched off, and backward was called on what has no graph"
        return Report((found("whole-forward-no-grad", "the training step", told),), unchecked=tuple(seen.notes))
    if not seen.steps or not witness.initial:
        return Report((), unchecked=(*seen.notes, "nothing was heard of training: no model ran with gradients"))
    if not (seen.updates or seen.moved or any(s.backwards or s.error for s in seen.steps)):
        return Report((), unchecked=(*seen.notes, "nothing trained here: no backward, no optimizer step"))
    step = next((s for s in seen.steps if s.batch is not None and (s.losses or _own_loss(s) is not None)), None)
    again = None
    with suppress(Exception):  # tensors of all kinds: nested, sparse
        again = replayed(step, witness.subject.all_optimizers) if step is not None else None
    # Who trains on all data at once has one batch, not the same one again and again.
    batches = list({s.key: s.batch for s in seen.steps if s.batch is not None}.values())
    loader, held_out = (
        next((one for one in witness.loaders(held_out=held) if not is_one_shot(one)), None) for held in (False, True)
    )
    optimizers = witness.subject.all_optimizers
    direct = step is not None and step.losses and _is_direct(step)
    subject = replace(
        witness.subject,
        optimizer=optimizers[0] if len(optimizers) == 1 else None,
        loader=batches if loader is None else loader,
        train_step=again or _not_repeatable,
        loss_fn=step.losses[-1].module if step is not None and direct else None,
        accumulation_steps=max(1, witness.window),
        val_loader=held_out,
    )
    experiment = Experiment(subject, time.monotonic() + time_limit, seen=seen, initial=witness.initial, driven=False)
    if again is None:
        seen.notes.append("counterfactuals: the training step could not be run again from what was heard of it")
        lost = [s.index for s in seen.steps if s.backwards and not math.isfinite(s.value)]
        if lost:
            told = "give dx.diagnose the step as train_step, and it tries"
            seen.notes.append(f"why a loss is not finite, first at step {lost[0]}, beyond what was found here: {told}")
    with preserved(subject), torch.enable_grad():
        experiment.rewind()
        report = report_on(experiment)
    return replace(report, repro=partial(_save, experiment, report.errors[0])) if report.errors else report


def _save(experiment: Experiment, finding: Finding, path: Path) -> None:
    """Write what reproduces an error, with the weights that the loop began with."""
    subject, asked = experiment.subject, set(compile(finding.check, "check", "exec").co_names)
    missing = [name for name in NAMES if name in asked and getattr(subject, name) is None]
    if subject.train_step is _not_repeatable or missing:
        wanted = f"{', '.join(missing)} of the loop" if missing else "how the loop's step uses a batch"
        raise DxdyError(
            f"save_repro: {wanted} was not heard, so {finding.cause} cannot be shown again from here. Give it by name: "
            "dx.diagnose(model=..., loss_fn=..., loader=..., optimizer=..., ...)."
        )
    with preserved(subject), torch.enable_grad():
        experiment.rewind()
        save(experiment, finding, path)


def _own_loss(step: Step) -> int | None:
    """Return which of the model's outputs is a loss: one number; None where a loss function made it."""
    call = main_call(step)
    outputs = tensors_in(call.output) if call is not None and not step.losses else []
    return next((i for i, t in enumerate(outputs) if t.numel() == 1 and t.is_floating_point()), None)


def _is_direct(step: Step) -> bool:
    """Return whether the loss is a function of the output and one target, and nothing more."""
    call, loss = main_call(step), step.losses[-1]
    outputs = tensors_in(call.output) if call is not None else []
    taken = tensors_in(loss.args[:1])
    known = bool(taken) and all(any(same_tensor(one, t) for t in outputs) for one in taken)
    return len(loss.args) == 2 and not loss.kwargs and known


def _not_repeatable(*_: Any) -> Any:
    raise NotRepeatable("the step cannot be run again")


def replayed(step: Step, optimizers: Sequence[Any]) -> TrainStep | None:
    """Return a training step that does with a batch what a recorded one did; None where that cannot be told.

    Each tensor that model and loss were given must be one of the batch's, or of the model's output, perhaps in another
    shape or dtype; anything else is taken as it was.
    """
    call, batch = main_call(step), tensors_in(step.batch)
    if call is None or not batch:
        return None
    # Where the model returns its loss itself, that is the loss.
    own = _own_loss(step)
    loss = step.losses[-1] if step.losses else Call(None, (), {})
    given = [_place(t, batch) for t in tensors_in((call.args, call.kwargs))]
    outputs = tensors_in(call.output)
    compared = [_place(t, outputs) for t in tensors_in((loss.args, loss.kwargs))]
    # From the end: where input and target are alike, the target is the later one.
    targets = [_place(t, batch[::-1]) for t in tensors_in((loss.args, loss.kwargs))]
    targets = [None if place is None else len(batch) - 1 - place for place in targets]
    asks = any(update.closure for update in step.updates)
    told = step.backwards[-1:] if "scale" not in step.events else []
    factor = next((b.share for b in told if b.multiple and math.isfinite(b.share) and abs(b.share - 1) > 1e-6), 1.0)
    clips = [bound for _, bound, _ in step.clips[:1] if ("clip", "step") in itertools.pairwise(step.events)]
    if not any(place is not None for place in given):
        return None
    if own is None and not any(place is not None for place in compared):
        return None

    def train_step(model: Any, new: Any, optimizer: Any, loss_fn: Any, index: int) -> Any:
        fresh = tensors_in(new)

        def closure() -> Any:
            for one in optimizers:
                one.zero_grad()
            args, kwargs = _filled((call.args, call.kwargs), given, fresh)
            with torch.autocast("cpu", call.autocast, enabled=call.autocast is not None):
                results = tensors_in(call.module(*args, **kwargs))
            args, kwargs = _filled((loss.args, loss.kwargs), compared, results, targets, fresh)
            value = (loss_fn or loss.module)(*args, **kwargs) if loss.module is not None else results[own or 0]
            (value * factor).backward()
            for bound in clips:
                torch.nn.utils.clip_grad_norm_([p for o in optimizers for p in held_by(o)], bound)
            return value

        if asks:
            return [one.step(closure) for one in optimizers][-1]
        value = closure()
        for one in optimizers:
            one.step()
        return value

    return train_step


def _place(t: Tensor, among: Sequence[Tensor]) -> int | None:
    """Return which of some tensors this one is, seen perhaps in another shape or dtype."""
    for place, other in enumerate(among):
        if t.numel() == other.numel() and t.numel():
            a, b = t.detach().double().flatten().cpu(), other.detach().double().flatten().cpu()
            if torch.equal(a, b) or bool((torch.isnan(a) & torch.isnan(b) | (a == b)).all()):
                return place
    return None


def _filled(structure: Any, places: list[int | None], fresh: list[Tensor], *more: Any) -> Any:
    """Return a structure whose tensors are replaced, in order, by fresh ones in the shape and dtype of the old."""
    choices = [(places, fresh), *zip(more[::2], more[1::2], strict=True)]
    turn = iter(range(len(places)))

    def fill(old: Tensor) -> Tensor:
        here = next(turn)
        for wanted, values in choices:
            if wanted[here] is not None and wanted[here] < len(values):
                new = values[wanted[here]]
                new = new if new.dtype == old.dtype else new.to(old.dtype)
                lead = old.shape[0] if old.dim() else 1
                whole = old.numel() // max(lead, 1)
                return new if new.shape == old.shape or not whole else new.reshape(-1, *old.shape[1:])
        return old

    return mapped(structure, fill)
