"""The reference loop: plain torch, readable from top to bottom, the same on one process and on several."""

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from dxdy_nb.config import RunConfig
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.blackbox import BlackBox
from dxdy_nb.observe.observer import Watch
from dxdy_nb.ranks.log import logged
from dxdy_nb.ranks.pool import launch
from dxdy_nb.ranks.session import Session, session
from dxdy_nb.runs.environment import attended, digest
from dxdy_nb.runs.folder import RANKS
from dxdy_nb.runs.record import Recorder, Run, end, recorded, write_environment
from dxdy_nb.training import checkpoint, datasets
from dxdy_nb.training.parts import LossFn, Parts, prepare, steps_per_epoch
from dxdy_nb.training.resume import agreed, own_folder, patient, start, taken_over

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "killed"}
DECIMALS = 4  # every metric is rounded once, here, so that two tables never differ by their rounding


def train(
    config: RunConfig, *, out: str | Path | None = None, resume: bool = False, allow_changes: bool = False
) -> Run:
    """Train as the configuration says, record every step, and return the run.

    A non-finite loss ends the run as ``diverged`` before it reaches the weights. Any other error is recorded and
    raised. Whatever ends a run, the steps before it are kept. ``world_size`` ranks are started here, unless a launcher
    (``torchrun``, ``dx.launch``) has started them: then each of them calls this. Every rank keeps a record of its own.
    On one process that has all statistics of each gradient at every step; on several ranks those keep within 3 % of
    the time, and each step has the norm (``steps["full"]``).

    With ``resume`` a run goes on from its last good checkpoint, bit for bit as if it had never stopped, and so does
    its record: steps behind the checkpoint are cut off, and made again. Without a checkpoint it starts anew, and in an
    empty folder it is a new run; one that is completed is returned as it is. A checkpoint is written at the end, after
    Ctrl-C or SIGTERM (on one rank), and on the way where the configuration says so (``checkpoint_every``).

    Parameters
    ----------
    config : what to train
    out : the run's folder; without it ``runs/<id>/`` under the current directory
    resume : whether the run in ``out`` is to go on
    allow_changes : whether it may go on with another configuration; what its samples and states hang on stays fixed

    Raises
    ------
    DxdyError
        The folder cannot be written or holds a run; the device is not there, or cannot compute in the precision; no
        parameter is one for the optimizer; an epoch has fewer batches than are to be accumulated; a data file is
        damaged; a launcher has started another number of ranks. With ``resume``: a process still trains there; the
        configuration or the model is another one, or ends before the last checkpoint; all checkpoints are damaged, or
        the trace is.

    Examples
    --------
    >>> run = train(RunConfig(max_steps=2), out=tmp_path / "run")
    >>> run.status, len(run.steps)
    ('completed', 2)
    >>> train(RunConfig(max_steps=4), out=tmp_path / "run", resume=True, allow_changes=True).steps.index.tolist()
    [0, 1, 2, 3]
    """
    if not isinstance(config, RunConfig):
        raise DxdyError(f"train: expected a dx.RunConfig as config, got {type(config).__name__}.")
    if resume and out is None:
        raise DxdyError("train: resume=True needs the folder of the run that is to go on, as out=.")
    with session(device=config.device) as s:
        if s.world_size == config.world_size:
            return _train(config, s, out, resume, allow_changes)
        if s.world_size > 1:
            raise DxdyError(
                f"world_size: {s.world_size} ranks were started, the configuration says {config.world_size}."
            )
    return _launched(config, start(config, out, resume, allow_changes).folder, resume, allow_changes)


def _launched(config: RunConfig, folder: Path, resume: bool, allow_changes: bool) -> Run:
    """Start the ranks of a run, and record in its folder what ended them."""
    alone = {"world_size": 1, "batch_size": config.batch_size * config.world_size}
    if not any(run.config == config.override(alone) and run.status == "completed" for run in recorded(folder.parent)):
        print(f"There is no run on one device to compare with: dx.train(config.override({alone})) makes it.")
    result = folder / "result.json"
    before = result.read_bytes() if result.exists() else None
    try:
        return launch(_train_here, config, folder, resume, allow_changes, world_size=config.world_size)[0]
    except BaseException as error:
        with contextlib.suppress(OSError):
            folder.rmdir()  # it is empty: no rank came as far as a record
        if result.exists() and result.read_bytes() != before:
            end(folder, error)  # a rank knows only of its own end
        raise


