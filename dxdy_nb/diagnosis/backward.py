"""Whether each gradient arrives, once, and is right."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.observation import Step, output_of
from dxdy_nb.diagnosis.probes import FEW, LONG, Experiment, NotRepeatable, OutOfTime, finite
from dxdy_nb.diagnosis.reading import graph_nodes
from dxdy_nb.diagnosis.report import Finding, found, listed
from dxdy_nb.diagnosis.sameness import equal, replaced
from dxdy_nb.diagnosis.subject import preserved
from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.nested import tensors_in

SQUARED = 1.8e19  # the largest number whose square is a float32
LOST = 1e-6  # of the last layer's gradient, each relative to its weights: five sigmoids take that much
STEPS = 0.99  # of the elements do not feel a small change: a function that rounds
LEAKS = 4  # graphs of earlier steps that are alive: one or two may be somebody's last loss


def no_backward(experiment: Experiment) -> Iterator[Finding]:
    """Nothing was derived: the optimizer had no gradients to use."""
    steps = experiment.seen.steps
    if len(steps) < FEW or any(step.backwards or step.error for step in steps) or experiment.seen.moved:
        return
    if any(not math.isnan(s.norm) for u in experiment.seen.updates for s in u.parameters.values()):
        return  # gradients came from elsewhere, as torch.autograd.grad
    if not (experiment.seen.updates or any(call.grad for step in steps for call in step.calls)):
        return  # it only collected: neither a graph was made nor an update
    yield found(
        "backward-missing",
        "the training step",
        f"{counted(len(steps), 'step')}, {counted(len(experiment.seen.updates), 'optimizer step')}, no backward; "
        "every gradient is None and "
        "no parameter moved",
    )


def loss_without_graph(experiment: Experiment) -> Iterator[Finding]:
    """Backward began at a leaf: the loss was built anew, and leads nowhere."""
    roots = [b for step in experiment.seen.steps for b in step.backwards]
    if roots and all(not b.root for b in roots) and not any(b.reached for b in roots):
        yield found(
            "loss-rewrapped",
            "the tensor that backward is called on",
            "it requires a gradient and has no grad_fn: it is a leaf, and backward ends where it begins",
        )


def nothing_arrives(experiment: Experiment) -> Iterator[Finding]:
    """Backward ran, and no parameter that is to be trained had a gradient at any update."""
    updates, backwards = experiment.seen.updates, [b for s in experiment.seen.steps for b in s.backwards]
    rows = [row for update in updates for row in update.parameters.values()]
    cut = all(math.isnan(row.norm) and not row.moved for row in rows) and not experiment.seen.moved
    if len(updates) < FEW or not backwards or any(b.reached or b.strangers or not b.root for b in backwards):
        return
    if rows and cut and not any(u.closure for u in updates):
        where, operation = _cut_line(experiment)
        yield found(
            "detach-cut",
            where or "between model and loss",
            f"{len(backwards)} backwards, {len(updates)} updates, and every gradient is None"
            + (f"; the graph is cut by {operation} at {where}" if where else ""),
        )


def backward_twice(experiment: Experiment) -> Iterator[Finding]:
    """The same tensor was derived twice, with no clearing between: every gradient is doubled."""
    twice = [step.index for step in experiment.seen.steps if any(b.repeated for b in step.backwards)]
    if len(twice) >= 2:
        yield found(
            "backward-twice",
            "the training step",
            f"at steps {listed(twice)} backward ran again on the same tensor, gradients not cleared between: doubled",
        )


def gradients_pile_up(experiment: Experiment) -> Iterator[Finding]:
    """Gradients that an update had used were still there at the next one."""
    updates = experiment.seen.updates
    dirty = [u for u in updates if u.dirty]
    if len(dirty) >= FEW and len(dirty) >= len(updates) - 2:
        names = dirty[-1].dirty
        norms = [max((u.parameters[n].norm for n in u.dirty), default=0.0) for u in dirty]
        yield found(
            "zero-grad-missing",
            listed(names),
            f"in {len(dirty)} of {len(updates)} updates the gradient still held that of the update before; largest "
            f"norm {norms[0]:.3g} → {norms[-1]:.3g}",
        )


def cleared_before_the_step(experiment: Experiment) -> Iterator[Finding]:
    """Backward gave gradients, and they were gone when the optimizer came."""
    updates = experiment.seen.updates
    emptied = [u for u in updates if u.cleared and not any(s.norm > 0 for s in u.parameters.values())]
    if len(emptied) >= 2 and len(emptied) >= len(updates) - 1 and not experiment.seen.moved:
        yield found(
            "zero-grad-after-backward",
            listed(emptied[0].cleared),
            f"in {len(emptied)} of {len(updates)} updates the gradients were cleared between backward and step",
        )


def gradient_does_not_arrive(experiment: Experiment) -> Iterator[Finding]:
    """The loss depends on a parameter (it was changed, and the loss with it), and its gradient is None or zero."""
    updates = experiment.seen.updates
    if len(updates) < FEW or experiment.first is None:
        return
    # Half precision rounds small gradients to zero: another stage's matter.
    half = any(call.autocast is torch.float16 for call in experiment.first.calls)
    asked: dict[str, str] = {}
    for name, p in experiment.subject.parameters.items():
        rows = [u.parameters[name] for u in updates if name in u.parameters]
        if len(rows) < FEW or not p.requires_grad or any(name in u.cleared for u in updates):
            continue
        if any(row.nonfinite for row in rows):  # it arrived, as NaN
            continue
        if all(math.isnan(row.norm) for row in rows):
            asked[name] = "None"
        elif not half and all(row.norm == 0 for row in rows if not math.isnan(row.norm)):
            asked[name] = "zero"
    if not asked or not any(s.norm > 0 for u in updates for s in u.parameters.values()):
        return
    asked = {name: kind for name, kind in asked.items() if kind != "None" or not _is_of_a_copy(experiment, name, asked)}
    lost = [name for name in asked if _depends(experiment, [name])]
    flat = [n for n, kind in asked.items() if kind == "zero" and not experiment.initial[n].any()]
    if not lost and len(flat) > 1 and _depends(experiment, flat):
        yield found(
            "zeros-multiplied",
            listed(flat),
            f"{listed(flat)} are zero and stay zero: each one's gradient is a product with another of them; the loss "
            "changes when all are moved at once",
        )
    for kind in ("None", "zero"):
        names = [name for name in lost if asked[name] == kind]
        if names:
            yield _cut_finding(experiment, names, kind)


def _is_of_a_copy(experiment: Experiment, name: str, asked: Iterable[str]) -> bool:
    """Return whether a module began, bit for bit, as another one that trains: a target network, without a gradient."""
    first, (top, _, _) = experiment.initial, name.partition(".")
    inside = {n.removeprefix(f"{top}."): p for n, p in first.items() if n.startswith(f"{top}.")}
    others = {n.partition(".")[0] for n in first} - {n.partition(".")[0] for n in asked}
    return any(p.count_nonzero() for p in inside.values()) and any(
        all(f"{other}.{n}" in first and equal(p, first[f"{other}.{n}"]) for n, p in inside.items()) for other in others
    )


def _depends(experiment: Experiment, names: list[str]) -> bool:
    """Return whether the loss changes with some parameters, all else and all random numbers being the same."""

    def shift(size: float) -> float:
        def prepare(subject: object) -> None:
            generator = torch.Generator().manual_seed(0)
            for name in names:
                p = experiment.subject.parameters[name]
                noise = torch.randn(p.shape, generator=generator).to(p)
                with torch.no_grad():
                    p.add_(noise * size * (p.float().square().mean().sqrt().to(p) + 1e-3))

        return experiment.trial(experiment.batches[0], prepare=prepare).value

    same = shift(0.0)
    moved = [shift(size) for size in (0.3, 3.0)]
    return any(math.isfinite(m) and abs(m - same) > 1e-6 * max(abs(same), 1e-6) for m in moved)


def _cut_finding(experiment: Experiment, names: list[str], kind: str) -> Finding:
    where, operation = _cut_line(experiment)
    gets = "no gradient" if kind == "None" else "a gradient of exactly zero"
    cause = {"argmax": "argmax-in-forward", "round": "round-kills-gradient", "sign": "round-kills-gradient"}
    usual = "detach-cut" if kind == "None" else "zero-gradient"
    warned = any("None of the inputs have requires_grad" in w for step in experiment.seen.steps for w in step.warned)
    if warned and kind == "None":
        return found(
            "reentrant-checkpoint-no-grad",
            listed(names),
            f"{listed(names)}: no gradient in any update; torch warned that the checkpoint's inputs need none",
        )
    return found(
        cause.get(operation, usual),
        where or listed(names),
        f"{listed(names)}: the loss changes with it, yet it has {gets} in every update"
        + (f"; the graph is cut by {operation} at {where}" if where else ""),
    )


def _cut_line(experiment: Experiment) -> tuple[str, str]:
    """Return the line of the reader's code that cuts the graph, and the operation, where a trial shows it."""
    from dxdy_nb.autograd.graph import graph
    from dxdy_nb.autograd.record import record

    try:
        with preserved(experiment.subject), record(experiment.subject.model) as rec:
            call = experiment.call
            assert call is not None
            output = call.module(*call.args, **call.kwargs)
            loss = experiment.loss_of(output)
            if loss is None:
                return "", ""
            for cut in graph(loss, experiment.subject.model, record=rec, gradients=False).cuts:
                if cut.where:
                    return cut.where, cut.operation
    except (DxdyError, RuntimeError, AssertionError):
        pass
    return "", ""


