"""Who hears what a rank does, and writes it into the rank's log."""

import contextlib
import errno
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from dxdy_nb.nested import tensors_in
from dxdy_nb.observe.batches import Fetches, batch_size, sample_ids
from dxdy_nb.ranks.digest import SAMPLED, checksum, checksums, is_sharded, sketches, sums
from dxdy_nb.ranks.session import hold

TIMED = 11  # updates after which torch has told the times of the reductions before, one by one
CLOSE = 24  # updates of which gradients and weights are looked at one by one; batches of a pass that are
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "barrier"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "monitored_barrier"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("all_gather_single", "reduce_scatter_single"),  # what torch 2.13 calls the two that end in _tensor
)


class Scribe:
    """Hears of a rank's loop through ``observe.hooks`` and of its collectives through stand-ins of its own.

    Parameters
    ----------
    file : the log, in bytes and without a buffer, which each event is written to at once
    rank : whose it is
    close : updates of which each gradient and weight is written down
    """

    given: frozenset[int] = frozenset()

    def __init__(self, file: Any, rank: int, close: int) -> None:
        self._file, self._close, self._rank = file, close, rank
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._roots: list[nn.Module] = []  # models that ran or were wrapped
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Any] = []
        self._loaders: list[Any] = []
        self._samplers: list[Any] = []
        self._wrapped: list[tuple[DistributedDataParallel, dict[int, tuple[str, bool]]]] = []
        self._updates = self._items = self._depth = self._batches = 0
        self._outputs: set[int] = set()  # where outputs that carry gradients lie in memory
        self._samples = 0
        self._counted: int | None = None
        self._fetching = 0.0  # seconds since the last update
        self._reduced = 0  # the iteration of which DistributedDataParallel has told its times
        self._reducing = self._stepping = self._ended = self._full = False
        self.write("begin", rank=rank, pid=os.getpid())

    def write(self, event: str, **values: Any) -> None:
        """Append one event, with its time in seconds, at once. A disk that is full ends the log, and no training."""
        line = json.dumps({"event": event, "at": round(time.perf_counter(), 6), **values}).encode() + b"\n"
        try:
            if not self._full and self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._full = True  # what a later event would follow is half a line
            text = f"{self._file.name}: {error.strerror}. The ranks go on; what they do is no longer written down."
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @property
    def looking(self) -> bool:
        """Whether gradients and weights are written down one by one."""
        return self._updates < self._close

    # ---- names ----

    def _meet(self, module: nn.Module) -> None:
        model = module.module if isinstance(module, DistributedDataParallel) else module
        if any(model is m for m in self._roots):
            return
        self._roots.append(model)
        self._name()

    def _name(self) -> None:
        for place, model in enumerate(self._roots):
            for name, p in model.named_parameters():
                self._names.setdefault(id(p), f"{type(model).__name__}.{name}" if place else name)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {self._names.get(id(p), name): p for m in self._roots for name, p in m.named_parameters()}

    def _owned(self, optimizer: Optimizer) -> dict[str, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) not in self._names for p in parameters):  # the model was given new ones
            self._name()
        return {self._names.get(id(p), f"parameter {i}"): p for i, p in enumerate(parameters)}

    # ---- what torch.distributed is called for ----

    def stand_in(self, stack: ExitStack) -> None:
        """Put a stand-in before each function that ranks meet in, and take it away when the stack unwinds."""
        for name in COLLECTIVES:
            function = self._collective(name, getattr(dist, name))
            for owner in (dist, distributed_c10d):
                _put(stack, owner, name, function)
        places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (DistributedDataParallel, "__init__", self._wrapping),
            (DistributedSampler, "__iter__", self._sampling),
            (torch, "save", self._saving),
            (dist, "destroy_process_group", self._ending),
        )
        for owner, name, make in places:
            _put(stack, owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._depth or self._stepping:
                return original(*args, **kwargs)
            line, inner = _caller()
            tensors = tensors_in((args, kwargs))
            group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            world = group is None or group is dist.group.WORLD or group.size() == dist.get_world_size()
            here = {t.data_ptr() for t in tensors}
            whole = {n: p for n, p in self._parameters().items() if not is_sharded(p)}
            reduced = [n for n, p in whole.items() if p.grad is not None and p.grad.data_ptr() in here]
            held = [n for n, p in whole.items() if p.data_ptr() in here]
            size = sum(t.numel() for t in tensors[-1:])
            outputs = not inner and bool(here & self._outputs)
            where = {"line": line, "world": world, "size": size}
            self.write("collective", name=name, **where, output=outputs, gradients=reduced, weights=held)
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            self.write("collected", name=name)
            return result

        return stand_in

    def _wrapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            self._meet(ddp)
            known = {id(p): (name, p.requires_grad) for name, p in ddp.module.named_parameters()}
            self._wrapped.append((ddp, known))
            names = {self._names.get(i, name): trained for i, (name, trained) in known.items()}
            self.write("wrapped", parameters=names, broadcast=bool(ddp.broadcast_buffers), line=_caller()[0])

        return stand_in

    def _sampling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(sampler: DistributedSampler[Any]) -> Iterator[Any]:
            order = list(original(sampler))
            size = len(sampler.dataset)  # type: ignore[arg-type]
            self.write(
                "sampler",
                number=_number_of(self._samplers, sampler),
                rank=sampler.rank,
                replicas=sampler.num_replicas,
                epoch=sampler.epoch,
                shuffle=sampler.shuffle,
                size=size,
                padded=max(0, sampler.total_size - size),
                ids=[int(i) for i in order[:SAMPLED]],
                order=checksum([torch.tensor([(i + 1) * int(v) for i, v in enumerate(order)])]),
            )
            return iter(order)

        return stand_in

    def _saving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(what: Any, where: Any, *args: Any, **kwargs: Any) -> None:
            name = where if isinstance(where, str | os.PathLike) else getattr(where, "name", None)
            if isinstance(name, str | os.PathLike):
                self.write("saved", path=os.path.realpath(name), line=_caller()[0])
            original(what, where, *args, **kwargs)

        return stand_in

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> None:
            self.end()
            hold()
            original(*args, **kwargs)

        return stand_in

    def end(self) -> None:
        """Write down the state at the end, once: as the process group ends, or with the block."""
        if self._ended:
            return
        self._ended = True
        parameters = self._parameters()
        buffers = {name: b for m in self._roots for name, b in m.named_buffers()}
        self.write(
            "end",
            items=self._items,
            parameters=sums(parameters),
            gradients=sketches(parameters),
            buffers=sums(buffers),
            rng=checksum([torch.get_rng_state()]),
        )

    # ---- what the loop does ----

    def iterate(self, loader: DataLoader[Any], begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Note that a pass over a loader begins, and its first batches."""
        number = _number_of(self._loaders, loader)
        self.write("pass", number=number, sampler=type(_sampler(loader)).__name__, **_extent(loader))
        self._batches = 0

        def fetch(batches: Iterator[Any]) -> Any:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                self.write("passed", number=number)
                raise
            finally:
                self._fetching += time.perf_counter() - began
            self._batches += 1
            if self._batches <= CLOSE:
                ids = sample_ids(batch)
                known = {} if ids is None else {"ids": ids.tolist()}
                tensors = tensors_in(batch)
                samples = checksums(tensors, batch_size(tensors)) if self.looking else []
                self.write("batch", number=number, sum=checksum(tensors), samples=samples, **known)
            return batch

        return Fetches(begin(), fetch)

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note that an outermost module is called."""
        if isinstance(module, nn.modules.loss._Loss):
            return
        self._meet(module)
        ddp = isinstance(module, DistributedDataParallel)
        samples = batch_size([*inputs, *named.values()])
        if torch.is_grad_enabled():
            self._samples = samples
        sync = bool(ddp and module.require_backward_grad_sync)
        self._reducing |= sync and torch.is_grad_enabled()
        p = next(module.parameters(), None)
        device = str(p.device) if p is not None else ""
        self.write("forward", ddp=ddp, sync=sync, grad=torch.is_grad_enabled(), device=device, samples=samples)

    def forwarded(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note where its outputs lie."""
        self._outputs |= {t.data_ptr() for t in tensors_in(output) if t.requires_grad}
        if isinstance(module, DistributedDataParallel):  # may wait in its forward: for buffers, or to regroup gradients
            self.write("forwarded")

    def loss(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note how many targets a classification loss counts."""
        given = [*inputs, *named.values()]
        if function.__name__ in ("cross_entropy", "nll_loss") and len(given) > 1 and not given[1].is_floating_point():
            self._counted = int((given[1] != named.get("ignore_index", -100)).sum())

    @contextmanager
    def backward(self, tensors: Any) -> Iterator[None]:
        """Note what backward begins at, and what it leaves in the gradients of this rank."""
        root = tensors_in(tensors)[0]
        reduction, scaled = _reduction(root)
        counted = self._samples if self._counted is None else self._counted
        value: Any = root.detach().double().sum().tolist()
        self.write(
            "backward",
            line=_caller()[0],
            value=value,
            reduction=reduction,
            scaled=scaled,
            counted=counted,
            reduces=self._reducing,
        )
        yield
        self._samples, self._counted, self._reducing = 0, None, False
        self._outputs.clear()
        self.write("backwarded", gradients=sketches(self._parameters()) if self.looking else {})

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """Note gradients and weights as an update finds them."""
        if self._stepping:  # of an optimizer inside another, which owns a part of the parameters
            return
        owned = self._owned(optimizer)
        own = {id(p) for p in owned.values()}
        strangers = [n for n, p in self._parameters().items() if p.grad is not None and id(p) not in own]
        number = _number_of(self._optimizers, optimizer)
        together = [p for p in owned.values() if not is_sharded(p)]
        gradients = [p.grad for p in together if p.grad is not None and not p.grad.is_sparse]
        turn = None if self.looking else self._updates
        self.write(
            "update",
            number=number,
            lr=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            parameters=sums(owned) if self.looking else {},
            gradients=sketches(owned) if self.looking else {},
            graded=sum(p.grad is not None for p in owned.values()),
            owned=len(owned),
            strangers=strangers,
            late=[self._names.get(id(p), "") for p in self._late(owned)],
            all_gradients=checksum(gradients, turn),
            all_parameters=checksum(together, turn),
        )
        self._stepping = True

    def _late(self, owned: dict[str, Tensor]) -> list[Tensor]:
        """Return parameters of a wrapped model that its wrapper does not know, or knew as frozen."""
        if not self._wrapped:
            return []
        inside = {id(p) for ddp, _ in self._wrapped for p in ddp.module.parameters()}
        known = {i for _, first in self._wrapped for i, (_, trained) in first.items() if trained}
        return [p for p in owned.values() if id(p) in inside - known and p.grad is not None]

    def after_step(self, optimizer: Optimizer) -> None:
        """Note the weights that an update leaves."""
        if any(optimizer is o for o in self._optimizers):
            self._stepping = False
            self._updates += 1
            fetched, self._fetching = round(self._fetching, 6), 0.0
            self.write("updated", parameters=sums(self._owned(optimizer)) if self.looking else {}, fetched=fetched)
            for ddp, _ in self._wrapped if self._updates <= TIMED or self._updates % 100 == 1 else ():
                self._reduction_times(ddp)

    def _reduction_times(self, ddp: DistributedDataParallel) -> None:
        """Note how long the last reduction took of which torch kept the times: of the first ten, and each hundredth."""
        # Torch calls its table a prototype. Public would be a comm hook, but there can be one only: the user's.
        with contextlib.suppress(AttributeError, KeyError, RuntimeError):
            told = ddp._get_ddp_logging_data()
            if told["iteration"] == self._reduced:
                return
            self._reduced = told["iteration"]
            names = {"comm": "comm_time", "hidden": "compute_comm_overlap_time", "compute": "compute_time"}
            seconds = {name: told[f"backward_{key}"] / 1e9 for name, key in names.items()}
            buckets = str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")
            self.write(
                "reduced", iteration=self._reduced, bytes=sum(map(int, buckets)), buckets=len(buckets), **seconds
            )

    def schedule(self, scheduler: Any) -> None:
        """Note a scheduler's step."""
        self.write("schedule", number=_number_of(self._schedulers, scheduler))

    def item(self) -> None:
        """Count the numbers that are taken out of tensors."""
        self._items += 1

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing to note."""

    scaled_step = scale = unscale = reading_gradients = clip = zero_grad = copied = forked = load = _nothing


def _caller() -> tuple[Sequence[Any], bool]:
    """Return the innermost line outside torch and this package, and whether torch itself called."""
    frame: Any = sys._getframe(2)
    inner, first = False, True
    while frame is not None:
        place = frame.f_code.co_filename, frame.f_lineno
        if is_outside(place):
            return place, inner
        if "/dxdy_nb/" not in place[0].replace("\\", "/") and first:
            # `_exception_logger` and its like stand around torch's own functions; a stand-in is called from outside.
            inner, first = "/torch/" in place[0].replace("\\", "/"), False
        frame = frame.f_back
    return (), inner


def is_outside(place: tuple[str, int]) -> bool:
    """Return whether a line is neither torch's nor this package's."""
    name = place[0].replace("\\", "/")
    return "/torch/" not in name and "/dxdy_nb/" not in name and "importlib" not in name and "contextlib" not in name


def _put(stack: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, function)
    stack.callback(lambda: setattr(owner, name, original) if getattr(owner, name) is function else None)


def _number_of(known: list[Any], one: Any) -> int:
    """Return which of the known ones this is, by identity; a new one becomes known."""
    for number, other in enumerate(known):
        if other is one:
            return number
    known.append(one)
    return len(known) - 1


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what gives the order of a pass; the loader's own is idle where its batches are somebody's."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _extent(loader: DataLoader[Any]) -> dict[str, int | None]:
    """Return the batches of a pass, None where the loader does not know, and the samples if it reads each once."""
    sampler, by = _sampler(loader), loader.batch_sampler
    batches = None
    with contextlib.suppress(TypeError, NotImplementedError):
        batches = len(sampler if by is None else by)  # type: ignore[arg-type]  # a loader that is asked counts its own
    once = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    whole = once and type(by) in (BatchSampler, type(None)) and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    return {"batches": batches, "whole": len(loader.dataset) if whole else 0}  # type: ignore[arg-type]


def _reduction(root: Tensor) -> tuple[str, bool]:
    """Return how a loss was made one number (mean, sum or other), and whether it was scaled after that."""
    node: Any = root.grad_fn
    scaled = False
    while node is not None:
        name = node.name()
        if hasattr(node, "_saved_reduction"):
            return ("other", "mean", "sum")[node._saved_reduction], scaled
        if name.startswith(("MeanBackward", "SumBackward")):
            return name[: name.index("Backward")].lower(), scaled
        if name not in ("DivBackward0", "MulBackward0", "NegBackward0"):
            break
        scaled |= name != "NegBackward0"
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return "other", scaled
