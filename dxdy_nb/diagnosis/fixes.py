"""What may help against which cause: each a change of the set-up.

A fix is a function of an experiment that returns the changed set-up. It may change the reader's own objects, since all
of it happens between snapshots; a step, a loss or a loader is replaced. Where it cannot be made, it raises.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import IterableDataset

from dxdy_nb.diagnosis.observation import leading
from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.reproduce import moments_of
from dxdy_nb.diagnosis.subject import Subject, batches_of
from dxdy_nb.nested import mapped, tensors_in

USUAL = "zero_grad, loss, backward, step instead of your step"
Change = Callable[[Experiment], Subject]
Things = Callable[[Experiment], list[Any]]


@dataclass(frozen=True)
class Fix:
    """What may help against some causes, in words and as a change of the set-up.

    A rule that reads a setting is silent as soon as the setting is another one. Then ``better`` asks for more: a lower
    loss than without the change.
    """

    causes: str
    tried: str
    change: Change
    better: bool = False


def fixes_for(cause: str) -> list[Fix]:
    """Return what may help against a cause."""
    return [fix for fix in FIXES if cause in fix.causes.split()]


# ---- things, changed in place ----


def usual(experiment: Experiment) -> Subject:
    """Return the set-up with the usual step, one batch an update."""
    return replace(experiment.subject, train_step=None, accumulation_steps=1)


def _same(experiment: Experiment) -> Subject:
    return replace(experiment.subject)  # what it has read of itself is read anew


def _each(things: Things, change: Callable[[Any], object], then: Change = _same) -> Change:
    """Return the change of each of some things in place, and then another one."""

    def apply(experiment: Experiment) -> Subject:
        for thing in things(experiment):
            change(thing)
        return then(experiment)

    return apply


def _groups(experiment: Experiment) -> list[Any]:
    return [group for optimizer in experiment.subject.all_optimizers for group in optimizer.param_groups]


def _modules(kinds: Any) -> Things:
    return lambda experiment: [m for m in experiment.subject.model.modules() if isinstance(m, kinds)]


# ---- the model: what is done around a forward, in it, or with what comes out of it ----


def _main(experiment: Experiment) -> list[Any]:
    return [experiment.subject.model if experiment.call is None else experiment.call.module]


def _forward(wrap: Callable[..., Any], of: Things = _main) -> Change:
    """Return the change of the forward of some modules; ``wrap`` is given it, and what it is given."""
    return _each(of, lambda module: vars(module).update(forward=partial(wrap, module.forward)))


def _then(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def wrap(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        output = own(*given, **named)
        main = leading(output)
        return mapped(output, lambda t: change(t) if t is main else t)

    return wrap


class _Instead(torch.overrides.TorchFunctionMode):
    """Calls others in the place of torch's functions; each gets the function and its arguments."""

    def __init__(self, others: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        other = self.others.get(func.__self__.__name__ if name == "__get__" else name)
        return (partial(other, func) if other else func)(*args, **(kwargs or {}))


def _inside(others: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a wrap with other functions, and values kept for backward as they are, whatever is written to them."""

    def wrap(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t), _Instead(others):
            return own(*given, **named)

    return wrap


def _at_least(bound: float) -> Callable[..., Any]:
    return lambda func, x, *more, **named: func(x.clamp_min(bound), *more, **named)


def _divided(func: Any, x: Any, y: Any, **named: Any) -> Any:
    return func(x, torch.where(y == 0, torch.finfo(y.dtype).eps, y) if torch.is_tensor(y) else y, **named)


UNCUT = dict.fromkeys(("detach", "data"), lambda func, x: x)
UNCUT |= {"_set_grad_enabled": lambda func, on: func(on) if on else None}
ROUNDING = dict.fromkeys(("round", "floor", "ceil", "trunc", "sign"), lambda func, x: x + (func(x) - x).detach())
DOMAINS = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10"), _at_least(torch.finfo(torch.float).tiny)),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _divided),
    "log1p": _at_least(-1 + 1e-6),
    "softmax": _at_least(-1e9),  # a row that is masked as a whole
}
CAUSAL = {"scaled_dot_product_attention": lambda func, q, k, v, *_, **named: func(q, k, v, is_causal=True)}


def _kept_axis(experiment: Experiment) -> Subject:
    shape = experiment.output.shape[1:]  # type: ignore[union-attr]
    return _forward(lambda own, x: own(x).reshape(len(x), *shape))(experiment)


def _owned(experiment: Experiment) -> Subject:
    """Give the first optimizer what nobody owns, and let all of them forget what the model does not have."""
    subject = experiment.subject
    known = {id(p) for p in subject.parameters.values()}
    for optimizer in subject.all_optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in known]
    lost = [p for p in subject.parameters.values() if p.requires_grad and id(p) not in subject.owned]
    subject.all_optimizers[0].param_groups[0]["params"] += lost
    return replace(subject)


def _registered(experiment: Experiment) -> Subject:
    for module, kind in product(list(experiment.subject.model.modules()), (list, tuple, dict)):
        for name, value in [(n, v) for n, v in vars(module).items() if type(v) is kind and not n.startswith("_")]:
            if value and all(isinstance(one, nn.Module) for one in (value.values() if kind is dict else value)):
                setattr(module, name, (nn.ModuleDict if kind is dict else nn.ModuleList)(value))
    return _owned(experiment)


# ---- the loss ----


def _loss(change: Callable[..., Any]) -> Change:
    """Return the change of the loss: ``change`` is given it, and what it is given."""
    return lambda experiment: replace(experiment.subject, loss_fn=partial(change, experiment.subject.loss_fn))


def _tokens(shift: int, _: Any, output: Tensor, target: Tensor) -> Tensor:
    output, target = output[:, : output.size(1) - shift], target[:, shift:]
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _weighted(experiment: Experiment) -> Subject:
    labels = torch.cat([y.flatten() for _, _, y in experiment.epoch if y is not None])
    counts = torch.bincount(labels.clamp(min=0), minlength=experiment.output.size(1)).clamp(min=1)  # type: ignore[union-attr]
    weight = counts.sum() / (len(counts) * counts)
    return _loss(lambda _, output, target: F.cross_entropy(output, target, weight=weight.to(output)))(experiment)


def _unpadded(experiment: Experiment) -> Subject:
    known = [experiment.subject.pad_id, *(m.padding_idx for m in _modules(nn.Embedding)(experiment))]
    pad = next(index for index in known if index is not None)
    return _loss(lambda own, output, y: own(output, y.masked_fill(y == pad, -100)))(experiment)


# ---- the data ----


class _Changed(IterableDataset[Any]):
    """Batches of a loader, each changed, or left out where it becomes None."""

    def __init__(self, loader: Any, change: Callable[[Any], Any]) -> None:
        self.loader, self.change = loader, change

    def __iter__(self) -> Iterator[Any]:
        return (new for batch in batches_of(self.loader) if (new := self.change(batch)) is not None)


def _batches(change: Callable[[Any], Any]) -> Change:
    return lambda experiment: replace(experiment.subject, loader=_Changed(experiment.subject.loader, change))


def _part(which: int, change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Return the change of the inputs (0) or the targets (1); it is given a tensor, and all of the epoch."""

    def apply(experiment: Experiment) -> Subject:
        place, rows = experiment.places[which], [row[which + 1] for row in experiment.epoch]
        whole = torch.cat([t for t in rows if t is not None])

        def one(batch: Any) -> Any:
            wanted = tensors_in(batch)[place]
            return mapped(batch, lambda t: change(t, whole) if t is wanted else t)

        return _batches(one)(experiment)

    return apply


def _finite_rows(batch: Any) -> Any:
    rows = torch.stack([t.isfinite().reshape(len(t), -1).all(1) for t in tensors_in(batch)]).all(0)
    return mapped(batch, lambda t: t[rows]) if rows.any() else None


def _regrouped(order: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """Return the change of which sample stands where in the epoch, and with which target."""

    def change(experiment: Experiment) -> Subject:
        inputs, targets = zip(*(batch for batch, _, _ in experiment.epoch), strict=True)
        x, y = order(torch.cat(inputs), torch.cat(targets))
        loader = zip(*(t.split(list(map(len, inputs))) for t in (x, y)), strict=True)
        return replace(experiment.subject, loader=list(loader), dataset=None)

    return change


# ---- saving and resuming ----


def _saved_whole(experiment: Experiment) -> Subject:
    """Save model, scheduler, loader, optimizer (by name) and torch's generator too, and load them last of all."""
    subject: Any = experiment.subject

    def save() -> Any:
        things = {name: getattr(subject, name) for name in ("model", "scheduler", "loader")}
        states = {name: thing.state_dict() for name, thing in things.items() if hasattr(thing, "state_dict")}
        rates = [group["lr"] for group in subject.optimizer.param_groups]
        return subject.save(), states, moments_of(subject.model, subject.optimizer), rates, torch.get_rng_state()

    def resume(saved: Any) -> Any:
        own, states, moments, rates, generator = saved
        again = subject.resume(own)
        for name, state in states.items():
            again[name].load_state_dict(state)
        again["optimizer"].state.update({p: moments.get(n, {}) for n, p in again["model"].named_parameters()})
        for group, rate in zip(again["optimizer"].param_groups, rates, strict=True):
            group["lr"] = rate
        torch.set_rng_state(generator)
        return again

    return replace(subject, save=save, resume=resume)


# ---- which for which: where a cause has several, they are tried in this order ----

BOUNDED = "roots, logarithms, quotients and softmaxes inside their domains"
LOGITS = F.binary_cross_entropy_with_logits
# fmt: off
FIXES = (
    # data
    Fix("nan-in-inputs nan-in-targets", "samples that are not finite left out", _batches(_finite_rows)),
    Fix("label-dtype-float", "targets as integers", _part(1, lambda y, _: y.long())),
    Fix("label-out-of-range", "classes numbered from 0 on",
        _part(1, lambda y, ys: torch.where(y < 0, y, y - ys[ys >= 0].min()))),
    Fix("mask-0-255-bce", "targets from 0 to 1", _part(1, lambda y, ys: (y - ys.min()) / (ys.max() - ys.min()))),
    Fix("target-scale", "standardised targets", _part(1, lambda y, ys: (y - ys.mean()) / ys.std())),
    Fix("unnormalised-inputs", "standardised inputs", _part(0, lambda x, xs: (x - xs.mean()) / xs.std()), better=True),
    Fix("hwc-viewed-as-chw", "the view undone and the axes permuted",
        _part(0, lambda x, _: x.reshape(len(x), *x.shape[2:], x.size(1)).permute(0, 3, 1, 2))),
    Fix("last-batch-of-one-bn", "batches of one left out",
        _batches(lambda batch: batch if len(tensors_in(batch)[0]) > 1 else None)),
    *(Fix("labels-shifted-by-one", f"labels moved by {k}", _regrouped(partial(lambda k, x, y: (x, y.roll(k)), k)))
      for k in (-1, 1, -2, 2)),
    Fix("no-shuffle-sorted", "samples shuffled",
        _regrouped(lambda x, y: (x[order := torch.randperm(len(x))], y[order]))),
    Fix("class-imbalance class-weights-swapped", "classes weighted by one over their frequency", _weighted),
    # forward
    Fix("detach-cut whole-forward-no-grad data-inplace-wrong-grad", "a forward in which nothing is cut off",
        _forward(_inside(UNCUT))),
    Fix("inplace-residual", "backward with copies of the values it needs", _forward(_inside({}))),
    Fix("zero-gradient round-kills-gradient", "rounding with a straight-through gradient",
        _forward(_inside(ROUNDING))),
    Fix("nonfinite-activation nan-gradient", BOUNDED, _forward(_inside(DOMAINS))),
    Fix("log-of-zero loss-not-finite nan-gradient", f"{BOUNDED} in the loss", _loss(_inside(DOMAINS))),
    Fix("causal-leak", "attention with is_causal=True", _forward(_inside(CAUSAL))),
    Fix("squeeze-batch-dim", "the axis of the samples kept", _kept_axis),
    Fix("unregistered-list", "nn.ModuleList or nn.ModuleDict, and its weights optimized", _registered),
    Fix("left-in-eval eval-mode-stuck", "the model held in train mode",
        _each(_modules(nn.Module), lambda m: vars(m.train()).update(train=lambda mode=True: m))),
    Fix("missing-activation", "a ReLU behind each linear layer but the last",
        _forward(_then(F.relu), lambda e: _modules(nn.Linear)(e)[:-1]), better=True),
    Fix("final-relu", "without the last ReLU",
        _forward(lambda _, x: x, lambda e: _modules(nn.ReLU)(e)[-1:]), better=True),
    Fix("dropout-keep-prob", "1 - p in the place of p",
        _each(_modules(nn.modules.dropout._DropoutNd), lambda m: setattr(m, "p", min(m.p, 1 - m.p))), better=True),
    Fix("exploding-init exploding-gradients symmetric-init dead-relu", "weights drawn anew by reset_parameters()",
        _each(_modules(nn.Module), lambda m: hasattr(m, "reset_parameters") and m.reset_parameters())),
    # loss
    Fix("softmax-then-ce", "the logarithm of the output", _forward(_then(lambda p: (p + 1e-30).log())), better=True),
    Fix("softmax-then-ce", "the loss without the softmax", _loss(_inside({"softmax": lambda func, x, *_, **named: x}))),
    Fix("sigmoid-then-bcelogits", "the sigmoid undone", _forward(_then(lambda p: p.logit(1e-6))), better=True),
    Fix("wrong-sign", "the loss with the other sign", _loss(lambda own, *given: -own(*given))),
    Fix("mse-broadcast", "the target in the output's shape", _loss(lambda own, out, y: own(out, y.reshape_as(out)))),
    Fix("ce-single-logit", "binary cross-entropy of the one logit",
        _loss(lambda _, out, y: LOGITS(out.flatten(), y.flatten().to(out)))),
    Fix("bce-on-logits", "binary cross-entropy of logits", _loss(lambda _, out, y: LOGITS(out, y))),
    Fix("not-scalar", "the mean of the loss", _loss(lambda own, *given: own(*given).mean())),
    Fix("nll-on-logits", "the loss of log_softmax", _loss(lambda own, out, y: own(out.log_softmax(1), y))),
    Fix("all-ignored", "batches without a label left out",
        _batches(lambda batch: batch if bool((tensors_in(batch)[-1] >= 0).any()) else None)),
    Fix("trains-on-padding", "targets that are padding ignored", _unpadded),
    *(Fix("labels-shifted-twice labels-not-shifted", f"output t compared with target t + {k}",
          _loss(partial(_tokens, k))) for k in (0, 1)),
    Fix("loss-rewrapped", "a loss in which nothing is cut off", _loss(_inside(UNCUT))),
    # backward
    Fix("reentrant-checkpoint-no-grad", "inputs that require a gradient", _forward(lambda own, *given: own(*mapped(
        given, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t)))),
    Fix("vanishing-gradients", "ReLUs, and weights scaled for them",
        _each(_modules((nn.Linear, nn.Conv2d)), lambda m: nn.init.kaiming_normal_(m.weight),
              _forward(lambda _, x: F.relu(x), _modules((nn.Sigmoid, nn.Tanh))))),
    # update
    Fix("accum-tail-dropped", "a step at the end of each epoch", lambda e: replace(e.subject, on_epoch_end=lambda: [
        do() for one in e.subject.all_optimizers for do in (one.step, one.zero_grad)])),
    Fix("optimizer-stale-head not-in-optimizer", "an optimizer of the model's own parameters", _owned, better=True),
    Fix("gradient-ascent", "maximize=False", _each(_groups, lambda group: group.update(maximize=False))),
    Fix("fp16-adam-eps", "eps=1e-4", _each(_groups, lambda group: group.update(eps=1e-4))),
    Fix("betas-swapped", "betas in order",
        _each(_groups, lambda group: group.update(betas=tuple(sorted(group["betas"])))), better=True),
    Fix("weight-decay-crushing", "no weight decay",
        _each(_groups, lambda group: group.update(weight_decay=0.0)), better=True),
    Fix("warmup-zero-division update-not-finite lambda-returns-lr", "the first rate, without a schedule",
        _each(_groups, lambda group: group.update(lr=group["initial_lr"]), usual), better=True),
    Fix("scheduler-before-optimizer scheduler-per-batch", "the usual step, and scheduler.step() once an epoch",
        lambda e: replace(usual(e), on_epoch_end=e.subject.scheduler.step)),
    Fix("weights-changed-outside", "nothing at the end of an epoch", lambda e: replace(e.subject, on_epoch_end=None)),
    Fix("bf16-params-stuck", "weights and inputs in float32", _each(_modules(nn.Module), nn.Module.float, _batches(
        lambda batch: mapped(batch, lambda t: t.float() if t.is_floating_point() else t))), better=True),
    Fix("update-on-a-copy", "weights stored contiguously",
        _each(lambda e: list(e.subject.parameters.values()), lambda p: setattr(p, "data", p.data.contiguous()))),
    Fix("clip-too-tight", USUAL, usual, better=True),
    Fix("backward-missing backward-twice zero-grad-missing zero-grad-after-backward graph-kept-by-logging step-missing "
        "graph-used-twice hook-added-each-step optimizer-recreated-each-step weights-changed-every-step "
        "clip-out-of-order accumulation-cleared fp16-underflow-no-scaler scaler-bypassed scaler-update-missing "
        "clip-before-unscale loss-rewrapped wrong-sign gradient-ascent weights-changed-outside "
        "softmax-then-ce sigmoid-then-bcelogits nll-on-logits", USUAL, usual),
    # reproduce
    Fix("checkpoint-omits-frozen strict-false-loads-nothing resume-no-optimizer-state resume-no-scheduler "
        "resume-param-order-swapped resume-replays-order", "all states saved and loaded", _saved_whole),
)
