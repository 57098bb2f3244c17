"""What a call on two ranks costs: in warm processes, in fresh ones of the pool, and by torch's and accelerate's ways.

    python benchmarks/ranks.py [--rounds 9]

Torch's is `torch.multiprocessing.spawn`; accelerate's `debug_launcher` forks, which needs no imports but is not safe
once CUDA or threads are in use. Each way joins two ranks and reduces one tensor. Interleaved; medians of the ratios of
one round to its own cold spawn. CPU seconds are those of this process and of the ranks together; a wall clock also
counts what else the machine does. A call in the warm pool may cost a tenth of a cold spawn.
"""

import argparse
import importlib.util
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
from report import summary
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


def joined() -> None:
    """Do the same in a process that accelerate has forked."""
    from accelerate import Accelerator

    Accelerator(cpu=True)
    reduce()  # the group's end would remove the launcher's file, which it then misses


def fork() -> None:
    """Fork two processes, and wait for their end."""
    from accelerate import debug_launcher

    debug_launcher(joined, num_processes=2)


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
        if importlib.util.find_spec("accelerate"):
            row["fork"] = cost(fork, [])
        row["cold"] = cost(warm, [])
        row["warm"] = cost(warm, warm())
        rows.append(row)
    ratios = {}
    for place, name in enumerate(("wall", "CPU")):
        print(f"{name}: spawn {statistics.median(row['spawn'][place] for row in rows):.2f} s, {rounds} rounds")
        ways = {"cold": "dxdy, cold", "warm": "dxdy, warm", "fork": "accelerate debug_launcher", "spawn": "torch spawn"}
        seen = {say: statistics.median(row[way][place] for row in rows) for way, say in ways.items() if way in rows[0]}
        summary(f"two ranks called, {name} time", "s", seen)
        for way in [way for way in ways if way in rows[0] and way != "spawn"]:
            ratios[name, way] = statistics.median(row[way][place] / row["spawn"][place] for row in rows)
            absolute = statistics.median(row[way][place] for row in rows)
            print(f"  {way}   {absolute:.2f} s, {ratios[name, way]:.3f} x spawn")
    print(f"allowed for a warm call: {BAR} x")
    return int(max(ratios["wall", "warm"], ratios["CPU", "warm"]) > BAR)


if __name__ == "__main__":
    sys.exit(main())
