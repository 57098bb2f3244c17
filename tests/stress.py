"""Kill training processes at random moments: nothing that was recorded is lost, and a run goes on bit for bit.

    python tests/stress.py --kills 20 [--seed 0] [--kinds record,alone,workers,ranks]

``record``: a child trains under ``dx.watch(out=...)`` and writes a line to a pipe after each step: the step is
acknowledged. Then ``kill -9``. All that was acknowledged must be in the record, and must be what the same training
computes without a watch and without a kill; a reader that follows the file meanwhile must see the same.

``alone`` and ``workers`` (with two that fetch batches): ``kill -9`` at any moment of ``dx.train``, every other time
within a save, and ``resume=True``. ``ranks``: one of two ranks under ``torchrun`` is killed, which starts both anew. In
the end weights and recorded losses must be those of a run that was never killed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.observe import trace
from dxdy_nb.training import checkpoint, models

CHILD = "import sys, stress; stress.train_and_tell(sys.argv[1])"
KINDS = ("record", "alone", "workers", "ranks")
ROUND = 5  # kills of one run
# A scaler, random numbers, accumulation and a schedule all have to go on where they were.
LONG = dx.RunConfig(
    data="spirals",
    model="mlp",
    optimizer="adamw",
    lr=0.001,
    schedule="one_cycle",
    epochs=100,
    max_steps=300,
    validate_every=4,
    checkpoint_every=5,
    accumulation_steps=2,
    precision="fp16",
)
CONFIGS = {
    "alone": LONG,
    "workers": LONG.override({"num_workers": 2}),
    "ranks": LONG.override({"world_size": 2, "batch_size": 32}),
}


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


class Net(nn.Module):
    """A net that draws random numbers in each forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, x):
        return self.body(x)


def train(kind, folder):
    """Train, or go on; this is the child, or each rank."""
    models.build = lambda name, sample, classes: Net()
    if os.environ.get("RANK") == "0":
        with open(f"{folder}.attempts", "a") as file:
            file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\n")
    fsync = os.fsync
    os.fsync = lambda file: (fsync(file), time.sleep(0.003))  # a disk that takes its time: kills meet half a save
    dx.train(CONFIGS[kind], out=folder, resume=True)


def start(kind, folder):
    """Start the child, or the ranks."""
    program = [__file__, "--child", kind, "--folder", str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={ROUND}"]
    log = open(f"{folder}.log", "a")  # noqa: SIM115
    with log:
        return subprocess.Popen([sys.executable, *(launcher if kind == "ranks" else []), *program], stderr=log)


def outcome(folder):
    """Return how a run ended, its weights' hash, and what it recorded."""
    run = dx.Run.load(folder)
    model = checkpoint.newest(folder / checkpoint.FOLDER).model
    bits = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.values())).hexdigest()
    return run.status, bits, run.steps.index.tolist(), run.steps["loss"].tolist(), run.validation_rows, run.metrics


def saves(folder):
    """Return the last checkpoint's step, and whether another one is being written."""
    names = [path.name for path in (folder / checkpoint.FOLDER).glob("*")]
    steps = [int(name[5:13]) for name in names if name.startswith("step-") and name.endswith(".pt")]
    return max(steps, default=0), any(name.startswith(".step") for name in names)


def kill_run(kind, folder, kills, chance):
    """Kill a run so many times after it has made some way, and let it end; return the moments of the kills."""
    moments, process = [], start(kind, folder)
    while len(moments) < kills and process.poll() is None:
        known = saves(folder)[0] + chance.randrange(20)
        while process.poll() is None and saves(folder)[0] <= known:  # it goes on from there
            time.sleep(0.002)
        within = chance.random() < 0.5
        while within and process.poll() is None and not saves(folder)[1]:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.006 if within else 0.3))
        places = [folder, folder / "ranks" / "rank1"][: CONFIGS[kind].world_size]
        try:
            pid = json.loads((chance.choice(places) / "result.json").read_text())["process"]["pid"]
            step, writing = saves(folder)
            os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):  # it has just ended
            continue
        moments.append(f"{step}{'s' if writing else ''}")
        if kind != "ranks":
            process.wait()
            process = start(kind, folder)
    if process.wait(timeout=300):
        raise RuntimeError(Path(f"{folder}.log").read_text()[-4000:])
    return moments


def kill_runs(kind, kills, chance):
    """Kill runs as often as asked, and compare each with one that was never killed; return what is wrong, or None."""
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        if start(kind, whole).wait():
            return Path(f"{whole}.log").read_text()[-4000:]
        done = 0
        while done < kills:
            folder = Path(place) / f"run{done}"
            moments = kill_run(kind, folder, min(ROUND, kills - done), chance)
            done += len(moments)
            attempts = Path(f"{folder}.attempts")
            restarts = attempts.read_text().split() if attempts.exists() else []
            wrong = outcome(folder) != outcome(whole)
            if kind == "ranks" and restarts != [str(one) for one in range(len(moments) + 1)]:
                return f"after {len(moments)} kills both ranks came back at the attempts {', '.join(restarts)}"
            told = "DIFFERENT" if wrong else "bit for bit the run that was never killed"
            print(f"{kind}: kills after steps {', '.join(moments)} (s: within a save): {told}", flush=True)
            if wrong:
                return "the weights, the losses or the validation differ"
    return None


def kill_records(kills, chance):
    """Kill a watched loop as often as asked; return what is wrong, or None."""
    for kill in range(kills):
        after, delay = chance.randrange(1, 300), chance.expovariate(1 / 0.005)
        with tempfile.TemporaryDirectory() as folder:
            wrong = kill_one(Path(folder) / "run", after, delay)
        print(f"record: kill {kill + 1}: {after} steps + {1000 * delay:.1f} ms: {wrong or 'nothing lost'}", flush=True)
        if wrong:
            return wrong
    return None


def main():
    """Kill as often as asked, in each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return train(options.child, options.folder)
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    for kind in options.kinds.split(","):
        chance = random.Random(seed)
        kill = kill_records if kind == "record" else partial(kill_runs, kind)
        if wrong := kill(options.kills, chance):
            sys.exit(f"{kind}: {wrong}; failed with --seed {seed}")
    print(f"{options.kills} kills of each kind: nothing acknowledged was lost, and every run went on (seed {seed}).")
    return None


if __name__ == "__main__":
    main()
