"""Runs beside each other: what was different is named, nothing else is, and one bad folder breaks no list."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import dxdy_nb as dx
from dxdy_nb import cli
from dxdy_nb.lesson import plots
from dxdy_nb.observe import trace
from dxdy_nb.observe.trace import GRADIENT_COLUMNS, STEP_COLUMNS, Layout, TraceWriter
from dxdy_nb.ranks.scaling import explain_scaling
from dxdy_nb.runs import entries
from dxdy_nb.runs.compare import compare
from dxdy_nb.runs.record import PARENT, Recorder
from dxdy_nb.training import loop

BASE = dx.RunConfig(model="mlp", schedule="constant", max_steps=5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: twice the same one, other seeds, another rate, another length, one that diverged."""
    folder = tmp_path_factory.mktemp("work") / "runs"
    changes = {"a": {}, "again": {}, "seed": {"seed": 1}, "seed2": {"seed": 2}, "rate": {"lr": 0.1}}
    changes |= {"longer": {"max_steps": 7}, "adam": {"optimizer": "adam"}, "diverged": {"lr": 1000, "loss": "mse"}}
    for name, change in changes.items():
        dx.train(BASE.override(change), out=folder / name)
    return folder


def a_model(seed):
    return list(dx.train(BASE.override({"seed": seed})).model.named_parameters())


def names(frame):
    return frame.index.tolist()


def test_equal_runs_are_bit_equal(runs):
    seen = compare(runs / "a", runs / "again")
    assert seen.equal
    assert seen.verdict == "bit-equal: all 5 steps, the final weights too"
    assert (names(seen.config), names(seen.environment), seen.divergence, seen.weights) == ([], [], None, ())
    assert "configuration: the same" in str(seen)


def test_runs_that_differ_by_a_seed_differ_by_it_alone_and_from_the_first_loss_on(runs, here):
    a, b = dx.Run.load(runs / "a"), dx.Run.load(runs / "seed")
    seen = compare(a, b)
    assert seen.config.loc["seed"].tolist() == [0, 1]
    assert (names(seen.config), names(seen.environment), seen.notes, seen.equal) == (["seed"], [], (), False)
    apart = seen.divergence
    assert (apart.step, apart.column, apart.parameter) == (0, "loss", None)
    assert apart.values == (a.steps.loss[0], b.steps.loss[0])
    assert apart.others[0] == list(a.sizes)[-1]  # what a backward pass reaches first
    assert set(seen.weights) == {name for name, p in a_model(0) if not torch.equal(p, dict(a_model(1))[name])}


def test_runs_that_differ_by_a_flag_differ_by_it_alone_where_it_first_matters(runs):
    seen = compare(runs / "a", runs / "rate")
    assert (names(seen.config), names(seen.environment)) == (["lr"], [])
    assert (seen.divergence.step, seen.divergence.column, seen.divergence.values) == (0, "lr", (0.05, 0.1))
    assert set(seen.divergence.others) <= set(dx.Run.load(runs / "a").sizes)  # the updates; the loss is the same yet
    assert "first difference at step 0: lr, 0.05 and 0.1" in str(seen)


