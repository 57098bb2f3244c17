"""What one move in the playground costs, and what it would cost by the usual ways.

    python benchmarks/panels.py [--rounds 9]

- a redraw: a slider was moved (`Frame.png` on a landscape that it has not drawn yet), and the same with a walk of 100
  steps on it, against drawing the whole figure again.
- a walk of 200 steps by its recurrence, against the same steps of torch.optim with gradients by autograd.

One thread, process time (CPU seconds), interleaved, medians over the rounds. Fails when a redraw takes over 100 ms.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from dxdy_nb.lesson import panels, plots
from dxdy_nb.training.landscapes import LANDSCAPES, Walk

BAR = 0.100  # seconds of CPU time
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def seconds(work: Callable[[], object]) -> float:
    """Return the process time of a call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def by_torch(optimizer: str) -> None:
    """Walk over the bowl with torch.optim and autograd."""
    z = torch.nn.Parameter(torch.tensor([-1.8, 1.0], dtype=torch.float64))
    curvature = torch.tensor([1.0, 10.0], dtype=torch.float64)
    stepper = OPTIMIZERS[optimizer]([z])
    for _ in range(200):
        stepper.zero_grad()
        (0.5 * curvature * z * z).sum().backward()
        stepper.step()


def measure(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each, in turns, after one turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            spent = seconds(work)
            times[name] += [spent] if turn else []
    return {name: statistics.median(spent) for name, spent in times.items()}


def main() -> int:
    """Print the tables, and return 1 where a redraw is over the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    frame, worst = panels.Frame(100), 0.0
    print(f"{'landscape':12} {'moved':>8} {'with a walk':>12} {'whole figure':>13}   (ms; bar {1000 * BAR:.0f})")
    for landscape in tqdm(LANDSCAPES, disable=None, leave=False):
        walk = Walk(landscape=landscape, optimizer="muon" if landscape == "matrix" else "adam", lr=0.05)

        def moved(walk: Walk = walk) -> None:
            panels._bands.cache_clear()
            frame.png(walk)

        def ran(walk: Walk = walk) -> None:
            frame.png(walk, walk.path())

        def whole(walk: Walk = walk) -> None:
            plots.png(panels.picture({"": walk}), compress_level=1)

        found = measure({"moved": moved, "ran": ran, "whole": whole}, rounds)
        worst = max(worst, found["moved"], found["ran"])
        print(f"{landscape:12} {1e3 * found['moved']:8.0f} {1e3 * found['ran']:12.0f} {1e3 * found['whole']:13.0f}")
    print(f"\n{'optimizer':12} {'recurrence':>11} {'torch.optim':>12} {'ratio':>7}   (ms for 200 steps)")
    for optimizer in OPTIMIZERS:
        walk = Walk(optimizer=optimizer, lr=0.01, steps=200)
        found = measure({"mine": walk.path, "torch": lambda optimizer=optimizer: by_torch(optimizer)}, rounds)
        mine, torchs = found["mine"], found["torch"]
        print(f"{optimizer:12} {1e3 * mine:11.1f} {1e3 * torchs:12.0f} {torchs / mine:7.0f}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