def _train_here(config: RunConfig, folder: Path, resume: bool, allow_changes: bool) -> Run:
    with session(device=config.device) as s:
        return _train(config, s, folder, resume, allow_changes)


def _train(config: RunConfig, s: Session, out: str | Path | None, resume: bool, allow_changes: bool) -> Run:
    data = datasets.load(config.data, config.seed)
    parts = prepare(config, data, s)
    begin = agreed(config, parts.model, s, out, resume, allow_changes)
    if begin.completed:
        return begin.run(parts.model)
    if begin.step > parts.total:
        raise DxdyError(
            f"resume: the last checkpoint is of step {begin.step}, and this configuration ends at step {parts.total}. "
            "Give more max_steps or epochs, or train in another folder."
        )
    folder, kept = own_folder(begin, s), (begin.folder / checkpoint.FOLDER).absolute()  # the loop may go elsewhere
    facts: dict[str, Any] = {"metrics": {}, "validation": [], "validation_seconds": 0.0, **taken_over(folder, begin)}
    if begin.state and s.is_main and begin.state.validation:
        facts["validation"] = list(begin.state.validation)
        facts["metrics"] = named("validation", begin.state.validation[-1])
    with patient(s) as stop, contextlib.ExitStack() as parallel, Recorder(folder, kind="training", **facts) as recorder:
        config.save(folder / "config.yaml")
        code = write_environment(folder, parts.model, data.train, device=str(s.device), split=data.described())
        model = parts.model
        if s.world_size > 1:
            parallel.enter_context(logged(begin.folder / RANKS / f"rank{s.rank}.jsonl", s.rank, close=0))
            model = in_parallel(parts, data.train[: config.batch_size], s, warm=begin.step > 0)
        if begin.state:
            begin.state.restore(parts.states, s, code)
        steps = windows(parts.loader, config.accumulation_steps, parts.total, begin.step)
        budget = None if s.world_size == 1 else 0.03  # a net that is worth several ranks is dear to measure in full
        first = begin.step if begin.resumed else None
        with Watch(parts.model, parts.optimizer, folder, budget, blackbox=BlackBox(folder), first=first):
            for step, window in enumerate(progress(steps, parts.total, begin.step), start=begin.step + 1):
                scale = parts.scaler.get_scale()
                loss = take_step(model, parts, window, s, config.max_grad_norm)
                if not math.isfinite(loss):
                    ids = torch.cat([batch.ids for batch in window]).tolist()
                    reason = f"the loss is {loss} at step {step - 1}; sample ids of its batch: {ids}"
                    recorder.write(status="diverged", reason=reason)
                    break
                if parts.scaler.get_scale() >= scale:  # it falls where a gradient overflowed: no update was made
                    parts.scheduler.step()
                validates = step % (config.validate_every * parts.epoch) == 0 or step == parts.total
                if validates and s.is_main:
                    validate(recorder, parts, data.validation, step)
                last, every = step == parts.total or bool(stop), config.checkpoint_every
                if last or (every and (step % every == 0 or validates)):
                    epoch, consumed = divmod(step, parts.epoch)
                    place = {"step": step, "epoch": epoch, "windows": consumed}
                    seen = recorder.result["validation"]
                    checkpoint.save(kept, parts.states, s, config=config, code=code, validation=seen, **place)
                if last and step < parts.total:
                    recorder.write(status=STOPPED[stop[0]], reason=f"{stop[0].name} after step {step - 1}")
                    break
            else:
                test = named("test", evaluate(parts.model, data.test, parts.loss_fn)) if s.is_main else {}
                weights = {name: digest([tensor]) for name, tensor in parts.model.state_dict().items()}
                recorder.write(status="completed", metrics={**recorder.result["metrics"], **test}, weights=weights)
    # Not read back: a disk that is full costs no trained model.
    return Run.of(folder, recorder.result, config, parts.model)


def in_parallel(parts: Parts, batch: datasets.Batch, s: Session, warm: bool) -> DistributedDataParallel:
    """Return the model as one of several ranks: rank 0's weights, and every gradient averaged.

    ``warm``: it has made a step before. DDP sorts gradients anew after the first backward, and from three ranks on the
    last bits of a sum hang on the order.
    """
    model = DistributedDataParallel(parts.model)
    if warm:
        parts.loss_fn(model(batch.x.to(s.device)), batch.y.to(s.device)).backward()
    return model


