"""What the gradient check costs and finds: a 12-layer transformer against torch's gradcheck, and faults planted in it.

    python benchmarks/check.py [--rounds 5] [--faults 20] [--no-gradcheck]

Both judge the same loss in float64. One thread, process time (CPU seconds of this process), interleaved; the ratio is
the median over the rounds. Each fault changes the gradient of one parameter tensor, drawn at random, and is then
looked for by the whole check; it counts as found where the verdict is "wrong" and names that tensor, and no other.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from report import summary
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from tqdm import tqdm

from dxdy_nb.autograd.check import check_gradients

BAR = 10.0
LAYERS, WIDTH, HEADS, TOKENS, LENGTH = 12, 64, 4, 100, 16


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a LayerNorm and around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) → (B, T, C)
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (c // HEADS) ** 0.5  # (B, H, T, T)
        scores = scores.masked_fill(torch.ones(t, t).tril() == 0, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """149 parameter tensors, 0.6 million elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T) → (B, T, tokens)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))))


def loss_fn(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def make(seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return model and batch."""
    torch.manual_seed(seed)
    model = Transformer()
    return model, (torch.randint(TOKENS, (2, LENGTH)), torch.randint(TOKENS, (2, LENGTH)))


# Each takes the right gradient and returns a wrong one.
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it 1 % too large": lambda g: 1.01 * g,
    "one row 1 % too large": lambda g: torch.cat([1.01 * g[:1], g[1:]]),
    "three signs flipped": lambda g: g * torch.ones_like(g).flatten().index_fill(0, spots(g), -1).view_as(g),
    "transposed": lambda g: g.T,
    "noise of 1 %": lambda g: g + 0.01 * g.square().mean().sqrt() * noise(g),
}


def spots(g: Tensor) -> Tensor:
    """Return three places with a gradient, spread over the tensor."""
    filled = g.flatten().nonzero().flatten()
    return filled[[len(filled) // 5, len(filled) // 2, len(filled) - 1]]


def noise(g: Tensor) -> Tensor:
    """Return normal noise, the same for the same shape: a fault is no accident."""
    return torch.randn(g.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(g)


class Planted(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.fault(grads[0]), None


class Faulty(nn.Module):
    """A parametrization whose gradient is wrong; unlike a hook on the parameter it goes along into a deep copy."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return Planted.apply(x, self.fault)


def plant(model: nn.Module, name: str, fault: Callable[[Tensor], Tensor]) -> str:
    """Make the gradient of one parameter wrong, and return the name that it has then."""
    path, _, leaf = name.rpartition(".")
    parametrize.register_parametrization(model.get_submodule(path), leaf, Faulty(fault))
    return f"{path}.parametrizations.{leaf}.original".lstrip(".")


def screen(seed: int) -> float:
    """Return the CPU seconds of the check of a healthy model."""
    model, batch = make(seed)
    gc.collect()
    started = time.process_time()
    check = check_gradients(model=model, loss_fn=loss_fn, batch=batch)
    spent = time.process_time() - started
    assert check.verdict == "right", check
    return spent


def gradcheck(seed: int) -> float:
    """Return the CPU seconds of torch's fast gradcheck of the same loss by all parameters."""
    model, (x, y) = make(seed)
    gc.collect()
    started = time.process_time()
    double = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}

    def loss(*values: Tensor) -> Tensor:
        return loss_fn(torch.func.functional_call(model, dict(zip(double, values, strict=True)), x), y)

    assert torch.autograd.gradcheck(loss, tuple(double.values()), fast_mode=True)
    return time.process_time() - started


def detect(kind: str, count: int) -> tuple[int, int, float, list[str]]:
    """Return how many faults were planted and found, the mean CPU seconds of a check, and which were missed."""
    model, batch = make(0)
    names = [
        n for n, p in model.named_parameters() if kind != "transposed" or (p.dim() == 2 and p.shape[0] == p.shape[1])
    ]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(7)).tolist()
    missed, spent = [], 0.0
    drawn = [names[i] for i in order[:count]]
    for name in tqdm(drawn, desc=kind, disable=None, leave=False):
        model, batch = make(0)
        planted = plant(model, name, FAULTS[kind])
        started = time.process_time()
        check = check_gradients(model=model, loss_fn=loss_fn, batch=batch)
        spent += time.process_time() - started
        wrong = [row.name for row in check.rows if row.verdict != "right"]
        if check.verdict != "wrong" or wrong != [planted]:
            missed.append(f"{name}: {check!r}")
    return len(drawn), len(drawn) - len(missed), spent / len(drawn), missed


def main() -> int:
    """Measure, print, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--no-gradcheck", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ratios = []
    if not asked.no_gradcheck:
        screen(0)  # warm up
        times = [(screen(seed), gradcheck(seed)) for seed in tqdm(range(asked.rounds), desc="cost", disable=None)]
        ratios = [theirs / ours for ours, theirs in times]
        ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"check_gradients {ours:.3f} s, gradcheck(fast_mode=True) {theirs:.3f} s of CPU time (medians)")
        summary("all gradients of a transformer checked", "s", {"dxdy": ours, "torch gradcheck, fast": theirs})
        print(f"ratio {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}), bar {BAR:g}")
    missed = []
    for kind in FAULTS:
        planted, found, seconds, lost = detect(kind, asked.faults)
        print(f"{kind:26s} {found:3d} of {planted:3d} found, {seconds:.2f} s each")
        missed += lost
    print("\n".join(missed))
    return int(bool(missed) or (bool(ratios) and statistics.median(ratios) < BAR))


if __name__ == "__main__":
    sys.exit(main())
