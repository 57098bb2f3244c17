"""What a loss does with the model's output, read from the graph between the two."""

import math
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dxdy_nb.autograd.formulas import RESHAPING
from dxdy_nb.autograd.graph import operation_of

if TYPE_CHECKING:
    from dxdy_nb.diagnosis.probes import Experiment


# The operations that torch's losses end in, and what they are called.
KINDS = {
    "NllLossBackward0": "nll",
    "NllLoss2DBackward0": "nll",
    "BinaryCrossEntropyWithLogitsBackward0": "bce_logits",
    "BinaryCrossEntropyBackward0": "bce",
    "MseLossBackward0": "mse",
    "SmoothL1LossBackward0": "l1",
    "HuberLossBackward0": "l1",
}


def kind_of(nodes: list[Any]) -> tuple[str, Any]:
    """Return what a loss is, from the operations behind it, and the operation that tells."""
    node = next((n for n in nodes if type(n).__name__ in KINDS), None)
    kind = KINDS.get(type(node).__name__, "")
    names = {type(n).__name__ for n in nodes}
    if kind == "nll" and "LogSoftmaxBackward0" in names:
        kind = "cross_entropy"
    elif not kind and "LogSoftmaxBackward0" in names:
        kind = "soft_cross_entropy"
    elif not kind and "AbsBackward0" in names and names <= {"AbsBackward0", "SubBackward0", "MeanBackward0"}:
        kind = "l1"
    return kind, node


def graph_nodes(tensor: Tensor, end: Any = None) -> list[Any]:
    """Return the nodes of the graph behind a tensor, from it on, breadth first, as far as ``end``."""
    seen, order, todo = {end}, [], deque([tensor.grad_fn])
    while todo:
        node = todo.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        order.append(node)
        todo += [child for child, _ in node.next_functions]
    return order


# Operations that make no finite number of finite ones, and when.
BREAKS: dict[str, Callable[[Any], Any]] = {
    "Log": lambda node: node._saved_self <= 0,
    "Exp": lambda node: node._saved_result.isinf(),
    "Sqrt": lambda node: node._saved_result.isnan(),
    "Div": lambda node: node._saved_other == 0,
    "Pow": lambda node: ~(node._saved_self**node._saved_exponent).isfinite(),
}


def breaking(nodes: list[Any]) -> str:
    """Return the operation that makes no finite number of what it is given, the nearest to the model; "" for none."""
    for node in reversed(nodes):
        name = operation_of(node.__class__)
        with suppress(AttributeError, TypeError):  # it keeps nothing of this kind
            if name in BREAKS and not unpacks(node) and bool(torch.as_tensor(BREAKS[name](node)).any()):
                return name.lower()
    return ""


def is_shaping(node: Any) -> bool:
    """Return whether an operation only hands its values on, in another shape, place or dtype."""
    return operation_of(node.__class__) in RESHAPING | {"Clone", "ToCopy", "Select"}


def last_operation(output: Tensor) -> str:
    """Return the operation that made a tensor, behind those that only hand it on; "" for a leaf."""
    return _maker(output.grad_fn)


def _maker(node: Any) -> str:
    while node is not None and is_shaping(node):
        node = node.next_functions[0][0]
    return "" if node is None else operation_of(node.__class__)


def floor(classes: int) -> float:
    """Return the lowest cross-entropy of scores within 0 and 1: that of a 1 for the true class and 0 for the others."""
    return math.log(1 + (classes - 1) / math.e)


def unpacks(node: Any) -> bool:
    """Return whether a hook hands out what a node has saved: a checkpoint makes it anew, another gives it once."""
    kept = (getattr(node, name, None) for name in dir(node) if name.startswith("_raw_saved_"))
    return any(getattr(one, "unpack_hook", None) is not None for one in kept)


def misfed(root: Tensor) -> tuple[str, str] | None:
    """Return a cause and its evidence where a loss takes of a softmax or sigmoid another, or nll_loss no logarithms."""
    nodes = [(operation_of(node.__class__), node) for node in graph_nodes(root)]
    logarithms = any(name.startswith("Log") for name, _ in nodes)  # what is weighted then need not sum to 1
    for name, node in nodes:
        if not name.startswith(("LogSoftmax", "BinaryCrossEntropyWithLogits", "NllLoss")) or unpacks(node):
            continue
        given = _maker(node.next_functions[0][0]) if node.next_functions else ""
        if name == "LogSoftmax" and given in ("Softmax", "Sigmoid"):
            shape, axis = node._saved_result.shape, node._saved_dim
            classes = shape[axis - 2**64 if axis >= 2**63 else axis] if shape else 1
            if classes > 2 or (given == "Softmax" and classes == 2):
                return "softmax-then-ce", (
                    f"cross_entropy is given the result of a {given.lower()}, and takes the softmax of it: scores "
                    f"differ by at most 1, and the loss cannot fall below {floor(classes):.3g}"
                )
        elif name == "BinaryCrossEntropyWithLogits" and given in ("Softmax", "Sigmoid"):
            return "sigmoid-then-bcelogits", (
                f"binary_cross_entropy_with_logits is given the result of a {given.lower()}, and takes the sigmoid of "
                "it: probabilities stay between 0.5 and 0.73"
            )
        elif name.startswith("NllLoss") and not logarithms:
            rows = node._saved_self.detach()
            total = rows.float().exp().sum(min(1, rows.dim() - 1))
            if bool(((total - 1).abs() > max(1e-3, 8 * torch.finfo(rows.dtype).eps)).any()):
                made = f", the result of a {given.lower()}," if given in ("Softmax", "Sigmoid") else ""
                return "nll-on-logits", (
                    f"nll_loss needs log-probabilities; exp of what it is given{made} sums to "
                    f"{float(total.mean()):.3g} a row, not 1"
                )
    return None


