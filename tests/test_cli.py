"""The command `dxdy run`: exit codes, one clear line for bad input, and what is recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from dxdy_nb import cli
from dxdy_nb.runs import lessons, record
from dxdy_nb.runs.entries import Entry, outermost


@pytest.fixture
def workbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workbook of small lessons in a folder of its own, which is the current one."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    write(
        folder,
        "01_short",
        "seed = 0\nlr = 0.1\nname = 'sgd'\nfast = True",
        "import dxdy_nb as dx\ndx.result(seed=seed, lr=lr)",
    )
    write(folder, "02_fails", "seed = 0", "width = seed + 1\n1 / (width - 1)")
    write(folder, "03_dies", "seed = 0", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    write(folder, "04_sleeps", "seed = 0", "import time\nprint('begun', flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(lessons, "NOTEBOOKS", folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, parameters: str, body: str) -> None:
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    cell = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook.cells = [nbformat.v4.new_markdown_cell("# A lesson"), cell, nbformat.v4.new_code_cell(body)]
    nbformat.write(notebook, folder / f"{name}.ipynb")


def only_run(root: Path) -> Path:
    (folder,) = (root / "runs").iterdir()
    return folder


def test_a_lesson_runs_with_parameters_and_its_results_are_kept(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "01_short", "-p", "lr=1e-3", "-p", "seed=7"]) == 0
    assert "lr = 0.001" in capsys.readouterr().out
    folder = only_run(workbook)
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["metrics"]) == ("completed", {"seed": 7, "lr": 0.001})
    assert nbformat.read(folder / "notebook.ipynb", as_version=4).metadata.papermill.parameters == {
        "seed": 7,
        "lr": 0.001,
    }
    assert (folder / "environment.json").exists()


def test_the_version_is_told_with_that_of_torch(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"dxdy_nb \d+\.\d+\.\d+, torch \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_runs_inside_a_swept_lesson_are_folded_into_its_row(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    body = "import dxdy_nb as dx\ndx.train(dx.RunConfig(data='spirals', model='mlp', max_steps=1))"
    write(workbook / "notebooks", "06_trains", "seed = 0", body)
    assert cli.main(["sweep", "06", "-g", "seed=3", "--out", "runs/seeds"]) == 0
    capsys.readouterr()
    assert cli.main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["id", "seeds/seed=3"]
    assert "1 run made inside a lesson's run: not listed without --all" in err
    assert cli.main(["runs", "--all", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(one["parent"] for one in told) == ["seeds", "seeds/seed=3"]


def test_a_run_of_an_ablation_inside_a_lesson_is_a_part_of_the_lesson() -> None:
    parents = {"lesson": None, "ablation/lr=0.1": "lesson/ablation", "sweep/lr=0.1": "sweep", "other": "elsewhere"}
    found = [Entry(name, Path(name), {"parent": parent}, {}, {}) for name, parent in parents.items()]
    assert [one.id for one in outermost(found)] == ["lesson", "sweep/lr=0.1", "other"]


def test_json_is_for_programs(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "1", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["status"] == "completed"
    assert Path(told["notebook"]).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["01_shrt"], "no lesson is called '01_shrt'. Did you mean '01_short'?"),
        (["99"], "no lesson is called '99'."),
        (["01", "-p", "sed=1"], "01_short has no parameter 'sed'. Did you mean 'seed'?"),
        (["01", "-p", "seed=1.5"], "seed: expected a whole number, like 0; got 1.5"),
        (["01", "-p", "lr=fast"], "lr: expected a number, like 0.1; got 'fast'"),
        (["01", "-p", "lr=true"], "lr: expected a number"),
        (["01", "-p", "fast=1"], "fast: expected true or false"),
        (["01", "-p", "name=3"], "name: expected a text"),
        (["01", "-p", "lr"], "'lr': expected name=value, like lr=0.1"),
        (["01", "-p", "lr=1", "-p", "lr=2"], "lr: given twice"),
        (["--all", "-p", "lr=1"], "run --all: takes no -p"),
        ([], "name one lesson, or --all"),
        (["01", "--out", "/proc/here"], "/proc/here: cannot be written"),
    ],
)
def test_bad_input_is_one_clear_message_before_anything_starts(
    workbook: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    assert cli.main(["run", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
    assert not (workbook / "runs").exists()


def test_a_failing_cell_is_shown(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "02_fails"]) == 1
    told = capsys.readouterr().err
    assert "1 / (width - 1)" in told
    assert "ZeroDivisionError: division by zero" in told
    assert record.read_result(only_run(workbook))["status"] == "failed"
    assert (only_run(workbook) / "notebook.ipynb").exists()


def test_an_error_that_the_reader_can_put_right_is_bad_input(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    write(workbook / "notebooks", "05_config", "lr = 0.1", "import dxdy_nb as dx\ndx.RunConfig(lr=lr, sed=0)")
    assert cli.main(["run", "05_config"]) == 2
    assert "sed: unknown. Did you mean 'seed'?" in capsys.readouterr().err
    write(workbook / "notebooks", "05_config", "lr = 0.1", "import dxdy_nb as dx\ndx.RunConfig(lr=lr)")
    capsys.readouterr()
    assert cli.main(["run", "05_config", "-p", "lr=-1"]) == 2
    told = capsys.readouterr().err.strip()
    assert told == "05_config: lr: expected a number above 0 and at most 1000, got -1.0"


def test_a_killed_kernel_is_a_failure(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "03_dies"]) == 1
    assert "the kernel died" in capsys.readouterr().err
    assert record.read_result(only_run(workbook))["status"] == "killed"


def test_a_cell_without_memory_and_one_without_end_say_so(workbook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workbook / "notebooks", "05_greedy", "size = 10", "import torch\ntorch.empty(size**15)")
    assert cli.main(["run", "05", "--out", "greedy"]) == 1
    monkeypatch.setattr(lessons, "CELL_TIMEOUT", 2)
    assert cli.main(["run", "04_sleeps", "--out", "late"]) == 1
    ends = {name: record.read_result(workbook / name) for name in ("greedy", "late")}
    assert {name: end["status"] for name, end in ends.items()} == {"greedy": "out_of_memory", "late": "timed_out"}
    assert "a cell took longer than 2 s" in ends["late"]["reason"]


def test_a_run_is_never_overwritten(workbook: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "01", "--out", "mine"]) == 0
    before = (workbook / "mine" / "result.json").read_bytes()
    assert cli.main(["run", "01", "--out", "mine"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (workbook / "mine" / "result.json").read_bytes() == before


def test_ctrl_c_is_recorded_and_ends_with_130(workbook: Path) -> None:
    program = "import pathlib, sys; from dxdy_nb.runs import lessons; from dxdy_nb.cli import main; "
    program += (
        f"lessons.NOTEBOOKS = pathlib.Path({str(workbook / 'notebooks')!r}); sys.exit(main(['run', '04_sleeps']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=workbook, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list((workbook / "runs").glob("*/notebook.ipynb")) or not _begun(workbook):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert record.read_result(only_run(workbook))["status"] == "interrupted"


def _begun(root: Path) -> bool:
    return "begun" in (only_run(root) / "notebook.ipynb").read_text()


@pytest.mark.parametrize("command", [[], ["lab"], ["run"], ["sweep"], ["runs"], ["runs", "show"], ["runs", "compare"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert not command or f"example: dxdy {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["watch"], ["run"], ["sweep"], ["preflight"]])
def test_an_empty_path_is_not_the_current_folder(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--out", "", "x"])
    assert "argument --out: expected a path, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["65536", "-1", "abc", "8888.0", ""])
def test_a_port_that_is_none_is_bad_input(port: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["lab", f"--port={port}"])
    assert stopped.value.code == 2
    assert f"argument --port: expected a number from 0 to 65535, got {port!r}" in capsys.readouterr().err
