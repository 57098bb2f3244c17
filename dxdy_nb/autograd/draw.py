"""A graph as text, as a picture, and as the steps of its backward pass.

**Grades.** A gradient's size is its root mean square over elements, relative to the median of those nearest to the
loss: of the quarter of operations, at most 20, with the smallest depth (for a leaf, of leaves: a parameter's gradient
is a sum over the batch, so it is compared with other parameters'). Below 1/1000 of it a gradient is *vanishing*, above
1000 times or not finite *exploding*, without a value or exactly zero *none*, else *healthy*. It is a ratio since a loss
may have any scale; it refers to where gradients start since they vanish or explode on their way from there, by a factor
a layer (at most 1/4 a sigmoid: Glorot and Bengio, 2010); and 1000 is five such layers, while depth, fan-in and the
mean over a batch alone move healthy networks by one or two powers of ten. The loss itself has gradient 1 and no grade
but healthy. A folded box has the grade of the median of its operations.
"""

import base64
import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from dxdy_nb.autograd.fold import MOST, Part, folded, merged, single
from dxdy_nb.autograd.formulas import RESHAPING, formula_of, is_elementwise
from dxdy_nb.autograd.graph import Cut, Edge, Graph, Node
from dxdy_nb.autograd.layout import Arrow, Box, Diagram
from dxdy_nb.errors import DxdyError, counted

FOLD_ABOVE = 60  # boxes in a picture
FOLD_TEXT_ABOVE = 200  # lines of text
LABELLED = 20  # boxes up to which arrows carry their gradient
SHOWN = 4  # elements of a tensor that are shown; names that are listed
NEAR = 20  # operations, or leaves, at most that tell the usual size of a gradient
FAR = 1000.0  # times the usual size
HANDING_ON = RESHAPING | {"ToCopy", "Expand"}
PICTURED = 60  # steps with a picture
WHOLE = 12  # nodes up to which a step shows the whole graph, not only the neighbours
MOST_IN_PNG = 180  # boxes; more are slow to draw, and too small to read


def draw(graph: Graph, fold: bool | int | None = None) -> "Picture":
    """Return a picture of a graph, coloured by the size of gradients (by the grades explained above in this module).

    Parameters
    ----------
    graph : as ``dxdy_nb.graph`` returns it
    fold : by module. None: above 60 boxes, to at most 20; True or False: always or never (up to 1,500 boxes);
        a number: to this depth of module paths

    Examples
    --------
    >>> import torch, dxdy_nb as dx
    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> draw(dx.graph((2 * w + 1) ** 2))
    Graph behind a loss, from Pow on; gradients end at w. All gradients are healthy.
    """
    if fold is not None and not isinstance(fold, bool) and (not isinstance(fold, int) or fold < 1):
        raise DxdyError(f"draw: fold is True, False, None, or a depth of module paths from 1 on; got {fold!r}.")
    sized = _sized(graph)
    shared = Counter(edge.target for edge in graph.edges if graph.nodes[edge.target].leaf is not None)
    boxes = len(graph.nodes) + sum(uses - 1 for uses in shared.values())
    if fold is None and boxes > FOLD_ABOVE:
        fold = True
    if not fold:
        return Picture(_unfolded(sized) if boxes <= MOST else _folded(sized, merged(single(graph), MOST)))
    return Picture(_folded(sized, folded(graph, None if fold is True else fold)))


def text(graph: Graph, fold: bool | None = None) -> str:
    """Return a graph as text, one line a node in the order of the backward pass; the same in every process.

    A line holds number, leaf or operation, shape of the output, module, norm of the gradient, and where gradients go.
    Graphs of more than 200 nodes are folded by module, unless ``fold`` is False.

    Examples
    --------
    >>> import torch, dxdy_nb as dx
    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> print(text(dx.graph((2 * w + 1) ** 2)))
    0 Pow []  gradient 1   -> 1
    1 Add []  gradient 14  -> 2
    2 Mul []  gradient 14  -> 3
    3 w   []  gradient 28
    """
    if fold or (fold is None and len(graph.nodes) > FOLD_TEXT_ABOVE):
        lines = _aligned(_part_rows(graph, folded(graph)), (" ",))
        lines.append(
            f"{len(graph.nodes)} nodes folded by module; dxdy_nb.autograd.draw.text(graph, fold=False) shows all"
        )
    else:
        lines = _aligned(_node_rows(graph), (" ", " "))
    return "\n".join([*lines, *map(_cut_words, graph.cuts), *(f"note: {note}" for note in graph.notes)])


