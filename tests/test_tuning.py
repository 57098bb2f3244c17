"""A range test leaves no trace and brackets a good rate; a search finds it, keeps what diverged and sees the edge."""

import copy
import dataclasses
import itertools
import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.runs.record import Run
from dxdy_nb.training import datasets, tuning

SPIRALS = dx.RunConfig(data="spirals", model="mlp", max_steps=40)


def set_up(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), layers=None):
    """Return a net that has been trained a little, so that it has statistics, momentum and gradients."""
    model = layers or nn.Sequential(
        nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Sequential(nn.Linear(32, 3))
    )
    loader = datasets.loader(datasets.spirals().train, 32, shuffle_seed=3)
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    for x, y, _ in itertools.islice(loader, 3):
        made.zero_grad()
        cross_entropy(model(x), y).backward()
        made.step()
    return {"model": model, "loss_fn": cross_entropy, "loader": loader, "optimizer": made}


def regression(batches=20, noise=0.0, size=16):
    """Return a linear model and batches of a line through the origin."""
    xs = torch.randn(batches, size, 2)
    loader = [(x, x.sum(1, keepdim=True) + noise * torch.randn(size, 1)) for x in xs]
    model = nn.Linear(2, 1)
    return {"model": model, "loss_fn": mse_loss, "loader": loader, "optimizer": torch.optim.SGD(model.parameters())}


def state(given):
    model, optimizer = given["model"], given["optimizer"]
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "trainable": [p.requires_grad for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "optimizer": optimizer.state_dict(),
            "loader": given["loader"].generator.get_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
    )


def same(a, b):
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def ramp(monkeypatch):
    """Return what fills with the rates of all groups and the first weights of each step of a range test."""
    steps = []

    def train_step(model, x, y, loss_fn, optimizer, max_grad_norm):
        loss = step(model, x, y, loss_fn, optimizer, max_grad_norm)
        steps.append(([group["lr"] for group in optimizer.param_groups], next(model.parameters()).detach().clone()))
        return loss

    step = tuning.train_step
    monkeypatch.setattr(tuning, "train_step", train_step)
    return steps


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
        lambda ps: torch.optim.Adam([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:]}], lr=0.01),
    ],
)
def test_everything_is_put_back_bit_by_bit(optimizer, ramp):
    given = set_up(optimizer)
    model = given["model"]
    model[4].eval()
    before, gradients = state(given), [p.grad for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether there is a bracket is another question
        dx.lr_range_test(**given)
    assert len(ramp) > 50 and not torch.equal(ramp[-1][1], model[0].weight)
    assert same(state(given), before)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_training_goes_on_as_if_nothing_had_been():
    torch.manual_seed(1)
    plain = set_up()
    torch.manual_seed(1)
    tested = set_up()
    dx.lr_range_test(**tested)
    losses = []
    for given in (plain, tested):
        torch.manual_seed(2)
        for x, y, _ in given["loader"]:
            given["optimizer"].zero_grad()
            loss = cross_entropy(given["model"](x), y)
            loss.backward()
            given["optimizer"].step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_an_error_on_the_way_leaves_everything_as_it_was_and_is_torchs_own():
    given, calls = set_up(), []

    def loss_fn(output, target):
        calls.append(1)
        return cross_entropy(output, target if len(calls) < 30 else target[:-1])

    before = state(given)
    with pytest.raises(ValueError, match="Expected input batch_size"):
        dx.lr_range_test(**given | {"loss_fn": loss_fn})
    assert same(state(given), before)


def test_the_ramp_is_exponential_and_groups_keep_their_proportions(ramp):
    given = regression()
    weight, bias = given["model"].parameters()
    given["optimizer"] = torch.optim.SGD([{"params": [weight], "lr": 0.2}, {"params": [bias], "lr": 0.05}])
    bracket = dx.lr_range_test(**given, low=1e-5, high=1e2, steps=71)
    seen = np.array([rates for rates, _ in ramp[: len(bracket.rates)]])
    np.testing.assert_allclose(seen[:, 0], 1e-5 * 10 ** (0.1 * np.arange(len(seen))), rtol=1e-9)
    np.testing.assert_allclose(seen[:, 1], seen[:, 0] / 4, rtol=1e-9)
    np.testing.assert_allclose(bracket.rates, seen[:, 0], rtol=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=pytest.mark.slow)])