def nonfinite_gradient(experiment: Experiment) -> Iterator[Finding]:
    """The loss was finite and a gradient was not; or no loss was heard, and weights became not finite with it."""
    for step in experiment.seen.steps:
        heard = not math.isnan(step.value) or bool(step.losses)
        if step.lost is not None or (heard and not math.isfinite(step.value)):
            return
        for update in step.updates:
            bad = [n for n, s in update.parameters.items() if s.nonfinite and (heard or s.spoilt)]
            if bad and not update.scaled and "scale" not in step.events:
                function = _anomaly(experiment, step)
                told = f"the loss is {step.value:.4g}" if heard else "no loss was heard"
                yield found(
                    "nan-gradient",
                    function or listed(bad),
                    f"step {step.index}: {told}, the gradient of {listed(bad)} is not finite"
                    + (f"; {function} made it" if function else ""),
                )
                return


def _anomaly(experiment: Experiment, step: Step) -> str:
    """Return what detect_anomaly names: the first function of the backward pass that returned NaN."""
    if step.batch is None:
        return ""
    with suppress(NotRepeatable, OutOfTime), preserved(experiment.subject):
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            words = str(experiment.trial(step.batch).error or "")
        return words.split("'")[1] if words.startswith("Function '") else ""
    return ""


def exploding(experiment: Experiment) -> Iterator[Finding]:
    """Gradients overflow within the first steps, with or without the loss."""
    steps = experiment.seen.steps[:4]
    for step in steps:
        for update in step.updates:
            if update.scaled or "scale" in step.events:
                return
            out = output_of(step)
            overflown = out is not None and bool(torch.isfinite(out).all()) and not bool(out.square().sum().isfinite())
            bad = [n for n, s in update.parameters.items() if s.nonfinite and not math.isfinite(step.value)]
            if bad and not overflown:
                continue  # the output is not finite itself, or far from overflow: then the loss is what is wrong
            words = "not finite" if bad else "finite, but their squares are not,"
            bad = bad or [n for n, s in update.parameters.items() if s.norm > SQUARED and not s.nonfinite]
            if bad and step.index == 0:
                yield found(
                    "exploding-gradients",
                    listed(bad),
                    f"step {step.index}: loss {step.value:.4g}, gradients {words} before any update",
                )
                return


