"""However a run ends, its folder says how, and the steps before are kept."""

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
import torch

import dxdy_nb as dx
from dxdy_nb.runs.record import LESSON_FOLDER, Recorder, new_folder, status_of, write_json
from dxdy_nb.training import loop

SHORT = dx.RunConfig(data="spirals", model="mlp", max_steps=6)


def fail_at(monkeypatch, step, error):
    """Let the reference loop meet an exception in place of a step."""
    steps, train_step = iter(range(1000)), loop.train_step

    def faulty(*arguments):
        if next(steps) == step:
            raise error
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", faulty)


def test_a_completed_run_is_read_back_as_it_was_returned(tmp_path):
    run = dx.train(SHORT, out=tmp_path / "run")
    again = dx.Run.load(tmp_path / "run")
    assert run == again
    assert (again.status, again.reason, again.config) == ("completed", None, SHORT)
    assert set(again.metrics) == {"validation_loss", "validation_accuracy", "test_loss", "test_accuracy"}
    assert len(again.steps) == 6
    assert sorted(again.sizes) == sorted(name for name, _ in run.model.named_parameters())
    assert len(again.gradients) == 6 * len(again.sizes)
    assert again.validation.index.tolist() == [6]


def test_a_run_without_a_folder_of_its_own_goes_to_runs(here):
    run = dx.train(SHORT)
    assert run.folder.parent == (here / "runs").relative_to(here)
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {"config.yaml", "environment.json", "result.json", "trace.json", "trace.bin"}
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no luck"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError("too much"), "out_of_memory"),
        (torch.OutOfMemoryError("too much"), "out_of_memory"),
        (TimeoutError("too long"), "timed_out"),
    ],
)
def test_what_ends_a_run_goes_on_its_way_and_the_record_says_it(tmp_path, monkeypatch, error, status):
    fail_at(monkeypatch, 4, error)
    with pytest.raises(type(error)) as caught:
        dx.train(SHORT, out=tmp_path / "run")
    assert caught.value is error
    run = dx.Run.load(tmp_path / "run")
    assert run.status == status
    assert run.reason == f"{type(error).__name__}: {error}"
    assert run.steps.index.tolist() == [0, 1, 2, 3]


def test_too_much_memory_asked_from_a_cpu_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert status_of(caught.value) == "out_of_memory"


def test_a_diverged_run_says_so_and_keeps_its_steps(tmp_path):
    run = dx.train(dx.RunConfig(loss="mse", lr=10), out=tmp_path / "run")
    assert run.status == "diverged"
    assert run.reason.startswith("the loss is inf at step ")
    assert 1 < len(run.steps) < 19
    assert "test_accuracy" not in run.metrics


ENDS = {"os._exit(0)": 0, "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_whose_process_vanished_is_killed_and_keeps_its_steps(tmp_path, end):
    code = f"""
        import os, signal, sys
        import dxdy_nb as dx
        from dxdy_nb.training import loop
        steps, train_step = iter(range(1000)), loop.train_step
        def faulty(*arguments):
            if next(steps) == 4:
                {end}
            return train_step(*arguments)
        loop.train_step = faulty
        dx.train(dx.RunConfig(data="spirals", model="mlp", max_steps=6), out=sys.argv[1])
        """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), tmp_path / "run"])
    # Nobody has asked yet how the child ended, so it is still in the table of processes.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    unasked = dx.Run.load(tmp_path / "run")
    assert child.wait() == ENDS[end]
    gone = dx.Run.load(tmp_path / "run")
    assert (unasked.status, gone.status) == ("killed", "killed")
    assert gone.steps.index.tolist() == [0, 1, 2, 3]


def test_a_run_that_is_under_way_is_running(tmp_path):
    folder = new_folder("x", tmp_path / "run")
    SHORT.save(folder / "config.yaml")
    Recorder(folder)
    assert dx.Run.load(folder).status == "running"


def test_a_process_number_that_was_given_anew_does_not_keep_a_run_alive(tmp_path):
    SHORT.save(tmp_path / "config.yaml")
    recorder = Recorder(tmp_path)
    recorder.result["process"]["started"] -= 3600
    recorder.write()
    assert dx.Run.load(tmp_path).status == "killed"


