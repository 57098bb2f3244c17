"""A diagram of boxes and arrows: our own layered layout, and the diagram as SVG and as PNG.

No library and no binary is needed to lay out a graph. Boxes stand in layers, a box as many layers from the first one
as its longest way from there (Sugiyama, Tagawa and Toda, 1981); sweeps over the layers sort each by the mean place of
its neighbours, and then move it towards them. All ties are broken by number, so that a diagram is always the same.
"""

import bisect
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

FILLS = {"none": "#e4e4e4", "vanishing": "#9ecae1", "healthy": "#d9efd3", "exploding": "#fc9272", "cut": "#ffffff"}
STROKES = {"none": "#999999", "vanishing": "#3182bd", "healthy": "#555555", "exploding": "#de2d26", "cut": "#d7301f"}
WIDTHS = {"none": 1.0, "vanishing": 1.0, "healthy": 1.2, "exploding": 2.4, "cut": 2.0}  # colour is not the only sign
RED = "#d7301f"
FONT, LINE, LETTER = 11, 14, 6.7  # pixels: height of a letter, distance of lines, width of a monospaced letter
GAP, PAD, MARGIN = 14, 7, 10
WIDEST = 900  # pixels on the page; a wider diagram is scaled down
LONGEST = 34  # letters in a line
MOST_PIXELS = 4e6  # of a PNG
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


class Box(NamedTuple):
    """A box with lines of text. ``end`` is where a gradient ends (drawn rounder); ``red`` marks its border."""

    lines: tuple[str, ...]
    grade: str = "healthy"
    end: bool = False
    red: bool = False

    @property
    def size(self) -> Point:
        """Width and height in pixels."""
        longest = max(min(len(line), LONGEST) for line in self.lines)
        return longest * LETTER + 2 * PAD, len(self.lines) * LINE + PAD


class Arrow(NamedTuple):
    """An arrow between two boxes, by their numbers."""

    source: int
    target: int
    grade: str = "healthy"
    label: str = ""


class Places(NamedTuple):
    """Where everything stands, in pixels: centres of boxes, and the points through which each arrow goes."""

    width: float
    height: float
    centres: tuple[Point, ...]
    ways: tuple[tuple[Point, ...], ...]
    crossings: int


@dataclass(frozen=True)
class Diagram:
    """Boxes and arrows without cycles, what the picture says in words, and the lines below it.

    ``across``: layers go from right to left, so that the forward pass reads from left to right. Else the first layer
    is on top.

    Examples
    --------
    >>> two = Diagram((Box(("loss",)), Box(("w",), end=True)), (Arrow(0, 1),), "a loss and its weight")
    >>> two.svg().startswith("<svg"), two.places.crossings
    (True, 0)
    """

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    words: str
    below: tuple[str, ...] = ()
    legend: bool = False
    across: bool = False

    @cached_property
    def places(self) -> Places:
        """The layout."""
        return _places(self)

    def svg(self) -> str:
        """Return the diagram as SVG; all text in it is escaped."""
        return _svg(self)

    def png(self) -> bytes:
        """Return the diagram as PNG, drawn by matplotlib from the same layout; the same bytes every time."""
        return _png(self)

    def like(self, other: "Diagram") -> "Diagram":
        """Return the diagram at the places of another one: all steps of a backward pass are laid out once."""
        copy = replace(self, across=other.across)
        copy.__dict__["places"] = other.places
        return copy

    def fitted(self) -> "Diagram":
        """Return the diagram across where that fits the page, else from top to bottom."""
        return flat if (flat := replace(self, across=True)).places.width <= WIDEST else replace(self, across=False)


