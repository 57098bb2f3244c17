"""However a run ends, its folder says how, and the steps before are kept."""

import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import dxdy_nb as dx
from dxdy_nb.runs import record
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


def test_nothing_survives_a_restart_of_its_machine(tmp_path):
    SHORT.save(tmp_path / "config.yaml")
    recorder = Recorder(tmp_path)
    recorder.result["process"]["boot"] = "before"
    recorder.write()
    assert dx.Run.load(tmp_path).status == "killed"


def test_a_clock_that_is_set_kills_no_run(tmp_path, monkeypatch):
    SHORT.save(tmp_path / "config.yaml")
    Recorder(tmp_path)
    create_time, boot_time = record.psutil.Process.create_time, record.psutil.boot_time
    monkeypatch.setattr(record.psutil.Process, "create_time", lambda self: create_time(self) + 3600)
    monkeypatch.setattr(record.psutil, "boot_time", lambda: boot_time() + 3600)
    assert dx.Run.load(tmp_path).status == "running"


def test_nobody_calls_a_run_on_another_machine_killed(tmp_path):
    SHORT.save(tmp_path / "config.yaml")
    recorder = Recorder(tmp_path)
    recorder.result["process"] |= {"host": "elsewhere", "pid": 2**22 + 1}
    recorder.write()
    run = dx.Run.load(tmp_path)
    assert (run.status, run.reason) == ("running", "on elsewhere: whether it still runs cannot be seen from here")


