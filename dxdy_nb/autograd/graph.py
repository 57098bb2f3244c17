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
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dxdy_nb.autograd.copies import random_states
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
RAW = "_raw_saved_"  # what nodes keep, still packed, under the names that they give it
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # a norm overflows before its elements do
# What torch says when a graph cannot be run backward, and what is said of it here.
NO_BACKWARD = {
    "second time": "the graph was freed by an earlier backward: structure only",
    "incompatible with .grad()": "reentrant checkpointing allows no look at gradients; use_reentrant=False does",
    "modified by an inplace operation": "what a node had saved was changed in place, so backward fails: structure only",
    "derivative for": "an operation has no derivative, so backward fails: structure only",
}


class Saved(NamedTuple):
    """A tensor that a node keeps for the backward pass; ``bytes`` is that of its storage (0 where it was not read)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    storage: int


FREED = Saved("freed", (), "freed", 0, 0)
# Said of a graph that has such an operation, or keeps such a thing.
REMARKS = {
    FREED.dtype: "what the graph had saved was freed by an earlier backward",
    PACKED: "what hooks packed away (checkpointing, offloading) was not unpacked to look at it",
    "CompiledFunction": "a compiled part is one box: what happens inside it leaves no nodes",
    REENTRANT: "a reentrant checkpoint is one box: its parameters are not seen, nor whether they are reached",
}
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

    ``kind`` is "cut" (no way through) or "zero" (connected, but the derivative is zero here). ``where`` is file and
    line, known when the forward pass was recorded. ``parameters`` are those that lose a gradient there. ``node`` is the
    place in ``Graph.nodes`` where a gradient arrives and none leaves.
    """

    kind: str
    where: str
    operation: str
    parameters: tuple[str, ...]
    node: int | None = None


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

    def __repr__(self) -> str:
        from dxdy_nb.autograd.draw import text

        return text(self)

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

    The loss's own graph stays usable: nothing is freed. No ``.grad`` and no buffer of the model changes, nor do random
    states; only a tensor that ``retain_grad()`` was called on, and that is no variable of the caller, has its ``.grad``
    added to. Hooks that the user put on tensors run, as in any backward pass.

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
        No tensor, not a real scalar, no graph, a tensor made in inference mode, no model, or a graph deeper than torch
        can free.

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
    for wanted, given in {"model as a torch.nn.Module": model, "record as dxdy_nb.record gave it": record}.items():
        if not (given is None or isinstance(getattr(given, "model", given), nn.Module)):
            raise DxdyError(f"graph: expected {wanted}, got {type(given).__name__}.")
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
    arriving: dict[int, _Gradient] = {}
    along: dict[tuple[int, int], _Gradient] = {}
    if loss.is_meta:
        notes.append("tensors on the meta device have no values: structure only")
    elif gradients:
        with _kept(model, frame), random_states():
            arriving, along = _gradients(loss, walk, notes)
    nodes = _nodes(walk, names, saved, arriving, record)
    edges = _edges(walk, along)
    notes += _remarks(nodes)
    walked = Graph(nodes, edges, tuple(_leaves(walk, names, nodes)), (), tuple(notes))
    return replace(walked, cuts=tuple(_cuts(walked, loss, walk, parameters, record)))


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


