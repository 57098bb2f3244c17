"""One change at a time: the verdict is that of the paired t test, a failure is none, and little is run in vain."""

import math
from pathlib import Path

import pytest

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.runs import record
from dxdy_nb.runs.entries import entry
from dxdy_nb.runs.listing import story
from dxdy_nb.training import sweep
from dxdy_nb.training.ablation import ablate, judge

BASE = dx.RunConfig(data="spirals", model="mlp", max_steps=40, lr=0.1)
# In the place of a training: a loss that is known, of learning rate, momentum and seed, and no torch.
PRETENDS = """
import json, math, pathlib, sys
work = json.loads(sys.argv[1])
config, folder = work["config"], pathlib.Path(work["out"])
open("begun.txt", "a").write(folder.name + chr(10))
if config["epochs"] == 1:
    sys.exit("no such luck")
loss = 0.5 + 0.1 * config["seed"] + 10 * (0.1 - config["lr"])
loss += 0.02 * math.sin(7 * config["seed"]) * (config["momentum"] != 0.9)
status = "diverged" if config["lr"] == 99 else "completed"
metrics = dict(validation_loss=round(loss, 4), validation_accuracy=round(1 - loss, 4))
result = dict(status=status, reason=None, metrics=metrics)
folder.joinpath("result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def pretended(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep, "_PROGRAM", PRETENDS)
    return here


@pytest.mark.parametrize(
    ("differences", "verdict", "mean", "margin"),
    [
        # n = 3, t = 4.303: the standard deviation of -.10, -.12, -.11 is .01; .01 / sqrt(3) * 4.303 = .02484
        ([-0.10, -0.12, -0.11], "better", -0.11, 0.0249),
        ([0.10, 0.12, 0.11], "worse", 0.11, 0.0249),
        # all three fall, and still: the mean -.02 is within .017321 / sqrt(3) * 4.303 = .04303
        ([-0.01, -0.01, -0.04], "no difference", -0.02, 0.0431),
        # n = 2, t = 12.706: .014142 / sqrt(2) * 12.706 = .12706
        ([-0.11, -0.13], "no difference", -0.12, 0.1272),
        ([0.0, 0.0, 0.0], "no difference", 0.0, 0.0001),
        # metrics have four decimals: a last digit that is the same for all seeds is not an effect
        ([0.0001, 0.0001, 0.0001], "no difference", 0.0001, 0.0001),
        ([-0.0002, -0.0002, -0.0002], "better", -0.0002, 0.0001),
        ([-0.2, math.inf, -0.2], "worse", math.inf, math.nan),
        ([-0.2], "not judged", math.nan, math.nan),
    ],
)
def test_the_verdict_is_that_of_the_paired_t_test(differences, verdict, mean, margin):
    assert judge(differences) == (verdict, pytest.approx(mean, nan_ok=True), pytest.approx(margin, nan_ok=True))
    other = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    if math.isfinite(mean):
        assert judge(differences, lower_is_better=False)[0] == other


def test_the_chance_of_a_false_effect_is_five_percent():
    torch = pytest.importorskip("torch")
    draws = torch.randn(4000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = sum(judge(row)[0] != "no difference" for row in draws.tolist()) / len(draws)
    assert abs(share - 0.05) < 3 * math.sqrt(0.05 * 0.95 / len(draws))


def test_survivors_run_in_full_and_the_others_do_not(pretended):
    changes = {"faster": {"lr": 0.12, "batch_size": 32}, "lr": 0.05, "momentum": 0.5, "epochs": 1, "wild": {"lr": 99}}
    found = ablate(BASE, changes, budget=10, jobs=2, out="a")
    table = found.table
    assert table.verdict.to_dict() == {
        "faster": "better",
        "lr=0.05": "worse",
        "momentum=0.5": "no difference",
        "epochs=1": "not judged",
        "wild": "worse",
    }
    assert table.steps.to_dict() == {"faster": "all", "lr=0.05": 10, "momentum=0.5": "all", "epochs=1": 10, "wild": 10}
    assert table.difference["lr=0.05"] == 0.5 and table.difference["faster"] == -0.2  # 10 * 0.05, 10 * 0.02
    assert table.runs["epochs=1"] == "3 failed" and table.runs["wild"] == "3 diverged"
    assert len(Path("begun.txt").read_text().splitlines()) == 6 * 3 + 3 * 3
    assert {path.parent.name for path in Path("a").glob("lr=0.12*/result.json")} == {
        f"lr=0.12,batch_size=32{steps},seed={seed}" for seed in range(3) for steps in (",max_steps=10", "")
    }
    assert record.read_result(Path("a/lr=0.05,max_steps=10,seed=1"))["verdict"] == {
        "baseline": "max_steps=10,seed=1",
        "metric": "validation_loss",
        "verdict": "worse",
        "difference": 0.5,
        "margin": 0.0001,
        "seeds": 3,
    }
    assert "verdict" not in record.read_result(Path("a/seed=1"))  # the baseline's own
    assert "metric: validation_loss, verdict: no difference" in story(entry(Path("a/momentum=0.5,seed=1")))
    assert ablate(BASE, changes, budget=10, out="a").table.equals(table)  # nothing is run again
    assert len(Path("begun.txt").read_text().splitlines()) == 6 * 3 + 3 * 3
    accurate = ablate(BASE, changes, budget=10, metric="validation_accuracy", out="a").table
    assert accurate.verdict.to_dict() == table.verdict.to_dict() and accurate.difference["faster"] == 0.2
    axes = found.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["faster: better", "lr=0.05: worse (10 steps)"]


def test_without_a_budget_all_run_in_full(pretended):
    found = ablate(BASE, [{"lr": 0.05}], budget=None, seeds=2)
    assert found.table.steps.tolist() == ["all"] and found.folder.parent == Path("runs")
    assert len(found.outcomes) == 4


def test_a_baseline_that_does_not_complete_is_no_baseline(pretended):
    with pytest.raises(dx.DxdyError, match=r"baseline: fewer than two of its runs completed\. .*no such luck"):
        ablate(BASE.override({"epochs": 1}), {"lr": 0.05}, out="a")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            {"changes": [{"lr": -1}, {"sed": 1}, {"seed": 2}, {"lr": 0.1}]},
            [
                "lr=-1: lr: expected a number",
                "sed=1: sed: unknown. Did",
                "seed=2: seed: ablate",
                "lr=0.1: changes nothing",
            ],
        ),
        ({"baseline": BASE.override({"world_size": 2, "precision": "bf16"})}, ["world_size=1", "precision='fp32'"]),
        ({"changes": {"loss": "mse", "data": "sequences"}}, ["another scale", "data=sequences: data:", "'gru' and"]),
        ({"changes": []}, ["changes: expected at least one"]),
        ({"changes": [{"lr": 1}, {"lr": 1}]}, ["changes: lr=1 is given twice."]),
        ({"changes": ["lr"]}, ["changes: expected fields and values"]),
        (
            {"seeds": 1, "budget": 0, "metric": "loss"},
            ["seeds: expected at least 2", "metric: expected", "budget: max_"],
        ),
        ({"baseline": {"lr": 1}}, ["baseline: expected a dx.RunConfig, got dict."]),
    ],
)
def test_what_cannot_be_compared_is_refused_as_a_whole(here, arguments, lines):
    with pytest.raises(dx.DxdyError) as refused:
        ablate(**{"baseline": BASE, "changes": {"lr": 0.05}, **arguments})
    told = str(refused.value).splitlines()
    assert len(told) == len(lines)
    assert all(any(expected in line for line in told) for expected in lines)
    assert not [*here.iterdir()]


@pytest.mark.slow
def test_a_real_baseline_and_three_single_changes(here):
    base = BASE.override({"max_steps": 60})
    changes = [{"accumulation_steps": 2}, {"precision": "bf16"}, {"world_size": 2, "batch_size": 32}, {"lr": 1e-5}]
    found = ablate(base, changes, budget=20, jobs=2, out="a")
    print(found.table.to_string())
    assert found.table.verdict["lr=1e-05"] == "worse"
    assert found.table.verdict["precision=bf16"] == "no difference"
    assert found.table.verdict["world_size=2, batch_size=32"] == "no difference"
    assert all(one.result["parent"] == "a" and one.result["status"] == "completed" for one in found.outcomes)
    two_ranks = record.Run.load("a/world_size=2,batch_size=32,seed=0")
    assert len(two_ranks.steps) == 60
    assert plots.png(found.plot())


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        (None, {}, "changes: expected a list"),
        (3, {}, "changes: expected a list"),
        ("lr", {}, "changes: expected a list"),
        ({"lr": 0.2}, {"metric": ["loss"]}, "metric: expected validation_loss or"),
        ({"lr": 0.2}, {"limits": {"seconds": 1}}, "limits: expected Limits"),
        ({"lr": 0.2}, {"out": 3}, "out: expected a run's folder"),
    ],
)
def test_what_is_of_another_type_is_refused(here, changes, more, told):
    with pytest.raises(dx.DxdyError, match=f"^{told}"):
        ablate(BASE, changes, **more)
