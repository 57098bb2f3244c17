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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from dxdy_nb.errors import DxdyError
from dxdy_nb.ranks.failure import RankError, Seen, blame, ending
from dxdy_nb.ranks.output import Output
from dxdy_nb.ranks.shipping import packed
from dxdy_nb.ranks.worker import PULSE, Beat, Failure, Job, Ready, Result
from dxdy_nb.runs.environment import attended

IDLE = 600.0  # seconds after which unused processes end: each holds 220 MB, and on a GPU a context
GRACE = 2.0  # seconds in which the others may still tell a better reason than a lost peer
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dxdy_nb.ranks import worker; worker.main({arguments})"


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
    >>> def total(x):
    ...     with session(device="cpu") as s:
    ...         return s.rank, s.mean(x * (s.rank + 1), 1)
    >>> from dxdy_nb.ranks.session import session
    >>> launch(total, 2.0, world_size=2)
    [(0, 3.0), (1, 3.0)]
    """
    global _POOL
    if not callable(function):
        raise DxdyError(f"launch: expected a function, got a {type(function).__name__}.")
    threads = _threads(world_size)
    for name, value in {"timeout": timeout, "stall": stall}.items():
        if value is not None and not value > 0:
            raise DxdyError(f"launch: expected {name} in seconds, above 0, got {value!r}.")
    job = Job(
        call=packed(function, args),
        world_size=world_size,
        timeout=timeout,
        threads=threads,
        path=[str(folder) for folder in sys.path],
        directory=os.getcwd(),
        argv=sys.argv,
        environment=dict(os.environ),
        attended=attended(),
    )
    if _POOL.owner != os.getpid():  # a fork's processes are not its parent's
        _POOL = _Pool()
    if not _POOL.lock.acquire(blocking=False):
        raise DxdyError("launch: another launch of this process is still running; wait for its end.")
    try:
        results = _POOL.call(job, stall)
    finally:
        _POOL.lock.release()
    return [pickle.loads(result) for result in results]


def close() -> None:
    """End the processes that wait for the next ``launch``: their memory, and their GPUs, are free again."""
    if _POOL.owner == os.getpid() and _POOL.lock.acquire(blocking=False):  # else a call is under way
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(8, 4 * cores)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= most:
        raise DxdyError(f"launch: expected world_size from 1 to {most} on {cores} cores, got {world_size!r}.")
    if world_size > cores:
        text = f"{world_size} ranks share {cores} cores: the results are the same, and no time is won."
        warnings.warn(f"launch: {text}", stacklevel=3)
    threads = max(1, cores // world_size)
    with contextlib.suppress(KeyError, ValueError):
        threads = min(threads, int(os.environ["OMP_NUM_THREADS"]))
    return threads


@dataclass
class _Worker:
    """The parent's side of one process."""

    rank: int
    process: subprocess.Popen[bytes]
    link: Connection
    ready: bool = False
    fresh: bool = True  # no call is under way or has failed there

    @classmethod
    def start(cls, rank: int, threads: int, folder: str) -> "_Worker":
        """Start a process, and do not wait for it."""
        ours, theirs = Pipe()
        arguments = f"{theirs.fileno()}, {rank}, {os.getpid()}, {folder!r}"
        program = _PROGRAM.format(path=[str(one) for one in sys.path], arguments=arguments)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},  # read once, when torch is loaded
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Stop reaches the parent alone; and what a rank starts can be ended with it
            bufsize=0,
        )
        theirs.close()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        return cls(rank, process, ours)

    def outputs(self) -> dict[IO[bytes], str]:
        """Return its open outputs, by their names."""
        named = {self.process.stdout: "stdout", self.process.stderr: "stderr"}
        return {stream: name for stream, name in named.items() if stream is not None and not stream.closed}

    def send(self, message: object) -> None:
        """Tell it something; that it has ended is seen elsewhere."""
        self.fresh = False
        with contextlib.suppress(OSError):
            self.link.send(message)

    def messages(self) -> Iterator[object]:
        """Return what has arrived from it; a process that ended without a word is a failure."""
        with contextlib.suppress(EOFError, OSError):
            while self.link.poll():
                yield self.link.recv()
            if self.process.poll() is None:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):  # a closed link ends the process, if not at once
            self.process.wait(timeout=1)
        self.kill()
        yield Failure(ending(self.process.returncode), died=True)

    def kill(self) -> None:
        """End it, and all processes that it has started."""
        self.fresh = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """End it, and hear no more of it."""
        self.kill()
        self.link.close()
        for stream in self.outputs():
            stream.close()


