"""Somebody's loss as a function of one flat float64 vector: computed on copies, and in the same way each time."""

import copy
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dxdy_nb.errors import DxdyError
from dxdy_nb.nested import mapped


@dataclass(frozen=True)
class Loss:
    """A scalar function of ``flat``, which the ``leaves`` are views of, and random directions in which to move it.

    ``frozen`` names what asks for no gradient; ``scale`` holds the root mean square of each element's tensor.
    """

    names: tuple[str, ...]
    frozen: tuple[str, ...]
    flat: Tensor
    leaves: Sequence[Tensor]
    compute: Callable[[], Tensor]
    seed: int
    note: str = ""
    known: dict[int, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def pieces(self) -> list[slice]:
        """Where each leaf stands in ``flat``."""
        ends = list(itertools.accumulate(leaf.numel() for leaf in self.leaves))
        return [slice(end - leaf.numel(), end) for end, leaf in zip(ends, self.leaves, strict=True)]

    @functools.cached_property
    def scale(self) -> Tensor:
        """The unit of a step, from the point where this is first asked for."""
        sizes = torch.tensor([leaf.numel() for leaf in self.leaves])
        scale = torch.stack([leaf.detach().norm() for leaf in self.leaves]).cpu() / sizes.sqrt()
        scale[scale == 0] = 1.0  # zeros have no size of their own
        return scale.repeat_interleave(sizes).to(self.flat)

    def value(
        self, x: Tensor, v: Tensor | None = None, step: float = 0.0, mode: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """Return the loss at x + step · v, computed within a mode."""
        with torch.no_grad():
            if v is None:
                self.flat.copy_(x)
            else:
                torch.add(x, v, alpha=step, out=self.flat)
        with mode or nullcontext():
            return self.compute()

    def direction(self, k: int) -> Tensor:
        """Return a random direction, the same one for the same k."""
        if k not in self.known:
            generator = torch.Generator().manual_seed(self.seed + k)
            normal = torch.randn(self.flat.shape, generator=generator, dtype=torch.float32)  # far faster than float64
            self.known[k] = normal.to(self.flat) * self.scale
        return self.known[k]

    def along(self, rows: Sequence[int], directions: Iterable[int]) -> list[Tensor]:
        """Return directions restricted to some leaves."""
        if len(rows) == len(self.leaves):
            return [self.direction(k) for k in directions]
        keep = torch.zeros_like(self.flat)
        for row in rows:
            keep[self.pieces[row]] = 1.0
        return [self.direction(k) * keep for k in directions]


@contextmanager
def random_states() -> Iterator[None]:
    """Put back all random states: torch's, numpy's and Python's."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=_cuda_devices()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def untouched() -> Iterator[None]:
    """Put back random states and the default dtype, which is float64 inside: models make tensors of their own."""
    dtype = torch.get_default_dtype()
    try:
        with random_states(), torch.enable_grad():
            torch.set_default_dtype(torch.float64)
            yield
    finally:
        torch.set_default_dtype(dtype)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _seed(seed: int) -> None:
    """Seed torch's generators; ``torch.manual_seed`` would also seed devices that start only later."""
    torch.default_generator.manual_seed(seed)
    for device in _cuda_devices():
        torch.cuda.default_generators[device].manual_seed(seed)


def of_function(fn: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int) -> Loss:
    """Return fn of copies of its inputs; where fn insists on their dtype, they are rounded to it on the way in."""
    names: tuple[str, ...] = ()
    with suppress(ValueError, TypeError):  # a builtin tells nothing about its arguments
        known = inspect.signature(fn).parameters.values()
        names = tuple(p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[: len(inputs)]
    if len(names) != len(inputs):
        names = tuple(f"input {i}" for i in range(len(inputs))) if len(inputs) > 1 else ("input",)
    for name, value in zip(names, inputs, strict=True):
        _ask_input(name, value)
    flat = torch.cat([value.detach().reshape(-1).double() for value in inputs])
    sizes = [value.numel() for value in inputs]
    leaves = [
        part.view(value.shape).detach().requires_grad_() for part, value in zip(flat.split(sizes), inputs, strict=True)
    ]

    def compute(dtypes: Sequence[torch.dtype] = (torch.float64,) * len(inputs)) -> Tensor:
        _seed(seed)
        values = [leaf.to(dtype, copy=True) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        result = _as_scalar(fn(*values), "fn", torch.Generator().manual_seed(seed))
        for name, value, leaf in zip(names, values, leaves, strict=True):
            if value._version or not torch.equal(value, leaf.to(value.dtype)):
                raise DxdyError(f"{name}: fn changes it in place, so it is no function of its inputs. Work on a clone.")
        return result

    loss = Loss(names, (), flat, leaves, compute, seed)
    given = [value.dtype for value in inputs]
    narrow = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in given} - {"float64"}))
    if not narrow:
        return loss
    try:
        compute()
    except RuntimeError:
        compute(given)  # torch's own error, if dtypes were not the reason
        return replace(loss, compute=lambda: compute(given), note=f"fn works in {narrow} only")
    return replace(loss, note=f"{narrow} inputs checked as float64 copies")


def _ask_input(name: str, value: Any) -> None:
    advice = "Close over it instead: check_gradients(lambda x: fn(x, labels), x)."
    if not isinstance(value, Tensor) or not value.is_floating_point():
        seen = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise DxdyError(f"{name}: expected a tensor of real floating point, got {seen}. {advice}")
    if value.is_inference():
        raise DxdyError(f"{name}: was made in inference mode, which records nothing. Pass {name}.clone().")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        seen = "no values (device meta)" if value.is_meta else f"layout {value.layout}"
        raise DxdyError(f"{name}: expected a dense tensor with values, got {seen}. Make it one inside of fn.")
    if not value.numel() or not value.double().isfinite().all():
        raise DxdyError(f"{name}: expected finite numbers, got {'NaN or infinity' if value.numel() else 'none'}.")


def _as_scalar(result: Any, who: str, weights: torch.Generator | None = None) -> Tensor:
    """Return a number as it is; several along one random direction, or not at all."""
    if not isinstance(result, Tensor) or not result.is_floating_point() or not result.numel():
        seen = f"{result.dtype}, {result.numel()} of them" if isinstance(result, Tensor) else type(result).__name__
        raise DxdyError(f"{who}: expected it to return a tensor of real numbers, got {seen}.")
    if result.numel() == 1:
        return result.double().reshape(())
    if weights is None:
        raise DxdyError(f"{who}: expected one number, got shape {tuple(result.shape)}. Reduce it: .mean().")
    return (result.double() * torch.randn(result.shape, generator=weights).to(result.device)).sum()


def of_model(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Sequence[Any], seed: int) -> Loss:
    """Return the loss of float64 copies of model and loss function, by the parameters of both."""
    try:
        twin, criterion = copy.deepcopy((model, loss_fn))
        both = nn.ModuleDict({"model": twin})
        if isinstance(owner := getattr(criterion, "__self__", criterion), nn.Module):  # a module, or a method of one
            both["loss_fn"] = owner
        both.double()
    except Exception as error:
        raise DxdyError(
            f"the model has no float64 copy ({type(error).__name__}: {error}). Check the part in question on its own, "
            "as a function of tensors: check_gradients(fn, *inputs)."
        ) from error
    names = {p: name.removeprefix("model.") for name, p in both.named_parameters()}
    leaves = [p for p in names if p.requires_grad]
    if not leaves:
        raise DxdyError("the loss has no graph: no parameter requires a gradient. Call requires_grad_() on some first.")
    for leaf in leaves:
        if leaf.dtype != torch.float64 or leaf.is_inference():
            seen = "was made in inference mode" if leaf.is_inference() else f"stays {leaf.dtype} after .double()"
            raise DxdyError(f"{names[leaf]}: {seen}; only float64 is precise enough. Make it a real float parameter.")
    places = [module._buffers for module in both.modules()]
    buffers = [(place, name, b.clone()) for place in places for name, b in place.items() if b is not None]
    wide = _copied(batch, torch.float64)

    def compute() -> Tensor:
        _seed(seed)
        for place, name, kept in buffers:
            place[name] = kept.clone()
        x, y = _copied(wide)
        return _as_scalar(criterion(twin(x), y), "loss_fn")

    flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
    frozen = tuple(name for p, name in names.items() if not p.requires_grad)
    loss = Loss(tuple(names[leaf] for leaf in leaves), frozen, flat, leaves, compute, seed)
    for leaf, piece in zip(leaves, loss.pieces, strict=True):
        leaf.data = flat[piece].view(leaf.shape)
    for module in both.modules():  # a padding row has no gradient by torch's own choice, so it is not moved
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            for leaf, piece in zip(leaves, loss.pieces, strict=True):
                if leaf is module.weight:
                    loss.scale[piece].view(leaf.shape)[module.padding_idx] = 0.0
    _try_out(loss, model, loss_fn, batch)
    return loss


def _try_out(loss: Loss, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Sequence[Any]) -> None:
    """Raise where the float64 copy does not work, or is no function of its parameters."""
    before = loss.flat.clone()
    try:
        loss.compute()
    except RuntimeError as error:
        twin, criterion = copy.deepcopy((model, loss_fn))
        torch.set_default_dtype(torch.float32)
        x, y = _copied(batch)
        criterion(twin(x), y)  # torch's own error, if dtypes were not the reason
        raise DxdyError(
            f"the model works as it is, its float64 copy does not ({error}). Somewhere a dtype is fixed: write "
            "x.to(weight.dtype) for x.float(), and give tensors in the loss the prediction's dtype."
        ) from error
    views = zip(loss.leaves, loss.pieces, strict=True)
    if not torch.equal(loss.flat, before) or any(p.data_ptr() != loss.flat[piece].data_ptr() for p, piece in views):
        raise DxdyError("the forward pass changes parameters, so the loss is no function of them. Move that out of it.")


def _copied(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return copies of the tensors in a nested structure; floats as ``dtype``."""

    def copied(t: Tensor) -> Tensor:
        return t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True)

    return mapped(value, copied)


def second_order(loss: Loss) -> Loss:
    """Return gradient · v for a fixed random v: a function like any other, whose gradient is the Hessian times v."""
    v = loss.direction(-1)

    def compute() -> Tensor:
        with torch.enable_grad():
            result = loss.compute()
            gradients = torch.autograd.grad(result, loss.leaves, create_graph=True, allow_unused=True)
            parts = [(g * v[p].view_as(g)).sum() for g, p in zip(gradients, loss.pieces, strict=True) if g is not None]
            return torch.stack(parts).sum()

    return replace(loss, compute=compute)


# Calls whose result autograd takes as a constant.
_CUTS = {Tensor.detach, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, torch.tensor}
_CUTS.add(Tensor.data.__get__)  # type: ignore[attr-defined]  # a getter, which the stubs call a tensor


class Replay(torch.overrides.TorchFunctionMode):
    """Keeps what a function detaches, or computes without gradients; later gives it again, whatever the inputs are.

    ``eps`` is the coarsest precision that float64 values were rounded to. Where the function takes another path than
    the first time, the kept values run out: an IndexError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.next: int | None = None  # of the kept, when they are given again
        self.off = False
        self.eps = torch.finfo(torch.float64).eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        off = self.off or torch.is_inference_mode_enabled()
        inside_function = not torch.is_grad_enabled() and not off  # the forward of a custom autograd.Function
        result = func(*args, **(kwargs or {}))
        wide = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in args)
        if wide and isinstance(result, Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        if getattr(func, "__name__", "") == "_set_grad_enabled" and not inside_function:
            self.off = not args[0]
            return result
        in_place = bool(args) and result is args[0]
        cuts = func in _CUTS or (func is torch.autograd.grad and not (kwargs or {}).get("create_graph"))
        if inside_function or in_place or not (off or cuts):
            return result
        if self.next is None:
            self.kept.append(_copied(result))
            return result
        self.next += 1
        return _copied(self.kept[self.next - 1])
