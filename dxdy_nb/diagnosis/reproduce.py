"""Whether the run would come out the same again: from its checkpoint, from its seed, in its evaluation."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dxdy_nb.diagnosis.forward import DROPOUTS, NORMS
from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.report import Finding, found, listed
from dxdy_nb.diagnosis.sequel import Resumed, same_state
from dxdy_nb.diagnosis.subject import Subject, batches_of, preserved
from dxdy_nb.nested import tensors_in


def modes(experiment: Experiment) -> Iterator[Finding]:
    """The model trains in eval mode, from the start or since a validation."""
    model, updates = experiment.subject.model, experiment.seen.updates
    modal = any(cares(m) and any(p.requires_grad for p in trained_by(model, n, m)) for n, m in model.named_modules())
    if not modal or not updates or all(u.training for u in updates):
        return
    first = next(place for place, u in enumerate(updates) if not u.training)
    later = "" if first == 0 else f" since update {first}; before it was in train mode"
    yield found(
        "left-in-eval" if first == 0 else "eval-mode-stuck",
        "model",
        f"the model is in eval mode while it trains{later}: dropout is off and BatchNorm does not learn",
    )


def cares(module: nn.Module) -> bool:
    """Return whether a module does something else in eval mode."""
    drops = isinstance(module, DROPOUTS) and module.p > 0
    return drops or isinstance(module, NORMS) or (isinstance(module, nn.RNNBase) and module.dropout > 0)


def trained_by(model: nn.Module, name: str, module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a module, or of what it stands in where it has none: with them it is trained."""
    return list(module.parameters()) or list(model.get_submodule(name.rpartition(".")[0]).parameters())


def evaluation_changes_buffers(experiment: Experiment) -> Iterator[Finding]:
    """Validation changed running statistics: it ran in train mode."""
    changed = experiment.seen.final.get("validated", [])
    if changed or "buffers" in experiment.seen.events:
        yield found(
            "eval-updates-bn",
            listed(changed) if changed else "on_epoch_end",
            "buffers changed during validation: the statistics that the model will use come from validation data",
            call="validate" if changed else "on_epoch_end",
        )


def best_state_is_live(experiment: Experiment) -> Iterator[Finding]:
    """The state that was kept as the best one shares memory with the model, so it follows it."""
    best = experiment.subject.best_state
    if best is None:
        return
    live = {t.data_ptr() for t in experiment.subject.model.state_dict().values() if t.numel()}
    shared = [name for name, t in best.items() if torch.is_tensor(t) and t.numel() and t.data_ptr() in live]
    if shared:
        yield found(
            "best-state-aliased",
            listed(shared),
            f"{len(shared)} of {len(best)} tensors of best_state are the model's own memory",
        )


def resumed(experiment: Experiment) -> Iterator[Finding]:
    """A run that is saved and resumed goes on as another one."""
    subject = experiment.subject
    if subject.save is None or subject.resume is None:
        return
    with preserved(subject):
        for index, batch in zip(range(4), _cycle(subject.loader), strict=False):
            experiment.train(batch, index)
        if subject.on_epoch_end is not None:
            subject.on_epoch_end()  # so that a schedule is not where it began
        saved = copy.deepcopy(subject.save())
        state = {n: t.detach().clone() for n, t in subject.model.state_dict().items()}
        moments = _moments(subject)
        lrs = _lrs(subject.optimizer)
        position = getattr(subject.scheduler, "last_epoch", None)
        parts = {name: _state_of(getattr(subject, name)) for name in ("scaler", "ema_model")}
        answers = _answers(experiment, subject.model)
        order_before = _first_batch(subject.loader)
    with preserved(subject):
        random = torch.get_rng_state()
        again = subject.resume(saved)
        torch.set_rng_state(torch.get_rng_state() if not torch.equal(random, torch.get_rng_state()) else random)
        if not isinstance(again, dict) or not isinstance(again.get("model"), nn.Module):
            experiment.seen.notes.append(
                "resume: it returned no dict with a model, so the resumed run was not compared"
            )
            return
        order_after = _first_batch(again.get("loader"))
        new = again["model"].state_dict()
        told = Resumed(
            len(state), [n for n, t in state.items() if n not in new or not torch.equal(t.to(new[n].dtype), new[n])]
        )
        if (optimizer := again.get("optimizer")) is not None:
            told.compare_moments(moments, moments_of(again["model"], optimizer))
            told.lrs = lrs, _lrs(optimizer)
            told.positions = position, getattr(again.get("scheduler"), "last_epoch", None)
            same = order_before is not None and order_after is not None and _same(order_before, order_after)
            first = experiment.batches[0] if experiment.batches else None
            fresh = first is not None and order_after is not None and _same(tensors_in(first), order_after)
            told.replays = fresh and not same
        yield from _otherwise(told)
        yield from _differences(experiment, state, parts, answers, again)


def _otherwise(resumed: Resumed) -> Iterator[Finding]:
    other, held = resumed.other, resumed.moments
    if other:
        yield found(
            "strict-false-loads-nothing" if len(other) == resumed.tensors else "checkpoint-omits-frozen",
            listed(other),
            f"{len(other)} of {resumed.tensors} tensors of the model differ after save and resume",
        )
    if held and len(resumed.lost) == held:
        yield found(
            "resume-no-optimizer-state",
            listed(resumed.lost),
            f"the optimizer held state for {held} parameters before, and for none after resuming",
        )
    elif resumed.swapped:
        yield found(
            "resume-param-order-swapped",
            listed(resumed.swapped),
            f"{len(resumed.swapped)} of {held} parameters have another's optimizer state after resuming",
        )
    (lrs, new_lrs), (position, new_position) = resumed.lrs, resumed.positions
    if lrs != new_lrs or (position is not None and new_position != position):
        moved = "" if position is None else f"; scheduler steps {position} → {new_position}"
        yield found("resume-no-scheduler", "scheduler", f"lr {lrs} before, {new_lrs} after resuming{moved}")
    if resumed.replays:
        yield found(
            "resume-replays-order",
            "loader",
            "the first batch after resuming is the first batch of the whole run, and straight on it is another",
        )


