"""The reference loop does what a hand-written one does, and says what went wrong where."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dxdy_nb as dx
from dxdy_nb.ranks.session import Session
from dxdy_nb.training import datasets, models, parts
from dxdy_nb.training.loop import DECIMALS, evaluate, train_step, window_step, windows
from dxdy_nb.training.parts import lr_factor, pick_loss, pick_precision

SHORT = dx.RunConfig(data="spirals", model="mlp", max_steps=10)
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
ALONE = Session(0, 1, 0, torch.device("cpu"))
EPOCH = [64] * 6 + [16]  # the batches of the 400 spirals


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def batch():
    samples = datasets.spirals().train
    return samples.x[:32], samples.y[:32]


def test_the_same_seed_gives_the_same_weights_to_the_last_bit(tmp_path):
    one, same = dx.train(SHORT, out=tmp_path / "one"), dx.train(SHORT, out=tmp_path / "same")
    assert torch.equal(weights(one.model), weights(same.model))
    assert one.metrics == same.metrics


def test_another_seed_gives_other_weights(tmp_path):
    one, other = dx.train(SHORT, out=tmp_path / "one"), dx.train(SHORT.override({"seed": 1}), out=tmp_path / "other")
    assert not torch.equal(weights(one.model), weights(other.model))


def test_what_came_before_in_the_process_does_not_matter(tmp_path):
    one = dx.train(SHORT, out=tmp_path / "one")
    torch.manual_seed(77)
    assert torch.equal(weights(one.model), weights(dx.train(SHORT, out=tmp_path / "same").model))


def test_a_run_is_the_loop_that_one_would_write_by_hand(tmp_path):
    config = dx.RunConfig(data="spirals", model="mlp", epochs=2, schedule="linear", lr=0.1, momentum=0.5, seed=3)
    torch.manual_seed(3)
    data = datasets.spirals(3)
    model = models.MLP(2, 3)
    for p in model.parameters():
        nn.init.kaiming_normal_(p, nonlinearity="relu") if p.dim() > 1 else nn.init.zeros_(p)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    losses, total = [], 2 * 7
    for epoch in range(2):
        order = torch.randperm(400, generator=torch.Generator().manual_seed(3 + epoch))
        for ids in order.split(64):
            x, y = data.train.x[ids], data.train.y[ids]
            loss = cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            lr = 0.1 * (1 - len(losses) / total)
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(0.5).add_(g)
                p.data.sub_(lr * v)
            losses.append(loss.item())
    run = dx.train(config, out=tmp_path / "run")
    assert run.steps["loss"].tolist() == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(weights(run.model), weights(model), rtol=1e-3, atol=1e-5)


def test_a_step_is_a_step_of_plain_gradient_descent(batch):
    model = models.MLP(2, 3)
    before = [p.detach().clone() for p in model.parameters()]
    expected = cross_entropy(model(batch[0]), batch[1])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss = train_step(model, *batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert loss == expected.item()
    for p, old, g in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * g, rtol=1e-6, atol=1e-8)


def test_a_step_does_not_see_the_gradients_of_the_step_before(batch):
    model = models.MLP(2, 3)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e6)
    train_step(model, *batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(p.grad.abs().max() < 100 for p in model.parameters())


def test_clipping_scales_a_long_gradient_to_the_bound_and_leaves_a_short_one_alone(batch):
    model = models.MLP(2, 3)
    gradients = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))
    whole = torch.cat([g.flatten() for g in gradients])
    for bound, expected in ((0.01, whole * 0.01 / whole.norm()), (1e6, whole)):
        clipped = copy.deepcopy(model)
        train_step(clipped, *batch, cross_entropy, torch.optim.SGD(clipped.parameters(), lr=0.0), bound)
        seen = torch.cat([p.grad.flatten() for p in clipped.parameters()])
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=0)


def test_a_loss_that_is_not_finite_never_reaches_the_weights(batch):
    model = models.MLP(2, 3)
    before = weights(model).clone()
    x = batch[0].clone()
    x[5] = math.nan
    loss = train_step(model, x, batch[1], cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    assert math.isnan(loss)
    assert torch.equal(weights(model), before)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def window_of(sizes, dtype=torch.float32):
    """Return the first spirals as batches of these sizes."""
    samples = datasets.spirals().train
    order = torch.randperm(len(samples))[: sum(sizes)]
    return [datasets.Batch(samples.x[ids].to(dtype), samples.y[ids], ids) for ids in order.split(sizes)]


def still(model):
    """Return an optimizer that moves nothing, so that the gradients of its step can be looked at."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("bound", [None, 0.01])
