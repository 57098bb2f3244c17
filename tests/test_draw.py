"""A graph as text, picture and steps: hand numbers, structure, and what a page and a notebook need."""

import base64
import io
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import recurrent_loss, resnet_loss, transformer_loss
from PIL import Image
from torch import nn

from dxdy_nb.autograd.draw import MOST_IN_PNG, draw, grade, steps, text
from dxdy_nb.autograd.fold import FOLDED, MOST, folded
from dxdy_nb.autograd.formulas import FORMULAS, RESHAPING
from dxdy_nb.autograd.graph import Cut, Edge, Graph, Leaf, Node, graph
from dxdy_nb.autograd.layout import WIDEST, Arrow, Box, Diagram, layered
from dxdy_nb.autograd.record import record
from dxdy_nb.errors import DxdyError

SVG = "{http://www.w3.org/2000/svg}"


def scalar(value):
    return torch.tensor(value, requires_grad=True)


@pytest.fixture
def square():
    w, x, b = scalar(3.0), scalar(2.0), scalar(1.0)
    return graph((w * x + b) ** 2)


def made(*rows, cuts=(), notes=()):
    """Return a graph of rows (leaf or operation, is it a leaf, norm, targets), scalar and one below the other."""
    nodes, edges, leaves = [], [], []
    for number, (name, leaf, norm, targets) in enumerate(rows):
        operation = "AccumulateGrad" if leaf else name
        nodes.append(Node(operation, "", ((),), "float32", (), name if leaf else None, number, norm))
        edges += [Edge(number, target, place, 0, rows[target][2]) for place, target in enumerate(targets)]
        leaves += [Leaf(name, "parameter", number, (), norm)] * leaf
    return Graph(tuple(nodes), tuple(edges), tuple(leaves), tuple(cuts), tuple(notes))


def recorded(make, *args):
    model, loss = make(*args)
    with record(model) as seen:
        value = loss()
    return graph(value, model, record=seen)


@pytest.fixture(scope="module")
def transformer():
    return recorded(transformer_loss)


@pytest.fixture(scope="module")
def resnet():
    return recorded(resnet_loss)


def assert_inside(svg):
    """Check that SVG is well-formed, and that every box, letter and arrow is inside of the picture."""
    root = ET.fromstring(svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.get("width")) <= width
        assert 0 <= y <= y + float(box.get("height")) <= height
    for line in root.iter(f"{SVG}text"):
        assert 0 < float(line.get("x")) < width and 0 < float(line.get("y")) < height
    for way in root.iter(f"{SVG}path"):
        if way.get("class"):
            x, y = np.array(re.findall(r"-?[\d.]+", way.get("d")), float).reshape(-1, 2).T
            assert x.min() >= 0 and x.max() <= width and y.min() >= 0 and y.max() <= height
    return root


# ---- text ----


def test_text_is_one_line_a_node_in_order(square):
    assert str(square).splitlines() == [
        "0 Pow []  gradient 1   -> 1",
        "1 Add []  gradient 14  -> 2, 3",
        "2 Mul []  gradient 14  -> 4, 5",
        "3 b   []  gradient 14",
        "4 w   []  gradient 28",
        "5 x   []  gradient 42",
    ]


def test_text_names_modules_shapes_cuts_and_notes():
    net = nn.Sequential(nn.Linear(2, 3))
    g = graph(net(torch.ones(1, 2)).sum(), net)
    assert re.search(r"^1 Addmm +\[1, 3\] +@0 +gradient 1.73 +-> 3, 2$", str(g), re.M)
    cut = Cut("cut", "train.py:7", "detach", ("a.weight", "a.bias"))
    zero = Cut("zero", "", "round", ("b",))
    lines = text(
        made(("Mul", False, None, (1,)), ("w", True, None, ()), cuts=(cut, zero), notes=("freed",))
    ).splitlines()
    assert lines == [
        "0 Mul []  no gradient  -> 1",
        "1 w   []  no gradient",
        "cut at train.py:7 (detach): no gradient for a.weight, a.bias",
        "zero (round): gradient zero for b",
        "note: freed",
    ]


