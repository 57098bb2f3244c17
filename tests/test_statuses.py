"""All eight ways in which a run can stand or end, each made for real, in one table with their causes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dxdy_nb as dx
from dxdy_nb.runs import record

# A run that meets one thing at its fourth step. The parent waits for the word that it prints there.
RUN = """
import resource, signal, sys, time
import torch
import dxdy_nb as dx
from dxdy_nb.training import loop

def memory(make):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(make())

def too_late(*arguments):
    raise TimeoutError("a second is over")

def alarm():
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(1)
    time.sleep(60)

def sleep():
    print("waiting", flush=True)
    time.sleep(600)

happens = {
    "exception": lambda: {}["weight"],
    "torch_memory": lambda: memory(lambda: torch.ones(2**24)),
    "python_memory": lambda: memory(lambda: bytearray(2**26)),
    "alarm": alarm,
    "waits": sleep,
    "nothing": lambda: None,
}
train_step, steps = loop.train_step, iter(range(1000))

def step(*arguments):
    if next(steps) == 3:
        happens[sys.argv[2]]()
    return train_step(*arguments)

loop.train_step = step
changes = {"lr": 1000, "loss": "mse"} if sys.argv[3] == "diverged" else {}
dx.train(dx.RunConfig(data="spirals", model="mlp", max_steps=6).override(changes), out=sys.argv[1])
"""


def start(folder: Path, what: str, name: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, folder, what, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


EXPECTED = {
    "alarm": ("timed_out", "TimeoutError: a second is over"),
    "completed": ("completed", ""),
    "diverged": ("diverged", "the loss is inf at step"),
    "exception": ("failed", "KeyError: 'weight'"),
    "interrupted": ("interrupted", "KeyboardInterrupt"),
    "killed": ("killed", "the process ended without a word"),
    "python_memory": ("out_of_memory", "MemoryError"),
    "running": ("running", ""),
    "stopped": ("timed_out", "TimeoutError: stopped after 1 s"),
    "torch_memory": ("out_of_memory", "RuntimeError: "),
}
ALONE = (
    "alarm",
    "completed",
    "diverged",
    "exception",
    "python_memory",
    "torch_memory",
)  # they need no one from outside


@pytest.mark.slow
def test_all_eight_statuses_stand_in_one_table_with_their_causes(tmp_path: Path) -> None:
    alone = {name: "nothing" if EXPECTED[name][0] in ("completed", "diverged") else name for name in ALONE}
    children = {name: start(tmp_path / name, what, name) for name, what in alone.items()}
    children |= {name: start(tmp_path / name, "waits") for name in ("interrupted", "killed", "stopped", "running")}
    try:
        for name in alone:
            assert (children[name].wait(300) == 0) is (alone[name] == "nothing")
        for name, number in (("interrupted", signal.SIGINT), ("killed", signal.SIGKILL), ("stopped", signal.SIGKILL)):
            assert children[name].stdout.readline() == "waiting\n"
            children[name].send_signal(number)  # the last one as a driver sends it when the time is over
            if number == signal.SIGINT:  # the first one waits for the end of the step, which would be long
                time.sleep(1)
                children[name].send_signal(number)
            children[name].wait(60)
        record.end(tmp_path / "stopped", TimeoutError("stopped after 1 s"))
        assert children["running"].stdout.readline() == "waiting\n"
        seen = dx.compare(tmp_path)
    finally:
        for child in children.values():
            child.kill()
            child.communicate()
    print(seen[["status", "reason"]].to_string())
    assert set(seen["status"]) == set(record.STATUSES)
    told = {name: (row.status, row.reason[: len(EXPECTED[name][1]) or None]) for name, row in seen.iterrows()}
    assert told == EXPECTED
    assert seen.loc["torch_memory", "reason"].count("can't allocate memory") == 1
    # What came before is kept; a diverged step is the last one, and not taken.
    assert seen.drop(index=["completed", "diverged"])["steps_taken"].eq(3).all()
    assert dx.compare(tmp_path).loc["running", "status"] == "killed"
