"""Whether the loss asks for what was meant."""

import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.observation import Step, leading, output_of
from dxdy_nb.diagnosis.probes import LONG, Experiment, set_lr
from dxdy_nb.diagnosis.reading import KINDS, Calls, Reading, bounds, floor
from dxdy_nb.diagnosis.report import Finding, found
from dxdy_nb.diagnosis.sameness import equal, replaced, same_tensor
from dxdy_nb.errors import counted
from dxdy_nb.nested import mapped, tensors_in

CLOSE = 1e-4
LARGE, SEARCH = 1_000_000, 100  # elements of an output that is searched for a better one, and steps
ASKED = """node = loss_fn(model(x), y).grad_fn  # or that of the loss in your own step
print(node, node.next_functions, node.next_functions[0][0].next_functions)  # what it is made of"""
PAIRS = 10_000_000  # of output and target, that are compared
PADDED = 0.1  # share of positions: fewer do not move the mean much


def _with_target(experiment: Experiment, y: Tensor) -> float:
    """Return the first step's loss with another target in the place of the recorded one."""
    step, old = experiment.first, experiment.target
    assert step is not None and old is not None
    call = step.losses[-1]
    args, kwargs = replaced((call.args, call.kwargs), old, y)
    with random_states(), torch.no_grad():
        return float(call.module(*args, **kwargs))


def _in_shape_of(experiment: Experiment, out: Tensor, y: Tensor) -> float:
    """Return the first step's loss with the output in the target's shape."""
    assert experiment.first is not None
    call = experiment.first.losses[-1]
    args, kwargs = mapped((call.args, call.kwargs), lambda t: t.reshape(y.shape) if same_tensor(t, out) else t)
    with random_states(), torch.no_grad():
        return float(call.module(*args, **kwargs))


def target_is_spread(experiment: Experiment) -> Iterator[Finding]:
    """Each target is compared with every output: the pairs can be shuffled and the loss stays the same."""
    reading, y = experiment.reading, experiment.target
    if reading is None or y is None or reading.gradient is None or y.dim() < 1 or len(y) < 4:
        return
    out = reading.output
    try:
        shape = torch.broadcast_shapes(out.shape, y.shape)
    except RuntimeError:
        return
    if math.prod(shape) <= max(out.numel(), y.numel()) or out.shape == y.shape:
        return
    told = f"output {list(out.shape)} and target {list(y.shape)} broadcast to {list(shape)}: "
    if experiment.first is None or not experiment.first.losses:
        if math.prod(shape) <= PAIRS and _is_of_all_pairs(out, y, reading.gradient):
            told += "the loss's slope at each output is that towards all targets at once, not towards its own"
            yield found("mse-broadcast", "the loss", told)
        return
    value = _with_target(experiment, y)
    if y.numel() == out.numel() and abs(_in_shape_of(experiment, out, y) - value) <= 1e-5 * abs(value):
        return  # as a distance of two sets has it, whatever their shapes
    shuffled = [_with_target(experiment, y[torch.arange(len(y)).roll(k)]) for k in (1, 3)]
    changed = _with_target(experiment, y + y.double().std().to(y) if y.is_floating_point() else y + 1)
    same = all(abs(v - value) <= 1e-5 * max(1.0, abs(value)) for v in shuffled)
    if same and abs(changed - value) > 1e-5 * max(1.0, abs(value)):
        yield found("mse-broadcast", "loss_fn", f"{told}shuffling the targets leaves the loss at {value:.6g}")


def _is_of_all_pairs(output: Tensor, target: Tensor, gradient: Tensor) -> bool:
    """Return whether a loss that is written out has the slope of squares, or of sizes, of output - target of all pairs.

    Any factor is allowed, so a mean, a sum and a root of one are alike. Where all targets are the same, so are all
    pairs: then nothing is said.
    """
    output, target, gradient = output.detach().double(), target.detach().double(), gradient.detach().double()
    apart = output - target
    slopes = (of.sum_to_size(output.shape) for of in (apart, apart.sign()))
    return float(target.std()) > 0 and any(
        float(F.cosine_similarity(slope.flatten(), gradient.flatten(), 0)) > 1 - 1e-6 for slope in slopes
    )


