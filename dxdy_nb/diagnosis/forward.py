"""Whether the model computes what was meant, sample by sample."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dxdy_nb.diagnosis.observation import leading
from dxdy_nb.diagnosis.probes import LONG, Experiment, lower_by, set_lr
from dxdy_nb.diagnosis.reading import graph_nodes
from dxdy_nb.diagnosis.report import Finding, found, listed
from dxdy_nb.diagnosis.sameness import same_tensor
from dxdy_nb.diagnosis.subject import preserved
from dxdy_nb.nested import tensors_in

NORMS = (nn.modules.batchnorm._BatchNorm,)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DEAD = 0.95  # of a layer's units, zero for every sample
FEWEST = 8  # samples that a statement about all samples needs
STRAIGHT = 1e-5  # of the way between two outputs that the one half way is off the middle
TRAINED = 15  # steps after which a zero-initialised branch has left zero


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def no_graph(experiment: Experiment) -> Iterator[Finding]:
    """The training forward was not recorded."""
    step = next((s for s in experiment.seen.steps if s.error is not None), None)
    calls = step.calls if step is not None else []
    if (
        step is not None
        and calls
        and not any(call.grad for call in calls)
        and "does not require grad" in str(step.error)
    ):
        yield found(
            "whole-forward-no-grad",
            experiment.subject.name_of(calls[0].module),
            "its forward ran with gradients switched off, and backward was called on what came of it",
        )


def settings(experiment: Experiment) -> Iterator[Finding]:
    """A layer's setting contradicts what the layer is for."""
    listed: dict[int, int] = {}
    for name, module in experiment.subject.model.named_modules():
        if isinstance(module, DROPOUTS) and module.p >= 0.9:
            yield found(
                "dropout-keep-prob",
                name,
                f"p={module.p}: of all units {module.p:.0%} are zeroed in training",
                dropped=f"{1 - module.p:.2g}",
                kept=f"{module.p:g}",
                name=f"{name!r}",
            )
        momentum = getattr(module, "momentum", None)
        if isinstance(module, NORMS) and module.track_running_stats and _odd(module):
            yield found(
                "bn-momentum-frozen",
                name,
                f"momentum={momentum}: running statistics are "
                + ("never updated" if momentum == 0 else f"those of the last batch to {momentum:.1%}"),
                name=f"{name!r}",
            )
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for child in module:
                if any(p.requires_grad for p in child.parameters()):
                    listed[id(child)] = listed.get(id(child), 0) + 1
    if listed and max(listed.values()) > 1:
        yield found(
            "repeated-layer-shared",
            "model",
            f"one module object is listed {max(listed.values())} times: these layers share their weights",
            severity="hint",
        )


def _odd(norm: Any) -> bool:
    """Return whether statistics are never learned, or those of the last batch; learned ones may be kept by a 0."""
    never = norm.momentum == 0 and not (norm.running_mean is not None and norm.running_mean.any())
    return norm.momentum is not None and (never or 0.9 <= norm.momentum < 1)


def first_nonfinite(experiment: Experiment) -> Iterator[Finding]:
    """The input was finite, and a module made something of it that is not."""
    for step in experiment.seen.steps:
        if step.batch is None or math.isfinite(step.value):  # a loss may leave out what was masked with infinity
            continue
        calls = [c for c in step.calls if not _finite(c.output) and _finite((c.args, c.kwargs))]
        if not calls or not all(bool(torch.isfinite(p).all()) for p in experiment.initial.values()):
            return
        if _finite(_again(calls[0], experiment)):
            return  # the weights as they were given bear this batch: training spoilt them, another stage's matter
        where = _where_nonfinite(experiment, step.index, calls[0])
        yield found(
            "nonfinite-activation",
            where or experiment.subject.name_of(calls[0].module),
            f"step {step.index}: its input is finite, its output is not",
        )
        return


