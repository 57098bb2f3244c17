"""How good is the learning rate that is found? The search, and three rules that name one rate, against a grid.

    python benchmarks/tuning.py [--seeds 0 1] [--nets cnn "mlp digits" ...]

A number is the validation loss of a short run at the rate that was found, divided by that at the best of nine rates
half a decade apart: same seed, same budget, same data. Losses below 0.01 count as 0.01: there the task is solved, and
what differs is chance. The rules read the range test that the search begins with, and name nothing where it finds no
bracket. The bar is for the search. Counted in runs, the search is not much cheaper than this grid, but it needs not be
told where the good rates are.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings

import numpy as np
import torch

import dxdy_nb as dx
from dxdy_nb.training.tuning import validation_loss

BAR, SOLVED = 1.5, 0.01
RATES = [float(f"{rate:.3g}") for rate in np.logspace(-3.5, 0.5, 9)]
NETS = {
    "cnn": {"data": "digits", "model": "cnn", "max_steps": 150},
    "mlp digits": {"data": "digits", "model": "mlp", "max_steps": 150},
    "mlp spirals": {"data": "spirals", "model": "mlp", "max_steps": 150},
    "gru": {"data": "sequences", "model": "gru", "max_steps": 300},  # after 150 steps sgd has learnt nothing
}
OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0},
    "sgd, momentum 0.9": {"optimizer": "sgd", "momentum": 0.9},
    "adamw": {"optimizer": "adamw"},
}
RULES = ("steep", "min/10", "valley")


def measure(config: dx.RunConfig) -> tuple[str, dict[str, float]]:
    """Return what the grid and the search found, in words, and the ratio of each way that names a rate."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lr_range_test: no bracket")  # the table says so
        search = dx.lr_search(config, steps=config.max_steps, out=folder)
    known = {run.config.lr: validation_loss(run) for run in search.runs}

    def loss(rate: float) -> float:
        if rate not in known:
            with tempfile.TemporaryDirectory() as folder:
                known[rate] = validation_loss(dx.train(config.override({"lr": rate}), out=folder))
        return known[rate]

    best = min(RATES, key=loss)
    found = {} if search.best is None else {"search": search.best}
    found |= search.bracket.rules if search.bracket else {}
    words = f"{loss(best):.4f} at {best:<7g} " + (
        f"{loss(search.best):.4f} at {search.best:<7g}" if search.best else ""
    )
    ratios = {way: max(loss(rate), SOLVED) / max(loss(best), SOLVED) for way, rate in found.items()}
    return f"{words:35s} {len(search.runs):4d}", ratios


def main() -> int:
    """Measure, print, and return 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started, table = time.process_time(), []
    heads = " ".join(f"{way:>8s}" for way in ("search", *RULES))
    print(f"{'net':11s} {'optimizer':17s} seed {'best of grid':17s} {'search':17s} runs {heads}")
    for net in asked.nets:
        for name, optimizer in OPTIMIZERS.items():
            for seed in asked.seeds:
                words, ratios = measure(dx.RunConfig(**NETS[net], **optimizer, seed=seed))
                cells = " ".join(f"{ratios[w]:8.2f}" if w in ratios else f"{'-':>8s}" for w in ("search", *RULES))
                print(f"{net:11s} {name:17s} {seed:4d} {words} {cells}", flush=True)
                table.append(ratios)
    for way in ("search", *RULES):
        values = [ratios[way] for ratios in table if way in ratios]
        print(
            f"{way:8s} median {statistics.median(values):.2f}, worst {max(values):.2f} ({len(values)} of {len(table)})"
        )
    worst = max(ratios.get("search", float("inf")) for ratios in table)
    print(
        f"{'met' if worst <= BAR else 'MISSED'}: the search is at most {BAR} times the grid's best, it is {worst:.2f}"
    )
    print(f"{time.process_time() - started:.0f} CPU seconds")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
