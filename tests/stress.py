"""Kill training processes at random moments, and find in their records every step that they said was done.

    python tests/stress.py --kills 20 [--seed 0]

A child trains under ``dx.watch(out=...)`` and writes a line to a pipe after each step: the step is acknowledged. Then
``kill -9``. All that was acknowledged must be in the record, and must be what the same training computes without a
watch and without a kill; a reader that follows the file meanwhile must see the same.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.observe import trace

CHILD = "import sys, stress; stress.train_and_tell(sys.argv[1])"


def loop():
    """Return model, optimizer, and a generator that trains one step at a time and yields loss and gradient norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def steps():
        while True:
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            norms = [p.grad.norm().item() for p in model.parameters()]
            optimizer.step()
            yield loss.item(), norms

    return model, optimizer, steps()


def train_and_tell(folder):
    """Train for ever under a watch; this is the child."""
    model, optimizer, steps = loop()
    with dx.watch(model, optimizer, out=folder):
        for step, _ in enumerate(steps):
            print(step, flush=True)


def kill_one(folder, after, delay):
    """Kill a child ``delay`` seconds after it has acknowledged ``after`` steps; return what is wrong, or None."""
    command = [sys.executable, "-c", CHILD, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as child:
        told = [int(child.stdout.readline()) for _ in range(after)]
        reader = trace.Reader(folder)
        followed = [reader.update()]
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        told += [int(line) for line in child.stdout if line.endswith("\n")]
    if child.returncode != -signal.SIGKILL:
        return f"the child ended by itself: {child.returncode}"
    followed.append(reader.update())
    record = trace.read(folder)
    if record.steps.index.tolist() != list(range(len(record.steps))) or len(record.steps) < len(told):
        return f"{len(told)} steps were acknowledged, but in the record are {record.steps.index.tolist()}"
    if [step for part in followed for step in part.steps.index] != record.steps.index.tolist():
        return "the reader that followed saw other steps"
    _, _, steps = loop()
    for step, (loss, norms) in zip(record.steps.index, steps, strict=False):
        seen = record.gradients.loc[step, "norm"].tolist()
        if record.steps.loc[step, "loss"] != loss or any(
            abs(a - b) > 1e-5 * b for a, b in zip(seen, norms, strict=True)
        ):
            return f"step {step}: recorded loss {record.steps.loc[step, 'loss']}, computed {loss}"
    return None


def main():
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    chance = random.Random(seed)
    for kill in range(options.kills):
        after, delay = chance.randrange(1, 300), chance.expovariate(1 / 0.005)
        with tempfile.TemporaryDirectory() as folder:
            wrong = kill_one(Path(folder) / "run", after, delay)
        print(f"kill {kill + 1}: {after} steps + {1000 * delay:.1f} ms: {wrong or 'nothing lost'}", flush=True)
        if wrong:
            sys.exit(f"failed with --seed {seed}")
    print(f"{options.kills} kills, nothing acknowledged was lost (seed {seed}).")


if __name__ == "__main__":
    main()
