"""What autograd recorded of one loss: nodes, edges, leaves, saved tensors, and the gradient on each edge.

A node is a backward function; an edge leads from the function that sends a gradient to the one that receives it.
The walk is iterative. It visits consumers before producers (autograd numbers its nodes in the order in which the
forward pass made them), so that the depth of a node is known when it is reached.
"""

import functools
import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dxdy_nb.errors import DxdyError

if TYPE_CHECKING:
    from dxdy_nb.autograd.draw import Steps
    from dxdy_nb.autograd.record import Record

# Torch frees a graph iteratively, but once Python has touched every node of one that is deeper than about 37,000
# levels, freeing it overflows an 8 MB stack (torch 2.13).
DEEPEST = 32_000
SMALL = 16  # elements: values of tensors up to this size are kept, to be shown
LEAF = 2**64 - 1  # the number that torch gives to every accumulating node
NO_GRADIENT = (None, None)
PACKED = "packed"
# Connected, but the derivative is zero almost everywhere.
FLAT = {"Round", "Sign", "Floor", "Ceil", "Trunc", "Sgn", "FloorDivide", "Heaviside"}


class Saved(NamedTuple):
    """A tensor that a node keeps for the backward pass; ``bytes`` is that of its storage (0 where it was not read)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int


FREED = Saved("freed", (), "", 0, 0)
_Gradient = tuple[float, Tensor | None]


class Node(NamedTuple):
    """A backward function.

    ``operation`` is its name without "Backward0"; a leaf is named in ``leaf``. ``norm`` and ``gradient`` are of the
    gradient that arrives, summed over all uses; ``value`` is the forward value, where it was recorded.
    """

    operation: str
    module: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    saved: tuple[Saved, ...]
    leaf: str | None
    depth: int
    norm: float | None = None
    gradient: Tensor | None = None
    value: Tensor | None = None


class Edge(NamedTuple):
    """A way along which a gradient goes: from node ``source`` (its input number ``position``) to output ``slot`` of ``target``."""

    source: int
    target: int
    position: int
    slot: int
    norm: float | None = None
    gradient: Tensor | None = None


class Leaf(NamedTuple):
    """A tensor where a gradient ends: a parameter of the model, or an input."""

    name: str
    kind: str
    node: int
    shape: tuple[int, ...]
    norm: float | None


class Cut(NamedTuple):
    """A place where gradients stop.

    ``kind`` is "cut" (no way through) or "zero" (connected, but the derivative is zero). ``where`` is file and line,
    known when the forward pass was recorded. ``parameters`` are those that lose a gradient there.
    """

    kind: str
    where: str
    operation: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A walked graph: plain values, in the order of the backward pass; ``str()`` of it is the same in every process."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    leaves: tuple[Leaf, ...]
    cuts: tuple[Cut, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def saved_bytes(self) -> int:
        """The bytes that the graph keeps alive, each storage counted once."""
        return sum({kept.storage: kept.bytes for node in self.nodes for kept in node.saved}.values())

    @cached_property
    def outgoing(self) -> tuple[tuple[Edge, ...], ...]:
        """The edges that leave each node, in the order of its inputs."""
        found: list[list[Edge]] = [[] for _ in self.nodes]
        for edge in self.edges:
            found[edge.source].append(edge)
        return tuple(tuple(edges) for edges in found)

    def steps(self) -> "Steps":
        """Return the backward pass one node at a time: formula, local derivative, incoming, outgoing."""
        from dxdy_nb.autograd.draw import steps

        return steps(self)

    def draw(self, fold: bool | None = None) -> Any:
        """Return a picture: SVG in a notebook, text anywhere else. Above 60 boxes it is folded by module."""
        from dxdy_nb.autograd.draw import draw

        return draw(self, fold)

    def __str__(self) -> str:
        from dxdy_nb.autograd.draw import text

        return text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.draw()._repr_mimebundle_()


def graph(
    loss: Tensor,
    model: nn.Module | None = None,
    *,
    record: "Record | None" = None,
    gradients: bool = True,
    saved: bool = True,
) -> Graph:
    """Return the graph behind a loss.

    The loss's own graph stays usable: nothing is freed, and no ``.grad`` is touched. Hooks that the user put on
    tensors run, as in any backward pass.

    Parameters
    ----------
    loss : a scalar with a graph
    model : gives parameters their names, and tells which of them the graph does not reach
    record : what ``dxdy_nb.record`` saw of the forward pass: module paths, values, and the lines that cut the graph
    gradients : run one backward pass, for the gradient on each edge
    saved : read what nodes keep for the backward pass; what hooks have packed away is not unpacked

    Raises
    ------
    DxdyError
        No tensor, not a scalar, no graph, a tensor made in inference mode, or a graph deeper than torch can free.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor(5.0, requires_grad=True)
    >>> print(graph((x - 3) ** 2))
    0 Pow []  gradient 1  -> 1
    1 Sub []  gradient 4  -> 2
    2 x   []  gradient 4
    """
    refuse(loss)
    model = model if model is not None or record is None else record.model
    walk = _walk(loss)
    names = _leaf_names(walk, model, sys._getframe(1))
    notes: list[str] = []
    arriving, along = _gradients(loss, walk, notes) if gradients else ({}, {})
    kept = [_saved(node) for node in walk.nodes] if saved else [()] * len(walk.nodes)
    modules = _modules(walk, names, record)
    nodes = tuple(
        [
            _node(node, names.get(place), modules[place], kept[place], walk.depths[place], arriving.get(place), record)
            for place, node in enumerate(walk.nodes)
        ]
    )
    edges = tuple([Edge(*ends, *along.get((ends[0], ends[2]), NO_GRADIENT)) for ends in walk.edges])
    notes += _remarks(nodes)
    leaves = tuple(_leaves(walk, names, nodes))
    return Graph(nodes, edges, leaves, tuple(_cuts(loss, walk, nodes, leaves, model, record)), tuple(notes))


def refuse(loss: Any) -> None:
    """Raise a DxdyError for what has no graph to walk."""
    if not torch.is_tensor(loss):
        raise DxdyError(
            f"graph: expected the loss as a tensor, got {type(loss).__name__}. Was .item() called too early?"
        )
    if loss.is_inference():
        raise DxdyError(
            "graph: this tensor was made in inference mode, which records nothing. Use torch.no_grad() or none."
        )
    if loss.numel() != 1:
        raise DxdyError(f"graph: expected a scalar, got shape {tuple(loss.shape)}. Pass loss.sum() or one element.")
    if loss.grad_fn is None:
        why = (
            "it is a leaf" if loss.requires_grad else "nothing it was made from requires a gradient, or it was detached"
        )
        raise DxdyError(f"graph: this tensor has no graph: {why}. Pass the loss as the forward pass returned it.")


@dataclass
class _Walk:
    """Nodes in the order of the backward pass, as torch's own objects, and edges as (source, target, position, slot)."""

    nodes: list[Any]
    numbers: list[int]
    depths: list[int]
    edges: list[tuple[int, int, int, int]]

    @property
    def leaves(self) -> Iterator[tuple[int, Tensor]]:
        """The places of the leaves and their tensors."""
        for place, (node, number) in enumerate(zip(self.nodes, self.numbers, strict=True)):
            if number == LEAF and hasattr(node, "variable"):
                yield place, node.variable


