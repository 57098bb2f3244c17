"""What led to a step that went wrong is kept, and the step can be executed again, bit for bit."""

import collections
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import box_loop
import numpy as np
import pytest
import torch
from torch import nn

from dxdy_nb import DxdyError
from dxdy_nb.observe import blackbox
from dxdy_nb.observe.blackbox import BlackBox, Replay, Spikes
from dxdy_nb.observe.snapshot import RandomStates, put_random


@pytest.fixture
def snapshots(monkeypatch):
    """Return a function that sets how often there is time for a snapshot, and for copies of batches."""

    def set_period(period, copies=True):
        calls = collections.Counter()

        def allows(purse):
            calls[purse] += 1
            return copies if purse is copying[0] else (calls[purse] - 1) % period == 0

        copying = [None]
        original = BlackBox.__init__

        def begin(box, *args, **named):
            original(box, *args, **named)
            copying[0] = box._copies

        monkeypatch.setattr(BlackBox, "__init__", begin)
        monkeypatch.setattr(blackbox._Purse, "allows", allows)

    return set_period


NEVER_AGAIN = 10**9


@pytest.mark.parametrize("period", [NEVER_AGAIN, 17, 1])
@pytest.mark.parametrize("amp", [False, True])
def test_a_planted_nan_is_replayed_bit_for_bit(tmp_path, snapshots, period, amp):
    snapshots(period)
    box = BlackBox(tmp_path)
    losses, _ = box_loop.train(box, amp=amp)
    (incident,) = box.incidents
    assert (incident.kind, incident.path) == ("nonfinite", tmp_path / "blackbox/nonfinite.pt")
    assert not math.isfinite(losses[incident.step])
    assert all(map(math.isfinite, losses[: incident.step]))
    assert incident.step > 40
    replay, steps = box_loop.replayed(tmp_path, amp=amp)
    first = {NEVER_AGAIN: 0, 17: 34, 1: incident.step}[period]
    assert (replay.first_step, replay.last_step) == (first, incident.step)
    assert steps == incident.step - first + 1
    assert replay.verdict.same
    assert replay.verdict.sentence.startswith(f"It went as before: the loss of step {incident.step} is nan.")


def test_a_process_of_its_own_replays_the_same(tmp_path, snapshots):
    snapshots(17)
    box_loop.train(BlackBox(tmp_path))
    command = [sys.executable, box_loop.__file__, tmp_path]
    seen = subprocess.run(command, capture_output=True, text=True, check=True)
    assert seen.stdout.startswith("True 17 It went as before: ")


def changed(folder, change):
    path = folder / "blackbox/nonfinite.pt"
    record = torch.load(path, weights_only=True)
    change(record)
    torch.save(record, path)


def spoil_batch(record):
    record["fetches"][5]["batch"][0][0, 0] += 1e-3


def spoil_weights(record):
    record["state"]["models"]["model"]["parameters"]["0.weight"][0, 0] += 1e-3


def spoil_moments(record):
    record["state"]["optimizers"]["optimizer"]["state"][0][0]["exp_avg"] *= 1.001


def spoil_rate(record):
    record["steps"][3]["groups"]["optimizer"][0]["lr"] *= 1.001


def spoil_betas(record):
    record["steps"][3]["groups"]["optimizer"][0]["betas"] = (0.5, 0.999)


def spoil_dropout(record):
    record["fetches"][5]["random"]["torch"] = record["fetches"][4]["random"]["torch"]


@pytest.mark.parametrize("change", [spoil_batch, spoil_weights, spoil_moments, spoil_rate, spoil_betas, spoil_dropout])
def test_a_replay_that_goes_otherwise_says_so(tmp_path, snapshots, change):
    snapshots(17)
    box_loop.train(BlackBox(tmp_path))
    changed(tmp_path, change)
    replay, _ = box_loop.replayed(tmp_path)
    assert not replay.verdict.same
    assert "It went otherwise: step 3" in replay.verdict.sentence
    assert "what the loop counts or draws for itself is not restored" in replay.verdict.sentence


