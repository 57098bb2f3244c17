"""A live view: without a reader it runs to its end and leaves one picture, with one it keeps to its share of time."""

import asyncio
import contextlib
import os
import pty
import subprocess
import sys

import ipywidgets
import numpy as np
import pytest
import torch
from records import made

import dxdy_nb as dx
from dxdy_nb.lesson import live
from dxdy_nb.lesson.bins import binned

PROGRAM = """
import asyncio, torch, dxdy_nb as dx
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def steps():
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        yield step
async def main():
    with dx.watch(model, optimizer) as w:
        print("last step:", await dx.live(w).run(steps()))
asyncio.run(main())
"""


def watched():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model, optimizer, closed):
    try:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            if step == 3:
                raise ValueError("the loop's own error")
            yield step
    finally:
        closed.append(True)


def test_an_error_in_the_loop_passes_and_a_picture_is_left(capsys):
    model, optimizer = watched()
    closed: list[bool] = []
    with dx.watch(model, optimizer) as w, pytest.raises(ValueError, match="own error"):
        asyncio.run(dx.live(w).run(steps(model, optimizer, closed)))
    assert closed == [True]
    assert len(w.steps) == 4
    assert "gradient norm" in capsys.readouterr().out


def test_a_view_of_a_watch_that_does_not_run_is_refused_before_a_step_is_taken():
    model, optimizer = watched()
    with dx.watch(model, optimizer) as w:
        pass
    before = model.weight.clone()
    with pytest.raises(dx.DxdyError, match="not running"):
        asyncio.run(dx.live(w).run(steps(model, optimizer, [])))
    assert torch.equal(model.weight, before)


def test_a_script_in_a_terminal_needs_no_notebook():
    master, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=120, check=False
    )
    os.close(terminal)
    os.close(master)
    assert done.returncode == 0
    assert "last step: 3" in done.stdout
    assert "VBox" not in done.stdout


def test_a_control_that_is_no_widget_is_refused():
    with pytest.raises(dx.DxdyError, match=r"expected widgets as controls, got float.*ipywidgets\.FloatSlider"):
        dx.live(made(3, ["a"]), 0.1)


def test_a_loop_reads_its_control_at_each_step_without_a_reader_too(capsys):
    slider = ipywidgets.IntSlider(1)
    used = []

    def steps():
        for step in range(4):
            slider.value = step  # as a reader would move it
            used.append(slider.value)
            yield

    asyncio.run(dx.live(made(3, ["a"]), slider).run(steps()))
    assert used == [0, 1, 2, 3]
    assert "IntSlider" not in capsys.readouterr().out


class Reader:
    """A notebook in which somebody watches, with a clock of its own: a step takes 1/64 s, a picture ``cost``."""

    def __init__(self, monkeypatch, cost, stop_at=None):
        self.now, self.trained, self.cost, self.stop_at = 0.0, 0.0, cost, stop_at
        self.drawn, self.left = [], []
        monkeypatch.setattr(live, "clock", lambda: self.now)
        monkeypatch.setattr(live, "in_live_notebook", lambda: True)
        monkeypatch.setattr(live, "_panel", self.panel)

    @contextlib.contextmanager
    def panel(self, view):
        self.view = view
        self.now += self.cost(0)  # the empty picture, before training begins
        self.trained, self.began = 0.0, self.now
        yield self
        self.left.append(self.now)
        self.now += self.cost(self.trained)

    def spent(self):
        return self.now - self.began - self.trained

    def draw(self):
        self.drawn.append(self.trained)
        self.now += self.cost(self.trained)

    def steps(self, count):
        for step in range(count):
            self.now += 1 / 64  # exact in binary, and so are all sums
            self.trained += 1 / 64
            if step == self.stop_at:
                self.view.stopped = True
            yield step


def test_all_pictures_of_a_run_the_last_one_too_take_a_twentieth_of_its_training(monkeypatch):
    reader = Reader(monkeypatch, cost=lambda trained: 1 / 8)
    record = made(3, ["a"])
    assert asyncio.run(live.live(record).run(reader.steps(6400))) == 6399
    # A picture takes 1/8 s, which 2.5 s of training pay for: the early three, the next and the last one after 12.5 s.
    assert reader.drawn == [pytest.approx(at, abs=0.02) for at in (1, 2, 4, *np.arange(12.5, 100.1, 2.5))]
    assert reader.spent() == pytest.approx(0.05 * 100)


def test_pictures_that_become_slower_become_fewer(monkeypatch):
    reader = Reader(monkeypatch, cost=lambda trained: 1 / 16 if trained < 50 else 1 / 2)
    asyncio.run(live.live(made(3, ["a"])).run(reader.steps(200 * 64)))
    before, after = (sum(low <= at < low + 50 for at in reader.drawn) for low in (0, 150))
    assert before > 30
    assert after == 5
    assert reader.spent() <= 0.05 * reader.trained + 0.5


@pytest.mark.parametrize("count, drawn", [(50, []), (5 * 64, [1, 2, 4]), (12 * 64, [1, 2, 4])])
def test_a_short_run_is_shown_too_in_four_pictures_at_most(monkeypatch, count, drawn):
    reader = Reader(monkeypatch, cost=lambda trained: 1 / 8)
    asyncio.run(live.live(made(3, ["a"])).run(reader.steps(count)))
    assert reader.drawn == [pytest.approx(at, abs=0.02) for at in drawn]
    assert len(reader.left) == 1


def test_stop_ends_the_run_after_the_step_and_the_view_can_run_again(monkeypatch):
    reader = Reader(monkeypatch, cost=lambda trained: 1 / 8, stop_at=7)
    view = live.live(made(3, ["a"]))
    assert asyncio.run(view.run(reader.steps(100))) == 7
    assert view.stopped
    reader.stop_at = None
    assert asyncio.run(view.run(reader.steps(100))) == 99
    assert len(reader.left) == 2


class Growing:
    """A record that can be read from a step on, and knows how much of it was read."""

    def __init__(self, whole):
        self.whole, self.count, self.read = whole, 0, 0

    def since(self, step):
        part = self.whole[step : self.count]
        self.read += len(part.steps)
        return part

    @property
    def steps(self):
        return self.since(0).steps

    @property
    def gradients(self):
        return self.whole[: self.count].gradients

    @property
    def sizes(self):
        return self.whole.sizes


def test_a_redraw_reads_only_what_is_new():
    record = Growing(made(3000, ["a", "b"]))
    panel = live._Panel(live.LiveView(record))
    panel.draw()
    assert panel.bins is None
    empty = panel.image.value
    for count in (10, 11, 2000, 2000, 3000):
        record.count = count
        panel.draw()
    assert panel.image.value != empty
    assert record.read <= 3000 + 2 * 10  # the first ten in several readings
    assert panel.bins.high["loss"].tolist() == binned(record.whole).high["loss"].tolist()