def single_logit(experiment: Experiment) -> Iterator[Finding]:
    """A softmax over one class is 1, whatever the logit: no loss, no gradient."""
    reading = experiment.reading
    if reading is None or reading.gradient is None or reading.kind not in ("cross_entropy", "soft_cross_entropy"):
        return
    if reading.output.dim() > 1 and reading.output.size(1) == 1 and not reading.gradient.any():
        yield found(
            "ce-single-logit",
            "loss_fn",
            f"cross-entropy over one class: loss {reading.value:.3g}, its gradient exactly 0",
        )


def wrong_input(experiment: Experiment) -> Iterator[Finding]:
    """The loss expects logits, probabilities or log-probabilities, and gets another of them."""
    told = next((step.misfed for step in experiment.seen.steps if step.misfed), None)
    reading = experiment.reading
    crossed = reading is not None and reading.kind in ("cross_entropy", "soft_cross_entropy")
    own, given = (_classes(map(of, experiment.seen.steps)) if crossed else 0 for of in (output_of, _given))
    again = f"and cross_entropy takes the softmax of it again: the loss cannot fall below {floor(own or given):.3g}"
    if own:
        yield found("softmax-then-ce", "loss_fn", f"the output is non-negative and sums to 1 in every row, {again}")
    elif told or given:
        cause, words = told or ("softmax-then-ce", f"it is given what is non-negative and sums to 1 in a row, {again}")
        yield replace(found(cause, "loss_fn", words), check=ASKED)


def _classes(given: Iterable[Tensor | None]) -> int:
    """Return the number of classes where all of these are probabilities of some, else 0."""
    scores = [t.float() for t in given if t is not None and t.dim() and t.numel()]
    rows = [t.transpose(1, -1) for t in scores if t.dim() > 1] or scores
    sums = all(bool((t >= 0).all()) and bool(((t.sum(-1) - 1).abs() < CLOSE).all()) for t in rows)
    return rows[0].size(-1) if rows and sums and rows[0].size(-1) > 1 else 0


def _given(step: Step) -> Tensor | None:
    """Return what torch's own cross_entropy was given, else the output."""
    own = [call for call in step.losses if call.module is F.cross_entropy or type(call.module) is nn.CrossEntropyLoss]
    return leading(own[-1].args) if own else output_of(step)


def impossible_arguments(experiment: Experiment) -> Iterator[Finding]:
    """An argument of the recognised loss is outside what it is defined for."""
    reading = experiment.reading
    if reading is None or reading.node is None:
        return
    weight = getattr(reading.node, "_saved_pos_weight", None)
    if weight is not None and bool((weight < 0).any()):
        yield found("pos-weight-negative", "loss_fn", f"pos_weight reaches {float(weight.min()):.3g}: positives repel")
    if reading.kind == "kl_div":
        given = reading.node.given
        if given is not None and given.dim() > 1 and bool((given > 1e-6).any()):
            yield found(
                "kl-input-not-log",
                "loss_fn",
                f"kl_div takes log-probabilities first; its input reaches {float(given.max()):.3g}, above 0",
            )


def out_of_reach(experiment: Experiment) -> Iterator[Finding]:
    """The last operation is bounded, and a good part of the targets of a regression lies beyond."""
    reading, own = experiment.reading, experiment.target
    targets = [y.flatten() for _, _, y in experiment.epoch if y is not None and y.is_floating_point()]
    if reading is None or reading.kind not in ("mse", "l1") or own is None or not targets:
        return
    out = leading(experiment.forward(grad=True))
    perfect = experiment.loss_of(own.view_as(out)) if out is not None and own.numel() == out.numel() else None
    if out is None or perfect is None or not abs(float(perfect)) < CLOSE * abs(reading.value):
        return  # it is not the output as it is that should be the target
    low, high = bounds(out)
    y = torch.cat(targets)
    beyond = float(((y < low - CLOSE) | (y > high + CLOSE)).float().mean())
    if beyond > 0.2 and low < high:
        yield found(
            "targets-out-of-reach",
            "the last operation",
            f"it keeps the output within {low:g} and {high:g}, and {beyond:.0%} of the targets lie beyond "
            f"({float(y.min()):.3g} to {float(y.max()):.3g})",
        )