# What stays within two numbers, whatever it is given.
BOUNDS: dict[str, tuple[Any, Any]] = {
    "Tanh": (-1, 1),
    "Sigmoid": (0, 1),
    "Softmax": (0, 1),
    "Relu": (0, math.inf),
    "Softplus": (0, math.inf),
}
LIMITS = {"Clamp": ("_saved_min", "_saved_max"), "Hardtanh": ("_saved_min_val", "_saved_max_val")}


def bounds(output: Tensor) -> tuple[float, float]:
    """Return the numbers between which an output stays: those of its last operation, times a constant."""
    node, scale = output.grad_fn, 1.0
    while node is not None:
        name = operation_of(node.__class__)
        constants = [
            t for t in (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None)) if t is not None
        ]
        behind = [child for child, _ in node.next_functions if child is not None]
        if name in ("Mul", "Div") and len(behind) == len(constants) == 1 and constants[0].numel() == 1:
            scale *= float(constants[0]) ** (1 if name == "Mul" else -1)
        elif not is_shaping(node):
            break
        node = behind[0] if len(behind) == 1 else None
    if node is None:
        return -math.inf, math.inf
    known = [getattr(node, limit) for limit in LIMITS.get(name, ())] or BOUNDS.get(name, (None, None))
    low, high = (
        scale * float(end if end is not None else sign * math.inf) for sign, end in zip((-1, 1), known, strict=True)
    )
    return min(low, high), max(low, high)


@dataclass(frozen=True)
class Reading:
    """The loss of the first step as a function of the output alone: its kind, and its gradient at the output."""

    kind: str  # cross_entropy, soft_cross_entropy, nll, bce, bce_logits, mse, l1, kl_div, or "" for a formula
    node: Any  # the operation it was read from
    output: Tensor
    value: float
    gradient: Tensor | None
    target: Tensor | None
    direct: bool = True  # whether the output itself is what the loss is of

    @property
    def raw(self) -> bool:
        """Whether the recognised loss was given the target itself, as far as its operation has kept it."""
        own, y = getattr(self.node, "_saved_target", None), self.target
        return own is None or (
            y is not None and own.numel() == y.numel() and torch.equal(own.flatten().to(y.dtype), y.flatten())
        )


def _heard_of(experiment: "Experiment", output: Tensor) -> Reading | None:
    """Return the reading of a loss that was no function's result, as its own graph told it at backward."""
    root = experiment.first.root if experiment.first is not None else None
    if root is None or root.gradient is None or root.gradient.shape != output.shape:
        return None
    target = getattr(root.saved, "_saved_target", None)
    return Reading(
        root.kind, root.saved, output.detach(), root.value, root.gradient,
        target if target is not None else experiment.target, root.direct,
    )  # fmt: skip


class Calls(torch.overrides.TorchFunctionMode):
    """Tells of each of torch's functions that is called with which arguments."""

    def __init__(self, tell: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tell(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def read_loss(experiment: "Experiment") -> Reading | None:
    """Return the reading of the first step's loss; None where the loss function was not seen at work."""
    output = experiment.output
    if output is None or not output.is_floating_point():
        return None
    leaf = output.detach().clone().requires_grad_()
    divergence = SimpleNamespace(given=None)  # kl_div leaves no operation of its own in the graph

    def note(func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.nn.functional.kl_div and args:
            divergence.given = args[0].detach()

    with torch.enable_grad(), warnings.catch_warnings(), Calls(note):
        warnings.simplefilter("ignore")
        loss = experiment.loss_of(leaf)
    if loss is None or not torch.is_tensor(loss) or loss.numel() != 1:
        return _heard_of(experiment, output)
    if loss.grad_fn is None:
        return Reading("", None, leaf, float(loss.detach()), None, experiment.target)
    nodes = graph_nodes(loss)
    kind, node = kind_of(nodes)
    if divergence.given is not None:
        kind, node = "kl_div", divergence
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)
    return Reading(kind, node, output, float(loss.detach()), gradient, experiment.target)