def test_a_record_says_what_was_trained_on_and_what_came_of_it(tmp_path):
    first, again, other = (
        dx.train(SHORT.override({"seed": seed}), out=tmp_path / name) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    a, b, c = (json.loads((run.folder / "environment.json").read_text()) for run in (first, again, other))
    assert {name: part["samples"] for name, part in a["split"].items()} == {
        "train": 400,
        "validation": 100,
        "test": 100,
    }
    assert a["split"] == b["split"]  # spirals are drawn from the seed
    assert not [name for name in a["split"] if a["split"][name]["sha256"] == c["split"][name]["sha256"]]
    assert a["device"] == "cpu"
    weights = [json.loads((run.folder / "result.json").read_text())["weights"] for run in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path):
    dx.train(SHORT, out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    with pytest.raises(dx.DxdyError, match="already holds a run"):
        dx.train(SHORT.override({"seed": 1}), out=tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")} == before


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


def full(*arguments):
    raise OSError(28, "No space left on device")


def fill_disk_at(monkeypatch, step):
    """Let every write of a result fail from a step of the reference loop on."""
    steps, train_step = iter(range(1000)), loop.train_step

    def watched(*arguments):
        if next(steps) == step:
            monkeypatch.setattr(record, "write_json", full)
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", watched)


def test_a_disk_that_fills_up_costs_one_message_and_no_trained_model(tmp_path, monkeypatch):
    fill_disk_at(monkeypatch, 3)
    with pytest.warns(RuntimeWarning, match=r"result\.json: No space left on device\. The run goes on") as said:
        run = dx.train(SHORT.override({"max_steps": 14}), out=tmp_path / "run")
    assert len(said) == 1
    assert (run.status, len(run.steps), len(run.validation)) == ("completed", 14, 2)
    assert run.model is not None
    assert "test_accuracy" in run.metrics


def test_the_status_is_stored_where_the_metrics_do_not_fit(tmp_path, monkeypatch):
    write_json = record.write_json

    def nearly_full(path, value):
        if value.get("validation"):
            full()
        write_json(path, value)

    monkeypatch.setattr(record, "write_json", nearly_full)
    with pytest.warns(RuntimeWarning, match="its newest metrics are not stored"):
        dx.train(SHORT, out=tmp_path / "run")
    run = dx.Run.load(tmp_path / "run")
    assert (run.status, run.metrics, len(run.steps)) == ("completed", {}, 6)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "trace.bin"])
def test_a_disk_that_is_full_at_the_start_is_told_before_training(tmp_path, monkeypatch, name):
    fail_at(monkeypatch, 0, AssertionError("training began"))
    write_text = record.write_text
    monkeypatch.setattr(
        record, "write_text", lambda path, text: (full if path.name == name else write_text)(path, text)
    )
    if name != "environment.json":
        monkeypatch.setattr(*{"config.yaml": (Path, "write_text"), "trace.bin": (os, "open")}[name], full)
    with pytest.raises(dx.DxdyError, match=r"cannot be written \(No space left on device\)"):
        dx.train(SHORT, out=tmp_path / "run")
    monkeypatch.undo()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_a_disk_without_room_for_the_first_word_leaves_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_json", full)
    with pytest.raises(dx.DxdyError, match="cannot be written"):
        dx.train(SHORT, out=tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("room", [4, 40])
def test_a_text_that_does_not_fit_leaves_the_old_one(tmp_path, room):
    path = tmp_path / "x.json"
    write_json(path, {"status": "running"})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError):
            write_json(path, {"status": "running", "more": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_vanishes_costs_no_trained_model(tmp_path, monkeypatch):
    train_step = loop.train_step

    def vanish(*arguments):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", vanish)
    with pytest.warns(RuntimeWarning) as said:
        run = dx.train(SHORT, out=tmp_path / "run")
    for name in ("result.json", "checkpoints"):
        assert any(f"{name}: No such file or directory" in str(warning.message) for warning in said)
    assert run.status == "completed"
    assert "test_accuracy" in run.metrics


def test_a_run_is_recorded_where_it_began_wherever_the_loop_goes(here, monkeypatch):
    (here / "elsewhere").mkdir()
    train_step = loop.train_step

    def wander(*arguments):
        os.chdir(here / "elsewhere")
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", wander)
    dx.train(SHORT, out="run")
    assert (dx.Run.load(here / "run").status, len(dx.Run.load(here / "run").steps)) == ("completed", 6)
    assert list((here / "elsewhere").iterdir()) == []


def test_ctrl_c_before_the_first_step_is_recorded_too(tmp_path, monkeypatch):
    def interrupt(*arguments, **facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "write_environment", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dx.train(SHORT, out=tmp_path / "run")
    assert dx.Run.load(tmp_path / "run").status == "interrupted"


def test_a_second_ctrl_c_does_not_leave_a_run_that_says_it_is_running(tmp_path, monkeypatch):
    fail_at(monkeypatch, 4, KeyboardInterrupt())
    fsync, interrupts = os.fsync, []

    def impatient(file):
        if '"status": "interrupted"' in Path(f"/proc/self/fd/{file}").read_text() and not interrupts:
            interrupts.append(1)
            raise KeyboardInterrupt
        fsync(file)

    monkeypatch.setattr(os, "fsync", impatient)
    with pytest.raises(KeyboardInterrupt):
        dx.train(SHORT, out=tmp_path / "run")
    assert interrupts
    assert dx.Run.load(tmp_path / "run").status == "interrupted"
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", record.FILES)
def test_no_file_that_is_there_is_overwritten(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(dx.DxdyError, match=f"^{tmp_path}: already holds a run \\({name}\\)"):
        dx.train(SHORT, out=tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_of_two_runs_that_want_one_folder_at_once_one_gets_it(tmp_path):
    assert new_folder("x", tmp_path) == new_folder("x", tmp_path)
    Recorder(tmp_path, kind="training")
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(dx.DxdyError, match="already holds a run"):
        Recorder(tmp_path, kind="lesson")
    assert (tmp_path / "result.json").read_bytes() == before


@pytest.mark.parametrize("name", ["x\0y", "x" * 300])
def test_a_name_that_no_folder_can_have_is_refused(here, name):
    with pytest.raises(dx.DxdyError, match="cannot be written"):
        dx.train(SHORT, out=name)


def test_what_is_no_configuration_is_refused(here):
    with pytest.raises(dx.DxdyError, match=r"train: expected a dx\.RunConfig as config, got dict"):
        dx.train({"lr": 0.1})
    assert list(here.iterdir()) == []


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


def test_a_result_that_cannot_be_stored_does_not_end_the_lesson(tmp_path, monkeypatch):
    monkeypatch.setenv(LESSON_FOLDER, str(tmp_path / "gone"))
    with pytest.warns(RuntimeWarning, match=r"The lesson goes on; not stored: accuracy, steps\."):
        dx.result(accuracy=0.5, steps=3)
    Recorder(tmp_path, kind="lesson")
    monkeypatch.setenv(LESSON_FOLDER, str(tmp_path))
    monkeypatch.setattr(record, "write_json", full)
    with pytest.warns(RuntimeWarning, match=r"No space left on device\. The lesson goes on"):
        dx.result(accuracy=0.5)


def test_the_record_of_a_lesson_is_not_taken_for_a_training_run(tmp_path):
    Recorder(tmp_path, kind="lesson", lesson="02_hand_check")
    with pytest.raises(dx.DxdyError, match="holds a lesson, no training run"):
        dx.Run.load(tmp_path)


DAMAGED = [
    '{"status": "done"}',
    '{"status": ["completed"]}',
    '{"status": "completed", "metrics": 3}',
    '{"status": "completed", "validation": [3]}',
    '{"status": "completed", "validation": 3}',
    '{"status": "running", "process": 3}',
    json.dumps({"status": "running", "process": {"host": socket.gethostname(), "pid": math.inf, "started": 0}}),
    "[" * 100_000,
]


@pytest.mark.parametrize(
    "content", [None, "", "[]", "3", '"text"', "{}", '{"status": "running"}', "{", b"\xff", *DAMAGED]
)
def test_what_is_no_run_is_refused_with_its_path(tmp_path, content):
    if content is not None:
        (tmp_path / "result.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(dx.DxdyError, match=f"^{tmp_path}/result.json: "):
        dx.Run.load(tmp_path)


def test_a_run_whose_configuration_is_gone_is_refused_with_its_path(tmp_path):
    Recorder(tmp_path)
    with pytest.raises(dx.DxdyError, match=f"^{tmp_path}/config.yaml: "):
        dx.Run.load(tmp_path)