def _signs(given: dict[str, Any]) -> str:
    y = given["target"]
    wrong = bool(((y == 0) | (y == 1)).all()) and bool((y == 0).any())
    return "targets are 1 and -1; here they are 0 and 1, and nothing is asked where they are 0" if wrong else ""


def _above(given: dict[str, Any]) -> str:
    low = 0.0 if given.get("log_target") else float(given["target"].min())
    return f"targets are counts or probabilities; they reach down to {low:.3g}" if low < -CLOSE else ""


def _transcript(given: dict[str, Any]) -> str:
    y, blank = given["targets"], given["blank"]
    lengths = torch.as_tensor(given["target_lengths"])
    labels = y[torch.arange(y.size(1)) < lengths[:, None].cpu()] if y.dim() == 2 else y
    if bool((labels == blank).any()):
        share = float((labels == blank).float().mean())
        return f"{share:.0%} of the labels are {blank}, which stands for the blank and can never be read"
    total = given["log_probs"].exp().sum(-1)
    if bool(((total - 1).abs() > 1e-3).any()):
        return f"it takes log-probabilities; exp of them sums to {float(total.mean()):.3g}, not 1"
    return ""


# What torch's losses are defined for: what is wrong with their arguments, in words.
PRECONDITIONS = {
    **dict.fromkeys(
        ("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"), _signs
    ),
    "ctc_loss": _transcript,
    "poisson_nll_loss": _above,
    "kl_div": _above,
}


def preconditions(experiment: Experiment) -> Iterator[Finding]:
    """A loss of torch is given what it is not defined for."""
    reading, y, step = experiment.reading, experiment.target, experiment.first
    whole = reading is not None and reading.kind in {*KINDS.values(), "cross_entropy"}  # a loss with rules of its own
    if step is None or step.error is not None or (whole and len(step.losses) == 1):
        return
    wrong: dict[str, list[str]] = {}

    def look(func: Any, args: Any, kwargs: Any) -> None:
        name = getattr(func, "__name__", "")
        if name in PRECONDITIONS and func.__module__ == F.__name__:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["reduction"] != "none":  # else something may be left out afterwards
                wrong.setdefault(name, []).append(PRECONDITIONS[name](bound.arguments))

    with Calls(look):
        for batch in experiment.batches[:2]:
            experiment.trial(batch)
    for name, words in wrong.items():
        if all(words):
            yield found("not-for-this-loss", name, words[0])
    if reading is None or reading.kind or y is None or y.shape != reading.output.shape or not y.is_floating_point():
        return
    margins = (1 - y * reading.output).clamp(min=0)
    hinge = any(abs(float(v) - reading.value) < CLOSE * abs(reading.value) for v in (margins.mean(), margins.sum()))
    if hinge and (said := _signs({"target": y})):
        yield found("not-for-this-loss", "a hinge loss", said)


def viewed(experiment: Experiment) -> Iterator[Finding]:
    """Scores were brought into another shape by a view where the axes should change places."""
    reading = experiment.reading
    g = reading.gradient if reading is not None else None
    if reading is None or g is None or reading.kind != "cross_entropy" or g.dim() < 3 or not g.any():
        return
    classes, largest = g.size(-1), float(g.abs().max())
    asked = g.reshape(len(g), classes, -1)

    def none(t: Tensor) -> bool:
        return float(t.abs().max()) < 1e-4 * largest

    if none(asked.sum(1)) and not none(g.sum(-1)) and not none(g.flatten(2).sum(1)) and asked.size(2) != classes:
        yield found(
            "class-axis-by-view",
            "loss_fn",
            f"the gradient at the output {list(g.shape)} sums to zero over no axis of it, and over the classes of a "
            f"view as {list(asked.shape)}: scores of one position are taken for another's",
        )


