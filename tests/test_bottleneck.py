"""The bottleneck in plain words: tables made by hand, whose figures are known."""

import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dxdy_nb as dx
from dxdy_nb.observe.bottleneck import bottleneck, phase_times, shares
from dxdy_nb.observe.summary import summary

MS = 1e-3


def table(count=40, *, batch=32, other=0.0, **phases):
    """Return steps whose phases take the given seconds, each a number or a list."""
    every = {f"{phase}_time": phases.get(phase, 0.0) for phase in ("data", "forward", "backward", "update")}
    steps = pd.DataFrame(every | {"effective_batch": batch}, index=pd.RangeIndex(count, name="step"))
    steps["step_time"] = steps[list(every)].sum(axis=1) + other
    return steps.assign(loss=1.0, lr=0.1, grad_norm=1.0, skipped=False, bad_samples=[[] for _ in range(count)])


def record(steps, between=0.0, events=(), loaders=()):
    """Return a record of these steps, with the given seconds before each."""
    between = pd.Series(between, index=steps.index)
    ends = (steps["step_time"] + between).cumsum()
    ended = tuple(event("step", step, end, "SGD") for step, end in ends.items())
    loaders = {str(place): loader for place, loader in enumerate(loaders)}
    return SimpleNamespace(steps=steps, events=(*ended, *events), loaders=loaders, sizes={"w": 6})


def event(kind, step, at=0.0, where="", value=None):
    return SimpleNamespace(kind=kind, step=step, time=at, where=where, value=value)


def loader(workers=0, *, persistent=False, epochs=4):
    return SimpleNamespace(batch_size=1, workers=workers, restarts=workers > 0 and not persistent, epochs=epochs)


def test_phases_have_the_times_of_the_steps_and_of_what_lies_between() -> None:
    steps = table(3, data=[1.0, 2.0, 3.0], forward=0.5, backward=0.25, update=0.125, other=0.0625)
    times = phase_times(record(steps, between=[9.0, 0.5, 4.0]))
    assert times.index.tolist() == [1, 2]  # what was before the first step nobody knows
    assert times.columns.tolist() == ["data", "forward", "backward", "update", "other", "between"]
    assert times.loc[2].tolist() == [3.0, 0.5, 0.25, 0.125, 0.0625, 4.0]
    assert shares(times)["data"] == 5 / (5 + 2 * 0.9375 + 4.5)


def test_steps_that_the_events_do_not_tell_of_are_left_out() -> None:
    seen = record(table(10, forward=1.0), between=0.5)
    seen.events = tuple(one for one in seen.events if one.step not in (4, 5))
    assert phase_times(seen).index.tolist() == [1, 2, 3, 7, 8, 9]
    seen.events = ()
    assert phase_times(seen)["between"].tolist() == [0.0] * 9


@pytest.mark.parametrize(
    ("loaders", "words"),
    [
        ([], "Waiting for data: 75 % of the time; a fetch takes 30 ms of 40 ms a step."),
        ([loader()], "The loop itself makes each batch (num_workers=0)"),
        ([loader(2)], "With 2 workers it cannot keep up"),
        ([loader(), loader(2)], "of 40 ms a step."),  # which of them is slow is not known
    ],
)
def test_waiting_for_data(loaders, words) -> None:
    found = bottleneck(record(table(data=30 * MS, forward=4 * MS, backward=6 * MS), loaders=loaders))
    assert (found.name, found.share) == ("data", pytest.approx(0.75))
    assert words in found.sentence
    assert "at most 4.0 times faster" in found.sentence  # 1 / (1 - 0.75)
    assert found.figures["median_fetch"] == pytest.approx(0.03)


