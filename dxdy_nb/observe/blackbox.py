"""The steps before something went wrong, kept so that they can be executed again.

``BlackBox`` sees a running loop from the side: each batch, the start of each step, and how each step ended. It keeps
the last batches with the random states after each, and now and then a snapshot of all that a step depends on. When a
step goes wrong it writes them to ``<run>/blackbox/<what happened>.pt``, and ``Replay`` lets a script that is started
anew run into those very steps: from the snapshot, with those batches, to the step that went wrong.

What it costs: the batches are held, not copied, except for those that would not stay as they are (in shared memory,
on a GPU, or of a loop that changes them in place). Copies of batches and snapshots each stay under ``SHARE`` of the
time. When memory or time does not suffice for all batches since the snapshot, the history is let go until the next
snapshot; then the step alone can be replayed if its weights are still what they were when it began.
"""

import contextlib
import math
import os
import pickle
import platform
import statistics
import struct
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import snapshot
from dxdy_nb.observe.plain import plain, restored, tensors, with_tensors
from dxdy_nb.observe.row import version
from dxdy_nb.observe.snapshot import Models, Optimizers, Scalers

SHARE = 0.005  # of the time since the start, for snapshots, and as much for copies of batches
AHEAD = 4  # batches that are kept from before a snapshot: a loop may fetch one or two before it uses them
EARLY = 3  # steps in which a snapshot has time whenever something is found: an optimizer often only by its first step
SKIPS = 20  # non-finite steps in a row from which a GradScaler (65,536 = 2^16 at first) does not save
ON_DISK = 16  # a step alone is written out of the loop's own tensors: up to so many times what may be held in memory
STATES = 30_000  # bytes that the random states after a batch take
VERSION = 1
VALIDATION, CHANGED = "validation", "the loop changed a batch after it was fetched"  # why a batch is not kept
KINDS = ("nonfinite", "exception", "spike", "asked")  # the gravest first


@dataclass(frozen=True)
class Incident:
    """A step that went wrong: what happened, in words, the file that keeps it (if one does), why it has no replay."""

    kind: str
    step: int
    sentence: str
    path: Path | None
    refused: str | None


@dataclass
class _Fetch:
    """A batch as it was handed to the loop, and the random states after that."""

    loader: int
    number: int  # of all batches of its loader
    random: dict[str, Any]
    batch: Any = None
    size: int = STATES
    tensors: list[Tensor] = field(default_factory=list)  # of the batch
    versions: list[int] = field(default_factory=list)
    lost: str | None = None  # why the batch is not kept

    def hold(self, batch: Any) -> None:
        self.batch, self.tensors = batch, list(tensors(batch))
        self.versions = [version(t) for t in self.tensors]
        self.size = STATES + sum([t.nbytes for t in self.tensors])

    def lose(self, why: str) -> None:
        self.hold(None)
        self.lost = why

    def changed(self) -> bool:
        return self.versions != [version(t) for t in self.tensors]


@dataclass
class _Step:
    """What is known of a step besides its batches."""

    step: int
    fetched: dict[int, int]  # batches of each loader before the step's first forward
    groups: dict[str, list[dict[str, Any]]]
    random: dict[str, Any] | None = None  # before its first forward, where those after its batch do not suffice
    loss: float | None = None
    grad_norm: float | None = None
    full: bool = True


@dataclass
class _Snapshot:
    known: tuple[tuple[str, ...], ...]
    state: dict[str, Any]
    size: int


