"""Whether the optimizer changes the right weights, by the right amount, in the right direction."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from dxdy_nb.diagnosis import clipping, schedule
from dxdy_nb.diagnosis.backward import SQUARED
from dxdy_nb.diagnosis.loss import climbs
from dxdy_nb.diagnosis.observation import Update
from dxdy_nb.diagnosis.probes import FEW, LONG, SHORT, Experiment, OutOfTime, finite, lower_by, set_lr
from dxdy_nb.diagnosis.reading import Calls
from dxdy_nb.diagnosis.report import Finding, Trial, found, listed
from dxdy_nb.diagnosis.sameness import same_tensor
from dxdy_nb.errors import counted

CRUSHING = 0.01  # of every weight, at each step: half of it is gone after 70
HALVES = (torch.float16, torch.bfloat16)
RUNAWAY = 1000.0  # times the loss in SHORT steps: more than double at each of them
FACTOR = re.compile(r"lr_?(scale|mult|multiplier|factor)")
PUSHED = 0.9  # share of elements that do not follow their gradient


def no_update(experiment: Experiment) -> Iterator[Finding]:
    """Gradients are there, and no parameter moved."""
    seen, subject = experiment.seen, experiment.subject
    if not subject.all_optimizers and subject.train_step is None:
        seen.notes.append("update: no optimizer was given")
        return
    backwards = [b for step in seen.steps for b in step.backwards]
    patience = max(FEW, subject.accumulation_steps)
    if seen.updates or seen.moved or len(backwards) <= patience or not any(b.reached for b in backwards):
        return
    if "skip" in seen.events or any(step.lost for step in seen.steps):  # a loop may leave out what it cannot use
        return
    manual = not subject.all_optimizers and not seen.final.get("cleared by an optimizer")
    yield found(
        "manual-update-rebinds" if manual else "step-missing",
        "the training step",
        f"{len(backwards)} backwards with gradients, no optimizer step, and no parameter moved",
    )


def stale_optimizer(experiment: Experiment) -> Iterator[Finding]:
    """The optimizer holds tensors that the model no longer has, and misses some that it has."""
    subject, parameters = experiment.subject, experiment.subject.parameters
    if not subject.all_optimizers:
        return
    ids = {id(p) for p in parameters.values()}
    strangers = [p for o in subject.all_optimizers for g in o.param_groups for p in g["params"] if id(p) not in ids]
    reached = {n for step in experiment.seen.steps for b in step.backwards for n in b.reached}
    missing = [n for n, p in parameters.items() if p.requires_grad and id(p) not in subject.owned and n in reached]
    missing = [n for n in missing if n not in experiment.seen.moved]
    alike = any(
        p.dim() == parameters[n].dim() > 0 and p.shape[1:] == parameters[n].shape[1:]
        for p in strangers
        for n in missing
    )
    if alike:
        yield found(
            "optimizer-stale-head",
            listed(missing),
            f"the optimizer holds {counted(len(strangers), 'tensor')} from outside the model; {listed(missing)} "
            "get gradients and belong to no optimizer",
        )
    elif missing:
        yield found(
            "not-in-optimizer",
            listed(missing),
            f"{listed(missing)} get gradients and belong to no optimizer",
            severity="hint",
        )


def unregistered(experiment: Experiment) -> Iterator[Finding]:
    """Parameters get gradients that the model does not list and no optimizer owns."""
    shapes = [b.strangers for step in experiment.seen.steps for b in step.backwards]
    if shapes and all(shapes):
        yield found(
            "unregistered-list",
            "layers kept in a plain list or dict",
            f"{len(shapes[0])} parameters get gradients and are not in model.parameters(): shapes "
            f"{', '.join(str(list(s)) for s in shapes[0][:3])}",
        )


def weights_stay(experiment: Experiment) -> Iterator[Finding]:
    """A weight has a gradient and a learning rate, was updated, and is bit for bit what it was."""
    updates = experiment.seen.updates
    if len(updates) < FEW or "skip" in experiment.seen.events:
        return
    stuck: dict[bool, list[str]] = {True: [], False: []}
    share = 0.0
    for name, p in experiment.subject.parameters.items():
        # Behind a closure the gradient that was used is not the one before the step.
        rows = [(u.parameters[name], _lr_of(u, p)) for u in updates if name in u.parameters and not u.closure]
        rows = [(s, lr) for s, lr in rows if 0 < s.norm < SQUARED and not s.nonfinite and lr > 0]
        if len(rows) < FEW:
            continue
        half = p.dtype in HALVES
        if half and all(s.stuck > PUSHED for s, _ in rows):
            stuck[True].append(name)
            share = max(share, median(s.stuck for s, _ in rows))
        elif not half and not any(s.moved for s, _ in rows):
            resolution = torch.finfo(p.dtype).eps * rows[0][0].weight
            if all(lr * s.norm > resolution for s, lr in rows):
                stuck[False].append(name)
    for half, names in stuck.items():
        if not names:
            continue
        dtype = experiment.subject.parameters[names[0]].dtype
        yield found(
            "bf16-params-stuck" if half else "update-on-a-copy",
            listed(names),
            f"{listed(names)} ({dtype}): "
            + (
                f"{share:.0%} of the elements that have a gradient did not change: the step is below half a unit in "
                "the last place"
                if half
                else "gradient and learning rate are there, the step ran, and no bit changed"
            ),
        )


def _lr_of(update: Update, p: torch.Tensor) -> float:
    for group, lr in zip(update.optimizer.param_groups, update.lrs, strict=False):
        if any(q is p for q in group["params"]):
            return 1.0 if math.isnan(lr) else lr
    return 0.0


def optimizer_made_anew(experiment: Experiment) -> Iterator[Finding]:
    """Each update came from another optimizer, so what it remembers is lost."""
    updates = experiment.seen.updates
    ids = [id(u.optimizer) for u in updates]
    counts = [u.state_steps for u in updates]
    if len(updates) >= FEW and len(set(ids)) == len(ids) and all(c == 1 for c in counts):
        yield found(
            "optimizer-recreated-each-step",
            type(updates[0].optimizer).__name__,
            f"{len(ids)} updates came from {len(set(ids))} optimizers; the step counter of each is 1",
        )


def weights_changed_outside(experiment: Experiment) -> Iterator[Finding]:
    """Weights changed between two updates, now and then: something else writes into the model."""
    updates = experiment.seen.updates
    changed = [(place, u) for place, u in enumerate(updates) if u.outside]
    if not changed or len(updates) < FEW:
        return
    often = len(changed) > len(updates) / 2
    place, update = changed[0]
    size = max(update.outside.values())
    before = updates[place - 1]
    anew = before.optimizer is not update.optimizer or update.state_steps <= before.state_steps  # another run begins
    lost = not often and update.undone and not anew
    yield found(
        "weights-changed-every-step" if often else "weights-changed-outside",
        listed(update.outside),
        f"before update {place} (and {len(changed) - 1} more of {len(updates)}) weights differed by up to {size:.3g} "
        "from what the update before had left" + ("; what had been learned was gone" if lost else ""),
        severity="error" if lost else "hint",
    )


def moved_twice(experiment: Experiment) -> Iterator[Finding]:
    """Two optimizers own a weight, and both move it by one and the same gradient."""
    pairs = [pair for step in experiment.seen.steps for pair in itertools.combinations(step.updates, 2)]
    rows = [(a.parameters, b.parameters) for a, b in pairs if a.optimizer is not b.optimizer]
    both = [(n, row, b[n]) for a, b in rows for n, row in a.items() if n in b and row.moved and b[n].moved]
    twice = Counter(n for n, row, other in both if row.norm == other.norm > 0)
    names = [name for name, count in twice.items() if count >= FEW]
    if names:
        yield found(
            "two-optimizers-one-weight",
            listed(names),
            f"{listed(names)} belong to two optimizers, and in {twice[names[0]]} steps both moved them by one gradient",
        )


def unread_settings(experiment: Experiment) -> Iterator[Finding]:
    """Groups have a factor for the rate that no optimizer of torch reads, and one rate for all."""
    for optimizer in experiment.subject.all_optimizers:
        groups = optimizer.param_groups
        one = len({float(group["lr"]) for group in groups if "lr" in group}) == 1
        for key in {key for group in groups for key in group if FACTOR.fullmatch(key)} - {*optimizer.defaults}:
            if one and len({group.get(key) for group in groups}) > 1:
                yield from _better_with(
                    experiment,
                    "group-setting-ignored",
                    functools.partial(_multiplied, key),
                    f"the groups have one rate, and {key} {listed(g.get(key) for g in groups)} that nothing reads",
                    "lr",
                )


def _multiplied(key: str, group: dict[str, Any]) -> bool:
    group["lr"] = group["lr"] * group.get(key, 1)
    return bool(group.get(key, 1) != 1)


def copied_onto_itself(experiment: Experiment) -> Iterator[Finding]:
    """Weights are synchronised with themselves, so they never change."""
    still = {n: p for n, p in experiment.subject.parameters.items() if n not in experiment.seen.moved and p.numel()}
    if not still or not experiment.seen.moved or experiment.subject.train_step is None:
        return
    copies: list[int] = []

    def look(func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.Tensor.copy_ and torch.is_tensor(args[1]) and same_tensor(args[0].detach(), args[1].detach()):
            copies.append(args[0].data_ptr())

    with Calls(look):
        experiment.again(len(experiment.seen.steps))
    names = [n for n, p in still.items() if p.data_ptr() in copies]
    if names:
        yield found(
            "copied-onto-itself",
            listed(names),
            f"in {len(experiment.seen.steps)} steps they were copied onto themselves "
            f"{copies.count(still[names[0]].data_ptr())} times, and nothing else moved them",
        )


def settings(experiment: Experiment) -> Iterator[Finding]:
    """A setting of optimizer or schedule cannot be meant as it stands."""
    subject, scheduler = experiment.subject, experiment.subject.scheduler
    own = getattr(scheduler, "optimizer", None)
    # By the groups: what wraps an optimizer has the groups of the one inside.
    groups = {id(group) for o in subject.all_optimizers for group in o.param_groups}
    if own is not None and groups and not any(id(group) in groups for group in own.param_groups):
        yield found(
            "scheduler-of-another-optimizer",
            type(scheduler).__name__,
            f"it changes the rates of another {type(own).__name__} object than the one that trains",
        )
    for optimizer in subject.all_optimizers:
        for place, group in enumerate(optimizer.param_groups):
            lr, first = _number(group.get("lr")), _number(group.get("initial_lr"))
            if lr < 0 or any(value < 0 for update in experiment.seen.updates for value in update.lrs):
                yield found("negative-lr", f"param_groups[{place}]", "a learning rate below zero climbs the loss")
                break
            factors = getattr(scheduler, "lr_lambdas", None) or []
            never = place < len(factors) and all(factors[place](t) <= first * 1.001 for t in range(0, 100_000, 97))
            if 0 < first < 1 and math.isclose(lr, first**2) and never:
                yield found(
                    "lambda-returns-lr",
                    f"param_groups[{place}]",
                    f"lr is {lr:.3g}, the square of the initial {first:.3g}: the lambda returned a rate, not a factor",
                )
    yield from _better_with(experiment, "betas-swapped", _swapped, "first beta {0[0]} above the second {0[1]}", "betas")
    yield from _better_with(
        experiment, "weight-decay-crushing", _undecayed, "weight decay {0} takes much of every weight at each step",
        "weight_decay",
    )  # fmt: skip


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) or torch.is_tensor(value) else math.nan


def _swapped(group: dict[str, Any]) -> bool:
    betas = group.get("betas")
    if betas is None or not betas[0] > betas[1]:
        return False
    group["betas"] = (betas[1], betas[0])
    return True


def _undecayed(group: dict[str, Any]) -> bool:
    decay = group.get("weight_decay", 0)
    if not _number(decay) * _number(group.get("lr")) > CRUSHING:
        return False
    group["weight_decay"] = 0.0
    return True


def _better_with(
    experiment: Experiment, cause: str, change: Callable[[dict[str, Any]], bool], words: str, name: str
) -> Iterator[Finding]:
    """Yield the cause where a change of the groups applies; it is an error where training goes much better with it.

    Where it goes no better, nothing is said.
    """
    groups = [g for o in experiment.subject.all_optimizers for g in o.param_groups]
    asked = next((g for g in groups if change(dict(g))), None)
    if asked is None or not experiment.batches:
        return

    def prepare(subject: Any) -> None:
        for optimizer in subject.all_optimizers:
            for group in optimizer.param_groups:
                change(group)

    usual, other = (finite(experiment.again(LONG, prepare=p))[-4:] for p in (None, prepare))
    ends = [sum(values) / 4 if len(values) == 4 else math.inf for values in (usual, other)]
    if ends[1] >= ends[0]:
        return
    yield found(
        cause,
        type(experiment.subject.all_optimizers[0]).__name__,
        f"{words.format(asked[name])}; loss after {LONG} steps {ends[0]:.4g}, without that {ends[1]:.4g}",
        severity="error" if lower_by(0.2, ends[1], ends[0]) else "hint",
    )


def halves(experiment: Experiment) -> Iterator[Finding]:
    """Half precision lost something: an eps that is zero, gradients that vanished."""
    parameters = experiment.subject.parameters
    for place, update in enumerate(experiment.seen.updates):
        bad = [n for n, s in update.parameters.items() if s.spoilt and not s.nonfinite]
        if not bad or update.closure:  # what a closure computes is not known before
            continue
        eps = update.optimizer.param_groups[0].get("eps")
        half = parameters[bad[0]].dtype is torch.float16 and eps is not None and float(torch.tensor(eps).half()) == 0
        yield found(
            "fp16-adam-eps" if half else "update-not-finite",
            listed(bad),
            f"update {place}: finite gradients, and {listed(bad)} hold values that are not finite after it"
            + (f"; eps={eps} is 0 in float16" if half else ""),
        )
        return
    first = experiment.first
    if first is None or not any(call.autocast is torch.float16 for call in first.calls) or "scale" in first.events:
        return
    lost = _underflow(experiment)
    if lost:
        name, rounded, full = lost
        yield found(
            "fp16-underflow-no-scaler",
            name,
            f"of the gradient of {name} {1 - rounded:.0%} is exactly zero under float16 autocast, {1 - full:.0%} in "
            "float32",
        )


def _underflow(experiment: Experiment) -> tuple[str, float, float] | None:
    """Return a parameter whose gradient loses more than 30 % of its elements to float16."""
    enter = torch.autocast.__enter__

    def off(self: Any) -> Any:
        self._enabled = False
        return enter(self)

    half = experiment.trial(experiment.batches[0])
    torch.autocast.__enter__ = off  # type: ignore[method-assign]
    try:
        full = experiment.trial(experiment.batches[0])
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    if not half.updates or not full.updates:
        return None
    for name, row in half.updates[-1].parameters.items():
        other = full.updates[-1].parameters.get(name)
        if other is not None and other.nonzero - row.nonzero > 0.3:
            return name, row.nonzero, other.nonzero
    return None


def wrong_way(experiment: Experiment) -> Iterator[Finding]:
    """Every update climbs: along the gradient, or against the loss function."""
    updates = experiment.seen.updates
    slopes = [sum(s.slope for s in u.parameters.values()) for u in updates]
    backwards = [b for step in experiment.seen.steps for b in step.backwards]
    reading = experiment.reading
    known = reading is not None and reading.kind not in ("", "soft_cross_entropy")
    told = climbs(experiment)
    if known and reading is not None and reading.value < 0:
        return  # none of the known losses is below zero: it is minus one of them, and should rise
    if len(slopes) >= FEW and all(slope > 0 for slope in slopes) and _rises(experiment):
        yield found(
            "gradient-ascent",
            type(updates[0].optimizer).__name__,
            f"update · gradient is positive in all {len(slopes)} updates (first {slopes[0]:.3g}), and the loss of a "
            "fixed batch rises",
            severity="hint" if told and not known else "error",
        )
    elif len(backwards) >= FEW and all(-1.001 < b.share < -0.999 for b in backwards) and _rises(experiment):
        yield found(
            "wrong-sign",
            "the training step",
            "backward began at minus the loss, and the loss of a fixed batch rises",
            severity="error" if known else "hint",
        )


def _rises(experiment: Experiment) -> bool:
    losses = experiment.again(SHORT, fixed=True)
    return len(finite(losses)) > 1 and losses[-1] > losses[0]


def step_size(experiment: Experiment) -> Iterator[Finding]:
    """The learning rate is far too large or far too small: another one lowers the loss of the same batch."""
    updates = experiment.seen.updates
    if len(updates) < FEW or not experiment.batches or "skip" in experiment.seen.events:
        return
    rows = [[s for s in u.parameters.values() if math.isfinite(s.update)] for u in updates[:SHORT]]
    sizes = [(math.hypot(*(s.update for s in row)), math.hypot(*(s.weight for s in row))) for row in rows]
    moves = [update / weight for update, weight in sizes if weight > 0]
    lrs = [lr for u in updates for lr in finite(u.lrs)]
    if not lrs or max(lrs) == 0:
        return
    lr = max(lrs)
    if not any(s.norm > 0 for row in rows for s in row):
        return  # no rate moves what has no gradient
    if moves and max(moves) < 1e-7:
        if "scale" in experiment.seen.events:
            return  # a loss that needs scaling is small itself
        yield from _too_small(experiment, lr, max(moves))
        return
    losses = experiment.again(SHORT, fixed=True)
    rises = sum(b > a or not math.isfinite(b) for a, b in itertools.pairwise(losses))
    start, end = (losses[0], losses[-1]) if losses else (math.nan, math.nan)
    peak = max(map(abs, finite(losses)), default=math.inf)  # a net that has died of a step is quiet again
    out = experiment.output
    other = experiment.loss_of(out.roll(1, 0)) if out is not None and out.dim() else None
    # From almost nothing any step leads far up; it runs away where answers to other samples' inputs were better.
    level = max(abs(start), abs(float(other)) if other is not None else 0.0)
    diverges = len(finite(losses)) < SHORT or peak > RUNAWAY * level
    if not math.isfinite(start) or not (diverges or (rises >= SHORT - 3 and peak >= 10 * abs(start))):
        return
    best, lowest = 0.0, min(start, end if end == end else start)
    for factor in (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6):
        try:
            smaller = experiment.again(SHORT, fixed=True, prepare=set_lr(factor))
        except OutOfTime:
            if best:
                break
            raise
        if len(finite(smaller)) == SHORT and smaller[-1] < lowest:
            best, lowest = factor, smaller[-1]
        elif best:
            break
    if best:
        yield found(
            "lr-too-large",
            f"lr={lr:g}",
            f"the loss of a fixed batch rose in {rises} of {SHORT - 1} steps, {start:.4g} → {end:.4g} by way of "
            f"{peak:.4g}; with lr={lr * best:g} it fell to {lowest:.4g}",
            severity="error" if diverges else "hint",
            trial=_lr_trial(experiment, best, lr),
            lr=f"{lr * best:g}",
        )


def _too_small(experiment: Experiment, lr: float, move: float) -> Iterator[Finding]:
    factor = 1e-4 / max(move, 1e-12)  # updates of 1e-4 of the weights, which is still careful
    usual = experiment.again(SHORT, fixed=True)
    larger = experiment.again(SHORT, fixed=True, prepare=set_lr(factor))
    if not usual or not larger or not math.isfinite(larger[-1]):
        return
    # Step by step on the same random numbers, so that dropout's noise is the same in both.
    gain, noise = usual[-1] - larger[-1], abs(usual[-1] - usual[0])
    if gain > 100 * max(usual[0] - usual[-1], 0.0) or (gain > 0.02 * abs(usual[-1]) and gain > 0.1 * noise):
        yield found(
            "lr-too-small",
            f"lr={lr:g}",
            f"an update is at most {move:.1e} of the weights; with lr={lr * factor:.1g} the loss of a fixed batch "
            f"falls {larger[0]:.4g} → {larger[-1]:.4g} instead of to {usual[-1]:.6g}",
            trial=_lr_trial(experiment, factor, lr),
        )


def _lr_trial(experiment: Experiment, factor: float, lr: float) -> Callable[[], Trial]:
    def trial() -> Trial:
        experiment.deadline += 60
        usual = experiment.again(SHORT, fixed=True)
        changed = experiment.again(SHORT, fixed=True, prepare=set_lr(factor))
        good = math.isfinite(changed[-1]) and not changed[-1] >= usual[-1]
        before, after = (f"loss of a fixed batch {v[0]:.4g} → {v[-1]:.4g}" for v in (usual, changed))
        return Trial(f"lr={lr * factor:g}", before, after, good)

    return trial


def accumulation(experiment: Experiment) -> Iterator[Finding]:
    """Micro-batches add up to something else than the mean over the window."""
    seen, k = experiment.seen, experiment.subject.accumulation_steps
    events = [e for e in seen.events if e in ("backward", "step", "zero_grad", "epoch")]
    made = [event for event in seen.events if event in ("backward", "epoch", "dropped")]
    dropped = sum(pair == ("backward", "dropped") for pair in itertools.pairwise(made))  # an epoch's tail may be
    if k > 1 and dropped >= FEW:
        yield found(
            "accumulation-cleared",
            "the training step",
            f"{dropped} times gradients were cleared before a step had used them, with accumulation_steps={k}",
        )
    pending, used, leaks = 0, [], 0
    for place, event in enumerate(events):
        if event == "backward":
            pending += 1
        elif event == "step":
            used.append(pending)
            pending = 0
        elif event == "zero_grad":
            pending = 0
        elif event == "epoch" and pending and used and pending < max(used):
            following = events[place + 1 :]
            leaks += bool(following) and following[0] == "backward"
    window = max(used, default=0)
    if leaks and window > 1 and used.count(window) < len(used):  # a window may reach over the end of an epoch
        usual = k if k > 1 else min(used)  # the longest holds what an epoch has left over
        yield found(
            "accum-tail-dropped",
            "the end of an epoch",
            f"gradients of an unfinished window of {usual} were left at the end of {counted(leaks, 'epoch')}; "
            "they add to the next one's",
            window=usual,
        )
    shares = [b.share for step in seen.steps for b in step.backwards if math.isfinite(b.share)]
    if window > 1 and window == (k if k > 1 else window) and shares and all(abs(s - 1) < 1e-3 for s in shares):
        yield found(
            "accum-not-divided",
            "the training step",
            f"{window} losses are added without division: the gradient is {window} times that of their mean",
            severity="hint",
            window=window,
        )


def averages(experiment: Experiment) -> Iterator[Finding]:
    """A second model that should follow the first one does not, or only in part."""
    ema: Any = experiment.subject.ema_model
    seen = experiment.seen
    if stale := seen.final.get("stale"):
        yield found(
            "ema-buffers-stale",
            listed(stale),
            f"a copy of the model was evaluated whose weights had moved and whose statistics ({listed(stale)}) had not",
        )
    if ema is None or len(seen.updates) < FEW:
        return
    still = set(seen.final.get("ema_still", ()))
    module = isinstance(ema, nn.Module)
    weights = [n for n, _ in ema.named_parameters()] if module else list(ema)
    buffers = [n for n, b in ema.named_buffers() if b.is_floating_point()] if module else []
    moved = list(seen.final.get("buffers", ()))
    if weights and seen.moved and all(n in still for n in weights):
        other = not module and not set(weights) & set(experiment.subject.parameters)
        yield found(
            "ema-name-mismatch",
            listed(weights),
            f"the model moved in {counted(len(seen.updates), 'update')}, and no weight of the average changed a bit; "
            + ("none of its names is one of the model's" if other else "it may be meant to begin later"),
            severity="error" if other else "hint",
        )
    elif weights and seen.final.get("ema_towards", 0.0) < -0.5:
        yield found(
            "ema-pushed-away",
            listed(weights),
            f"cosine between where the average went and where the model lies from it: {seen.final['ema_towards']:.2f}",
        )
    elif buffers and any(n in still and any(m.endswith(n) or n.endswith(m) for m in moved) for n in buffers):
        yield found(
            "ema-buffers-stale",
            listed([n for n in buffers if n in still]),
            "the model's buffers moved, those of the average stayed at their first values",
        )


def tied(experiment: Experiment) -> Iterator[Finding]:
    """An embedding and the output layer began equal, in separate memory, and drift apart."""
    model = experiment.subject.model
    embeddings = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, embedding in embeddings:
        for other, layer in layers:
            a, b = experiment.initial.get(f"{name}.weight"), experiment.initial.get(f"{other}.weight")
            if a is None or b is None or a.shape != b.shape or layer.weight is embedding.weight:
                continue
            both = {f"{name}.weight", f"{other}.weight"} & experiment.seen.moved
            if torch.equal(a, b) and both and bool((a != a.flatten()[0]).any()):
                yield found(
                    "tied-weights-broken",
                    f"{name}, {other}",
                    "bit for bit equal at the start, in separate memory, and different after the steps",
                    other=f"{other!r}",
                    name=f"{name!r}",
                )
                return


def decay(experiment: Experiment) -> Iterator[Finding]:
    """Weight decay reaches what it was not meant for."""
    subject, updates = experiment.subject, experiment.seen.updates
    zero = [
        n
        for n in subject.parameters
        if len(rows := [u.parameters[n] for u in updates if n in u.parameters]) >= FEW
        and all(r.norm == 0 for r in rows)
        and sum(r.moved for r in rows) >= FEW
    ]
    if zero:
        yield found(
            "frozen-still-decays",
            listed(zero),
            f"the gradient of {listed(zero)} is exactly zero at every update, and it moves",
            severity="hint",
        )
    for optimizer in subject.all_optimizers:
        decays = [group.get("weight_decay", 0) for group in optimizer.param_groups]
        if not (any(decays) and not all(decays)):
            continue
        norms = {
            id(p): name
            for name, m in subject.model.named_modules()
            if isinstance(m, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm))
            for p in m.parameters(recurse=False)
        }
        decayed = [
            norms[id(p)]
            for group, value in zip(optimizer.param_groups, decays, strict=True)
            if value
            for p in group["params"]
            if id(p) in norms
        ]
        if decayed:
            yield found(
                "weight-decay-on-norm",
                listed(dict.fromkeys(decayed)),
                "the groups are split by weight decay, and norm layers stand in a group that decays",
                severity="hint",
            )


RULES = (
    unregistered,
    no_update,
    stale_optimizer,
    schedule.lr_is_no_number,
    clipping.scaled_gradients,
    clipping.unscaled_in_between,
    clipping.clip_out_of_order,
    clipping.clips_nothing,
    moved_twice,
    unread_settings,
    copied_onto_itself,
    settings,
    halves,
    weights_stay,
    optimizer_made_anew,
    weights_changed_outside,
    schedule.scheduler_first,
    schedule.schedule_pace,
    accumulation,
    averages,
    tied,
    clipping.clip_too_tight,
    wrong_way,
    step_size,
    decay,
)
