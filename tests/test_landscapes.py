import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dxdy_nb.errors import DxdyError
from dxdy_nb.training.landscapes import LANDSCAPES, OPTIMIZERS, Walk, heights, optimizers, outcome, zones

TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, w: torch.optim.SGD(p, lr=w.lr),
    "momentum": lambda p, w: torch.optim.SGD(p, lr=w.lr, momentum=w.momentum),
    "nesterov": lambda p, w: torch.optim.SGD(p, lr=w.lr, momentum=w.momentum, nesterov=True),
    "rmsprop": lambda p, w: torch.optim.RMSprop(p, lr=w.lr, alpha=w.beta2),
    "adam": lambda p, w: torch.optim.Adam(p, lr=w.lr, betas=(w.momentum, w.beta2)),
    "adamw": lambda p, w: torch.optim.AdamW(p, lr=w.lr, betas=(w.momentum, w.beta2)),
    "muon": lambda p, w: torch.optim.Muon(p, lr=w.lr, momentum=w.momentum, weight_decay=0.0),
}
PAIRS = [(landscape, optimizer) for landscape in LANDSCAPES for optimizer in optimizers(landscape)]
QUADRATIC = ("bowl", "ravine", "noisy bowl", "matrix")
ADAPTIVE = ("rmsprop", "adam", "adamw", "muon")


def rates(landscape: str, optimizer: str) -> tuple[float, ...]:
    """Return learning rates from far too small to diverging, for adaptive optimizers from tiny to huge."""
    if optimizer in ADAPTIVE:
        return (0.001, 0.01, 0.1, 0.3, 1.0)
    unit = 2 / Walk(landscape=landscape).over().curvature
    return tuple(u * unit for u in (0.05, 0.3, 0.7, 1.2, 2.5))


def torch_path(walk: Walk) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and gradients of torch's own optimizer; the gradient is the landscape's, checked below."""
    land, noise = walk.over(), np.random.default_rng(walk.seed)
    point = torch.nn.Parameter(torch.tensor(land.start))
    optimizer = TORCH[walk.optimizer]([point], walk)
    path, gradients = [land.start], []
    for _ in range(walk.steps):
        gradient = land.gradient(path[-1])
        gradients.append(gradient + land.noise * noise.standard_normal(gradient.shape) if land.noise else gradient)
        point.grad = torch.tensor(gradients[-1])
        optimizer.step()
        path.append(point.detach().numpy().copy())
    return np.stack(path), np.stack(gradients)


def off(mine: np.ndarray, torchs: np.ndarray) -> float:
    """Return the largest difference, in units of max(1, |z|), while torch's place is finite."""
    finite = np.isfinite(torchs)
    return float((np.abs(mine[finite] - torchs[finite]) / np.maximum(1, np.abs(torchs[finite]))).max())


@pytest.mark.parametrize(("landscape", "optimizer"), PAIRS)
@np.errstate(all="ignore")
def test_a_walk_is_that_of_torch_optim_over_200_steps(landscape: str, optimizer: str) -> None:
    compared = 0
    for lr in rates(landscape, optimizer):
        walk = Walk(landscape=landscape, optimizer=optimizer, lr=lr, steps=200)
        path, gradients = torch_path(walk)
        # Each step on its own, from torch's place and with torch's gradient: holds for chaotic walks too.
        rule, kept = OPTIMIZERS[optimizer], defaultdict(float)
        followed = np.stack([rule(walk, z, g, kept) for z, g in zip(path[:-1], gradients, strict=True)])
        assert off(followed, path[1:]) <= 1e-12, lr
        # And the whole walk, but where a difference in the last digit grows: off the quadratics outward it grows as
        # fast as the walk itself, and RMSProp bounces about the minimum without rest.
        diverges = outcome(walk, path)[0] == "diverges"
        if not (diverges and landscape not in QUADRATIC) and not (optimizer == "rmsprop" and lr > 0.1):
            assert off(walk.path(), path) <= 1e-12, lr
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(("beta1", "beta2"), [(0.0, 0.5), (0.3, 0.9), (0.95, 0.999)])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "muon"])
def test_the_betas_mean_what_they_mean_in_torch(optimizer: str, beta1: float, beta2: float) -> None:
    if optimizer == "nesterov" and beta1 == 0:
        return  # torch refuses it: without momentum there is nothing to look ahead along
    walk = Walk(optimizer=optimizer, lr=0.02, momentum=beta1, beta2=beta2, steps=200)
    assert off(walk.path(), torch_path(walk)[0]) <= 1e-12


