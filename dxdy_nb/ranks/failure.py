"""Which rank is to blame: not the one that lost its peer, but the one that was lost."""

import linecache
import pickle
import re
import signal
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from dxdy_nb.errors import DxdyError
from dxdy_nb.ranks.worker import Beat, Failure

# What gloo and nccl say where another rank is gone or late.
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting|[Tt]imeout after|connectFullMesh failed"
    r"|communicator was aborted|remote process exited"
)
_HINTS = {
    "SIGKILL": "It was killed from outside: by hand, or by the system for want of memory.",
    "SIGABRT": "Compiled code gave up; what it said stands above.",
    "SIGSEGV": "Compiled code used memory that is not its own; where, stands above.",
    "exit code 0": "Something in the function ends the process (os._exit, or an exec); return instead.",
}


class RankError(DxdyError):
    """A function failed on some rank: which one is the cause, and what became of the others."""

    rank: int = 0  # the cause
    traceback: str = ""  # that rank's own; of one that died, the last lines it wrote to standard error


@dataclass(frozen=True)
class Seen:
    """What is known of a rank."""

    failure: Failure | None = None
    beat: Beat | None = None
    returned: bool = False
    last_words: tuple[str, ...] = ()

    @property
    def guilty(self) -> bool:
        """Whether it failed for a reason of its own."""
        return bool(self.failure and (self.failure.died or not _LOST.search(self.failure.summary)))

    def __str__(self) -> str:
        if self.failure:
            return textwrap.shorten(self.failure.summary, 120, placeholder=" …")
        return f"had returned{_after(self.beat)}" if self.returned else f"was {_where(self.beat)}"


def blame(ranks: Mapping[int, Seen], stalled: float | None = None) -> RankError:
    """Return the error for ranks of which some have failed (in this order), or none has moved for some seconds."""
    failed = [rank for rank, seen in ranks.items() if seen.failure]
    guilty = [rank for rank in failed if ranks[rank].guilty]
    late = sorted((rank for rank in ranks if rank not in failed), key=lambda rank: _lateness(ranks[rank]))
    rank = [*guilty, *late, *failed][0]
    lines = [f"launch: {_cause(rank, len(ranks), ranks[rank], stalled)}"]
    lines += [f"rank {other}: {ranks[other]}" for other in sorted(ranks) if other != rank]
    told = next((one for one in (rank, *failed) if ranks[one].failure), rank)
    trace = _trace(ranks[told].failure)
    error = RankError("\n".join([*lines, f"\nOn rank {told}:\n{trace}"] if trace else lines))
    error.rank, error.traceback = rank, trace or "\n".join(ranks[rank].last_words)
    return error


def _cause(rank: int, size: int, seen: Seen, stalled: float | None) -> str:
    """Return what is wrong with a rank, and what to do about it."""
    name = f"rank {rank} of {size}"
    if stalled is not None:
        return f"nothing has moved for {stalled:g} s; {name} {seen}. If it may take so long: stall=..."
    if seen.failure:
        does = "ended with" if seen.failure.died else "raised"
        what = f"{name} {does} {seen.failure.summary.rstrip('.')}{_after(seen.beat)}."
        return f"{what} {_HINTS.get(seen.failure.summary, '')}".rstrip()
    if seen.returned:
        advice = "All ranks must take as many steps, and call the same collectives."
        return f"{name} returned{_after(seen.beat)}, and others still waited for it. {advice}"
    return f"{name} kept the others waiting: it {seen}. If it may take so long: timeout=..."


def _trace(failure: Failure | None) -> str:
    return "".join(pickle.loads(failure.trace).format()).rstrip() if failure and failure.trace else ""


def ending(code: int) -> str:
    """Return a process's exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _lateness(seen: Seen) -> tuple[int, int]:
    """Return what sorts the rank that the others wait for before those that wait."""
    waits, steps = (seen.beat.waits, seen.beat.steps) if seen.beat else ("", 0)
    if seen.returned:
        return 1, steps
    return {"": 0, "backward": 2}.get(waits, 3), steps  # a backward pass may compute, or wait for the others' gradients


def _after(beat: Beat | None) -> str:
    steps = beat.steps if beat else 0
    return f" after {steps} optimizer step{'s' * (steps != 1)}" if steps else ""


def _where(beat: Beat | None) -> str:
    if beat is None or not beat.function:
        return "about to begin"
    line = linecache.getline(beat.file, beat.line).strip()
    waits = f"waiting for the others in {beat.waits}, " if beat.waits else ""
    return f"{waits}in {beat.function}, {beat.file}:{beat.line}{line and f': `{line}`'}{_after(beat)}"
