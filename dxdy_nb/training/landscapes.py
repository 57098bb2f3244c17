"""Landscapes of two numbers, and the update rules of optimizers as plain recurrences over them.

In two dimensions a loop of ``torch.optim`` costs over twenty times as much, too much for a slider. So the rules
stand here in numpy, and a test holds each to ``torch.optim``, its defaults included. Muon is torch's own: it works in
bfloat16 inside.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dxdy_nb.errors import DxdyError, suggestion

Array = np.ndarray[Any, np.dtype[np.float64]]
Kept = defaultdict[str, Any]  # what an optimizer remembers from step to step; all of it starts at zero
SEEDS = 16  # walks over a noisy landscape
THERE = 0.01  # of the starting height: who stays below it has arrived


# ---- landscapes ----


@dataclass(frozen=True)
class Landscape:
    """A function of points, shape (..., 2), and what is known about it.

    Parameters
    ----------
    value, gradient : of points; of a matrix, whose columns are the two directions, the value is one number
    start : where a walk begins, shape (2,); (walks, 2) with noise; (2, 2) for a matrix
    across : how far a point stands from the floor of the valley, signed
    curvature : the largest eigenvalue of the Hessian at the minimum: λ
    lowest : the value there
    quadratic : the curvature is the same everywhere, so that stability is known exactly
    noise : standard deviation of what is added to each gradient
    """

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    start: Array
    across: Callable[[Array], Array]
    curvature: float
    lowest: float = 0.0
    quadratic: bool = False
    noise: float = 0.0


def quadratic(hessian: Array, start: Array, noise: float = 0.0, matrix: bool = False) -> Landscape:
    """Return ½ zᵀHz; of a matrix W the sum over its rows: a linear layer whose inputs have covariance H."""
    eigenvalues, directions = np.linalg.eigh(hessian)

    def value(z: Array) -> Array:
        of_rows = 0.5 * (z * (z @ hessian)).sum(-1)
        return of_rows.sum(-1) if matrix else of_rows

    def across(z: Array) -> Array:
        distance = z @ directions[:, -1]
        return distance[..., 0] if matrix else distance

    return Landscape(value, lambda z: z @ hessian, start, across, float(eigenvalues[-1]), quadratic=True, noise=noise)


def bowl(condition: float, start: Array) -> Landscape:
    """Return curvature 1 along x, ``condition`` along y."""
    return quadratic(np.diag([1.0, condition]), start)


def ravine(condition: float, start: Array) -> Landscape:
    """Return the bowl turned by 30 degrees: no coordinate runs along it."""
    c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
    turn = np.array([[c, -s], [s, c]])
    return quadratic(turn @ np.diag([1.0, condition]) @ turn.T, start)


def noisy(condition: float, start: Array) -> Landscape:
    """Return the bowl seen through mini-batches: each gradient has noise, and several walks start together."""
    return quadratic(np.diag([1.0, condition]), np.tile(start, (SEEDS, 1)), noise=1.0)


def matrix(condition: float, start: Array) -> Landscape:
    """Return a 2×2 weight on the bowl: its two rows walk as one matrix, which is what Muon needs."""
    return quadratic(np.diag([1.0, condition]), np.stack([start, [0.8, 0.4]]), matrix=True)


def saddle(condition: float, start: Array) -> Landscape:
    """Return x²/2 - y²/2 + y⁴/4: flat at the origin, minima at y = ±1. On the axis y = 0 nothing points to them."""

    def gradient(z: Array) -> Array:
        return np.stack([z[..., 0], z[..., 1] ** 3 - z[..., 1]], -1)

    def value(z: Array) -> Array:
        return z[..., 0] ** 2 / 2 - z[..., 1] ** 2 / 2 + z[..., 1] ** 4 / 4

    return Landscape(value, gradient, start, lambda z: z[..., 0], curvature=2.0, lowest=-0.25)


def rosenbrock(condition: float, start: Array) -> Landscape:
    """Return (1-x)² + 100 (y-x²)²: a bent valley with a nearly flat floor, minimum at (1, 1)."""

    def across(z: Array) -> Array:
        return z[..., 1] - z[..., 0] ** 2

    def gradient(z: Array) -> Array:
        x, off = z[..., 0], across(z)
        return np.stack([-2 * (1 - x) - 400 * x * off, 200 * off], -1)

    highest = float(np.linalg.eigvalsh([[802.0, -400.0], [-400.0, 200.0]])[-1])
    return Landscape(lambda z: (1 - z[..., 0]) ** 2 + 100 * across(z) ** 2, gradient, start, across, highest)


LANDSCAPES: dict[str, tuple[Callable[[float, Array], Landscape], tuple[float, float]]] = {  # and where a walk starts
    "bowl": (bowl, (-1.8, 1.0)),
    "ravine": (ravine, (-1.8, 0.4)),
    "saddle": (saddle, (-1.6, 0.1)),
    "rosenbrock": (rosenbrock, (-1.5, 1.0)),
    "noisy bowl": (noisy, (-1.8, 1.0)),
    "matrix": (matrix, (-1.8, 1.0)),
}


# ---- a walk ----


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One run of an optimizer over a landscape, as plain values.

    Parameters
    ----------
    momentum : of momentum, Nesterov and Muon; Adam's first beta
    beta2 : Adam's second beta, RMSProp's alpha
    condition : the largest curvature of a bowl over its smallest; saddle and Rosenbrock have their own
    y : where it starts; None is the landscape's own place

    Raises
    ------
    DxdyError
        A name that is not known, a number out of its range, Muon without a matrix.

    Examples
    --------
    >>> Walk(landscape="bowl", optimizer="sgd", lr=0.1).path()[1].tolist()  # lr × curvature: 0.1 and 1
    [-1.62, 0.0]
    """

    landscape: str = "bowl"
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    beta2: float = 0.99
    condition: float = 10.0
    y: float | None = None
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        names = {"landscape": list(LANDSCAPES), "optimizer": list(OPTIMIZERS)}
        for field, known in names.items():
            if (name := getattr(self, field)) not in known:
                raise DxdyError(f"{field}: expected one of {', '.join(known)}; got {name!r}.{suggestion(name, known)}")
        if self.optimizer not in optimizers(self.landscape):
            raise DxdyError("optimizer: muon needs landscape='matrix'. On points it is only a step of fixed length.")
        betas = 0 <= self.momentum < 1 and 0 <= self.beta2 < 1
        if not (0 < self.lr < math.inf and betas and self.condition >= 1 and self.steps >= 1):
            limits = "lr above 0, momentum and beta2 from 0 to below 1, condition and steps from 1"
            raise DxdyError(f"a walk needs {limits}; got {self}")

    def over(self) -> Landscape:
        """Return the landscape, with the place where this walk starts."""
        make, (x, y) = LANDSCAPES[self.landscape]
        return make(self.condition, np.array([x, y if self.y is None else self.y]))

    @property
    def units(self) -> float:
        """The learning rate in units of 2/λ, λ being the curvature at the minimum."""
        return self.lr * self.over().curvature / 2

    def path(self) -> Array:
        """Return all places of the walk, its start first: a row a step."""
        return descend(self)


