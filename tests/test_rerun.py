"""A run of the reference loop is judged from its configuration and its record."""

import math
import os

import pandas as pd
import pytest
import torch

import dxdy_nb as dx
from dxdy_nb.runs.record import Run


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"accumulation_steps": 3, "max_grad_norm": 1.0, "precision": "bf16"}, []),
        ({"lr": 1000.0}, ["lr-too-large"]),
        ({"lr": 1e-7}, ["lr-too-small"]),  # where the cosine that follows it does not undo the larger rate
    ],
)
def test_a_run_is_judged_by_its_set_up(changes, told, tmp_path):
    run = dx.train(dx.RunConfig(max_steps=30, **changes), out=tmp_path / "run")
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(run.folder)}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    report = Run.load(run.folder).diagnose()
    assert [error.cause for error in report.errors] == told
    assert report.saw["record"] == "run: completed, 30 steps"
    assert torch.equal(torch.get_rng_state(), state)
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(run.folder)} == before


def test_a_loss_that_a_record_ends_with_is_told(tmp_path, monkeypatch):
    run = dx.train(dx.RunConfig(max_steps=3), out=tmp_path / "run")
    losses = pd.DataFrame({"loss": [2.5, 1.25, math.nan]})
    monkeypatch.setattr(Run, "steps", property(lambda self: losses))
    (error,) = run.diagnose().errors
    assert (error.cause, error.where) == ("loss-not-finite", "step 2")
    assert error.evidence == "step 2: the loss is nan; losses before it: 2.5, 1.25"
