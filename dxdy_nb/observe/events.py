"""What happened in a loop, one thing after the other."""

from collections import deque
from dataclasses import dataclass
from time import perf_counter

FIRST = LAST = 20_000  # events kept from the start, and from the end, of a long run


@dataclass(frozen=True)
class Event:
    """One thing that a loop did.

    ``kind`` is one of

    - ``fetch``: a batch came from a loader; value: seconds, and the ids of its samples where they are known
    - ``train``, ``eval``: a model ran for the first time in this mode
    - ``forward``, ``no_grad_forward``: a model ran, with and without a graph; value: 1 in training mode, else 0
    - ``loss``: what a backward pass began at; value: the loss, without the scale of a scaler
    - ``backward``: a backward pass; value: seconds
    - ``unscale``, ``clip`` (value: the norm before), ``edited`` (gradients changed in some other way since backward)
    - ``step``: an optimizer's step; ``skip``: a scaler left it out; value: seconds
    - ``scale``: the scale of a scaler, where it differs from the last one
    - ``zero_grad``, ``scheduler`` (value: the learning rate of the first group, afterwards)
    - ``item``: numbers that the loop itself took out of tensors during a step; value: how many
    - ``watch``: what monitoring took of a step; value: seconds
    - ``copy``: tensors that the loop moved from the host to a device and waited for; value: seconds of the step

    ``step`` is the row of ``Watch.steps`` that was under way, ``time`` counts seconds since the watch began, ``where``
    is the name of the model, optimizer or loader.
    """

    kind: str
    step: int
    time: float
    where: str = ""
    value: float | None = None
    samples: tuple[int, ...] = ()


class Events:
    """Keeps events in bounded memory: the first and the last of them.

    Examples
    --------
    >>> events = Events()
    >>> events.add("step", 3, "Adam")
    >>> events.all()[0].kind
    'step'
    """

    def __init__(self) -> None:
        self.started = perf_counter()
        self._first: list[tuple[str, int, float, str, float | None, tuple[int, ...]]] = []
        self._last = deque(self._first, LAST)

    def add(
        self, kind: str, step: int, where: str = "", value: float | None = None, samples: tuple[int, ...] = ()
    ) -> None:
        """Note one event, now."""
        kept = self._first if len(self._first) < FIRST else self._last
        # A plain tuple: a frozen dataclass takes ten times as long to make.
        kept.append((kind, step, perf_counter() - self.started, where, value, samples))

    def all(self) -> tuple[Event, ...]:
        """Return the events that were kept."""
        return tuple(Event(*event) for event in (*self._first, *self._last))