# ---- rules: a walk's rates and betas, a place, the gradient there and what was kept → the next place ----


def sgd(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Against the gradient."""
    return z - walk.lr * g


def heavy_ball(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Along a velocity that gathers gradients, as ``SGD(momentum=...)``."""
    kept["v"] = walk.momentum * kept["v"] + g
    return z - walk.lr * kept["v"]


def nesterov(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Along the velocity that the next step would have."""
    kept["v"] = walk.momentum * kept["v"] + g
    return z - walk.lr * (g + walk.momentum * kept["v"])


def rmsprop(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Against the gradient over its recent size; ``beta2`` is what torch calls alpha."""
    kept["s"] = walk.beta2 * kept["s"] + (1 - walk.beta2) * g * g
    return z - walk.lr * (g / (np.sqrt(kept["s"]) + 1e-8))


def adam(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Along the mean gradient over its recent size, both corrected for their start at zero."""
    kept["t"] += 1
    kept["m"] = kept["m"] + (1 - walk.momentum) * (g - kept["m"])
    kept["s"] = walk.beta2 * kept["s"] + (1 - walk.beta2) * g * g
    size = np.sqrt(kept["s"]) / math.sqrt(1 - walk.beta2 ** kept["t"]) + 1e-8
    return z - walk.lr / (1 - walk.momentum ** kept["t"]) * (kept["m"] / size)


def adamw(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Adam, and the weights shrink by ``lr`` times torch's weight decay of 0.01."""
    return adam(walk, z * (1 - walk.lr * 0.01), g, kept)


def muon(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    """Along the velocity with its singular values set to about 1: ``torch.optim.Muon`` itself, on a matrix."""
    if "optimizer" not in kept:
        kept["weight"] = torch.nn.Parameter(torch.tensor(z))
        kept["optimizer"] = torch.optim.Muon([kept["weight"]], walk.lr, momentum=walk.momentum, weight_decay=0.0)
    kept["weight"].data, kept["weight"].grad = torch.tensor(z), torch.tensor(g)
    kept["optimizer"].step()
    return kept["weight"].detach().numpy().copy()


OPTIMIZERS: dict[str, Callable[[Walk, Array, Array, Kept], Array]] = {
    "sgd": sgd,
    "momentum": heavy_ball,
    "nesterov": nesterov,
    "rmsprop": rmsprop,
    "adam": adam,
    "adamw": adamw,
    "muon": muon,
}


# ---- what a walk does ----


def optimizers(landscape: str) -> list[str]:
    """Return which optimizers make sense on a landscape: Muon needs a matrix."""
    return [name for name in OPTIMIZERS if name != "muon" or landscape == "matrix"]


def descend(walk: Walk) -> Array:
    """Return all places of a walk, its start first; what is no longer finite stays in it."""
    land = walk.over()
    rule, path = OPTIMIZERS[walk.optimizer], [land.start]
    kept: Kept = defaultdict(float)
    noise = np.random.default_rng(walk.seed)
    with np.errstate(all="ignore"):
        for _ in range(walk.steps):
            gradient = land.gradient(path[-1])
            if land.noise:
                gradient = gradient + land.noise * noise.standard_normal(gradient.shape)
            path.append(rule(walk, path[-1], gradient, kept))
    return np.stack(path)


def heights(land: Landscape, path: Array) -> Array:
    """Return how far above the minimum each place lies; shape (steps + 1,) or, with noise, (steps + 1, walks)."""
    return land.value(path) - land.lowest


def outcome(walk: Walk, path: Array) -> tuple[str, int | None]:
    """Return what a walk does, and after how many steps it stays below 1 % of its starting height (None: it does not).

    ``diverges``: it ends above its start. ``oscillates``: it crosses the floor of the valley twice or more.
    ``converges``: it arrives without that. ``stalls``: none of these. With noise, the mean over the walks is judged.

    Examples
    --------
    >>> for lr in (0.001, 0.05, 0.15, 0.21):
    ...     walk = Walk(lr=lr, steps=100)
    ...     print(outcome(walk, walk.path()))
    ('stalls', None)
    ('converges', 32)
    ('oscillates', 10)
    ('diverges', None)
    """
    land = walk.over()
    with np.errstate(all="ignore"):
        height, across = heights(land, path), land.across(path)
    if land.noise:
        height, across = height.mean(-1), across.mean(-1)
    if not height[-1] < height[0]:
        return "diverges", None
    above = np.flatnonzero(height > THERE * height[0])
    arrived = int(above[-1]) + 1 if above[-1] + 1 < len(height) else None
    seen = across[np.abs(across) > (0.2 if land.noise else 1e-9) * np.abs(across).max()]  # not rounding, not noise
    if np.count_nonzero(np.diff(np.sign(seen))) >= 2:
        return "oscillates", arrived
    return "stalls" if arrived is None else "converges", arrived


def zones(walk: Walk) -> tuple[float, float] | None:
    """Return from which rate on, in units of 2/λ, a walk oscillates and diverges; None where that is not known exactly.

    On a quadratic each eigendirection follows its own recurrence, and its characteristic roots decide: they leave the
    positive reals where it begins to oscillate, and the unit circle where it diverges.

    Examples
    --------
    >>> zones(Walk(optimizer="sgd")), zones(Walk(optimizer="adam"))
    ((0.5, 1.0), None)
    """
    b = walk.momentum
    known = {
        "sgd": (0.5, 1.0),
        "momentum": ((1 - math.sqrt(b)) ** 2 / 2, 1 + b),
        "nesterov": (((1 - b) / (1 + b)) ** 2 / 2, (1 + b) / (1 + 2 * b)),
    }
    return known.get(walk.optimizer) if walk.over().quadratic else None