def _walk(tensor: Tensor) -> _Walk:
    root = torch.autograd.graph.get_gradient_edge(tensor).node
    found, numbers, depths, index = [root], [root._sequence_nr()], [0], {root: 0}
    waiting = [(-numbers[0], 0)]  # the highest number first: every consumer of a node comes before it
    order: list[int] = []
    edges: list[tuple[int, int, int, int]] = []
    while waiting:
        _, here = heapq.heappop(waiting)
        order.append(here)
        deeper = depths[here] + 1
        for position, (node, slot) in enumerate(found[here].next_functions):
            if node is None:
                continue
            there = index.get(node)
            if there is None:
                if deeper > DEEPEST:
                    raise DxdyError(
                        f"graph: deeper than {DEEPEST} levels. Torch crashes when it frees such a graph after Python "
                        "has looked at all of it. Look at a shorter sequence: the same steps repeat."
                    )
                there = index[node] = len(found)
                number = node._sequence_nr()
                found.append(node)
                numbers.append(number)
                depths.append(deeper)
                heapq.heappush(waiting, (1 if number == LEAF else -number, there))
            elif deeper > depths[there]:
                depths[there] = deeper
            edges.append((here, there, position, slot))
    place = {old: new for new, old in enumerate(order)}
    return _Walk(
        [found[old] for old in order],
        [numbers[old] for old in order],
        [depths[old] for old in order],
        [(place[source], place[target], position, slot) for source, target, position, slot in edges],
    )