def test_the_bracket_holds_a_rate_close_to_the_best_of_a_grid(optimizer):
    data = datasets.spirals()

    def after_training(rate):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
        made = optimizer(model.parameters(), lr=rate)
        loader = datasets.loader(data.train, 64, shuffle_seed=0)
        for _ in range(12):
            for x, y, _ in loader:
                made.zero_grad()
                cross_entropy(model(x), y).backward()
                made.step()
        return cross_entropy(model(data.validation.x), data.validation.y).item()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
    loader = datasets.loader(data.train, 64, shuffle_seed=0)
    low, high = dx.lr_range_test(
        model=model, loss_fn=cross_entropy, loader=loader, optimizer=optimizer(model.parameters(), lr=1e-3)
    )
    losses = {rate: after_training(rate) for rate in np.logspace(-4, 1, 11)}
    inside = [loss for rate, loss in losses.items() if low <= rate <= high]
    assert low < high < 1000 * low
    assert min(inside) < 1.5 * min(losses.values())


def test_the_rules_are_those_of_fastai():
    rates = np.geomspace(1e-4, 1.0, 9).tolist()
    losses = [3.0, 3.1, 2.9, 2.5, 1.5, 1.4, 0.9, 1.0, 4.0]
    slopes = np.gradient(losses, np.log(rates))  # only to see that the steepest place is at 1.5
    assert slopes.argmin() in (3, 4)
    # Longest falling: 3.0 (or 3.1) 2.9 2.5 1.5 1.4 0.9 ends at index 6 with length 6; 6 - 6 + 2 + 1 = 3.
    assert tuning.rules(rates, losses) == {"steep": rates[3], "min/10": rates[6] / 10, "valley": rates[3]}


def test_a_loss_that_is_not_finite_ends_the_ramp():
    given = regression()
    given["loss_fn"] = lambda output, y: mse_loss(output, y) / (output.abs().max() < 100)
    bracket = dx.lr_range_test(**given)
    assert len(bracket.rates) == len(bracket.losses) < 100
    assert all(map(math.isfinite, bracket.losses))


def no_bracket(given, match, **ramp):
    with pytest.warns(UserWarning, match=match):
        assert dx.lr_range_test(**given, **ramp) is None


def test_a_loss_that_does_not_fall_has_no_bracket():
    given = regression()
    given["loss_fn"] = lambda output, y: (0 * output).sum() + 3
    no_bracket(given, "does not fall at any rate: from 3 by 0 at most")
    given = regression(noise=1.0)
    given["loader"] = [(x, torch.randn(16, 1)) for x, _ in given["loader"]]
    nn.init.zeros_(given["model"].weight)
    no_bracket(given, "does not fall")


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_is_no_fall(seed):
    noise = torch.randn(100, generator=torch.Generator().manual_seed(seed)).tolist()
    losses = [2 + 0.3 * one for one in noise]
    assert "does not fall" in tuning._no_bracket(losses, 100)


def test_a_loss_that_is_not_finite_at_once_is_no_question_of_the_rate():
    given = regression()
    given["loss_fn"] = lambda output, y: mse_loss(output, y) * math.nan
    no_bracket(given, "not finite at step 0")


def test_a_ramp_that_begins_too_high_is_too_early_to_read():
    no_bracket(regression(), "blew up at step .* of 100: .* lower low", low=5.0, high=50.0)


def test_a_loss_that_still_falls_at_the_highest_rate_has_no_bracket():
    no_bracket(regression(size=256), "still falls at the highest rate", high=1e-2)


def ask(change, match):
    given = regression()
    with pytest.raises(dx.DxdyError, match=match):
        dx.lr_range_test(**given | change(given))