def test_text_of_a_large_graph_is_folded(transformer):
    lines = text(transformer).splitlines()
    assert len(lines) <= FOLDED + 1 and "fold=False" in lines[-1]
    assert any("blocks.11" in line and "12 leaves" in line for line in lines)
    assert len(text(transformer, fold=False).splitlines()) == len(transformer.nodes) > 700


def test_text_and_pictures_are_the_same_in_every_process():
    code = """
import hashlib, sys; sys.path.insert(0, "tests")
from nets import transformer_loss
import dxdy_nb as dx
from dxdy_nb.autograd import draw
model, loss = transformer_loss(3)
g = dx.graph(loss(), model)
everything = [draw.text(g, fold=False), str(g), g.draw().svg, g.draw(fold=False).svg, str(g.steps())]
print(hashlib.sha256("".join(everything).encode() + g.draw().diagram.png()).hexdigest())
"""
    where = Path(__file__).parents[1]
    done = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            cwd=where,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert done[0] == done[1]


# ---- folding ----


def test_a_transformer_folds_to_its_blocks(transformer):
    boxes = draw(transformer).diagram.boxes
    names = [box.lines[0] for box in boxes]
    assert len(transformer.nodes) > 700 and len(boxes) <= 20
    assert names[1:-2] == ["head", "norm", *(f"blocks.{i}" for i in reversed(range(12)))]


@pytest.mark.parametrize("make", [transformer_loss, resnet_loss])
def test_a_model_that_was_not_recorded_folds_too(make):
    model, loss = make()
    names = [part.name for part in folded(graph(loss(), model))]
    assert len(names) <= 20
    assert sum(name.startswith(("blocks.", "layers.")) for name in names) in (8, 12)


def test_a_deeper_transformer_folds_neighbours_alike():
    names = [part.name for part in folded(recorded(transformer_loss, 30))]
    assert len(names) <= 20 and "blocks.28 … blocks.29 (2×)" in names


def test_every_operation_is_in_one_part_and_parts_have_no_cycle(transformer, resnet):
    for g in (transformer, resnet, recorded(recurrent_loss, 50)):
        for depth in (None, 1, 2, 3):
            parts = folded(g, depth)
            home = {place: number for number, part in enumerate(parts) for place in part.nodes}
            assert sorted(home) == [place for place, node in enumerate(g.nodes) if node.leaf is None]
            assert sum(len(part.nodes) for part in parts) == len(home)
            assert all(home[e.source] <= home[e.target] for e in g.edges if e.target in home)


def test_a_cell_that_is_used_many_times_is_cut_into_shares():
    names = [part.name for part in folded(recorded(recurrent_loss, 300))]
    assert len(names) == 20 and names[2] == "0 (18/18)" and names[-1] == "0 (1/18)"


def test_a_graph_without_modules_folds():
    x = scalar(1.0)
    y = x
    for _ in range(300):
        y = y.sin()
    assert 3 <= len(folded(graph(y))) <= 20


def test_unfolding_goes_to_a_depth_or_all_the_way(transformer):
    assert 20 < len(draw(transformer, fold=3).diagram.boxes) < 200
    assert len(draw(transformer, fold=False).diagram.boxes) == len(transformer.nodes)
    assert len(draw(transformer, fold=True).diagram.boxes) == len(draw(transformer).diagram.boxes)


@pytest.mark.parametrize("fold", [0, -1, "blocks", 1.5])
def test_a_fold_that_is_none_is_refused(fold, square):
    with pytest.raises(DxdyError, match=r"fold is True, False, None, or a depth"):
        draw(square, fold)


def test_a_small_graph_is_folded_on_request_only(square):
    assert len(square.draw().diagram.boxes) == 6
    assert len(square.draw(fold=True).diagram.boxes) == 6  # three operations, three inputs


def test_two_thousand_nodes_are_drawn_quickly():
    g = recorded(recurrent_loss, 330)
    start = time.process_time()
    sizes = [len(draw(g, fold).diagram.svg()) and len(draw(g, fold).diagram.boxes) for fold in (None, False)]
    assert time.process_time() - start < 5
    assert len(g.nodes) > 1900 and sizes[0] <= 20 and sizes[1] < MOST


