"""Where the ranks' time goes: hand-made logs whose answer is arithmetic, and two real ranks."""

import pytest

import dxdy_nb as dx
from dxdy_nb.ranks import scaling
from dxdy_nb.ranks.scaling import explain_scaling
from dxdy_nb.ranks.verify import Ranks

MS = 1e-3


def log(rank, *, steps=12, waits=(5.0, 1.0), pause=0.0, reduced=True, data=2.0):
    """A step of 20 ms: a call in which the ranks meet, and gradients reduced for 3 ms, 1 ms of it unseen."""
    events, now = [], 100.0 * rank  # no clock in common
    for step in range(steps):
        paused = pause and step == 7  # on rank 0, which then comes last
        length = 20 + (pause if paused else 0)
        wait = (1, 1 + pause)[rank] if paused else waits[rank]
        events += [
            {"event": "forward", "at": now, "grad": True, "samples": 8},
            {"event": "collective", "at": now + 1 * MS, "world": True},
            {"event": "collected", "at": now + (1 + wait) * MS},
            {"event": "updated", "at": now + length * MS, "fetched": data * MS},
        ]
        if reduced and step < 10:
            size = {"bytes": 4_000_000, "buckets": 1}
            events.append({"event": "reduced", "at": now, "iteration": step, "comm": 3 * MS, "hidden": 1 * MS, **size})
        now += length * MS
    return events


def both(**changes):
    return Ranks((log(0, **changes), log(1, **changes)), {})


def milliseconds(scaling):
    return (scaling.table * 1e3).round(6).to_dict("list")


def test_a_step_is_taken_apart():
    scaling = explain_scaling(both())
    assert milliseconds(scaling) == {
        "compute": [11, 15],
        "data": [2, 2],
        "pauses": [0, 0],
        "exposed": [3, 3],
        "waiting": [4, 0],
        "hidden": [1, 1],
        "step": [20, 20],
    }
    assert (scaling.steps, scaling.samples, scaling.bytes) == (10, 16, 4_000_000)
    assert scaling.speedup == pytest.approx(2 * 15 / 20)
    assert scaling.predicted["step"].tolist() == pytest.approx(
        [15 * MS, 20 * MS, (15 + 3 * 1.5 - 1 + 3 + 2) * MS, (15 + 3 * 1.75 - 1 + 7 + 2) * MS, 36.625 * MS]
    )
    assert scaling.predicted["efficiency"][2] == pytest.approx(0.75)
    assert scaling.advice[:2] == (
        "2 times the batch of a rank, or accumulation_steps, makes communication a tenth of the time",
        "all gradients are in one bucket, and none can start early: bucket_cap_mb=1",
    )
    assert "the others wait for rank 1: 4.00 ms more compute a step" in str(scaling)
    assert "sends 4 MB from each rank" in str(scaling)
    assert "prediction, not a measurement" in str(scaling)


def test_a_picture_shows_the_parts_of_each_rank():
    bars, curve = explain_scaling(both()).plot().axes
    widths = [[round(bar.get_width(), 6) for bar in part] for part in bars.containers]
    assert widths == [[11, 15], [2, 2], [0, 0], [3, 3], [4, 0], [1, 1]]
    assert [line.get_xdata()[-1] for line in curve.lines] == [16, 16, 2]


def test_a_pause_is_no_compute_and_keeps_the_others_waiting():
    scaling = explain_scaling(both(pause=100.0))
    assert milliseconds(scaling)["pauses"] == [10.4, 0]
    assert milliseconds(scaling)["waiting"] == [3.6, 10]
    assert milliseconds(scaling)["compute"] == [11, 15]
    assert any("validate and save less often" in line for line in scaling.advice)


def test_a_loader_that_is_late_is_named():
    assert "num_workers" in explain_scaling(both(data=9.0)).advice[-1]


def test_more_ranks_than_cores_are_told_so(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert explain_scaling(both()).advice[-1].startswith("2 ranks on 1 core win nothing, where they train on CPUs")


def test_without_torchs_own_times_the_rest_is_told():
    table = milliseconds(explain_scaling(both(reduced=False)))
    assert (table["exposed"], table["hidden"], table["compute"]) == ([1, 1], [0, 0], [13, 17])


def test_too_little_is_refused(tmp_path):
    with pytest.raises(dx.DxdyError, match="no logs of several ranks"):
        explain_scaling(tmp_path)
    with pytest.raises(dx.DxdyError, match="2 steps after the first 2; expected at least 3"):
        explain_scaling(both(steps=4))


def test_a_run_on_two_ranks_is_explained(tmp_path):
    config = dx.RunConfig(data="spirals", model="mlp", max_steps=16, batch_size=32, world_size=2, device="cpu")
    run = dx.train(config, out=tmp_path / "two")
    scaling = explain_scaling(run)
    assert (scaling.steps, scaling.samples) == (14, round(run.steps["effective_batch"][2:].mean()))
    assert scaling.bytes == 4 * sum(p.numel() for p in run.model.parameters())
    parts = scaling.table[["compute", "data", "pauses", "exposed", "waiting"]]
    assert parts.sum(axis=1).tolist() == pytest.approx(scaling.table["step"].tolist())
    assert (parts >= 0).all(axis=None) and (scaling.table["compute"] > 0).all()
    assert scaling.table["waiting"].min() < scaling.table["step"].min()
    one = dx.train(config.override({"world_size": 1, "batch_size": 64}), out=tmp_path / "one")
    assert "the run on one device" in str(explain_scaling(run, one))


def test_a_call_of_some_ranks_is_not_taken_for_one_of_all():
    def call(begin, end, world):
        return [{"event": "collective", "at": begin, "world": world}, {"event": "collected", "at": end}]

    assert scaling._calls([*call(0.0, 1.0, False), *call(5.0, 7.0, True)]) == [2.0]