def averaged_twice(experiment: Experiment) -> Iterator[Finding]:
    """The loss is a mean, and was divided by the number of samples once more."""
    reading = experiment.reading
    reference = _reference(reading) if reading is not None and reading.gradient is not None else None
    if reading is None or reference is None or reading.gradient is None or len(reading.output) < 8:
        return
    n, factor = len(reading.output), float(reading.gradient.norm() / reference.norm().clamp_min(1e-30))
    if abs(factor * n - 1) > 1e-3 or float((reading.gradient * n - reference).norm()) > 1e-3 * float(reference.norm()):
        return
    ends = [n * experiment.ending(LONG, prepare=prepare) for prepare in (None, set_lr(n))]
    if ends[1] >= ends[0]:
        return
    yield found(
        "averaged-twice",
        "loss_fn",
        f"the loss of {n} samples is their mean divided by {n}; the mean after {LONG} steps is {ends[0]:.4g}, with {n} "
        f"times the learning rate {ends[1]:.4g}",
        severity="error" if ends[1] < 0.5 * ends[0] else "hint",
    )


def better_than_perfect(experiment: Experiment) -> Iterator[Finding]:
    """The loss gives 0 to the targets themselves, and less to something else within the output's range."""
    reading, y, call = experiment.reading, experiment.target, experiment.call
    if reading is None or reading.kind or reading.value <= 0 or y is None or not y.is_floating_point() or call is None:
        return
    losses = experiment.first.losses if experiment.first is not None else []
    alone = bool(losses) and len(tensors_in((losses[-1].args, losses[-1].kwargs))) == 2 and torch.is_tensor(call.output)
    if y.shape != reading.output.shape or y.numel() > LARGE or not alone or bool((y == y[:1]).all()):
        return
    perfect, out = experiment.loss_of(y), leading(experiment.forward(grad=True))
    if perfect is None or not abs(float(perfect)) < 0.01 * reading.value or out is None or _fixed(reading.output):
        return
    inside = bounds(out) == (0, 1)
    if not inside and bounds(out) != (-math.inf, math.inf):
        return
    free = (y.clamp(0.02, 0.98).logit() if inside else y).detach().clone().requires_grad_()
    search = torch.optim.Adam([free], 0.05)
    for _ in range(SEARCH):
        answer = free.sigmoid() if inside else free
        with torch.enable_grad():
            value = experiment.loss_of(answer)
        if value is None or value.grad_fn is None or not math.isfinite(float(value)):
            return
        if float(value) < -0.1 * reading.value:
            yield found(
                "perfect-is-not-best",
                "loss_fn",
                f"with the targets as the output the loss is {float(perfect):.3g}, and {float(value):.3g} with an "
                f"output that differs from them by {float((answer - y).abs().mean()):.3g} on average",
            )
            return
        search.zero_grad()
        value.backward()
        search.step()


def _fixed(out: Tensor) -> bool:
    """Return whether all rows have one length, or one sum: they were normalised."""
    rows = out.flatten(1) if out.dim() > 1 else out[:, None]
    return any(float(v.std()) < 0.01 * float(v.abs().mean()) for v in (rows.norm(dim=1), rows.sum(1)) if len(v) > 1)


def softmax_axis(experiment: Experiment) -> Iterator[Finding]:
    """The loss takes its softmax over the samples, not over the classes."""
    reading = experiment.reading
    if reading is None or reading.gradient is None or reading.output.dim() != 2 or reading.node is None:
        return
    g = reading.gradient
    y = reading.target
    softmax: Any = next(iter(getattr(reading.node, "next_functions", ())), (None,))[0]
    if type(softmax).__name__ != "LogSoftmaxBackward0" or softmax._saved_result.shape != g.shape or not g.any():
        return  # it is not the output itself that the softmax is taken of
    among = y is not None and y.dim() == 1 and torch.equal(y, torch.arange(len(y)).to(y))  # samples are compared
    if among or not reading.raw or experiment.subject.batch_coupled or min(g.shape) < 2:
        return
    over = [float(g.sum(axis).abs().max()) / float(g.abs().max()) for axis in (0, 1)]
    if over[0] < 1e-5 and over[1] > 1e-2:
        yield found(
            "log-softmax-over-batch",
            "loss_fn",
            "the gradient at the output sums to zero over the samples and not over the classes: the softmax runs over "
            "the batch",
        )


