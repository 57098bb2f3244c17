"""What autograd recorded of one loss: nodes, edges, leaves, saved tensors, and the gradient on each edge.

A node is a backward function; an edge leads from the function that sends a gradient to the one that receives it.
The walk is iterative. It visits consumers before producers (autograd numbers its nodes in the order in which the
forward pass made them), so that the depth of a node is known when it is reached.
"""

import functools
import gc
import heapq
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
PLACES = 2**32 - 1  # the bits of a priority that hold a node's place
NO_GRADIENT = (None, None)
PACKED = "packed"
REENTRANT = "CheckpointFunction"
NO_STORAGE = torch.UntypedStorage(0)
RAW = "_raw_saved_"  # what nodes keep, still packed, under the names that they give it
# Connected, but the derivative is zero almost everywhere.
FLAT = {"Round", "Sign", "Floor", "Ceil", "Trunc", "Sgn", "FloorDivide", "Heaviside"}


class Saved(NamedTuple):
    """A tensor that a node keeps for the backward pass; ``bytes`` is that of its storage (0 where it was not read)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int


FREED = Saved("freed", (), "freed", 0, 0)
_Gradient = tuple[float, Tensor | None]
_Row = TypeVar("_Row", bound=tuple)
_Parameters = dict[int, tuple[str, nn.Parameter]]  # by the tensor's id


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
    """A way of a gradient: from node ``source`` (its input number ``position``) to output ``slot`` of node ``target``.

    Both are places in ``Graph.nodes``.
    """

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

    def draw(self, fold: bool | int | None = None) -> Any:
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
    with _no_collection():
        return _read(loss, model, record, sys._getframe(1), gradients, saved)


def _read(
    loss: Tensor, model: nn.Module | None, record: "Record | None", frame: FrameType, gradients: bool, saved: bool
) -> Graph:
    parameters = _parameters(model) if model is not None else {}
    notes: list[str] = []
    walk = _walk(loss)
    names = _leaf_names(walk, parameters, frame)
    arriving, along = _gradients(loss, walk, notes) if gradients else ({}, {})
    nodes = _nodes(walk, names, saved, arriving, record)
    edges = _edges(walk, along)
    notes += _remarks(nodes)
    leaves = tuple(_leaves(walk, names, nodes))
    return Graph(nodes, edges, leaves, tuple(_cuts(loss, walk, nodes, leaves, parameters, record)), tuple(notes))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running: it would look again and again at many new objects, all in use."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
    if not (loss.is_floating_point() or loss.is_complex()):
        raise DxdyError(
            f"graph: {loss.dtype} holds whole numbers, which have no gradient. Pass the loss before argmax."
        )
    if loss.grad_fn is None:
        why = (
            "it is a leaf" if loss.requires_grad else "nothing it was made from requires a gradient, or it was detached"
        )
        raise DxdyError(f"graph: this tensor has no graph: {why}. Pass the loss as the forward pass returned it.")


class _Walk(NamedTuple):
    """Torch's nodes in the order of the backward pass; of the edges a list each of source, target, position, slot."""

    nodes: list[Any]
    numbers: list[int]
    depths: list[int]
    sources: list[int]
    targets: list[int]
    positions: list[int]
    slots: list[int]
    leaves: dict[int, Tensor]


def _walk(tensor: Tensor) -> _Walk:
    root = torch.autograd.graph.get_gradient_edge(tensor).node
    found: list[Any] = [root]
    numbers, depths, place, index = [root._sequence_nr()], [0], [-1], {root: 0}
    waiting = [0]  # the highest number first: every consumer of a node comes before it
    order: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    several = False  # made by several threads, each of which counts for itself?
    while waiting:
        here = heapq.heappop(waiting) & PLACES
        place[here] = len(order)
        order.append(here)
        deeper = depths[here] + 1
        position = -1
        for node, slot in found[here].next_functions:
            position += 1
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
                place.append(-1)
                heapq.heappush(waiting, _priority(number, there))
            else:
                several = several or place[there] >= 0
                if deeper > depths[there]:
                    depths[there] = deeper
            sources.append(here)
            targets.append(there)
            positions.append(position)
            slots.append(slot)
    if several:
        order, depths = _sorted(numbers, sources, targets)
        for new, old in enumerate(order):
            place[old] = new
        edges = sorted(zip(sources, targets, positions, slots, strict=True), key=lambda edge: (place[edge[0]], edge[2]))
        sources, targets, positions, slots = map(list, zip(*edges, strict=True))
    return _Walk(
        [found[old] for old in order],
        [numbers[old] for old in order],
        [depths[old] for old in order],
        [place[source] for source in sources],
        [place[target] for target in targets],
        positions,
        slots,
        {
            place[old]: found[old].variable
            for old, number in enumerate(numbers)
            if number == LEAF and hasattr(found[old], "variable")
        },
    )