class BlackBox:
    """Keeps the last steps of a loop in bounded memory, and writes them when one goes wrong.

    A step goes wrong by a loss that is not finite; by a gradient that is not (with a GradScaler, which skips such
    steps, only when it happens ``SKIPS`` times in a row); by an exception; or by a loss spike (see ``Spikes``). The
    first of each kind is kept, and after the first that is not a spike the box is closed.

    Parameters
    ----------
    folder : the run's folder; None holds what went wrong in memory, for ``save``
    memory : bytes for snapshot and batches; without a folder, what went wrong takes as much again

    Examples
    --------
    >>> model, box = torch.nn.Linear(2, 1), BlackBox(tmp_path)
    >>> batch = torch.full((3, 2), torch.inf)
    >>> box.batch(0, batch)
    >>> box.forward(0, {"model": model}, {}, {})
    >>> loss = model(batch).sum()
    >>> box.ended(0, loss.item(), grad_norm=torch.nan, nonfinite=True)
    >>> box.incidents[0].sentence, box.incidents[0].path.name
    ('the loss of step 0 is nan', 'nonfinite.pt')
    """

    def __init__(self, folder: Path | None, memory: int = 256 * 2**20) -> None:
        self.folder = None if folder is None else folder.absolute()  # the loop may go to another directory
        self.memory = memory
        self.incidents: tuple[Incident, ...] = ()
        self._held: dict[str, dict[str, Any]] = {}  # what went wrong, where there is no folder to write it to
        self._over = False
        self._random = snapshot.RandomStates()
        self._spikes = Spikes()
        self._bad_in_a_row = 0
        self._snapshots, self._copies = _Purse(), _Purse()
        self._copying = False  # whether the loop changes its batches
        self._counts: dict[int, int] = {}
        self._lead: dict[int, int] | None = None  # batches of each loader before the first forward of all
        self._fetches: deque[_Fetch] = deque()
        self._held_bytes = 0  # in their batches
        self._unchecked: list[_Fetch] = []
        self._steps: list[_Step] = []
        self._snapshot: _Snapshot | None = None
        self._why_not = "no step has begun"  # why there is no snapshot with all batches since
        self._objects: tuple[Models, Optimizers, Scalers] = ({}, {}, {})
        self._weights: int | None = None  # the version of all weights when the step began

    @property
    def due(self) -> bool:
        """Whether the next ``forward`` takes a snapshot: every step before it should have ended by then."""
        return not self._over and self._snapshots.allows()

    def batch(self, step: int, batch: Any, loader: int = 0) -> None:
        """Keep a batch that a loader hands on.

        Parameters
        ----------
        step : the step that is under way, or comes
        loader : a number for where it comes from: the same when the script runs again
        """
        if self._over:
            return
        number = self._counts[loader] = self._counts.get(loader, 0) + 1
        fetch = _Fetch(loader, number - 1, self._random.read())
        self._check()  # this fetch may have written over the last one
        try:
            self._take_in(fetch, plain(batch))
        except Exception as error:  # whatever a batch is, it is no reason to stop training
            fetch.lose(_told(error))
            self._let_go(_told(error))
        self._fetches.append(fetch)
        self._unchecked.append(fetch)
        self._held_bytes += fetch.size
        self._stay_within_memory()

    def _take_in(self, fetch: _Fetch, batch: Any) -> None:
        fetch.hold(batch)
        last = self._fetches[-1].tensors if self._fetches else []
        for a, b in zip(fetch.tensors, last, strict=False):
            if a is not b and a.data_ptr() == b.data_ptr() and a.numel():
                self._changes("the loop writes each batch over the last one")
        # A tensor in shared memory holds a file open and its room in /dev/shm, one on a GPU room that training needs.
        if self._copying or any(t.is_shared() or not t.is_cpu for t in fetch.tensors):
            if self._copies.allows():
                with self._copies.open():
                    fetch.hold(with_tensors(batch, _own))
            else:
                self._let_go("to copy the batches takes more time than its share")

    def forget(self, loader: int = 0) -> None:
        """Let the last batch of a loader go: it was only validated on."""
        for fetch in reversed(self._fetches):
            if fetch.loader == loader:
                self._lose(fetch, VALIDATION)
                return

    def _lose(self, fetch: _Fetch, why: str) -> None:
        self._held_bytes -= fetch.size
        fetch.lose(why)
        self._held_bytes += fetch.size

    def forward(self, step: int, models: Models, optimizers: Optimizers, scalers: Scalers) -> None:
        """Begin a step; to be called before its first forward in training."""
        if self._over:
            return
        if self._lead is None:
            self._lead = dict(self._counts)
        fetched = self._counts != (self._steps[-1].fetched if self._steps else {})
        groups = {name: snapshot.hyperparameters(optimizer) for name, optimizer in optimizers.items()}
        begin = _Step(step, dict(self._counts), groups)
        # Weakly: what the loop lets go of must go.
        self._objects = WeakValueDictionary(models), WeakValueDictionary(optimizers), WeakValueDictionary(scalers)
        known = tuple(tuple(kind) for kind in self._objects)
        new = self._snapshot is not None and known != self._snapshot.known
        if new:
            self._let_go("a model or an optimizer was found after the snapshot")
        # A replay begins where the script does: a step of a GAN that takes no batch is no place for a snapshot.
        alike = fetched == any(self._lead.values())
        if alike and (self._snapshots.allows() or (new and step < EARLY)):
            self._take_snapshot(begin, known)
        if self._snapshot is None:
            self._steps = []
            self._weights = self._versions_of_weights()
        if not self._steps or not fetched:
            begin.random = self._random.read()
        self._steps.append(begin)
        if self._snapshot is None:
            self._drop_old_fetches()

    def _take_snapshot(self, begin: _Step, known: tuple[tuple[str, ...], ...]) -> None:
        if any(fetch.lost not in (None, VALIDATION) for fetch in self._fetches):
            return
        old, self._snapshot = self._snapshot, None  # whatever happens below, half a snapshot is none
        with self._snapshots.open():
            try:
                state = snapshot.state(*self._objects)
                size = sum(t.nbytes for t in tensors(state))
                if size > self.memory:
                    sizes = f"{size / 2**20:.0f} MiB, of {self.memory / 2**20:.0f} MiB for all"
                    raise DxdyError(f"weights and optimizers take {sizes}")
                room = iter(list(tensors(old.state)) if old else [])  # to write over it spares fresh pages of memory
                state = with_tensors(state, lambda tensor: _copied_into(next(room, None), tensor))
            except Exception as error:  # no memory, a weight without a shape: no reason to stop either
                self._let_go(f"no snapshot: {_told(error)}")
                return
            self._snapshot = _Snapshot(known, state, size)
            self._steps = []
            self._drop_old_fetches(begin)
            self._stay_within_memory()

    def _versions_of_weights(self) -> int | None:
        """Return a number that an update of any weight changes; None where no optimizer is known."""
        weights = [p for o in self._objects[1].values() for group in o.param_groups for p in group["params"]]
        return sum(map(version, weights)) if weights else None

    def _drop_old_fetches(self, begin: _Step | None = None) -> None:
        """Keep the batches of a step (the last one) and some from before it, in case they were fetched ahead."""
        begin = begin or (self._steps[-1] if self._steps else None)
        fetched, lead = begin.fetched if begin else self._counts, self._lead or self._counts
        first = {loader: count - min(lead.get(loader, 0), AHEAD) for loader, count in fetched.items()}
        self._fetches = deque(f for f in self._fetches if f.number >= first.get(f.loader, 0))
        self._held_bytes = sum(fetch.size for fetch in self._fetches)

    def _let_go(self, why: str) -> None:
        self._snapshot, self._why_not = None, why
        self._steps = self._steps[-1:]
        self._drop_old_fetches()

    def _stay_within_memory(self) -> None:
        if self._snapshot and self._held_bytes + self._snapshot.size > self.memory:
            self._let_go(f"snapshot and batches took more than {self.memory / 2**20:.0f} MiB")
        for fetch in self._fetches:
            if self._held_bytes <= self.memory:
                break
            self._lose(fetch, f"the batches of one step take more than {self.memory / 2**20:.0f} MiB")

    def _check(self) -> None:
        for fetch in self._unchecked:
            if fetch.changed():
                self._lose(fetch, CHANGED)
                self._changes(CHANGED)
        self._unchecked = self._unchecked[-1:]  # the next fetch may write over it

    def _changes(self, why: str) -> None:
        """From now on copy the batches; what was kept by reference may not be what it was."""
        if not self._copying:
            self._copying = True
            self._let_go(why)

    def ended(self, step: int, loss: float | None, grad_norm: float | None, nonfinite: bool, full: bool = True) -> None:
        """Say how a step went, as soon as its gradients are known: before the update, if that can be.

        Parameters
        ----------
        loss, grad_norm : None where they are not known
        nonfinite : whether a gradient is not finite
        full : whether all statistics were measured (else the norm may differ in its last digit)
        """
        if self._over:
            return
        for begin in reversed(self._steps):
            if begin.step == step:
                begin.loss, begin.grad_norm, begin.full = loss, grad_norm, full
                break
        self._check()
        scaled = any(scaler.is_enabled() for scaler in self._objects[2].values())
        self._bad_in_a_row = self._bad_in_a_row + 1 if nonfinite else 0
        if loss is not None and not math.isfinite(loss):
            self._went_wrong("nonfinite", step, f"the loss of step {step} is {loss}")
        elif nonfinite and (not scaled or self._bad_in_a_row >= SKIPS):
            self._went_wrong("nonfinite", step, f"a gradient of step {step} is not finite")
        elif loss is not None and (limit := self._spikes.passed(loss)) is not None:
            self._went_wrong("spike", step, f"the loss of step {step} is {loss:.4g}, beyond the limit of {limit:.4g}")

    def failed(self, step: int, error: BaseException) -> None:
        """Say that an exception ended the loop."""
        if self._over or not isinstance(error, Exception) or not self._steps or self._steps[-1].step != step:
            return  # an interrupt is nobody's fault, and what happens outside of a step cannot be replayed
        self._went_wrong("exception", step, _described(error))

    def close(self) -> None:
        """Let everything go that nothing went wrong with."""
        self._over = True
        self._snapshot, self._steps, self._unchecked, self._objects = None, [], [], ({}, {}, {})
        self._fetches.clear()

    def save(self, folder: str | Path) -> list[Path]:
        """Write what went wrong; if nothing did, the steps that are held now.

        Raises
        ------
        DxdyError
            The folder cannot be written.
        """
        held = self._held
        if not held and not self._over and self._steps:
            last = next((begin.step for begin in reversed(self._steps) if begin.loss is not None), self._steps[-1].step)
            held = {"asked": self._record("asked", last, "asked for")}
        try:
            return [_write(Path(folder), record) for record in held.values()]
        except (OSError, RuntimeError) as error:  # torch tells of a full disk by a RuntimeError
            raise DxdyError(f"{folder}: cannot be written ({error}). Give a folder that can.") from None

    def _went_wrong(self, kind: str, step: int, sentence: str) -> None:
        if any(incident.kind == kind for incident in self.incidents):
            return
        path = None
        record = self._record(kind, step, sentence)
        if self.folder is None:
            self._held = {kind: with_tensors(record, _own)}  # in place of a spike's
        else:
            try:
                path = _write(self.folder, record)
            except (OSError, RuntimeError) as error:
                text = f"{self.folder}/blackbox: {error}. Training goes on; of step {step} only the record is kept."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        self.incidents = (*self.incidents, Incident(kind, step, sentence, path, record["refused"]))
        if kind != "spike":
            self.close()

    def _record(self, kind: str, step: int, sentence: str) -> dict[str, Any]:
        """Return all that a replay needs, plain, or why there can be none."""
        steps, state, refused = [begin for begin in self._steps if begin.step <= step], None, None
        for fetch in self._fetches:
            if fetch.lost is None and fetch.changed():
                self._lose(fetch, CHANGED)
        lost = [fetch.lost for fetch in self._fetches if fetch.lost not in (None, VALIDATION)]
        recorded: list[Any] = []
        try:
            if lost:
                raise DxdyError(lost[0])
            if self._snapshot is not None:
                state = self._snapshot.state
            elif steps and steps[-1].step == step and self._versions_of_weights() == self._weights is not None:
                state, steps = self._state_now(), steps[-1:]
            else:
                raise DxdyError(self._why_not)
            recorded, refused = [plain(vars(begin)) for begin in steps], None
        except Exception as error:  # a step that went wrong is the last moment to stop training
            state, refused = None, _told(error)
        return {
            "version": VERSION,
            "kind": kind,
            "step": step,
            "sentence": sentence,
            "refused": refused,
            "made_on": _here(),
            "lead": self._lead or {},
            "state": state,
            "steps": recorded,
            "fetches": [
                {"loader": f.loader, "number": f.number, "batch": f.batch, "random": plain(f.random)}
                for f in self._fetches
            ],
        }

    def _state_now(self) -> dict[str, Any]:
        state = snapshot.state(*self._objects)
        size, allowed = sum(t.nbytes for t in tensors(state)), self.memory * (ON_DISK if self.folder else 1)
        if size > allowed:
            raise DxdyError(
                f"weights and optimizers take {size / 2**20:.0f} MiB, of {allowed / 2**20:.0f} MiB for them"
            )
        return state