def _again(call: Any, experiment: Experiment) -> Any:
    with preserved(experiment.subject), torch.no_grad():
        return call.module(*call.args, **call.kwargs)


def _where_nonfinite(experiment: Experiment, index: int, call: Any) -> str:
    """Return the innermost module that first made something not finite of finite input, on that batch."""
    found: list[str] = []
    names = {id(m): n for n, m in experiment.subject.model.named_modules()}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if not found and not _finite(output) and _finite(args):
            found.append(names.get(id(module), ""))

    modules = experiment.subject.model.modules()
    with suppress(Exception), _hooked(modules, look), experiment.after(index), torch.no_grad():
        call.module(*call.args, **call.kwargs)
    return found[0] if found else ""


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors_in(value) if t.is_floating_point())


def sizes(experiment: Experiment) -> Iterator[Finding]:
    """Activations grow beyond all measure from layer to layer."""
    x = experiment.input
    if experiment.call is None or x is None:
        return
    sizes: list[tuple[str, float]] = []
    names = {id(m): name for name, m in experiment.subject.model.named_modules() if name}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names and torch.is_tensor(output) and output.is_floating_point() and output.numel():
            sizes.append((names[id(module)], _lower(output)))

    with _hooked(experiment.subject.model.modules(), look):
        experiment.forward(evaluate=False)
    known = [
        float(t.abs().max()) for t in (x, experiment.target) if t is not None and t.is_floating_point() and t.numel()
    ]
    largest = max(known, default=1.0)
    over = [(name, size) for name, size in sizes if 1e4 * (1 + largest) < size < math.inf]
    if over and math.isfinite(largest):
        yield found(
            "exploding-init",
            over[0][0],
            f"before any training three of four activations exceed {over[-1][1]:.3g}; inputs and targets reach "
            f"{largest:.3g}",
        )