def vanishing(experiment: Experiment) -> Iterator[Finding]:
    """Gradients shrink to nothing on their way to the first layers."""
    updates = experiment.seen.updates[:FEW]
    weights = [n for n, p in experiment.subject.parameters.items() if p.dim() > 1]
    relative, products = [], []  # gradient / weight, and gradient · weight, of the last layer's
    for update in updates:
        rows = [(n, update.parameters[n]) for n in weights if n in update.parameters]
        rows = [(n, s) for n, s in rows if s.norm > 0 and s.weight > 0 and not s.nonfinite]
        if len(rows) < 3:
            return
        (_, first), (_, last) = rows[0], rows[-1]
        gradient, weight = first.norm / last.norm, first.weight / last.weight
        relative.append(gradient / weight)
        # Behind a last layer that begins near zero gradients are small, too, and gradient · weight, which is equal for
        # all layers where scales cancel, is not; a first layer has usually more weights, and so more of it.
        products.append(gradient * weight)
    if len(relative) == FEW and max(relative) < LOST and max(products) < 10 * LOST:
        yield found(
            "vanishing-gradients",
            weights[0],
            f"gradient relative to weight: that of {weights[0]} is {median(relative):.1e} of the last layer's",
        )


def graphs_kept(experiment: Experiment) -> Iterator[Finding]:
    """The graphs of earlier steps are still alive, more with each step."""
    kept = [step.graphs for step in experiment.seen.steps]
    last = max(kept[-2:], default=0)  # the last step of a script may be seen after all was let go
    if len(kept) > LEAKS + 3 and last >= LEAKS and last > kept[len(kept) // 2]:
        yield found(
            "graph-kept-by-logging",
            "what is carried from step to step",
            f"after step {len(kept) - 1} the graphs of {last} earlier steps are alive, after step "
            f"{len(kept) // 2} those of {kept[len(kept) // 2]}",
        )


def wrong_gradient(experiment: Experiment) -> Iterator[Finding]:
    """Autograd's gradient is not the slope of the loss."""
    from dxdy_nb.autograd.check import check_gradients

    subject, call = experiment.subject, experiment.call
    if call is None or subject.loss_fn is None or call.module is not subject.model or not experiment.batches:
        return
    batch = experiment.batches[0]
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(map(torch.is_tensor, batch))):
        return
    own = _own_functions(experiment)
    calls = _calls_of(experiment, own) if own else []
    if not own or any(_surrogate(*called) for called in calls):
        return
    if any(p.is_complex() for p in subject.parameters.values()):
        experiment.seen.notes.append("wrong gradient: weights are complex, and only real ones are checked")
        return
    if experiment.left() < 5:
        raise OutOfTime
    with preserved(subject):
        check = check_gradients(model=subject.model, loss_fn=subject.loss_fn, batch=_fewer(*batch))
    if check.verdict == "wrong":
        straight = any(_straight_through(kind, args) for kind, args, _ in calls)
        row = next(row for row in check.rows if row.name == check.worst)
        yield found(
            "wrong-custom-backward",
            row.name,
            f"autograd's slope {row.analytic:.6g}, finite differences {row.numeric:.6g} (float64, verdict wrong)"
            + ("; backward hands gradients on through a projection: straight-through, if that is meant" * straight),
            severity="hint" if straight else "error",
        )


