"""What a preflight does in other processes: a set-up built anew on several ranks, and one resumed from a checkpoint."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.probes import Experiment, usual_loss
from dxdy_nb.diagnosis.subject import Subject, batches_of, made, preserved, subject_of
from dxdy_nb.errors import counted, in_a_line
from dxdy_nb.nested import tensors_in
from dxdy_nb.observe.plain import plain, restored
from dxdy_nb.observe.snapshot import RandomStates, put_random
from dxdy_nb.ranks.digest import checksum, sums
from dxdy_nb.ranks.session import leave

STEPS = 6  # on each rank
PROBED = 8  # samples of a data set that are compared between processes
BEFORE, AFTER = 4, 4  # steps up to the checkpoint, and from it on
HELD_OUT = 20  # batches of an evaluation

Make = Callable[[], Any]


# ---- on several ranks ----


def cannot_be_shared(loader: Any) -> str:
    """Return why ranks cannot read one loader's data set in turn; "" where they can."""
    if not isinstance(loader, DataLoader):
        return f"the loader is a {type(loader).__name__} without a dataset, which a DistributedSampler needs"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no indices for a DistributedSampler: it must divide its stream by rank itself"
    if loader.batch_size is None or not isinstance(
        loader.sampler, RandomSampler | SequentialSampler | DistributedSampler
    ):
        return "the loader has a sampler of its own, which a DistributedSampler would replace: divide it by rank there"
    return ""


