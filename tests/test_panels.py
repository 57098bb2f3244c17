import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dxdy_nb.lesson import live, panels
from dxdy_nb.training.landscapes import LANDSCAPES, Walk, optimizers


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


@pytest.fixture
def panel() -> panels.Playground:
    """A panel as a reader sees it first."""
    panel = panels.Playground(Walk(lr=0.1, steps=60))
    assert panel.box is not None
    return panel


def test_the_sliders_only_build_the_configuration(panel: panels.Playground) -> None:
    assert panel.walk == Walk(lr=0.1, steps=60, y=1.0)
    for name, value in (("landscape", "matrix"), ("optimizer", "muon"), ("lr", 0.02), ("momentum", 0.8)):
        panel.sliders[name].value = value
    assert panel.walk == Walk(landscape="matrix", optimizer="muon", lr=0.02, momentum=0.8, steps=60, y=1.0)


def test_a_run_needs_a_prediction_and_keeps_it_beside_the_result(panel: panels.Playground) -> None:
    before = panel.image.value
    panel.run()
    assert panel.kept == [] and "Write first" in panel.note.value and panel.image.value == before
    for lr, guess in ((0.25, "Diverges"), (0.15, "converges"), (0.15, "11"), (0.05, " 90 ")):
        panel.sliders["lr"].value = lr
        panel.guess.value = guess
        panel.button.click()
        assert panel.guess.value == "", "the next move asks for the next prediction"
    assert [(guess, word) for _, guess, word in panel.kept] == [
        ("Diverges", "diverges"),
        ("converges", "oscillates, 1 % left after 10 steps"),
        ("11", "oscillates, 1 % left after 10 steps"),
        ("90", "converges, 1 % left after 32 steps"),
    ]
    assert panel.right == 2
    assert panel.table.value.startswith("2 of 4 right<table>")
    assert panel.kept[0][0] == "bowl, sgd, lr 0.25 = 1.2 × 2/λ"
    assert "Diverges" in repr(panel.score)


def test_what_a_reader_types_is_text_and_nothing_else(panel: panels.Playground) -> None:
    for guess in ("<b>1</b>", "nan", "1e999", "²"):
        panel.guess.value = guess
        panel.run()
    assert panel.right == 0
    assert "<b>" not in panel.table.value and "<b>" not in panel.note.value


def test_a_moved_slider_shows_units_and_no_result(panel: panels.Playground) -> None:
    assert "0.5 × 2/λ" in panel.units.value and "λ = 10" in panel.units.value
    before = panel.image.value
    panel.sliders["condition"].value = 40.0
    assert "2 × 2/λ" in panel.units.value
    assert panel.image.value != before, "the landscape under the walk"
    panel.guess.value = "diverges"
    panel.run()
    shown = panel.image.value
    panel.sliders["lr"].value = 0.02
    assert panel.image.value not in (before, shown), "the last walk is gone"


def test_what_an_optimizer_does_not_have_cannot_be_moved(panel: panels.Playground) -> None:
    movable = {}
    for name in optimizers("bowl"):
        panel.sliders["optimizer"].value = name
        movable[name] = {s for s in ("momentum", "beta2") if not panel.sliders[s].disabled}
    assert movable == {
        "sgd": set(),
        "momentum": {"momentum"},
        "nesterov": {"momentum"},
        "rmsprop": {"beta2"},
        "adam": {"momentum", "beta2"},
        "adamw": {"momentum", "beta2"},
    }
    panel.sliders["landscape"].value = "saddle"
    assert panel.sliders["condition"].disabled and panel.sliders["y"].value == 0.1
    panel.sliders["y"].value = 3 * 0.1 - 0.3  # what counting in tenths makes of zero
    assert panel.sliders["y"].value != 0 and panel.walk.y == 0


def test_leaving_the_matrix_leaves_muon(panel: panels.Playground) -> None:
    panel.sliders["landscape"].value = "matrix"
    panel.sliders["optimizer"].value = "muon"
    panel.sliders["landscape"].value = "ravine"
    assert panel.walk.optimizer == "sgd" and "muon" not in panel.sliders["optimizer"].options


@pytest.mark.parametrize("landscape", LANDSCAPES)
def test_a_frame_is_drawn_anew_as_if_it_were_the_first(landscape: str) -> None:
    frame, walk = panels.Frame(60), Walk(landscape=landscape, lr=0.02, steps=60)
    first = frame.png(walk, walk.path())
    wild = replace(walk, lr=9.0)
    assert frame.png(wild, wild.path()) != first
    assert frame.png(walk, walk.path()) == first
    assert pixels(first).shape == (414, 810, 3)
    blue = np.abs(pixels(first) - (0, 114, 178)).sum(-1) < 60
    assert blue[:280, :400].any() and blue[:, 450:].any(), "a path on the map, and lines in the strips"
    assert all(not ax.lines and not ax.images for ax in frame.figure.axes)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a cell displays."""
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: displayed.append(what))
    return displayed


def test_without_a_front_end_the_walks_are_one_picture(shown: list[Any]) -> None:
    panels.Playground(Walk(landscape="matrix"))._ipython_display_()
    (picture,) = shown
    assert set(picture) == {"image/png", "text/plain"}
    assert not re.search(r"\d", picture["text/plain"])


def test_with_a_front_end_it_is_the_panel_and_a_folded_picture(shown: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(live, "in_live_notebook", lambda: True)
    panel = panels.Playground()
    panel._ipython_display_()
    box, picture = shown
    assert box is panel.box
    assert picture["text/html"].startswith("<details><summary>") and "<img alt=" in picture["text/html"]
    assert not re.search(r"\d", picture["text/plain"])


def test_the_grid_shows_each_optimizer_at_each_rate() -> None:
    rows = panels.Playground(Walk(landscape="matrix", lr=0.01)).around()
    assert [[walk.optimizer for walk in row] for row in rows] == [optimizers("matrix")] * 4
    assert [round(row[0].units, 6) for row in rows] == [0.05, 0.3, 0.8, 1.2]
    figure = panels.grid([row[:2] for row in rows])
    assert [ax.get_title() for ax in figure.axes][-2:] == ["sgd: diverges", "momentum: oscillates"]


def test_walks_of_one_landscape_share_a_picture() -> None:
    figure = panels.picture({"slow": Walk(lr=0.01), "fast": Walk(lr=0.19)})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["slow", "fast"]
    single = panels.picture({"slow": Walk(lr=0.01)})
    assert len(single.axes) == len(figure.axes) + 1, "one walk has its rate shown among the zones"