class Spikes:
    """Tells a loss that leaps above all that the last ones gave reason to expect.

    The limit is seven standard deviations above the middle of the last 1,000 losses, as in the "spike score" of
    "2 OLMo 2 Furious" (OLMo team, 2024, arXiv 2501.00656), but above the median instead of the mean, and with
    1.4826 × the median absolute deviation as the standard deviation (Rousseeuw and Croux 1993, "Alternatives to the
    median absolute deviation"), so that earlier spikes do not hide the next one. Nothing is judged by fewer than 100
    losses, nor where half of them are equal. The limit is computed anew every ten steps.

    Examples
    --------
    >>> spikes = Spikes()
    >>> [step for step in range(200) if spikes.passed(1.0 + step % 3 + 20 * (step == 150)) is not None]
    [150]
    """

    DEVIATIONS, LAST, FEWEST, EVERY = 7.0, 1000, 100, 10

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.LAST)
        self._limit = math.inf
        self._seen = 0

    def passed(self, loss: float) -> float | None:
        """Take in the next loss, and return the limit where it is above."""
        limit = self._limit
        self._losses.append(loss)
        self._seen += 1
        if len(self._losses) >= self.FEWEST and self._seen % self.EVERY == 0:
            middle = statistics.median(self._losses)
            deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in self._losses)
            self._limit = middle + self.DEVIATIONS * deviation if deviation else math.inf
        return limit if loss > limit else None