def test_a_window_of_one_batch_in_fp32_is_the_plain_step_to_the_last_bit(batch, bound):
    model = models.MLP(2, 3)
    other = copy.deepcopy(model)
    sgd, same = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    for _ in range(3):
        loss = train_step(model, *batch, cross_entropy, sgd, bound)
        window = [datasets.Batch(*batch, torch.arange(32))]
        assert window_step(other, window, cross_entropy, same, NO_SCALER, ALONE, None, bound) == loss
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", [[32] * 8, [200, 40, 16], [250, 1, 1, 4], [7]], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_accumulation_is_the_large_batch_whatever_the_sizes(dtype, bound, sizes, loss):
    model, loss_fn, window = models.MLP(2, 3).to(dtype), pick_loss(loss), window_of(sizes, dtype)
    x, y = (torch.cat([batch[i] for batch in window]) for i in (0, 1))
    large = loss_fn(model(x), y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(large, list(model.parameters()))])
    assert window_step(model, window, loss_fn, still(model), NO_SCALER, ALONE) == pytest.approx(large.item(), rel=bound)
    assert (gradient(model) - expected).norm() <= bound * expected.norm()


def test_the_mean_of_unequal_batches_would_be_another_gradient():
    model, window = models.MLP(2, 3).double(), window_of([250, 1, 1, 4], torch.float64)
    for x, y, _ in window:
        (cross_entropy(model(x), y) / len(window)).backward()
    wrong = gradient(model)
    window_step(model, window, cross_entropy, still(model), NO_SCALER, ALONE)
    assert (wrong - gradient(model)).norm() > 0.5 * gradient(model).norm()


def test_windows_end_with_their_epoch_and_each_epoch_has_every_sample_once():
    loader = datasets.loader(datasets.spirals().train, 64, shuffle_seed=0)
    seen = list(windows(loader, 3, 7))
    assert [[len(batch.ids) for batch in window] for window in seen] == [EPOCH[:3], EPOCH[3:6], EPOCH[6:]] * 2 + [
        EPOCH[:3]
    ]
    first, second = (torch.cat([b.ids for window in seen[i : i + 3] for b in window]) for i in (0, 3))
    assert first.sort().values.equal(second.sort().values)
    assert not first.equal(second)


def test_a_row_of_the_record_is_a_window(tmp_path):
    config = SHORT.override({"accumulation_steps": 3, "max_steps": None, "epochs": 2, "lr": 0.1, "schedule": "linear"})
    run = dx.train(config, out=tmp_path / "run")
    assert run.steps["effective_batch"].tolist() == [192, 192, 16] * 2
    assert run.steps["lr"].tolist() == pytest.approx([0.1 * (1 - step / 6) for step in range(6)])
    assert run.validation.index.tolist() == [3, 6]
    torch.manual_seed(config.seed)
    model = models.MLP(2, 3)
    models.initialise(model, config.init)
    (window,) = windows(datasets.loader(datasets.spirals().train, 64, shuffle_seed=config.seed), 3, 1)
    x, y = (torch.cat([batch[i] for batch in window]) for i in (0, 1))
    large = cross_entropy(model(x), y)
    large.backward()
    assert run.steps["loss"][0] == pytest.approx(large.item(), rel=1e-5)
    assert run.steps["grad_norm"][0] == pytest.approx(gradient(model).norm().item(), rel=1e-5)


