"""A run of the reference loop, judged: set up again from its configuration, and its first steps taken again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.diagnose import diagnose
from dxdy_nb.diagnosis.lost import before, not_finite
from dxdy_nb.diagnosis.report import Report
from dxdy_nb.errors import counted
from dxdy_nb.ranks.session import Session, pick_device
from dxdy_nb.runs.record import Run
from dxdy_nb.training import datasets
from dxdy_nb.training.loop import window_step, windows
from dxdy_nb.training.parts import prepare


def judge_run(run: Run, time_limit: float) -> Report:
    """Return the report on a run: on its set-up, and where that has no error, on the losses of its record."""
    config, losses = run.config, run.steps["loss"]
    session = Session(0, 1, 0, pick_device(config.device))
    with random_states():
        data = datasets.load(config.data, config.seed)
        parts = prepare(config, data, session)

        def train_step(model: Any, batch: Any, optimizer: Any, loss_fn: Any, step: int) -> float:
            window = [datasets.Batch(*part) for part in zip(*(t.split(config.batch_size) for t in batch), strict=True)]
            clip = config.max_grad_norm
            loss = window_step(model, window, loss_fn, optimizer, parts.scaler, session, parts.dtype, clip)
            parts.scheduler.step()
            return loss

        scaler = parts.scaler if parts.scaler.is_enabled() else None
        report = diagnose(
            model=parts.model,
            loss_fn=parts.loss_fn,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            scaler=scaler,
            loader=[joined(window) for window in windows(parts.loader, config.accumulation_steps, parts.epoch)],
            val_loader=datasets.loader(data.validation, config.batch_size, shuffle_seed=None),
            train_step=train_step,
            time_limit=time_limit,
        )
    lost = losses.index[~np.isfinite(losses)]
    if len(lost) and not report.errors:
        step = int(lost[0])
        told = [f"step {step}: the loss is {losses[step]}", *before([*losses[losses.index < step]])]
        report = replace(report, findings=(*report.findings, not_finite(told)))
    return replace(
        report, saw={**report.saw, "record": f"{run.folder.name}: {run.status}, {counted(len(losses), 'step')}"}
    )


def joined(window: Sequence[datasets.Batch]) -> datasets.Batch:
    """Return the batches of one optimizer step as one."""
    return datasets.Batch(*map(torch.cat, zip(*window, strict=True)))
