"""What holds memory during a training step, moment by moment, and what it costs to need less."""

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from dxdy_nb.nested import mapped, tensors_in

PARTS = ("weights", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class Memory:
    """The memory of one step: of each part its bytes after each operation of torch's.

    ``weights`` are parameters and buffers, ``gradients`` what a parameter's ``.grad`` holds, ``optimizer`` its state,
    ``activations`` what the forward keeps for the backward, ``other`` the batch, results on their way and gradients of
    activations. A storage counts once, however many tensors share it. ``allocator`` is the peak that a GPU's allocator
    reports, which also rounds sizes up; 0 on a CPU, which counts nothing. It has not been read on a GPU yet.
    """

    timeline: Mapping[str, Sequence[int]] = field(repr=False)
    allocator: int = 0

    @property
    def totals(self) -> list[int]:
        """Bytes after each operation."""
        return [sum(moment) for moment in zip(*self.timeline.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The most bytes that were held at one moment."""
        return max(self.totals, default=0)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each part at that moment."""
        totals = self.totals
        place = totals.index(max(totals)) if totals else 0
        return {name: sizes[place] if totals else 0 for name, sizes in self.timeline.items()}

    @property
    def most(self) -> dict[str, int]:
        """The most bytes that each part held, each at its own moment."""
        return {name: max(sizes, default=0) for name, sizes in self.timeline.items()}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in self.at_peak.items())
        return f"{in_bytes(self.peak)} at the peak: {parts}"


def in_bytes(count: float) -> str:
    """Return a number of bytes as people read it.

    Examples
    --------
    >>> in_bytes(26280), in_bytes(3 * 2**30)
    ('25.7 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass
class _Storage:
    """One piece of memory: its size, and between which operations it was there."""

    size: int
    born: int
    died: int | None = None
    saved: bool = False


class _Ledger(TorchDispatchMode):
    """Writes down which storages are there after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.storages: dict[int, _Storage] = {}  # alive, by address of the object
        self.all: list[_Storage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.now += 1
        for t in tensors_in(result):
            self.note(t)
        return result

    def note(self, t: Tensor, born: int | None = None) -> _Storage | None:
        """Return the entry of a tensor's storage, which is made where it is new."""
        if t.layout is not torch.strided or t.is_nested or t.is_meta:
            return None
        storage = t.untyped_storage()
        key = id(storage)  # its object lives as long as the memory
        if key not in self.storages:
            entry = self.storages[key] = _Storage(storage.nbytes(), self.now if born is None else born)
            self.all.append(entry)
            weakref.finalize(storage, self._ended, key).atexit = False
        return self.storages[key]

    def _ended(self, key: int) -> None:
        if (entry := self.storages.pop(key, None)) is not None:
            entry.died = self.now


def measure(
    step: Callable[[], Any],
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    batch: Any = (),
) -> Memory:
    """Run one training step and return what held memory in it; the step changes what it changes.

    Run a step before: the first one makes the optimizer's state. Each operation costs some microseconds more.

    Parameters
    ----------
    step : forward, loss, backward and update, with no arguments
    batch : what is fed, counted as ``other``

    Examples
    --------
    >>> model = nn.Linear(4, 2)  # 10 weights of 4 bytes
    >>> memory = measure(lambda: model(torch.ones(3, 4)).sum().backward(), model)
    >>> memory.most["weights"], memory.most["gradients"]
    (40, 40)
    """
    ledger = _Ledger()
    weights = [entry for t in (*model.parameters(), *model.buffers()) if (entry := ledger.note(t, 0))]
    found = [entry for t in tensors_in(batch) if (entry := ledger.note(t, 0))]
    old = [entry for p in model.parameters() if p.grad is not None and (entry := ledger.note(p.grad, 0))]
    state = [entry for t in _state(optimizers) if (entry := ledger.note(t, 0))]
    gradients: list[_Storage] = list(old)

    def arrived(p: Tensor) -> None:
        if p.grad is not None and (entry := ledger.note(p.grad)):
            gradients.append(entry)

    def pack(t: Tensor) -> Tensor:
        if (entry := ledger.note(t)) is not None:
            entry.saved = True
        return t

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in model.parameters() if p.requires_grad]
    gpu = next((p.device for p in model.parameters() if p.is_cuda), None)
    before = 0
    if gpu is not None:
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.max_memory_allocated(gpu)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), ledger:
            step()
    finally:
        for hook in hooks:
            hook.remove()
    state += [entry for t in _state(optimizers) if (entry := ledger.note(t, 0))]
    allocator = max(torch.cuda.max_memory_allocated(gpu), before) if gpu is not None else 0
    parts = _Parts(weights, gradients, state, found)
    return Memory({name: parts.over(name, ledger) for name in PARTS}, allocator)


def _state(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for held in optimizer.state.values():
            yield from tensors_in(list(held.values()) if isinstance(held, dict) else held)


class _Parts:
    """To which part each storage belongs: the first that claims it."""

    def __init__(self, weights: list[_Storage], gradients: list[_Storage], state: list[_Storage], fed: list[_Storage]):
        self.of = {id(one): "other" for one in fed}
        for name, entries in (("optimizer", state), ("gradients", gradients), ("weights", weights)):
            self.of |= {id(one): name for one in entries}

    def over(self, name: str, ledger: _Ledger) -> list[int]:
        """Return the bytes of a part after each operation."""
        changes = [0] * (ledger.now + 2)
        for entry in ledger.all:
            if self.of.get(id(entry), "activations" if entry.saved else "other") == name:
                changes[entry.born] += entry.size
                changes[ledger.now + 1 if entry.died is None else max(entry.died, entry.born)] -= entry.size
        total, sizes = 0, []
        for change in changes[:-1]:
            total += change
            sizes.append(total)
        return sizes


# ---- to need less ----


@dataclass(frozen=True)
class Saving:
    """One way to need less memory: its price, and the peak bytes before and after, where it was tried."""

    advice: str
    price: str
    before: int = 0
    after: int | None = None
    note: str = ""

    def __str__(self) -> str:
        seen = f"{in_bytes(self.before)} → {in_bytes(self.after)}" if self.after is not None else self.note
        return f"{self.advice}: {seen}. Price: {self.price}"


ADVICE = {
    "accumulate": "as many passes as micro-batches, and BatchNorm sees the smaller ones",
    "lower precision": "7 bits of fraction in bf16 (watch the loss); weights and optimizer stay float32",
    "checkpoint activations": "the forward of what is checkpointed is computed twice",
    "free": "none, where no gradient is wanted: evaluate under torch.no_grad(), keep no loss with its graph",
    "shard": "communication in every step; lesson 09",
}


def savings(
    step: Callable[..., Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    parts: int = 4,
    ranks: int = 2,
) -> list[Saving]:
    """Return the advice at out-of-memory in its order, each measured on one step with and without it.

    ``step(batch, backward=True)`` trains on a batch, or, told so, makes the forward alone. Accumulation feeds
    ``parts`` slices of the batch; sharding over ``ranks`` is computed, not run. What cannot be tried says why.
    """

    def memory(run: Callable[[], Any]) -> Memory:
        for p in model.parameters():
            p.grad = None
        return measure(run, model, optimizers, batch)

    def peak(run: Callable[[], Any]) -> int:
        return memory(run).peak

    usual = memory(lambda: step(batch))
    full, most = usual.peak, usual.most
    device = next(model.parameters()).device.type

    def accumulate() -> int:
        pieces = sliced(batch, parts)
        return peak(lambda: [step(piece) for piece in pieces])

    def lower() -> int:
        def run() -> None:
            with torch.autocast(device, torch.bfloat16):
                step(batch)

        return peak(run)

    def checkpoint() -> int:
        with checkpointed(model):
            return peak(lambda: step(batch))

    def free() -> int:
        def run() -> None:
            with torch.no_grad():
                step(batch, backward=False)

        return peak(run)

    def shard() -> int:
        whole = most["weights"] + most["gradients"] + most["optimizer"]
        return full - whole + whole // ranks

    found = []
    for (advice, price), run in zip(ADVICE.items(), (accumulate, lower, checkpoint, free, shard), strict=True):
        try:
            found.append(Saving(advice, price, full, run()))
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            found.append(Saving(advice, price, full, None, f"not tried: {reason}"))
    return found


def sliced(batch: Any, parts: int) -> list[Any]:
    """Return a batch in parts along its first axis.

    Raises
    ------
    ValueError
        Its tensors have not one length, or there are fewer samples than parts.
    """
    lengths = {len(t) if t.dim() else 0 for t in tensors_in(batch)}
    if len(lengths) != 1 or (count := lengths.pop()) < parts:
        raise ValueError(f"the batch's tensors have the lengths {sorted(lengths)}: it cannot be cut into {parts}")
    bounds = [count * part // parts for part in range(parts + 1)]
    return [mapped(batch, operator.itemgetter(slice(*ends))) for ends in pairwise(bounds)]


@contextlib.contextmanager
def checkpointed(model: nn.Module) -> Iterator[list[str]]:
    """Inside the block the blocks of a model keep their inputs only and compute the rest again in backward.

    Blocks are the members of the model's largest ``ModuleList``, or stretches of its largest ``Sequential``, about the
    square root of its length many (Chen et al. 2016).

    Raises
    ------
    ValueError
        The model has neither.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    lists = [(name, m) for name, m in lists if len(m) > 1 and any(True for _ in m.parameters())]
    if not lists:
        raise ValueError("no Sequential and no ModuleList was found: wrap a part of the forward in checkpoint(...)")
    name, found = max(lists, key=lambda pair: (sum(p.numel() for p in pair[1].parameters()), len(pair[1])))
    modules = [found] if isinstance(found, nn.Sequential) else found
    changed = {module: vars(module).get("forward") for module in modules}  # once each: layers may be shared
    for module in changed:
        if isinstance(module, nn.Sequential):
            again = partial(checkpoint_sequential, list(module), math.isqrt(len(module)))
            module.forward = partial(again, use_reentrant=False)  # type: ignore[method-assign]
        else:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield [name or type(model).__name__]
    finally:
        for module, own in changed.items():  # some have a forward of their own, as a wrapper gives them
            del module.forward
            if own is not None:
                module.forward = own