@contextmanager
def _kept(model: nn.Module | None, frame: FrameType) -> Iterator[None]:
    """Put back what a backward pass changes: buffers, where a checkpoint runs its forward, and gradients retained."""
    places = [module._buffers for module in model.modules()] if model is not None else []
    buffers = [(place, place.copy()) for place in places if type(place) is dict]  # a scripted module has another
    for place, before in buffers:
        place.update((name, buffer.clone()) for name, buffer in before.items() if type(buffer) is Tensor)
    variables = itertools.chain(frame.f_globals.values(), frame.f_locals.values())
    retained = [(t, t.grad) for t in variables if isinstance(t, Tensor) and t.retains_grad]
    try:
        yield
    finally:
        for place, before in buffers:
            place.update(before)
        for tensor, grad in retained:
            tensor.grad = grad


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
    if not loss.is_floating_point():
        why = "is complex, and only a real loss can be made smaller. Pass its .abs()"
        why = why if loss.is_complex() else "holds whole numbers, which have no gradient. Pass the loss before argmax"
        raise DxdyError(f"graph: {loss.dtype} {why}.")
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
    alone: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}  # equal shapes are one object: memory, and its time
    for node in nodes:
        entries = node._input_metadata
        try:
            shape = tuple(entries[0].shape) if len(entries) == 1 else None
        except RuntimeError:  # some nested tensors have none
            shape = ()
        shapes.append(alone.get(shape) or alone.setdefault(shape, _shapes(entries)) if shape else _shapes(entries))
        dtypes.append(_dtype(entries[0].dtype) if entries else "")
    values: list[Tensor | None] = [None] * len(nodes)
    if record is not None:  # an in-place edit of a view makes further nodes, with the shape of its base
        seen = [record.value(number) for number in walk.numbers]
        values = [v if v is not None and (v.shape,) == shape else None for v, shape in zip(seen, shapes, strict=True)]
    for place, tensor in walk.leaves.items():
        values[place] = small_copy(tensor)
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
        *_norms_and_values(arriving, range(len(nodes))),
        values,
    )
    return tuple(_rows(Node, columns))


def _edges(walk: _Walk, along: "dict[tuple[int, int], _Gradient]") -> tuple[Edge, ...]:
    gradients = _norms_and_values(along, zip(walk.sources, walk.positions, strict=True))
    return tuple(_rows(Edge, (walk.sources, walk.targets, walk.positions, walk.slots, *gradients)))


def _shapes(entries: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple([() if entry.is_nested_tensor else tuple(entry.shape) for entry in entries])


def _norms_and_values(known: dict[Any, _Gradient], keys: Iterable[Any]) -> Iterable[Iterable[Any]]:
    """Return two columns, with None for what has no gradient."""
    return zip(*[known.get(key, NO_GRADIENT) for key in keys], strict=True) if known else [itertools.repeat(None)] * 2


def _rows(kind: type[_Row], columns: Iterable[Iterable[Any]]) -> Iterator[_Row]:
    """Return named tuples made of columns, without calling ``kind`` for each: that takes three times as long."""
    return map(functools.partial(tuple.__new__, kind), zip(*columns, strict=False))


@functools.cache
def operation_of(kind: type) -> str:
    """Return the operation of a kind of node: ``PowBackward0`` is Pow, a custom function has its own name."""
    return kind.__name__.rstrip("0123456789").removesuffix("Backward")


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def small_copy(tensor: Tensor) -> Tensor | None:
    """Return a small tensor's values, and nothing of a large one, or of one without values or a shape."""
    if tensor.numel() > SMALL or tensor.is_nested or tensor.is_meta:
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
                    size, where = storage.nbytes(), storage.data_ptr()
                except RuntimeError:  # sparse, nested, meta: no single storage
                    size = where = 0
                shape = () if tensor.is_nested else tuple(tensor.shape)
                found.append(Saved(short, shape, _dtype(tensor.dtype), size, where))
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
        known = [words for said, words in NO_BACKWARD.items() if said in str(error)]
        if not known:
            raise
        notes += known[:1]
        return {}, {}
    finally:
        for hook in hooks:
            hook.remove()
    norms.flush()
    arriving: dict[int, _Gradient] = {}
    for (place, position), pair in norms.found.items():
        if position < 0:  # several outputs count as one vector; each has its own value on its edge
            arriving[place] = (math.hypot(arriving[place][0], pair[0]), None) if place in arriving else pair
    for place, tensor in zip(walk.leaves, found, strict=True):
        if tensor is not None:
            arriving[place] = _norm(_elements(tensor)), small_copy(tensor)
    return arriving, norms.found


class _Norms:
    """Norms of many tensors, taken in batches: one call a tensor would cost more than the backward pass."""

    BATCH = 512

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], _Gradient] = {}
        self._waiting: list[Tensor] = []
        self._keys: list[list[tuple[int, int]]] = []
        self._seen: dict[int, int] = {}

    def passed(self, place: int, leaving: Sequence[Tensor | None], arriving: Sequence[Tensor | None]) -> None:
        """Remember what left a node, under the input's position, and what arrived, under its slot as -1 - slot."""
        waiting = self._waiting
        for tensors, first, step in ((leaving, 0, 1), (arriving, -1, -1)):
            for key, tensor in zip(itertools.count(first, step), tensors, strict=False):
                if tensor is None:
                    continue
                seen = self._seen.setdefault(id(tensor), len(waiting))
                if seen == len(waiting):
                    waiting.append(tensor)
                    self._keys.append([])
                self._keys[seen].append((place, key))  # one that passes through several nodes is measured once
        if len(waiting) >= self.BATCH:
            self.flush()

    def flush(self) -> None:
        """Find norm and, for small tensors, value of each that waits."""
        with torch.no_grad():
            norms = norms_of(list(map(_elements, self._waiting)))
            for tensor, keys, norm in zip(self._waiting, self._keys, norms, strict=True):
                self.found |= dict.fromkeys(keys, (norm, small_copy(tensor)))
        for done in (self._waiting, self._keys, self._seen):
            done.clear()


