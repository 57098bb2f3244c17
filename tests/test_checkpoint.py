"""A run that was stopped goes on bit for bit; a checkpoint that is damaged is told and never used."""

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import stress
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.training import checkpoint, datasets, loop, models, parts, resume

# 7 batches an epoch: checkpoints at 5, 7 (an epoch's end), 10, 14.
BASE = dx.RunConfig(data="spirals", model="mlp", epochs=3, max_steps=17, checkpoint_every=5)
DEAD = 13  # the step at which a run is stopped: in the middle of an epoch, three steps behind its last checkpoint


def weights(model):
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


class Random(nn.Module):
    """Dropout, which draws from torch's generator, and BatchNorm, which has buffers."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), norm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        return self.body(x)


def stop_at(monkeypatch, step):
    """Let the reference loop meet an exception in place of a step; returns what undoes it."""
    originals, steps = (loop.train_step, loop.window_step), iter(range(1000))

    def faulty(original):
        def inner(*arguments):
            if next(steps) == step:
                raise RuntimeError("stopped")
            return original(*arguments)

        return inner

    for original in originals:
        monkeypatch.setattr(loop, original.__name__, faulty(original))
    return lambda: [monkeypatch.setattr(loop, one.__name__, one) for one in originals]


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Return a function that trains until an exception stops it, and gives the run's folder."""

    def run(config=BASE, step=DEAD):
        undo = stop_at(monkeypatch, step)
        with pytest.raises(RuntimeError, match="stopped"):
            dx.train(config, out=tmp_path / "run")
        undo()
        return tmp_path / "run"

    return run


def same(resumed, whole):
    """Compare all that two runs are and recorded, but times and memory."""
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert (resumed.status, resumed.metrics, resumed.validation_rows) == (
        whole.status,
        whole.metrics,
        whole.validation_rows,
    )
    columns = ["loss", "lr", "grad_norm", "effective_batch", "skipped", "bad_samples"]
    assert resumed.steps[columns].equals(whole.steps[columns])
    assert resumed.gradients.equals(whole.gradients)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_workers": 2},
        {"optimizer": "adamw", "schedule": "one_cycle", "accumulation_steps": 2, "max_steps": 9, "checkpoint_every": 3},
        {"optimizer": "muon", "lr": 0.01, "max_grad_norm": 0.1, "warmup_steps": 4},
        {"precision": "fp16", "schedule": "linear"},
        {"precision": "bf16", "optimizer": "adam"},
    ],
    ids=str,
)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch, stopped, changes):
    config = BASE.override(changes)
    # Muon moves a matrix between two others; the precision is tried on one sample, which BatchNorm refuses.
    net = (lambda: models.MLP(2, 3)) if config.optimizer == "muon" else Random
    net = net if config.precision == "fp32" else lambda: Random(nn.LayerNorm)
    monkeypatch.setattr(models, "build", lambda name, sample, classes: net())
    whole = dx.train(config, out=tmp_path / "whole")
    folder = stopped(config, 7 if config.accumulation_steps > 1 else DEAD)
    resumed = dx.train(config, out=folder, resume=True)
    same(resumed, whole)
    (once,) = json.loads((folder / "result.json").read_text())["resumed"]
    assert (once["after"], once["changes"]) == ("failed", {})
    assert 0 < once["step"] < len(whole.steps)


def test_the_scale_of_fp16_goes_on_where_it_was(tmp_path, monkeypatch, stopped):
    def large(name, model, x):
        return torch.float16, torch.amp.GradScaler("cpu", init_scale=2.0**24)

    monkeypatch.setattr(parts, "pick_precision", large)
    config = BASE.override({"precision": "fp16", "lr": 0.01})
    whole = dx.train(config, out=tmp_path / "whole")
    assert 2 <= whole.steps["skipped"].sum() <= 8  # the scale fell before the checkpoint
    same(dx.train(config, out=stopped(config), resume=True), whole)
    last = checkpoint.newest(tmp_path / "run" / checkpoint.FOLDER)
    assert 1 <= last.scaler["scale"] < 2.0**24