def test_a_flag_of_torch_is_named_and_changes_no_number(runs, tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        dx.train(BASE, out=tmp_path / "run")
    finally:
        torch.use_deterministic_algorithms(False)
    seen = compare(runs / "a", tmp_path / "run")
    assert (names(seen.config), names(seen.environment), seen.equal) == ([], ["deterministic_algorithms"], True)


def scaled_by_a_file(monkeypatch, path):
    """Let backward scale one tensor's gradient by the number that a file holds, from step 3 on."""
    steps, train_step = iter(range(1000)), loop.train_step

    def patched(model, *arguments):
        scale = float(path.read_text().partition("= ")[2]) if next(steps) >= 3 else 1.0
        hook = model.fc2.weight.register_hook(lambda gradient: scale * gradient)
        loss = train_step(model, *arguments)
        hook.remove()
        return loss

    monkeypatch.setattr(loop, "train_step", patched)


def test_runs_that_differ_by_one_version_of_a_file_differ_by_it_alone_from_the_step_it_matters(here, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (here / "model.py").write_text("SCALE = 1\n")
    (here / ".gitignore").write_text("runs\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m start"):
        subprocess.run(["git", *command.split()], check=True)
    for name, scale in (("committed", 1), ("changed", 0.5)):
        (here / "model.py").write_text(f"SCALE = {scale}\n")
        with monkeypatch.context() as patch:
            scaled_by_a_file(patch, here / "model.py")
            dx.train(BASE, out=f"runs/{name}")
    seen = compare("runs/committed", "runs/changed")
    assert (names(seen.config), names(seen.environment)) == ([], ["file model.py"])
    assert seen.environment.loc["file model.py", "A"] is None  # as the commit has it
    apart = seen.divergence
    assert (apart.step, apart.column, apart.parameter) == (3, "norm", "fc2.weight")  # the loss is the same yet
    assert apart.values[1] == pytest.approx(0.5 * apart.values[0])
    assert apart.others == ("grad_norm",)


def write_trace(folder, change=None, steps=6, layout=None, **options):
    """Record a run of four tensors whose numbers are all different; ``change`` may alter a step before it is kept."""
    layout = layout or Layout(("a", "b", "c"), ((2,), (3,), (4,)))
    Recorder(folder, kind="training")
    writer = TraceWriter(layout, folder)
    for step in range(steps):
        values = {name: step + place / 10 for place, name in enumerate(STEP_COLUMNS)}
        rows = np.arange(6.0 * len(layout.parameters)).reshape(-1, 6) + 100 * step
        ratios = np.full(len(layout.parameters), 0.5)
        kept = {"full": True, **(change(step, values, rows, ratios) or {})} if change else {"full": True}
        writer.append(step, values, rows, ratios, **kept)
    writer.close()
    return folder


def divergence(tmp_path, change, other=None):
    for name, one in (("a", other), ("b", change)):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name, one)
    return compare(tmp_path / "a", tmp_path / "b").divergence


def test_the_first_tensor_that_differs_is_the_first_that_backward_reached(tmp_path):
    def change(step, values, rows, ratios):
        if step >= 4:
            rows[0, 3] += 1e-9  # the norm
            rows[1, 5] = math.nan
            values["grad_norm"] += 1

    seen = divergence(tmp_path, change)
    assert (seen.step, seen.parameter, seen.column) == (4, "b", GRADIENT_COLUMNS[5])
    assert (seen.values[0], math.isnan(seen.values[1]), seen.others) == (411.0, True, ("a", "grad_norm"))


@pytest.mark.parametrize("name", ["step_time", "data_time", "memory"])
def test_time_and_memory_are_no_difference(tmp_path, name):
    assert divergence(tmp_path, lambda step, values, rows, ratios: values.update({name: 77.0})) is None


def test_nan_equals_nan(tmp_path):
    def nan(step, values, rows, ratios):
        values["loss"] = rows[2, :] = math.nan

    assert divergence(tmp_path, nan, nan) is None


def test_what_was_not_measured_is_no_difference(tmp_path):
    def sampled(step, values, rows, ratios):
        ratios[:] = math.nan
        if step % 2:
            rows[:] = values["grad_norm"] = math.nan
            return {"full": False}
        return None

    assert divergence(tmp_path, sampled) is None


def test_a_difference_in_a_sampled_step_is_found(tmp_path):
    def changed(step, values, rows, ratios):
        rows[1, 0] += step == 3

    assert divergence(tmp_path, changed).step == 3


def test_parameters_that_only_one_has_are_named(tmp_path):
    for name, layout in (("a", None), ("b", Layout(("a", "b", "d"), ((2,), (5,), (4,))))):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name, layout=layout)
    seen = compare(tmp_path / "a", tmp_path / "b")
    assert seen.notes == (
        "parameter b: (3,) in A, (5,) in B",
        "parameter c: (4,) in A, absent in B",
        "parameter d: absent in A, (4,) in B",
    )
    assert not seen.equal
    assert seen.divergence is None  # of the tensors that both have


def test_a_longer_run_is_equal_as_far_as_both_go(runs):
    seen = compare(runs / "a", runs / "longer")
    assert (seen.divergence, seen.steps, seen.equal) == (None, (5, 7), False)
    assert "5 and 7 steps: bit-equal as far as both go" in seen.verdict
    assert seen.verdict.endswith("final weights: fc1.weight, fc1.bias, fc2.weight, fc2.bias and 2 more differ")


