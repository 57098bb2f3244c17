"""`dxdy watch`: a script runs as Python runs it, and is not told that it is watched."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dxdy_nb import cli
from dxdy_nb.observe import trace
from dxdy_nb.runs.record import read_result

PYTHON, DXDY = [sys.executable], [sys.executable, "-m", "dxdy_nb.cli"]
WATCH = [*DXDY, "watch"]
RECORDED = '{"script": {"name": "script.py", "arguments": [], "is_module": false, "directory": "HERE"}}'
SCRIPTS = Path(__file__).parent / "scripts"


def ran(command: list[str], cwd: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    return subprocess.run(command, cwd=cwd, input=stdin, env=variables, capture_output=True, text=True, timeout=300)


def ours(told: str) -> str:
    """What stderr holds of us, and nothing of the script's."""
    return told[told.index("dxdy watch:") :]


def not_ours(told: str) -> str:
    return told[: told.index("dxdy watch:")]


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="latin-1")
    return path


# No script here imports torch: each runs in a moment, and how a script runs does not depend on it.
WAYS = {
    "what a script sees": """
        import os, sys
        print(sys.argv, sys.path[0], __file__, __name__, __spec__, __package__, __doc__, os.getcwd())
        print(sorted(globals()), type(__builtins__), "torch" in sys.modules, "numpy" in sys.modules)
        """,
    "a docstring": '"""Trains."""\nprint(__doc__, __annotations__ if "__annotations__" in globals() else None)\n',
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int)
        print(parser.parse_args())
        """,
    "argparse that fails": "import argparse\nargparse.ArgumentParser().parse_args()\n",
    "sys.exit with a code": "import sys\nprint('so far')\nsys.exit(3)\n",
    "sys.exit with 256": "import sys\nsys.exit(256)\n",
    "sys.exit with a text": "import sys\nsys.exit('no data')\n",
    "sys.exit with nothing": "import sys\nsys.exit()\n",
    "an error": """
        def inner(x):
            return 1 / x

        def outer():
            try:
                inner(0)
            except ZeroDivisionError as error:
                raise ValueError("no good") from error

        outer()
        """,
    "errors in a group": "raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])\n",
    "no syntax": "print('never'\n",
    "an encoding": "# -*- coding: latin-1 -*-\nprint(ascii('é'))\n",
    "its own hook for errors": "import sys\nsys.excepthook = lambda *error: print('mine', error[0].__name__)\n1 / 0\n",
    "its own hook that fails": "import sys\nsys.excepthook = lambda *error: [][0]\n1 / 0\n",
    "Ctrl-C inside": "raise KeyboardInterrupt\n",
    "os._exit": "import os, sys\nprint('last', flush=True)\nos._exit(7)\n",
    "exit handlers": """
        import atexit, sys
        atexit.register(print, "first registered")
        atexit.register(print, "then this")
        sys.exit(5)
        """,
    "standard input": "print(input().upper(), [line for line in open(0)])\n",
    "another directory": """
        import os
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        open("left.txt", "w").write("x")
        print(os.path.exists("left.txt"), os.path.exists(__file__))
        """,
    "megabytes": "for i in range(40000):\n    print('x' * 100)\n",
    "a thread left": """
        import threading, time
        def work():
            time.sleep(0.3)
            print("worked")
        threading.Thread(target=work).start()
        print("main is done")
        """,
    "a daemon left": """
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        print("main is done")
        """,
    "a pool left": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        print(pool.submit(sum, [1, 2]).result())
        """,
    "a fork": """
        import os, sys
        child = os.fork()
        if child == 0:
            print("child", flush=True)
            sys.exit(4)
        print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    "processes": """
        import multiprocessing, sys
        class Mine:
            def __init__(self, x):
                self.x = x
        def work(mine):
            return Mine(mine.x + 1)
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print([one.x for one in pool.map(work, [Mine(1), Mine(2)])])
        """,
    "a daemon process left": """
        import multiprocessing, time
        if __name__ == "__main__":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
            print("main is done")
        """,
    "pickling": """
        import pickle
        class Net:
            pass
        print(type(pickle.loads(pickle.dumps(Net()))) is Net, pickle.dumps(Net()))
        """,
    "sources": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))\n",
    "no stderr": "import sys\nsys.stderr.close()\nsys.stdout.write('written')\n",
    "another stderr": "import io, sys\nsys.stderr = io.StringIO()\nprint('lost', file=sys.stderr)\n",
    "warnings": "import warnings\nwarnings.warn('old', DeprecationWarning)\n",
}


@pytest.mark.parametrize("name", WAYS)
def test_a_script_runs_as_python_runs_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, WAYS[name])
    arguments = ["script.py", *(["--steps", "3", "--"] if name in ("what a script sees", "argparse") else [])]
    plain = ran([*PYTHON, *arguments], tmp_path, "a line\nand another\n")
    watched = ran([*WATCH, *arguments], tmp_path, "a line\nand another\n")
    assert watched.stdout == plain.stdout
    # Python ends itself by a signal then; a shell calls that 130.
    assert watched.returncode == (130 if name == "Ctrl-C inside" else plain.returncode)
    if name == "its own hook that fails":  # Python tells of the hook's error, too
        assert not_ours(watched.stderr).strip() in plain.stderr
    elif name != "no stderr":
        assert not_ours(watched.stderr) == plain.stderr
        assert ours(watched.stderr) == "dxdy watch: script.py did not import torch: there was nothing to watch.\n"
    assert not list(tmp_path.glob("runs/*"))  # and the record of nothing is none


def test_a_program_learns_that_nothing_was_seen(tmp_path: Path) -> None:
    write(tmp_path, "raise SystemExit(9)")
    assert ran([*WATCH, "--json", "summary.json", "script.py", "-x"], tmp_path).returncode == 9
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told == {"script": "script.py", "arguments": ["-x"], "exit_code": 9, "steps": 0}


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    package = "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__)\n"
    write(tmp_path, "", "mine/__init__.py")
    write(tmp_path, package + "from . import other\nother.fail()\n", "mine/train.py")
    write(tmp_path, "def fail():\n    raise SystemExit(6)\n", "mine/other.py")
    write(tmp_path, package, "mine/__main__.py")
    for arguments in (["-m", "mine.train", "--lr", "1"], ["-m", "mine", "-m", "x"]):
        plain, watched = ran([*PYTHON, *arguments], tmp_path), ran([*WATCH, *arguments], tmp_path)
        assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
        assert watched.stdout.startswith(f"['{tmp_path}/mine/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "watch: name a script"),
        (["-m"], "watch: name a script"),
        (["nowhere.py"], "nowhere.py: cannot be read (No such file or directory)"),
        (["."], ".: cannot be read (Is a directory)"),
        (["-m", "no.such"], "-m no.such: no such module"),
        (["-m", "json"], "-m json: no such module, or none that can be run"),
        (["--out", "/proc/here", "script.py"], "/proc/here: cannot be written"),
        (["--out", "held", "script.py"], "held: already holds a run (result.json)"),
        (["--json", "no/such.json", "script.py"], "no/such.json: cannot be written"),
        (["--json", ".", "script.py"], "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_line_before_the_script_starts(
    here: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    write(here, "print('started')")
    write(here, "{}", "held/result.json")
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    assert cli.main(["watch", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert not (here / "runs").exists()
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "many"])
def test_a_number_of_steps_that_is_none_is_bad_input(steps: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["watch", f"--steps={steps}", "script.py"])
    assert stopped.value.code == 2
    assert f"argument --steps: expected a whole number above 0, got {steps!r}" in capsys.readouterr().err


def watched(arguments: list[str], cwd: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Run a script under watch, with its record in `run`, and return what it said and its summary."""
    done = ran([*WATCH, "--out", "run", "--json", "summary.json", *arguments], cwd)
    return done, json.loads((cwd / "summary.json").read_text())


