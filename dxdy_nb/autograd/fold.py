"""A graph folded by module: parts of neighbouring operations, few enough to be looked at."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dxdy_nb.autograd.graph import Graph

FOLDED = 20  # parts at most, where the depth is ours to choose
MOST = 1500  # boxes that are ever laid out
BETWEEN = 8  # operations between two modules that may join one of them


class Part(NamedTuple):
    """Operations that are drawn as one box: neighbours in the order of the backward pass, so that no cycle arises."""

    name: str
    nodes: tuple[int, ...]


def folded(graph: Graph, depth: int | None = None) -> list[Part]:
    """Return the parts of a graph, folded by module.

    A module that is left and entered again has a part each time. Without a depth, it is the greatest one that leaves
    2 to 20 parts, where alike neighbours (``blocks.0``, ``blocks.1``) may have to share one. If most of a large graph
    is one part, such as a recurrent cell, it is cut into even shares; "(1/18)" is the first in the forward pass.

    Examples
    --------
    >>> import torch, dxdy_nb as dx
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    >>> [part.name for part in folded(dx.graph(net(torch.ones(1, 2)).sum(), net))]
    ['2', '0']
    """
    if depth is not None:
        return merged(_runs(graph, depth), MOST)
    deepest = max((node.module.count(".") + 1 for node in graph.nodes), default=1)
    for depth in range(deepest, 0, -1):
        parts = _alike(_runs(graph, depth), FOLDED)
        if 2 <= len(parts) <= FOLDED:
            return _shares(parts) if len(parts) <= FOLDED // 2 else parts
    return merged(single(graph), FOLDED)


def single(graph: Graph) -> list[Part]:
    """Return each operation as a part of its own."""
    return [Part(node.operation, (place,)) for place, node in enumerate(graph.nodes) if node.leaf is None]


def merged(parts: list[Part], most: int) -> list[Part]:
    """Merge neighbours of any kind, evenly, until at most so many parts remain."""
    size = max(1, -(-len(parts) // most))
    return [_union(parts[i : i + size]) for i in range(0, len(parts), size)]


def _runs(graph: Graph, depth: int) -> list[Part]:
    """Return the runs of operations whose module paths begin alike."""
    runs: list[tuple[str, list[int]]] = []
    for place, node in enumerate(graph.nodes):
        if node.leaf is None:
            key = ".".join(node.module.split(".")[:depth])
            if not runs or key != runs[-1][0]:
                runs.append((key, []))
            runs[-1][1].append(place)
    often = Counter(key for key, _ in runs)
    joined: list[tuple[str, list[int]]] = []
    waiting: list[int] = []
    for number, (key, places) in enumerate(runs):
        if 0 < number < len(runs) - 1 and (not key or often[key] > 1) and _stray(graph, places):
            waiting += places
            continue
        if not joined or joined[-1][0] != key:
            joined.append((key, []))
        joined[-1][1].extend(waiting + places)
        waiting = []
    return [Part(key or _operations(graph, places), tuple(places)) for key, places in joined]


def _stray(graph: Graph, places: Sequence[int]) -> bool:
    """Return whether operations, such as a residual sum, are to go to the module whose output they take."""
    ends = [edge.target for place in places for edge in graph.outgoing[place]]
    return len(places) <= BETWEEN and all(graph.nodes[end].leaf is None for end in ends)


def _operations(graph: Graph, places: Sequence[int]) -> str:
    first, last = graph.nodes[places[0]].operation, graph.nodes[places[-1]].operation
    return first if len(places) == 1 else f"{last} … {first}"


def _alike(parts: list[Part], most: int) -> list[Part]:
    """Merge neighbours whose names differ in numbers only, as few as possible, until at most so many parts remain."""
    families: list[list[Part]] = []
    for part in parts:
        if families and _family(families[-1][-1].name) == _family(part.name):
            families[-1].append(part)
        else:
            families.append([part])
    if len(families) > most:
        return parts
    size = 1
    while sum(-(-len(family) // size) for family in families) > most:
        size += 1
    return [_union(family[i : i + size]) for family in families for i in range(0, len(family), size)]


def _shares(parts: list[Part]) -> list[Part]:
    """Cut a part that has most of all operations (a cell that is used many times) into even shares."""
    large = max(parts, key=lambda part: len(part.nodes))
    count = FOLDED + 1 - len(parts)
    if len(large.nodes) < max(10 * count, sum(len(part.nodes) for part in parts) / 2):
        return parts
    cuts = [len(large.nodes) * share // count for share in range(count + 1)]
    shares = [
        Part(f"{large.name} ({count - share}/{count})", large.nodes[cuts[share] : cuts[share + 1]])
        for share in range(count)
    ]
    place = parts.index(large)
    return [*parts[:place], *shares, *parts[place + 1 :]]


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _union(parts: Sequence[Part]) -> Part:
    """Return one part, named in the order of the forward pass."""
    if len(parts) == 1:
        return parts[0]
    places = tuple(place for part in parts for place in part.nodes)
    return Part(f"{parts[-1].name} … {parts[0].name} ({len(parts)}×)", places)