def targets_out_of_range(experiment: Experiment) -> Iterator[Finding]:
    """Targets are not what the recognised loss is defined for."""
    reading = experiment.reading
    given = _batch_tensors(experiment)[experiment.places[1] :][:1]
    if reading is None or not reading.raw or not (given and _same_numbers(given[0], reading.target)):
        return  # a target that is made of the batch's, or of nothing of it, as a discriminator's
    targets = [y for _, _, y in experiment.epoch if y is not None and y.numel()]
    if reading.kind == "bce_logits" and targets:
        low, high = min(float(y.min()) for y in targets), max(float(y.max()) for y in targets)
        own, g = reading.target, reading.gradient
        beyond = (own < 0) | (own > 1) if own is not None else torch.zeros(1, dtype=torch.bool)
        # What stands for a missing label is left out afterwards: no gradient comes from there.
        masked = beyond.any() and g is not None and g.shape == beyond.shape and not g[beyond].any()
        if (low < 0 or high > 1) and not masked:
            yield found(
                "mask-0-255-bce",
                "targets",
                f"binary_cross_entropy_with_logits needs targets within 0 and 1; they reach from {low:g} to {high:g}",
            )
    if (
        reading.kind == "cross_entropy"
        and reading.direct
        and targets
        and not any(y.is_floating_point() for y in targets)  # of some batches another loss's
        and reading.output.dim() > 1
    ):
        classes, ignored = reading.output.size(1), getattr(reading.node, "_saved_ignore_index", -100)
        bad = [y for y in targets if bool(((y != _signed(ignored)) & ((y < 0) | (y >= classes))).any())]
        if bad and reading.output.dim() == 2 and targets[0].dim() == 1:
            yield found(
                "label-out-of-range",
                "targets",
                f"labels reach from {min(int(y.min()) for y in bad)} to {max(int(y.max()) for y in bad)}; the output "
                f"has {counted(classes, 'class')}, 0 to {classes - 1}",
            )
    whole = [y for y in targets if not y.is_floating_point() or bool((y == y.round()).all())]
    if reading.kind == "mse" and len(whole) == len(targets) > 0 and not targets[0].is_floating_point():
        values = torch.cat([y.flatten() for y in targets]).unique()
        if 2 < len(values) <= 50:
            yield found(
                "mse-on-class-index",
                "loss_fn",
                f"integer targets with {len(values)} values are regressed with a squared error",
                severity="hint",
            )


def _same_numbers(a: Tensor, b: Tensor | None) -> bool:
    """Return whether two tensors hold the same numbers, perhaps in another shape or dtype."""
    return b is not None and a.numel() == b.numel() and equal(a.double().flatten(), b.double().flatten())


def _signed(index: int) -> int:
    """Return an index that a node may give as an unsigned number."""
    return index - 2**64 if index >= 2**63 else index


def class_weights(experiment: Experiment) -> Iterator[Finding]:
    """The class that is frequent already is weighted up, the rare one down."""
    reading = experiment.reading
    if reading is None or reading.kind != "cross_entropy":
        return
    weight = getattr(reading.node, "_saved_weight", None)
    targets = [y.flatten() for _, _, y in experiment.epoch if y is not None and not y.is_floating_point()]
    if weight is None or not targets or len(weight) < 2:
        return
    counts = torch.bincount(torch.cat(targets).clamp(min=0), minlength=len(weight))[: len(weight)].double()
    weight = weight.double()
    used = (counts > 0) & (weight > 0)  # a class with the weight 0 is left out on purpose
    rare, common = int(counts.where(used, math.inf).argmin()), int(counts.argmax())
    if counts[common] > 3 * counts[rare] and weight[common] > 2 * weight[rare]:
        yield found(
            "class-weights-swapped",
            "loss_fn",
            f"class {common} has {int(counts[common])} samples and weight {float(weight[common]):.3g}, class {rare} "
            f"has {int(counts[rare])} and {float(weight[rare]):.3g}",
        )