@pytest.mark.parametrize(("persistent", "told"), [(False, True), (True, False)])
def test_workers_that_are_started_for_each_epoch(persistent: bool, told: bool) -> None:
    waits = [0.5 if step % 16 == 0 else 1 * MS for step in range(64)]
    steps, starts = table(64, data=waits, forward=10 * MS), [0.75 if step % 16 == 0 else 0.0 for step in range(64)]
    found = bottleneck(record(steps, starts, loaders=[loader(2, persistent=persistent)]))
    assert ("persistent_workers=True spares" in found.sentence) == told
    whole = 3 * (0.5 + 0.75) + 0.06 + 0.63
    assert (found.name, found.share) == (
        ("data", pytest.approx(3 * 1.25 / whole)) if told else ("pauses", pytest.approx(3 * 0.75 / whole))
    )
    assert ("every 16 steps, where an epoch begins, 1.2 s pass" in found.sentence) == told


def test_fetches_that_are_slow_at_regular_steps() -> None:
    waits = [1.0 if step % 16 == 0 else 1 * MS for step in range(64)]
    found = bottleneck(record(table(64, data=waits, forward=10 * MS), loaders=[loader(2, persistent=True)]))
    assert found.sentence.startswith("Waiting for data: every 16 steps a fetch takes 1 s, else 1 ms.")
    assert found.share == pytest.approx((3 + 0.06) / (3 + 0.06 + 0.63))


def test_slow_fetches_at_no_regular_steps_are_no_epochs() -> None:
    waits = [1.0 if step in (7, 9, 30) else 1 * MS for step in range(40)]
    found = bottleneck(record(table(data=waits, forward=10 * MS), loaders=[loader(2)]))
    assert found.name == "data"
    assert "every" not in found.sentence


def test_pauses_between_steps() -> None:
    pauses = [2.0 if step % 10 == 0 else 0.0 for step in range(40)]
    steps = table(forward=20 * MS, backward=30 * MS)
    found = bottleneck(record(steps, pauses))
    assert found.name == "pauses"
    assert found.sentence.startswith("Pauses between steps: every 10 steps about 2 s, as long as 40 steps; no model")
    assert found.share == pytest.approx(6 / (6 + 39 * 0.05))
    validated = [event("no_grad_forward", step) for step in (10, 20, 30)]
    assert "as in validation" in bottleneck(record(steps, pauses, validated)).sentence
    always = [event("no_grad_forward", step) for step in range(40)]
    sentence = bottleneck(record(steps, pauses, always)).sentence
    assert "validation" not in sentence and "no model" not in sentence


def test_fixed_costs_show_where_a_small_batch_takes_as_long_as_a_large_one() -> None:
    batches = [8 if step % 5 == 4 else 64 for step in range(40)]
    alike = table(batch=batches, forward=[0.8 * MS if b == 8 else 0.87 * MS for b in batches])
    found = bottleneck(record(alike))
    assert found.name == "fixed costs"
    assert "a step with 8 samples takes 0.8 ms, one with 64 0.87 ms: 91 % of it" in found.sentence
    # A line through (8, 0.8) and (64, 0.87): at 0 it is 0.79.
    assert found.figures["fixed"] == pytest.approx(0.79 / 0.87)
    growing = table(batch=batches, forward=[1 * MS if b == 8 else 8 * MS for b in batches])
    assert bottleneck(record(growing)).name == "compute"


def test_the_loops_own_code() -> None:
    items = [event("item", step, value=3.0) for step in range(40)]
    found = bottleneck(record(table(forward=4 * MS, backward=4 * MS, other=1 * MS), between=1 * MS, events=items))
    assert (found.name, found.share) == ("own code", pytest.approx(0.2))
    assert "3 times a step (.item()" in found.sentence
    quiet = bottleneck(record(table(forward=4 * MS, backward=4 * MS, other=1 * MS), between=1 * MS))
    assert ".item()" not in quiet.sentence


def test_copies_that_the_loop_waits_for() -> None:
    copies = [event("copy", step, value=5 * MS) for step in range(40)]
    found = bottleneck(record(table(forward=5 * MS, backward=5 * MS, other=5 * MS), events=copies))
    assert (found.name, found.share) in [("copies", pytest.approx(1 / 3)), ("own code", pytest.approx(1 / 3))]
    assert "non_blocking=True" in found.sentence