def test_a_plain_loop_is_watched_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("none one two")
    arguments = [str(SCRIPTS / "plain_loop.py"), "--lr", "0.05", "--log", "mine.txt"]
    plain = ran([*PYTHON, *arguments], tmp_path)
    log = (tmp_path / "mine.txt").read_text()
    done, summary = watched(arguments, tmp_path)
    assert (done.stdout, done.returncode, not_ours(done.stderr)) == (plain.stdout, 0, plain.stderr)
    assert (tmp_path / "mine.txt").read_text() == 2 * log  # bit for bit: every digit of the losses
    assert (summary["steps"], summary["skipped"], summary["nonfinite_step"]) == (48, 0, None)
    assert summary["models"] == {"Sequential": 8 * 32 + 32 + 32 * 3 + 3}
    assert summary["optimizers"] == ["SGD"]
    assert (summary["status"], summary["exit_code"], summary["record"]) == ("completed", 0, str(tmp_path / "run"))
    assert summary["last_loss"] < summary["first_loss"]
    result = read_result(tmp_path / "run")
    assert result["script"] == {
        "name": arguments[0],
        "arguments": arguments[1:],
        "is_module": False,
        "directory": str(tmp_path),
    }
    assert result["metrics"]["steps"] == 48
    assert result["metrics"]["found"] == "no error"
    assert result["report"] in done.stderr
    assert len(trace.read(tmp_path / "run").steps) == 48
    told = ours(done.stderr)
    assert "completed after" in told and "  record     run\n" in told and "48, " in told