def norms_of(tensors: list[Tensor]) -> list[float]:
    """Return the L2 norm of each tensor; together where torch's private batch function takes them, else one by one."""
    together = getattr(torch, "_foreach_norm", None)
    kinds = {(t.dtype, t.device) for t in tensors}
    if together is not None and len(kinds) == 1 and tensors[0].is_floating_point():
        return torch.stack(together(tensors, dtype=WIDER.get(tensors[0].dtype))).tolist()
    return list(map(_norm, tensors))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=WIDER.get(tensor.dtype)))


def _elements(tensor: Tensor) -> Tensor:
    """Return a strided tensor as it is, and the elements of any other."""
    if tensor.is_nested:
        return tensor.values()
    if tensor.layout is torch.strided:
        return tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor.to_dense()


def _remarks(nodes: tuple[Node, ...]) -> list[str]:
    seen = {entry.dtype for node in nodes for entry in node.saved} | {node.operation for node in nodes}
    return [words for what, words in REMARKS.items() if what in seen]


def _leaves(walk: _Walk, names: dict[int, str], nodes: tuple[Node, ...]) -> Iterator[Leaf]:
    for place, tensor in sorted(walk.leaves.items()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "input"
        yield Leaf(names[place], kind, place, nodes[place].shapes[0], nodes[place].norm)


def _cuts(graph: Graph, loss: Tensor, walk: _Walk, parameters: _Parameters, record: "Record | None") -> Iterator[Cut]:
    """Yield what keeps gradients from parameters: a cut with its line where it is known, then nodes that stop them."""
    reached = {id(tensor) for tensor in walk.leaves.values()}
    if REENTRANT in [node.operation for node in graph.nodes]:
        parameters = {}  # it hides its parameters: they are no more lost than seen
    lost = {key: name for key, (name, p) in parameters.items() if p.requires_grad and key not in reached}
    if lost:
        known = _explained(loss, lost, record) if record is not None else {}
        for (where, operation), keys in known.items():
            yield Cut("cut", where, operation, tuple(name for key, name in lost.items() if key in keys))
        rest = tuple(name for key, name in lost.items() if not any(key in keys for keys in known.values()))
        if rest:
            yield Cut("cut", "", "not reached", rest)
    measured = graph.nodes[0].norm is not None
    without = {leaf.node: leaf.name for leaf in graph.leaves if measured and not leaf.norm and 0 not in leaf.shape}
    for place, node in enumerate(graph.nodes if without else ()):
        edges = graph.outgoing[place]
        if node.norm and edges and not any(edge.norm for edge in edges):
            names = tuple(without[leaf] for leaf in sorted(_behind(graph, place) & without.keys()))
            if names:
                kind = "zero" if any(edge.norm == 0 for edge in edges) else "cut"
                where = record.line(walk.numbers[place]) if record is not None else ""
                yield Cut(kind, where, node.operation.lower(), names, place)


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


def _behind(graph: Graph, place: int) -> set[int]:
    """Return the nodes that a node leads to."""
    waiting, found = [place], set[int]()
    while waiting:
        fresh = {edge.target for edge in graph.outgoing[waiting.pop()]} - found
        found |= fresh
        waiting += fresh
    return found
