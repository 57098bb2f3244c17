"""Warm processes for one notebook or script: started once, used for one call after another."""

import atexit
import contextlib
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from numbers import Real
from typing import IO, Any

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.ranks.failure import Seen, blame, waiting
from dxdy_nb.ranks.output import Output
from dxdy_nb.ranks.shipping import packed
from dxdy_nb.ranks.worker import PULSE, Failure, Job
from dxdy_nb.runs.environment import attended

IDLE = 600.0  # seconds after which unused processes end: each holds 220 MB, and on a GPU a context
QUIET = 5.0  # seconds without any rank moving after which it is said, once, who waits
GRACE = 2.0  # seconds in which the others may still tell a better reason than a lost peer
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dxdy_nb.ranks.worker import main; main{arguments}"


def launch(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 60.0,
    stall: float | None = 120.0,
) -> list[Any]:
    """Call a function on several processes of this machine at once, and return their results, one per rank.

    The function may stand anywhere: in a cell, in a script without a main guard, on standard input, in a file that
    was loaded by its path. Each process has the caller's environment, ``sys.path`` and working directory, its share of
    the cores, a place of its own (``dx.session()``) and a process group: gloo, on loopback only, met through a file in
    a private folder; nccl too where there are GPUs, which has not been run yet. What a rank prints is labelled with
    its number. The processes stay for the next call, and end with this one, when nobody has used them for ten
    minutes, or with ``close``. Linux and macOS.

    Parameters
    ----------
    function : called as ``function(*args)`` on each rank
    world_size : the number of ranks
    timeout : seconds that a rank waits for the others in a collective
    stall : seconds in which no rank moves or prints anything after which all are ended; None: never

    Raises
    ------
    RankError
        A rank raised, died, or kept the others waiting. All ranks are ended, and others start.
    DxdyError
        The call cannot be sent to another process, or the number of ranks makes no sense here.

    Examples
    --------
    >>> from dxdy_nb import session
    >>> def total(x):
    ...     with session(device="cpu") as s:
    ...         return s.rank, s.mean(x * (s.rank + 1), 1)
    >>> launch(total, 2.0, world_size=2)
    [(0, 3.0), (1, 3.0)]
    """
    if not callable(function):
        raise DxdyError(f"launch: expected a function, got a {type(function).__name__}.")
    threads = _threads(world_size)
    for name, value in {"timeout": timeout, "stall": stall}.items():
        unlimited = value is None and name == "stall"
        if not unlimited and not (isinstance(value, Real) and 0 < value < math.inf):
            raise DxdyError(f"launch: expected {name} in seconds, above 0, got {value!r}.")
    call = packed({getattr(function, "__name__", "the function"): function, "arguments": args})
    if not _POOL.lock.acquire(blocking=False):
        raise DxdyError("launch: another launch of this process is still running; wait for its end.")
    try:
        store, path = _POOL.meeting_point(), [str(one) for one in sys.path]
        state = attended(), path, sys.argv, os.getcwd(), dict(os.environ)
        results = _POOL.run(Job(call, world_size, timeout, store, threads, *state), stall)
    finally:
        _POOL.lock.release()
    return [pickle.loads(result)[0] for result in results]


def close() -> None:
    """End the processes that wait for the next ``launch``: their memory, and their GPUs, are free again."""
    if _POOL.lock.acquire(blocking=False):  # else a call is under way
        try:
            _POOL.close()
        finally:
            _POOL.lock.release()


def _threads(world_size: int) -> int:
    """Return the number of threads that each rank may have.

    Raises
    ------
    DxdyError
        The number of ranks makes no sense on this machine.
    """
    if os.name != "posix":
        raise DxdyError("launch: needs Linux or macOS; with dx.session() the same function runs under torchrun.")
    cores = cores_for(world_size)
    if world_size > cores:
        text = f"{world_size} ranks share {counted(cores, 'core')}: the results are the same, and no time is won."
        warnings.warn(f"launch: {text}", stacklevel=3)
    return threads_each(world_size)