def train_on_a_rank(rank: int, world_size: int, init_method: str, make: Make, folder: str) -> None:
    """Train some steps as one of several: build the set-up anew, wrap its model, read a share of its data set."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        given = made(make)
        loader = shared(given["loader"], rank, world_size)
        probed = probe(given["loader"])
        size = len(loader.dataset)  # type: ignore[arg-type]
        (Path(folder) / f"samples{rank}.json").write_text(json.dumps([size, probed]))
        model = DistributedDataParallel(given["model"])
        experiment = Experiment(subject_of({**given, "model": model, "loader": loader}), math.inf)
        step = 0
        for epoch in range(STEPS):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in loader:
                if step < STEPS:
                    experiment.train(batch, step)
                step += 1
            if step >= STEPS:
                break
    finally:
        dist.destroy_process_group()


def shared(loader: DataLoader[Any], rank: int, world_size: int) -> DataLoader[Any]:
    """Return a loader of a rank's share: the reader's own where it divides already, else with a DistributedSampler."""
    old = loader.sampler
    if isinstance(old, DistributedSampler) and old.num_replicas == world_size:
        return loader
    shuffle = old.shuffle if isinstance(old, DistributedSampler) else isinstance(old, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, world_size, rank, shuffle=shuffle)
    return DataLoader(
        loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn, drop_last=loader.drop_last
    )


def probe(loader: DataLoader[Any]) -> list[int] | None:
    """Return checksums of some samples of a data set, None where they are others each time, as with augmentation."""
    size = len(loader.dataset)  # type: ignore[arg-type]
    places = sorted({size * place // PROBED for place in range(PROBED)})

    def read() -> list[int]:
        with random_states():
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            return [checksum(tensors_in(loader.collate_fn([loader.dataset[place]]))) for place in places]

    first = read()
    return first if first == read() else None


# ---- from a checkpoint ----


@dataclass(frozen=True)
class Way:
    """How a run went on from its checkpoint: checksums by tensor, and what was evaluated twice at the end."""

    at: dict[str, int]
    batch: int
    after: dict[str, int]
    evaluations: tuple[Any, Any] | None = None
    evaluated: str = ""  # what was evaluated, or why nothing was


def uninterrupted(make: Make, path: str) -> Way:
    """Train some steps, write a checkpoint, go on without a pause; then evaluate twice."""
    experiment = _alone(make)
    steps = Steps(experiment)
    steps.take(BEFORE)
    subject = experiment.subject
    state = {
        "loop": steps.state(),
        "random": plain(RandomStates().read()),
        "own": subject.save is not None,
        "state": _save(subject),
    }
    torch.save(state, path)
    at = _weights(subject)
    ahead, first = [], 0
    for batch in steps.take(AFTER):
        first = first or checksum(tensors_in(batch))
        ahead.append(batch)
    if subject.save is not None:
        torch.save(ahead, f"{path}.batches")  # where the reader's own loader stands is the reader's own affair
    return replace(Way(at, first, _weights(subject)), **_evaluated(experiment))


def resumed(make: Make, path: str) -> Way:
    """Build the set-up anew, load the checkpoint, and go on from there."""
    kept = torch.load(path, weights_only=True)
    experiment = _alone(make)
    subject = experiment.subject
    if kept["own"] and subject.resume is not None:
        again = subject.resume(kept["state"])
        known = again if isinstance(again, dict) else {}
        experiment.subject = subject = replace(
            subject, **{name: known[name] for name in ("model", "optimizer", "scheduler", "scaler") if name in known}
        )
        at = _weights(subject)
        put_random(restored(kept["random"], None))
        batches = torch.load(f"{path}.batches", weights_only=True)
        for index, batch in enumerate(batches, BEFORE):
            experiment.train(batch, index)
        return Way(at, checksum(tensors_in(batches[0])), _weights(subject))
    _load(subject, kept["state"])
    at = _weights(subject)
    steps = Steps(experiment)
    steps.go_to(kept["loop"])
    put_random(restored(kept["random"], None))
    first = 0
    for batch in steps.take(AFTER):
        first = first or checksum(tensors_in(batch))
    return Way(at, first, _weights(subject))


class Steps:
    """Training steps over one epoch after another, whose place can be noted and found again."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.index = experiment, 0
        self.epoch, self.place = 0, 0
        self._batches: Iterator[Any] | None = None
        self._start: dict[str, Any] = {}

    def take(self, count: int) -> list[Any]:
        """Train on the next batches, and return them."""
        taken = []
        for _ in range(count):
            batch = self._next()
            self.experiment.train(batch, self.index)
            self.index += 1
            taken.append(batch)
        return taken

    def _next(self) -> Any:
        loader = self.experiment.subject.loader
        for _ in range(2):
            if self._batches is None:
                self._begin(loader)
            assert self._batches is not None
            for batch in self._batches:
                self.place += 1
                return batch
            self._batches, self.epoch, self.place = None, self.epoch + 1, 0
            if self.experiment.subject.on_epoch_end is not None:
                self.experiment.subject.on_epoch_end()
        raise RuntimeError("the loader gives no batch")

    def _begin(self, loader: Any) -> None:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        self._start = {
            "random": plain(RandomStates().read()),
            "generators": [g.get_state() for g in _generators(loader)],
        }
        self._batches = iter(batches_of(loader))

    def state(self) -> dict[str, Any]:
        """Return where the steps stand: how the epoch began, and how many of its batches are consumed."""
        return {"index": self.index, "epoch": self.epoch, "place": self.place, "start": self._start}

    def go_to(self, state: dict[str, Any]) -> None:
        """Find a noted place again, without training."""
        loader = self.experiment.subject.loader
        for generator, kept in zip(_generators(loader), state["start"]["generators"], strict=True):
            generator.set_state(kept)
        put_random(restored(state["start"]["random"], None))
        self.index, self.epoch = state["index"], state["epoch"]
        self._begin(loader)
        for _ in range(state["place"]):
            next(self._batches)  # type: ignore[arg-type]
        self.place = state["place"]


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its sampler have of their own."""
    owners = loader, getattr(loader, "sampler", None)
    return [g for owner in owners if (g := getattr(owner, "generator", None)) is not None]


def _alone(make: Make) -> Experiment:
    leave()  # one process, as the reader's run
    return Experiment(subject_of(made(make)), math.inf)


def _holders(subject: Subject) -> dict[str, Any]:
    """Return what has a state to be kept, by name."""
    parts = {"model": subject.model, "scheduler": subject.scheduler, "scaler": subject.scaler}
    parts |= {"ema_model": subject.ema_model} if isinstance(subject.ema_model, nn.Module) else {}
    parts |= {"loss_fn": subject.loss_fn} if isinstance(subject.loss_fn, nn.Module) else {}
    parts |= {f"optimizer {place}": one for place, one in enumerate(subject.all_optimizers)}
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _save(subject: Subject) -> Any:
    return subject.save() if subject.save is not None else {n: p.state_dict() for n, p in _holders(subject).items()}


def _load(subject: Subject, state: dict[str, Any]) -> None:
    for name, part in _holders(subject).items():
        part.load_state_dict(state[name])


def _weights(subject: Subject) -> dict[str, int]:
    model = {name: t for name, t in subject.model.state_dict().items() if torch.is_tensor(t)}
    return sums({name: t for name, t in model.items() if t.numel()})


def _evaluated(experiment: Experiment) -> dict[str, Any]:
    """Return two evaluations one after the other, or why there are none."""
    subject = experiment.subject
    if subject.validate is None and subject.val_loader is None:
        return {"evaluated": "validation not checked: make() gives neither validate= nor val_loader="}
    try:
        with preserved(subject):
            first, second = _two(subject)
    except Exception as error:
        return {"evaluated": f"validation not checked: it raised {in_a_line(error)}"}
    name = (
        "validate()" if subject.validate is not None else f"the losses of {counted(len(first), 'batch')} of val_loader"
    )
    return {"evaluations": (first, second), "evaluated": name}


def _two(subject: Subject) -> tuple[list[float], list[float]]:
    if subject.validate is not None:
        return _numbers(subject.validate()), _numbers(subject.validate())
    subject.model.eval()

    def read() -> list[Any]:
        return list(itertools.islice(batches_of(subject.val_loader), HELD_OUT))

    def losses(batches: list[Any]) -> list[float]:
        with torch.no_grad():
            return [float(usual_loss(subject.model, subject.loss_fn, batch)) for batch in batches]

    batches = read()
    shuffles = isinstance(getattr(subject.val_loader, "sampler", None), RandomSampler)
    return losses(batches), losses(batches if shuffles else read())


def _numbers(value: Any) -> list[float]:
    """Return the numbers in what a validation returns."""
    if torch.is_tensor(value):
        return [float(number) for number in value.detach().double().flatten()]
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in _numbers(item)]
    return [float(value)] if isinstance(value, (int, float, np.generic)) else []