def _places(diagram: Diagram) -> Places:
    sizes = [box.size for box in diagram.boxes]
    along, aside = (0, 1) if diagram.across else (1, 0)
    layers, middles, bends, crossings = layered(
        [size[aside] for size in sizes], [arrow[:2] for arrow in diagram.arrows]
    )
    thick = [0.0] * (max(layers, default=0) + 1)
    for size, layer in zip(sizes, layers, strict=True):
        thick[layer] = max(thick[layer], size[along])
    labels = max((len(arrow.label) for arrow in diagram.arrows), default=0)
    space = (labels * LETTER + 24 if diagram.across else LINE + 16) if labels else 22
    starts, total = [], 0.0
    for thickness in thick:
        starts.append(total + thickness / 2)
        total += thickness + space
    total -= space

    def point(main: float, cross: float) -> Point:
        x, y = (total - main, cross) if diagram.across else (cross, main)
        return round(x + MARGIN, 1), round(y + MARGIN, 1)

    ways = []
    for arrow, bend in zip(diagram.arrows, bends, strict=True):
        s, t = arrow.source, arrow.target
        way = [(starts[layers[s]] + sizes[s][along] / 2, middles[s])]
        for layer, cross in bend:  # straight through the thickness of a layer, so that no box is crossed
            way += [(starts[layer] - thick[layer] / 2, cross), (starts[layer] + thick[layer] / 2, cross)]
        way.append((starts[layers[t]] - sizes[t][along] / 2, middles[t]))
        ways.append(tuple(point(*p) for p in way))
    centres = tuple(point(starts[layer], middle) for layer, middle in zip(layers, middles, strict=True))
    corners = [(x + w / 2, y + h / 2) for (x, y), (w, h) in zip(centres, sizes, strict=True)]
    right, low = (max(places, default=0.0) for places in zip(*corners, *itertools.chain(*ways), strict=True))
    return Places(right + MARGIN, low + MARGIN, centres, tuple(ways), crossings)


def layered(
    sizes: Sequence[float], edges: Sequence[tuple[int, int]]
) -> tuple[list[int], list[float], list[list[tuple[int, float]]], int]:
    """Return each box's layer and middle across it, each edge's (layer, middle) on the way, and the crossings left.

    Examples
    --------
    >>> layered([10, 10, 10], [(0, 1), (1, 2), (0, 2)])[0]
    [0, 1, 2]
    """
    layer = _longest_ways(len(sizes), edges)
    size = list(sizes)
    up: list[list[int]] = [[] for _ in sizes]
    down: list[list[int]] = [[] for _ in sizes]
    chains: list[list[int]] = []
    place_of = list(layer)
    for source, target in edges:  # an edge over several layers goes through a place in each
        chain = list(range(len(size), len(size) + layer[target] - layer[source] - 1))
        chains.append(chain)
        size += [6.0] * len(chain)
        place_of += range(layer[source] + 1, layer[target])
        up += [[] for _ in chain]
        down += [[] for _ in chain]
        for a, b in zip([source, *chain], [*chain, target], strict=True):
            down[a].append(b)
            up[b].append(a)
    rows: list[list[int]] = [[] for _ in range(max(place_of, default=0) + 1)]
    for thing, row in enumerate(place_of):
        rows[row].append(thing)
    rows, crossings = _ordered(rows, up, down)
    # Long edges are kept straight, and boxes where gradients end give way: else a chain drifts with its weights.
    weight = [8.0 if thing >= len(sizes) else 2.0 if down[thing] else 0.05 for thing in range(len(size))]
    middles = _moved(rows, up, down, size, weight)
    bends = [[(place_of[thing], middles[thing]) for thing in chain] for chain in chains]
    return layer, middles[: len(sizes)], bends, crossings