def _priority(number: int, there: int) -> int:
    """Return one number to order nodes by, with the place in its low bits: cheaper to compare than a pair."""
    return there - (number << 32) if number != LEAF else there + (1 << 32)


def _sorted(numbers: list[int], sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
    """Return the order of the backward pass and the depths, whatever the numbers: all consumers first."""
    consumers, depths, order = [0] * len(numbers), [0] * len(numbers), []
    inputs: list[list[int]] = [[] for _ in numbers]
    for source, target in zip(sources, targets, strict=True):
        consumers[target] += 1
        inputs[source].append(target)
    waiting = [0]
    while waiting:
        here = heapq.heappop(waiting) & PLACES
        order.append(here)
        for there in inputs[here]:
            consumers[there] -= 1
            depths[there] = max(depths[there], depths[here] + 1)
            if not consumers[there]:
                heapq.heappush(waiting, _priority(numbers[there], there))
    return order, depths


def _parameters(model: nn.Module) -> _Parameters:
    """Return what ``named_parameters`` does, in its order, for a fifth of the time: that hashes each tensor."""
    found: _Parameters = {}
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module not in seen:
            seen.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.setdefault(id(parameter), (path + name, parameter))
            children = [(f"{path}{name}.", child) for name, child in module._modules.items() if child is not None]
            waiting += reversed(children)
    return found


def _leaf_names(walk: _Walk, parameters: _Parameters, frame: FrameType) -> dict[int, str]:
    """Return the names of leaves: a parameter's own, else the variable that holds it where the graph was asked for."""
    places = {id(tensor): place for place, tensor in sorted(walk.leaves.items())}
    names = {place: f"leaf {count}" for count, place in enumerate(places.values())}
    for variables in (frame.f_globals, frame.f_locals):
        for name, value in reversed(variables.items()):
            if id(value) in places and not name.startswith("_"):
                names[places[id(value)]] = name
    return names | {places[key]: name for key, (name, _) in parameters.items() if key in places}


def _modules(walk: _Walk, names: dict[int, str], record: "Record | None") -> list[str]:
    """Return each node's module path: as recorded, else guessed.

    The guess is the module of a parameter that it uses, else that of its inputs; where those differ, of what
    encloses the one that was made last.
    """
    own = [""] * len(walk.nodes)
    for place, name in names.items():
        own[place] = name.rpartition(".")[0]
    if record is not None:
        recorded = record.module
        return [mine or recorded(number) for mine, number in zip(own, walk.numbers, strict=True)]
    guessed = own.copy()
    for source, target in zip(
        reversed(walk.sources), reversed(walk.targets), strict=True
    ):  # producers first, and of a node's inputs the last first
        if module := guessed[target]:
            if target in names:
                own[source] = guessed[source] = module
            elif not own[source] and guessed[source] != module:
                guessed[source] = module
    return guessed


def _nodes(
    walk: _Walk, names: dict[int, str], saved: bool, arriving: "dict[int, _Gradient]", record: "Record | None"
) -> tuple[Node, ...]:
    """Return the nodes; built column by column, since a call for each node would double the time."""
    nodes = walk.nodes
    kinds: list[type] = [type(node) for node in nodes]
    shapes: list[tuple[tuple[int, ...], ...]] = []
    dtypes = []
    alone: dict[tuple[int, ...], tuple[tuple[int, ...]]] = {}  # equal shapes are one object: memory, and its time
    for node in nodes:
        entries = node._input_metadata
        if len(entries) == 1:
            shape = tuple(entries[0].shape)
            shapes.append(alone.get(shape) or alone.setdefault(shape, (shape,)))
        else:
            shapes.append(tuple([tuple(entry.shape) for entry in entries]))
        dtypes.append(_dtype(entries[0].dtype) if entries else "")
    values: list[Tensor | None] = [None] * len(nodes)
    if record is not None:  # an in-place edit of a view makes further nodes, with the shape of its base
        seen = [record.value(number) for number in walk.numbers]
        values = [v if v is not None and (v.shape,) == shape else None for v, shape in zip(seen, shapes, strict=True)]
    for place, tensor in walk.leaves.items():
        values[place] = _copy(tensor)
    gradients = [arriving.get(place, NO_GRADIENT) for place in range(len(nodes))] if arriving else ()
    columns = (
        list(map(operation_of, kinds)),
        _modules(walk, names, record),
        shapes,
        dtypes,
        [_saved(node, keeps) if keeps else () for node, keeps in zip(nodes, map(_saved_names, kinds), strict=True)]
        if saved
        else itertools.repeat(()),
        [names.get(place) for place in range(len(nodes))],
        walk.depths,
        [norm for norm, _ in gradients] or itertools.repeat(None),
        [gradient for _, gradient in gradients] or itertools.repeat(None),
        values,
    )
    return tuple(_rows(Node, columns))


def _edges(walk: _Walk, along: "dict[tuple[int, int], _Gradient]") -> tuple[Edge, ...]:
    gradients = [along.get(way, NO_GRADIENT) for way in zip(walk.sources, walk.positions, strict=True)] if along else ()
    norms = [norm for norm, _ in gradients] or itertools.repeat(None)
    values = [gradient for _, gradient in gradients] or itertools.repeat(None)
    return tuple(_rows(Edge, (walk.sources, walk.targets, walk.positions, walk.slots, norms, values)))


def _rows(kind: type[_Row], columns: Iterable[Iterable[Any]]) -> Iterator[_Row]:
    """Return named tuples made of columns, without calling ``kind`` for each: that takes three times as long."""
    return map(functools.partial(tuple.__new__, kind), zip(*columns, strict=False))


@functools.cache
def operation_of(kind: type) -> str:
    """Return the operation of a kind of node: ``PowBackward0`` is Pow, a custom function has its own name."""
    return kind.__name__.rstrip("0123456789").removesuffix("Backward")


@functools.lru_cache(4096)
def _shape(size: torch.Size) -> tuple[int, ...]:
    return tuple(size)


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(tensor: Tensor) -> Tensor | None:
    """Return a small tensor's values, and nothing of a large one."""
    if tensor.numel() > SMALL:
        return None
    return (tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()).clone()


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the tensors that nodes of a kind keep; asked once a kind, since ``dir`` is slow."""
    return tuple([name for name in dir(kind) if name.startswith(RAW)])


def _saved(node: Any, names: tuple[str, ...]) -> tuple[Saved, ...]:
    """Return what a node keeps, without unpacking what hooks have packed: that could run a forward pass again."""
    found: list[Saved] = []
    for name in names:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # freed by an earlier backward
            return (FREED,)
        if raw is None:
            continue
        short = name[len(RAW) :]
        for entry in raw if isinstance(raw, (tuple, list)) else (raw,):
            if entry.unpack_hook is not None:
                found.append(Saved(short, (), PACKED, 0, 0))
            elif (tensor := entry.data) is not None:
                try:
                    storage = tensor.untyped_storage()
                except NotImplementedError:  # sparse: no single storage
                    storage = NO_STORAGE
                shape, dtype = _shape(tensor.shape), _dtype(tensor.dtype)
                found.append(Saved(short, shape, dtype, storage.nbytes(), storage.data_ptr()))
            elif _is_freed(node, short):
                return (FREED,)
    return tuple(found)


def _is_freed(node: Any, name: str) -> bool:
    """Tell a tensor that was freed from one that was never given, as the weight of a norm without one."""
    try:
        getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return True
    return False


def _gradients(
    loss: Tensor, walk: _Walk, notes: list[str]
) -> tuple[dict[int, "_Gradient"], dict[tuple[int, int], "_Gradient"]]:
    """Run one backward pass and return the gradient that arrives at each node, and the one on each edge.

    ``torch.autograd.grad`` keeps ``.grad`` as it is and frees nothing. Tensors are summed at a node, norms never are.
    """
    norms = _Norms()
    hooks = []
    try:
        for place, node in enumerate(walk.nodes):
            if place not in walk.leaves:
                hooks.append(node.register_hook(functools.partial(norms.passed, place)))
        found = torch.autograd.grad(loss, list(walk.leaves.values()), retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "second time" in str(error):
            notes.append("the graph was freed by an earlier backward: structure only")
        elif "incompatible with .grad()" in str(error):
            notes.append("reentrant checkpointing allows no look at gradients; use_reentrant=False does")
        else:
            raise
        return {}, {}
    finally:
        for hook in hooks:
            hook.remove()
    measured = norms.finish()
    outputs: dict[int, list[_Gradient]] = {}
    for (place, position), pair in measured.items():
        if position < 0:
            outputs.setdefault(place, []).append(pair)
    arriving = {place: pairs[0] if len(pairs) == 1 else _together(pairs) for place, pairs in outputs.items()}
    for place, tensor in zip(walk.leaves, found, strict=True):
        if tensor is not None:
            whole = tensor.coalesce().values() if tensor.is_sparse else tensor
            arriving[place] = (whole.norm().item(), _copy(tensor))
    return arriving, measured


def _together(pairs: "list[_Gradient]") -> "_Gradient":
    """Return the norm of the gradients of several outputs, seen as one vector; each has its own value on its edge."""
    return math.hypot(*[norm for norm, _ in pairs]), None


class _Norms:
    """Norms of many tensors, taken in batches: one call a tensor would cost more than the backward pass."""

    BATCH = 512

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._keys: list[list[tuple[int, int]]] = []
        self._seen: dict[int, int] = {}
        self._found: dict[tuple[int, int], _Gradient] = {}

    def passed(self, place: int, leaving: Sequence[Tensor | None], arriving: Sequence[Tensor | None]) -> None:
        """Remember what left a node, under the input's position, and what arrived, under its slot as -1 - slot."""
        for position, tensor in enumerate(leaving):
            if tensor is not None:
                self._add((place, position), tensor)
        for slot, tensor in enumerate(arriving):
            if tensor is not None:
                self._add((place, -1 - slot), tensor)
        if len(self._waiting) >= self.BATCH:
            self._flush()

    def _add(self, key: tuple[int, int], tensor: Tensor) -> None:
        seen = self._seen.setdefault(id(tensor), len(self._waiting))
        if seen < len(self._waiting):  # one that passes through several nodes unchanged is measured once
            self._keys[seen].append(key)
        else:
            self._waiting.append(tensor)
            self._keys.append([key])

    def finish(self) -> dict[tuple[int, int], "_Gradient"]:
        """Return norm and, for small tensors, value of each."""
        self._flush()
        return self._found

    def _flush(self) -> None:
        with torch.no_grad():
            norms = norms_of([t if t.layout is torch.strided else t.coalesce().values() for t in self._waiting])
            for tensor, keys, norm in zip(self._waiting, self._keys, norms, strict=True):
                pair = norm, _copy(tensor)
                for key in keys:
                    self._found[key] = pair
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
    kept = {entry.dtype for node in nodes for entry in node.saved}
    if FREED.dtype in kept:
        yield "what the graph had saved was freed by an earlier backward"
    if PACKED in kept:
        yield "what hooks packed away (checkpointing, offloading) was not unpacked to look at it"
    operations = {node.operation for node in nodes}
    if "CompiledFunction" in operations:
        yield "a compiled part is one box: what happens inside it leaves no nodes"
    if REENTRANT in operations:
        yield "a reentrant checkpoint is one box: its parameters are not seen, nor whether they are reached"


def _leaves(walk: _Walk, names: dict[int, str], nodes: tuple[Node, ...]) -> Iterator[Leaf]:
    for place, tensor in sorted(walk.leaves.items()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "input"
        yield Leaf(names[place], kind, place, tuple(tensor.shape), nodes[place].norm)


def _cuts(
    loss: Tensor,
    walk: _Walk,
    nodes: tuple[Node, ...],
    leaves: tuple[Leaf, ...],
    parameters: _Parameters,
    record: "Record | None",
) -> Iterator[Cut]:
    """Yield what keeps gradients from parameters: a cut with its line where it is known, then flat operations."""
    reached = {id(tensor) for tensor in walk.leaves.values()}
    if REENTRANT in [node.operation for node in nodes]:
        parameters = {}  # it hides its parameters: they are no more lost than seen
    lost = {key: name for key, (name, p) in parameters.items() if p.requires_grad and key not in reached}
    if lost:
        known = _explained(loss, lost, record) if record is not None else {}
        for (where, operation), keys in known.items():
            yield Cut("cut", where, operation, tuple(name for key, name in lost.items() if key in keys))
        rest = tuple(name for key, name in lost.items() if not any(key in keys for keys in known.values()))
        if rest:
            yield Cut("cut", "", "not reached", rest)
    zero = {leaf.node: leaf.name for leaf in leaves if leaf.norm == 0}
    for place, ends in _behind(nodes, walk).items() if zero else ():
        names = tuple(zero[leaf] for leaf in sorted(ends) if leaf in zero)
        if names:
            where = record.line(walk.numbers[place]) if record is not None else ""
            yield Cut("zero", where, nodes[place].operation.lower(), names)


def _explained(loss: Tensor, lost: dict[int, str], record: "Record") -> dict[tuple[str, str], set[int]]:
    """Return the lost parameters behind each recorded cut; a line that runs many times is one cut."""
    known: dict[tuple[str, str], set[int]] = {}
    for cuts in record.cuts(loss), record.ways_out():
        left = lost.keys() - set().union(*known.values())
        for cut in cuts if left else ():
            behind: set[int] = set()
            for tensor in cut.tensors:
                behind |= {id(leaf) for leaf in _walk(tensor).leaves.values()}
            if keys := behind & left:
                known.setdefault((cut.where, cut.operation), set()).update(keys)
    return known


def _behind(nodes: tuple[Node, ...], walk: _Walk) -> dict[int, set[int]]:
    """Return, for each flat node, the leaves that it leads to."""
    inputs: dict[int, list[int]] = {}
    for source, target in zip(walk.sources, walk.targets, strict=True):
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
