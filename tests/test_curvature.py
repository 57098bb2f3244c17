"""Lanczos against exact Hessians, and when curvature cannot tell."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import dxdy_nb as dx
from dxdy_nb.training import datasets
from dxdy_nb.training.curvature import lanczos

SPIRALS = datasets.spirals().train
BATCH = (SPIRALS.x, SPIRALS.y)


def exact(model, loss_fn, batch):
    """Return the eigenvalues of the Hessian that torch computes row by row, in float64."""
    model = copy.deepcopy(model).double()
    names, values = zip(*model.named_parameters(), strict=True)
    x = batch[0].double() if batch[0].is_floating_point() else batch[0]
    y = batch[1].double() if batch[1].is_floating_point() else batch[1]
    sizes = [p.numel() for p in values]

    def loss(flat):
        parts = [part.view(p.shape) for part, p in zip(flat.split(sizes), values, strict=True)]
        return loss_fn(torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,)), y)

    hessian = torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for p in values]))
    return torch.linalg.eigvalsh(hessian)


def trained(activation=nn.Tanh, steps=150, extra=(), seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 16), *extra, activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
    return model


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(36, 10))


DIGITS = datasets.digits().train
CASES = {
    "tanh, trained": (trained(), cross_entropy, BATCH),
    "relu, trained": (trained(nn.ReLU), cross_entropy, BATCH),
    "gelu, trained a little": (trained(nn.GELU, 20), cross_entropy, BATCH),
    "tanh, at initialisation": (trained(steps=0), cross_entropy, BATCH),
    "convolution": (convolutional(), cross_entropy, (DIGITS.x[:200], DIGITS.y[:200])),
    "squares": (nn.Linear(2, 3), lambda o, y: mse_loss(o, nn.functional.one_hot(y, 3).to(o.dtype)), BATCH),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ends_of_the_spectrum_are_within_two_percent_of_the_exact_hessians(case):
    model, loss_fn, batch = CASES[case]
    assert sum(p.numel() for p in model.parameters()) <= 500
    found, values = dx.sharpness(model=model, loss_fn=loss_fn, batch=batch), exact(model, loss_fn, batch)
    assert found.largest == pytest.approx(values[-1].item(), rel=0.02)
    assert found.smallest == pytest.approx(values[0].item(), rel=0.02, abs=1e-6)
    assert found.residual < 0.01


@pytest.mark.parametrize("size", [1, 2, 30, 200])
def test_lanczos_finds_the_ends_of_any_spectrum(size):
    matrix = torch.randn(size, size, dtype=torch.float64)
    matrix = matrix + matrix.T
    values = torch.linalg.eigvalsh(matrix)
    start = torch.randn(size, dtype=torch.float64)
    largest, smallest, residual, count = lanczos(lambda v: matrix @ v, start, 80)
    np.testing.assert_allclose([largest, smallest], [values[-1], values[0]], rtol=2e-3)
    assert count <= min(size, 80) and residual <= 0.01


def test_a_residual_bounds_the_distance_to_an_eigenvalue():
    values = torch.linspace(0, 1, 500, dtype=torch.float64)
    largest, _, residual, count = lanczos(lambda v: values * v, torch.ones(500, dtype=torch.float64), 5)
    assert count == 5 and residual > 0.01
    assert (values - largest).abs().min() <= residual * max(largest, 1)


def test_of_a_bowl_two_over_the_sharpness_is_where_gradient_descent_begins_to_diverge():
    x = torch.randn(200, 3) * torch.tensor([1.0, 2.0, 0.5])
    model = nn.Linear(3, 1, bias=False)
    y = x @ torch.tensor([[1.0], [-1.0], [2.0]])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.9, -0.8, 1.8]]))
    found = dx.sharpness(model=model, loss_fn=mse_loss, batch=(x, y))
    assert found.verdict == "measured" and found.reason == ""
    for factor, diverges in ((0.98, False), (1.02, True)):
        weight = model.weight.detach().clone().requires_grad_()
        losses = []
        for _ in range(2000):
            loss = mse_loss(x @ weight.T, y)
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = (weight - factor * found.critical_rate * gradient).detach().requires_grad_()
            losses.append(loss.item())
        assert (losses[-1] > losses[0]) == diverges


def test_a_trained_net_is_measured():
    found = dx.sharpness(model=trained(), loss_fn=cross_entropy, batch=BATCH)
    assert (found.verdict, found.reason) == ("measured", "")
    assert found.critical_rate == 2 / found.largest


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_at_initialisation_it_cannot_tell(activation, seed):
    found = dx.sharpness(model=trained(activation, steps=0, seed=seed), loss_fn=cross_entropy, batch=BATCH)
    assert (found.verdict, found.critical_rate) == ("cannot tell", None)
    assert "next to nothing is learnt yet, as at initialisation" in found.reason
    assert math.isfinite(found.largest)


def test_a_batchnorm_in_training_mode_cannot_tell_and_in_eval_mode_can():
    model = trained(extra=[nn.BatchNorm1d(16)])
    model.train()
    found = dx.sharpness(model=model, loss_fn=cross_entropy, batch=BATCH)
    assert found.verdict == "cannot tell" and found.reason.startswith("1 is a BatchNorm in training mode")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = None
            module.reset_running_stats()
    model(BATCH[0])
    assert dx.sharpness(model=model.eval(), loss_fn=cross_entropy, batch=BATCH).verdict == "measured"


def test_too_few_iterations_cannot_tell():
    found = dx.sharpness(model=trained(), loss_fn=cross_entropy, batch=BATCH, iterations=3)
    assert (found.verdict, found.iterations) == ("cannot tell", 3)
    assert "After 3 iterations the residual is" in found.reason


def test_a_saddle_cannot_tell():
    model = nn.Linear(2, 1, bias=False)

    def loss_fn(output, target):  # w1² - w2² of the two outputs, and a part that knows the right order of targets
        return output[0, 0] ** 2 - output[1, 0] ** 2 + (target - torch.arange(2)).square().sum() + 1

    for seed in range(5):  # until two targets have changed places
        found = dx.sharpness(model=model, loss_fn=loss_fn, batch=(torch.eye(2), torch.arange(2)), seed=seed)
        assert (found.largest, found.smallest) == pytest.approx((2, -2))
        assert found.verdict == "cannot tell"
        if "one way" in found.reason:
            break
    assert found.reason.startswith("λ is -2 one way and 2 the other")


def test_targets_that_cannot_be_shuffled_and_losses_that_are_no_number_cannot_tell():
    model = trained()
    alone = dx.sharpness(model=model, loss_fn=cross_entropy, batch=(BATCH[0][:1], BATCH[1][:1]))
    assert alone.verdict == "cannot tell"
    pair = dx.sharpness(model=model, loss_fn=lambda o, y: cross_entropy(o, y[0]), batch=(BATCH[0], [BATCH[1]]))
    assert "Whether anything is learnt is not known" in pair.reason
    found = dx.sharpness(model=model, loss_fn=cross_entropy, batch=(BATCH[0] * math.nan, BATCH[1]))
    assert (found.verdict, found.reason) == ("cannot tell", "The loss is nan.")


def test_a_hessian_that_is_not_finite_cannot_tell():
    found = dx.sharpness(model=trained(), loss_fn=lambda o, y: 1 + (o - o.detach()).abs().sqrt().mean(), batch=BATCH)
    assert (found.verdict, found.iterations, found.critical_rate) == ("cannot tell", 1, None)
    assert found.reason.startswith("The loss is 1, and its Hessian is not finite here")


def test_a_linear_loss_has_no_curvature():
    model = nn.Linear(2, 1, bias=False)
    found = dx.sharpness(model=model, loss_fn=lambda o, y: (o[:, 0] * y).mean(), batch=(BATCH[0], BATCH[1]))
    assert (found.largest, found.smallest, found.verdict) == (0, 0, "cannot tell")


def test_attention_and_recurrent_nets_have_second_derivatives_here():
    x, y = torch.randn(8, 5, 8), torch.randint(3, (8,))
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(attention, nn.Flatten(), nn.Linear(40, 3))
    assert dx.sharpness(model=model, loss_fn=cross_entropy, batch=(x, y)).largest > 0
    gru = nn.GRU(8, 6, batch_first=True)
    found = dx.sharpness(model=gru, loss_fn=lambda o, y: cross_entropy(o[0][:, -1], y), batch=(x, y))
    assert found.largest > 0


def test_the_model_and_the_random_state_are_left_alone():
    model = trained(extra=[nn.BatchNorm1d(16), nn.Dropout(0.2)])
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    one = dx.sharpness(model=model, loss_fn=cross_entropy, batch=BATCH)
    assert one == dx.sharpness(model=model, loss_fn=cross_entropy, batch=BATCH)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_bad_input_is_told_in_a_sentence():
    given = {"model": trained(steps=0), "loss_fn": cross_entropy, "batch": BATCH}
    for change, match in (
        ({"batch": BATCH[0]}, r"batch: expected a pair \(x, y\), got Tensor"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="none")}, "loss_fn: expected one number, got shape"),
        ({"loss_fn": None}, "loss_fn: expected a function .*, got NoneType"),
        ({"iterations": 0}, "iterations: expected a whole number from 1 on, got 0"),
        ({"iterations": "3"}, "iterations: .*got '3'"),
        ({"model": trained(steps=0).requires_grad_(False)}, "no parameter requires a gradient"),
    ):
        with pytest.raises(dx.DxdyError, match=match):
            dx.sharpness(**given | change)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        dx.sharpness(**given | {"batch": (torch.randn(4, 7), torch.zeros(4, dtype=torch.long))})
