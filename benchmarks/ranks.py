"""What a call on two ranks costs: in warm processes, in fresh ones of the pool, and with `torch.multiprocessing.spawn`.

    python benchmarks/ranks.py [--rounds 9]

Each way joins two ranks, reduces one tensor and ends the group. Interleaved; medians of the ratios of one round to its
own cold spawn. CPU seconds are those of this process and of the ranks together; a wall clock also counts what else the
machine does. A call in the warm pool may cost a tenth of a cold spawn.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.ranks import pool
from dxdy_nb.ranks.session import LOOPBACK

BAR = 0.1


def reduce() -> int:
    """Add up one tensor over all ranks."""
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert ones[0] == 2
    return os.getpid()


def spawned(rank: int, file: str) -> None:
    """Do the same in a process of `torch.multiprocessing.spawn`."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    reduce()
    dist.destroy_process_group()


def spawn() -> None:
    """Start two processes, and wait for their end."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (str(Path(folder) / "store"),), nprocs=2)


def warm() -> list[int]:
    """Use the processes that are there."""
    return dx.launch(reduce)


def cost(way: Callable[[], object], before: list[int]) -> tuple[float, float]:
    """Return the wall and the CPU seconds of one call, of which some processes were there before."""
    wall, cpu = time.perf_counter(), seconds(before)
    living = way() or []
    time.sleep(0.5)  # the end of the group belongs to the call, too
    return time.perf_counter() - wall - 0.5, seconds(living) - cpu


def seconds(living: list[int]) -> float:
    """Return the CPU seconds of this process, of the children that have ended, and of some that live."""
    own = os.times()
    ranks = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in living)
    return sum(own[:4]) + ranks


def main() -> int:
    """Measure, print, and return 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows = []
    for _ in tqdm(range(rounds), desc="rounds", disable=None):
        row = {"spawn": cost(spawn, [])}
        pool.close()
        row["cold"] = cost(warm, [])
        row["warm"] = cost(warm, warm())
        rows.append(row)
    ratios = {}
    for place, name in enumerate(("wall", "CPU")):
        print(f"{name}: spawn {statistics.median(row['spawn'][place] for row in rows):.2f} s, {rounds} rounds")
        for way in ("cold", "warm"):
            ratios[name, way] = statistics.median(row[way][place] / row["spawn"][place] for row in rows)
            absolute = statistics.median(row[way][place] for row in rows)
            print(f"  {way}   {absolute:.2f} s, {ratios[name, way]:.3f} x spawn")
    print(f"allowed for a warm call: {BAR} x")
    return int(max(ratios["wall", "warm"], ratios["CPU", "warm"]) > BAR)


if __name__ == "__main__":
    sys.exit(main())
