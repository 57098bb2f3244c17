"""What recording costs: the reference loop against a bare loop on the digits CNN, side by side in one run.

    python benchmarks/loop.py [--rounds 15]

The bare loop has the same loader, `loss.item()`, `clip_grad_norm_` and schedule. One thread, process time (CPU
seconds of this process, the kernel's work for it included), interleaved, medians of the ratios.
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
    batches = loop.batches(datasets.loader(data.train, config.batch_size, shuffle_seed=seed), STEPS)
    return model, optimizer, factor, batches


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


def recorded(seed: int, out: Path | None) -> float:
    """Return the CPU seconds of the same loop as `train` runs it: every step watched, and stored in a folder."""
    model, optimizer, scheduler, batches = prepare(seed)
    started = time.process_time()
    with dx.watch(model, optimizer, out=out):
        for x, y, _ in batches:
            loop.train_step(model, x, y, torch.nn.functional.cross_entropy, optimizer)
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
            }
            order = list(ways)[seed % 3 :] + list(ways)[: seed % 3]
            rows.append({name: ways[name]() for name in order})
    per_step = 1000 * statistics.median(row["bare"] for row in rows) / STEPS
    noise = statistics.median(row["bare again"] / row["bare"] for row in rows)
    ratio = statistics.median(row["recorded"] / row["bare"] for row in rows)
    print(f"bare loop      {per_step:.2f} ms of CPU a step, {STEPS} steps, {rounds} rounds, 1 thread")
    print(f"bare again     {noise:.3f} x (what this machine's noise makes of the same loop)")
    print(f"recorded       {ratio:.3f} x, allowed {BAR}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
