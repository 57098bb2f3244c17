"""One warm process: it imports torch once, and then runs the functions that its parent sends.

Torch is imported when this process already watches over its parent, which may end before the import does.
"""

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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

PULSE = 0.25  # seconds between two looks at the parent and at the function
_OURS = os.path.dirname(__file__)
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _OURS, "<frozen")


@dataclass(frozen=True)
class Job:
    """A call, and what it needs to find in its process."""

    call: bytes  # the pickle of function and arguments
    world_size: int
    timeout: float  # seconds
    threads: int
    path: list[str]
    directory: str
    argv: list[str]
    environment: dict[str, str]
    attended: bool  # whether somebody sees the progress
    store: str = ""  # a file that does not exist yet, in a private folder: where the ranks meet


@dataclass(frozen=True)
class Ready:
    """Torch is imported."""


@dataclass(frozen=True)
class Beat:
    """Where a function is; told whenever it has moved."""

    steps: int  # of optimizers
    waits: str  # the function of torch.distributed that it waits in, or "backward", or nothing
    function: str = ""  # the innermost that is no library's
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Result:
    """What a function has returned."""

    pickled: bytes


@dataclass(frozen=True)
class Failure:
    """What ended a function that did not return."""

    summary: str
    trace: bytes = b""  # a pickled traceback.TracebackException, where there is one
    died: bool = False  # the process ended, and did not tell why


def main(fd: int, rank: int, parent: int, folder: str) -> None:
    """Run one function after another until the parent ends, or this process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop is the parent's to handle
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(all_threads=False)
    link, lock, steps = Connection(fd), threading.Lock(), [0]

    def tell(message: object) -> None:
        try:
            with lock:
                link.send(message)
        except OSError:  # nobody listens any more
            _vanish(folder)

    def watch() -> None:
        seen: Any = None
        while True:
            time.sleep(PULSE)
            if os.getppid() != parent:
                _vanish(folder)
            frames = _frames(sys._current_frames()[main_thread])
            place = [steps[0], *((id(frame.f_code), frame.f_lasti) for frame in frames)]
            if place != seen:
                seen = place
                tell(_beat(steps[0], frames))

    main_thread = threading.get_ident()
    threading.Thread(target=watch, daemon=True).start()
    try:
        _serve(rank, link, tell, steps)
    except EOFError:
        _vanish(folder)


def _vanish(folder: str) -> NoReturn:
    """End at once, together with every process that a function has started here."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(rank: int, link: Connection, tell: Callable[[object], None], steps: list[int]) -> None:
    import cloudpickle
    import torch.nn.parallel  # noqa: F401
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from dxdy_nb.ranks.session import leave

    def count(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    known = set(sys.modules)
    gc.collect()
    gc.freeze()  # what is here stays: later collections need not look at it
    tell(Ready())
    while True:
        job = link.recv()
        steps[0] = 0
        try:
            _prepare(job, rank)
            result = _run(job, rank)
            try:
                pickled = cloudpickle.dumps(result)
            except Exception as error:
                kind = type(result).__name__
                raise TypeError(f"returned a {kind}, which cannot be sent to the caller: {error}") from error
            _flush()
        except BaseException as error:
            _flush()
            tell(_failure(error))
            os._exit(1)  # what is left of the group is of no use, and its end might wait for the others
        del result
        tell(Result(pickled))
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

    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=LOOPBACK)
    size = str(job.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
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
    torch.use_deterministic_algorithms(False)


def _run(job: Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    function, arguments = pickle.loads(job.call)
    backend = None if torch.cuda.is_available() else "gloo"  # None: gloo for the CPU's tensors, nccl for a GPU's
    store, timeout = dist.FileStore(job.store, job.world_size), timedelta(seconds=job.timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    return function(*arguments)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _failure(error: BaseException) -> Failure:
    import cloudpickle

    # The lines of a cell's code are known to the caller only: they are looked up there.
    trace = traceback.TracebackException.from_exception(error, lookup_lines=False)
    while trace.stack and trace.stack[0].filename.startswith(_OURS):
        del trace.stack[0]
    summary = "".join(trace.format_exception_only()).strip()
    try:
        return Failure(summary, cloudpickle.dumps(trace))
    except Exception:  # an exception of a class that cannot be sent
        return Failure(summary)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a stack's frames, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _beat(steps: int, frames: list[FrameType]) -> Beat:
    inner = frames[0].f_code
    waits = inner.co_name if f"{os.sep}torch{os.sep}distributed{os.sep}" in inner.co_filename else ""
    if inner.co_name == "_engine_run_backward":
        waits = "backward"
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES) and code.co_filename != "<string>":  # this process's own start
            return Beat(steps, waits, code.co_name, code.co_filename, frame.f_lineno)
    return Beat(steps, waits)
