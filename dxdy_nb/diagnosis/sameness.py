"""When two tensors are the same: the same memory, or the same content."""

from typing import Any

import torch
from torch import Tensor

from dxdy_nb.nested import mapped, tensors_in


def is_plain(t: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested: it has numbers in rows and columns."""
    return t.layout is torch.strided and not t.is_nested


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory, perhaps in another shape, and one cut from the graph."""
    return a is b or (
        is_plain(a)
        and is_plain(b)
        and a.dtype == b.dtype
        and a.numel() == b.numel() > 0
        and a.data_ptr() == b.data_ptr()
        and (a.stride() == b.stride() if a.shape == b.shape else a.is_contiguous() and b.is_contiguous())
    )


def replaced(structure: Any, old: Tensor, new: Tensor) -> Any:
    """Return a structure with a tensor in the place of another, in the shape that the other has there."""
    return mapped(structure, lambda t: new.reshape(t.shape) if same_tensor(t, old) else t)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same, NaN being equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def batch_key(batch: Any) -> int:
    """Return a number that is the same for batches with the same content."""
    return hash(tuple(bits_of(t) for t in tensors_in(batch)) or repr(batch))


def bits_of(t: Tensor) -> int:
    """Return a hash of a tensor's content, bit by bit."""
    dense = t.detach().cpu()
    if not is_plain(dense):
        return hash(repr(dense))
    return hash(dense.contiguous().flatten().view(torch.uint8).numpy().tobytes())