def _state_of(part: Any) -> dict[str, Any]:
    state = part if isinstance(part, dict) else part.state_dict() if hasattr(part, "state_dict") else {}
    return {n: v.detach().clone() if torch.is_tensor(v) else v for n, v in state.items()}


def _answers(experiment: Experiment, model: nn.Module) -> list[Tensor]:
    """Return what a model says to the first batch, twice, where it is the model that was called."""
    call = experiment.call
    if call is None or call.module is not experiment.subject.model:
        return []
    with preserved(Subject(model)), torch.no_grad():
        model.eval()
        return [t.clone() for _ in range(2) for t in tensors_in(model(*call.args, **call.kwargs))]


def _differences(
    experiment: Experiment, state: Any, parts: dict[str, Any], answers: list[Tensor], again: dict[str, Any]
) -> Iterator[Finding]:
    """Yield what else is another after resuming: what scaler and average hold, or what the model answers."""
    for name, before in parts.items():
        after = _state_of(again.get(name))
        if name in again and before and after and not same_state(before, after):
            other = [key for key in before if not same_state({key: before[key]}, {key: after.get(key)})]
            yield found("resume-differs", name, f"{listed(other)} of {name} differ after save and resume", part=name)
    new = again["model"].state_dict()
    if answers and all(n in new and torch.equal(t, new[n]) for n, t in state.items()):
        half = len(answers) // 2
        now = _answers(experiment, again["model"])
        repeat = _same(answers[:half], answers[half:]) and _same(now[:half], now[half:])
        if repeat and len(now) == len(answers) and not all(map(torch.allclose, answers, now)):
            gap = max(float((a - b).abs().max()) for a, b in zip(answers, now, strict=True))
            yield found(
                "resume-differs",
                "model",
                f"all tensors of state_dict are the same after save and resume, and the answers to one batch differ by "
                f"{gap:.3g}: the model holds something that state_dict does not know",
                part="model",
            )


def heard(experiment: Experiment) -> Iterator[Finding]:
    """A watched script resumed its run as another one, or loaded weights that are not those it meant."""
    final = experiment.seen.final
    if final.get("resumed") is not None:
        yield from _otherwise(final["resumed"])
    for loading in final.get("loadings", ()):
        if loading.matched:
            yield found(
                "best-state-aliased",
                "load_state_dict",
                f"all {loading.shared} tensors that it was given are the model's own memory: nothing was loaded",
            )
        else:
            yield found(
                "strict-false-loads-nothing",
                "load_state_dict",
                f"none of the model's {loading.weights} weights was loaded: the state names them otherwise, as "
                f"{loading.example}",
            )


def _cycle(loader: Any) -> Iterator[Any]:
    while True:
        found = False
        for batch in batches_of(loader):
            found = True
            yield batch
        if not found:
            return


def _first_batch(loader: Any) -> list[Tensor] | None:
    return next((tensors_in(batch) for batch in loader), None) if loader is not None else None


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _moments(subject: Any) -> dict[str, dict[str, Any]]:
    return {} if subject.optimizer is None else moments_of(subject.model, subject.optimizer)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return a copy of what an optimizer has learnt of each parameter, by the parameter's name."""
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: {k: v.detach().clone() if torch.is_tensor(v) else v for k, v in state.items()}
        for p, state in optimizer.state.items()
        if id(p) in names and state
    }


def _lrs(optimizer: Any) -> list[float]:
    return [] if optimizer is None else [float(group.get("lr", math.nan)) for group in optimizer.param_groups]


def same_order(experiment: Experiment) -> Iterator[Finding]:
    """A loader that shuffles gives every epoch in the same order: a seed is set again and again."""
    if not isinstance(getattr(experiment.subject.loader, "sampler", None), torch.utils.data.RandomSampler):
        return
    epochs: dict[int, list[int]] = {}
    for step in experiment.seen.steps:
        epochs.setdefault(step.epoch, []).append(step.key)
    orders = [keys for keys in epochs.values() if len(keys) == len(epochs[0])]
    if len(orders) > 2 and len(set(orders[1])) >= 4 and orders[1] == orders[2]:
        yield found(
            "seed-set-every-epoch",
            "loader",
            f"the loader shuffles, and epochs 1 and 2 have the same {len(orders[1])} batches in the same order",
        )


def unseeded(experiment: Experiment) -> Iterator[Finding]:
    """The global seed was never set, as far as can be told: torch's own is drawn from the system, and is huge."""
    if torch.initial_seed() >= 2**32 and _shuffles(experiment.subject.loader):
        yield found(
            "unseeded-run",
            "torch.manual_seed",
            f"torch.initial_seed() is {torch.initial_seed()}, larger than any seed people choose; the loader shuffles",
            severity="hint",
        )


def _shuffles(loader: Any) -> bool:
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, torch.utils.data.RandomSampler) and sampler.generator is None


RULES = (modes, evaluation_changes_buffers, best_state_is_live, resumed, heard, same_order, unseeded)