# ---- pictures ----


def test_pictures_are_well_formed_and_inside_their_frame(square, transformer, resnet):
    for picture in (
        square.draw(),
        transformer.draw(),
        resnet.draw(),
        resnet.draw(fold=False),
        transformer.draw(fold=3),
    ):
        root = assert_inside(picture.svg)
        assert float(root.get("width")) <= WIDEST
        assert picture.diagram.places.crossings == 0


def test_boxes_do_not_overlap(resnet):
    diagram = resnet.draw(fold=False).diagram
    boxes = [(x, y, *box.size) for (x, y), box in zip(diagram.places.centres, diagram.boxes, strict=True)]
    for i, (x, y, w, h) in enumerate(boxes):
        assert not any(abs(x - u) < (w + p) / 2 - 0.2 and abs(y - v) < (h + q) / 2 - 0.2 for u, v, p, q in boxes[:i])


def test_a_chain_is_straight():
    edges = [(i, i + 1) for i in range(50)]
    layers, middles, _, crossings = layered([10.0] * 51, edges)
    assert layers == list(range(51)) and crossings == 0
    np.testing.assert_allclose(middles, middles[0])


def test_crossings_that_can_be_avoided_are():
    edges = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 5), (4, 6)]
    assert layered([10.0] * 7, edges)[3] == 0
    assert layered([10.0] * 6, [(i, j) for i in range(3) for j in range(3, 6)])[3] > 0  # three wells, three houses


def test_a_long_edge_goes_around_boxes():
    layers, middles, bends, _ = layered([40.0, 40.0, 40.0], [(0, 1), (1, 2), (0, 2)])
    ((layer, middle),) = bends[2]
    assert layer == layers[1] == 1 and abs(middle - middles[1]) > 20


def test_a_shared_leaf_stands_at_each_use():
    w, x = scalar(3.0), scalar(2.0)
    diagram = graph((w * x + w * w) ** 2).draw().diagram
    shared = [number for number, box in enumerate(diagram.boxes) if box.lines[0] == "w ×3"]
    assert len(shared) == 3
    assert sorted(a.label for a in diagram.arrows if a.target in shared) == ["60", "90", "90"]  # 2 · 15 · (2, 3, 3)
    assert all("gradient 240" in diagram.boxes[number].lines for number in shared)


def test_grades_are_relative_to_the_gradients_near_the_loss():
    chain = [("Mul", False, norm, (place + 1,)) for place, norm in enumerate([1, 5, 4, 6, 5, 1e-3, 1e-5, 0.0, 1e5])]
    for scale in (1, 1e-20, 1e20):
        rows = [(name, leaf, norm * scale, to) for name, leaf, norm, to in chain] + [("w", True, None, ())]
        diagram = made(*rows).draw().diagram
        found = [box.grade for box in diagram.boxes]
        assert found == ["healthy"] * 5 + ["vanishing"] * 2 + ["none", "exploding", "none"]
        assert {arrow.grade for arrow in diagram.arrows} == {"none", "vanishing", "healthy", "exploding"}
    assert "Vanishing: Mul. Exploding: Mul. No gradient: Mul, w." in diagram.words


def test_a_size_is_per_element():
    big = torch.ones(10_000, requires_grad=True)
    assert {box.grade for box in graph((2 * big).sum()).draw().diagram.boxes} == {"healthy"}


def test_what_is_not_finite_explodes():
    rows = (("Mul", False, 1.0, (1,)), ("Log", False, float("inf"), (2,)), ("w", True, float("nan"), ()))
    assert [box.grade for box in made(*rows).draw().diagram.boxes] == ["healthy", "exploding", "exploding"]
    assert grade(1e-3) == grade(1e3) == "healthy"