def below_zero(experiment: Experiment) -> Iterator[Finding]:
    """A loss between 0 and 1 rewards the perfect answer beyond its own bound."""
    reading, y = experiment.reading, experiment.target
    if reading is None or reading.kind or y is None or not y.is_floating_point() or y.shape != reading.output.shape:
        return
    out = reading.output
    if float(out.min()) < 0 or float(out.max()) > 1 or float(y.min()) < 0 or float(y.max()) > 1:
        return
    perfect = [float(v) for step in experiment.seen.steps[:6] if (v := _perfect(experiment, step.index)) is not None]
    usual = [step.value for step in experiment.seen.steps[:3]]
    if perfect and min(perfect) < -1e-3 and all(0 <= v <= 1.5 for v in usual[:1]):
        yield found(
            "dice-counts-eps-twice",
            "loss_fn",
            f"with the target itself as the output the loss is {min(perfect):.3g}; a loss 1 - overlap ends at 0",
        )


def _perfect(experiment: Experiment, index: int) -> Tensor | None:
    step = experiment.seen.steps[index]
    if not step.losses or not step.losses[-1].args:
        return None
    call = step.losses[-1]
    targets = [t for t in call.args[1:] if torch.is_tensor(t)]
    old = output_of(step)
    if not targets or old is None or targets[0].shape != old.shape:
        return None
    args, kwargs = replaced((call.args, call.kwargs), old, targets[0])
    with torch.no_grad(), random_states():
        return call.module(*args, **kwargs)


def reversed_divergence(experiment: Experiment) -> Iterator[Finding]:
    """The divergence is taken the other way round: KL(model | target)."""
    reading, y = experiment.reading, experiment.target
    if reading is None or y is None or not y.is_floating_point() or y.shape != reading.output.shape or y.dim() < 2:
        return
    rows = y.sum(-1)
    if bool((y < 0).any()) or bool(((rows - 1).abs() > 1e-3).any()):
        return
    out = reading.output
    q = out.log_softmax(-1)
    p = y.clamp_min(1e-12)
    forward = (p * (p.log() - q)).sum(-1)
    backward = (q.exp() * (q - p.log())).sum(-1)
    for scale in (1.0, 1.0 / y.size(-1)):
        ours, other = float(backward.mean()) * scale, float(forward.mean()) * scale
        if abs(reading.value - ours) < CLOSE * max(1.0, abs(ours)) and abs(ours - other) > 10 * CLOSE:
            yield found(
                "kldiv-swapped",
                "loss_fn",
                f"the loss {reading.value:.5g} is KL(model | target); KL(target | model) would be {other:.5g}",
                severity="hint",
            )
            return


def shifted(experiment: Experiment) -> Iterator[Finding]:
    """In next-token training each position must be asked for the token after it; the gradient tells which it is."""
    reading, x = experiment.reading, experiment.input
    if reading is None or x is None or reading.gradient is None or not experiment.subject.causal:
        return
    g = reading.gradient
    if x.is_floating_point() or x.dim() != 2 or g.dim() != 3 or g.shape[:2] != x.shape:
        return
    used = g.abs().sum(-1) > 0
    asked = g.argmin(-1)
    length = x.size(1)
    shares = {}
    for shift in range(4):
        here = used[:, : length - shift] if shift else used
        if bool(here.any()):
            shares[shift] = float((asked[:, : length - shift] == x[:, shift:])[here].float().mean())
    best = max(shares, key=shares.__getitem__, default=1)
    if shares and best != 1 and shares[best] > 0.99 and shares.get(1, 0.0) < 0.9:
        yield found(
            "labels-shifted-twice" if best > 1 else "labels-not-shifted",
            "loss_fn",
            f"the gradient asks position t for the input token t+{best} ({shares[best]:.0%} of positions), not t+1",
        )