class _Purse:
    """Allows a thing as long as it has taken no more than ``SHARE`` of the time since the start."""

    def __init__(self) -> None:
        self._started, self._spent = perf_counter(), 0.0

    def allows(self) -> bool:
        return self._spent <= SHARE * (perf_counter() - self._started)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - started


@dataclass(frozen=True)
class Verdict:
    """Whether the steps went as they did before, and a sentence about it."""

    same: bool
    sentence: str


class Replay:
    """Lets a script that runs from its start run into recorded steps, and tells whether they go as they did before.

    At the script's first step in training the recorded parameters, buffers, states of optimizers and GradScalers and
    random states are put in place of its own; from then on it gets the recorded batches and learning rates. What the
    loop keeps for itself it must find again by itself: a replay knows neither its counters nor its own generators.

    Parameters
    ----------
    folder : a run's folder, or a file in its ``blackbox/``

    Raises
    ------
    DxdyError
        There is no record, it is damaged, or it tells why the step cannot be executed again.

    Examples
    --------
    >>> def train(box, replay=None):
    ...     model, batch = torch.nn.Linear(2, 1), torch.full((3, 2), torch.inf)
    ...     if replay:
    ...         batch = replay.batch(batch)
    ...         replay.forward({"model": model}, {}, {})
    ...         return replay.ended(model(batch).sum().item(), None)
    ...     box.batch(0, batch)
    ...     box.forward(0, {"model": model}, {}, {})
    ...     box.ended(0, model(batch).sum().item(), None, nonfinite=True)
    >>> train(BlackBox(tmp_path / "run"))
    >>> replay = Replay(tmp_path / "run")
    >>> train(None, replay), replay.verdict.same
    (True, True)
    """

    def __init__(self, folder: str | Path) -> None:
        self._record = _read(Path(folder))
        self.kind, self.last_step = self._record["kind"], self._record["step"]
        if self._record["refused"]:
            raise DxdyError(f"replay: step {self.last_step} cannot be executed again: {self._record['refused']}.")
        self._steps = restored(self._record["steps"], None)
        self.first_step = self._steps[0]["step"]
        self._batches = {(f["loader"], f["number"]): f for f in self._record["fetches"] if f["batch"] is not None}
        self._fetched: dict[int, int] = {}
        self._at = -1  # the place in the recorded steps of the one that is under way
        self._put: set[tuple[str, str]] = set()
        self._otherwise: str | None = None  # what went otherwise first
        self._error: BaseException | None = None
        self._done = False

    def batch(self, batch: Any, loader: int = 0) -> Any:
        """Return the recorded batch in the place of one that was fetched, where there is one.

        Raises
        ------
        DxdyError
            The batch is of another class than the recorded one.
        """
        number = self._fetched.get(loader, 0)
        self._fetched[loader] = number + 1
        ahead = self._steps[0]["fetched"].get(loader, 0) - self._record["lead"].get(loader, 0)
        recorded = self._batches.get((loader, number + ahead))
        if recorded is None:
            return batch
        batch = restored(recorded["batch"], batch, "replay: the batch")
        snapshot.put_random(restored(recorded["random"], None))
        return batch

    def forward(self, models: Models, optimizers: Optimizers, scalers: Scalers) -> None:
        """Begin a step; to be called before its first forward in training.

        Raises
        ------
        DxdyError
            A model or an optimizer is another than the recorded one.
        """
        self._at += 1
        self.restore(models, optimizers, scalers)
        if self._at >= len(self._steps):
            self._done = True
            return
        begin = self._steps[self._at]
        for name, optimizer in optimizers.items():
            if name in begin["groups"]:
                snapshot.put_hyperparameters(optimizer, begin["groups"][name])
        if begin["random"] is not None:
            snapshot.put_random(begin["random"])

    def restore(self, models: Models, optimizers: Optimizers, scalers: Scalers) -> None:
        """Put the recorded states into what was not there at ``forward``; to be called before it is first used.

        Only in the first step: later it would undo what has happened since.
        """
        if self._at != 0:
            return
        for kind, things in zip(snapshot.KINDS, (models, optimizers, scalers), strict=True):
            recorded = self._record["state"][kind]
            for name, thing in things.items():
                if name in recorded and (kind, name) not in self._put:
                    snapshot.put(kind, name, thing, recorded[name])
                    self._put.add((kind, name))

    def ended(self, loss: float | None, grad_norm: float | None, full: bool = True) -> bool:
        """Say how a step went, and return whether the loop may end: it was the last to be executed again.

        Where an exception ended that step, the loop goes on until there is one, or until the next step ends.
        """
        if not 0 <= self._at < len(self._steps):
            return self._done
        begin = self._steps[self._at]
        for name, now in (("loss", loss), ("grad_norm", grad_norm)):
            if name == "grad_norm" and full != begin["full"]:
                continue  # two ways to the norm: its last digit may differ
            if begin[name] is not None and not _same_bits(begin[name], now):
                self._differs(f"step {begin['step']}: the {name} was {begin[name]!r}, and is {now!r} now")
        self._done = self._at == len(self._steps) - 1 and self.kind != "exception"
        return self._done

    def failed(self, error: BaseException) -> None:
        """Say that an exception ended the loop."""
        if isinstance(error, Exception) and not self._done:
            self._error = error

    @property
    def verdict(self) -> Verdict:
        """Whether the steps that were executed again went as recorded."""
        step = self._steps[min(max(self._at, 0), len(self._steps) - 1)]["step"]
        now = _described(self._error) if self._error else "no error"
        otherwise = self._otherwise
        if self._at < 0:
            otherwise = "the script ended before its first step in training"
        elif self.kind == "exception" and step == self.last_step:
            was = self._record["sentence"]
            if now.split(":")[0] != was.split(":")[0]:
                otherwise = otherwise or f"step {step} ended by {was}, and by {now} now"
        elif not self._done:
            otherwise = otherwise or f"the script ended in step {step}, by {now}, before step {self.last_step} was done"
        steps = f"steps {self.first_step} to {step}" if step > self.first_step else f"step {step}"
        if otherwise is None:
            bits = f"Loss and gradient norm of {steps}, as far as known, are bit for bit those recorded."
            return Verdict(True, f"It went as before: {self._record['sentence']}. {bits}")
        found = [(kind, name) for kind in snapshot.KINDS for name in self._record["state"][kind]]
        hints = [f"{name!r} was not found again" for kind, name in found if (kind, name) not in self._put]
        here = _here()
        hints += [
            f"{n} was {was}, and is {here[n]} now" for n, was in self._record["made_on"].items() if was != here[n]
        ]
        reasons = "; ".join([*hints, "what the loop counts or draws for itself is not restored"])
        return Verdict(False, f"It went otherwise: {otherwise} (of {steps}). Possible reasons: {reasons}.")

    def _differs(self, what: str) -> None:
        self._otherwise = self._otherwise or what


