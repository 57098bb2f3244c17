"""The one error of this package."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class DxdyError(Exception):
    """Something a person can put right: what was seen, what was expected, what to do next.

    Torch's own errors are never turned into this one.

    Examples
    --------
    >>> raise DxdyError("lr: expected a number above 0, got -1.0")
    Traceback (most recent call last):
    ...
    dxdy_nb.errors.DxdyError: lr: expected a number above 0, got -1.0
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'lr'?"`` for a misspelt name, or a list of what is known when nothing is close.

    Examples
    --------
    >>> suggestion("epoch", ["epochs", "lr"])
    " Did you mean 'epochs'?"
    >>> suggestion("x", ["epochs", "lr"])
    ' Known: epochs, lr.'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


def counted(number: int, noun: str) -> str:
    """Return a number of things in words.

    Examples
    --------
    >>> counted(2, "epoch"), counted(1200, "step"), counted(0, "batch")
    ('2 epochs', '1,200 steps', '0 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{number:,} {noun}{ending}"


def in_a_line(error: BaseException) -> str:
    r"""Return an exception as one line: what it is, what it says, and the last line of the reader's that it passed.

    Examples
    --------
    >>> in_a_line(ValueError("two\nlines"))
    'ValueError: two lines'
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).exists()]
    frames = [f for f in frames[1:] if "site-packages" not in f.filename and f.name != "import_module"]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
