"""What the ranks print, line by line, each under its rank's name."""

import sys


class Output:
    r"""Prints what it hears; a line that ends in ``\r``, as a progress bar's, is overwritten by the next.

    Of several bars the one of the lowest rank moves. Where nobody watches, a bar shows once, when it is done.
    """

    def __init__(self, attended: bool) -> None:
        self._attended = attended
        self._begun: dict[tuple[int, str], bytes] = {}  # by rank and stream: a line that has not ended yet
        self._bar = 0  # characters of the bar that stands there now

    def hear(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what a rank has written to ``stdout`` or ``stderr``."""
        *lines, self._begun[rank, stream] = (self._begun.get((rank, stream), b"") + data).split(b"\n")
        for line in lines:
            self._print(rank, stream, line)
        bars = [source for source, line in self._begun.items() if b"\r" in line and _visible(line)]
        if self._attended and (rank, stream) in bars and (rank, stream) == min(bars):
            text = f"[rank {rank}] {_visible(self._begun[rank, stream])}"
            print(f"\r{text:<{self._bar}}", end="", file=sys.stderr, flush=True)
            self._bar = len(text)

    def end(self) -> None:
        """Print the lines that have not ended."""
        for (rank, stream), line in self._begun.items():
            self._print(rank, stream, line)
        self._begun.clear()

    def _print(self, rank: int, stream: str, line: bytes) -> None:
        if self._bar:
            print(f"\r{'':<{self._bar}}\r", end="", file=sys.stderr, flush=True)
            self._bar = 0
        if text := _visible(line):
            print(f"[rank {rank}] {text}", file=getattr(sys, stream), flush=True)


def _visible(line: bytes) -> str:
    """Return what stands in a line after all its returns to the beginning."""
    parts = line.decode(errors="replace").rstrip().split("\r")
    return next((part.rstrip() for part in reversed(parts) if part.strip()), "")