def cores_for(world_size: int) -> int:
    """Return how many cores so many ranks would share.

    Raises
    ------
    DxdyError
        They are more than these can carry.
    """
    cores = usable_cores()
    most = max(8, 4 * cores)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= most:
        raise DxdyError(
            f"launch: expected world_size from 1 to {most} on {counted(cores, 'core')}, got {world_size!r}."
        )
    return cores


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(processes: int) -> int:
    """Return the number of threads that each of so many processes may have, that all have a core each."""
    threads = max(1, usable_cores() // processes)
    with contextlib.suppress(KeyError, ValueError):
        threads = min(threads, int(os.environ["OMP_NUM_THREADS"]))
    return threads


@dataclass
class _Worker:
    """The parent's side of one process."""

    rank: int
    process: subprocess.Popen[bytes]
    link: Connection
    streams: dict[IO[bytes], str]
    parent: int = field(default_factory=os.getpid)
    fresh: bool = True  # no call is under way or has failed there
    seen: Seen = field(default_factory=Seen)

    @classmethod
    def start(cls, rank: int, threads: int, folder: str) -> "_Worker":
        """Start a process, and do not wait for it."""
        ours, theirs = Pipe()
        path, arguments = [str(one) for one in sys.path], (theirs.fileno(), rank, os.getpid(), folder)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=path, arguments=arguments)],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},  # read once, when torch is loaded
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Stop reaches the parent alone; and what a rank starts can be ended with it
            bufsize=0,
        )
        theirs.close()
        assert process.stdout is not None and process.stderr is not None
        streams = {process.stdout: "stdout", process.stderr: "stderr"}
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
        return cls(rank, process, ours, streams)

    def send(self, message: Job | None) -> None:
        """Tell it to begin a job, or that the others are done with one too."""
        self.fresh = message is None
        with contextlib.suppress(OSError):  # it has ended, which is seen elsewhere
            self.link.send(message)

    def hear(self, output: Output) -> bool:
        """Take in what it has printed and told, and return whether there was anything."""
        heard, ended = False, self.process.poll() is not None
        for stream, name in [*self.streams.items()]:
            data = stream.read(1 << 20)  # None: nothing there now
            if data:
                output.hear(self.rank, name, data)
            elif data is not None:
                del self.streams[stream]
            heard |= bool(data)
        with contextlib.suppress(EOFError, OSError):
            while self.link.poll():
                vars(self.seen).update(self.link.recv())
                heard = True
        if ended and not self.seen.over:
            code = self.process.returncode
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.seen.failure = Failure(why, time.monotonic(), died=True)
        return heard

    def end(self) -> None:
        """End it, and all processes that it has started."""
        if os.getpid() == self.parent and not self.link.closed:  # no fork of it, and not done yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with self.process, self.link:  # waits for it, and closes all
            self.fresh = False


@dataclass
class _Pool:
    """The processes of this one; the first ``world_size`` of them serve a call."""

    workers: list[_Worker] = field(default_factory=list)
    folder: str = ""  # private
    lock: threading.Lock = field(default_factory=threading.Lock)
    timer: threading.Timer | None = None

    def meeting_point(self) -> str:
        """Return the name of a file that is not there yet, in a folder that nobody else can read."""
        if not os.path.isdir(self.folder):
            self.folder = tempfile.mkdtemp(prefix="dxdy-ranks-")
        return os.path.join(self.folder, str(time.monotonic_ns()))

    def run(self, job: Job, stall: float | None) -> list[bytes]:
        """Run a job on the first processes; whatever ends it early ends them, and others start."""
        if self.timer is not None:
            self.timer.cancel()
        self.start(job)
        try:
            return _follow(self.workers[: job.world_size], job, stall)
        except BaseException:
            self.start(job)
            raise
        finally:
            self.timer = threading.Timer(IDLE, close)
            self.timer.daemon = True
            self.timer.start()

    def start(self, job: Job) -> None:
        """Have as many processes that are fit for a call as a job needs."""
        unfit = [one for one in self.workers[: job.world_size] if not one.fresh or one.process.poll() is not None]
        for one in unfit:
            one.end()
        for rank in [*(one.rank for one in unfit), *range(len(self.workers), job.world_size)]:
            self.workers[rank : rank + 1] = [_Worker.start(rank, job.threads, self.folder)]

    def close(self) -> None:
        """End all processes."""
        shutil.rmtree(self.folder, ignore_errors=True)  # first: this process may be killed meanwhile
        while self.workers:
            self.workers.pop().end()


def _follow(workers: Sequence[_Worker], job: Job, stall: float | None) -> list[bytes]:
    """Send a job to its processes, print what they print, and return their pickled results."""
    output = Output(job.attended)
    for one in workers:
        one.seen = Seen()
        one.send(job)
    moved, until, told = time.monotonic(), math.inf, ""
    while running := [one for one in workers if not one.seen.over]:
        streams = [stream.fileno() for one in workers for stream in one.streams]
        wait([*streams, *(one.link for one in running)], PULSE)
        heard = [one.hear(output) for one in workers]
        now = time.monotonic()
        moved = now if any(heard) else moved
        if job.attended and not told and now - moved > QUIET:
            left = min(job.timeout, stall or math.inf) - (now - moved)
            if told := waiting([one.seen for one in workers], now - moved, left):
                output.end()
                print(told, file=sys.stderr, flush=True)
        if any(one.seen.failure for one in workers):
            until = min(until, now + (GRACE / 10 if any(one.seen.guilty for one in workers) else GRACE))
        if now > until or (stall is not None and now - moved > stall):
            break
    for one in workers:
        one.hear(output)
    output.end()
    results = [one.seen.result for one in workers if one.seen.result is not None]
    if len(results) < len(workers):
        raise blame([one.seen for one in workers], stall)
    for one in workers:
        one.send(None)
    return results


_POOL = _Pool()
atexit.register(close)