def test_nobody_calls_a_run_on_another_machine_killed(tmp_path):
    SHORT.save(tmp_path / "config.yaml")
    recorder = Recorder(tmp_path)
    recorder.result["process"] |= {"host": "elsewhere", "pid": 2**22 + 1}
    recorder.write()
    assert dx.Run.load(tmp_path).status == "running"


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path):
    dx.train(SHORT, out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(dx.DxdyError, match="already holds a run"):
        dx.train(SHORT.override({"seed": 1}), out=tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_folder_that_holds_only_a_trace_is_left_as_it_is(tmp_path):
    model = torch.nn.Linear(1, 1)
    with dx.watch(model, torch.optim.SGD(model.parameters()), out=tmp_path / "run"):
        pass
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(dx.DxdyError, match="already holds a run"):
        dx.train(SHORT, out=tmp_path / "run")
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("place", ["a_file", "a_file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_told_before_training(here, monkeypatch, place):
    (here / "a_file").write_text("not a folder")
    fail_at(monkeypatch, 0, AssertionError("training began"))
    with pytest.raises(dx.DxdyError, match=f"^{place}: cannot be written"):
        dx.train(SHORT, out=place)


def test_two_runs_started_in_one_second_get_two_folders(here):
    assert new_folder("digits") != new_folder("digits")


def test_json_has_null_for_what_json_cannot_say(tmp_path):
    value = {"loss": math.nan, "rows": [{"a": math.inf}, (-math.inf, 1.5)], "text": "nan", "none": None, 3: True}
    write_json(tmp_path / "x.json", value)
    expected = {"loss": None, "rows": [{"a": None}, [None, 1.5]], "text": "nan", "none": None, "3": True}
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == expected


def test_a_reader_sees_the_old_json_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"value": 1})
    seen, replace = [], os.replace

    def look_first(source, target):
        seen.append((json.loads(path.read_text()), json.loads(Path(source).read_text())))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_first)
    write_json(path, {"value": 2})
    assert seen == [({"value": 1}, {"value": 2})]
    assert json.loads(path.read_text()) == {"value": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_on_a_full_disk_the_last_word_goes_over_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"status": "running", "more": "x" * 100})

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write_json(path, {"status": "failed"})
    assert json.loads(path.read_text()) == {"status": "failed"}
    assert list(tmp_path.iterdir()) == [path]


def test_json_that_was_never_there_and_cannot_be_written_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "x.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_result_outside_a_lesson_is_only_checked(here, monkeypatch):
    monkeypatch.delenv(LESSON_FOLDER, raising=False)
    dx.result(accuracy=0.97)
    assert list(here.iterdir()) == []
    with pytest.raises(dx.DxdyError, match="result: accuracy is a list"):
        dx.result(accuracy=[0.97])


def test_results_of_a_lesson_are_added_to_its_record(tmp_path, monkeypatch):
    Recorder(tmp_path, kind="lesson")
    monkeypatch.setenv(LESSON_FOLDER, str(tmp_path))
    dx.result(accuracy=torch.tensor(0.5), steps=3)
    dx.result(steps=np.int64(4), word="relu", right=np.bool_(True), bad=math.nan)
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["metrics"] == {"accuracy": 0.5, "steps": 4, "word": "relu", "right": True, "bad": None}
    assert (stored["status"], stored["kind"]) == ("running", "lesson")


@pytest.mark.parametrize("content", [None, "", "[]", "3", '"text"', "{}", '{"status": "running"}', "{", b"\xff"])
def test_what_is_no_run_is_refused_with_its_path(tmp_path, content):
    if content is not None:
        (tmp_path / "result.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(dx.DxdyError, match=f"^{tmp_path}/result.json: "):
        dx.Run.load(tmp_path)


def test_a_run_whose_configuration_is_gone_is_refused_with_its_path(tmp_path):
    Recorder(tmp_path)
    with pytest.raises(dx.DxdyError, match=f"^{tmp_path}/config.yaml: "):
        dx.Run.load(tmp_path)
