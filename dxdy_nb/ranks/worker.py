"""One warm process: it imports torch once, and then runs the functions that its parent sends.

Torch is imported when this process already watches over its parent, which may end before the import does.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PULSE = 0.25  # seconds between two looks at the parent and at the function
_OURS = os.path.dirname(__file__)
_HOOKS = os.path.join(os.path.dirname(_OURS), "observe")
_LIBRARIES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), _OURS, _HOOKS, "<frozen", "<string>")
_steps = 0  # of optimizers, in the call that runs


class Job(NamedTuple):
    """A call, and what it needs to find in its process."""

    call: bytes  # the pickle of function and arguments
    world_size: int
    timeout: float  # seconds
    store: str  # a file that does not exist yet: where the ranks meet
    threads: int
    attended: bool  # whether somebody sees the progress
    path: list[str]
    argv: list[str]
    directory: str
    environment: dict[str, str]


class Beat(NamedTuple):
    """Where a function is; told whenever it has moved."""

    steps: int = 0  # of optimizers
    waits: str = ""  # the function of torch.distributed that it waits in, or "backward"
    function: str = ""  # the innermost that is no library's
    file: str = ""
    line: int = 0


class Failure(NamedTuple):
    """What ended a function that did not return."""

    summary: str
    at: float  # time.monotonic()
    trace: bytes = b""  # a pickled traceback.TracebackException, where there is one
    died: bool = False  # the process ended, and did not tell why


def main(fd: int, rank: int, parent: int, folder: str) -> None:
    """Run one function after another until the parent ends, or this process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: _vanish(folder))  # a kernel that ends sends this first
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)
    link, lock = Connection(fd), threading.Lock()

    def tell(**news: Any) -> None:
        with lock:
            link.send(news)

    threading.Thread(target=_watch, args=(threading.get_ident(), parent, folder, tell), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        _serve(rank, link, tell)
    _vanish(folder)


def _watch(main_thread: int, parent: int, folder: str, tell: Callable[..., None]) -> None:
    """Tell where the function is, as long as the parent is there."""
    seen: object = None
    with contextlib.suppress(OSError):
        while os.getppid() == parent:
            frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main_thread])]
            place = _steps, [(id(frame.f_code), frame.f_lasti) for frame in frames]
            if place != seen:
                inner = frames[0].f_code
                waits = inner.co_name if f"{os.sep}torch{os.sep}distributed{os.sep}" in inner.co_filename else ""
                waits = "backward" if inner.co_name == "_engine_run_backward" else waits
                if inner.co_filename.endswith(os.path.join("torch", "nn", "parallel", "distributed.py")):
                    waits = "DistributedDataParallel"
                own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)][:1]
                where = [(one.f_code.co_name, one.f_code.co_filename, one.f_lineno) for one in own] or [("", "", 0)]
                tell(beat=Beat(_steps, waits, *where[0]))
            seen = place
            time.sleep(PULSE)
    _vanish(folder)


def _vanish(folder: str) -> None:
    """End at once, together with every process that a function has started here."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _count(*_: Any) -> None:
    global _steps
    _steps += 1


def _serve(rank: int, link: Connection, tell: Callable[..., None]) -> None:
    """Import torch, and run one job after another."""
    global _steps
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from dxdy_nb.ranks.session import leave
    from dxdy_nb.ranks.shipping import packed

    register_optimizer_step_post_hook(_count)
    known = set(sys.modules)
    gc.collect()
    gc.freeze()  # what is here stays: later collections need not look at it
    while True:
        job, _steps = link.recv(), 0
        try:
            _prepare(job, rank)
            result = packed({"the result": _run(job, rank)})
        except BaseException as error:
            tell(failure=_failure(error))
            os._exit(1)  # what is left of the group is of no use, and its end might wait for the others
        tell(result=result)
        link.recv()  # the others have returned too
        for name in sys.modules.keys() - known:
            file = getattr(sys.modules[name], "__file__", None) or "<frozen"
            if not file.startswith(_LIBRARIES) and not name.startswith("dxdy_nb."):
                del sys.modules[name]  # the next call finds it as it is then
        gc.collect()
        leave()


def _prepare(job: Job, rank: int) -> None:
    """Make this process look like one that the caller has just started."""
    import numpy as np
    import torch

    from dxdy_nb.ranks.session import LOOPBACK

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
    os.environ.clear()
    os.environ.update(job.environment | {name: str(value) for name, value in place.items()})
    os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=LOOPBACK)
    os.chdir(job.directory)
    sys.path[:], sys.argv[:] = job.path, job.argv
    importlib.invalidate_caches()
    setattr(sys.stderr, "isatty", lambda: job.attended)  # noqa: B010  # progress is shown where somebody sees it
    random.seed()
    np.random.seed()
    torch.seed()
    torch.set_num_threads(job.threads)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # to set it would import the compiler
        torch.use_deterministic_algorithms(False)


def _run(job: Job, rank: int) -> Any:
    """Join the other ranks, and call the function."""
    import torch
    import torch.distributed as dist

    function, arguments = pickle.loads(job.call)
    store = dist.FileStore(job.store, job.world_size)
    store.set_timeout(timedelta(hours=1))  # others may still import torch
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(job.world_size)])
    backend = None if torch.cuda.is_available() else "gloo"  # None: gloo for the CPU's tensors, nccl for a GPU's
    timeout = timedelta(seconds=job.timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    try:
        return function(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _failure(error: BaseException) -> Failure:
    import cloudpickle

    # The lines of a cell's code are known to the caller only: they are looked up there.
    trace = traceback.TracebackException.from_exception(error, lookup_lines=False)
    while trace.stack and trace.stack[0].filename.startswith(_OURS):
        del trace.stack[0]
    failure = Failure("".join(trace.format_exception_only()).strip(), time.monotonic())
    with contextlib.suppress(Exception):  # an exception of a class that cannot be sent
        return failure._replace(trace=cloudpickle.dumps(trace))
    return failure
