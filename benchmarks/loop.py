"""What recording costs: the reference loop against a bare loop on the digits CNN, side by side in one run.

    python benchmarks/loop.py [--rounds 15]

The bare loop has the same loader, `loss.item()`, `clip_grad_norm_` and schedule, so it knows its loss and its gradient
norm at each step. The recorded loop takes the norm from its own statistics: it calls `clip_grad_norm_` only where the
configuration asks for clipping. Both ways are measured. One thread, process time (CPU seconds of this process, the
kernel's work for it included), interleaved, medians of the ratios.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.training import datasets, loop, models

STEPS = 190  # ten epochs of the digits
BAR = 1.05


def prepare(seed: int) -> tuple:
    """Return model, optimizer, scheduler and an iterator over the batches."""
    config = dx.RunConfig(seed=seed)
    data = datasets.load("digits")
    loop.seed_everything(seed)
    model = models.build(config.model, data.train.x[0], data.classes)
    models.initialise(model, config.init)
    optimizer = loop.pick_optimizer(config, model)
    factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: loop.lr_factor(config, step, STEPS))
    windows = loop.windows(datasets.loader(data.train, config.batch_size, shuffle_seed=seed), 1, STEPS)
    return model, optimizer, factor, (batch for (batch,) in windows)


def bare(seed: int) -> float:
    """Return the CPU seconds of the bare loop."""
    model, optimizer, scheduler, batches = prepare(seed)
    started = time.process_time()
    for x, y, _ in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        scheduler.step()
    return time.process_time() - started


def recorded(seed: int, out: Path | None, max_grad_norm: float | None = None) -> float:
    """Return the CPU seconds of the same loop as `train` runs it: every step watched, and stored in a folder."""
    model, optimizer, scheduler, batches = prepare(seed)
    started = time.process_time()
    with dx.watch(model, optimizer, out=out):
        for x, y, _ in batches:
            loop.train_step(model, x, y, torch.nn.functional.cross_entropy, optimizer, max_grad_norm)
            scheduler.step()
    return time.process_time() - started


def main() -> int:
    """Measure, print, and return 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    bare(0), recorded(0, None)  # warm up
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in tqdm(range(rounds), desc="rounds", disable=None):
            ways = {
                "bare": lambda seed=seed: bare(seed),
                "bare again": lambda seed=seed: bare(seed),
                "recorded": lambda seed=seed: recorded(seed, Path(folder) / str(seed)),
                "and clipped": lambda seed=seed: recorded(seed, Path(folder) / f"{seed}c", math.inf),
            }
            order = list(ways)[seed % 4 :] + list(ways)[: seed % 4]
            rows.append({name: ways[name]() for name in order})

    def ratio(name: str) -> float:
        """Return the median over the rounds, against both bare runs of the same round together."""
        return statistics.median(2 * row[name] / (row["bare"] + row["bare again"]) for row in rows)

    per_step = 1000 * statistics.median(row["bare"] for row in rows) / STEPS
    spread = statistics.median(abs(row["bare again"] / row["bare"] - 1) for row in rows)
    print(f"bare loop    {per_step:.2f} ms of CPU a step, {STEPS} steps, {rounds} rounds, 1 thread")
    print(f"bare again   differs by {100 * spread:.1f} % (median): the noise of this machine")
    print(f"recorded     {ratio('recorded'):.3f} x, allowed {BAR}")
    print(f"and clipped  {ratio('and clipped'):.3f} x")
    return 0 if ratio("recorded") <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