def _read(path: Path) -> dict[str, Any]:
    """Return a record: the file's, or of those in a run's folder the gravest."""
    files = [path] if path.is_file() else [path / "blackbox" / f"{kind}.pt" for kind in KINDS]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise DxdyError(f"{path}: holds no record of a step that went wrong (no blackbox/*.pt).")
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.testzip() is not None:  # torch itself does not look at the checksums
                raise zipfile.BadZipFile
        record: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        version = record["version"]
    except OSError as error:
        raise DxdyError(f"{file}: cannot be read ({error.strerror}).") from None
    except (zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError):
        raise DxdyError(f"{file}: is no record of a step. Is it damaged?") from None
    if version != VERSION:
        raise DxdyError(f"{file}: written in version {version} of this format; here version {VERSION} is read.")
    return record


def _write(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write a record so that a reader sees the whole of it or nothing."""
    path = folder / "blackbox" / f"{record['kind']}.pt"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(with_tensors(record, _alone), temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path


def _own(tensor: Tensor) -> Tensor:
    """Return a plain copy on the CPU; of the device meta, which has nothing to copy, the tensor."""
    alone = tensor.detach().as_subclass(Tensor)
    return alone if alone.is_meta else alone.to("cpu", copy=True)


def _alone(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the CPU with no more behind it than itself: a file would hold all of it."""
    alone = tensor.is_cpu and type(tensor) is Tensor and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.detach() if alone else _own(tensor)


def _copied_into(room: Tensor | None, tensor: Tensor) -> Tensor:
    if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
        return _own(tensor)
    return room.copy_(tensor)


def _same_bits(a: float, b: float | None) -> bool:
    return b is not None and (struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b)))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, DxdyError) else _described(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _here() -> dict[str, Any]:
    """Return what can change the last digit of a result."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "torch": str(torch.__version__),
        "number of threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "GPU": gpu,
    }
