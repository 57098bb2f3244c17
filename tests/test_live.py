"""A live view without a reader: the steps run to their end, and one picture is left."""

import asyncio
import os
import pty
import subprocess
import sys

import pytest
import torch

import dxdy_nb as dx

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