def padding(experiment: Experiment) -> Iterator[Finding]:
    """Positions that are padding in input and target take part in the loss."""
    reading, x, y = experiment.reading, experiment.input, experiment.target
    pad = experiment.subject.pad_id
    embeddings = [m for m in experiment.subject.model.modules() if isinstance(m, torch.nn.Embedding)]
    if pad is None and embeddings and embeddings[0].padding_idx is not None:
        pad = embeddings[0].padding_idx
    if pad is None or reading is None or reading.gradient is None or x is None or x.is_floating_point():
        return
    step = experiment.first
    own = [t for t in _batch_tensors(experiment) if t.shape == x.shape and not t.is_floating_point() and t is not x]
    target = own[-1] if own else y
    if step is None or target is None or target.shape != x.shape or reading.gradient.shape[: x.dim()] != x.shape:
        return
    padded = (x == pad) & (target == pad)
    counted = reading.gradient.abs().flatten(x.dim()).sum(-1) > 0
    share = float((padded & counted).float().mean())
    if share > PADDED:
        yield found(
            "trains-on-padding",
            "loss_fn",
            f"{share:.0%} of all positions are padding (id {pad}) in input and target, and the loss has a gradient "
            "there",
            pad=pad,
        )


def _batch_tensors(experiment: Experiment) -> list[Tensor]:
    return tensors_in(experiment.first.batch) if experiment.first is not None else []


def wrong_sign(experiment: Experiment) -> Iterator[Finding]:
    """Going down the loss takes the output away from the target."""
    reading, y = experiment.reading, experiment.target
    if reading is None or reading.gradient is None or not reading.gradient.any():
        return
    if climbs(experiment):
        return  # whether that is meant is told by the updates
    shares = [b.share for step in experiment.seen.steps for b in step.backwards]
    down = -1.0 if shares and all(share < 0 for share in shares) else 1.0
    reference, g = _reference(reading), down * reading.gradient
    if reference is None:
        losses = experiment.first.losses if experiment.first is not None else []
        alone = bool(losses) and len(_floats(losses[-1].args)) == 1  # no rewards or weights, that could be negative
        bounded = down * reading.value >= 0  # away from these classes, as -log(1 - p) is, and not without end
        if y is not None and alone and not bounded and not reading.kind.startswith("cross") and _names_classes(y, g):
            away = float((g.gather(1, y[:, None]) > 0).float().mean())
            if away > 0.9:
                yield found(
                    "wrong-sign",
                    "loss_fn",
                    f"on {away:.0%} of the samples going down the loss lowers the score of the true class",
                )
        return
    a, b = (t.flatten() / t.abs().max().clamp_min(torch.finfo(t.dtype).tiny) for t in (g, reference))  # no underflow
    cosine = float(a @ b) / max(float(a.norm()) * float(b.norm()), 1e-30)
    if cosine < -0.9:
        yield found(
            "wrong-sign",
            "loss_fn",
            f"the loss's gradient at the output points against that of {reading.kind} (cosine {cosine:.3f}): each step "
            "takes the output away from the target",
        )


def climbs(experiment: Experiment) -> bool:
    """Return whether every group of the optimizers was told to maximise."""
    groups = [group for optimizer in experiment.subject.all_optimizers for group in optimizer.param_groups]
    return bool(groups) and all(group.get("maximize") for group in groups)


def _names_classes(y: Tensor, g: Tensor) -> bool:
    """Return whether a target holds one class index for each row of the output."""
    whole = not y.is_floating_point() and y.dim() == 1 and g.dim() == 2 and len(y) == len(g) and g.size(1) > 1
    return whole and bool(((y >= 0) & (y < g.size(1))).all())


def _reference(reading: Reading) -> Tensor | None:
    """Return the gradient that the recognised loss has by itself."""
    out, node = reading.output.detach().clone().requires_grad_(), reading.node
    y = getattr(node, "_saved_target", reading.target)
    if y is None:
        return None
    with torch.enable_grad():
        try:
            if reading.kind in ("cross_entropy", "nll"):
                flat = out.flatten(0, -2) if y.dim() == 1 and out.dim() > 2 else out
                function = F.cross_entropy if reading.kind == "cross_entropy" else F.nll_loss
                loss = function(flat, y, ignore_index=_signed(getattr(node, "_saved_ignore_index", -100)))
            elif reading.kind == "bce_logits":
                loss = F.binary_cross_entropy_with_logits(out, y.view_as(out))
            elif reading.kind in ("mse", "l1"):
                loss = F.mse_loss(out, y.view_as(out).to(out))
            else:
                return None
        except (RuntimeError, ValueError, IndexError):
            return None
        return torch.autograd.grad(loss, out)[0]