@pytest.mark.parametrize("landscape", LANDSCAPES)
def test_gradient_and_curvature_are_those_of_the_value(landscape: str) -> None:
    land = Walk(landscape=landscape, condition=7.0).over()
    functions = {
        "saddle": lambda z: z[0] ** 2 / 2 - z[1] ** 2 / 2 + z[1] ** 4 / 4,
        "rosenbrock": lambda z: (1 - z[0]) ** 2 + 100 * (z[1] - z[0] ** 2) ** 2,
    }
    turned = math.cos(math.pi / 6), math.sin(math.pi / 6)
    functions["ravine"] = lambda z: (
        (turned[0] * z[0] + turned[1] * z[1]) ** 2 / 2 + 7 * (turned[0] * z[1] - turned[1] * z[0]) ** 2 / 2
    )
    function = functions.get(landscape, lambda z: z[0] ** 2 / 2 + 7 * z[1] ** 2 / 2)
    points = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    values = torch.stack([function(point) for point in points])
    (gradient,) = torch.autograd.grad(values.sum(), points)
    rows = points.detach().numpy()
    np.testing.assert_allclose(land.gradient(rows), gradient.numpy(), rtol=1e-12, atol=1e-12)
    matrix = landscape == "matrix"
    np.testing.assert_allclose(
        land.value(rows[:, None, :] if matrix else rows), values.detach().numpy(), rtol=1e-12, atol=1e-12
    )
    minimum = {"saddle": (0.0, 1.0), "rosenbrock": (1.0, 1.0)}.get(landscape, (0.0, 0.0))
    hessian = torch.autograd.functional.hessian(function, torch.tensor(minimum, dtype=torch.float64))
    assert land.curvature == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-12)
    assert land.lowest == pytest.approx(float(function(torch.tensor(minimum, dtype=torch.float64))), abs=1e-15)


def measured(walk: Walk, told: Callable[[Walk], bool], low: float, high: float) -> float:
    """Return the rate, in units of 2/λ, from which on something is told of a walk: by bisection."""
    unit = walk.lr / walk.units
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if told(replace(walk, lr=middle * unit)) else (middle, high)
    return low


def grows(walk: Walk) -> bool:
    across = np.abs(walk.path()[:, 1])
    return not across[-1] <= across[0]


def crosses(walk: Walk) -> bool:
    across = walk.path()[:, 1]
    return bool((across[1:] * across[:-1] < 0).any())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("condition", [10.0, 100.0])
@np.errstate(all="ignore")
def test_the_zones_on_the_bowl_are_where_they_are_measured(optimizer: str, condition: float) -> None:
    walk = Walk(optimizer=optimizer, condition=condition, steps=2500)
    oscillates, diverges = zones(walk)
    assert measured(walk, grows, 0.01, 30.0) == pytest.approx(diverges, rel=2e-3)
    assert measured(walk, crosses, 1e-4, 0.9 * diverges) == pytest.approx(oscillates, rel=2e-3)


def test_what_is_told_agrees_with_the_zones() -> None:
    for optimizer in ("sgd", "momentum", "nesterov"):
        for landscape in ("bowl", "ravine", "matrix"):
            walk = Walk(landscape=landscape, optimizer=optimizer, momentum=0.5, steps=200)
            oscillates, diverges = zones(walk)
            unit = walk.lr / walk.units
            for units, word in (
                (0.8 * oscillates, "converges"),
                (0.9 * diverges, "oscillates"),
                (1.1 * diverges, "diverges"),
            ):
                slower = replace(walk, lr=units * unit)
                assert outcome(slower, slower.path())[0] == word, (optimizer, landscape, units)


def test_no_zone_is_told_where_none_is_exact() -> None:
    assert zones(Walk(optimizer="adam")) is None
    assert zones(Walk(landscape="rosenbrock")) is None
    assert zones(Walk(landscape="saddle", optimizer="momentum")) is None


@pytest.mark.parametrize("optimizer", optimizers("saddle"))
def test_on_the_axis_of_the_saddle_nothing_leaves_it(optimizer: str) -> None:
    on, beside = (Walk(landscape="saddle", optimizer=optimizer, lr=0.1, y=y, steps=200) for y in (0.0, 1e-6))
    assert (on.path()[:, 1] == 0).all()
    assert outcome(on, on.path())[1] is None
    if optimizer != "sgd":  # it would need some more steps
        assert abs(beside.path()[-1, 1]) > 0.5


def test_noise_gives_each_walk_its_own_and_each_seed_its_own() -> None:
    walk = Walk(landscape="noisy bowl", lr=0.05)
    path = walk.path()
    assert path.shape == (101, 16, 2)
    assert len(np.unique(path[-1, :, 0])) == 16
    assert (walk.path() == path).all()
    assert (replace(walk, seed=1).path()[-1] != path[-1]).all()
    quiet = Walk(lr=0.05, steps=100)
    assert heights(walk.over(), path)[-1].mean() > 100 * heights(quiet.over(), quiet.path())[-1]


def test_muon_takes_matrices_alone_and_other_mistakes_are_told() -> None:
    with pytest.raises(DxdyError, match="optimizer: muon needs landscape='matrix'"):
        Walk(optimizer="muon")
    with pytest.raises(DxdyError, match="Did you mean 'rosenbrock'"):
        Walk(landscape="rosenbrok")
    for wrong in ({"lr": 0.0}, {"lr": math.nan}, {"momentum": 1.0}, {"beta2": -0.1}, {"condition": 0.5}, {"steps": 0}):
        with pytest.raises(DxdyError, match="a walk needs lr above 0"):
            Walk(**wrong)


def test_muon_moves_a_point_by_a_fixed_length_whatever_its_gradient() -> None:
    moved = []
    for size in (1.0, 1000.0):
        weight = torch.nn.Parameter(torch.zeros(1, 2))
        weight.grad = size * torch.tensor([[3.0, 4.0]])
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
        moved.append(weight.detach())
    assert torch.allclose(*moved, rtol=0.02)
    assert float(moved[0][0, 0] / moved[0][0, 1]) == pytest.approx(0.75, rel=0.02)