def test_the_box_changes_nothing(tmp_path):
    bare, model = box_loop.train(steps=20)
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    watched, other = box_loop.train(BlackBox(tmp_path), steps=20)
    assert watched == bare
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert not (tmp_path / "blackbox").exists()


def test_batches_of_worker_processes_are_copied_out_of_shared_memory(tmp_path, snapshots):
    snapshots(NEVER_AGAIN)
    box = BlackBox(tmp_path)
    box_loop.train(box, steps=4, workers=1)
    assert len(box._fetches) == 8
    assert not any(tensor.is_shared() for fetch in box._fetches for tensor in fetch.batch)
    box.save(tmp_path)
    replay, steps = box_loop.replayed(tmp_path, workers=1)
    assert (steps, replay.verdict.same) == (4, True)


def test_where_copies_take_too_long_the_step_alone_is_replayed(tmp_path, snapshots):
    snapshots(NEVER_AGAIN, copies=False)
    box = BlackBox(tmp_path)
    box_loop.train(box, workers=1)
    assert len(box._fetches) == 0  # closed
    replay, steps = box_loop.replayed(tmp_path, workers=1)
    assert (steps, replay.first_step, replay.verdict.same) == (1, replay.last_step, True)


def test_an_exception_is_replayed(tmp_path, snapshots):
    snapshots(17)
    box = BlackBox(tmp_path)
    with pytest.raises(box_loop.Stop) as caught:
        box_loop.train(box, raises_at=23)
    box.failed(23, caught.value)
    assert box.incidents[0].sentence == "Stop: as told"
    replay, _ = box_loop.replayed(tmp_path, raises_at=23 - 17)
    assert (replay.kind, replay.first_step, replay.last_step, replay.verdict.same) == ("exception", 17, 23, True)
    for otherwise, text in ((3, "ended in step 20, by Stop"), (None, "ended by Stop: as told, and by no error now")):
        replay, _ = box_loop.replayed(tmp_path, raises_at=otherwise)
        assert not replay.verdict.same
        assert text in replay.verdict.sentence


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0)])
def test_an_interrupt_is_no_incident(tmp_path, error):
    box = BlackBox(tmp_path)
    box_loop.train(box, steps=3)
    box.failed(2, error)
    assert box.incidents == ()


def test_an_exception_outside_of_a_step_is_no_incident(tmp_path):
    box = BlackBox(tmp_path)
    box_loop.train(box, steps=3)
    box.failed(3, ValueError("no step of this number has begun"))
    assert box.incidents == ()


# One weight, one optimizer, batches of one number: what follows is checked by hand.


class Loop:
    """A loop of single calls."""

    def __init__(self, box, scaled=False):
        self.box = box
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        self.objects = {"model": self.model}, {"optimizer": self.optimizer}, {"scaler": self.scaler}

    def step(self, step, batch, loss=1.0, norm=1.0, nonfinite=False):
        self.box.batch(step, batch)
        self.box.forward(step, *self.objects)
        self.box.ended(step, loss, norm, nonfinite)
        with torch.no_grad():
            self.model.weight += 1


def kept(folder, kind="nonfinite"):
    return torch.load(folder / f"blackbox/{kind}.pt", weights_only=True)


def fail(loop, step, batch):
    loop.step(step, batch, loss=math.nan)
    return kept(loop.box.folder)


def test_what_is_written_are_the_batches_since_the_snapshot(tmp_path, snapshots):
    snapshots(3)
    loop = Loop(BlackBox(tmp_path))
    for step in range(5):
        loop.step(step, {"x": torch.tensor([float(step)]), "name": f"sample {step}"}, loss=10.0 + step, norm=step)
    record = fail(loop, 5, {"x": torch.tensor([5.0]), "name": "sample 5"})
    assert record["refused"] is None
    assert [fetch["batch"] for fetch in record["fetches"]] == [
        {"x": torch.tensor([float(step)]), "name": f"sample {step}"} for step in (3, 4, 5)
    ]
    assert [(step["step"], step["loss"], step["grad_norm"]) for step in record["steps"][:2]] == [(3, 13, 3), (4, 14, 4)]
    assert math.isnan(record["steps"][2]["loss"])
    weight = record["state"]["models"]["model"]["parameters"]["weight"]
    assert torch.equal(weight, loop.model.weight - 3)  # as it was when step 3 began