def test_metrics_stand_beside_the_spread_of_the_seeds(runs):
    seen = compare(runs / "a", runs / "rate").metrics
    values = [dx.Run.load(runs / name).metrics["test_loss"] for name in ("a", "seed", "seed2")]
    row = seen.loc["test_loss"]
    assert row["A"] == values[0]
    assert row["mean A"] == pytest.approx(np.mean(values))
    assert row["sd A"] == pytest.approx(np.std(values, ddof=1))
    assert row["seeds A"] == 3
    assert "mean B" not in row  # a single run has no spread
    assert row["B - A"] == pytest.approx(dx.Run.load(runs / "rate").metrics["test_loss"] - values[0])


def test_a_run_of_other_code_does_not_count_as_another_seed(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    path = tmp_path / "runs" / "seed2" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "another"}))
    seen = compare(tmp_path / "runs" / "a", tmp_path / "runs" / "rate")
    assert seen.metrics.loc["test_loss", "seeds A"] == 2


def test_the_failed_ones_of_a_configuration_are_its_failure_rate(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    path = tmp_path / "runs" / "seed2" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    seen = compare(tmp_path / "runs" / "a", tmp_path / "runs" / "rate").efficiency
    assert seen.loc["failure_rate"].tolist()[:2] == [pytest.approx(1 / 3), 0]


def test_figures_of_efficiency_follow_from_the_steps(runs):
    steps = dx.Run.load(runs / "a").steps
    seen = compare(runs).loc["a"]
    assert seen["step_time"] == steps["step_time"].median()
    assert seen["samples_per_second"] == pytest.approx(4 * 64 / steps["step_time"][1:].sum())
    assert (seen["memory"], seen["steps_taken"]) == (steps["memory"].max(), 5)
    assert 0 < seen["validation_time"] < seen["seconds"]


def test_the_table_has_all_runs_and_the_fields_that_are_not_the_same_in_all(runs):
    seen = compare(runs)
    assert seen.index.tolist() == sorted(seen.index)
    assert seen["status"].value_counts().to_dict() == {"completed": 7, "diverged": 1}
    assert "the loss is inf at step" in seen.loc["diverged", "reason"]
    fields = {field.name for field in dataclasses.fields(dx.RunConfig)} & set(seen.columns)
    assert fields == {"seed", "lr", "max_steps", "optimizer", "loss"}
    assert seen.loc["a", "test_loss"] == dx.Run.load(runs / "a").metrics["test_loss"]


def test_a_folder_without_runs_is_an_empty_table(tmp_path):
    (tmp_path / "notes").mkdir()
    assert len(compare(tmp_path)) == 0
    with pytest.raises(dx.DxdyError, match="cannot be read"):
        compare(tmp_path / "nowhere")


@pytest.fixture
def bad(runs, tmp_path):
    """A folder of good runs and of every kind of bad one."""
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)

    def spoil(name, file, text):
        shutil.copytree(runs / "a", folder / name)
        (folder / name / file).write_bytes(text if isinstance(text, bytes) else text.encode())

    spoil("x1", "result.json", '{"status": "comp')
    spoil("x2", "config.yaml", (runs / "a" / "config.yaml").read_text() + "depth: 3\n")
    spoil("x3", "config.yaml", "lr: [")
    spoil("x4", "environment.json", "[]")
    spoil("x5", "trace.json", '{"version": 99, "segments": []}')
    spoil("x6", "trace.bin", b"")
    spoil("x7", "config.yaml", (runs / "a" / "config.yaml").read_text().replace("lr: 0.05", "lr: 0.5"))
    spoil("x8", "result.json", '{"status": "paused"}')
    (folder / "x9").mkdir()
    (folder / "x9" / "trace.json").write_text("{}")  # of a run that never began
    return folder


REASONS = {
    "x1": "is no run's result. Is it damaged?",
    "x2": "depth: unknown.",
    "x3": "config.yaml: is damaged",
    "x4": "environment.json: is damaged",
    "x5": "written in version 99 of this format",
    "x6": "does not begin as a trace does",
    "x7": "was edited after it was recorded",
    "x8": "is no run's result",
    "x9": "result.json: cannot be read (No such file or directory)",
}


