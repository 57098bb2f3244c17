"""What watching costs: against a bare step, against one pass of `torch.sum`, and against what others offer, in one run.

    python -m venv .venv-bench && .venv-bench/bin/pip install -e . tensorboard wandb
    .venv-bench/bin/python benchmarks/watch.py [--models mlp resnet transformer] [--rounds 60]

Peers that are not installed are named, and left out; both write into a temporary folder, and wandb stays offline.

Two ways of measuring, both in process time (CPU seconds, all threads of this process) on one thread:

- what is called after `backward`: the time of the call itself, in training steps that take turns. The gradients lie
  side by side in one tensor, as DDP can lay them, so that one `torch.sum` reads exactly what the others read. What
  TensorBoard hands to its writer's thread is waited for. In its place a call also pays for its code, which the step
  has pushed out of the cache; what it costs without is said as well (`in a row`, over 60 MB of copies).
- what hooks into the loop (`dx.watch`, `wandb.watch`): ten steps with it against ten bare ones, alternately. `bare
  again` shows the noise; where a bar lies within two standard errors it is unclear, and more rounds are needed.

Medians. The gradient part of Composer's `OptimizerMonitor` is written again from what it computes, and so is
Lightning's `grad_norm`, which reads a module and no list: an L2 norm for each parameter and one over all of them, read
as numbers.
"""

import argparse
import contextlib
import gc
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from report import summary
from torch import Tensor, nn
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.observe.statistics import Statistics

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import nets

BLOCK = 10  # steps: dx.watch measures updates at every tenth
SUMS = {"mlp": 3.0, "resnet": 6.0, "transformer": 3.0}  # statistics, in passes of torch.sum
SHARES = {"resnet": 0.015, "transformer": 0.03}  # all of watch, of the bare step
NAIVE, HISTOGRAMS = 5.0, 10.0  # times cheaper
IMPORT = 1.1  # times the import of torch

Call = Callable[[list[Tensor]], object]


