"""What it costs to store one step: 100 tensors of six statistics and their update ratios, on disk and in memory.

    python benchmarks/store.py [--steps 20000]

CPU time of this process for each call of ``TraceWriter.append``, one thread; the clock's own time is measured and not
taken off. The bar is the median on disk.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dxdy_nb.observe.statistics import COLUMNS
from dxdy_nb.observe.trace import STEP_COLUMNS, Layout, Reader, TraceWriter

BAR = 20.0  # µs
TENSORS = 100


def microseconds(call, times):
    """Return the CPU time of each call."""
    taken = np.empty(times)
    for step in range(times):
        started = time.process_time_ns()
        call(step)
        taken[step] = (time.process_time_ns() - started) / 1e3
    return taken[times // 10 :]  # the first calls warm up


def main():
    """Measure, print a table, and fail above the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20000)
    steps = parser.parse_args().steps
    layout = Layout(tuple(f"layer{number}.weight" for number in range(TENSORS)), ((8, 8),) * TENSORS)
    values = dict.fromkeys(STEP_COLUMNS, 1.0)
    rows, ratios = np.random.default_rng(0).normal(size=(TENSORS, len(COLUMNS))), np.full(TENSORS, np.nan)
    with tempfile.TemporaryDirectory() as folder:
        on_disk, in_memory = TraceWriter(layout, Path(folder)), TraceWriter(layout, None)
        measured = {
            "on disk": microseconds(lambda step: on_disk.append(step, values, rows, ratios), steps),
            "in memory": microseconds(lambda step: in_memory.append(step, values, rows, ratios), steps),
            "(the clock alone)": microseconds(lambda step: None, steps),
        }
        reader = Reader(folder)
        started = time.process_time()
        found = len(reader.update().segments[0].records)
        whole = time.process_time() - started
        following = microseconds(lambda step: reader.update(), 200)
    print(f"{'µs of CPU a step':20}{'median':>10}{'99 %':>10}")
    for name, taken in measured.items():
        print(f"{name:20}{np.median(taken):10.1f}{np.percentile(taken, 99):10.1f}")
    print(f"a record is {layout.record.itemsize} bytes; {found} of them are read and checked in {whole:.2f} s;")
    print(f"to ask whether there is more takes {np.median(following):.0f} µs")
    if np.median(measured["on disk"]) > BAR:
        sys.exit(f"above the bar of {BAR} µs")


if __name__ == "__main__":
    main()