def test_a_bad_sample_in_a_window_leaves_the_weights_finite_and_is_named(tmp_path, monkeypatch):
    spirals = datasets.spirals()
    spirals.train.x[7] = math.nan
    monkeypatch.setattr(datasets, "load", lambda name, seed: spirals)
    run = dx.train(SHORT.override({"accumulation_steps": 7}), out=tmp_path / "run")
    assert run.status == "diverged"
    assert torch.isfinite(weights(run.model)).all()
    assert run.steps["bad_samples"].tolist() == [[int(spirals.train.ids[7])]]
    assert len(run.reason.split(",")) == len(spirals.train)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_forward_runs_in_the_precision_and_the_weights_stay_fp32(batch, precision):
    model = models.MLP(2, 3)
    dtype, scaler = pick_precision(precision, model, batch[0][:1])
    seen = []
    model.register_forward_hook(lambda model, inputs, output: seen.append(output.dtype))
    loss = window_step(model, [datasets.Batch(*batch, batch[1])], cross_entropy, still(model), scaler, ALONE, dtype)
    assert seen == [{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()} == {torch.float32}
    exact = cross_entropy(model(batch[0]), batch[1])
    assert loss == pytest.approx(exact.item(), rel=0 if precision == "fp32" else 1e-2)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact, list(model.parameters()))])
    assert (gradient(model) - expected).norm() <= 3e-2 * expected.norm()  # and without the scale of 65,536


