"""Every finding's check is plain torch that runs as it stands and prints something."""

import pytest
import torch
from cases import CASES
from cases.builders import plain_step
from cases.registry import seed

import dxdy_nb as dx


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's remarks on what is wrong are part of what a check may show
@pytest.mark.parametrize("name", CASES)
def test_the_check_of_the_first_finding_runs_and_shows_something(name, capsys):
    setup = CASES[name].build(True)
    report = dx.diagnose(**setup)
    finding = (report.errors or report.findings)[0]
    assert len(finding.check.strip().splitlines()) <= 6
    assert "dxdy" not in finding.check
    seed()
    batch = next(iter(setup["loader"]))
    x, y = batch
    names = {"torch": torch, "train_step": plain_step, **setup, "batch": batch, "x": x, "y": y}
    capsys.readouterr()
    exec(finding.check, names)
    assert capsys.readouterr().out.strip()