def _longest_ways(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the longest way to each box; a box without any edge stands in the last layer."""
    targets: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        targets[source].append(target)
        missing[target] += 1
    alone = [not targets[box] and not missing[box] for box in range(count)]
    layer, ready = [0] * count, [box for box in range(count) if not missing[box]]
    for box in ready:  # grows while it is read
        for target in targets[box]:
            layer[target] = max(layer[target], layer[box] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    last = max(layer, default=0)
    return [last if lonely else own for own, lonely in zip(layer, alone, strict=True)]


def _ordered(
    rows: list[list[int]], up: list[list[int]], down: list[list[int]], sweeps: int = 12
) -> tuple[list[list[int]], int]:
    """Sort each row by the mean place of its neighbours, down and up in turn; keep the order with fewest crossings."""
    place = {thing: float(index) for row in rows for index, thing in enumerate(row)}
    best: tuple[int, list[list[int]]] | None = None
    for sweep in range(sweeps):
        near, order = (up, rows) if sweep % 2 == 0 else (down, rows[::-1])
        for row in order:
            wanted = {t: sum(place[n] for n in near[t]) / len(near[t]) if near[t] else place[t] for t in row}
            row.sort(key=lambda thing: (wanted[thing], place[thing]))
            place.update((thing, float(index)) for index, thing in enumerate(row))
        crossings = sum(_crossings(row, down, place) for row in rows)
        if best is None or crossings < best[0]:
            best = crossings, [row[:] for row in rows]
        if not crossings:
            break
    assert best is not None
    return best[1], best[0]


def _crossings(row: list[int], down: list[list[int]], place: dict[int, float]) -> int:
    seen: list[float] = []
    count = 0
    for _, end in sorted((place[thing], place[target]) for thing in row for target in down[thing]):
        count += len(seen) - bisect.bisect_right(seen, end)
        bisect.insort(seen, end)
    return count


def _moved(
    rows: list[list[int]], up: list[list[int]], down: list[list[int]], size: list[float], weight: list[float]
) -> list[float]:
    """Return middles close to those of the neighbours: in each row the least squares that keep order and distance."""
    middle = [0.0] * len(size)
    steps: list[list[float]] = []
    for row in rows:
        offsets, at = [], 0.0
        for index, thing in enumerate(row):
            at += (size[row[index - 1]] + size[thing]) / 2 + GAP if index else 0.0
            offsets.append(at)
        steps.append(offsets)
        for thing, offset in zip(row, offsets, strict=True):
            middle[thing] = offset - at / 2
    for sweep in range(10):
        first, second = (up, down) if sweep % 2 == 0 else (down, up)
        for index in range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1):
            pools: list[list[float]] = []  # weighted sum of wishes, weight, members: neighbours in conflict are pooled
            for thing, offset in zip(rows[index], steps[index], strict=True):
                near = first[thing] or second[thing]
                share = sum(weight[n] for n in near)
                wish = sum(weight[n] * middle[n] for n in near) / share if near else middle[thing]
                pools.append([(wish - offset) * weight[thing], weight[thing], 1])
                while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                    last = pools.pop()
                    pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
            start = [total / share for total, share, members in pools for _ in range(int(members))]
            for thing, offset, begin in zip(rows[index], steps[index], start, strict=True):
                middle[thing] = begin + offset
    least = min((m - s / 2 for m, s in zip(middle, size, strict=True)), default=0.0)
    return [m - least for m in middle]


def _whole(diagram: Diagram) -> tuple[int, int, list[tuple[float, float, str, str]]]:
    """Return width, height, and what stands below the boxes: x, y, text and colour (or none)."""
    x, y, parts = float(MARGIN), diagram.places.height, []
    if diagram.legend:
        cut = any(box.grade == "cut" for box in diagram.boxes)
        for grade in ["none", "vanishing", "healthy", "exploding"] + ["cut"] * cut:
            parts.append((x, y + 6, grade, grade))
            x += 18 + (len(grade) + 2) * LETTER
        y += LINE + 6
    for line in diagram.below:
        parts.append((MARGIN, y + 6, line, ""))
        y += LINE
    width = max([diagram.places.width, *(x + 18 + len(text) * LETTER + MARGIN for x, _, text, _ in parts)])
    height = max([diagram.places.height, *(y + LINE for _, y, _, _ in parts)])
    return math.ceil(width), math.ceil(height), parts


def shortened(line: str) -> str:
    """Return a line short enough for a box; its middle is left out."""
    line = line.replace("\n", " ")
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[: half - 1]}…{line[-half:]}"


def _clean(line: str) -> str:
    return NOT_IN_XML.sub("\ufffd", line)


def _draw(
    diagram: Diagram,
    parts: list[tuple[float, float, str, str]],
    curve: Callable[[list[Point], str], None],
    rectangle: Callable[[float, float, float, float, int, str, bool], None],
    write: Callable[[float, float, str, str], None],
) -> None:
    """Draw a diagram with three pens: for Bézier curves, for rectangles, and for text ("label", "start" or "")."""
    across = diagram.across
    for arrow, way in zip(diagram.arrows, diagram.places.ways, strict=True):
        points = [way[0]]
        for (x0, y0), (x1, y1) in itertools.pairwise(way):  # it leaves and arrives along the flow
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            points += [(x, y0), (x, y1), (x1, y1)] if across else [(x0, y), (x1, y), (x1, y1)]
        curve(points, arrow.grade)
        if arrow.label:
            write(x, y + (-4 if across else 4), _clean(arrow.label), "label")
    for box, (x, y) in zip(diagram.boxes, diagram.places.centres, strict=True):
        w, h = box.size
        rectangle(x - w / 2, y - h / 2, w, h, 12 if box.end else 3, box.grade, box.red)
        for number, line in enumerate(box.lines):
            write(x, y - h / 2 + (number + 1) * LINE, _clean(shortened(line)), "")
    for x, y, line, grade in parts:
        if grade:
            rectangle(x, y - 4, 14, 12, 0, grade, False)
        write(x + 18 * bool(grade), y + 6, _clean(line), "start")


def _svg(diagram: Diagram) -> str:
    width, height, parts = _whole(diagram)
    scale = min(1.0, WIDEST / width)
    used = sorted({b.grade for b in diagram.boxes} | {a.grade for a in diagram.arrows} | {g for *_, g in parts if g})
    style = "".join(
        f".{g}{{fill:{FILLS[g]};stroke:{STROKES[g]}}}path.{g}{{fill:none;stroke-width:{WIDTHS[g]}}}" for g in used
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width * scale:.0f}" '
        f'height="{height * scale:.0f}" font-family="DejaVu Sans Mono,monospace" font-size="{FONT}" '
        f'text-anchor="middle"><title>{html.escape(_clean(diagram.words))}</title><style>{style}.red{{stroke:{RED};'
        f"stroke-width:3}}path.none{{stroke-dasharray:4 3}}"
        ".l{fill:#a50f15;stroke:#fff;stroke-width:3px;paint-order:stroke}</style>"
        f'<marker id="a" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto" '
        f'markerUnits="userSpaceOnUse"><path d="M0 0 6 3 0 6z" fill="#555"/></marker>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    ]

    def curve(points: list[Point], grade: str) -> None:
        start, *rest = [f"{x:g} {y:g}" for x, y in points]
        pieces = "".join(f"C{' '.join(rest[i : i + 3])}" for i in range(0, len(rest), 3))
        out.append(f'<path class="{grade}" marker-end="url(#a)" d="M{start}{pieces}"/>')

    def rectangle(x: float, y: float, w: float, h: float, radius: int, grade: str, red: bool) -> None:
        places = zip(("x", "y", "width", "height"), (x, y, w, h), strict=True)
        sides = " ".join(f'{name}="{value:{".1f" if radius else "g"}}"' for name, value in places)
        out.append(f'<rect class="{grade}{" red" * red}" {sides}' + f' rx="{radius}"' * bool(radius) + "/>")

    def write(x: float, y: float, line: str, kind: str) -> None:
        before, after = {"label": (' class="l"', ""), "start": ("", ' text-anchor="start"')}.get(kind, ("", ""))
        out.append(f'<text{before} x="{x:g}" y="{y:g}"{after}>{html.escape(line)}</text>')

    _draw(diagram, parts, curve, rectangle, write)
    return "".join([*out, "</svg>"])


def _png(diagram: Diagram) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path
    from PIL import Image  # matplotlib needs it too

    width, height, parts = _whole(diagram)
    scale = min(2.0, 2 * WIDEST / width, math.sqrt(MOST_PIXELS / (width * height)))  # 2 pixels for one on the page
    figure = Figure(figsize=(width / 72, height / 72), dpi=72 * scale)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    styles: dict[str, Any] = {"": {"ha": "center"}, "start": {"ha": "left"}}
    styles["label"] = {"ha": "center", "color": "#a50f15", "bbox": {"fc": "white", "ec": "none", "pad": 0.5}}

    def patch(points: list[Point], kind: Any, **style: Any) -> None:
        axes.add_patch(PathPatch(Path(points, [Path.MOVETO] + [kind] * (len(points) - 1)), zorder=1, **style))

    def curve(points: list[Point], grade: str) -> None:
        dashes = "--" if grade == "none" else "-"
        patch(points, Path.CURVE4, fc="none", ec=STROKES[grade], lw=WIDTHS[grade], ls=dashes)
        x, y = points[-1]
        head = [(x, y), (x + 6, y - 3), (x + 6, y + 3)] if diagram.across else [(x, y), (x - 3, y - 6), (x + 3, y - 6)]
        patch([*head, (x, y)], Path.LINETO, fc="#555555", ec="none")

    def rectangle(x: float, y: float, w: float, h: float, radius: int, grade: str, red: bool) -> None:
        shape = f"round,pad=0,rounding_size={radius}"
        edge, line = (RED, 3.0) if red else (STROKES[grade], 1.0)
        axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=shape, fc=FILLS[grade], ec=edge, lw=line, zorder=2))

    def write(x: float, y: float, line: str, kind: str) -> None:
        axes.text(x, y, line, fontsize=FONT, family="DejaVu Sans Mono", parse_math=False, **styles[kind])

    _draw(diagram, parts, curve, rectangle, write)
    canvas.draw()
    file = io.BytesIO()  # few colours: a quarter of the bytes that matplotlib's own file would have
    Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).quantize(64).save(file, "png", optimize=True)
    return file.getvalue()
