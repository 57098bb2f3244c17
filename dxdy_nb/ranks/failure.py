"""Which rank is to blame: not the one that lost its peer, but the one that was lost."""

import linecache
import os
import pickle
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dxdy_nb.errors import DxdyError
from dxdy_nb.ranks.worker import Beat, Failure

# What gloo and nccl say where another rank is gone or late.
LOST = re.compile(
    "Connection (closed|reset|refused)|Broken pipe|Timed out waiting|[Tt]imeout after|connectFullMesh failed"
    "|communicator was aborted|remote process exited|caused pair closure"
)
_HINTS = {
    "SIGKILL": " It was killed from outside: by hand, or by the system for want of memory.",
    "SIGABRT": " Compiled code gave up; what it said stands above.",
    "SIGSEGV": " Compiled code used memory that is not its own; where, stands above.",
    "exit code 0": " Something in the function ends the process (os._exit, or an exec); return instead.",
}


class RankError(DxdyError):
    """A function failed on some rank: which one is the cause, and what became of the others."""

    rank: int = 0  # the cause
    traceback: str = ""  # its own; of a rank that kept the others waiting, that of one which waited


@dataclass
class Seen:
    """What is known of a rank."""

    beat: Beat = field(default_factory=Beat)
    result: bytes | None = None
    failure: Failure | None = None

    @property
    def over(self) -> bool:
        """Whether it has returned or failed."""
        return self.result is not None or self.failure is not None

    @property
    def guilty(self) -> bool:
        """Whether it failed for a reason of its own."""
        return bool(self.failure and (self.failure.died or not LOST.search(self.failure.summary)))

    def __str__(self) -> str:
        beat, steps = self.beat, f" after {self.beat.steps} optimizer steps" if self.beat.steps else ""
        if self.failure:
            does = "ended with" if self.failure.died else "raised"
            return f"{does} {self.failure.summary.rstrip('.')}{steps}.{_HINTS.get(self.failure.summary, '')}"
        if self.result is not None:
            return f"returned{steps}."
        if not beat.function:
            return "was about to begin."
        line = linecache.getline(beat.file, beat.line).strip()
        waits = f"waiting for the others in {beat.waits}, " if beat.waits else ""
        return f"was {waits}in {beat.function}, {beat.file}:{beat.line}{line and f': `{line}`'}{steps}."


def waiting(ranks: Sequence[Seen], seconds: float, left: float) -> str:
    """Return who waits in which collective while no rank moves, for how long, and until when; "" for nobody."""
    told = [
        f"rank {rank} waits in {seen.beat.waits} ({os.path.basename(seen.beat.file)}:{seen.beat.line})"
        for rank, seen in enumerate(ranks)
        if seen.beat.waits and not seen.over
    ]
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
    text = f"launch: no rank has moved for {seconds:.0f} s; {', '.join(told)}. Given up at {until} at the latest."
    return text if told else ""


def blame(ranks: Sequence[Seen], stall: float | None) -> RankError:
    """Return the error for ranks of which some have failed, or none has moved for ``stall`` seconds."""
    failures = {rank: seen.failure for rank, seen in enumerate(ranks) if seen.failure}
    failed = sorted(failures, key=lambda rank: failures[rank].at)
    guilty = [rank for rank in failed if ranks[rank].guilty]
    late = sorted(set(range(len(ranks))) - set(failed), key=lambda rank: _lateness(ranks[rank]))
    rank = [*guilty, *late, *failed][0]
    what = f"rank {rank} of {len(ranks)} {ranks[rank]}"
    if not failed:
        what = f"nothing has moved for {stall:g} s; {what} If it may take so long: stall=..."
    elif rank in late:
        returned = "All ranks must take as many steps, and call the same collectives."
        advice = "If it may take so long: timeout=..." if ranks[rank].result is None else returned
        what = f"{what} The others still waited for it. {advice}"
    others = [
        f"rank {other} {textwrap.shorten(str(seen), 160, placeholder=' …')}"
        for other, seen in enumerate(ranks)
        if other != rank
    ]
    error = RankError("\n".join([f"launch: {what}", *others]))
    error.rank = rank
    told = [one for one in (rank, *failed) if one in failures and failures[one].trace][:1]
    for one in told:
        error.traceback = "".join(pickle.loads(failures[one].trace).format()).rstrip()
        error.args = (f"{error}\n\nOn rank {one}:\n{error.traceback}",)
    return error


def _lateness(seen: Seen) -> tuple[int, int]:
    """Return what sorts the rank that the others wait for before those that wait."""
    if seen.result is not None:
        return 1, seen.beat.steps
    # A backward pass may compute, or wait for the others' gradients.
    return {"": 0, "backward": 2}.get(seen.beat.waits, 3), seen.beat.steps
