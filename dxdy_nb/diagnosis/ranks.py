"""``diagnose_ranks``: the same function on several ranks, each of which writes down what it does."""

import functools
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dxdy_nb.diagnosis.comm import RULES, doing
from dxdy_nb.diagnosis.report import Finding, Report, ordered
from dxdy_nb.errors import DxdyError
from dxdy_nb.ranks.failure import RankError
from dxdy_nb.ranks.log import logged
from dxdy_nb.ranks.pool import launch
from dxdy_nb.ranks.session import leave
from dxdy_nb.ranks.verify import Ranks, of_folder

TIME = 60.0  # seconds
Worker = Callable[[int, int, str], Any]


def diagnose_ranks(worker: Worker, world_size: int = 2, *, time_limit: float = TIME) -> Report:
    """Return what ranks that train together do otherwise than they should.

    ``worker(rank, world_size, init_method)`` is called in a process for each rank; it makes its own process group with
    ``init_process_group(..., init_method=init_method, rank=rank, world_size=world_size)``, on gloo, and trains a few
    steps. What each rank does is written down and compared. A rank that waits for more than ``time_limit`` seconds is
    ended, and the report says who waited for whom, and where.

    Parameters
    ----------
    worker : may stand anywhere, also in a cell
    world_size : the number of ranks, from 2
    time_limit : seconds without anything new

    Raises
    ------
    DxdyError
        The worker is no function or cannot be sent to another process; there are fewer than two ranks.

    Examples
    --------
    >>> from dxdy_nb.diagnosis.ranks import diagnose_ranks
    >>> diagnose_ranks(worker, world_size=2).stage  # doctest: +SKIP
    'comm'
    """
    if not callable(worker):
        raise DxdyError(f"diagnose_ranks: expected worker(rank, world_size, init_method), got {type(worker).__name__}.")
    return _diagnosed(_work, (worker,), world_size, time_limit)[0]


def diagnose_script(target: str, args: Sequence[str], world_size: int, *, module: bool = False) -> tuple[Report, int]:
    """Return the report on a script that is run on several ranks, and the script's own exit code.

    Each rank finds RANK, WORLD_SIZE and LOCAL_RANK in its environment, as under ``torchrun``; their process group meets
    through a file and listens on loopback only, whatever address the script names.
    """
    return _diagnosed(_run, (target, list(args), module), world_size, TIME)


def _diagnosed(
    function: Callable[..., Any], given: tuple[Any, ...], world_size: int, time_limit: float
) -> tuple[Report, int]:
    if not isinstance(world_size, int) or world_size < 2:
        raise DxdyError(f"diagnose_ranks: world_size is 2 or more, got {world_size!r}. One process: dx.diagnose.")
    if time_limit is None:
        raise DxdyError(
            "diagnose_ranks: expected time_limit in seconds, got None: ranks that wait would never be ended."
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dxdy-ranks-") as folder:
        ranks, code = logs_of(function, given, world_size, time_limit, Path(folder))
    return replace(report_of(ranks), seconds=time.monotonic() - began), code


def logs_of(
    function: Callable[..., Any], given: tuple[Any, ...], world_size: int, time_limit: float, folder: Path
) -> tuple[Ranks, int]:
    """Call ``function(rank, world_size, init_method, *given)`` on each rank; return what each wrote down in a folder.

    The number is the greatest that a rank returned, 1 where one failed.
    """
    failures, code = {}, 0
    try:
        codes = launch(_logged, function, given, str(folder), time_limit, world_size=world_size, stall=time_limit)
        code = max(codes)
    except RankError as error:
        failures[error.rank] = str(error).partition("\n")[0].removeprefix("launch: ")
        code = 1
    ranks = Ranks(of_folder(folder).logs, failures)
    for event in ranks.any("raised"):
        code = int(event["text"]) if event["type"] == "SystemExit" and event["text"].isdigit() else code
    return ranks, code


def report_of(ranks: Ranks) -> Report:
    """Return what the logs of ranks say."""
    return Report(tuple(ordered(list(_findings(ranks)))), _saw(ranks), tuple(_unchecked(ranks)))


def _findings(ranks: Ranks) -> Iterator[Finding]:
    for rule in RULES:
        yield from rule(ranks)


def _saw(ranks: Ranks) -> dict[str, str]:
    updates = [len(events) for events in ranks.all("updated")]
    samplers = {e["sampler"] for e in ranks.any("pass")}
    rows = {
        "ranks": str(len(ranks.logs)),
        "updates": ", ".join(map(str, updates)),
        "wrapped": "DistributedDataParallel" if ranks.names else "no model is wrapped",
        "samplers": ", ".join(sorted(samplers)) or "no DataLoader was read",
        "collectives": ", ".join(sorted({e["name"] for e in ranks.any("collective")})) or "none by the code itself",
    }
    return rows | {
        f"rank {r}": how.removeprefix(f"rank {r} of {len(ranks.logs)} ") for r, how in ranks.failures.items()
    }


def _unchecked(ranks: Ranks) -> Iterator[str]:
    if not ranks.any("update"):
        yield "gradients and weights: no optimizer step was seen on any rank"
    if ranks.failures:
        told = "; ".join(f"rank {r} {doing(log)}" for r, log in enumerate(ranks.logs))
        yield f"what comes after the failure ({told})"
        yield "on GPUs NCCL_DEBUG=INFO and TORCH_NCCL_TRACE_BUFFER_SIZE=2000 (the flight recorder) say more of a hang"


def _logged(function: Callable[..., Any], given: tuple[Any, ...], folder: str, limit: float) -> int:
    """Run on one rank: leave the pool's group, since the function makes its own, and write down what happens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    leave()
    with _meeting(Path(folder) / "store", rank, world_size, limit), logged(Path(folder) / f"rank{rank}.jsonl", rank):
        return int(function(rank, world_size, f"file://{folder}/store", *given) or 0)


def _work(rank: int, world_size: int, init_method: str, worker: Worker) -> None:
    worker(rank, world_size, init_method)


def _run(rank: int, world_size: int, init_method: str, target: str, args: list[str], module: bool) -> int:
    sys.argv[:] = [target, *args]
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0:0] = [str(Path(target).resolve().parent)]
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            known = isinstance(end.code, int)
            print(f"exit code {end.code}" if known else end.code, file=sys.stderr)
            code = int(end.code) & 0xFF if known else 1  # as a shell sees it: -1 is 255
            if dist.is_initialized():  # others may wait for this rank, and would until their limit
                end.args = (code,) if known else end.args
                raise
            return code
    return 0


@contextmanager
def _meeting(store: Path, rank: int, world_size: int, limit: float) -> Iterator[None]:
    """Let a process group that is made from the environment meet in a file, and wait no longer than a limit."""
    original = dist.init_process_group

    @functools.wraps(original)
    def init(backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not args:
            timeout = kwargs.get("timeout") or timedelta(seconds=limit)
            kwargs["timeout"] = min(timeout, timedelta(seconds=limit))
        if kwargs.get("store") is None and (init_method is None or init_method.startswith(("env:", "tcp:"))):
            init_method = f"file://{store}"
            kwargs.update(rank=rank, world_size=world_size)
        original(backend, init_method, *args, **kwargs)

    dist.init_process_group = init
    try:
        yield
    finally:
        dist.init_process_group = original