def test_a_scaled_gradient_is_clipped_by_its_true_norm():
    model, window = models.MLP(2, 3), window_of([30, 20])
    before, scaler = weights(model).clone(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window_step(model, window, cross_entropy, optimizer, scaler, ALONE, torch.float16, max_grad_norm=0.01)
    assert (weights(model) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_whose_gradients_overflow_is_left_out_and_halves_the_scale():
    model = models.MLP(2, 3)
    before, scaler = weights(model).clone(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert math.isfinite(
        window_step(model, window_of([30, 20]), cross_entropy, optimizer, scaler, ALONE, torch.float16)
    )
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_run_records_the_steps_that_overflow_skips_and_its_schedule_waits(tmp_path, monkeypatch, optimizer):
    def too_large(name, model, x):
        return torch.float16, torch.amp.GradScaler("cpu", init_scale=2.0**26)

    monkeypatch.setattr(parts, "pick_precision", too_large)
    config = SHORT.override({"precision": "fp16", "accumulation_steps": 2, "optimizer": optimizer, "lr": 0.01})
    run = dx.train(config, out=tmp_path / "run")
    skipped = run.steps["skipped"].tolist()
    count = sum(skipped)
    assert run.status == "completed"
    assert 2 <= count <= 8
    assert skipped == [True] * count + [False] * (10 - count)
    factors = [0] * count + list(range(10 - count))
    assert run.steps["lr"].tolist() == pytest.approx([0.01 * lr_factor(config, step, 10) for step in factors])
    assert run.steps["loss"][:count].map(math.isfinite).all()
    assert run.steps["bad_samples"].tolist() == [[]] * 10


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_a_model_in_the_mode_it_was_in(training):
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train(training)
    evaluate(model, datasets.spirals().test, cross_entropy)
    assert [module.training for module in model.modules()] == [training] * 5


def test_evaluate_leaves_random_state_weights_and_gradients_alone():
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    evaluate(model, datasets.spirals().test, cross_entropy)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluate_evaluates_without_dropout():
    samples = datasets.spirals().test
    model = nn.Sequential(nn.Linear(2, 64), nn.Dropout(0.9), nn.Linear(64, 3))
    assert evaluate(model, samples, cross_entropy) == evaluate(model, samples, cross_entropy)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 512])
def test_evaluate_weighs_every_sample_alike_whatever_the_last_batch_holds(batch_size):
    samples = datasets.spirals().test  # 100 samples
    model = models.MLP(2, 3)
    with torch.no_grad():
        logits = model(samples.x)
    expected = {
        "loss": round(cross_entropy(logits, samples.y).item(), DECIMALS),
        "accuracy": (logits.argmax(1) == samples.y).double().mean().item(),
    }
    assert evaluate(model, samples, cross_entropy, batch_size) == pytest.approx(expected, abs=1.01 * 10**-DECIMALS)


def test_a_run_uses_the_learning_rates_of_its_schedule(tmp_path):
    config = SHORT.override({"schedule": "linear", "warmup_steps": 2, "max_steps": 4, "lr": 0.1})
    assert dx.train(config, out=tmp_path / "run").steps["lr"].tolist() == pytest.approx([0.05, 0.1, 0.1, 0.05])


@pytest.fixture(scope="module")
def diverged(tmp_path_factory):
    return dx.train(dx.RunConfig(loss="mse", lr=10), out=tmp_path_factory.mktemp("diverged") / "run")


def test_a_diverged_run_keeps_its_steps_and_says_at_which_it_ended(diverged):
    last = diverged.steps.index[-1]
    assert diverged.status == "diverged"
    assert 0 < last < 18
    assert diverged.steps.index.tolist() == list(range(last + 1))
    assert f"at step {last};" in diverged.reason
    assert not math.isfinite(diverged.steps["loss"][last])
    assert diverged.steps["loss"][:-1].map(math.isfinite).all()
    assert diverged.steps["skipped"].tolist() == [False] * last + [True]
    assert torch.isfinite(weights(diverged.model)).all()


def test_a_diverged_run_names_the_samples_of_its_last_batch(diverged):
    config, last = diverged.config, diverged.steps.index[-1]
    loader = datasets.loader(datasets.digits().train, config.batch_size, shuffle_seed=config.seed)
    batches = [batch.ids.tolist() for batch in loader]
    assert diverged.reason.endswith(f"sample ids of its batch: {batches[last]}")
    assert diverged.steps["bad_samples"][last] == batches[last]


def test_one_bad_sample_ends_a_run_with_finite_weights(tmp_path, monkeypatch):
    digits = datasets.digits()
    place = 700
    digits.train.x[place] = math.nan
    monkeypatch.setattr(datasets, "load", lambda name, seed: digits)
    run = dx.train(dx.RunConfig(max_steps=19), out=tmp_path / "run")
    assert run.status == "diverged"
    assert torch.isfinite(weights(run.model)).all()
    assert run.steps["bad_samples"].iloc[-1] == [int(digits.train.ids[place])]
    assert len(run.steps) == run.steps.index[-1] + 1


def test_a_run_has_the_steps_of_its_epochs_and_a_row_for_each_validation(tmp_path):
    run = dx.train(dx.RunConfig(data="spirals", model="mlp", epochs=5, validate_every=2), out=tmp_path / "run")
    a_pass = math.ceil(400 / 64)
    assert len(run.steps) == 5 * a_pass
    assert run.validation.index.tolist() == [2 * a_pass, 4 * a_pass, 5 * a_pass]
    assert run.metrics["validation_accuracy"] == run.validation["accuracy"].iloc[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_validation_and_test_metrics_are_those_of_the_model_that_is_returned(tmp_path, precision):
    run = dx.train(SHORT.override({"precision": precision}), out=tmp_path / "run")
    splits = datasets.spirals(SHORT.seed)
    for name, part in (("validation", splits.validation), ("test", splits.test)):
        with torch.no_grad():
            logits = run.model(part.x)  # in fp32 always
            right = (logits.argmax(1) == part.y).double().mean().item()
        assert run.metrics[f"{name}_loss"] == pytest.approx(cross_entropy(logits, part.y).item(), abs=1e-4)
        assert run.metrics[f"{name}_accuracy"] == pytest.approx(right, abs=1e-4)


def test_the_default_run_reaches_the_accuracy_bar(tmp_path):
    run = dx.train(dx.RunConfig(), out=tmp_path / "run")
    assert run.status == "completed"
    assert run.metrics["test_accuracy"] >= 0.97


@pytest.mark.parametrize(
    ("values", "bar"),
    [
        ({"data": "spirals", "model": "mlp", "epochs": 30}, 0.8),  # chance: 1/3
        ({"data": "sequences", "model": "gru", "optimizer": "adam", "lr": 0.01, "epochs": 12}, 0.5),  # chance: 1/8
    ],
)
def test_the_other_data_sets_are_learnt_far_above_chance(tmp_path, values, bar):
    assert dx.train(dx.RunConfig(**values), out=tmp_path / "run").metrics["test_accuracy"] > bar
