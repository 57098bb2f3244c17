"""The reference loop: one device, plain torch, readable from top to bottom."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.observer import watch
from dxdy_nb.runs.environment import attended
from dxdy_nb.runs.record import Recorder, Run, new_folder, write_environment
from dxdy_nb.training import datasets, models

LossFn = Callable[[Tensor, Tensor], Tensor]
DECIMALS = 4  # every metric is rounded once, here, so that two tables never differ by their rounding


def train(config: RunConfig, *, out: str | Path | None = None) -> Run:
    """Train as the configuration says, record every step, and return the run.

    A non-finite loss ends the run as ``diverged`` before it reaches the weights. Any other error is recorded and
    raised. Whatever ends a run, the steps before it are kept.

    Parameters
    ----------
    config : what to train
    out : the run's folder; without it ``runs/<id>/`` under the current directory

    Raises
    ------
    DxdyError
        The folder cannot be written or holds a run, the device is not there, a data file is damaged.

    Examples
    --------
    >>> run = train(RunConfig(max_steps=2), out=tmp_path / "run")
    >>> run.status, len(run.steps)
    ('completed', 2)
    """
    device = pick_device(config.device)
    data = datasets.load(config.data, config.seed)
    seed_everything(config.seed)
    model = models.build(config.model, data.train.x[0], data.classes)
    models.initialise(model, config.init)
    model.to(device)
    loss_fn = pick_loss(config.loss)
    optimizer = pick_optimizer(config, model)
    loader = datasets.loader(data.train, config.batch_size, shuffle_seed=config.seed)
    total = min(config.max_steps or math.inf, config.epochs * len(loader))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(config, step, int(total)))

    folder = new_folder(config.data, out)
    config.save(folder / "config.yaml")
    write_environment(folder, model, data.train)
    with Recorder(folder, kind="training", metrics={}, validation=[]) as recorder, watch(model, optimizer, out=folder):
        status, reason = "completed", None
        step = 0
        with tqdm(total=int(total), desc="train", unit="step", disable=not attended(), leave=False) as bar:
            for epoch in range(config.epochs):
                for x, y, ids in loader:
                    if step == total:
                        break
                    loss = train_step(model, x.to(device), y.to(device), loss_fn, optimizer, config.max_grad_norm)
                    if not math.isfinite(loss):
                        reason = f"loss is {loss} at step {step}; sample ids of its batch: {ids.tolist()}"
                        status = "diverged"
                        break
                    scheduler.step()
                    step += 1
                    bar.update()
                if status == "diverged":
                    break
                if (epoch + 1) % config.validate_every == 0 or step == total:
                    row = {"step": step, **evaluate(model, data.validation, loss_fn)}
                    recorder.write(validation=[*recorder.result["validation"], row])
                if step == total:
                    break
        metrics = {"steps": step}
        if status == "completed":
            for name, part in (("validation", data.validation), ("test", data.test)):
                metrics |= {f"{name}_{key}": value for key, value in evaluate(model, part, loss_fn).items()}
        recorder.write(status=status, reason=reason, metrics=metrics)
    return Run(folder, status, reason, config, metrics, recorder.result["validation"], model)


def train_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None = None,
) -> float:
    """Take one optimizer step and return the loss; a non-finite loss is returned without a step."""
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    value = loss.item()
    if math.isfinite(value):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
        optimizer.step()
    return value


@torch.no_grad()
def evaluate(model: nn.Module, samples: datasets.Samples, loss_fn: LossFn, batch_size: int = 512) -> dict[str, float]:
    """Return mean loss and accuracy over all samples, in eval mode and without a graph; then back to the mode before."""
    training = model.training
    device = next(model.parameters()).device
    model.eval()
    loss, correct = 0.0, 0
    for x, y, _ in datasets.loader(samples, batch_size):
        logits, y = model(x.to(device)), y.to(device)
        loss += loss_fn(logits, y).item() * len(y)  # the last batch is smaller: weigh it by its samples
        correct += int((logits.argmax(dim=1) == y).sum())
    model.train(training)
    return {"loss": round(loss / len(samples), DECIMALS), "accuracy": round(correct / len(samples), DECIMALS)}


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all its devices)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pick_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` is the GPU where there is one.

    Raises
    ------
    DxdyError
        ``cuda`` is asked for and not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise DxdyError("device: 'cuda' is asked for, but torch sees no GPU here. Use device='auto' or 'cpu'.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def pick_loss(name: str) -> LossFn:
    """Return a loss over logits (B, C) and class indices (B,); ``mse`` compares with one-hot targets."""
    if name == "cross_entropy":
        return nn.functional.cross_entropy
    return lambda logits, y: nn.functional.mse_loss(logits, nn.functional.one_hot(y, logits.shape[1]).to(logits.dtype))


def pick_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer over all parameters of a model."""
    shared = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=config.momentum, **shared)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](model.parameters(), **shared)


def lr_factor(config: RunConfig, step: int, total: int) -> float:
    """Return what the learning rate is multiplied by before optimizer step ``step`` (from 0) of ``total``.

    Warm-up rises linearly and reaches 1 after ``warmup_steps``; the schedule then falls to 0 at ``total``.

    Examples
    --------
    >>> [lr_factor(RunConfig(warmup_steps=4), step, 8) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    return {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress}[config.schedule]