@dataclass(frozen=True)
class Training:
    """A model in training on one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor
    y: Tensor

    def backward(self, *, keep: bool = False) -> None:
        """Go to the end of a step's backward pass; ``keep`` leaves the gradients' memory in its place."""
        self.optimizer.zero_grad(set_to_none=not keep)
        output = self.model(self.x)
        F.cross_entropy(output.flatten(0, -2), self.y.flatten()).backward()

    def step(self) -> None:
        """Train for one step."""
        self.backward()
        self.optimizer.step()


def resnet20() -> nn.Module:
    """Return the ResNet of 20 layers for pictures of 32 × 32: 65 tensors, 0.27 million elements."""
    model = nets.ResNet18(16)
    widths = [16] * 3 + [32] * 3 + [64] * 3
    model.layers = nn.Sequential(
        *(nets.ResidualBlock(i, o, 1 if i == o else 2) for i, o in zip([16, *widths[:-1]], widths, strict=True))
    )
    model.head = nn.Linear(64, 10)
    return model


def make(name: str) -> Training:
    """Return one of the three trainings."""
    torch.manual_seed(0)
    if name == "mlp":  # 6 tensors, 0.67 million elements
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        return Training(model, torch.optim.Adam(model.parameters(), 1e-4), torch.rand(128, 784), torch.arange(128) % 10)
    if name == "resnet":
        model = resnet20()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        return Training(model, optimizer, torch.rand(64, 3, 32, 32), torch.arange(64) % 10)
    model = nets.Transformer(layers=6, width=256, heads=8, words=8000, longest=128)  # 77 tensors, 8.9 million
    words = torch.randint(0, 8000, (8, 128))
    return Training(model, torch.optim.AdamW(model.parameters(), 1e-4), words, words.roll(1))


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Give each parameter a gradient in one tensor, which is returned; each begins a line of the cache."""
    sizes = [-(-p.numel() // 16) * 16 for p in parameters]
    memory = torch.zeros(sum(sizes))
    for p, piece in zip(parameters, memory.split(sizes), strict=True):
        p.grad = piece[: p.numel()].view_as(p)
    return memory


def naive(gradients: list[Tensor]) -> list[tuple[float, ...]]:
    """Return the six statistics as one writes them down."""
    return [
        (
            g.mean().item(),
            g.max().item(),
            g.min().item(),
            g.norm().item(),
            (g != 0).float().mean().item(),
            (~torch.isfinite(g)).sum().item(),
        )
        for g in gradients
    ]


def lightning(gradients: list[Tensor]) -> list[float]:
    """Return what Lightning's `grad_norm` does, as numbers."""
    norms = [g.norm(2) for g in gradients]
    return [norm.item() for norm in [*norms, torch.tensor(norms).norm(2)]]


def composer(gradients: list[Tensor]) -> list[float]:
    """Return what Composer's `OptimizerMonitor` says of gradients, as numbers."""
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    total = torch.zeros(())
    for norm in norms:
        total = total + norm**2
    return [norm.item() for norm in [*norms, total**0.5]]


def tensorboard(names: list[str], folder: str) -> Call | None:
    """Return what writes a histogram of each gradient, or None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(folder)

    def histograms(gradients: list[Tensor]) -> None:
        for name, g in zip(names, gradients, strict=True):
            writer.add_histogram(name, g)
        writer.flush()

    return histograms


@contextlib.contextmanager
def wandb_watch(training: Training, folder: str) -> Iterator[None]:
    """Watch as wandb does, at every step."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(console="off")) as run:
        run.watch(training.model, log="gradients", log_freq=1)
        handle = training.optimizer.register_step_post_hook(lambda *_: run.log({}))
        try:
            yield
        finally:
            handle.remove()
            run.unwatch(training.model)


@contextlib.contextmanager
def torch_audit(training: Training) -> Iterator[None]:
    """Audit as torch-audit does, at every step."""
    from torch_audit import autopatch

    auditor = autopatch(training.model, optimizer=training.optimizer, every_n_steps=1)
    try:
        yield
    finally:
        auditor.unpatch()


def seconds(call: Call, gradients: list[Tensor]) -> float:
    """Return the CPU seconds of one call; whose garbage it is that makes the collector start is chance."""
    gc.disable()
    started = time.process_time()
    call(gradients)
    took = time.process_time() - started
    gc.enable()
    return took


def in_a_row(name: str, rounds: int) -> float:
    """Return what the statistics cost in passes of torch.sum where nothing but the data has left the cache."""
    training = make(name)
    training.backward()
    gradients = [p.grad for p in training.model.parameters()]
    copies = [
        (torch.cat([g.flatten() for g in gradients]), [g.clone() for g in gradients])
        for _ in range(max(2, 15_000_000 // sum(g.numel() for g in gradients)))  # 60 MB
    ]
    measured, times = Statistics(), []
    for turn in range(3 * rounds):
        memory, gradients = copies[turn % len(copies)]
        once = seconds(lambda _, memory=memory: memory.sum().item(), gradients)
        memory, gradients = copies[(turn + len(copies) // 2) % len(copies)]
        times.append((seconds(lambda gs: measured.measure(gs).rows, gradients), once))
    ours, floor = (statistics.median(column) for column in zip(*times, strict=True))
    return ours / floor


def calls(name: str, rounds: int, folder: str) -> dict[str, float]:
    """Return the median CPU seconds of each call in its place after backward."""
    training = make(name)
    names, parameters = zip(*training.model.named_parameters(), strict=True)
    memory, measured = side_by_side(parameters), Statistics()
    gradients = [p.grad for p in parameters]
    ways: dict[str, Call | None] = {
        "torch.sum, all in one": lambda _: memory.sum().item(),
        "torch.sum, one by one": lambda gs: [g.sum() for g in gs],
        "dxdy measure": lambda gs: measured.measure(gs).rows,
        "dxdy glance": lambda gs: measured.glance(gs).rows,
        "naive, six .item()": naive,
        "Lightning grad_norm": lightning,
        "Composer": composer,
        "TensorBoard histograms": tensorboard(list(names), folder),
    }
    found = {way: call for way, call in ways.items() if call is not None}
    times: dict[str, list[float]] = {way: [] for way in found}
    for turn in tqdm(range(-1, rounds), desc=f"{name}, calls", disable=None, leave=False):
        for place in range(len(found)):
            way = list(found)[(place + turn) % len(found)]
            training.backward(keep=True)
            assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
            took = seconds(found[way], gradients)
            training.optimizer.step()
            if turn >= 0:
                times[way].append(took)
    return {way: statistics.median(took) for way, took in times.items()}


@dataclass(frozen=True)
class Added:
    """What a way of training adds to a bare step: CPU seconds, and how far to trust them."""

    seconds: float
    error: float  # two standard errors of the median

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Added":
        """Return the median of paired differences; their spread is taken from the median too, against outliers."""
        middle = statistics.median(differences)
        spread = 1.4826 * statistics.median(abs(d - middle) for d in differences)
        return cls(middle, 2 * 1.2533 * spread / math.sqrt(len(differences)) if len(differences) > 2 else math.inf)


def steps(name: str, rounds: int, folder: str) -> tuple[float, dict[str, Added]]:
    """Return the median CPU seconds of a bare step, and what each way adds to it."""
    training = make(name)
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "bare again": nullcontext,
        "dx.watch": lambda: dx.watch(training.model, training.optimizer, budget=None),
    }
    with contextlib.suppress(ImportError):
        import wandb  # noqa: F401

        ways["wandb.watch, offline"] = lambda: wandb_watch(training, folder)
    if importlib.util.find_spec("torch_audit"):
        ways["torch-audit"] = lambda: torch_audit(training)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in tqdm(range(-1, math.ceil(rounds / 5)), desc=f"{name}, steps", disable=None, leave=False):
        for place in range(len(ways)):
            way = list(ways)[(place + turn) % len(ways)]
            with ways[way]():
                training.step()
                gc.collect()
                started = time.process_time()
                for _ in range(BLOCK):
                    training.step()
                took = (time.process_time() - started) / BLOCK
            if turn >= 0:
                times[way].append(took)
    added = {way: Added.of([a - b for a, b in zip(times[way], times["bare"], strict=True)]) for way in ways}
    return statistics.median(times["bare"]), {way: found for way, found in added.items() if way != "bare"}


def imported(rounds: int) -> float:
    """Return the CPU seconds of `import dxdy_nb` and `dx.watch`, in those of `import torch`."""
    rows = []
    for _ in range(rounds):
        spent = []
        for module in ("torch", "dxdy_nb as dx; dx.watch"):  # the name is what imports torch
            code = f"import time; import {module}; print(time.process_time())"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            spent.append(float(done.stdout))
        rows.append(spent[1] / spent[0])
    return statistics.median(rows)


def held(what: str, value: float, bar: float, *, least: bool = False, error: float = 0.0) -> bool:
    """Print a bar, and return whether it is met; within the error of the measurement it is not known to be."""
    room = value - bar if least else bar - value
    verdict = "met" if room >= error else "MISSED" if room < -error else "unclear"
    margin = f" ± {error:.2f}" if error else ""
    print(f"  {verdict:7s} {what}: {value:.2f}{margin}, at {'least' if least else 'most'} {bar:g}")
    return verdict == "met"


def measure(name: str, rounds: int) -> bool:
    """Measure one model, print its table, and return whether all bars are met."""
    with tempfile.TemporaryDirectory() as folder:
        called, (bare, added) = calls(name, rounds, folder), steps(name, rounds, folder)
    floor, ours = called["torch.sum, all in one"], called["dxdy measure"]
    print(f"\n{name}: a bare step takes {1000 * bare:.1f} ms\n  {'':24s}       ms  of the step   x torch.sum")
    for way, took in called.items():
        print(f"  {way:24s} {1000 * took:8.3f}  {took / bare:10.2%}  {took / floor:12.2f}")
    for way, more in added.items():
        print(
            f"  {way:24s} {1000 * more.seconds:8.3f}  {more.seconds / bare:10.2%}  {more.seconds / floor:12.2f}"
            f"   step by step, ± {more.error / bare:.2%}"
        )
    print(f"  The statistics in a row, with nothing between: {in_a_row(name, rounds):.2f} passes of torch.sum")
    read = {"dxdy, six statistics": ours} | {
        way: called[way]
        for way in ("naive, six .item()", "Lightning grad_norm", "Composer", "TensorBoard histograms")
        if way in called
    }
    summary(f"gradients read, {name}", "ms", {way: 1000 * took for way, took in read.items()})
    hooked = {way: 1000 * more.seconds for way, more in added.items() if way != "bare again"}
    summary(f"added to a step of {1000 * bare:.1f} ms, {name}", "ms", hooked)
    met = [held("statistics, in passes of torch.sum", ours / floor, SUMS[name])]
    if name in SHARES:
        more, share = added["dx.watch"], 100 / bare
        met.append(held("watch, % of the step", share * more.seconds, 100 * SHARES[name], error=share * more.error))
    met.append(held("times cheaper than naive", called["naive, six .item()"] / ours, NAIVE, least=True))
    if (took := called.get("TensorBoard histograms")) is not None:
        met.append(held("times cheaper than TensorBoard histograms", took / ours, HISTOGRAMS, least=True))
    else:
        print("  tensorboard is not installed: left out")
    if (more := added.get("wandb.watch, offline")) is not None:
        error = more.error / ours
        met.append(held("times cheaper than wandb.watch", more.seconds / ours, HISTOGRAMS, least=True, error=error))
    else:
        print("  wandb is not installed: left out")
    return all(met)


def main() -> int:
    """Measure, print, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SUMS), default=list(SUMS))
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    met = [held("import dxdy_nb and name dx.watch, in imports of torch", imported(max(3, asked.rounds // 6)), IMPORT)]
    met += [measure(name, asked.rounds) for name in asked.models]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