def test_a_bad_folder_is_a_row_that_says_what_is_wrong(bad, capsys):
    seen = compare(bad)
    assert len(seen) == 8 + len(REASONS)
    assert {name: text for name, text in REASONS.items() if text not in seen.loc[name, "reason"]} == {}
    assert seen["status"].value_counts().to_dict() == {"completed": 13, "unreadable": 3, "diverged": 1}
    assert seen.loc["x2", "depth"] == 3  # what another version recorded is shown
    assert cli.main(["runs", "--in", str(bad)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(seen)


@pytest.mark.parametrize("name", REASONS)
def test_a_bad_folder_can_be_looked_at(bad, name, capsys):
    assert cli.main(["runs", "show", name, "--in", str(bad)]) == 0
    assert REASONS[name].split(".")[0] in capsys.readouterr().out


def test_a_bad_folder_is_compared_as_far_as_it_can_be_read(bad):
    assert compare(bad / "a", bad / "x7").config.empty is False
    seen = compare(bad / "a", bad / "x5")
    assert "written in version 99" in seen.notes[0]
    assert not seen.equal
    with pytest.raises(dx.DxdyError, match="is no run's result"):
        compare(bad / "a", bad / "x1")


ODD = [None, True, -1, 10**400, ["a"], {"a": 1}, [{}], "\ud800"]
READ = ["reason", "kind", "seconds", "process", "weights", "validation", "traceback", "lesson"]


def seen(folder, capsys):
    """Return what each command that looks at a run says, each of which must end in order."""
    told = []
    for words in ([], ["--json"], ["show", "b"], ["show", "b", "--json"], ["compare", "a", "b", "--json"]):
        assert cli.main(["runs", "--in", str(folder), *words]) in (0, 2)
        told.append(capsys.readouterr().out)
        assert not told[-1].startswith(("{", "[")) or json.loads(told[-1])
        told[-1].encode()  # no half characters
    return told


@pytest.mark.parametrize("field", READ)
def test_a_field_of_another_kind_breaks_no_list(runs, tmp_path, capsys, field):
    for name in "ab":
        shutil.copytree(runs / "a", tmp_path / name)
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    for value in ODD:
        (tmp_path / "b" / "result.json").write_text(json.dumps(result | {field: value}))
        assert {row["id"] for row in json.loads(seen(tmp_path, capsys)[1])} == {"a", "b"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "a: &a {b: *a}"),
        ("config.yaml", "seed: [1]"),
        ("config.yaml", "? [1, 2]\n: 2020-01-01"),
        ("trace.json", "[" * 100_000),
        ("environment.json", '{"commit": "\\ud800"}'),
    ],
)
def test_a_file_that_another_program_wrote_breaks_no_list(runs, tmp_path, capsys, file, text):
    for name in "ab":
        shutil.copytree(runs / "a", tmp_path / name)
    (tmp_path / "b" / file).write_text(text)
    seen(tmp_path, capsys)