def test_bad_input_is_told_in_a_sentence():
    ask(lambda g: {"low": 1.0, "high": 0.1}, "low, high, steps: expected 0 < low < high and .*, got 1.0, 0.1 and 100")
    ask(lambda g: {"low": 0.1, "high": 0.1}, "expected 0 < low < high")
    ask(lambda g: {"low": math.nan}, "got nan, 10.0 and 100")
    ask(lambda g: {"steps": 10}, "at least 50 steps, got 1e-07, 10.0 and 10")
    ask(lambda g: {"low": "1e-4"}, "got '1e-4', 10.0 and 100")
    ask(lambda g: {"steps": 60.5}, "at least 50 steps, got 1e-07, 10.0 and 60.5")
    for bound in (0, -1.0, math.nan, "1"):
        ask(lambda g, bound=bound: {"max_grad_norm": bound}, f"max_grad_norm: .*got {bound!r}")
    ask(lambda g: {"loss_fn": None}, "loss_fn: expected a function .*, got NoneType")
    ask(lambda g: {"optimizer": torch.optim.LBFGS(g["model"].parameters())}, "optimizer: LBFGS asks for the loss")
    ask(lambda g: {"loader": iter(g["loader"])}, "loader: expected batches that can be read again")
    ask(lambda g: {"loader": (batch for batch in g["loader"])}, "loader: .*got generator")
    ask(lambda g: {"loader": g["loader"][:1]}, "at least two batches a pass, got 1")
    ask(lambda g: {"loader": []}, "at least two batches a pass, got 0")
    ask(lambda g: {"loader": [{"x": 1}, {"x": 2}]}, r"expected batches \(x, y, ...\), got dict")
    ask(
        lambda g: {"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters())}, "optimizer: owns no trainable parameter"
    )
    ask(lambda g: {"optimizer": torch.optim.SGD}, "optimizer: expected a Optimizer, got type")
    ask(lambda g: {"model": mse_loss}, "model: expected a Module, got function")
    ask(lambda g: {"model": g["model"].requires_grad_(False)}, "model: no parameter requires a gradient")
    ask(lambda g: {"loss_fn": nn.MSELoss(reduction="none")}, r"one number, got a tensor of shape \(16, 1\)")
    ask(lambda g: {"loss_fn": lambda output, y: 1.0}, "one number, got float")


def test_a_search_refuses_what_is_no_configuration_and_no_number_of_steps():
    for given, steps, match in (
        ({"lr": 1}, 30, "expected a dx.RunConfig as config, got dict"),
        (SPIRALS, "a", "got 'a'"),
    ):
        with pytest.raises(dx.DxdyError, match=match):
            dx.lr_search(given, steps=steps)
    with pytest.raises(dx.DxdyError, match=r"max_steps: .*got 'a'"):
        dx.lr_search(SPIRALS.override({"max_steps": 3}), steps="a")


def test_a_loader_that_is_empty_when_read_again_is_told():
    given = regression()

    class Once:
        def __init__(self, batches):
            self.batches = iter(batches)

        def __iter__(self):
            return self.batches

    with pytest.raises(dx.DxdyError, match="at least two batches a pass, got 0"):
        dx.lr_range_test(**given | {"loader": Once(given["loader"])})


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Make ``train`` a function of the rate: its validation loss, or NaN where it diverges."""

    def as_if(loss):
        rates = []

        def train(config, *, out=None):
            rates.append(config.lr)
            value = loss(config.lr)
            status = "completed" if math.isfinite(value) else "diverged"
            metrics = {"validation_loss": value} if math.isfinite(value) else {}
            return Run(tmp_path, status, None, config, metrics, [])

        monkeypatch.setattr(tuning, "train", train)
        return rates

    return as_if


def bracketed(monkeypatch, bracket):
    monkeypatch.setattr(tuning, "_bracket", lambda config: bracket)


def bowl(centre):
    return lambda rate: 0.1 + math.log(rate / centre) ** 2 if rate < 30 * centre else math.nan


@pytest.mark.parametrize("centre", [3e-3, 2e-2, 0.1, 0.5, 3.0])
def test_the_search_finds_the_best_rate_in_and_beside_the_bracket_and_sees_its_edge(monkeypatch, trained, centre):
    bracketed(monkeypatch, tuning.Bracket(0.01, 0.4))
    rates = trained(bowl(centre))
    search = dx.lr_search(SPIRALS)
    assert centre / 2 < search.best < 2 * centre
    assert rates[0] == 0.01 and len(set(rates)) == len(rates) <= 11
    assert [run.config.lr for run in search.runs] == sorted(rates)
    assert any(1.5 <= rate / search.best <= 6 for rate in rates)
    assert any(1 / 6 <= rate / search.best <= 1 / 1.5 for rate in rates)


@pytest.mark.parametrize(("low", "high", "count"), [(0.1, 0.11, 3), (0.1, 0.8, 3), (0.01, 0.2, 4), (1e-4, 1.0, 5)])
def test_the_grid_has_three_to_five_rates_from_end_to_end(low, high, count):
    grid = tuning._grid(tuning.Bracket(low, high))
    assert len(grid) == count
    np.testing.assert_allclose([grid[0], grid[-1]], [low, high])
    np.testing.assert_allclose(np.diff(np.log(grid)), math.log(high / low) / (count - 1))


@pytest.mark.parametrize(("loss", "edge"), [(lambda r: 1 / r, "upper"), (lambda r: r, "lower")])
def test_a_best_rate_at_the_edge_is_said(monkeypatch, trained, loss, edge):
    bracketed(monkeypatch, tuning.Bracket(0.01, 0.1))
    trained(loss)
    with pytest.warns(UserWarning, match=f"is at the {edge} edge of what was tried"):
        search = dx.lr_search(SPIRALS)
    assert len(search.runs) == tuning.MOST


def test_where_all_runs_diverge_there_is_no_best(monkeypatch, trained):
    bracketed(monkeypatch, tuning.Bracket(0.01, 0.1))
    trained(lambda rate: math.nan)
    with pytest.warns(UserWarning, match="no run completed"):
        search = dx.lr_search(SPIRALS)
    assert search.best is None and min(search.table.index) < 0.001
    assert plots.png(search.plot())


def test_without_a_bracket_decades_are_searched(monkeypatch, trained):
    bracketed(monkeypatch, None)
    rates = trained(bowl(0.03))
    search = dx.lr_search(SPIRALS)
    assert rates[:5] == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert 0.015 < search.best < 0.06 and search.bracket is None


def test_a_search_runs_the_configuration_with_another_rate_and_keeps_what_diverged(tmp_path):
    config = SPIRALS.override({"init": "default", "momentum": 0.0, "loss": "mse"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = dx.lr_search(config, steps=25, out=tmp_path)
    table = search.table
    assert set(table["status"]) <= {"completed", "diverged"} and len(table) == len(search.runs) >= 5
    for run in search.runs:
        assert run.config == config.override({"max_steps": 25, "lr": run.config.lr})
        assert Run.load(run.folder).status == run.status
    completed = table[table["status"] == "completed"]["validation_loss"]
    assert completed.min() == table.loc[search.best, "validation_loss"]
    again = dx.train(config.override({"max_steps": 25, "lr": search.best}), out=tmp_path / "again")
    assert again.metrics["validation_loss"] == completed.min()


def test_a_run_that_diverged_is_kept_with_its_folder_and_drawn_as_a_cross(monkeypatch, tmp_path):
    bracketed(monkeypatch, tuning.Bracket(1.0, 900.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = dx.lr_search(SPIRALS.override({"loss": "mse", "max_grad_norm": None}), steps=25, out=tmp_path)
    lost = search.table[search.table["status"] == "diverged"]
    assert len(lost) and np.isinf(lost["validation_loss"]).all()
    assert all((tmp_path / folder / "result.json").exists() for folder in lost["folder"])
    axes = search.plot().axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [list(lost.index)]
    assert crosses[0].get_color() == "red"
    ring = next(line for line in axes.lines if line.get_label() == "best")
    assert list(ring.get_xdata()) == [search.best]


def test_a_bracket_is_a_pair_and_draws_its_curve():
    bracket = dx.lr_range_test(**regression())
    low, high = bracket
    assert bracket == (low, high) and (bracket.low, bracket.high) == (low, high)
    figure = bracket.plot()
    line = figure.axes[0].lines[0]
    np.testing.assert_array_equal(line.get_ydata(), bracket.losses)
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"bracket", *bracket.rules}


def test_a_search_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuning.Search(None, None, ()).best = 1.0