def test_sigmoids_vanish_and_large_weights_explode():
    torch.manual_seed(0)
    for make, gain, wanted in ((nn.Sigmoid, 1, "vanishing"), (nn.Identity, 20, "exploding")):
        net = nn.Sequential(*[part for _ in range(20) for part in (nn.Linear(8, 8), make())])
        for parameter in net.parameters():
            parameter.data *= gain
        g = graph(net(torch.randn(4, 8)).mean(), net)
        found = [box.grade for box in g.draw().diagram.boxes]
        assert found[-1] == wanted and found[0] == "healthy" and set(found) == {"healthy", wanted}


@pytest.mark.parametrize("make", [transformer_loss, resnet_loss])
def test_healthy_models_have_no_alarm(make):
    assert "All gradients are healthy." in recorded(make).draw().diagram.words


def test_a_graph_without_gradients_is_drawn_without_grades():
    w = scalar(2.0)
    picture = graph(w * w, gradients=False).draw()
    assert {box.grade for box in picture.diagram.boxes} == {"none"}
    assert "no gradient" in picture.svg and "No gradients are known" in repr(picture)


def test_cuts_are_red():
    rows = (("Round", False, 1.0, (1,)), ("w", True, 0.0, ()))
    cuts = (Cut("cut", "a.py:3", "detach", ("v", "u")), Cut("zero", "", "round", ("w",), 0))
    diagram = made(*rows, cuts=cuts).draw().diagram
    assert [box.red for box in diagram.boxes] == [True, False, True]
    assert diagram.boxes[-1].lines == ("✂ detach", "a.py:3", "v and 1 more")
    assert "Cut at a.py:3 (detach): no gradient for v, u." in diagram.words
    assert_inside(diagram.svg())


def test_names_are_escaped():
    name = '<script>alert("&1")</script>\x00'
    g = made(("Mul<&>", False, 1.0, (1,)), (name, True, 2.0, ()))
    assert_inside(g.draw().svg)
    for html in (g.draw()._repr_mimebundle_()["text/html"], g.steps()._repr_mimebundle_()["text/html"]):
        assert "<script" not in html
        for code in re.findall('base64,([^"]*)', html):
            assert_inside(base64.b64decode(code).decode())
    assert g.draw().diagram.png().startswith(b"\x89PNG")


def test_a_long_name_is_shortened():
    diagram = Diagram((Box(("model." * 20 + "weight",)),), (), "words")
    assert "…" in diagram.svg() and diagram.places.width < 300


def test_the_bundle_of_a_picture(square, transformer):
    bundle = square._repr_mimebundle_()
    assert (
        bundle["text/plain"]
        == repr(square.draw())
        == ("Graph behind a loss, from Pow on; gradients end at b, w, x. All gradients are healthy.")
    )
    code, words = re.fullmatch(r'<img src="data:image/svg\+xml;base64,(.*)" alt="(.*)">', bundle["text/html"]).groups()
    assert base64.b64decode(code).decode() == square.draw().svg and words == bundle["text/plain"]
    image = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert image.width <= 2 * WIDEST and len(set(np.asarray(image.convert("L")).flat)) > 5
    assert "Software" not in image.info and square.draw().diagram.png() == square.draw().diagram.png()
    assert len(base64.b64decode(transformer._repr_mimebundle_()["text/html"].split("base64,")[1])) <= 30_000
    large = Diagram((Box(("a",)),) * (MOST_IN_PNG + 1), (), "")
    assert "image/png" not in type(square.draw())(large)._repr_mimebundle_()


def test_a_picture_is_saved(square, here):
    picture = square.draw()
    assert picture.save(here / "g.svg").read_text(encoding="utf-8") == picture.svg
    assert picture.save(here / "g.png").read_bytes() == picture.diagram.png()
    with pytest.raises(DxdyError, match=r"\.svg or \.png, got 'g.pdf'"):
        picture.save(here / "g.pdf")


# ---- steps ----


def test_steps_are_the_backward_pass_by_hand(square):
    rows = square.steps().rows
    assert [row.operation for row in rows] == ["Pow", "Add", "Mul", "b", "w", "x"]
    assert [float(row.incoming) for row in rows] == [1, 14, 14, 14, 28, 42]
    assert [list(map(float, row.outgoing)) for row in rows[:3]] == [[14], [14, 14], [28, 42]]
    assert [row.local for row in rows] == ["14", "1, 1", "2, 3", "", "", ""]
    assert [row.targets for row in rows[:3]] == [("Add",), ("Mul", "b"), ("w", "x")]
    assert rows[0].formula == "a ** n: g · n · a^(n−1)" and rows[4].formula == "w.grad += g"