def _lower(t: Tensor) -> float:
    """Return what three quarters of a tensor exceed in size: a mask's few huge entries do not count."""
    return float(t.detach().abs().flatten().float().kthvalue(1 + t.numel() // 4).values)


def dead_units(experiment: Experiment) -> Iterator[Finding]:
    """Nearly all units behind a ReLU are zero for every sample, so nothing flows back."""
    out = leading(experiment.forward(evaluate=False, grad=True)) if experiment.call is not None else None
    if out is None or out.grad_fn is None:
        return
    for node in graph_nodes(out):
        if type(node).__name__ != "ReluBackward0":
            continue
        result = node._saved_result
        if result.dim() < 2 or len(result) < FEWEST or result[0].numel() < 4:
            continue
        share = float((result.flatten(1) == 0).all(0).float().mean())
        if share > DEAD:
            yield found(
                "dead-relu",
                "a ReLU of shape " + str(list(result.shape)),
                f"{share:.0%} of its units are zero for all {len(result)} samples",
            )
            return


def range_of_output(experiment: Experiment) -> Iterator[Finding]:
    """The last operation cannot give what a good part of the targets asks for."""
    y, out = experiment.target, experiment.output
    if y is None or out is None or not y.is_floating_point() or y.shape != out.shape:
        return
    negative = float((y < 0).float().mean())
    if negative > 0.2 and experiment.last_operation == "Relu":
        yield found(
            "final-relu",
            "the last operation",
            f"the output ends in a ReLU, and {negative:.0%} of the targets are negative",
        )


def over_one_element(experiment: Experiment) -> Iterator[Finding]:
    """A softmax or a normalisation over a single element gives the same for every input."""
    for name, module in experiment.subject.model.named_modules():
        if isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape) == 1:
            yield found("norm-of-one", name, "LayerNorm over one element: its output is its bias, whatever comes in")
    x = experiment.input
    if x is None or any(b is not None and b.shape[1:] != x.shape[1:] for _, b, _ in experiment.epoch):
        return  # an axis that is one element long here may be longer in another batch
    softmaxes = _softmaxes(experiment, x)
    for dim, shape in softmaxes:
        if shape and shape[dim] == 1:
            yield found(
                "softmax-of-one",
                f"softmax(dim={dim}) of shape {shape}",
                "a softmax over an axis of length one is 1 everywhere, and has no gradient",
            )
    fewer = [(dim, [len(x) // 2, *shape[1:]]) for dim, shape in softmaxes if dim == 0 and shape[:1] == [len(x)]]
    out = experiment.output
    if not fewer or len(x) < 4 or experiment.coupled or out is None or not out.dim() or len(out) != len(x):
        return
    for dim, shape in _softmaxes(experiment, x[: len(x) // 2]):
        if (dim, shape) in fewer and len(shape) > 1:
            yield found(
                "softmax-over-batch",
                f"softmax(dim=0) of shape {[len(x), *shape[1:]]}",
                f"the softmax runs over the axis of the {len(x)} samples, so samples compete with each other",
            )
            return


def _softmaxes(experiment: Experiment, x: Tensor) -> list[tuple[int, list[int]]]:
    """Return axis and shape of each softmax behind the output for an input."""
    out = leading(experiment.forward(x, grad=True)) if experiment.call is not None else None
    nodes = graph_nodes(out) if out is not None and out.grad_fn is not None else []
    asked = [n for n in nodes if type(n).__name__ in ("SoftmaxBackward0", "LogSoftmaxBackward0")]
    return [(_axis(n._saved_dim, n._saved_result.dim()), list(n._saved_result.shape)) for n in asked]


def _axis(dim: int, dims: int) -> int:
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim % dims if dims else 0


def dropout_at_the_end(experiment: Experiment) -> Iterator[Finding]:
    """The last thing that the model does is to drop parts of its answer."""
    called: list[tuple[Any, Any]] = []
    drops = [m for m in experiment.subject.model.modules() if isinstance(m, DROPOUTS) and m.p > 0 and m.training]
    with _hooked(drops, lambda m, i, o: called.append((m, o))):
        out = leading(experiment.forward(evaluate=False)) if experiment.call is not None and drops else None
    reading, (last, dropped) = experiment.reading, (called or [(None, None)])[-1]
    if out is not None and torch.is_tensor(dropped) and same_tensor(dropped, out):
        yield found(
            "dropout-on-output",
            experiment.subject.name_of(last),
            f"the last layer is a dropout with p={last.p}: in training {last.p:.0%} of the outputs are zero",
            severity="error" if reading is not None and reading.kind and reading.direct and reading.raw else "hint",
        )


def random_in_eval(experiment: Experiment) -> Iterator[Finding]:
    """Dropout is active in eval mode."""
    if experiment.call is None:
        return
    explicit: list[bool] = []
    originals = {n: getattr(F, n) for n in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")}

    def watching(original: Any) -> Any:
        signature = inspect.signature(original)

        def observed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = "training" in bound.arguments
            bound.apply_defaults()
            if bound.arguments["training"] and bound.arguments["p"] > 0:
                explicit.append(given)
            return original(*args, **kwargs)

        return observed

    try:
        for name, original in originals.items():
            setattr(F, name, watching(original))
        experiment.forward()
    finally:
        for name, original in originals.items():
            setattr(F, name, original)
    if explicit:
        meant = all(explicit)
        yield found(
            "functional-dropout-eval",
            "F.dropout",
            f"{len(explicit)} dropout calls are active in eval mode"
            + (", with training=True spelled out" if meant else ": training= was left at its default, True"),
            severity="hint" if meant else "error",
        )


def samples_mix(experiment: Experiment) -> Iterator[Finding]:
    """The output of a sample changes when only the other samples are replaced."""
    x, out = experiment.input, experiment.output
    if x is None or out is None or experiment.coupled or x.dim() < 2 or out.dim() < 1:
        return
    n = len(x)
    if experiment.call is not None and any(isinstance(given, PackedSequence) for given in experiment.call.args):
        return  # its first axis holds steps of all samples
    if n < 4 or len(out) != n or len(experiment.epoch) < 2:
        return  # one batch that is all there is may be a graph, whose nodes belong together
    if not any(same_tensor(x, t) for t in tensors_in(experiment.first.batch if experiment.first else None)):
        return  # what the step made of the batch may have another axis in front
    with torch.no_grad():
        base, again = leading(experiment.forward()), leading(experiment.forward())
        if base is None or again is None or not torch.equal(base, again):
            return
        others = [b for _, b, _ in experiment.epoch[1:] if b is not None and b.shape == x.shape]
        stranger, half, change = others[0] if others else x.roll(n // 2, 0), n // 2, 0.0
        scale = float(base.abs().max()) + 1e-12
        # Either half in turn: a recurrent net that runs over samples leaves the first ones alone.
        for kept in (torch.arange(n) < half, torch.arange(n) >= half):
            mixed = leading(
                experiment.forward(torch.where(kept.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, stranger))
            )
            if mixed is None or mixed.shape != base.shape:
                return
            change = max(change, float((base[kept] - mixed[kept]).abs().max()))
        if not change > 1e-4 * scale:
            return
        order = torch.arange(n).roll(1)
        moved = leading(experiment.forward(x[order]))
        by_design = moved is not None and float((moved - base[order]).abs().max()) < 1e-4 * scale
        factor = _shrinks(experiment, x, base) if by_design else 1.0
        if factor < 1:
            yield found(
                "shrinks-with-batch",
                "model",
                f"in eval mode, with each sample of the batch given twice, all differences between outputs are "
                f"{factor:.3g} times what they were: something is divided by what the whole batch holds",
            )
            return
        if x.dim() > 2 and out.dim() > 2 and out.size(1) == x.size(1) > 1:  # time may come first
            aside = torch.cat([x[:, :1], x[:, 1:].roll(1, 0)], 1)
            beside = leading(experiment.forward(aside))
            by_design |= beside is not None and float((base[:, 0] - beside[:, 0]).abs().max()) < 1e-4 * scale
    yield found(
        "view-not-permute",
        "model",
        f"in eval mode outputs move by {change:.3g} (of {scale:.3g}) when only other samples of the batch change"
        + ("; it treats all alike, or the second axis is that of the samples: this may be meant" if by_design else ""),
        severity="hint" if by_design else "error",
    )


def _shrinks(experiment: Experiment, x: Tensor, base: Tensor) -> float:
    """Return what outputs are multiplied by when each sample is given twice; 1 where that is not one number below 1."""
    if experiment.call is None or len(tensors_in((experiment.call.args, experiment.call.kwargs))) != 1:
        return 1.0
    twice = leading(experiment.forward(torch.cat([x, x])))
    if twice is None or len(twice) != 2 * len(x):
        return 1.0
    before, after = base[1:] - base[:1], twice[1 : len(x)] - twice[:1]
    factor = float((before * after).sum() / before.square().sum().clamp_min(1e-30))
    exact = float((after - factor * before).norm()) < 1e-3 * float(before.norm())
    return factor if exact and 0.4 < factor < 0.8 else 1.0  # 1/2 for a sum, 0.71 for a norm


def rows_shared(experiment: Experiment) -> Iterator[Finding]:
    """Token ids beyond the embedding's rows all get one row."""
    x, given = experiment.input, list[tuple[Any, Tensor]]()
    if x is None or x.is_floating_point() or x.is_complex() or experiment.call is None:
        return
    tables = [m for m in experiment.subject.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    with _hooked(tables, lambda m, args, output: given.append((m, args[0]))):
        experiment.forward()
    given = [(m, ids) for m, ids in given if torch.is_tensor(ids) and ids.shape == x.shape]
    if any(torch.equal(ids, x) for _, ids in given):
        return
    for module, ids in given:
        beyond = x >= module.num_embeddings
        if torch.equal(ids[~beyond], x[~beyond]) and len(ids[beyond].unique()) == 1 < len(x[beyond].unique()):
            share = float(beyond.float().mean())
            yield found(
                "ids-share-a-row",
                experiment.subject.name_of(module),
                f"{share:.0%} of the tokens have ids from {module.num_embeddings} to {int(x.max())}; all get row "
                f"{int(ids[beyond][0])} of a table of {module.num_embeddings}",
                severity="error" if share > 0.5 else "hint",
            )


def _padding_of(experiment: Experiment) -> Tensor | None:
    """Return which positions of the input are padding that was declared; None where there is none."""
    x, pad = experiment.input, experiment.subject.pad_id
    if pad is None or x is None or x.is_floating_point() or x.dim() != 2 or not bool((x == pad).any()):
        return None
    return x == pad


def reads_padding_only(experiment: Experiment) -> Iterator[Finding]:
    """Other real tokens beside the same padding give the same output: the mask is the wrong way round."""
    x, padded, out = experiment.input, _padding_of(experiment), experiment.output
    if x is None or padded is None or out is None or len(out) != len(x):
        return
    other = x.clone()
    other[~padded] = x[~padded].roll(len(x) // 2 + 1)
    rows = padded.any(1) & (other != x).any(1)
    if int(rows.sum()) < FEWEST:
        return
    with experiment.after(min(TRAINED, max(1, len(experiment.seen.steps)))):
        base, moved = leading(experiment.forward()), leading(experiment.forward(other))
    # Where outputs are what they were at the start, nothing that was learnt shows in them yet.
    first = leading(experiment.forward())
    learnt = base is not None and first is not None and not torch.equal(base[rows], first[rows])
    if learnt and base is not None and moved is not None and torch.equal(base[rows], moved[rows]):
        yield found(
            "reads-padding-only",
            "the padding mask",
            f"other tokens at all real positions of {int(rows.sum())} sequences: not a bit of their outputs changes",
            pad=experiment.subject.pad_id,
        )


def last_step_read(experiment: Experiment) -> Iterator[Finding]:
    """Of a recurrent layer's outputs the last step alone is read, which has not seen what it should tell of."""
    padded, given = _padding_of(experiment), dict[Any, Any]()
    ends = padded is not None and float(padded[:, -1].float().mean()) > 0.5
    layers = [m for m in experiment.subject.model.modules() if isinstance(m, nn.RNNBase) and (ends or m.bidirectional)]
    out = None
    if layers and experiment.call is not None:
        with _hooked(layers, lambda m, i, o: given.__setitem__(m, o)):
            out = leading(experiment.forward(evaluate=False, grad=True))
    for layer, (steps, states) in given.items():
        if out is None or isinstance(steps, PackedSequence) or steps.dim() != 3 or not steps.requires_grad:
            continue
        parts = [steps, *tensors_in(states)]
        slopes = torch.autograd.grad(out.abs().sum(), parts, allow_unused=True, retain_graph=True)
        if slopes[0] is None or any(slope is not None for slope in slopes[1:]):
            continue
        g = slopes[0] if layer.batch_first else slopes[0].transpose(0, 1)
        if not g[:, -1].any() or g[:, :-1].any():
            continue
        usual, other = experiment.ending(LONG), _read_at_the_ends(experiment, layer, ends)
        if other >= usual:
            continue
        yield found(
            "last-step-read",
            experiment.subject.name_of(layer),
            "only its outputs at the last step are used: "
            + ("padding stands there" if ends else "their backward half has seen one step")
            + f"; loss after {LONG} steps {usual:.4g}, with the state at each sequence's own end {other:.4g}",
            severity="error" if lower_by(0.5, other, usual) else "hint",
        )


def _read_at_the_ends(experiment: Experiment, layer: Any, padded: bool) -> float:
    """Return where training ends when a recurrent layer's last step holds what either direction ends with."""
    tokens: list[Tensor] = []

    def note(batch: Any) -> Any:
        tokens.append(tensors_in(batch)[experiment.places[0]])
        return batch

    def ends(module: nn.Module, args: Any, output: Any) -> tuple[Tensor, Any]:
        steps = output[0] if layer.batch_first else output[0].transpose(0, 1)
        last = torch.full((len(steps),), steps.size(1) - 1)
        if padded:
            last = (tokens[-1].ne(experiment.subject.pad_id or 0).sum(1) - 1).clamp(min=0)
        half = steps.size(2) // (1 + layer.bidirectional)
        state = torch.cat([steps[torch.arange(len(steps)), last, :half], steps[:, 0, half:]], 1)
        steps = torch.cat([steps[:, :-1], state[:, None]], 1)
        return steps if layer.batch_first else steps.transpose(0, 1), output[1]

    with _hooked([layer], ends):
        return experiment.ending(LONG, batch=note)


def sees_the_future(experiment: Experiment) -> Iterator[Finding]:
    """Outputs of early positions change when only later tokens do."""
    x, out, y = experiment.input, experiment.output, experiment.target
    tokens = list(tensors_in(experiment.first.batch)) if experiment.first is not None else []
    if x is None or out is None or x.is_floating_point() or x.dim() != 2 or x.size(1) < 4 or out.dim() != 3:
        return
    targets = [t.view(x.shape) for t in [y, *tokens] if t is not None and t.numel() == x.numel() and t is not x]
    next_token = any(bool((t[:, :-1] == x[:, 1:]).all()) for t in targets)
    if not (experiment.subject.causal or next_token) or out.shape[:2] != x.shape:
        return
    middle = x.size(1) // 2
    changed = x.clone()
    changed[:, middle:] = x[:, middle:].roll(1, 0) if len(x) > 1 else x[:, middle:].flip(1)
    with torch.no_grad():
        base, other = leading(experiment.forward()), leading(experiment.forward(changed))
    if base is None or other is None:
        return
    change = float((base[:, :middle] - other[:, :middle]).abs().max())
    if change > 1e-4 * float(base.abs().max()):
        yield found(
            "causal-leak",
            "attention",
            f"outputs before position {middle} move by {change:.3g} when only tokens from {middle} on change; the "
            "targets are the next tokens",
        )


def _bend(experiment: Experiment, x: Tensor, other: Tensor) -> float:
    """Return how far the output half way between two inputs is from half way; NaN where it cannot be known."""
    a, b = x.double(), other.double()
    try:
        with preserved(experiment.subject), torch.no_grad():
            experiment.subject.model.double()
            f, g, h = (leading(experiment.forward(v)) for v in (a, b, (a + b) / 2))
    except Exception:
        return math.nan
    if f is None or g is None or h is None or float((f - g).abs().max()) < 1e-9:
        return math.nan
    return float((f + g - 2 * h).abs().max()) / float((f - g).abs().max())


def affine(experiment: Experiment) -> Iterator[Finding]:
    """Several linear layers in a row, and nothing between them: the whole is one linear map."""
    layers = [m for m in experiment.subject.model.modules() if isinstance(m, nn.Linear)]
    x = experiment.input
    if len(layers) < 2 or x is None or not x.is_floating_point() or experiment.left() < 3:
        return
    narrow = [min(m.in_features, m.out_features) for m in layers]
    if any(inner < min(layers[0].in_features, layers[-1].out_features) for inner in narrow[:-1]):
        return  # a bottleneck: low rank is what such a pair is for
    others = [b for _, b, _ in experiment.epoch[1:] if b is not None and b.shape == x.shape] or [x.roll(1, 0)]
    if _bend(experiment, x[:FEWEST], others[0][:FEWEST]) > STRAIGHT:
        return  # what bends needs no training to be known
    with experiment.after(min(TRAINED, max(1, len(experiment.seen.steps)))):
        if not (bend := _bend(experiment, x, others[0])) < STRAIGHT:
            return
    # A rate that is too large for the one may suit the other, so the plain network may also go slower.
    plain = min(experiment.ending(LONG, prepare=prepare) for prepare in (None, set_lr(0.25)))
    with _hooked(layers[:-1], lambda m, i, o: F.relu(o)):
        bent = experiment.ending(LONG)
    if bent >= plain:
        return
    yield found(
        "missing-activation",
        "model",
        f"{len(layers)} linear layers, and f(a) + f(b) - 2 f((a+b)/2) is {bend:.1e} of f(a) - f(b): the network is "
        "affine; after "
        f"{LONG} steps the loss is {plain:.4g}, with ReLUs between the layers {bent:.4g}",
        severity="error" if lower_by(0.5, bent, plain) else "hint",
    )


class _Writes(torch.overrides.TorchFunctionMode):
    """Notes in-place operations on memory that a recorded operation has made, done behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args and torch.is_tensor(args[0]) else None
        if first is not None and name.endswith("_") and not name.endswith("__") and not first.requires_grad:
            own = self.made.get(first.data_ptr())
            if own is not None and own is not first and first.numel():
                self.found.append(name)
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            if t.grad_fn is not None and t.layout is torch.strided and t.numel():
                self.made.setdefault(t.data_ptr(), t)  # held, so that its address stays its own
        return result


def written_behind(experiment: Experiment) -> Iterator[Finding]:
    """A value that backward needs was changed through .data or detach(), which autograd does not see."""
    if experiment.call is None or experiment.call.module is not experiment.subject.model:
        return
    writes = _Writes()
    with preserved(experiment.subject), writes:
        experiment.call.module(*experiment.call.args, **experiment.call.kwargs)
    if writes.found:
        told = (
            f"{', '.join(sorted(set(writes.found)))} wrote into a result that has a graph, through .data or detach(): "
        )
        harmless = _slopes_are_right(experiment)
        yield found(
            "data-inplace-wrong-grad",
            "forward",
            told
            + "autograd did not see it, "
            + ("and its gradients are right all the same" if harmless else "so gradients belong to other values"),
            severity="hint" if harmless else "error",
        )


def _slopes_are_right(experiment: Experiment) -> bool:
    """Return whether autograd's gradients are the slopes of the loss; false where there is no telling."""
    from dxdy_nb.diagnosis.slope import screen

    with suppress(Exception):
        return experiment.left() > 5 and screen(experiment, 0.0).verdict == "right"
    return False


def clones(experiment: Experiment) -> Iterator[Finding]:
    """All units of a layer began alike, and still are after some steps."""
    asked = {
        f"{name}.weight": m.weight
        for name, m in experiment.subject.model.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d)) and len(m.weight) > 1 and m.weight.requires_grad
    }
    begin = [n for n in asked if n in experiment.initial and _rows_equal(experiment.initial[n], 0.0)]
    if not begin or not experiment.batches:
        return
    with experiment.after(min(5, max(1, len(experiment.seen.steps)))):
        parameters = experiment.subject.parameters
        still = [n for n in begin if _rows_equal(parameters[n].detach(), 1e-6) and n in experiment.seen.moved]
    if still:
        yield found(
            "symmetric-init",
            listed(still),
            f"all {len(asked[still[0]])} rows of {still[0]} are equal at the start and after the steps: one unit, "
            "many times",
            name=f"{still[0]!r}",
        )


def _rows_equal(weight: Tensor, tolerance: float) -> bool:
    return float((weight - weight[:1]).abs().max()) <= tolerance * float(weight.abs().max())


RULES = (
    no_graph,
    settings,
    first_nonfinite,
    sizes,
    dead_units,
    range_of_output,
    over_one_element,
    dropout_at_the_end,
    random_in_eval,
    samples_mix,
    rows_shared,
    reads_padding_only,
    last_step_read,
    sees_the_future,
    affine,
    written_behind,
    clones,
)