def test_weights_that_are_too_big_leave_the_step_alone(tmp_path):
    loop = Loop(BlackBox(tmp_path, memory=100_000))
    loop.model.register_buffer("big", torch.zeros(50_000))
    for step in range(3):
        loop.step(step, torch.zeros(1))
    assert loop.box._snapshot is None
    record = fail(loop, 3, torch.zeros(1))
    assert record["refused"] is None
    assert [step["step"] for step in record["steps"]] == [3]
    assert torch.equal(record["state"]["models"]["model"]["parameters"]["weight"], loop.model.weight - 1)


def test_where_the_weights_are_gone_too_the_record_says_why_there_is_no_replay(tmp_path):
    loop = Loop(BlackBox(tmp_path, memory=100_000))
    loop.model.register_buffer("big", torch.zeros(50_000))
    loop.step(0, torch.ones(2))
    loop.box.ended(0, math.nan, None, False)  # after the update
    record = kept(tmp_path)
    assert record["refused"] == "no snapshot: weights and optimizers take 0 MiB, of 0 MiB for all"
    assert [fetch["batch"].tolist() for fetch in record["fetches"]] == [[1, 1]]
    with pytest.raises(DxdyError, match=r"^replay: step 0 cannot be executed again: no snapshot"):
        Replay(tmp_path)


def test_memory_is_bounded(tmp_path, snapshots):
    snapshots(NEVER_AGAIN)
    box = BlackBox(tmp_path, memory=10 * 2**20)
    loop = Loop(box)
    for step in range(40):
        loop.step(step, torch.full((2**18,), float(step)))  # 1 MiB each
        held = sum(tensor.nbytes for fetch in box._fetches for tensor in blackbox.tensors(fetch.batch))
        assert held <= box.memory
        assert (len(box._fetches), len(box._steps)) == ((step + 1, step + 1) if step < 9 else (1, 1))
    record = fail(loop, 40, torch.zeros(1))
    assert record["refused"] is None
    assert [step["step"] for step in record["steps"]] == [40]


def test_a_step_with_more_batches_than_memory_says_so(tmp_path):
    box = BlackBox(tmp_path, memory=2**20)
    for _ in range(3):
        box.batch(0, torch.zeros(2**17))
    box.forward(0, *Loop(box).objects)
    box.ended(0, math.nan, None, False)
    assert kept(tmp_path)["refused"] == "the batches of one step take more than 1 MiB"


