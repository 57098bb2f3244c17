"""The cases as plain scripts under `dxdy watch`: found at their stage, and no error on the twins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, HEALTHY
from cases.builders import clusters, mlp, shuffled
from script_form import train
from torch import nn
from torch.optim import SGD, Adam

from dxdy_nb.observe.script import Script
from dxdy_nb.runs import script

# What `make test` runs.
SPREAD = ["backward-twice", "wrong-sign", "clip-too-tight", "eval-updates-bn", "resume-no-optimizer-state"]
FORM = Path(__file__).with_name("script_form.py")
ENOUGH = 0.8  # of the cases are found


def told(folder, train_on):
    """Return the first error's stage and all findings of a script that is run in this process."""
    folder.mkdir()
    (folder / "train.py").write_text("from test_scripts_form import now\n\nnow[-1]()\n")
    now.append(train_on)
    try:
        script.watch(Script(str(folder / "train.py")), out=folder / "run", json_file=folder / "told.json")
    finally:
        now.pop()
    report = json.loads((folder / "told.json").read_text())["report"]
    assert not [line for line in report["unchecked"] if "nothing was heard from" in line]
    return report["stage"], report["findings"]


now = sys.modules.setdefault("test_scripts_form", sys.modules[__name__]).__dict__.setdefault("now", [])


def is_found(case, folder):
    stage, findings = told(folder, lambda: train(lambda: case.build(True)))
    hinted = case.hint and stage is None and any(one["stage"] in case.stages for one in findings)
    return stage in case.stages or hinted


@pytest.mark.parametrize("name", SPREAD)
def test_a_fault_is_found_and_its_twin_is_not_accused(name, tmp_path):
    assert is_found(CASES[name], tmp_path / "fault")
    assert told(tmp_path / "twin", lambda: train(lambda: CASES[name].build(False)))[0] is None


def test_the_command_itself_says_so(tmp_path):
    command = [sys.executable, "-m", "dxdy_nb.cli", "watch", "--json", "told.json", str(FORM), "best-state-aliased"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error · reproduce · best-state-aliased · load_state_dict" in done.stderr
    assert json.loads((tmp_path / "told.json").read_text())["report"]["stage"] == "reproduce"


def adversarial(data):
    """Train two networks against each other; what the samples are called plays no part."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    bce, made, judged = nn.BCEWithLogitsLoss(), Adam(maker.parameters(), 1e-3), Adam(judge.parameters(), 1e-3)
    for _ in range(3):
        for x, _ in shuffled(*data):
            judge.zero_grad()
            fake = maker(torch.randn(16, 4))
            (bce(judge(x), torch.ones(16, 1)) + bce(judge(fake.detach()), torch.zeros(16, 1))).backward()
            judged.step()
            maker.zero_grad()
            bce(judge(fake), torch.ones(16, 1)).backward()
            made.step()
        with torch.no_grad():
            maker(torch.randn(8, 4))  # a look at it, in train mode


def epoch(model, optimizer, data):
    for x, y in shuffled(*data):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def branches(data):
    """Try several rates from one trained model: none of them resumes it."""
    state = epoch(first := mlp(8, 16, 3), Adam(first.parameters(), 0.01), data)
    for lr in (0.01, 0.001):
        (model := mlp(8, 16, 3)).load_state_dict(state)
        epoch(model, Adam(model.parameters(), lr), data)


def second_phase(data):
    """Go on from a trained model with another rate."""
    first = mlp(8, 16, 3)
    for _ in range(2):
        state = epoch(first, Adam(first.parameters(), 0.01), data)
    (model := mlp(8, 16, 3)).load_state_dict(state)
    epoch(model, Adam(model.parameters(), 1e-4), data)


def federated(data):
    """Average what several made of one model, again and again, each with a new optimizer."""
    whole = mlp(8, 16, 3)
    for _ in range(3):
        states = []
        for _ in range(2):
            (model := mlp(8, 16, 3)).load_state_dict(whole.state_dict())
            states.append(epoch(model, SGD(model.parameters(), 0.05, momentum=0.9), data))
        whole.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})


@pytest.mark.parametrize("script", [adversarial, branches, second_phase, federated])
def test_a_healthy_script_that_looks_odd_is_not_accused(script, tmp_path):
    assert told(tmp_path / "odd", lambda: script(clusters()))[0] is None


@pytest.mark.slow
def test_nearly_all_faults_are_found(tmp_path):
    missed = [name for name, case in CASES.items() if not is_found(case, tmp_path / name)]
    assert len(missed) <= (1 - ENOUGH) * len(CASES), missed


@pytest.mark.slow
def test_nothing_healthy_is_accused(tmp_path):
    healthy = {f"{name} without its fault": lambda case=case: case.build(False) for name, case in CASES.items()}
    healthy |= {name: one.build for name, one in HEALTHY.items()}
    stages = {name: told(tmp_path / name, lambda make=make: train(make))[0] for name, make in healthy.items()}
    assert {name: stage for name, stage in stages.items() if stage} == {}