def not_a_number(experiment: Experiment) -> Iterator[Finding]:
    """Output and targets were finite, and the loss of them was not."""
    for step in experiment.seen.steps:
        if math.isfinite(step.value) or step.error is not None:
            continue
        out = output_of(step)
        given = [t for loss in step.losses for t in _floats((loss.args, loss.kwargs))]
        if out is None or not bool(torch.isfinite(out).all()) or not all(bool(torch.isfinite(t).all()) for t in given):
            return
        if not step.losses or math.isfinite(float(step.losses[-1].output)) or _overflows(out):
            return
        reading = experiment.reading
        ignored = _signed(getattr(reading.node, "_saved_ignore_index", -100)) if reading is not None else -100
        labels = [t for t in (step.losses[-1].args[1:2]) if torch.is_tensor(t) and not t.is_floating_point()]
        if labels and bool((labels[0] == ignored).all()):
            yield found(
                "all-ignored",
                f"step {step.index}",
                f"step {step.index}: every label is ignore_index ({ignored}), so the mean is 0/0",
            )
        elif step.lost is None or step.lost.operation in ("", "log"):  # else it is known, and another
            yield found(
                "log-of-zero",
                f"step {step.index}",
                f"step {step.index}: the output is finite (|output| up to {float(out.abs().max()):.3g}) and the loss "
                f"is {step.value}",
            )
        return


def _overflows(out: Tensor) -> bool:
    """Return whether squares of the output leave its own range: then the output is what is wrong."""
    return not bool(torch.isfinite(out.square().sum()))


def _floats(value: object) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point()]


def mean_of_means(experiment: Experiment) -> Iterator[Finding]:
    """Each micro-batch is averaged over its own tokens, so those of short sequences weigh more."""
    k, reading = experiment.subject.accumulation_steps, experiment.reading
    steps = [step for step in experiment.seen.steps[:k] if step.losses]
    if k < 2 or len(steps) < k or reading is None or reading.kind not in ("cross_entropy", "nll"):
        return
    ignored = _signed(getattr(reading.node, "_saved_ignore_index", -100))
    outs, targets, counts = [], [], []
    for step in steps:
        loss, out = step.losses[-1], output_of(step)
        y = next((t for t in loss.args[1:] if torch.is_tensor(t)), None)
        if out is None or y is None:
            return
        outs.append(out)
        targets.append(y)
        counts.append(int((y != ignored).sum()))
    shares = [b.share for step in steps for b in step.backwards if math.isfinite(b.share)]
    if max(counts) <= 1.05 * min(counts) or not shares or max(shares) > 1.05 * min(shares):
        return
    leaves = [out.detach().clone().requires_grad_() for out in outs]
    loss_fn = steps[0].losses[-1].module
    with torch.enable_grad(), random_states():
        mean = sum(loss_fn(out, y) for out, y in zip(leaves, targets, strict=True)) / k
        whole = loss_fn(torch.cat(leaves), torch.cat(targets))
        parts, window = (torch.cat([g.flatten() for g in torch.autograd.grad(v, leaves)]) for v in (mean, whole))
    alike = float(torch.cosine_similarity(parts, window, 0))
    if alike < 0.99:
        yield found(
            "accum-mean-of-means",
            "loss_fn",
            f"labels per micro-batch {counts}, each with the same weight: the gradient at the outputs has a cosine of "
            f"{alike:.2f} with that of the mean over the window (loss {float(mean):.4g} and {float(whole):.4g})",
        )


RULES = (
    not_a_number,
    target_is_spread,
    single_logit,
    softmax_axis,
    impossible_arguments,
    out_of_reach,
    preconditions,
    viewed,
    averaged_twice,
    better_than_perfect,
    wrong_input,
    targets_out_of_range,
    class_weights,
    wrong_sign,
    below_zero,
    reversed_divergence,
    shifted,
    padding,
    mean_of_means,
)
