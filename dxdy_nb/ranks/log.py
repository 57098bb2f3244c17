"""What one rank does, written down while it does it: plain data that can be compared with another rank's.

A log is a file of JSON lines, one event each, every one written at once: what a rank did before it hung, died or was
killed is there.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.hooks import listening
from dxdy_nb.ranks.scribe import CLOSE, Scribe, is_outside

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """Return the events of a log; of a line that was cut off nothing.

    Raises
    ------
    DxdyError
        The file is damaged, or no log.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.endswith("}")]
    except ValueError:
        raise DxdyError(f"{path}: is no log of a rank. Is it damaged? Train again for another one.") from None


@contextmanager
def logged(path: Path, rank: int, *, close: int = CLOSE) -> Iterator[None]:
    """Write down what this process does until the block ends, and with what error it ended.

    Parameters
    ----------
    path : the file, which is appended to
    rank : this process's
    close : updates of which each gradient and weight is written down; later ones have one checksum for all
    """
    with path.open("ab", buffering=0) as file:
        scribe = Scribe(file, rank, close)
        with ExitStack() as stack:
            stack.enter_context(listening(scribe))
            scribe.stand_in(stack)
            try:
                yield
            except BaseException as error:
                text = str(error).strip().splitlines()[:1]
                frames = [f for f in _frames(error.__traceback__) if is_outside(f)]
                where = frames[-1] if frames else ()
                scribe.write("raised", type=type(error).__name__, text="".join(text), all=str(error)[:2000], line=where)
                raise
            finally:
                scribe.end()


def _frames(traceback: Any) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


def named(place: Sequence[Any]) -> str:
    """Return a source line as people name it: ``train.py:12``."""
    return f"{os.path.basename(place[0])}:{place[1]}" if place else ""
