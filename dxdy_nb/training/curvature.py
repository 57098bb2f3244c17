"""How sharply is the loss curved? Both ends of its Hessian's spectrum, and when they say nothing about the rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from dxdy_nb.autograd import copies
from dxdy_nb.errors import DxdyError

ENOUGH = 1e-2  # of an eigenvalue: a residual of it at which Lanczos stops
NOTHING = 1e-6  # of the largest |eigenvalue|: what counts as zero
TOO_MUCH = 1e-2  # of the largest |eigenvalue|: a residual with which nothing is told
# Where the loss was a quarter below that with shuffled targets, and the negative end a fifth of the positive one at
# most, gradient descent on seven small nets first rose at 0.6 to 1.6 times 2/λ; elsewhere at 0.06 to 2.7 times.
LEARNT, LOPSIDED = 1 / 4, 5


@dataclass(frozen=True)
class Sharpness:
    """The largest and the smallest eigenvalue of a loss's Hessian, and whether they tell anything.

    ``residual`` is that of the worse of the two, ‖Hv − λv‖, in units of the largest |λ|; ``iterations`` counts products
    with the Hessian. ``reason`` says why it ``cannot tell``.
    """

    verdict: Literal["measured", "cannot tell"]
    largest: float
    smallest: float
    residual: float
    iterations: int
    reason: str = ""

    @property
    def critical_rate(self) -> float | None:
        """The rate 2/λ, above which plain full-batch gradient descent is unstable at this point; None if unknown."""
        return 2 / self.largest if self.verdict == "measured" else None


def sharpness(
    *,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    iterations: int = 60,
    seed: int = 0,
) -> Sharpness:
    """Return both ends of the spectrum of the Hessian of ``loss_fn(model(x), y)``, ``batch = (x, y)``.

    By Lanczos' method with products of the Hessian (a backward pass through the backward pass), on a float64 copy: the
    model is left alone. All vectors are kept, which takes ``iterations`` times the memory of the copy.

    It *cannot tell* what curvature means where a model has learnt next to nothing (there 2/λ does not predict which
    rates diverge, for λ is about to grow many times), where λ is not well above the negative curvature, where a
    BatchNorm in training mode ties the samples together, and where Lanczos has not converged. A high curvature is no
    alarm: above 2/λ full-batch gradient descent oscillates, and may go on to a flatter place; Adam on minibatches stays
    far below its own threshold. Of fewer than some 500 samples the curvature comes out up to a quarter too high.

    Parameters
    ----------
    iterations : products with the Hessian at most
    seed : of the first direction, of dropout, and of the order in which targets are shuffled

    Raises
    ------
    DxdyError
        No pair as batch, no function as loss, no number from 1 on as iterations, no trainable parameter, a loss that is
        no single number, a model that cannot work in float64.

    Notes
    -----
    Sources: Lanczos 1950; Cohen et al. 2021 (arXiv 2103.00065) on the edge of stability. Whether anything is learnt is
    told by shuffling the targets of the batch: that must make the loss at least a third higher.

    Examples
    --------
    >>> x = torch.randn(64, 1)
    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.constant_(model.weight, 3.0)
    Parameter containing:
    tensor([[3.]], requires_grad=True)
    >>> found = sharpness(model=model, loss_fn=nn.functional.mse_loss, batch=(x, 3 * x))
    >>> found.verdict, round(found.largest / float(2 * x.square().mean()), 3)
    ('measured', 1.0)
    """
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise DxdyError(f"batch: expected a pair (x, y), got {type(batch).__name__}.")
    if not callable(loss_fn):
        raise DxdyError(f"loss_fn: expected a function of (model(x), y), got {type(loss_fn).__name__}.")
    if not isinstance(iterations, Integral) or iterations < 1:
        raise DxdyError(f"iterations: expected a whole number from 1 on, got {iterations!r}.")
    # The fast kernels of attention have no second derivative.
    with copies.untouched(), sdpa_kernel(SDPBackend.MATH):
        loss = copies.of_model(model, loss_fn, batch, seed)
        value = loss.compute()
        if not value.isfinite():
            return Sharpness("cannot tell", math.nan, math.nan, math.nan, 0, f"The loss is {value.item()}.")
        gradients = torch.autograd.grad(value, loss.leaves, create_graph=True, materialize_grads=True)
        gradient = torch.cat([g.reshape(-1) for g in gradients])

        def product(v: Tensor) -> Tensor:
            if not gradient.requires_grad:  # the loss is linear in its parameters
                return torch.zeros_like(v)
            parts = torch.autograd.grad(gradient, loss.leaves, v, retain_graph=True, materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in parts])

        found = lanczos(product, loss.direction(0), iterations)
        chance = _shuffled(model, loss_fn, *batch, seed)
    reason = _reason(model, value.item(), chance, *found)
    return Sharpness("cannot tell" if reason else "measured", *found, reason)


def _shuffled(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], x: Any, y: Any, seed: int) -> float:
    """Return the loss with the targets in another order; NaN where they are no tensor of several."""
    if not isinstance(y, Tensor) or not y.dim() or len(y) < 2:
        return math.nan
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    return copies.of_model(model, loss_fn, (x, y[order]), seed).compute().item()


def _reason(
    model: nn.Module, value: float, chance: float, largest: float, smallest: float, residual: float, count: int
) -> str:
    """Return why the curvature says nothing of learning rates, if so."""
    tied = [name or "model" for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if tied:
        return f"{tied[0]} is a BatchNorm in training mode, which ties the samples together: call model.eval() first."
    if math.isnan(residual):
        return f"The loss is {value:.3g}, and its Hessian is not finite here, as that of a root is at zero."
    if residual > TOO_MUCH:
        return f"After {count} iterations the residual is {residual:.1g} of the largest |λ|: allow more iterations."
    if math.isnan(chance):
        return "Whether anything is learnt is not known: the targets are no tensor of several, which could be shuffled."
    if chance - value <= LEARNT * abs(chance):
        return (
            f"The loss is {value:.3g}, with the targets shuffled {chance:.3g}: next to nothing is learnt yet, as at "
            "initialisation, so λ is going to change. Train on, then ask again."
        )
    if largest <= max(0.0, -LOPSIDED * smallest):
        return f"λ is {smallest:.3g} one way and {largest:.3g} the other: this is no valley, and 2/λ bounds nothing."
    return ""


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, most: int) -> tuple[float, float, float, int]:
    """Return the largest and the smallest eigenvalue of a symmetric matrix, their residual, and the products it took.

    The residual is the larger one of the two, in units of the largest |eigenvalue|. All are NaN where a product is not
    finite.

    Parameters
    ----------
    product : of the matrix with a vector (N,)
    start : the first direction, (N,); one that is orthogonal to an eigenvector does not find it
    most : products at most; fewer where both residuals are below a hundredth of their eigenvalue

    Examples
    --------
    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> largest, smallest, _, products = lanczos(lambda v: matrix @ v, matrix[0], 10)
    >>> round(largest, 6), round(smallest, 6), products
    (3.0, 1.0, 2)
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        w = product(basis[-1])
        if not w.isfinite().all():
            return math.nan, math.nan, math.nan, len(basis)
        diagonal.append(float(w @ basis[-1]))
        for q in (*basis, *basis):  # twice is enough to keep all of them orthogonal
            w = w - q * (q @ w)
        beside.append(float(w.norm()))
        tridiagonal = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
        values, vectors = np.linalg.eigh(tridiagonal)
        scale = float(np.abs(values).max())
        ends, residuals = values[[0, -1]], beside[-1] * np.abs(vectors[-1, [0, -1]])
        enough = np.maximum(ENOUGH * np.abs(ends), NOTHING * scale)
        if (residuals <= enough).all() or len(basis) >= min(most, len(start)):
            return float(ends[1]), float(ends[0]), float(residuals.max()) / scale if scale else 0.0, len(basis)
        basis.append(w / beside[-1])
