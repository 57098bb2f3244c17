"""What looking at a graph costs: against torchviz, against the forward pass and against the backward pass, in one run.

    pip install torchviz        (or: pip install -e ".[peers]"; the `dot` binary is not needed)
    python benchmarks/graph.py [NAME ...] [--rounds 7]

- `graph(loss, model, gradients=False)`, which reads what nodes have saved, against torchviz's
  `make_dot(loss, params=..., show_attrs=True, show_saved=True)`, which does too but draws nothing yet. The recursion
  limit is raised for torchviz only: at the default it stops at an RNN of 1,000 steps.
- the same walk against the forward pass, on an RNN of 10,000 steps (60,010 nodes).
- `graph` on a loss made under `dx.record` against `torchlens.trace(...)`, which saves no outputs here; both see each
  operation of the forward pass, and torchlens keeps more of it. It patches torch, which is undone before others run.
- the gradient on every edge (`gradients=True` minus `gradients=False`) against `loss.backward(retain_graph=True)`.

One thread, process time (CPU seconds), interleaved, medians over the rounds.
"""

import argparse
import functools
import gc
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from report import summary
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.autograd.graph import graph

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import nets

Net = tuple[torch.nn.Module, Callable[[], torch.Tensor]]  # a model, and what makes its loss
NETS: dict[str, Callable[[], Net]] = {
    "mlp10": nets.mlp_loss,
    "resnet18": nets.resnet_loss,
    "gpt12": nets.transformer_loss,
    "rnn300": functools.partial(nets.recurrent_loss, 300),
    "rnn1000": functools.partial(nets.recurrent_loss, 1000),
    "rnn10000": functools.partial(nets.recurrent_loss, 10_000),
}
WALK_BAR = 2.5  # forward passes, at 60,000 nodes
NORMS_BAR = 5.0  # backward passes


def torchviz_bar(nodes: int) -> float:
    """Return how many times faster than torchviz a graph of a size has to be walked."""
    return 8.0 if nodes >= 700 else 4.0


def peer() -> Callable[..., object] | None:
    """Return torchviz's function, or None where it is not installed."""
    try:
        from torchviz import make_dot
    except ImportError:
        print("torchviz is not installed: no comparison. pip install torchviz", file=sys.stderr)
        return None

    def draw(loss: torch.Tensor, model: torch.nn.Module) -> object:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(10**6)
        try:
            return make_dot(loss, params=dict(model.named_parameters()), show_attrs=True, show_saved=True)
        finally:
            sys.setrecursionlimit(limit)

    return draw


class Whole(torch.nn.Module):
    """A model whose output is its loss, for what wants a module and its input."""

    def __init__(self, model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, forward

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.loss()


def lens(name: str) -> None:
    """Print and sum up what a forward pass costs that torchlens traces, and one that dxdy records and walks."""
    import torchlens
    from torchlens.backends.torch.wrappers import unwrap_torch

    model, forward = NETS[name]()
    whole, rows = Whole(model, forward), []

    def recorded() -> object:
        with dx.record(model) as seen:
            loss = forward()
        return graph(loss, model, record=seen, gradients=False)

    for turn in range(4):
        ours, bare = seconds(recorded, 3), seconds(forward, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchlens.trace(whole, torch.zeros(1), save=None)  # the first one patches torch
            theirs = seconds(lambda: torchlens.trace(whole, torch.zeros(1), save=None), 1)
        unwrap_torch()
        if turn:
            rows.append((bare, ours, theirs))
    bare, ours, theirs = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{name:<9} forward {bare:.2f}, recorded and walked {ours:.2f}, torchlens {theirs:.2f}", flush=True)
    summary(f"a forward pass with all operations kept, {name}", "ms", {"dxdy": ours, "torchlens": theirs})


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of one call, garbage collected before."""
    gc.collect()
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats


def measure(name: str, rounds: int, make_dot: Callable[..., object] | None) -> bool:
    """Measure one net, print its row, and return whether all bars hold."""
    model, forward = NETS[name]()
    loss = forward()
    nodes = len(graph(loss, model).nodes)
    huge = nodes > 20_000
    ways: dict[str, Callable[[], object]] = {
        "forward": forward,
        "walk": lambda: graph(loss, model, gradients=False),
        "backward": lambda: loss.backward(retain_graph=True),
        "whole": lambda: graph(loss, model),
    }
    if make_dot is not None and not huge:
        ways["torchviz"] = lambda: make_dot(loss, model)
    repeats = max(1, 2000 // nodes)  # process time ticks too coarsely for one walk of a small graph
    rows = []
    for turn in range(2 if huge else rounds):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        rows.append({way: seconds(ways[way], repeats) for way in order})
    took = {way: statistics.median(row[way] for row in rows) for way in ways}
    faster = statistics.median(row["torchviz"] / row["walk"] for row in rows) if "torchviz" in ways else None
    forwards = statistics.median(row["walk"] / row["forward"] for row in rows)
    backwards = statistics.median((row["whole"] - row["walk"]) / row["backward"] for row in rows)
    print(
        f"{name:<9} {nodes:>6} "
        + " ".join(f"{1000 * took[way]:>9.2f}" for way in ("forward", "backward", "walk", "whole"))
        + (f" {1000 * took['torchviz']:>9.2f} {faster:>7.1f} x" if faster is not None else f" {'-':>9} {'-':>7}  ")
        + f" {forwards:>7.2f} {backwards:>8.2f}",
        flush=True,
    )
    if "torchviz" in took:
        summary(f"graph read, {name}", "ms", {"dxdy": 1000 * took["walk"], "torchviz": 1000 * took["torchviz"]})
    return (
        (faster is None or faster >= torchviz_bar(nodes))
        and (not huge or forwards <= WALK_BAR)
        and backwards <= NORMS_BAR
    )


def main() -> int:
    """Measure, print, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS), metavar="NAME", help=f"of {', '.join(NETS)}")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if unknown := set(args.nets) - set(NETS):
        parser.error(f"unknown net {', '.join(sorted(unknown))}; known: {', '.join(NETS)}")
    torch.set_num_threads(1)
    make_dot = peer()
    print("milliseconds of CPU; walk/fwd and norms/bwd in forward and backward passes")
    print(
        f"{'net':<9} {'nodes':>6} {'forward':>9} {'backward':>9} {'walk':>9} {'and norms':>9} {'torchviz':>9} "
        f"{'faster':>9} {'walk/fwd':>7} {'norms/bwd':>8}"
    )
    held = [measure(name, args.rounds, make_dot) for name in tqdm(args.nets, desc="nets", disable=None)]
    if importlib.util.find_spec("torchlens"):
        for name in set(args.nets) & {"resnet18", "gpt12"}:
            lens(name)
    print(
        f"allowed: torchviz / walk at least 8 from 700 nodes on and 4 below, walk at most {WALK_BAR} forward passes at "
        f"60,000 nodes, norms at most {NORMS_BAR} backward passes: {'held' if all(held) else 'MISSED'}"
    )
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
