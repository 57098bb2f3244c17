"""What a configuration names, built: model, loss, optimizer, schedule, precision and loader of a run."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.ranks.session import Session
from dxdy_nb.training import datasets, models
from dxdy_nb.training.muon import MuonAdamW

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """What a configuration names, built: with ``epoch`` optimizer steps an epoch, and ``total`` in all."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    dtype: torch.dtype | None  # of autocast
    loader: DataLoader[datasets.Batch]
    epoch: int
    total: int

    @property
    def states(self) -> dict[str, Any]:
        """All that has a state which the next step depends on, by the names that a checkpoint gives it."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.scheduler, "scaler": self.scaler}


def prepare(config: RunConfig, data: datasets.Splits, s: Session) -> Parts:
    """Build model, loss, optimizer, schedule and this rank's loader, the same on every rank."""
    seed_everything(config.seed)
    model = models.build(config.model, data.train.x[0], data.classes)
    models.initialise(model, config.init)
    model.to(s.device)
    optimizer = pick_optimizer(config, model)
    dtype, scaler = pick_precision(config.precision, model, data.train.x[:1].to(s.device))
    share = {"rank": s.rank, "world_size": s.world_size, "num_workers": config.num_workers}
    loader = datasets.loader(data.train, config.batch_size, shuffle_seed=config.seed, **share)
    epoch = steps_per_epoch(len(loader), config.accumulation_steps)
    total = min(config.max_steps or config.epochs * epoch, config.epochs * epoch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, total))
    return Parts(model, pick_loss(config.loss), optimizer, scheduler, scaler, dtype, loader, epoch, total)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all its devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def steps_per_epoch(batches: int, accumulation_steps: int) -> int:
    """Return the number of optimizer steps of an epoch.

    Raises
    ------
    DxdyError
        No window of ``accumulation_steps`` batches would ever be full.
    """
    if accumulation_steps > batches:
        raise DxdyError(
            f"accumulation_steps: an epoch has {counted(batches, 'batch')}, so {accumulation_steps} never come "
            f"together. Expected at most {batches}, or a smaller batch_size."
        )
    return math.ceil(batches / accumulation_steps)


def pick_loss(name: str) -> LossFn:
    """Return a loss over logits (B, C) and class indices (B,); ``mse`` compares with one-hot targets."""
    if name == "cross_entropy":
        return nn.functional.cross_entropy
    return lambda logits, y: nn.functional.mse_loss(logits, nn.functional.one_hot(y, logits.shape[1]).to(logits.dtype))


def pick_precision(name: str, model: nn.Module, x: Tensor) -> tuple[torch.dtype | None, torch.amp.GradScaler]:
    """Return the dtype of autocast (None for fp32), and a scaler, which does nothing but for fp16.

    Raises
    ------
    DxdyError
        The scaler does not work on the device of ``x``, or the model cannot run on ``x`` in this precision there.
    """
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    scaler = torch.amp.GradScaler(x.device.type, enabled=dtype is torch.float16)
    if dtype is torch.float16 and not scaler.is_enabled():
        raise DxdyError(f"precision: 'fp16' needs a GradScaler, and on {x.device} it switched itself off. Use 'bf16'.")
    if dtype is not None:
        try:
            with torch.no_grad(), torch.autocast(x.device.type, dtype):
                model(x)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DxdyError(f"precision: {name!r} does not run on {x.device} ({reason}). Use 'fp32'.") from None
    return dtype, scaler


def pick_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer over all parameters of a model.

    Raises
    ------
    DxdyError
        ``muon`` is asked for, and no hidden layer has a 2-D weight.
    """
    lr, weight_decay = config.lr, config.weight_decay
    if config.optimizer == "muon":
        return MuonAdamW(model, lr=lr, momentum=config.momentum, weight_decay=weight_decay)
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=config.momentum, weight_decay=weight_decay)
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return adam(model.parameters(), lr=lr, weight_decay=weight_decay)


def lr_factor(config: RunConfig, step: int, total: int) -> float:
    """Return what the learning rate is multiplied by before optimizer step ``step`` (from 0) of ``total``.

    Warm-up rises linearly and reaches 1 after ``warmup_steps``. From there ``cosine`` and ``linear`` fall to 0 at
    ``total``, and ``step`` to a tenth after each third of the way. ``one_cycle`` rises from 1/25 to 1 in the first 30 %
    of the steps and falls to 1/250,000, along half cosines both times.

    Source: Smith and Topin 2018 (one cycle), with the numbers of ``torch.optim.lr_scheduler.OneCycleLR``.

    Examples
    --------
    >>> [lr_factor(RunConfig(warmup_steps=4), step, 8) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done, way = step - config.warmup_steps, max(1, total - config.warmup_steps)
    if config.schedule == "one_cycle":
        top = 0.3 * total - 1
        if step <= top:
            return half_cosine(1 / 25, 1, step / top)
        return half_cosine(1, 1 / 250_000, (step - top) / (total - 1 - top))
    if config.schedule == "step":
        return 0.1 ** (3 * done // way)
    return {"constant": 1.0, "cosine": half_cosine(1, 0, done / way), "linear": 1 - done / way}[config.schedule]


def half_cosine(start: float, end: float, share: float) -> float:
    """Return where half a cosine from ``start`` to ``end`` stands after a share (0 to 1) of its way."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