def _leaf_names(walk: _Walk, model: nn.Module | None, frame: FrameType) -> dict[int, str]:
    """Return the names of leaves: a parameter's own, else the variable that holds it where the graph was asked for."""
    known: dict[int, str] = {}
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        if isinstance(value, Tensor) and not name.startswith("_"):
            known.setdefault(id(value), name)
    if model is not None:
        known |= {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    names = {}
    for place, tensor in walk.leaves:
        names[place] = known.get(id(tensor), f"leaf {len(names)}")
    return names


def _modules(walk: _Walk, names: dict[int, str], record: "Record | None") -> list[str]:
    """Return each node's module path: as recorded, else that of a parameter it uses, else that of its first input."""
    modules = [name.rpartition(".")[0] if (name := names.get(place)) else "" for place in range(len(walk.nodes))]
    if record is not None:
        return [m or record.module(number) for m, number in zip(modules, walk.numbers, strict=True)]
    inputs: dict[int, list[int]] = {}
    for source, target, _, _ in walk.edges:
        inputs.setdefault(source, []).append(target)
    for place in range(len(walk.nodes) - 1, -1, -1):  # producers come after consumers
        if not modules[place]:
            modules[place] = next((modules[i] for i in inputs.get(place, ()) if i in names and modules[i]), "") or next(
                (modules[i] for i in inputs.get(place, ()) if modules[i]), ""
            )
    return modules


def _node(
    node: Any,
    leaf: str | None,
    module: str,
    saved: tuple[Saved, ...],
    depth: int,
    gradient: "_Gradient | None",
    record: "Record | None",
) -> Node:
    metadata = node._input_metadata
    shapes = tuple([tuple(entry.shape) for entry in metadata])
    dtype = str(metadata[0].dtype).removeprefix("torch.") if metadata else ""
    value = None if record is None or leaf is not None else record.value(node._sequence_nr())
    if leaf is not None and hasattr(node, "variable") and node.variable.numel() <= SMALL:
        value = node.variable.detach().clone()
    norm, kept = gradient or NO_GRADIENT
    return Node(operation_of(node), module, shapes, dtype, saved, leaf, depth, norm, kept, value)


def operation_of(node: Any) -> str:
    """Return a node's operation: ``PowBackward0`` is Pow, a custom function has its own name."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the tensors that nodes of a kind keep; asked once a kind, since ``dir`` is slow."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved(node: Any) -> tuple[Saved, ...]:
    """Return what a node keeps, without unpacking what hooks have packed: that could run a forward pass again."""
    found: list[Saved] = []
    for name in _saved_names(type(node)):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            return (FREED,)
        for entry in raw if isinstance(raw, (tuple, list)) else (raw,):
            short = name.removeprefix("_raw_saved_")
            if entry is None:
                continue
            if getattr(entry, "unpack_hook", None) is not None:
                found.append(Saved(short, (), PACKED, 0, 0))
                continue
            tensor = getattr(entry, "data", None)
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
                size, where = (storage.nbytes(), storage.data_ptr()) if storage is not None else (0, 0)
                found.append(Saved(short, tuple(tensor.shape), str(tensor.dtype)[6:], size, where))
    return tuple(found)


def _gradients(
    loss: Tensor, walk: _Walk, notes: list[str]
) -> tuple[dict[int, "_Gradient"], dict[tuple[int, int], "_Gradient"]]:
    """Run one backward pass and return the gradient that arrives at each node, and the one on each edge.

    ``torch.autograd.grad`` keeps ``.grad`` as it is and frees nothing. Tensors are summed at a node, norms never are.
    """
    norms = _Norms()
    leaves = list(walk.leaves)
    ends = {place for place, _ in leaves}

    def watcher(place: int) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        def after(leaving: Sequence[Tensor | None], arriving: Sequence[Tensor | None]) -> None:
            for position, tensor in enumerate(leaving):
                if tensor is not None:
                    norms.add((place, position), tensor)
            for slot, tensor in enumerate(arriving):
                if tensor is not None:
                    norms.add((place, -1 - slot), tensor)

        return after

    with ExitStack() as cleanup:
        for place, node in enumerate(walk.nodes):
            if place not in ends:
                cleanup.callback(node.register_hook(watcher(place)).remove)
        try:
            found = torch.autograd.grad(loss, [t for _, t in leaves], retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "second time" in str(error):
                notes.append("the graph was freed by an earlier backward: structure only")
            elif "Checkpointing" in str(error):
                notes.append("reentrant checkpointing allows no look at gradients; use_reentrant=False does")
            else:
                raise
            return {}, {}
    measured = norms.finish()
    arriving = {}
    for place in range(len(walk.nodes)):
        outputs = [
            measured[key]
            for slot in range(len(walk.nodes[place]._input_metadata))
            if (key := (place, -1 - slot)) in measured
        ]
        if outputs:
            arriving[place] = max(outputs, key=lambda pair: pair[0])
    for (place, _), tensor in zip(leaves, found, strict=True):
        if tensor is not None:
            whole = tensor.coalesce().values() if tensor.is_sparse else tensor
            arriving[place] = (whole.norm().item(), tensor.to_dense().clone() if tensor.numel() <= SMALL else None)
    return arriving, {key: pair for key, pair in measured.items() if key[1] >= 0}


class _Norms:
    """Norms of many tensors, taken in batches: one call a tensor would cost more than the backward pass."""

    BATCH = 512

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._keys: list[list[tuple[int, int]]] = []
        self._seen: dict[int, int] = {}
        self._found: dict[tuple[int, int], _Gradient] = {}

    def add(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Remember a gradient under a key; one that passes through several nodes unchanged is measured once."""
        place = self._seen.get(id(tensor))
        if place is not None:
            self._keys[place].append(key)
            return
        self._seen[id(tensor)] = len(self._waiting)
        self._waiting.append(tensor)
        self._keys.append([key])
        if len(self._waiting) >= self.BATCH:
            self._flush()

    def finish(self) -> dict[tuple[int, int], "_Gradient"]:
        """Return norm and, for small tensors, value of each."""
        self._flush()
        return self._found

    def _flush(self) -> None:
        plain = [t.detach() if t.layout is torch.strided else t.detach().coalesce().values() for t in self._waiting]
        with torch.no_grad():
            norms = norms_of(plain)
        for tensor, keys, norm in zip(self._waiting, self._keys, norms, strict=True):
            value = tensor.detach().to_dense().clone() if tensor.numel() <= SMALL else None
            self._found.update(dict.fromkeys(keys, (norm, value)))
        self._waiting.clear()
        self._keys.clear()
        self._seen.clear()


def norms_of(tensors: list[Tensor]) -> list[float]:
    """Return the L2 norm of each tensor; together where torch's private batch function takes them, else one by one."""
    together = getattr(torch, "_foreach_norm", None)
    kinds = {(t.dtype, t.device) for t in tensors}
    if together is not None and len(kinds) == 1 and tensors[0].is_floating_point():
        return torch.stack(together(tensors)).tolist()
    return [float(torch.linalg.vector_norm(t)) for t in tensors]


def _remarks(nodes: tuple[Node, ...]) -> Iterator[str]:
    if any(FREED in node.saved for node in nodes):
        yield "what the graph had saved was freed by an earlier backward"
    if any(kept.dtype == PACKED for node in nodes for kept in node.saved):
        yield "what hooks packed away (checkpointing, offloading) was not unpacked to look at it"
    if any(node.operation == "CompiledFunction" for node in nodes):
        yield "a compiled part is one box: what happens inside it leaves no nodes"


def _leaves(walk: _Walk, names: dict[int, str], nodes: tuple[Node, ...]) -> Iterator[Leaf]:
    for place, tensor in walk.leaves:
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "input"
        yield Leaf(names[place], kind, place, tuple(tensor.shape), nodes[place].norm)


def _cuts(
    loss: Tensor,
    walk: _Walk,
    nodes: tuple[Node, ...],
    leaves: tuple[Leaf, ...],
    model: nn.Module | None,
    record: "Record | None",
) -> Iterator[Cut]:
    """Yield what keeps gradients from parameters: a cut with its line where it is known, then flat operations."""
    reached = {id(tensor) for _, tensor in walk.leaves}
    wanted = {} if model is None else {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    lost = {key: name for key, name in wanted.items() if key not in reached}
    explained: set[str] = set()
    for where, operation, tensor in record.cuts(loss) if record is not None else ():
        upstream = {id(leaf) for _, leaf in _walk(tensor).leaves} if tensor.requires_grad else set()
        names = tuple(name for key, name in lost.items() if key in upstream)
        if names:
            explained.update(names)
            yield Cut("cut", where, operation, names)
    rest = tuple(name for name in lost.values() if name not in explained)
    if rest:
        yield Cut("cut", "", "not reached", rest)
    zero = {leaf.node: leaf.name for leaf in leaves if leaf.norm == 0}
    behind = _behind(nodes, walk.edges) if zero else {}
    for place, node in enumerate(nodes):
        names = tuple(zero[leaf] for leaf in sorted(behind.get(place, ())) if leaf in zero)
        if node.operation in FLAT and names:
            where = record.line(walk.numbers[place]) if record is not None else ""
            yield Cut("zero", where, node.operation.lower(), names)


def _behind(nodes: tuple[Node, ...], edges: list[tuple[int, int, int, int]]) -> dict[int, set[int]]:
    """Return, for each flat node, the leaves that it leads to."""
    inputs: dict[int, list[int]] = {}
    for source, target, _, _ in edges:
        inputs.setdefault(source, []).append(target)
    found = {}
    for place, node in enumerate(nodes):
        if node.operation in FLAT:
            waiting, seen = [place], {place}
            while waiting:
                fresh = [target for target in inputs.get(waiting.pop(), ()) if target not in seen]
                seen.update(fresh)
                waiting += fresh
            found[place] = {target for target in seen if nodes[target].leaf is not None}
    return found
