"""The reference loop: one device, plain torch, readable from top to bottom."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
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
    if not isinstance(config, RunConfig):
        raise DxdyError(f"train: expected a dx.RunConfig as config, got {type(config).__name__}.")
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
    with Recorder(folder, kind="training", metrics={}, validation=[]) as recorder:
        config.save(folder / "config.yaml")
        write_environment(folder, model, data.train)
        with watch(model, optimizer, out=folder, budget=None):
            validation: list[dict[str, float]] = []
            for step, (x, y, ids) in enumerate(progress(batches(loader, int(total)), int(total)), start=1):
                loss = train_step(model, x.to(device), y.to(device), loss_fn, optimizer, config.max_grad_norm)
                if not math.isfinite(loss):
                    reason = f"the loss is {loss} at step {step - 1}; sample ids of its batch: {ids.tolist()}"
                    recorder.write(status="diverged", reason=reason)
                    break
                scheduler.step()
                if step % (config.validate_every * len(loader)) == 0 or step == total:
                    validation.append({"step": step, **evaluate(model, data.validation, loss_fn)})
                    recorder.write(validation=validation, metrics=named("validation", validation[-1]))
            else:
                test = named("test", evaluate(model, data.test, loss_fn))
                recorder.write(status="completed", metrics={**recorder.result["metrics"], **test})
    return Run.of(folder, recorder.result, config, model)  # not read back: a disk that is full costs no trained model


def batches(loader: DataLoader[datasets.Batch], total: int) -> Iterator[datasets.Batch]:
    """Return ``total`` batches: the loader once over is an epoch, and each epoch has an order of its own."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), total)


def progress(steps: Iterable[datasets.Batch], total: int) -> Iterable[datasets.Batch]:
    """Return the same steps with a progress bar where somebody is watching."""
    return tqdm(steps, total=total, desc="train", unit="step", disable=not attended(), leave=False)


def named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return loss and accuracy under names that tell where they were measured."""
    return {f"{prefix}_{name}": metrics[name] for name in ("loss", "accuracy")}


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
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return value


@torch.no_grad()
def evaluate(model: nn.Module, samples: datasets.Samples, loss_fn: LossFn, batch_size: int = 512) -> dict[str, float]:
    """Return mean loss and accuracy over all samples, in eval mode and without a graph."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    loss, correct = 0.0, 0
    for x, y, _ in datasets.loader(samples, batch_size):
        logits, y = model(x.to(device)), y.to(device)
        loss += loss_fn(logits, y).item() * len(y)  # the last batch is smaller: weigh it by its samples
        correct += int((logits.argmax(dim=1) == y).sum())
    for module, mode in modes:  # one by one: a frozen part stays in eval mode
        module.training = mode
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
    lr, weight_decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=config.momentum, weight_decay=weight_decay)
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return adam(model.parameters(), lr=lr, weight_decay=weight_decay)


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