def _own_functions(experiment: Experiment) -> set[Any]:
    """Return the autograd functions in the graph of the first loss that are not torch's."""
    loss = experiment.loss_of(experiment.forward(evaluate=False, grad=True))
    kinds = {getattr(type(node), "_forward_cls", None) for node in graph_nodes(loss)} if loss is not None else set()
    return {kind for kind in kinds if kind is not None and not kind.__module__.startswith("torch.")}


def _calls_of(experiment: Experiment, functions: set[Any]) -> list[tuple[Any, tuple[Any, ...], Any]]:
    """Return the calls of some functions in the first loss: function, arguments of its forward, result."""
    calls: list[tuple[Any, tuple[Any, ...], Any]] = []
    with ExitStack() as undo:
        for kind in functions:

            def watched(*args: Any, kind: Any = kind, original: Any = kind.forward) -> Any:
                calls.append((kind, args, original(*args)))
                return calls[-1][2]

            undo.callback(setattr, kind, "forward", staticmethod(kind.forward))
            kind.forward = staticmethod(watched)
        experiment.loss_of(experiment.forward(evaluate=False))
    return calls


def _surrogate(kind: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a function gives back its input, or steps: then its backward is another's on purpose."""
    given = next((t for t in args if torch.is_tensor(t) and t.is_floating_point()), None)
    if given is None or not torch.is_tensor(result) or result.shape != given.shape:
        return False
    with torch.no_grad():
        near = kind.forward(*(t * (1 + 1e-5) if t is given else t for t in args))
    return torch.equal(result, given) or float((near == result).float().mean()) > STEPS


def _straight_through(kind: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function is a projection, which done twice is done once, and its backward the identity."""
    given = args[1:] if isinstance(args[0], FunctionCtx) else args
    place = next((i for i, t in enumerate(given) if torch.is_tensor(t) and t.is_floating_point()), None)
    if place is None:
        return False

    def again(t: Tensor) -> Any:
        return kind.apply(*given[:place], t, *given[place + 1 :])

    leaf = given[place].detach().clone().requires_grad_()
    once = again(leaf)
    if not torch.is_tensor(once) or once.shape != leaf.shape or not torch.allclose(again(once.detach()), once):
        return False
    (slope,) = torch.autograd.grad(once.sum(), leaf, allow_unused=True)
    return slope is not None and bool((slope == 1).all())


def _fewer(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x[:8], y[:8]) if x.dim() and y.dim() and len(x) == len(y) else (x, y)


def recomputed(experiment: Experiment) -> Iterator[Finding]:
    """A checkpoint computes something else in backward than in forward, as with another dropout mask."""
    used: list[Any] = []

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        used.append(args)
        yield

    def direct(function: Any, preserve: bool, *args: Any) -> Any:
        used.append(args)
        return function(*args)

    if not experiment.batches or any(step.error for step in experiment.seen.steps):
        return
    stand_ins = {"_checkpoint_without_reentrant_generator": plain, "CheckpointFunction": SimpleNamespace(apply=direct)}
    with ExitStack() as undo:
        for name, other in stand_ins.items():
            undo.callback(setattr, checkpoint, name, getattr(checkpoint, name))
            setattr(checkpoint, name, other)
        without = experiment.trial(experiment.batches[0]).updates
    updates = experiment.trial(experiment.batches[0]).updates if used else []
    if not updates or not without:
        return
    pairs = {n: (s.norm, without[0].parameters[n].norm) for n, s in updates[0].parameters.items()}
    others = {n: pair for n, pair in pairs.items() if abs(pair[0] - pair[1]) > 0.01 * max(pair)}
    if others:
        name, norms = next(iter(others.items()))
        yield found(
            "checkpoint-computes-another",
            listed(others),
            f"the gradient of {name} has the norm {norms[0]:.4g}, and {norms[1]:.4g} without checkpoints on the same "
            "random numbers: backward computed another forward",
        )


def closure_piles_up(experiment: Experiment) -> Iterator[Finding]:
    """The optimizer calls its closure again and again, and each call adds to the gradients of the one before."""
    optimizer, norms = experiment.subject.optimizer, list[list[float]]()
    if optimizer is None or not any(len(step.backwards) > 1 for step in experiment.seen.steps):
        return
    original = optimizer.step

    def step(closure: Any = None) -> Any:
        def noted() -> Any:
            value = closure()
            grads = [p.grad for p in experiment.subject.parameters.values()]
            norms.append([0.0 if grad is None else float(grad.norm()) for grad in grads])
            return value

        def twice() -> Any:
            with random_states():
                noted()
            return noted()

        return original(twice if callable(closure) else closure)

    with preserved(experiment.subject):
        optimizer.step = step  # type: ignore[method-assign]
        experiment.train(experiment.batches[0])
    once, both = norms[:2] or ([], [])
    if len(norms) > 2 and any(once) and all(abs(b - 2 * a) <= 1e-3 * a for a, b in zip(once, both, strict=True)):
        yield found(
            "zero-grad-missing",
            "the closure",
            f"the optimizer calls its closure {len(norms) // 2} times a step; called twice on the same weights it "
            "leaves twice the gradient: nothing is cleared inside it",
        )


def collapses(experiment: Experiment) -> Iterator[Finding]:
    """Nothing is held fixed, and the loss is lowest where every output is the same: so they soon are."""
    step, call, y = experiment.first, experiment.call, experiment.target
    if step is None or call is None or not step.losses or experiment.output is None:
        return
    outs = [t for t in tensors_in(experiment.forward(evaluate=False, grad=True)) if t.is_floating_point()]
    width = outs[0].size(-1) if outs[0].dim() > 1 else 1
    if width < 2 or len(outs[0]) < 4 or not all(t.requires_grad and t.dim() > 1 and t.size(-1) == width for t in outs):
        return
    given = other = constant = step.losses[-1].args, step.losses[-1].kwargs
    one = outs[0].detach().flatten(0, -2)[0]
    for old in tensors_in(call.output):
        constant = replaced(constant, old, one.expand_as(old).contiguous())
    if y is not None:
        if not y.dim() or torch.equal(y, y.flip(0)):
            return
        other = replaced(given, y, y.flip(0))
    with torch.no_grad():
        usual, blind, lowest = (float(step.losses[-1].module(*a, **k)) for a, k in (given, other, constant))
    losses = finite(experiment.again(LONG)) if usual == blind and lowest < usual else []
    if len(losses) == LONG and lowest <= min(losses) and losses[-1] - lowest < 0.2 * (losses[0] - lowest):
        yield found(
            "collapse-to-constant",
            "loss_fn",
            f"with one vector as every output the loss is {lowest:.4g}, the lowest there is; no output is detached, no "
            f"target is used, and in {LONG} steps the loss falls {losses[0]:.4g} → {losses[-1]:.4g}",
        )


def hooks_pile_up(experiment: Experiment) -> Iterator[Finding]:
    """Each step adds a hook to the gradients, so the same correction is made more and more often."""
    added = experiment.seen.final.get("hooks", {})
    steps = len(experiment.seen.steps)
    names = [name for name, count in added.items() if count >= max(FEW, steps - 1)]
    if names:
        yield found(
            "hook-added-each-step",
            listed(names),
            f"{listed(names)} gained {added[names[0]]} gradient hooks in {steps} steps",
        )


def frozen_by_attribute(experiment: Experiment) -> Iterator[Finding]:
    """A module was given an attribute requires_grad, which torch does not read."""
    for name, module in experiment.subject.model.named_modules():
        if vars(module).get("requires_grad") is False and any(p.requires_grad for p in module.parameters()):
            yield found(
                "freeze-by-module-attribute",
                name or "model",
                "its attribute requires_grad is False, its parameters still require gradients and are trained",
            )


def frozen_parts(experiment: Experiment) -> Iterator[Finding]:
    """Most is frozen, the layer that makes the output too; or a frozen BatchNorm still learns its statistics."""
    model = experiment.subject.model
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m.weight is not None]
    if layers and 0 < trainable < 0.2 * sum(p.numel() for p in parameters) and not layers[-1].weight.requires_grad:
        yield found(
            "frozen-all-but-norm",
            experiment.subject.name_of(layers[-1]),
            f"only {trainable} of {sum(p.numel() for p in parameters)} weights train, and the last layer is frozen",
            severity="hint",
        )
    moved = experiment.seen.final.get("buffers", ())
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.weight is None:
            continue
        if not module.weight.requires_grad and f"{name}.running_mean" in moved:
            yield found(
                "frozen-bn-drifts",
                name,
                "its weights are frozen and its running statistics change in training",
                severity="hint",
                name=f"{name!r}",
            )
            return


RULES = (
    no_backward,
    loss_without_graph,
    nothing_arrives,
    backward_twice,
    gradients_pile_up,
    cleared_before_the_step,
    gradient_does_not_arrive,
    nonfinite_gradient,
    exploding,
    vanishing,
    graphs_kept,
    wrong_gradient,
    recomputed,
    closure_piles_up,
    collapses,
    hooks_pile_up,
    frozen_by_attribute,
    frozen_parts,
)
