"""The one error of this package."""

import difflib
from collections.abc import Iterable


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
