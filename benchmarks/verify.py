"""What it costs to verify ranks while they train: beside a bare DistributedDataParallel script, in one run.

    python benchmarks/verify.py [--rounds 15] [--batch-size 64] [--world-size 2]

Three million parameters in plain layers, which compute little for each: a small batch is the worst case. The bare loop
knows its rank's loss and its gradient norm, as in `benchmarks/loop.py`. ``verified`` is the bare loop with each rank's
log; ``reference`` is the loop of `dx.train`, which also records the gradients' norms at every step and all their
statistics at some, keeps the last steps for a replay, and takes the loss over all ranks;
``unverified`` is the same without the log. CPU seconds of all ranks together (their gloo threads and the kernel's work
for them included), one thread a rank, interleaved, medians of the ratios of a round to both its bare runs.
"""

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.observe.blackbox import BlackBox
from dxdy_nb.observe.observer import Watch
from dxdy_nb.ranks.log import logged
from dxdy_nb.training import loop, models, parts

STEPS = 20
BARS = {"verified": 1.05, "reference": 1.05}


def trained(way: str, seed: int, batch_size: int, folder: Path) -> float:
    """Return the CPU seconds that this rank took for the steps of one way."""
    with dx.session(device="cpu") as s, contextlib.ExitStack() as stack:
        parts.seed_everything(seed)
        model = models.MLP(64, 10, hidden=1700)  # 3,019,210 parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        samples = [(torch.randn(64), i % 10, i) for i in range(batch_size * (STEPS + 3))]
        batches = iter(DataLoader(samples, batch_size))
        if way in BARS:
            stack.enter_context(logged(folder / f"rank{s.rank}.jsonl", s.rank, close=0))
        ddp = DistributedDataParallel(model)
        if way in ("reference", "unverified"):
            out = folder / f"{s.rank}"
            stack.enter_context(Watch(model, optimizer, out, 0.03, blackbox=BlackBox(out)))
        scaler = torch.amp.GradScaler("cpu", enabled=False)

        def step() -> float:
            batch = next(batches)
            if way in ("reference", "unverified"):
                count = len(batch[1])  # the same on all ranks, as `train` knows of its own
                return loop.window_step(
                    ddp, [batch], nn.functional.cross_entropy, optimizer, scaler, s, mean_count=count
                )
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(batch[0]), batch[1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()
            return loss.item()

        for _ in range(3):
            step()
        s.mean(1, 1)  # all begin together
        started = time.process_time()
        for _ in range(STEPS):
            step()
        s.mean(1, 1)
        return time.process_time() - started


def rounds(seeds: list[int], batch_size: int, folder: str) -> list[dict[str, float]]:
    """Return this rank's CPU seconds of every way, round by round."""
    rows = []
    for seed in tqdm(seeds, desc="rounds", disable=None):
        ways = ("bare", "verified", "reference", "unverified", "bare again")
        order = ways[seed % 5 :] + ways[: seed % 5]
        row = {}
        for way in order:
            place = Path(folder) / f"{seed} {way}"
            place.mkdir(exist_ok=True)
            row[way] = trained(way.split()[0], seed, batch_size, place)
        rows.append(row)
    return rows


def main() -> int:
    """Measure, print, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of a rank")
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = list(range(args.rounds))
        ranks = dx.launch(rounds, seeds, args.batch_size, folder, world_size=args.world_size, stall=None)
    rows = [{way: sum(rank[way] for rank in together) for way in together[0]} for together in zip(*ranks, strict=True)]
    bare = [(row["bare"] + row["bare again"]) / 2 for row in rows]
    per_step = 1000 * statistics.median(bare) / STEPS / args.world_size
    spread = statistics.median(abs(row["bare again"] / row["bare"] - 1) for row in rows)
    print(f"bare         {per_step:.2f} ms of CPU a step and rank, {args.batch_size} samples, {args.rounds} rounds")
    print(f"bare again   differs by {100 * spread:.1f} % (median): the noise of this machine")
    missed, ratios = False, {}
    for way in ("verified", "reference", "unverified"):
        ratio = ratios[way] = statistics.median(row[way] / own for row, own in zip(rows, bare, strict=True))
        missed |= ratio > BARS.get(way, math.inf)
        print(f"{way:<12} {ratio:.3f} x" + (f", allowed {BARS[way]}" if way in BARS else ""))
    summary("ranks verified in training, on a bare step's", "x", {"dxdy": ratios["verified"]})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