def test_an_update_that_takes_longest() -> None:
    found = bottleneck(record(table(forward=2 * MS, backward=3 * MS, update=5 * MS)))
    assert (found.name, found.share) == ("update", pytest.approx(0.5))


def test_nothing_is_claimed_below_a_fifth() -> None:
    found = bottleneck(record(table(data=1.9 * MS, forward=3 * MS, backward=5.1 * MS)))
    assert (found.name, found.share) == ("compute", pytest.approx(0.81))
    assert "twice the batch" not in found.sentence
    short = bottleneck(record(table(forward=0.4 * MS, backward=0.6 * MS)))
    assert "A step takes only 1 ms: see whether twice the batch" in short.sentence


def test_what_has_no_largest_part_is_called_so() -> None:
    found = bottleneck(record(table(data=1.9 * MS, forward=2 * MS, backward=2.5 * MS, update=1.9 * MS, other=1.7 * MS)))
    assert found.name == "unknown"
    assert found.sentence == (
        "No part stands out: data 19 %, forward 20 %, backward 25 %, update 19 %, other 17 %, between 0 %."
    )


def test_the_time_of_the_watch_itself_is_no_phase() -> None:
    watching = [event("watch", step, value=4 * MS) for step in range(10)]
    seen = record(table(10, forward=1.0), between=5 * MS, events=watching)
    assert phase_times(seen)["between"].tolist() == pytest.approx([1 * MS] * 9)


def test_few_steps_tell_nothing() -> None:
    found = bottleneck(record(table(5, data=1.0)))
    assert (found.name, found.sentence) == ("unknown", "5 steps: too few to tell what takes the time.")
    assert bottleneck(record(table(6, data=1.0))).name == "data"
    assert bottleneck(record(table(0))).name == "unknown"


class Slow(Dataset):
    """Samples that take a while."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(3)


def test_a_real_loop_that_waits_for_its_data() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dx.watch() as w:
        for batch in DataLoader(Slow()):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert bottleneck(w).name == "data"
    assert bottleneck(w).share > 0.5


def test_a_summary_tells_losses_and_the_first_step_that_is_not_finite() -> None:
    steps = table(20, forward=2 * MS, backward=2 * MS).assign(loss=[float(20 - i) for i in range(20)])
    seen = summary(record(steps))
    assert (seen.steps, seen.first_loss, seen.last_loss) == (20, 19.5, 1.5)  # means of two steps each
    assert (seen.steps_per_second, seen.nonfinite_step) == (pytest.approx(250), None)
    assert seen.optimizers == ("SGD",)
    assert "  lr         0.1\n" in str(seen)
    steps.loc[19, "lr"] = 1e-3
    assert "  lr         0.1 → 0.001\n" in str(summary(record(steps)))
    steps.loc[3, ["loss", "skipped"]] = [float("inf"), True]  # a scaler's skip is as it should be
    steps.loc[7, "grad_norm"] = float("inf")
    steps.at[7, "bad_samples"] = [5, 6]
    seen = summary(record(steps))
    assert (seen.skipped, seen.nonfinite_step, seen.bad_samples) == (1, 7, (5, 6))
    assert "steps      20, 1 of them skipped, 250 a second" in str(seen)
    assert "not finite first at step 7, samples 5, 6" in str(seen)


def test_a_summary_counts_what_the_model_has_and_not_what_only_its_optimizer_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = torch.nn.Linear(8, 2)  # the optimizer keeps the head that was there
    with dx.watch() as w:
        for _ in range(3):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    assert summary(w).models == {"Sequential": 5 * 8 + 9 * 2}


def test_a_summary_of_nothing_says_so() -> None:
    class Nothing(SimpleNamespace):
        def __str__(self) -> str:
            return "no step of Net"

    text = str(summary(Nothing(**vars(record(table(0))))))
    assert text == "  steps      no step of Net\n             Only steps in this very process can be seen.\n"