def steps(graph: Graph) -> "Steps":
    """Return the backward pass one node at a time.

    Examples
    --------
    >>> import torch, dxdy_nb as dx
    >>> w = torch.tensor(3.0, requires_grad=True)
    >>> print(steps(dx.graph((2 * w + 1) ** 2)))
    step  operation  formula                  local  incoming  outgoing
    0     Pow        a ** n: g · n · a^(n−1)  14     1         14 to Add
    1     Add        a + b: g to each         1      14        14 to Mul
    2     Mul        a · b: g · b and g · a   2      14        28 to w
    3     w          w.grad += g                     28
    """
    return Steps(graph, tuple(_step(graph, number) for number in range(len(graph.nodes))))


@dataclass(frozen=True)
class Picture:
    """A picture of a graph: an SVG image in a notebook, a PNG where that is not shown, words anywhere else."""

    diagram: Diagram

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        return self.diagram.svg()

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file whose name ends in .svg or .png."""
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise DxdyError(f"a picture is saved as .svg or .png, got {path.name!r}.")
        try:
            path.write_bytes(self.svg.encode() if path.suffix == ".svg" else self.diagram.png())
        except OSError as error:
            raise DxdyError(f"{path}: cannot be written ({error.strerror}). Give a path that can be.") from None
        return path

    def __repr__(self) -> str:
        return self.diagram.words

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle = {"text/plain": self.diagram.words, "text/html": _image(self.diagram)}
        if len(self.diagram.boxes) <= MOST_IN_PNG:
            bundle["image/png"] = base64.b64encode(self.diagram.png()).decode()
        return bundle


class Step(NamedTuple):
    """What happens at a node; ``incoming`` and ``outgoing`` (one a target) are gradients where small, else norms."""

    number: int
    operation: str
    formula: str
    local: str
    incoming: Tensor | float | None
    outgoing: tuple[Tensor | float | None, ...]
    targets: tuple[str, ...]

    @property
    def row(self) -> tuple[str, ...]:
        """The step in words."""
        sent = [f"{_amount(value)} to {target}" for value, target in zip(self.outgoing, self.targets, strict=True)]
        return str(self.number), self.operation, self.formula, self.local, _amount(self.incoming), ", ".join(sent)


@dataclass(frozen=True)
class Steps:
    """The backward pass one node at a time: a folded picture each in a notebook, a table anywhere else."""

    graph: Graph
    rows: tuple[Step, ...]

    def slider(self) -> Any:
        """Return a slider over the steps in a live notebook; where nobody can move one, the folded steps."""
        from dxdy_nb.lesson import live

        if not live.in_live_notebook():
            return self
        import ipywidgets

        choose = ipywidgets.IntSlider(0, 0, len(self.rows) - 1, description="step")
        page = ipywidgets.HTML(self.page(0))
        choose.observe(lambda change: setattr(page, "value", self.page(change["new"])), "value")
        return ipywidgets.VBox([choose, page])

    def page(self, number: int) -> str:
        """Return one step as HTML: its words, and a picture in which its node is marked."""
        _, _, formula, local, incoming, outgoing = self.rows[number].row
        words = [
            formula,
            local and f"local derivative {local}",
            f"incoming {incoming}",
            outgoing and f"outgoing {outgoing}",
        ]
        if len(self.graph.nodes) <= WHOLE:
            picture = _unfolded(self._sized, number).like(self._whole)
        else:
            picture = _neighbours(self._sized, number)
        return f"<div>{html.escape('; '.join(filter(None, words)))}</div>{_image(picture)}"

    def __repr__(self) -> str:
        head = ("step", "operation", "formula", "local", "incoming", "outgoing")
        return "\n".join(_aligned([head, *(step.row for step in self.rows)]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        pages = [
            f"<details><summary>{step.number}. {html.escape(step.operation)}: {_amount(step.incoming)} arrives"
            f"</summary>{self.page(step.number)}</details>"
            for step in self.rows[:PICTURED]
        ]
        if len(self.rows) > PICTURED:
            pages.append(f"<p>{len(self.rows) - PICTURED} further steps: <code>print(steps)</code></p>")
        return {"text/plain": repr(self), "text/html": "".join(pages)}

    @cached_property
    def _sized(self) -> "_Sized":
        return _sized(self.graph)

    @cached_property
    def _whole(self) -> Diagram:
        return _unfolded(self._sized, len(self.rows)).fitted()


# ---- grades ----


class _Sized(NamedTuple):
    """A graph with the relative sizes of the gradients at its nodes and on its edges.

    ``ends``: which nodes are leaves, or only hand a gradient on to one (the transpose of a weight).
    """

    graph: Graph
    ends: tuple[bool, ...]
    nodes: tuple[float | None, ...]
    edges: tuple[float | None, ...]


def _sized(graph: Graph) -> _Sized:
    ends = [node.leaf is not None for node in graph.nodes]
    for place in range(len(ends) - 1, 0, -1):  # producers come after consumers
        targets = [edge.target for edge in graph.outgoing[place]]
        if targets and graph.nodes[place].operation in HANDING_ON:
            ends[place] = all(ends[target] for target in targets)
    sizes = [_mean_square(node.norm, node) for node in graph.nodes]
    usual = {end: _near_loss(graph, sizes, [own == end for own in ends]) for end in (False, True)}

    def relative(size: float | None, place: int) -> float | None:
        return None if size is None else size / usual[ends[place]]

    nodes = [relative(size, place) for place, size in enumerate(sizes)]
    nodes[0] = nodes[0] and 1.0  # the loss: 1 by definition
    edges = [relative(_mean_square(e.norm, graph.nodes[e.target], e.slot), e.target) for e in graph.edges]
    return _Sized(graph, tuple(ends), tuple(nodes), tuple(edges))


def _mean_square(norm: float | None, node: Node, slot: int = 0) -> float | None:
    shape = node.shapes[slot] if slot < len(node.shapes) else ()
    return None if norm is None else norm / math.sqrt(max(math.prod(shape), 1))


def _near_loss(graph: Graph, sizes: list[float | None], asked: list[bool]) -> float:
    """Return the usual size: the median among the nodes asked for that are nearest to the loss."""
    found = sorted(
        (node.depth, size)
        for node, size, own in list(zip(graph.nodes, sizes, asked, strict=True))[1:]
        if own and size and math.isfinite(size)
    )
    return median(size for _, size in found[: max(3, min(NEAR, len(found) // 4))]) if found else 1.0


def grade(size: float | None) -> str:
    """Return the grade of a relative size.

    Examples
    --------
    >>> [grade(size) for size in (None, 0.0, 1e-4, 1.0, 1e4, float("nan"))]
    ['none', 'none', 'vanishing', 'healthy', 'exploding', 'exploding']
    """
    if not size:
        return "none"
    if not math.isfinite(size) or size > FAR:
        return "exploding"
    return "vanishing" if size < 1 / FAR else "healthy"


# ---- diagrams ----


def _unfolded(sized: _Sized, step: int | None = None) -> Diagram:
    """Return the diagram of all nodes. With a step: only gradients known after it, and its node is marked."""
    graph = sized.graph
    last = len(graph.nodes) if step is None else step
    uses = Counter(edge.target for edge in graph.edges)
    boxes = [_node_box(sized, place, uses[place], place <= last, place == step) for place in range(len(graph.nodes))]
    arrows, used = [], set()
    labelled = len(boxes) <= LABELLED
    for edge, size in zip(graph.edges, sized.edges, strict=True):
        target, known = edge.target, edge.source <= last
        if graph.nodes[target].leaf is not None and target in used:  # a shared leaf is drawn at each of its uses
            boxes.append(boxes[target])
            target = len(boxes) - 1
        used.add(target)
        label = _amount(_small(edge)) if labelled and known and edge.norm is not None else ""
        arrows.append(Arrow(edge.source, target, grade(size) if known else "none", label))
    if step is None:
        return _finished(sized, boxes, arrows)
    return Diagram(tuple(boxes), tuple(arrows), f"step {step}")


def _folded(sized: _Sized, parts: list[Part]) -> Diagram:
    """Return the diagram of parts; parameters count in the part that uses them, a few inputs keep a box."""
    graph = sized.graph
    inputs = [leaf.node for leaf in graph.leaves if leaf.kind == "input"]
    inputs = inputs if len(inputs) <= SHOWN else []
    home = {place: number for number, part in enumerate(parts) for place in part.nodes}
    home |= {place: len(parts) + number for number, place in enumerate(inputs)}
    boxes = [_part_box(sized, part) for part in parts] + [_node_box(sized, place) for place in inputs]
    strongest: dict[tuple[int, int], float] = {}
    for edge, size in zip(graph.edges, sized.edges, strict=True):
        ends = home[edge.source], home.get(edge.target, home[edge.source])
        if ends[0] != ends[1]:
            strongest[ends] = max(strongest.get(ends, 0.0), size or 0.0)
    arrows = [Arrow(*ends, grade(size)) for ends, size in strongest.items()]
    return _finished(sized, boxes, arrows, f"{len(graph.nodes)} nodes folded into {len(boxes)} boxes")


def _neighbours(sized: _Sized, step: int) -> Diagram:
    """Return the diagram of one node, what sends gradients to it, and what it sends gradients to."""
    pairs = zip(sized.graph.edges, sized.edges, strict=True)
    edges = [(edge, size) for edge, size in pairs if step in (edge.source, edge.target)][: 2 * SHOWN]
    places = sorted({step, *(end for edge, _ in edges for end in (edge.source, edge.target))})
    boxes = tuple(_node_box(sized, place, red=place == step) for place in places)
    arrows = tuple(
        Arrow(places.index(edge.source), places.index(edge.target), grade(size), _amount(_small(edge)))
        for edge, size in edges
    )
    return Diagram(boxes, arrows, f"step {step}", across=True)


def _finished(sized: _Sized, boxes: list[Box], arrows: list[Arrow], note: str = "") -> Diagram:
    """Return the diagram with its cuts and legend, from right to left where that fits the page."""
    for cut in sized.graph.cuts:
        if cut.node is None:
            lines = (f"✂ {cut.operation}", cut.where, _listed(cut.parameters, 1))
            boxes.append(Box(tuple(filter(None, lines)), "cut", red=True))
    below = (*filter(None, [note]), "arrows: where gradients go; dashed: none", *sized.graph.notes)
    diagram = Diagram(tuple(boxes), tuple(arrows), _words(sized), below, legend=True)
    return diagram.fitted() if len(boxes) <= LABELLED else diagram


def _node_box(sized: _Sized, place: int, uses: int = 1, known: bool = True, red: bool = False) -> Box:
    node, own = sized.graph.nodes[place], grade(sized.nodes[place])
    lines = [_name(node) + (f" ×{uses}" if uses > 1 and node.leaf is not None else "")]
    if any(node.shapes):
        lines.append("×".join(map(str, node.shapes[0])))
    if node.value is not None and node.value.numel() <= SHOWN:
        lines.append(f"value {_amount(node.value)}")
    size = _gradient(_small(node))
    lines.append(size if known else "gradient ?".ljust(len(size)))
    if own in ("vanishing", "exploding"):
        lines.append(own if known else " " * len(own))
    red = red or place in _stops(sized.graph)
    return Box(tuple(lines), own if known else "none", node.leaf is not None, red)


def _part_box(sized: _Sized, part: Part) -> Box:
    graph, passing = sized.graph, [place for place in part.nodes if not sized.ends[place]]
    sizes = [size for place in passing or part.nodes if (size := sized.nodes[place]) is not None]
    own = grade(None if not sizes else median(sizes) if all(map(math.isfinite, sizes)) else math.inf)
    lines = (part.name, _contents(graph, part), _gradient(graph.nodes[part.nodes[0]].norm))
    red = not _stops(graph).isdisjoint(part.nodes)
    return Box((*lines, own) if own in ("vanishing", "exploding") else lines, own, red=red)


def _stops(graph: Graph) -> set[int | None]:
    return {cut.node for cut in graph.cuts}


def _leaves_of(graph: Graph, part: Part) -> set[int]:
    ends = {edge.target for place in part.nodes for edge in graph.outgoing[place]}
    return {end for end in ends if graph.nodes[end].leaf is not None}


def _image(diagram: Diagram) -> str:
    """Return SVG as an image: the one vector form that an untrusted notebook and an offline page both show."""
    code = base64.b64encode(diagram.svg().encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{code}" alt="{html.escape(diagram.words)}">'


# ---- steps ----


def _step(graph: Graph, number: int) -> Step:
    node, edges = graph.nodes[number], graph.outgoing[number]
    formula = f"{node.leaf}.grad += g" if node.leaf is not None else formula_of(node.operation)
    local = ", ".join(_local(node, edge, graph.nodes[edge.target]) for edge in edges)
    targets = tuple(_name(graph.nodes[edge.target]) for edge in edges)
    return Step(number, _name(node), formula, local, _small(node), tuple(map(_small, edges)), targets)


def _local(node: Node, edge: Edge, target: Node) -> str:
    """Return a local derivative: outgoing / incoming of scalars and of elements, else its kind."""
    single = is_elementwise(node.operation)
    if node.operation in RESHAPING:
        return "1"
    if node.shapes[:1] != target.shapes[edge.slot : edge.slot + 1]:
        return "per element, summed" if single else "matrix"
    if not single and any(node.shapes):
        return "matrix"
    arriving, leaving = node.gradient, edge.gradient
    if arriving is None or leaving is None or arriving.numel() > SHOWN or not arriving.all():
        return "per element" if any(node.shapes) else "?"
    return _amount(leaving / arriving)


# ---- words ----


def _words(sized: _Sized) -> str:
    """Return what the picture says, without norms: their last digits differ between machines."""
    graph, found = sized.graph, dict[str, list[str]](vanishing=[], exploding=[], none=[])
    for node, size in zip(graph.nodes, sized.nodes, strict=True):
        found.get(grade(size), []).append(node.leaf or node.module or node.operation)
    titles = {"vanishing": "Vanishing", "exploding": "Exploding", "none": "No gradient"}
    state = [f"{titles[own]}: {_listed(tuple(dict.fromkeys(names)), SHOWN)}." for own, names in found.items() if names]
    if len(found["none"]) == len(graph.nodes):
        state = ["No gradients are known."]
    ends = _listed(tuple(leaf.name for leaf in graph.leaves), SHOWN)
    start = f"Graph behind a loss, from {_name(graph.nodes[0])} on; gradients end at {ends}."
    cuts = [f"{words[0].upper()}{words[1:]}." for words in map(_cut_words, graph.cuts)]
    return " ".join([start, *(state or ["All gradients are healthy."]), *cuts])


def _cut_words(cut: Cut) -> str:
    where = f" at {cut.where}" if cut.where else ""
    gets = "gradient zero" if cut.kind == "zero" else "no gradient"
    return f"{cut.kind}{where} ({cut.operation}): {gets} for {', '.join(cut.parameters)}"


def _node_rows(graph: Graph) -> Iterable[tuple[str, ...]]:
    for number, node in enumerate(graph.nodes):
        shapes = " ".join(str(list(shape)) for shape in node.shapes)
        targets = ", ".join(str(edge.target) for edge in graph.outgoing[number])
        module = node.module and f"@{node.module}"
        yield str(number), _name(node), shapes, module, _gradient(node.norm), targets and f"-> {targets}"


def _part_rows(graph: Graph, parts: list[Part]) -> Iterable[tuple[str, ...]]:
    home = {place: number for number, part in enumerate(parts) for place in part.nodes}
    for number, part in enumerate(parts):
        ends = {home.get(edge.target, number) for place in part.nodes for edge in graph.outgoing[place]} - {number}
        targets = f"-> {', '.join(map(str, sorted(ends)))}" if ends else ""
        yield str(number), part.name, _contents(graph, part), _gradient(graph.nodes[part.nodes[0]].norm), targets


def _contents(graph: Graph, part: Part) -> str:
    leaves = _leaves_of(graph, part)
    words = counted(len(part.nodes), "operation")
    return f"{words}, {counted(len(leaves), 'leaf').replace('leafs', 'leaves')}" if leaves else words


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _gradient(size: Tensor | float | None) -> str:
    return "no gradient" if size is None else f"gradient {_amount(size)}"


def _aligned(rows: Iterable[tuple[str, ...]], gaps: tuple[str, ...] = ()) -> list[str]:
    """Return rows as lines of aligned columns, two spaces apart but for the first gaps; empty columns are left out."""
    columns = []
    for place, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        gap = gaps[place] if place < len(gaps) else "  "
        if width:
            columns.append([cell.ljust(width) + gap for cell in column])
    return ["".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _name(node: Node) -> str:
    return node.leaf if node.leaf is not None else node.operation


def _shown(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() <= SHOWN


def _small(thing: Node | Edge) -> Tensor | float | None:
    """Return a gradient where it is small, else its norm."""
    return thing.gradient if _shown(thing.gradient) else thing.norm


def _amount(value: Any) -> str:
    """Return a number, or the few numbers of a small tensor, to three digits."""
    if isinstance(value, Tensor):
        return _amount(value.item()) if value.dim() == 0 else f"[{', '.join(map(_amount, value.flatten().tolist()))}]"
    if value is None:
        return "none"
    whole = isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) and abs(value) < 1e5
    return str(int(value)) if whole else f"{value:.3g}"