def test_a_view_takes_no_more_room_than_itself(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    fail(loop, 0, torch.zeros(10**6)[:3])
    assert (tmp_path / "blackbox/nonfinite.pt").stat().st_size < 10**5


def test_a_loop_that_changes_its_batches_has_them_copied(tmp_path, snapshots):
    snapshots(1)
    loop = Loop(BlackBox(tmp_path))
    for step in range(4):
        batch = torch.full((2,), float(step))
        loop.box.batch(step, [batch])
        loop.box.forward(step, *loop.objects)
        batch.mul_(10)
        loop.box.ended(step, math.nan if step == 3 else 1.0, 1.0, False)
    record = kept(tmp_path)
    assert record["refused"] is None
    assert [fetch["batch"][0].tolist() for fetch in record["fetches"]] == [[3.0, 3.0]]


def test_a_batch_that_was_changed_before_that_was_known_is_not_replayed(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    batch = torch.zeros(2)
    loop.box.batch(0, batch)
    loop.box.forward(0, *loop.objects)
    batch += 1
    loop.box.ended(0, math.nan, 1.0, False)
    assert kept(tmp_path)["refused"] == "the loop changed a batch after it was fetched"


@pytest.mark.parametrize("alias", ["tensor", "array"])
def test_a_loader_that_writes_over_its_last_batch_is_noticed(tmp_path, snapshots, alias):
    snapshots(1)
    loop = Loop(BlackBox(tmp_path))
    array = np.zeros(2)
    buffer = torch.from_numpy(array)
    for step in range(4):
        if alias == "tensor":
            buffer.fill_(step)
        else:
            array[:], buffer = step, torch.from_numpy(array)
        loop.step(step, buffer)
        if step == 2:
            loop.box._snapshots.allows = lambda: False
    array[:] = 4
    record = fail(loop, 4, torch.from_numpy(array))
    assert record["refused"] is None
    assert [fetch["batch"].tolist() for fetch in record["fetches"]] == [[2, 2], [3, 3], [4, 4]]


def test_the_same_batch_each_step_is_not_copied(tmp_path):
    loop, batch = Loop(BlackBox(tmp_path)), torch.zeros(2)
    for step in range(4):
        loop.step(step, batch)
    assert all(fetch.batch is batch for fetch in loop.box._fetches)


def test_a_batch_that_cannot_be_kept_is_named(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    record = fail(loop, 0, {"x": torch.zeros(1), "where": Path("x")})
    assert "batch['where']" in record["refused"]


def test_an_optimizer_that_cannot_be_kept_is_named(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    loop.optimizer.state[loop.model.weight]["history"] = collections.OrderedDict()
    assert "the state of 'optimizer'[0][0]['history']: a OrderedDict" in fail(loop, 0, torch.zeros(1))["refused"]


def test_a_scaler_that_skips_a_step_is_no_incident_until_it_does_nothing_else(tmp_path):
    loop = Loop(BlackBox(tmp_path), scaled=True)
    for step in range(blackbox.SKIPS - 1):
        loop.step(step, torch.zeros(1), nonfinite=True)
    loop.step(19, torch.zeros(1))
    for step in range(20, 20 + blackbox.SKIPS - 1):
        loop.step(step, torch.zeros(1), nonfinite=True)
    assert loop.box.incidents == ()
    loop.step(99, torch.zeros(1), nonfinite=True)
    assert [(found.kind, found.step) for found in loop.box.incidents] == [("nonfinite", 99)]


def test_a_gradient_that_is_not_finite_is_an_incident(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    loop.step(0, torch.zeros(1), nonfinite=True)
    assert loop.box.incidents[0].sentence == "a gradient of step 0 is not finite"


def test_the_limit_for_a_spike_is_seven_robust_deviations_above_the_median():
    losses = np.random.default_rng(0).normal(size=100)
    spikes = Spikes()
    assert [spikes.passed(loss) for loss in losses] == [None] * 100
    middle = np.median(losses)
    limit = middle + 7 * 1.4826 * np.median(np.abs(losses - middle))
    assert spikes.passed(limit - 1e-9) is None
    assert spikes.passed(limit + 1e-9) == pytest.approx(limit, abs=1e-12)


def test_noise_and_a_falling_loss_are_no_spikes():
    random = np.random.default_rng(0)
    spikes = Spikes()
    losses = 3 * np.exp(-np.arange(20000) / 3000) + 0.1 * random.normal(size=20000)
    assert all(spikes.passed(loss) is None for loss in losses)
    assert spikes.passed(3.0) is not None


def test_equal_losses_are_not_judged():
    spikes = Spikes()
    assert all(spikes.passed(loss) is None for loss in [0.5] * 300 + [0.6])


def test_after_a_spike_comes_the_worse(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    for step in range(120):
        loop.step(step, torch.tensor([float(step)]), loss=50.0 if step in (110, 115) else 1.0 + step % 3)
    loop.step(120, torch.zeros(1), loss=math.inf)
    loop.step(121, torch.zeros(1), loss=math.nan)
    assert [(found.kind, found.step) for found in loop.box.incidents] == [("spike", 110), ("nonfinite", 120)]
    assert loop.box.incidents[0].sentence == "the loss of step 110 is 50, beyond the limit of 12.38"
    assert kept(tmp_path, "spike")["steps"][-1]["step"] == 110
    assert Replay(tmp_path).last_step == 120  # the gravest
    assert Replay(tmp_path / "blackbox/spike.pt").last_step == 110


def test_without_a_folder_what_went_wrong_waits_to_be_saved(tmp_path):
    loop = Loop(BlackBox(None))
    batch = torch.ones(3)
    loop.step(0, batch, loss=math.nan)
    batch.zero_()
    loop.box.close()
    assert loop.box.save(tmp_path) == [tmp_path / "blackbox/nonfinite.pt"]
    assert kept(tmp_path)["fetches"][0]["batch"].tolist() == [1, 1, 1]
    assert Replay(tmp_path).last_step == 0


def test_what_is_held_can_be_saved_at_any_time(tmp_path):
    box = BlackBox(None)
    box_loop.train(box, steps=6)
    assert box.save(tmp_path / "a") == [tmp_path / "a/blackbox/asked.pt"]
    replay, steps = box_loop.replayed(tmp_path / "a")
    assert (replay.kind, replay.last_step, replay.verdict.same, steps) == (
        "asked",
        5,
        True,
        replay.last_step - replay.first_step + 1,
    )
    box.close()
    assert box.save(tmp_path / "b") == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    loop = Loop(BlackBox(None))
    loop.step(0, torch.zeros(1))
    with pytest.raises(DxdyError, match=f"^{tmp_path}/file: cannot be written"):
        loop.box.save(tmp_path / "file")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_full_disk_is_no_reason_to_stop(tmp_path, monkeypatch, error):
    def refuse(record, path):
        Path(path).write_text("half")
        raise error

    monkeypatch.setattr(torch, "save", refuse)
    loop = Loop(BlackBox(tmp_path))
    with pytest.warns(RuntimeWarning, match="Training goes on") as said:
        for step in range(3):
            loop.step(step, torch.zeros(1), loss=math.nan)
    assert len(said) == 1
    assert (loop.box.incidents[0].path, loop.box.incidents[0].refused) == (None, None)
    assert list((tmp_path / "blackbox").iterdir()) == []


def test_the_loop_may_go_to_another_directory(here):
    loop = Loop(BlackBox(Path("run")))
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    loop.step(0, torch.zeros(1), loss=math.nan)
    assert (here / "run/blackbox/nonfinite.pt").exists()


# Loops that fetch otherwise.


def run(box, replay, steps, fetch_and_compute):
    """Run a loop of ``steps`` steps in which the loss of a step is the sum of its batch times a weight that counts."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def told(batch, loader=0):
        if box:
            box.batch(len(seen), batch, loader)
        return replay.batch(batch, loader) if replay else batch

    def step(batch, loss=None):
        objects = {"model": model}, {"optimizer": optimizer}, {}
        if box:
            box.forward(len(seen), *objects)
        if replay:
            replay.forward(*objects)
        value = (model.weight + (torch.rand(()) if batch is None else batch)).item()
        seen.append(value)
        if box:
            box.ended(len(seen) - 1, value, None, False)
        done = replay.ended(value, None) if replay else False
        with torch.no_grad():
            model.weight += 1
        return done or len(seen) == steps

    fetch_and_compute(told, step)
    return seen


def ahead(told, step):
    """Fetch two batches before they are used."""
    numbers = iter(torch.arange(1000.0))
    waiting = collections.deque(told(next(numbers)) for _ in range(2))
    while not step(waiting.popleft()):
        waiting.append(told(next(numbers)))


def peeking(told, step):
    """Look at a batch first, then begin anew."""
    told(torch.tensor(0.0), 0)
    for number in torch.arange(1000.0):
        if step(told(number)):
            break


def validating(told, step):
    """Validate once before training, and after every fourth step."""
    told(torch.tensor(-1.0), 1)
    for place, number in enumerate(torch.arange(1000.0)):
        if step(told(number)):
            break
        if place % 4 == 3:
            for _ in range(3):
                told(torch.tensor(-1.0), 1)


def adversarial(told, step):
    """Take two steps a batch."""
    for number in torch.arange(1000.0):
        batch = told(number)
        if step(batch) or step(batch):
            break


def alone(told, step):
    """Draw the data in the loop."""
    while not step(None):
        pass


@pytest.mark.parametrize("loop", [ahead, peeking, validating, adversarial, alone])
@pytest.mark.parametrize("period", [NEVER_AGAIN, 5, 1])
def test_loops_that_fetch_otherwise_are_replayed(tmp_path, snapshots, loop, period):
    snapshots(period)
    box = BlackBox(None)
    torch.manual_seed(3)
    seen = run(box, None, 14, loop)
    box.save(tmp_path)
    torch.manual_seed(4)
    replay = Replay(tmp_path)
    again = run(None, replay, 100, loop)
    assert replay.verdict.same
    assert again == seen[replay.first_step :]
    assert len(again) <= {1: 2, 5: 6}.get(period, 14)


def test_batches_that_only_served_validation_are_let_go(tmp_path):
    box = BlackBox(tmp_path)
    loop = Loop(box)
    box.batch(0, torch.ones(2**20), loader=1)
    box.forget(loader=1)
    loop.step(0, torch.zeros(1))
    assert box._held_bytes < 10**5
    assert fail(loop, 1, torch.zeros(1))["refused"] is None
    replay = Replay(tmp_path)
    assert replay.batch("fresh", loader=1) == "fresh"


def test_a_step_whose_statistics_come_late_is_found(tmp_path, snapshots):
    snapshots(NEVER_AGAIN)
    box = BlackBox(tmp_path)
    loop = Loop(box)
    for step in range(4):
        box.batch(step, torch.tensor([float(step)]))
        box.forward(step, *loop.objects)
        if step:
            box.ended(step - 1, math.nan if step == 3 else 1.0, 1.0, False)
    record = kept(tmp_path)
    assert (record["step"], record["refused"]) == (2, None)
    assert [step["step"] for step in record["steps"]] == [0, 1, 2]


def test_an_optimizer_that_is_found_late_comes_into_the_next_snapshot(tmp_path, snapshots):
    snapshots(NEVER_AGAIN)
    loop = Loop(BlackBox(tmp_path))
    objects, loop.objects = loop.objects, (loop.objects[0], {}, {})
    loop.step(0, torch.zeros(1))
    loop.objects = objects
    loop.step(1, torch.zeros(1))
    record = fail(loop, 2, torch.zeros(1))
    assert record["steps"][0]["step"] == 1
    assert list(record["state"]["optimizers"]) == ["optimizer"]


def test_a_replay_restores_what_is_found_after_the_first_forward(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    loop.optimizer.state[loop.model.weight]["count"] = torch.tensor(7.0)
    fail(loop, 0, torch.zeros(1))
    again, replay = Loop(None), Replay(tmp_path)
    replay.batch(torch.zeros(1))
    replay.forward(again.objects[0], {}, {})
    assert not again.optimizer.state
    replay.restore(*again.objects)
    assert again.optimizer.state[again.model.weight]["count"] == 7.0
    assert torch.equal(again.model.weight, loop.model.weight - 1)


def test_modes_and_frozen_parameters_are_restored(tmp_path):
    loop = Loop(BlackBox(tmp_path))
    loop.model.eval()
    loop.model.bias.requires_grad_(False)
    fail(loop, 0, torch.zeros(1))
    again, replay = Loop(None), Replay(tmp_path)
    replay.forward(*again.objects)
    assert not again.model.training
    assert [p.requires_grad for p in again.model.parameters()] == [True, False]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda loop: setattr(loop, "model", nn.Linear(2, 1)),
            r"parameter 'weight' of 'model' was \(1, 1\), and is \(1, 2\)",
        ),
        (
            lambda loop: setattr(loop, "model", nn.Linear(1, 1, bias=False)),
            "'bias' of 'model' was .*, and is not there now",
        ),
        (lambda loop: loop.model.register_buffer("more", torch.zeros(1)), "buffer 'more' of 'model' was not there"),
        (lambda loop: loop.model.add_module("more", nn.ReLU()), "'model' had 1 module, and has 2 now"),
        (
            lambda loop: loop.optimizer.param_groups[0]["params"].pop(),
            r"groups of 'optimizer' had \[2\] .* have \[1\] now",
        ),
        (lambda loop: setattr(loop, "scaler", torch.amp.GradScaler("cpu")), "'scaler' was off"),
    ],
)
def test_another_script_is_noticed(tmp_path, change, text):
    fail(Loop(BlackBox(tmp_path)), 0, torch.zeros(1))
    loop, replay = Loop(None), Replay(tmp_path)
    change(loop)
    with pytest.raises(DxdyError, match=f"^replay: .*{text}.*same script"):
        replay.forward({"model": loop.model}, {"optimizer": loop.optimizer}, {"scaler": loop.scaler})


def test_a_script_that_ends_too_soon_is_told(tmp_path, snapshots):
    snapshots(NEVER_AGAIN)
    box_loop.train(BlackBox(tmp_path))
    assert "ended before its first step in training" in Replay(tmp_path).verdict.sentence
    replay, _ = box_loop.replayed(tmp_path, steps=3)
    assert "the script ended in step 2, by no error, before step" in replay.verdict.sentence
    replay, _ = box_loop.replayed(tmp_path, raises_at=3)
    assert "the script ended in step 3, by Stop: as told, before" in replay.verdict.sentence


def test_a_folder_without_a_record_is_named(tmp_path):
    with pytest.raises(DxdyError, match=f"^{tmp_path}: holds no record"):
        Replay(tmp_path)


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_flipped_byte_is_noticed(tmp_path, place):
    loop = Loop(BlackBox(tmp_path))
    fail(loop, 0, torch.zeros(5000))
    path = tmp_path / "blackbox/nonfinite.pt"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DxdyError, match=f"^{path}: is no record of a step"):
        Replay(tmp_path)


def test_another_version_is_named(tmp_path):
    fail(Loop(BlackBox(tmp_path)), 0, torch.zeros(1))
    changed(tmp_path, lambda record: record.update(version=99))
    with pytest.raises(DxdyError, match=r"written in version 99 .* version 1 is read"):
        Replay(tmp_path)


def test_random_states_are_those_of_the_generators():
    reader = RandomStates()
    random_order = random.Random(0)
    uses = [lambda: np.random.randn(), lambda: np.random.rand(3), lambda: np.random.randn(2), lambda: None, torch.rand]
    uses[-1] = lambda: torch.rand(1)
    uses += [lambda: random.random(), lambda: random.gauss(0, 1)]
    for _ in range(200):
        random_order.choice(uses)()
        seen = reader.read()
        np.testing.assert_equal(seen["numpy"], np.random.get_state(legacy=False))
        assert torch.equal(seen["torch"], torch.get_rng_state())
        assert seen["python"] == random.getstate()


def test_random_states_are_put_back():
    states = RandomStates().read()
    first = random.random(), np.random.randn(), torch.rand(1).item()
    put_random(states)
    assert (random.random(), np.random.randn(), torch.rand(1).item()) == first


def test_another_generator_of_numpy_is_read_too():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        states = RandomStates().read()
        first = np.random.rand()
        put_random(states)
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_time_for_snapshots_is_bounded(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(blackbox, "perf_counter", lambda: now[0])
    purse = blackbox._Purse()
    spent = 0.0
    for _ in range(10_000):
        now[0] += 0.1
        if purse.allows():
            with purse.open():
                now[0] += 0.2
            spent += 0.2
    assert 0.9 * blackbox.SHARE < spent / now[0] < 1.1 * blackbox.SHARE