def test_workers_change_no_number(tmp_path):
    alone, helped = (dx.train(BASE.override({"num_workers": n}), out=tmp_path / str(n)) for n in (0, 2))
    same(helped, alone)


def test_workers_fetch_the_batches(monkeypatch):
    def note(self, index):
        return datasets.Batch(self.x[index], self.y[index], torch.tensor(os.getpid()))

    monkeypatch.setattr(datasets.Samples, "__getitem__", note)
    for count in (0, 2):
        loader = datasets.loader(datasets.spirals().train, 64, shuffle_seed=0, num_workers=count)
        fetched = {int(batch.ids[0]) for batch in loader}
        assert len(fetched - {os.getpid()}) == count


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes({"flipped": data, "truncated": data[:-1], "half": data[: len(data) // 2], "empty": b""}[how])


@pytest.mark.parametrize(
    ("how", "said"),
    [("flipped", "is damaged"), ("truncated", "is truncated"), ("half", "is truncated"), ("empty", "is empty")],
)
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(tmp_path, stopped, how, said):
    folder = stopped()
    last = folder / checkpoint.FOLDER / "step-00000010.pt"
    damage(last, how)
    with pytest.warns(RuntimeWarning, match=f"^{last}: {said}"):
        resumed = dx.train(BASE, out=folder, resume=True)
    same(resumed, dx.train(BASE, out=tmp_path / "whole"))


def sealed(path, data):
    """Write a file whose checksum is right."""
    path.write_bytes(data)
    checkpoint._sum_of(path).write_text(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")


def saved(value):
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


OTHERS = {
    "no text of torch's": lambda state: b"hello world" * 10,
    "half a zip": lambda state: saved(state)[:5000],
    "the head of a zip": lambda state: b"PK\x03\x04" + b"0" * 100,
    "a tensor": lambda state: saved(torch.ones(3)),
    "no model": lambda state: saved(state | {"model": None}),
    "numbers for weights": lambda state: saved(state | {"model": dict.fromkeys(state["model"], 1)}),
    "no optimizer": lambda state: saved(state | {"optimizer": None}),
    "another step than its name": lambda state: saved(state | {"step": 3}),
    "a step before the first": lambda state: saved(state | {"step": -3}),
    "a validation without a loss": lambda state: saved(state | {"validation": [{"step": 7}]}),
    "another run": lambda state: saved(state | {"config": state["config"] | {"seed": 99}}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_that_is_whole_and_no_checkpoint_of_this_run_is_told(stopped, kind):
    folder = stopped() / checkpoint.FOLDER
    last = folder / "step-00000010.pt"
    sealed(last, OTHERS[kind](torch.load(last, weights_only=True)))
    said = r"is of another run \(seed 99\)" if kind == "another run" else "is no checkpoint of this version"
    with pytest.warns(RuntimeWarning, match=f"^{last}: {said}"):
        assert resume.start(BASE, folder.parent, True, False).step == 7


@pytest.mark.parametrize("part", ["optimizer", "schedule", "random"])
def test_a_state_that_does_not_fit_is_named_and_the_record_stays(stopped, part):
    folder = stopped()
    last = folder / checkpoint.FOLDER / "step-00000010.pt"
    state = torch.load(last, weights_only=True)
    sealed(last, saved(state | {part: type(state[part])()}))
    before = (folder / "trace.bin").read_bytes()
    with pytest.raises(dx.DxdyError, match=r"^resume: the checkpoint of step 10 does not fit .* Remove it"):
        dx.train(BASE, out=folder, resume=True)
    assert (folder / "trace.bin").read_bytes() == before
    last.unlink()
    assert dx.train(BASE, out=folder, resume=True).status == "completed"


@pytest.mark.parametrize("text", ["", "[]", '{"status": "killed", "kind": "training", "resumed": 3}'])
def test_a_damaged_result_says_how_its_run_goes_on(stopped, text):
    folder = stopped()
    (folder / "result.json").write_text(text)
    with pytest.raises(dx.DxdyError, match=r"result\.json: is no run's result.* move it away"):
        dx.train(BASE, out=folder, resume=True)
    (folder / "result.json").unlink()
    assert dx.train(BASE, out=folder, resume=True).status == "completed"


def test_a_result_without_the_seconds_of_its_validations_is_gone_on_from(stopped):
    folder = stopped()
    result = json.loads((folder / "result.json").read_text()) | {"validation_seconds": None}
    (folder / "result.json").write_text(json.dumps(result))
    assert dx.train(BASE, out=folder, resume=True).status == "completed"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("trace.json", lambda data: data[:50], "does not describe a trace"),
        ("trace.bin", lambda data: b"\0" + data[1:], "does not begin as a trace does"),
        (
            "trace.bin",
            lambda data: data[: len(data) // 4] + b"\7" + data[len(data) // 4 + 1 :],
            "damaged behind step 2",
        ),
        ("trace.json", None, "is missing"),
    ],
)
def test_a_damaged_trace_says_how_its_run_goes_on_and_is_not_lost(stopped, name, change, said):
    folder = stopped()
    path = folder / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    before = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
    with pytest.raises(dx.DxdyError, match=said) as raised:
        dx.train(BASE, out=folder, resume=True)
    assert {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()} == before
    subprocess.run(str(raised.value).splitlines()[-1], shell=True, check=True)  # the command that it names
    resumed = dx.train(BASE, out=folder, resume=True)
    assert resumed.status == "completed" and [*resumed.steps.index] == [*range(10, 17)]
    kept = {one.name: one.read_bytes() for one in (folder / "damaged-trace").iterdir()}
    assert kept == {one: data for one, data in before.items() if one.startswith("trace.")}


def test_a_trace_that_is_damaged_behind_the_checkpoint_is_cut_there(stopped):
    folder = stopped()
    data = bytearray((folder / "trace.bin").read_bytes())
    data[-20] ^= 1
    (folder / "trace.bin").write_bytes(data)
    with pytest.warns(RuntimeWarning, match="can be trusted"):
        assert [*dx.train(BASE, out=folder, resume=True).steps.index] == [*range(17)]


def test_a_trace_that_ends_before_the_checkpoint_says_which_steps_are_lost(stopped):
    folder = stopped()
    data = (folder / "trace.bin").read_bytes()
    (folder / "trace.bin").write_bytes(data[: len(data) // 2])
    with pytest.warns(RuntimeWarning, match=r"trace\.bin: ends too early\. The record of steps \d+ to 9 is lost"):
        resumed = dx.train(BASE, out=folder, resume=True)
    assert resumed.status == "completed" and [*resumed.steps.index[-7:]] == [*range(10, 17)]


def test_new_checkpoints_are_kept_beside_later_ones_that_are_damaged(stopped):
    folder = stopped() / checkpoint.FOLDER
    state = checkpoint.newest(folder)
    for step in (98, 99):
        damaged = folder / f"step-{step:08d}.pt"
        damaged.write_bytes(b"")
        checkpoint._sum_of(damaged).write_text("")
    for step in (11, 12, 13):
        checkpoint.write(folder, replace(state, step=step))
    assert [path.name[11:13] for path in sorted(folder.glob("*.pt"))] == ["07", "12", "13", "98", "99"]  # 7 is the best
    with pytest.warns(RuntimeWarning, match="is empty"):
        assert checkpoint.newest(folder).step == 13


FULL = """
import resource, signal, sys
import dxdy_nb as dx
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))  # a checksum has room, and a checkpoint has not
dx.train(dx.RunConfig(data="spirals", model="mlp", max_steps=6, checkpoint_every=2), out=sys.argv[1])
"""


def test_where_no_checkpoint_has_room_no_checksum_is_left(tmp_path):
    command = [sys.executable, "-c", FULL, tmp_path / "run"]
    # Elsewhere: a run keeps the uncommitted changes of the folder that it starts in, which may have no room either.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0
    assert "Training goes on, without a new checkpoint" in done.stderr
    assert list((tmp_path / "run" / checkpoint.FOLDER).iterdir()) == []


def test_without_its_sha256_a_checkpoint_is_not_trusted(stopped):
    folder = stopped() / checkpoint.FOLDER
    (folder / "step-00000010.pt.sha256").unlink()
    with pytest.warns(RuntimeWarning, match=r"step-00000010\.pt\.sha256: cannot be read \(No such file"):
        assert checkpoint.newest(folder).step == 7


def test_where_all_are_damaged_nothing_starts_anew(stopped):
    folder = stopped()
    before = (folder / "result.json").read_bytes()
    for path in (folder / checkpoint.FOLDER).glob("*.pt"):
        damage(path, "empty")
    with pytest.warns(RuntimeWarning), pytest.raises(dx.DxdyError, match="none of its 2 checkpoints can be used"):
        dx.train(BASE, out=folder, resume=True)
    assert (folder / "result.json").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused_and_the_names_listed(monkeypatch, stopped):
    folder = stopped()
    before = (folder / "result.json").read_bytes()
    monkeypatch.setattr(models, "build", lambda name, sample, classes: Random())
    with pytest.raises(dx.DxdyError, match=r"missing: body.0.weight, body.*; unexpected: fc1.weight, fc1.bias, fc2"):
        dx.train(BASE, out=folder, resume=True)
    monkeypatch.setattr(models, "build", lambda name, sample, classes: models.MLP(2, 3, hidden=5))
    with pytest.raises(dx.DxdyError, match=r"of another shape: fc1.weight \(64, 2\), here \(5, 2\)"):
        dx.train(BASE, out=folder, resume=True)
    assert (folder / "result.json").read_bytes() == before


def test_another_configuration_is_refused_with_the_difference(stopped):
    folder = stopped()
    other = BASE.override({"lr": 0.5, "schedule": "linear"})
    with pytest.raises(dx.DxdyError, match=r"\nlr: 0.05 there, 0.5 here\nschedule: 'cosine' .*\n.*allow_changes=True"):
        dx.train(other, out=folder, resume=True)
    smaller = BASE.override({"batch_size": 32})
    with pytest.raises(dx.DxdyError, match=r"\nbatch_size: 64 there, 32 here\n.*batch_size cannot change within a run"):
        dx.train(smaller, out=folder, resume=True, allow_changes=True)
    assert dx.Run.load(folder).status == "failed"


def test_a_change_that_is_asked_for_takes_effect_at_the_checkpoint(stopped):
    folder = stopped()
    changes = {"lr": 0.5, "momentum": 0.1, "schedule": "constant", "epochs": 4, "max_steps": 25, "precision": "bf16"}
    run = dx.train(BASE.override(changes), out=folder, resume=True, allow_changes=True)
    assert run.config == dx.Run.load(folder).config == BASE.override(changes)
    assert run.steps.index.tolist() == list(range(25))
    assert run.steps["lr"][10:].tolist() == [0.5] * 15
    assert run.steps["lr"][9] < 0.05
    assert json.loads((folder / "result.json").read_text())["resumed"][0]["changes"]["lr"] == [0.05, 0.5]


def test_a_run_without_a_checkpoint_starts_anew_in_its_folder(tmp_path, stopped):
    config = BASE.override({"checkpoint_every": None})
    folder = stopped(config)
    assert not (folder / checkpoint.FOLDER).exists()
    same(dx.train(config, out=folder, resume=True), dx.train(config, out=tmp_path / "whole"))


def test_a_process_may_die_anywhere_between_two_files(tmp_path, stopped):
    folder = stopped()
    (folder / "result.json").unlink()  # while it takes the folder over
    for left in (".result.json.123", "checkpoints/.step-00000010.pt.123", "checkpoints/step-00000015.pt.sha256"):
        (folder / left).write_text("half of someth")
    whole = dx.train(BASE, out=tmp_path / "whole")
    same(dx.train(BASE, out=folder, resume=True), whole)
    assert not list(folder.rglob(".*"))


def test_in_an_empty_folder_resume_is_a_new_run(tmp_path):
    run = dx.train(BASE, out=tmp_path / "new", resume=True)
    assert (run.status, len(run.steps)) == ("completed", 17)
    assert "resumed" not in json.loads((tmp_path / "new" / "result.json").read_text())


def test_a_completed_run_is_returned_as_it_is(tmp_path):
    run = dx.train(BASE, out=tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    again = dx.train(BASE, out=run.folder, resume=True)
    assert again == run
    assert torch.equal(weights(again.model), weights(run.model))
    assert before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}


def test_a_completed_run_whose_last_checkpoint_is_damaged_gets_its_last_weights_again(tmp_path):
    run = dx.train(BASE, out=tmp_path / "run")
    damage(run.folder / checkpoint.FOLDER / "step-00000017.pt", "flipped")
    with pytest.warns(RuntimeWarning, match=r"step-00000017\.pt: is damaged"):
        again = dx.train(BASE, out=run.folder, resume=True)
    same(again, run)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "trace.bin").write_bytes(b"x")
    with pytest.raises(dx.DxdyError, match=r"already holds a run \(trace.bin\)"):
        dx.train(BASE, out=tmp_path, resume=True)
    with pytest.raises(dx.DxdyError, match="resume=True needs the folder"):
        dx.train(BASE, resume=True)


def test_a_run_that_still_goes_on_is_not_resumed(tmp_path, monkeypatch):
    met = []

    def again(*arguments):
        if not met:
            met.append(True)
            with pytest.raises(dx.DxdyError, match=f"process {os.getpid()} on .* still trains there"):
                dx.train(BASE, out=tmp_path / "run", resume=True)
        return original(*arguments)

    original = loop.train_step
    monkeypatch.setattr(loop, "train_step", again)
    assert dx.train(BASE, out=tmp_path / "run").status == "completed"
    assert met


def test_a_full_disk_costs_a_checkpoint_and_no_run(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.warns(RuntimeWarning, match="checkpoints: No space left on device. Training goes on, without a new"):
        run = dx.train(BASE, out=tmp_path / "run")
    assert (run.status, len(run.steps)) == ("completed", 17)


def test_the_best_is_kept_beside_the_last_two(tmp_path, monkeypatch):
    losses = iter([0.9, 0.1, 0.5, 0.4, 0.3])
    monkeypatch.setattr(loop, "evaluate", lambda *arguments: {"loss": next(losses), "accuracy": 0.5})
    run = dx.train(BASE.override({"max_steps": 21, "checkpoint_every": 3}), out=tmp_path / "run")
    names = sorted(path.name for path in (run.folder / checkpoint.FOLDER).iterdir())
    steps = [14, 18, 21]
    assert names == [f"step-{step:08d}.pt{end}" for step in steps for end in ("", ".sha256")]
    state = checkpoint.newest(run.folder / checkpoint.FOLDER)
    assert (state.step, state.epoch, state.windows, state.best["step"]) == (21, 3, 0, 14)
    assert state.config == run.config.to_dict()
    assert state.code["torch"] == torch.__version__


@pytest.mark.parametrize(("name", "status"), [("SIGINT", "interrupted"), ("SIGTERM", "killed")])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, monkeypatch, name, status):
    def step(*arguments):
        if next(steps) == 11:
            os.kill(os.getpid(), signal.Signals[name])
        return original(*arguments)

    config = BASE.override({"checkpoint_every": None})
    before = signal.signal(signal.Signals[name], signal.default_int_handler)
    try:
        original, steps = loop.train_step, iter(range(100))
        monkeypatch.setattr(loop, "train_step", step)
        with pytest.raises(KeyboardInterrupt):  # it comes through, when all is saved
            dx.train(config, out=tmp_path / "run")
        assert signal.getsignal(signal.Signals[name]) is signal.default_int_handler
    finally:
        signal.signal(signal.Signals[name], before)
    monkeypatch.undo()
    run = dx.Run.load(tmp_path / "run")
    assert (run.status, run.reason) == (status, f"{name} after step 11")
    assert run.steps.index.tolist() == list(range(12))
    same(dx.train(config, out=run.folder, resume=True), dx.train(config, out=tmp_path / "whole"))
    (once,) = json.loads((run.folder / "result.json").read_text())["resumed"]
    assert once == {"step": 12, "after": status, "changes": {}}


def test_a_second_signal_comes_through_at_once(tmp_path, monkeypatch):
    def impatient(*arguments):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step went on")

    monkeypatch.setattr(loop, "train_step", impatient)
    with pytest.raises(KeyboardInterrupt):
        dx.train(BASE, out=tmp_path / "run")
    assert dx.Run.load(tmp_path / "run").status == "interrupted"


@pytest.mark.filterwarnings("ignore:launch. 3 ranks share 2 cores")
@pytest.mark.parametrize(
    ("world_size", "num_workers"),
    [(2, 0), pytest.param(3, 2, marks=pytest.mark.slow)],  # three ranks' sums have an order
)
def test_ranks_go_on_bit_for_bit(tmp_path, capsys, world_size, num_workers):
    values = {"world_size": world_size, "batch_size": 66 // world_size, "num_workers": num_workers}
    config = BASE.override(values | {"schedule": "constant", "optimizer": "adam", "max_steps": 13, "validate_every": 9})
    whole = dx.train(config, out=tmp_path / "whole")
    short = dx.train(config.override({"max_steps": 9}), out=tmp_path / "run")
    resumed = dx.train(config, out=short.folder, resume=True, allow_changes=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.steps["loss"].tolist() == whole.steps["loss"].tolist()
    assert resumed.metrics == whole.metrics
    assert set(dx.verify_ranks(resumed)["verdict"][["gradients", "parameters", "updates"]]) == {"equal"}
    assert len(checkpoint.newest(short.folder / checkpoint.FOLDER).random) == world_size
    assert dx.train(config, out=short.folder, resume=True) == resumed
    wider = config.override({"world_size": 4})
    with pytest.raises(dx.DxdyError, match="world_size cannot change within a run"):
        dx.train(wider, out=short.folder, resume=True, allow_changes=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alone", "workers", "ranks"])
def test_a_killed_run_goes_on_bit_for_bit(kind):
    assert stress.kill_runs(kind, 2, random.Random(0)) is None


def test_other_code_is_told(monkeypatch, stopped):
    folder = stopped()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.warns(
        RuntimeWarning, match=f"made with threads {threads}, now 3. The run may go on with other numbers"
    ):
        assert dx.train(BASE, out=folder, resume=True).status == "completed"


def test_a_run_cannot_go_on_to_an_end_that_lies_behind_it(tmp_path):
    run = dx.train(dx.RunConfig(max_steps=4), out=tmp_path / "run")
    before = (run.folder / "result.json").read_bytes()
    with pytest.raises(dx.DxdyError, match="the last checkpoint is of step 4, and this configuration ends at step 2"):
        dx.train(dx.RunConfig(max_steps=2), out=run.folder, resume=True, allow_changes=True)
    assert (run.folder / "result.json").read_bytes() == before  # nothing recorded is lost
    assert dx.Run.load(run.folder).config.max_steps == 4
