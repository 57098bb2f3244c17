"""Tensors as a few numbers that can be compared between ranks.

A checksum says whether the bits are the same. Norm and projection on fixed random signs say more of gradients: "the
same but for a factor", "the sum of these", "another".
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Sketch = tuple[float, float]  # norm and projection
SAMPLED = 65_536  # elements of a tensor that a sketch reads
READ = 4_096  # elements of a sample that its checksum reads
PARTS = 4  # of a large tensor, which in turn are all that a cheap checksum reads


def checksum(tensors: Iterable[Tensor], turn: int | None = None) -> int:
    """Return a number that is the same where the bits of these tensors are the same: one pass over memory.

    With a ``turn`` only every fourth part of a tensor of more than 65,536 elements is read: another at the next turn,
    and each within four. What ranks do differently changes nearly every element; a lone bit may be found a few turns
    late.

    Examples
    --------
    >>> checksum([torch.tensor([0.0, 1.0])]) == checksum([torch.tensor([0.0, 1.0])])
    True
    >>> checksum([torch.tensor([0.0])]) == checksum([torch.tensor([-0.0])])
    False
    """
    total = 0
    for t in tensors:
        t = t.detach()
        if t.is_nested or t.layout is torch.jagged:
            t = t.values()
        elif t.layout is not torch.strided:
            t = t.to_dense()
        data = t.contiguous().reshape(-1).resolve_conj().resolve_neg().view(torch.uint8)
        whole = data.numel() // 8 * 8
        words = (data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()).view(torch.int64)
        if turn is not None and t.numel() > SAMPLED:
            words = words.tensor_split(PARTS)[turn % PARTS]
        # Sums that wrap round: exact, and in any order.
        number = int(words.sum())
        if whole < data.numel():
            number += 0x9E3779B1 * int(data[whole:].sum(dtype=torch.int64))
        total = (total * 1_000_003 + number) & (2**62 - 1)
    return total


def checksums(tensors: Iterable[Tensor], size: int) -> list[int]:
    """Return a number for each sample of a batch, from all its tensors of that length; zeros at the end do not count.

    Examples
    --------
    >>> a, b, padded = checksums([torch.tensor([[1, 2, 0], [2, 1, 0], [1, 2, 0]])], 3)
    >>> a == padded, a == b, [a] == checksums([torch.tensor([[1, 2]])], 1)
    (True, False, True)
    """
    total = torch.zeros(size, dtype=torch.int64)
    for t in tensors:
        plain = t.layout is torch.strided and not t.is_nested and not t.is_complex()
        if plain and t.numel() and t.dim() and len(t) == size:
            flat = t.detach().reshape(size, -1)
            flat = flat[:, :: max(1, flat.shape[1] // READ)][:, :READ]
            words = flat.cpu().double().view(torch.int64)
            # The low half of a small number's bits is zero: a product that wraps would lose the high one.
            total = total * 1_000_003 + ((words ^ (words >> 32)) * _weights()[: words.shape[1]]).sum(1)
    return total.tolist()


@functools.cache
def _weights() -> Tensor:
    return torch.randint(-(2**62), 2**62, (READ,), generator=torch.Generator().manual_seed(READ))


@functools.lru_cache(maxsize=64)
def _signs(size: int) -> Tensor:
    return torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)).double() * 2 - 1


def sketch(t: Tensor) -> Sketch:
    """Return the norm of a tensor and its projection on fixed random signs, of at most 65,536 of its elements."""
    flat = t.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].double().cpu()
    return float(flat.norm()), float(flat @ _signs(flat.numel()))


def is_sharded(t: Tensor) -> bool:
    """Return whether a rank holds only its part of a tensor."""
    return hasattr(t, "placements")


def sums(tensors: dict[str, Any]) -> dict[str, int]:
    """Return the checksum of each tensor that is whole."""
    return {n: checksum([t]) for n, t in tensors.items() if not is_sharded(t) and not t.is_sparse and t.numel()}


def sketches(parameters: dict[str, Any]) -> dict[str, list[float]]:
    """Return checksum, norm and projection of each gradient that is whole."""
    graded = {n: p.grad for n, p in parameters.items() if p.grad is not None and not is_sharded(p)}
    return {n: [checksum([g]), *sketch(g)] for n, g in graded.items() if not g.is_sparse and g.numel()}
