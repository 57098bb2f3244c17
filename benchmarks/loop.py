"""What recording costs: the reference loop against a bare loop on the digits CNN, side by side in one run.

    python benchmarks/loop.py [--rounds 15]

The bare loop has the same loader, `loss.item()`, `clip_grad_norm_` and schedule, so it knows its loss and its gradient
norm at each step. The recorded loop takes the norm from its own statistics: it calls `clip_grad_norm_` only where the
configuration asks for clipping. Both ways are measured. Where they are installed: the bare loop by accelerate, and by
Lightning, whose clock runs from `on_train_start` to `on_train_end`; `and logged` writes the loss and `grad_norm` of
every step to its CSV file, the nearest it has to a recorded run. One thread, process time (CPU seconds of this process,
the kernel's work for it included), interleaved, medians of the ratios.
"""

import argparse
import importlib.util
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from report import summary
from tqdm import tqdm

import dxdy_nb as dx
from dxdy_nb.observe.blackbox import BlackBox
from dxdy_nb.observe.observer import Watch
from dxdy_nb.training import datasets, loop, models, parts

STEPS = 190  # ten epochs of the digits
BAR = 1.05


def prepare(seed: int) -> tuple:
    """Return model, optimizer, scheduler and an iterator over the batches."""
    config = dx.RunConfig(seed=seed)
    data = datasets.load("digits")
    parts.seed_everything(seed)
    model = models.build(config.model, data.train.x[0], data.classes)
    models.initialise(model, config.init)
    optimizer = parts.pick_optimizer(config, model)
    factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: parts.lr_factor(config, step, STEPS))
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
    """Return the CPU seconds of the same loop as `train` runs it.

    Every gradient is measured at every step and stored in a folder, and the last steps are kept for a replay.
    """
    model, optimizer, scheduler, batches = prepare(seed)
    started = time.process_time()
    with Watch(model, optimizer, out, None, blackbox=BlackBox(out)):
        for x, y, _ in batches:
            loop.train_step(model, x, y, torch.nn.functional.cross_entropy, optimizer, max_grad_norm)
            scheduler.step()
    return time.process_time() - started


def accelerated(seed: int) -> float:
    """Return the CPU seconds of the bare loop by accelerate."""
    from accelerate import Accelerator

    model, optimizer, scheduler, batches = prepare(seed)
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    started = time.process_time()
    for x, y, _ in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        loss.item()
        accelerator.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        scheduler.step()
    return time.process_time() - started


def lightning(seed: int, folder: Path | None) -> float:
    """Return the CPU seconds of the same loop by Lightning; with a folder its log has all norms of every step."""
    import lightning as peer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities import grad_norm

    model, optimizer, scheduler, batches = prepare(seed)
    times = []

    class Module(peer.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: tuple, _: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, batch_size=len(batch[1]))
            return loss

        def on_before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
            if folder is not None:
                self.log_dict(grad_norm(self.net, 2))
            else:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), math.inf)

        def configure_optimizers(self) -> dict:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_start(self) -> None:
            times.append(time.process_time())

        def on_train_end(self) -> None:
            times.append(time.process_time())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would like more workers, a length, another clip
        trainer = peer.Trainer(
            accelerator="cpu", max_steps=STEPS, logger=CSVLogger(folder) if folder else False, log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), batches)
    assert trainer.global_step == STEPS
    return times[1] - times[0]


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
            if importlib.util.find_spec("accelerate"):
                ways["accelerate"] = lambda seed=seed: accelerated(seed)
            if importlib.util.find_spec("lightning"):
                ways["Lightning"] = lambda seed=seed: lightning(seed, None)
                ways["Lightning, and logged"] = lambda seed=seed: lightning(seed, Path(folder) / f"{seed}l")
            turn = seed % len(ways)
            order = list(ways)[turn:] + list(ways)[:turn]
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
    peers = {name: ratio(name) for name in rows[0] if name in ("accelerate", "Lightning", "Lightning, and logged")}
    for name, found in peers.items():
        print(f"{name:22s} {found:.3f} x")
    summary("a step of training, on a bare loop's", "x", {"dxdy, recorded": ratio("recorded"), **peers})
    return 0 if ratio("recorded") <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