def test_local_derivatives_of_tensors():
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    m = torch.eye(2).requires_grad_()
    local = {row.operation: row.local for row in steps(graph((m @ (a * a * 3)).sum())).rows}
    assert local["Mul"] == "[1, 2], [1, 2]"  # the second Mul: a · a
    assert local["Mv"] == "matrix, matrix" and local["Sum"] == "matrix"
    wide = torch.ones(30, requires_grad=True)
    local = {row.operation: row.local for row in steps(graph((wide.view(5, 6).tanh() + a[0]).sum())).rows}
    assert (
        local["Tanh"] == "per element" and local["View"] == "1" and local["Add"] == "per element, per element, summed"
    )
    assert steps(graph(a[0].round())).rows[0].local == "0"


def test_the_table_of_formulas_names_operations_of_torch(transformer, resnet):
    used = {node.operation for g in (transformer, resnet) for node in g.nodes if node.leaf is None}
    assert used <= FORMULAS.keys() | RESHAPING
    assert len(FORMULAS) >= 30


def test_folded_steps_are_small_and_mark_their_node(square, transformer):
    for g in (square, transformer):
        html = g.steps()._repr_mimebundle_()["text/html"]
        pages = html.split("<details>")[1:]
        assert len(pages) == min(len(g.nodes), 60)
        for page in pages:
            root = assert_inside(base64.b64decode(re.search('base64,([^"]*)', page)[1]).decode())
            assert len(page) <= 5 * 1024
            assert len([box for box in root.iter(f"{SVG}rect") if "red" in box.get("class", "")]) == 1
    assert f"{len(transformer.nodes) - 60} further steps" in html


def test_steps_of_a_cut_graph_and_of_a_tall_one_are_laid_out_as_a_whole():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    x = scalar(1.0)
    y = x
    for _ in range(10):
        y = y.sin()
    for g in (graph(net[1](torch.ones(1, 1)).sum(), net), graph(y)):
        shown = g.steps()
        assert len(shown._repr_mimebundle_()["text/html"].split("<details>")) == len(g.nodes) + 1
        whole = shown._whole
        for arrow, way in zip(whole.arrows, whole.places.ways, strict=True):  # from the border of a box to another's
            side = 0 if whole.across else 1
            ends = [whole.places.centres[box][side] for box in (arrow.source, arrow.target)]
            half = [whole.boxes[box].size[side] / 2 for box in (arrow.source, arrow.target)]
            assert [abs(way[k][side] - ends[k]) for k in (0, -1)] == pytest.approx(half, abs=0.2)
    assert not whole.across and shown.page(3) != shown.page(4)


def test_a_step_shows_only_what_is_known(square):
    page = square.steps().page(1)
    svg = base64.b64decode(re.search('base64,([^"]*)', page)[1]).decode()
    assert svg.count("gradient ?") == 4 and svg.count("gradient 14") == 1


def test_without_a_reader_the_slider_is_the_folded_steps(square, monkeypatch):
    from dxdy_nb.lesson import live

    monkeypatch.setattr(live, "in_live_notebook", lambda: False)
    shown = square.steps()
    assert shown.slider() is shown


def test_the_slider_moves_through_the_steps(square, monkeypatch):
    from dxdy_nb.lesson import live

    monkeypatch.setattr(live, "in_live_notebook", lambda: True)
    shown = square.steps()
    choose, page = shown.slider().children
    assert page.value == shown.page(0)
    choose.value = 2
    assert page.value == shown.page(2) and choose.max == 5


def test_arrows_of_a_diagram_may_be_few():
    assert_inside(Diagram((Box(("alone",)),), (), "one").svg())
    assert_inside(Diagram((Box(("a",)), Box(("b",))), (Arrow(0, 1), Arrow(0, 1)), "two").svg())
