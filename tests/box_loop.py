"""A training loop that tells a black box, or a replay, what it does: by hand, at the places where a watch would.

python tests/box_loop.py FOLDER     replays what is in FOLDER in a process of its own, and prints the verdict
"""

import contextlib
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dxdy_nb.observe.blackbox import Replay

LAST = 46  # the step that meets the poisoned sample


class Samples(Dataset):
    """200 samples; one of them is not finite in the eighth epoch and later."""

    def __init__(self):
        self.x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        x = self.x[place] + 0.1 * random.random() + 0.1 * np.random.normal() + 0.1 * torch.randn(5)
        return (x * torch.inf if self.epoch >= 7 and place == 77 else x), self.x[place].sum()


class Stop(Exception):
    """Raised by a loop in the step where it is told to."""


def batches(loader, told=lambda batch: batch):
    """Yield batches for ever, each as a black box or a replay hands it on."""
    while True:
        for batch in loader:
            yield told(batch)
        loader.dataset.epoch += 1


def train(box=None, replay=None, *, steps=60, amp=False, workers=0, raises_at=None, early=True):
    """Train and return the loss of each step and the model; a replay ends the loop when it is done."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    loader = DataLoader(Samples(), batch_size=16, shuffle=True, num_workers=workers)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=256.0, growth_interval=3)
    objects = {"model": model}, {"optimizer": optimizer}, {"scaler": scaler}
    losses = []

    def told(batch):
        if box:
            box.batch(len(losses), batch)
        return replay.batch(batch) if replay else batch

    source = batches(loader, told)
    for step in range(steps):
        total = 0.0
        for micro in range(2):
            x, y = next(source)
            if micro == 0:
                for one in filter(None, (box, replay)):
                    one.forward(*([step] if one is box else []), *objects)
            x = x + 0.1 * torch.randn_like(x)
            loss = (model(x).squeeze(1) - y).square().mean() / 2
            if step == raises_at:
                raise Stop("as told")
            scaler.scale(loss).backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        losses.append(total)
        if box and early:
            box.ended(step, total, norm, not np.isfinite(norm))
        if replay and replay.ended(total, norm):
            break
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if box and not early:
            box.ended(step, total, norm, not np.isfinite(norm))
        scheduler.step()
        optimizer.zero_grad()
    return losses, model


def replayed(folder, **options):
    """Execute what a folder holds again; return the replay and the number of steps that it took."""
    replay, losses = Replay(folder), []
    with contextlib.suppress(Stop):
        try:
            losses, _ = train(replay=replay, **options)
        except Stop as error:
            replay.failed(error)
    return replay, len(losses)


if __name__ == "__main__":
    replay, steps = replayed(sys.argv[1])
    print(replay.verdict.same, steps, replay.verdict.sentence)
