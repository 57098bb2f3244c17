"""A sweep refuses what cannot run, limits and records what does, goes on where it was, and leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

import dxdy_nb as dx
from dxdy_nb import cli
from dxdy_nb.runs import lessons, record
from dxdy_nb.training import sweep
from dxdy_nb.training.sweep import Limits, parse_grid, plan, run_all

BASE = dx.RunConfig(data="spirals", model="mlp", max_steps=3)
# In the place of a training, for tests of what stands around it: without torch, which takes seconds to load.
BEGIN = "import json, os, pathlib, sys, time\nwork = json.loads(sys.argv[1])\n"
BEGIN += "open('begun.txt', 'a').write(pathlib.Path(work['out']).name + '\\n')\n"
COMPLETES = BEGIN + (
    "result = dict(status='completed', reason=None, metrics=dict(loss=work['config']['lr']))\n"
    "pathlib.Path(work['out'], 'result.json').write_text(json.dumps(result))\n"
)


@pytest.fixture
def config(here: Path) -> Path:
    BASE.save(here / "base.yaml")
    return here / "base.yaml"


def begun() -> list[str]:
    return Path("begun.txt").read_text().splitlines()


def runs_of(grid: list[str], **fixed: object) -> list[sweep.Planned]:
    return plan("base.yaml", parse_grid(grid), fixed)


def new(name: str) -> Path:
    Path(name).mkdir()
    return Path(name)


def test_a_grid_is_all_combinations_in_order(config: Path) -> None:
    planned = runs_of(["lr=1e-3,0.1", "seed=2,0"], max_steps=2)
    assert [one.name for one in planned] == [f"lr={lr},seed={s}" for lr in (0.001, 0.1) for s in (2, 0)]
    assert planned[2].work == BASE.override({"lr": 0.1, "seed": 2, "max_steps": 2})
    assert parse_grid(["max_grad_norm=null,1", 'name="a,b",c']) == {"max_grad_norm": [None, 1], "name": ["a,b", "c"]}


def test_a_folder_is_named_in_plain_letters_and_no_two_alike() -> None:
    names = {sweep.Planned({"target": text}, BASE).name for text in ("a/b", "a:b", "../b", "x" * 500, "x" * 501)}
    assert len(names) == 5
    assert all(len(name) < 150 and "/" not in name and ":" not in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["base.yaml", "-g", "sed=0,1", "-g", "lr=-1,0.1"], ["sed: unknown. Did you mean 'seed'?", "lr: expected a"]),
        (["base.yaml", "-g", "lr=0.1,x", "-p", "lr=1"], ["lr: is in the grid, and fixed too.", "lr: expected a"]),
        (["base.yaml", "-g", "lr=0.1,1e-1"], ["lr=0.1: the grid names this run twice."]),
        (["base.yaml", "-g", "lr=", "-g", "seed=0,,1"], ["'lr=': expected name=value,value", "'seed=0,,1': expected"]),
        (["base.yaml", "-g", "lr=1", "-g", "lr=2"], ["lr: given twice"]),
        (["base.yaml"], ["sweep: name what varies, like -g lr=1e-3,1e-2"]),
        (["base.yaml", "-g", "lr=1", "--time-limit", "0"], ["time limit: expected a number above 0, got 0.0."]),
        (["gone.yaml", "-g", "lr=1"], ["gone.yaml: cannot be read"]),
        (["no_lesson", "-g", "lr=1"], ["no lesson is called 'no_lesson'."]),
        (["02", "-g", "x0=1,x", "-g", "sead=0"], ["has no parameter 'sead'. Did you mean", "x0: expected a number"]),
    ],
)
def test_bad_input_is_refused_as_a_whole_before_anything_starts(
    config: Path, capsys: pytest.CaptureFixture, arguments: list[str], lines: list[str]
) -> None:
    assert cli.main(["sweep", *arguments]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(any(expected in line for line in told) for expected in lines)
    assert [*Path().iterdir()] == [Path("base.yaml")]


def test_what_is_done_is_not_run_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PROGRAM", COMPLETES.replace("{", "{{").replace("}", "}}"))
    out = new("s")
    first = run_all(runs_of(["lr=0.1,0.2"]), out, jobs=2)
    assert [one.result["status"] for one in first] == ["completed"] * 2
    again = run_all(runs_of(["lr=0.3,0.2,0.1"]), out)
    assert begun() == ["lr=0.1", "lr=0.2", "lr=0.3"] or begun() == ["lr=0.2", "lr=0.1", "lr=0.3"]
    assert sweep.table(again)["loss"].tolist() == [0.3, 0.2, 0.1]


def test_a_run_that_was_killed_is_run_again_beside_its_record(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PROGRAM", COMPLETES)
    out, planned = new("s"), runs_of(["lr=0.1,0.2,0.3,0.4"])
    dead = {"host": os.uname().nodename, "pid": 2**22 + 1, "started": 0.0}
    texts = ["", *(json.dumps({"status": s, "process": dead}) for s in ("running", "interrupted", "failed"))]
    for one, text in zip(planned, texts, strict=True):  # killed while the record was begun, killed, interrupted, failed
        (out / one.name).mkdir()
        (out / one.name / "result.json").write_text(text)
    done = run_all(planned, out)
    assert [one.folder.name for one in done] == ["lr=0.1~2", "lr=0.2~2", "lr=0.3~2", "lr=0.4"]
    assert [one.result["status"] for one in done] == ["completed"] * 3 + ["failed"]
    assert [(out / one.name / "result.json").read_text() for one in planned] == texts
    assert begun() == ["lr=0.1~2", "lr=0.2~2", "lr=0.3~2"]


def test_a_run_that_died_before_its_result_is_run_again_beside_it(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_PROGRAM", COMPLETES)
    out, (planned,) = new("s"), runs_of(["lr=0.1"])
    (out / planned.name).mkdir()
    planned.work.save(out / planned.name / "config.yaml")
    (done,) = run_all([planned], out)
    assert (done.folder.name, done.result["status"]) == ("lr=0.1~2", "completed")


@pytest.mark.parametrize("data", [b"{{{", b"\xff", b"[" * 5000])
def test_damaged_parameters_of_a_lesson_are_no_plan(here: Path, data: bytes) -> None:
    (here / "config.yaml").write_bytes(data)
    assert not sweep._holds(here, sweep.Lesson(here / "x.ipynb", {"lr": 0.1}))


def test_a_folder_with_other_runs_or_another_sweep_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PROGRAM", COMPLETES)
    out = new("s")
    (done,) = run_all(runs_of(["lr=0.1"]), out)
    done.planned.work.save(done.folder / "config.yaml")  # as a training would have done
    run_all(runs_of(["lr=0.1"]), out)
    with pytest.raises(dx.DxdyError, match=r"s/lr=0\.1: holds a run with other settings"):
        run_all(runs_of(["lr=0.1,0.2"], max_steps=4), out)
    with sweep._claimed(out), pytest.raises(dx.DxdyError, match="another sweep is at work there"):
        run_all(runs_of(["lr=0.2"]), out)
    assert begun() == ["lr=0.1"]


@pytest.mark.parametrize(
    ("body", "limits", "status", "reason"),
    [
        ("time.sleep(60)", Limits(seconds=0.5), "timed_out", "took longer than 0.5 s"),
        ("held = b'x' * 200_000_000; time.sleep(60)", Limits(megabytes=150), "out_of_memory", "the limit is 150 MB"),
        (
            "print('no room for it', flush=True); os.kill(os.getpid(), 9)",
            None,
            "failed",
            "SIGKILL and left no record. no",
        ),
        ("sys.exit('torch is not there')", None, "failed", "exit code 1 and left no record. torch is not there"),
    ],
)
def test_whatever_ends_a_run_is_recorded_and_the_others_go_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, body: str, limits: Limits, status: str, reason: str
) -> None:
    bad = f"if work['config']['lr'] == 0.1: {body}\n"
    monkeypatch.setattr(sweep, "_PROGRAM", BEGIN + bad + COMPLETES.removeprefix(BEGIN))
    before = set(psutil.Process().children())  # warm ranks of other tests
    done = run_all(runs_of(["lr=0.1,0.2"]), new("s"), limits=limits)
    assert [one.result["status"] for one in done] == [status, "completed"]
    assert reason in done[0].result["reason"]
    assert done[0].result["parent"] == "s"
    run = dx.Run.load(done[0].folder)
    assert (run.status, run.config) == (status, done[0].planned.work)
    assert set(psutil.Process().children()) <= before
    assert [one.result["status"] for one in run_all(runs_of(["lr=0.1,0.2"]), Path("s"))] == [status, "completed"]
    assert begun() == ["lr=0.1", "lr=0.2"]  # a failed run is done, too


def test_what_a_run_has_started_ends_with_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_session = "import subprocess\nchild = subprocess.Popen(['sleep', '61'], start_new_session=True)\n"
    body = BEGIN + own_session + "open('child.txt', 'w').write(str(child.pid))\ntime.sleep(60)"
    monkeypatch.setattr(sweep, "_PROGRAM", body)
    (done,) = run_all(runs_of(["lr=0.1"]), new("s"), limits=Limits(seconds=1))
    assert done.result["status"] == "timed_out"
    assert not alive(int(Path("child.txt").read_text()))


def test_trainings_run_and_are_linked_to_their_sweep(config: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["sweep", "base.yaml", "-g", "lr=0.05,1000", "-p", "loss=mse", "--jobs", "2", "--out", "s"]) == 1
    table, told = capsys.readouterr()
    assert "1 of 2 completed" in table and "lr=1000.0" in table and "validation_loss" in table
    assert "the same command with --out s goes on" in told and "s/lr=1000.0: diverged: the loss is inf at step" in told
    alone = dx.train(BASE.override({"loss": "mse"}), out="alone")
    run = dx.Run.load("s/lr=0.05")
    assert (run.config, run.metrics) == (alone.config, alone.metrics)
    assert record.read_result(run.folder)["parent"] == "s"
    assert record.read_result(alone.folder)["parent"] is None


def alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def workbook(here: Path) -> Path:
    """A workbook of one small lesson that says when it began, and fails for two of its parameters."""
    (here / "notebooks").mkdir()
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    body = (
        "import os, time\n"
        "with open('begun.txt', 'a') as file:\n    file.write(f'{width} {seed} {os.getpid()}\\n')\n"
        "time.sleep(pause)\n"
        "inverse = 1 / (width - seed)\n"
        "import dxdy_nb as dx\ndx.result(inverse=inverse)\n"
        "with open('ended.txt', 'a') as file:\n    file.write(f'{width} {seed}\\n')"
    )
    parameters = nbformat.v4.new_code_cell("width = 1\nseed = 0\npause = 0.5", metadata={"tags": ["parameters"]})
    notebook.cells = [parameters, nbformat.v4.new_code_cell(body)]
    nbformat.write(notebook, here / "notebooks" / "01_small.ipynb")
    return here


@contextlib.contextmanager
def swept(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a sweep of the workbook in a process of its own."""
    program = "import pathlib, sys; from dxdy_nb.runs import lessons; from dxdy_nb.cli import main; "
    program += "lessons.NOTEBOOKS = pathlib.Path('notebooks').resolve(); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "sweep", "01", "--jobs", "2", "--out", "s", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(true, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def family(process: subprocess.Popen[str]) -> list[int]:
    return [one.pid for one in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.slow
def test_twelve_lessons_two_failures_one_kill_and_nothing_is_run_twice(workbook: Path) -> None:
    grid = ["-g", "width=1,2,3,4", "-g", "seed=1,2,-1"]
    with swept(*grid) as process:
        wait_until(lambda: Path("begun.txt").exists() and len(begun()) >= 5)
        started = family(process)
        process.kill()
    wait_until(lambda: not any(alive(one) for one in started), seconds=20)
    cut = [
        path.parent for path in Path("s").glob("*/result.json") if record.read_result(path.parent)["status"] == "killed"
    ]
    ended = [path.parent.name for path in Path("s").glob("*/result.json") if path.parent not in cut]
    before = len(begun())
    with swept(*grid, "--json") as process:
        told, problems = process.communicate(timeout=600)
    assert process.returncode == 1, problems
    results = {Path(one["folder"]).name.partition("~")[0]: one for one in json.loads(told)}
    failed = {name for name, one in results.items() if one["status"] == "failed"}
    assert failed == {"width=1,seed=1", "width=2,seed=2"}
    assert all("ZeroDivisionError" in results[name]["reason"] for name in failed)
    assert sorted(one["status"] for one in results.values()) == ["completed"] * 10 + ["failed"] * 2
    assert len(results) == 12 and 1 <= len(cut) <= 2 and len(ended) >= 3
    completed = Path("ended.txt").read_text().splitlines()
    assert len(completed) == len(set(completed)) == 10  # nothing came to its end twice
    assert len(begun()) - before == 12 - len(ended)  # and nothing that had ended was begun again
    assert all(
        (folder.parent / f"{folder.name}~2" / "result.json").exists() for folder in cut
    )  # both records are there
    again = begun()
    with swept(*grid, "--json") as process:
        assert json.loads(process.communicate(timeout=60)[0]) == json.loads(told)
    assert begun() == again


@pytest.mark.slow
def test_ctrl_c_ends_all_of_it(workbook: Path) -> None:
    with swept("-g", "width=1,2,3", "-p", "pause=60") as process:
        wait_until(lambda: Path("begun.txt").exists() and len(begun()) == 2)
        started = family(process)
        assert len(started) >= 4  # two runs and their kernels
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert not any(alive(one) for one in started)
    statuses = {path.parent.name: record.read_result(path.parent)["status"] for path in Path("s").glob("*/result.json")}
    assert statuses == {"width=1": "interrupted", "width=2": "interrupted"}


@pytest.mark.slow
def test_a_lesson_beyond_its_time_leaves_no_kernel(workbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons, "NOTEBOOKS", workbook / "notebooks")
    planned = plan("01", {"width": [1]}, {"pause": 600})
    (done,) = run_all(planned, new("s"), limits=Limits(seconds=30))
    assert (done.result["status"], done.result["kind"]) == ("timed_out", "lesson")
    assert not alive(int(begun()[0].split()[-1]))