def test_a_name_that_is_no_text_is_listed(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / os.fsdecode(b"b\xff"))
    for words in ([], ["--json"], ["show", "b"], ["compare", "b", "b"]):
        command = [sys.executable, "-m", "dxdy_nb.cli", "runs", "--in", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_folder_of_another_user_is_a_row(runs, monkeypatch):
    listdir = os.listdir

    def refused(path):
        if Path(path).name == "a":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    assert compare(runs).loc["a", ["status", "reason"]].tolist() == [
        "unreadable",
        f"{runs / 'a'}: cannot be read (Permission denied). Does it belong to another user?",
    ]


def test_lessons_and_scripts_are_listed_too(tmp_path):
    for name, facts in (
        ("lesson", {"lesson": "03_baseline_run", "metrics": {"accuracy": 0.9, "seed": 5}}),
        ("script", {"script": {"name": "train.py", "arguments": ["--lr", "0.1"], "is_module": False}}),
    ):
        (tmp_path / name).mkdir()
        with Recorder(tmp_path / name, kind=name, **facts):
            pass
    (tmp_path / "lesson" / "config.yaml").write_text("seed: 3\nlr: 0.01\nsteps: 4\n")
    seen = compare(tmp_path)
    assert seen["name"].tolist() == ["03_baseline_run", "train.py"]
    assert seen["lr"].tolist() == [0.01, 0.1]
    assert seen.loc["lesson", ["accuracy", "metric_seed"]].tolist() == [0.9, 5]
    assert names(compare(tmp_path / "lesson", tmp_path / "script").environment) == ["kind", "lesson", "script"]


def test_runs_of_a_sweep_are_listed_under_its_name(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "a", tmp_path / "first")
    monkeypatch.setenv(PARENT, "sweep")
    dx.train(BASE, out=tmp_path / "sweep" / "seed=0")
    (tmp_path / "sweep" / "seed=0" / "ranks" / "rank1").mkdir(parents=True)
    shutil.copy(runs / "a" / "trace.json", tmp_path / "sweep" / "seed=0" / "ranks" / "rank1")  # part of that run
    seen = compare(tmp_path)
    assert seen.index.tolist() == ["first", "sweep/seed=0"]
    assert seen["parent"].dropna().to_dict() == {"sweep/seed=0": "sweep"}
    assert entries.find(tmp_path, "seed").folder == tmp_path / "sweep" / "seed=0"


@pytest.mark.parametrize(
    ("name", "found"), [("a", "a"), ("ag", "again"), ("ate", "rate"), ("seed2", "seed2"), ("seed", "seed")]
)
def test_part_of_a_name_that_only_one_run_has_is_enough(runs, name, found):
    assert entries.find(runs, name).id == found


def test_a_path_is_a_name_too(runs, here):
    assert entries.find("nowhere", str(runs / "a")).folder == runs / "a"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("e", r"4 runs in .* are called so: again, seed, seed2, diverged\. Write more|are called so"),
        ("lnger", r"no run in .* is called so\. Did you mean 'longer'\?"),
        ("zzz", r"no run in .* is called so\. `dxdy runs` lists them"),
    ],
)
def test_a_name_that_none_or_several_have_is_refused(runs, name, told):
    with pytest.raises(dx.DxdyError, match=told):
        entries.find(runs, name)


def listed(runs, capsys, *arguments):
    assert cli.main(["runs", "--in", str(runs), *arguments, "--json"]) == 0
    return [row["id"] for row in json.loads(capsys.readouterr().out)]


