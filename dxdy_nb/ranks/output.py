"""What the ranks print, line by line, each under its rank's name."""

import codecs
import sys
from collections import defaultdict, deque
from typing import Any

KEPT = 20  # lines of a rank's standard error: its last words, should it die


class Output:
    r"""Prints what it hears; a line that ends in ``\r``, as a progress bar's, is overwritten by the next.

    Of several bars the one of the lowest rank moves. Where nobody watches, a bar shows once, when it is done.
    """

    def __init__(self, attended: bool) -> None:
        self._attended = attended
        self._decoders: dict[Any, Any] = defaultdict(lambda: codecs.getincrementaldecoder("utf-8")("backslashreplace"))
        self._begun: dict[Any, str] = {}  # by rank and stream: a line that has not ended yet
        self._shown = 0  # characters of the bar that stands there now
        self.last_words: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT))

    def hear(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what a rank has written to ``stdout`` or ``stderr``."""
        source = rank, stream
        *lines, begun = (self._begun.get(source, "") + self._decoders[source].decode(data)).split("\n")
        for line in lines:
            self._print(rank, stream, _visible(line))
        self._begun[source] = begun
        bars = [key for key, line in self._begun.items() if "\r" in line and _visible(line)]
        if self._attended and source in bars and source == min(bars):
            text = f"[rank {rank}] {_visible(begun)}"
            print(f"\r{text:<{self._shown}}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)

    def end(self) -> None:
        """Print the lines that have not ended."""
        for (rank, stream), line in self._begun.items():
            self._print(rank, stream, _visible(line))
        self._begun.clear()
        self._clear()

    def _print(self, rank: int, stream: str, line: str) -> None:
        if not line:
            return
        self._clear()
        if stream == "stderr":
            self.last_words[rank].append(line)
        print(f"[rank {rank}] {line}", file=getattr(sys, stream), flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
            self._shown = 0


def _visible(line: str) -> str:
    """Return what stands in a line after all its returns to the beginning."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "").rstrip()
