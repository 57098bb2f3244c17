"""The preflight: healthy set-ups pass, each broken one stops at its point, and nothing of the reader's is changed."""

import json
import subprocess
import sys
import threading

import preflight_setups as setups
import pytest
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb import cli
from dxdy_nb.diagnosis.diagnose import experiment_on
from dxdy_nb.diagnosis.page import nameless
from dxdy_nb.diagnosis.slope import hand_case
from dxdy_nb.runs.entries import entries
from dxdy_nb.runs.record import read_result


def states(page):
    return [point.state for point in page.points]


def stopped(number):
    return ["passed"] * (number - 1) + ["failed"] + ["not reached"] * (6 - number)


def test_the_digits_baseline_passes_and_its_run_is_kept(here):
    page = dx.preflight(setups.digits, out=here / "run")
    assert states(page) == ["passed"] * 6, page
    assert page.ok and page.failed is None and page.verdict == "ready: all six points passed"
    assert all(point.evidence for point in page.points)
    kept = {"result.json", "environment.json", "trace.bin", "baseline.csv", "preflight.json", "preflight.html"}
    assert kept <= {path.name for path in (here / "run").iterdir()}
    result = read_result(here / "run")
    assert (result["status"], result["kind"], result["metrics"]["ok"]) == ("completed", "preflight", True)
    assert result["metrics"]["verdict"] == page.verdict and all(name.isidentifier() for name in result["metrics"])
    assert result["metrics"]["baseline_last_loss"] < result["metrics"]["baseline_first_loss"] / 2
    weights = sum(p.numel() for p in setups.digits()["model"].parameters()) * 4
    assert page.memory.most["weights"] == page.memory.most["gradients"] == page.memory.most["optimizer"] == weights
    told = json.loads(page.to_json())
    assert [point["state"] for point in told["points"]] == ["passed"] * 6
    text = (here / "run" / "preflight.html").read_text()
    assert str(here) not in text and "http" not in text and "viewport" in text and text.count("<details") == 6