def test_the_list_is_filtered_and_sorted(runs, capsys):
    assert listed(runs, capsys, "--status", "diverged") == ["diverged"]
    assert listed(runs, capsys, "--where", "optimizer=adam") == ["adam"]
    assert listed(runs, capsys, "--where", "seed=0", "--where", "lr=1e-1") == ["rate"]
    assert listed(runs, capsys, "--where", "model=mlp", "--where", "seed=2") == ["seed2"]  # model is the same in all
    assert listed(runs, capsys, "--status", "failed") == []
    assert cli.main(["runs", "--in", str(runs), "--where", "lr=0.1", "--status", "completed"]) == 0
    assert "lr=0.1" in capsys.readouterr().out  # what was asked for is seen, though it is the same in all
    losses = {path.name: json.loads((path / "result.json").read_text())["metrics"] for path in runs.iterdir()}
    expected = sorted((name for name in losses if losses[name]), key=lambda name: (losses[name]["test_loss"], name))
    assert listed(runs, capsys, "--sort", "test_loss") == [*expected, "diverged"]
    assert listed(runs, capsys, "--sort=-test_loss")[0] == expected[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--where", "optimiser=adam"], "optimiser: no run has it. Did you mean 'optimizer'?"),
        (["--sort", "tst_loss"], "tst_loss: no run has it. Did you mean 'test_loss'?"),
        (["--status", "fail"], "no status is called 'fail'. Did you mean 'failed'?"),
        (["--where", "lr"], "expected name=value"),
        (["show", "agian"], "Did you mean 'again'?"),
        (["compare", "a", "zzz"], "zzz: no run in"),
    ],
)
def test_bad_input_is_one_clear_line(runs, capsys, arguments, told):
    assert cli.main(["runs", "--in", str(runs), *arguments]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1


def test_show_tells_all(runs, capsys):
    assert cli.main(["runs", "--in", str(runs), "show", "div"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("diverged: diverged, the loss is inf at step")
    assert all(word in told for word in ("optimizer", "torch", "split", "the last of", "grad_norm"))
    assert cli.main(["runs", "show", "again", "--in", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == BASE.to_dict()


def test_show_says_where_a_run_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "train_step", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dx.train(BASE, out=tmp_path / "run")
    assert cli.main(["runs", "show", "--in", str(tmp_path), "run"]) == 0
    told = capsys.readouterr().out
    assert "run: failed, ZeroDivisionError: division by zero" in told
    assert f'File "{__file__}", line' in told


def test_compare_tells_a_program_the_same(runs, capsys):
    assert cli.main(["runs", "--in", str(runs), "compare", "a", "seed", "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["config"] == {"seed": {"A": 0, "B": 1}}
    assert (told["equal"], told["first_difference"]["step"], len(told["different_weights"])) == (False, 0, 6)
    assert told["metrics"]["test_loss"]["A"] == dx.Run.load(runs / "a").metrics["test_loss"]
    assert cli.main(["runs", "--in", str(runs), "compare", "a", "again"]) == 0
    assert "bit-equal: all 5 steps" in capsys.readouterr().out


def test_one_run_alone_is_no_comparison(runs):
    with pytest.raises(dx.DxdyError, match="expected a folder of runs, or two runs; got one run"):
        compare(dx.Run.load(runs / "a"))


@pytest.mark.parametrize("thing", [None, 3, ["a"], ""])
@pytest.mark.parametrize(
    "call",
    [
        dx.compare,
        lambda thing: dx.compare(thing, thing),
        dx.verify_ranks,
        explain_scaling,
        lambda thing: dx.train(BASE, out=0 if thing is None else thing),
        lambda thing: dx.train(BASE, out=0 if thing is None else thing, resume=True),
    ],
)
def test_what_is_no_folder_is_refused_with_one_line(thing, call):
    with pytest.raises(dx.DxdyError, match=r"^[\w]+: expected a run's folder.* got \w+\.$"):
        call(thing)


def test_both_runs_are_drawn(runs):
    figure = compare(runs / "a", runs / "seed").plot()
    losses, distance, times = figure.axes
    for line, name in zip(losses.lines, ("a", "seed"), strict=False):
        np.testing.assert_array_equal(line.get_ydata(), dx.Run.load(runs / name).steps["loss"])
    gap = (dx.Run.load(runs / "a").steps["loss"] - dx.Run.load(runs / "seed").steps["loss"]).abs()
    np.testing.assert_array_equal(distance.lines[0].get_ydata(), gap)
    assert len(times.lines) == 2
    assert "no difference" in [text.get_text() for text in compare(runs / "a", runs / "again").plot().axes[1].texts]
    assert plots.png(figure)


def test_a_glance_has_the_steps_that_reading_has(runs):
    pd.testing.assert_frame_equal(trace.glance(runs / "a").steps, trace.read(runs / "a").steps)


def test_a_glance_leaves_out_half_a_record(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "a")
    with open(tmp_path / "a" / "trace.bin", "ab") as file:
        file.write(b"half")
    assert len(trace.glance(tmp_path / "a").steps) == 5


def test_events_for_tensorboard_go_where_they_are_asked_for(runs, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(trace.Trace, "to_tensorboard", lambda self, folder: asked.append((len(self.steps), folder)))
    assert cli.main(["runs", "--in", str(runs), "export", "again", "--tensorboard", str(tmp_path / "events")]) == 0
    assert asked == [(5, tmp_path / "events")]
    assert "tensorboard --logdir" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--where", "lr=0.1"], ["--sort", "lr"]])
def test_no_runs_have_no_column_that_could_be_missing(tmp_path, capsys, option):
    assert cli.main(["runs", "--in", str(tmp_path), *option]) == 0
    assert capsys.readouterr().out.startswith("id")


def test_runs_are_found_by_a_field_that_is_null(tmp_path, capsys):
    for name, norm in {"a": 1.0, "b": None}.items():
        dx.train(dx.RunConfig(max_steps=1, max_grad_norm=norm), out=tmp_path / name)
    assert cli.main(["runs", "--in", str(tmp_path), "--json", "--where", "max_grad_norm=null"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ["b"]


@pytest.mark.parametrize("script", [{"name": 1, "arguments": 5}, {"name": "x", "arguments": [1, None]}])
def test_an_odd_script_in_a_result_breaks_no_list(tmp_path, script):
    run = dx.train(dx.RunConfig(max_steps=1), out=tmp_path / "a")
    shutil.copytree(run.folder, tmp_path / "b")
    result = json.loads((run.folder / "result.json").read_text()) | {"kind": "script", "script": script}
    (tmp_path / "b" / "result.json").write_text(json.dumps(result))
    assert [one.row()["id"] for one in entries.entries(tmp_path)] == ["a", "b"]