def validate(recorder: Recorder, parts: Parts, samples: datasets.Samples, step: int) -> None:
    """Write down loss and accuracy on samples that no step has seen, and the seconds that this took."""
    begun = time.perf_counter()
    row = {"step": step, **evaluate(parts.model, samples, parts.loss_fn)}
    seconds = round(recorder.result["validation_seconds"] + time.perf_counter() - begun, 3)
    rows = [*recorder.result["validation"], row]
    recorder.write(validation=rows, validation_seconds=seconds, metrics=named("validation", row))


def windows(
    loader: DataLoader[datasets.Batch], size: int, total: int, start: int = 0
) -> Iterator[list[datasets.Batch]]:
    """Return the windows from ``start`` to ``total``, the batches of one optimizer step each.

    The loader once over is an epoch, and each epoch has an order of its own. A window has ``size`` batches; the last of
    an epoch has what is left, and spans no two epochs: each sample counts once in each.
    """
    first, consumed = divmod(start, steps_per_epoch(len(loader), size))
    read = consumed * size * (loader.batch_size or 1)  # samples

    def endless() -> Iterator[list[datasets.Batch]]:
        for epoch in itertools.count(first):
            loader.sampler.set_epoch(epoch, read if epoch == first else 0)  # type: ignore[attr-defined]
            batches = iter(loader)
            while window := list(itertools.islice(batches, size)):
                yield window

    return itertools.islice(endless(), total - start)


def progress(steps: Iterable[list[datasets.Batch]], total: int, start: int = 0) -> Iterable[list[datasets.Batch]]:
    """Return the same steps with a progress bar where somebody is watching."""
    return tqdm(steps, total=total, initial=start, desc="train", unit="step", disable=not attended(), leave=False)


def named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return loss and accuracy under names that tell where they were measured."""
    return {f"{prefix}_{name}": metrics[name] for name in ("loss", "accuracy")}


def take_step(
    model: nn.Module, parts: Parts, window: Sequence[datasets.Batch], s: Session, max_grad_norm: float | None
) -> float:
    """Take one optimizer step: the plain one where nothing else is asked for."""
    if parts.dtype is None and len(window) == s.world_size == 1:
        x, y, _ = window[0]
        return train_step(model, x.to(s.device), y.to(s.device), parts.loss_fn, parts.optimizer, max_grad_norm)
    count = sum(len(y) for _, y, _ in window)  # on every rank: `DistributedSampler` gives them equal shares
    scaler, dtype = parts.scaler, parts.dtype
    return window_step(model, window, parts.loss_fn, parts.optimizer, scaler, s, dtype, max_grad_norm, count)


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


def window_step(
    model: nn.Module,
    window: Sequence[datasets.Batch],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    s: Session,
    dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    mean_count: float | None = None,
) -> float:
    """Take one optimizer step over all batches of all ranks' windows and return the mean loss of their samples.

    ``loss_fn`` is a mean over the samples of a batch, ``dtype`` that of autocast (None: none), ``mean_count`` the mean
    of the ranks' numbers of samples (None: they tell each other). A non-finite loss is returned without a step; the
    scaler leaves out a step whose gradients are not finite, and halves its scale.
    """
    count = sum(len(y) for _, y, _ in window)
    mean_count = mean_count or s.mean(count, 1)  # DistributedDataParallel divides by the number of ranks itself
    losses = []
    optimizer.zero_grad()
    for place, (x, y, _) in enumerate(window):
        parallel = isinstance(model, DistributedDataParallel) and place < len(window) - 1  # the last one is averaged
        with model.no_sync() if parallel else contextlib.nullcontext():  # type: ignore[operator]  # forward too
            with torch.autocast(s.device.type, dtype, enabled=dtype is not None):
                mean = loss_fn(model(x.to(s.device)), y.to(s.device))
            loss = mean * (len(y) / mean_count)  # not mean / len(window): batches may differ in size
            scaler.scale(loss).backward()
        losses.append(mean.detach() * len(y))
    value = s.mean(torch.stack(losses).sum(), count)
    if math.isfinite(value):
        scaler.unscale_(optimizer)  # once, and before the clip, which would see the scale
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    return value


@torch.no_grad()
def evaluate(model: nn.Module, samples: datasets.Samples, loss_fn: LossFn, batch_size: int = 512) -> dict[str, float]:
    """Return mean loss and accuracy over all samples, in eval mode, without a graph, and in fp32 (no autocast)."""
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