def test_variables_that_torch_reads_when_it_is_imported(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import os
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch
        print(torch.get_num_threads(), torch.__spec__.loader.exec_module)
        """,
    )
    done = ran([*WATCH, "script.py"], tmp_path)
    assert done.stdout.startswith("2 <bound method")
    assert "no step: no model ran here" in ours(done.stderr)


STEPS = """
    import sys, torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            print(step, flush=True)
"""


def stepping(folder: Path, then: str) -> Path:
    return write(folder, textwrap.dedent(STEPS) + textwrap.dedent(then))


@pytest.mark.parametrize(
    ("then", "code", "status", "steps"),
    [
        ("train(5)\nsys.exit(3)", 3, "failed", 5),
        pytest.param("train(5)\nsys.exit()", 0, "completed", 5, marks=pytest.mark.slow),
        ("train(5)\nimport os\nos._exit(7)", 7, "failed", 5),
        pytest.param("train(5)\nraise MemoryError", 1, "out_of_memory", 5, marks=pytest.mark.slow),
        pytest.param("train(3)\nraise KeyboardInterrupt", 130, "interrupted", 3, marks=pytest.mark.slow),
        pytest.param("import os\nos.chdir('/')\ntrain(4)", 0, "completed", 4, marks=pytest.mark.slow),
        ("import threading\nthreading.Thread(target=train, args=(6,)).start()", 0, "completed", 6),
        ("import os\ntrain(2)\nif os.fork():\n    os.wait()\nelse:\n    train(9)\n    sys.exit(4)", 0, "completed", 2),
        pytest.param(
            "import os\ntrain(2)\nif os.fork():\n    os.wait()\nelse:\n    train(9)\n    os._exit(4)",
            *(0, "completed", 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_however_a_script_ends_its_steps_are_recorded(
    tmp_path: Path, then: str, code: int, status: str, steps: int
) -> None:
    stepping(tmp_path, then)
    done, summary = watched(["script.py"], tmp_path)
    assert (done.returncode, summary["exit_code"], summary["status"], summary["steps"]) == (code, code, status, steps)
    assert done.stderr.count("dxdy watch:") == 1
    assert read_result(tmp_path / "run")["status"] == status


def test_an_error_in_a_step_looks_as_python_shows_it(tmp_path: Path) -> None:
    stepping(tmp_path, "train(2)\nmodel(torch.ones(4, 3)).sum().backward()")
    plain, done = ran([*PYTHON, "script.py"], tmp_path), ran([*WATCH, "script.py"], tmp_path)
    assert "mat1 and mat2 shapes cannot be multiplied" in plain.stderr
    assert not_ours(done.stderr) == plain.stderr


def test_steps_end_a_script_cleanly(tmp_path: Path) -> None:
    stepping(tmp_path, "try:\n    train(100)\nfinally:\n    print('cleaned up')")
    done = ran([*WATCH, "--steps", "3", "--json", "summary.json", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n1\ncleaned up\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["status"]) == (3, "completed")
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_with_130_and_a_summary(tmp_path: Path) -> None:
    stepping(tmp_path, "import time\ntrain(3)\ntime.sleep(60)")
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [*WATCH, "--out", "run", "script.py"],
        cwd=tmp_path,
        env=variables,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "KeyboardInterrupt" in not_ours(told) and "dxdy_nb" not in not_ours(told)
    assert "interrupted after" in ours(told)
    assert len(trace.read(tmp_path / "run").steps) == 3


def test_a_killed_script_leaves_its_steps(tmp_path: Path) -> None:
    stepping(tmp_path, "import os, signal\ntrain(7)\nos.kill(os.getpid(), signal.SIGKILL)")
    done = ran([*WATCH, "--out", "run", "script.py"], tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert read_result(tmp_path / "run")["status"] == "killed"
    assert len(trace.read(tmp_path / "run").steps) == 7
    assert (tmp_path / "run" / "environment.json").exists()


def test_a_loss_that_is_not_finite_is_told_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("none one two")
    done, summary = watched([str(SCRIPTS / "plain_loop.py"), "--spoil", "77"], tmp_path)
    step = summary["nonfinite_step"]
    assert (done.returncode, summary["exit_code"], summary["last_loss"]) == (1, 0, None)  # the report has an error
    assert summary["report"]["stage"] == "data"
    assert math.isnan(trace.read(tmp_path / "run").steps["loss"][step])
    assert f"not finite first at step {step}" in ours(done.stderr)
    assert f"the loss of step {step} is nan: dxdy replay run" in ours(done.stderr)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = ran([*DXDY, "replay", "../run"], elsewhere)
    assert (again.returncode, again.stdout) == (0, "")  # it ends after that step: the script prints later
    assert "bit for bit" in again.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "result.json: cannot be read (No such file or directory)"),
        ({"result.json": '{"status": "completed"}'}, "holds no run of a script. Record one: dxdy watch"),
        ({"result.json": "{"}, "holds no run of a script"),
        ({"result.json": "[]"}, "holds no run of a script"),
        ({"result.json": RECORDED.replace("HERE", "/no/such")}, "/no/such: No such file or directory"),
        ({"result.json": RECORDED.replace("HERE", ".")}, "script.py: cannot be read"),
        ({"result.json": RECORDED.replace("HERE", "."), "script.py": "pass"}, "did not import torch this time"),
        ({"result.json": RECORDED.replace("HERE", "."), "script.py": "import torch"}, "no record of a step that went"),
    ],
)
def test_a_folder_that_holds_nothing_to_replay(
    here: Path, capsys: pytest.CaptureFixture, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        write(here, text, name)
    if message.startswith(("did not", "no record")):  # here torch is imported already, in a new process it is not
        done = ran([*DXDY, "replay", "."], here)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert message in done.stderr
    else:
        assert cli.main(["replay", "."]) == 2
        assert message in capsys.readouterr().err


def test_a_record_that_cannot_begin_is_no_reason_to_stop(tmp_path: Path) -> None:
    write(tmp_path, "import shutil\nshutil.rmtree('run')\n" + textwrap.dedent(STEPS) + "train(2)")
    done = ran([*WATCH, "--out", "run", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n1\n")
    assert ours(done.stderr).startswith("dxdy watch: script.py goes on unwatched: ")
    assert len(done.stderr.splitlines()) == 1


def test_two_optimizers(tmp_path: Path) -> None:
    plain = ran([*PYTHON, str(SCRIPTS / "gan.py")], tmp_path)
    done, summary = watched([str(SCRIPTS / "gan.py")], tmp_path)
    assert (done.stdout, done.returncode) == (plain.stdout, 0)
    assert len(summary["models"]) == len(summary["optimizers"]) == 2
    assert summary["steps"] == 40  # a row for each update


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "steps"),
    [("hf_trainer", "transformers", 10), ("lightning_module", "lightning", 12), ("accelerate_loop", "accelerate", 16)],
)
def test_real_libraries(tmp_path: Path, name: str, library: str, steps: int) -> None:
    assert importlib.util.find_spec(library), f"{library} is missing. Run make test-all, which installs the peers."
    script = str(SCRIPTS / f"{name}.py")
    plain = ran([*PYTHON, script], tmp_path, HF_HUB_OFFLINE="1")
    assert plain.returncode == 0, plain.stderr
    done, summary = watched([script], tmp_path)
    assert (done.stdout, done.returncode, not_ours(done.stderr)) == (plain.stdout, 0, plain.stderr)
    assert (summary["steps"], summary["skipped"], summary["nonfinite_step"]) == (steps, 0, None)
    table = trace.read(tmp_path / "run").steps
    assert np.isfinite(table[["loss", "grad_norm", "lr"]].to_numpy()).all()
    assert (table["grad_norm"] > 0).all()
    assert len(summary["models"]) == 1


@pytest.mark.parametrize("command", ["watch", "replay"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"example: dxdy {command} " in capsys.readouterr().out