@pytest.mark.parametrize(
    ("make", "number"),
    [
        pytest.param(make, number, marks=() if make is setups.doubled_by_a_hook else pytest.mark.slow)
        for make, number in {**setups.BROKEN, **setups.MORE}.items()
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_broken_variant_stops_at_its_point(here, make, number):
    page = dx.preflight(make)
    assert states(page) == stopped(number), page
    assert not page.ok and page.failed.evidence and page.failed.fix


@pytest.mark.slow
@pytest.mark.parametrize("make", setups.HEALTHY[1:], ids=lambda make: make.__name__)
def test_healthy_set_ups_pass(here, make):
    page = dx.preflight(make)
    assert page.ok, page
    unchecked = {5} if make is setups.stream else set()
    assert {point.number for point in page.points if point.state == "not checked"} == unchecked
    if unchecked:
        assert "IterableDataset" in page.points[4].evidence


def test_bare_objects_are_left_as_they_were_and_two_points_are_not_checked(here):
    given = setups.digits()
    torch.manual_seed(3)
    given["optimizer"].step()
    before = {name: t.clone() for name, t in given["model"].state_dict().items()}
    random = torch.get_rng_state()
    page = dx.preflight(given)
    assert states(page) == ["passed"] * 4 + ["not checked"] * 2
    assert page.ok and page.verdict == "nothing failed; not checked, or not wholly: points 5 and 6"
    assert all(torch.equal(t, before[name]) for name, t in given["model"].state_dict().items())
    assert not given["optimizer"].state and all(p.grad is None for p in given["model"].parameters())
    assert torch.equal(torch.get_rng_state(), random)


def without_validation():
    return {name: part for name, part in setups.regression().items() if name != "val_loader"}


@pytest.mark.slow
def test_a_point_of_which_a_half_is_unknown_has_not_passed(here):
    page = dx.preflight(without_validation, world_size=1)
    assert states(page) == ["passed"] * 4 + ["not checked"] * 2 and page.ok
    assert "bit-identical" in page.points[5].evidence and "validation not checked" in page.points[5].evidence


@pytest.mark.parametrize(
    ("loss_fn", "target", "slope"),
    [
        (
            nn.CrossEntropyLoss(),
            torch.tensor([0, 2]),
            lambda out, y: (out.softmax(1) - nn.functional.one_hot(y, 3)) / 2,
        ),
        (nn.MSELoss(), torch.ones(2, 3), lambda out, y: 2 * (out - y) / 6),
        (nn.BCEWithLogitsLoss(), torch.eye(3)[:2], lambda out, y: (out.sigmoid() - y) / 6),
    ],
)
def test_the_case_by_hand_is_the_formula(loss_fn, target, slope):
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    experiment = experiment_on({"model": model, "loss_fn": loss_fn, "loader": [(x, target)], "optimizer": optimizer})
    experiment.observe()
    case = hand_case(experiment)
    assert case.passed
    expected = slope(model(x), target).sum(0)
    assert case.by_hand == pytest.approx(float(expected[case.entry].detach()), rel=1e-5)


def test_a_loss_that_no_formula_gives_has_no_case_by_hand():
    model = nn.Linear(4, 3)
    given = {"loss_fn": nn.HuberLoss(), "loader": [(torch.randn(2, 4), 9 * torch.ones(2, 3))]}
    experiment = experiment_on({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3), **given})
    experiment.observe()
    assert hand_case(experiment) is None


def lock():
    held = threading.Lock()

    def make():
        return {"model": held}

    return make


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (3, {}, "make is a function or a dictionary of keywords, got int"),
        (lambda: 1 / 0, {}, "raised ZeroDivisionError: division by zero"),
        (lambda: None, {}, "returns a dictionary of dx.diagnose's keywords"),
        (lambda: {"model": nn.Linear(1, 1)}, {}, "without a loader nothing can be trained"),
        (lambda: {"modle": 1}, {}, "unknown modle"),
        (lambda: {"model": nn.Linear(1, 1), "loader": iter([])}, {}, "what is read from it is gone"),
        (lock(), {}, "cannot be sent to another process"),
        (dict, {"world_size": 0}, "expected world_size from 1 to "),
        (dict, {"world_size": 10_000}, ", got 10000."),
    ],
)
def test_bad_input_is_said_before_anything_runs(here, make, options, words):
    with pytest.raises(dx.DxdyError) as raised:
        dx.preflight(make, **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert not (here / "runs").exists()


def test_a_page_has_a_pages_name(here):
    page = dx.preflight(setups.float_labels)
    assert page.failed.number == 1
    assert page.save(here / "mine.html").read_text().startswith("<!doctype html>")
    with pytest.raises(dx.DxdyError, match="expected a page's name"):
        page.save(here / "mine.pdf")
    with pytest.raises(dx.DxdyError, match="cannot be written"):
        page.save(here / "nowhere" / "mine.html")


def test_paths_are_cut_down_to_names():
    assert (
        nameless("in /home/somebody/a b/x.py:3, ./y.py and float32/float64")
        == "in a b/x.py:3, ./y.py and float32/float64"
    )


BROKEN = """
import torch
def make():
    print("hello")
    model = torch.nn.Linear(3, 1)
    loader = [(torch.randn(8, 3), torch.randn(8))] * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dict(model=model, loss_fn=torch.nn.MSELoss(), loader=loader, optimizer=optimizer)
"""


def test_the_command_says_it_in_json_and_in_a_page_and_ends_with_1(here):
    (here / "mine.py").write_text(BROKEN)
    command = [sys.executable, "-m", "dxdy_nb.cli", "preflight", "mine:make", "--json", "--out", "page.html"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["target"], told["ok"], told["points"][1]["state"]) == ("mine:make", False, "failed")
    assert "mse-broadcast" in (here / "page.html").read_text()
    assert "hello" in done.stderr and "page: page.html; kept in" in done.stderr
    assert [one.row()["name"] for one in entries(here / "runs")] == ["mine:make"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such:make"], "preflight: no module 'no_such' here"),
        (["mine"], "preflight: expected a module and a function of it"),
        (["mine:make", "--out", "page.pdf"], "expected a page's name"),
    ],
)
def test_the_command_says_what_is_bad_in_a_line(here, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert cli.main(["preflight", *arguments]) == 2
    told = capsys.readouterr()
    assert not told.out and words in told.err and len(told.err.splitlines()) == 1


@pytest.mark.parametrize("seconds", ["a", 0, -1, float("nan"), True])
def test_a_time_limit_that_is_no_time_is_refused_before_anything_is_made(seconds):
    with pytest.raises(dx.DxdyError, match=r"^preflight: time_limit is a number of seconds above 0, got "):
        dx.preflight(lambda: pytest.fail("it was made"), time_limit=seconds)
