"""What we write is its owner's alone, and what we ship needs nobody's trust."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch

import dxdy_nb as dx
from dxdy_nb.ranks.pool import _Pool
from dxdy_nb.runs import lessons
from dxdy_nb.runs.folder import new_folder


@pytest.fixture
def open_handed() -> Iterator[None]:
    """A process whose files all may read and write, as on many a shared server."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(folder: str | Path) -> int:
    return stat.S_IMODE(os.stat(folder).st_mode)


@pytest.mark.usefixtures("open_handed")
def test_a_runs_folder_is_its_owners(here: Path) -> None:
    assert mode(new_folder("baseline")) == 0o700
    assert mode(new_folder("baseline", "mine/run")) == 0o700


@pytest.mark.usefixtures("open_handed")
def test_a_folder_that_somebody_opened_to_others_stays_open(here: Path) -> None:
    Path("shared").mkdir(mode=0o775)
    assert mode(new_folder("baseline", "shared")) == 0o775


@pytest.mark.usefixtures("open_handed")
def test_a_watched_loops_folder_is_its_owners(here: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dx.watch(model, optimizer, out="runs/mine"):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    assert mode("runs/mine") == 0o700


@pytest.mark.usefixtures("open_handed")
def test_ranks_meet_in_a_folder_of_their_owners() -> None:
    pool = _Pool()
    try:
        assert mode(os.path.dirname(pool.meeting_point())) == 0o700
    finally:
        pool.close()


@pytest.mark.parametrize("name", lessons.names())
def test_a_lessons_outputs_are_of_kinds_that_an_untrusted_notebook_shows(name: str) -> None:
    cells = nbformat.read(lessons.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = 0
    for data in (output.get("data", {}) for output in outputs):
        assert set(data) <= {"text/plain", "text/html", "text/markdown", "text/latex", "image/png"}
        html = "".join(data.get("text/html", "")).lower()
        assert not [tag for tag in ("<svg", "<script", "<iframe", "<object", "javascript:") if tag in html]
        pictures += "image/png" in data or "<img" in html
    assert pictures >= 3
    assert not any(cell.metadata.get("trusted") for cell in cells)