@dataclass
class _Call:
    """A call under way, and what is known of its ranks."""

    workers: list[_Worker]
    output: Output
    beats: dict[int, Beat] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)  # the first first
    results: dict[int, bytes] = field(default_factory=dict)

    def follow(self, job: Job, stall: float | None) -> list[bytes]:
        """Send the job when all processes are ready, print what they print, and return their pickled results."""
        sent, moved, until = False, time.monotonic(), math.inf
        while self.running and time.monotonic() < until:
            if self.hear(PULSE):
                moved = time.monotonic()
            elif stall is not None and time.monotonic() - moved > stall:
                raise self.error(stall)
            if self.failures:
                guilty = any(Seen(failure).guilty for failure in self.failures.values())
                until = min(until, time.monotonic() + (GRACE / 10 if guilty else GRACE))
            if not sent and all(one.ready for one in self.workers):
                sent = True
                self.beats.clear()
                for one in self.workers:
                    one.send(job)
        self.hear(0)
        self.output.end()
        if self.failures:
            raise self.error()
        for one in self.workers:
            one.send(None)
            one.fresh = True
        return [self.results[one.rank] for one in self.workers]

    @property
    def running(self) -> list[_Worker]:
        """The processes that have neither returned nor failed."""
        return [one for one in self.workers if one.rank not in self.failures and one.rank not in self.results]

    def hear(self, seconds: float) -> bool:
        """Wait so long for anything to arrive, take it in, and return whether something did."""
        outputs = {stream: (one, name) for one in self.workers for stream, name in one.outputs().items()}
        wait([*(stream.fileno() for stream in outputs), *(one.link for one in self.running)], seconds)
        heard = False
        for stream, (one, name) in outputs.items():
            data = stream.read(1 << 20)  # None: nothing there now
            if data:
                self.output.hear(one.rank, name, data)
            elif data is not None:
                stream.close()
            heard |= bool(data)
        for one in self.running:
            for message in one.messages():
                self.take(one, message)
                heard = True
        return heard

    def take(self, one: _Worker, message: object) -> None:
        """Keep what a process has told."""
        match message:
            case Ready():
                one.ready = True
            case Beat():
                self.beats[one.rank] = message
            case Result():
                self.results[one.rank] = message.pickled
            case Failure():
                self.failures[one.rank] = message

    def error(self, stalled: float | None = None) -> RankError:
        """Return the error that names the cause."""
        words = self.output.last_words
        return blame(
            {
                rank: Seen(self.failures.get(rank), self.beats.get(rank), rank in self.results, tuple(words[rank]))
                for rank in dict.fromkeys([*self.failures, *range(len(self.workers))])
            },
            stalled,
        )


@dataclass
class _Pool:
    """The processes of this one; the first ``world_size`` of them serve a call."""

    owner: int = field(default_factory=os.getpid)
    workers: list[_Worker] = field(default_factory=list)
    folder: str = ""  # private: where the ranks of a call find each other
    numbers: Iterator[int] = field(default_factory=count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    timer: threading.Timer | None = None

    def call(self, job: Job, stall: float | None) -> list[bytes]:
        """Run a job on the first processes; whatever ends it early ends them, and others start."""
        if self.timer is not None:
            self.timer.cancel()
        if not os.path.isdir(self.folder):
            self.folder = tempfile.mkdtemp(prefix="dxdy-ranks-")
        job = replace(job, store=os.path.join(self.folder, str(next(self.numbers))))
        self.start(job)
        try:
            return _Call(self.workers[: job.world_size], Output(job.attended)).follow(job, stall)
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
        ranks = [*(one.rank for one in unfit), *range(len(self.workers), job.world_size)]
        for rank in ranks:
            self.workers[rank : rank + 1] = [_Worker.start(rank, job.threads, self.folder)]

    def close(self) -> None:
        """End all processes."""
        for one in self.workers:
            one.end()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


_POOL = _Pool()
atexit.register(close)
