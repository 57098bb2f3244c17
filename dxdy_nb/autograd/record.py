"""What a graph does not hold: forward values, the module an operation ran in, and the lines that cut the graph.

While a record runs, every torch function is seen on its way (a ``TorchFunctionMode``): slow, and meant for a look, not
for training. A value that leaves the graph is followed further: through other operations, through NumPy arrays, and
through the Python numbers that ``.item()`` returns. So a ``.detach()`` that only feeds a log is told from one that
feeds the loss.
"""

import bisect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dxdy_nb.autograd.graph import SMALL

Marks = frozenset[int]
NONE: Marks = frozenset()
NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class Cutting(NamedTuple):
    """A call that took tensors with a graph and gave something without: file and line, its name, those tensors."""

    where: str
    operation: str
    tensors: list[Tensor]


def record(model: nn.Module) -> "Record":
    """Return a context manager that records one forward pass of a model, for ``dxdy_nb.graph(loss, record=...)``.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> with record(model) as seen:
    ...     loss = model(torch.ones(1, 2)).sum()
    >>> seen.model is model
    True
    """
    return Record(model)


class Record:
    """A recorded forward pass; its parts are asked for by the numbers that autograd gives to its nodes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._cleanup = ExitStack()
        self._open: list[tuple[nn.Module, str, int]] = []
        self._spans: list[tuple[int, int, int, str]] = []  # first number, number after the last, depth, module path
        self._values: dict[int, Tensor] = {}
        self._lines: dict[int, str] = {}
        self._cuts: list[Cutting] = []
        self._marks: dict[int, tuple[weakref.ref[Tensor], Marks]] = {}
        self._first = self._after = 0
        self._starts: list[int] = []
        self._paths: list[str] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            self._cleanup.callback(module.register_forward_pre_hook(self._entered(name)).remove)
            self._cleanup.callback(module.register_forward_hook(self._left, always_call=True).remove)
        self._cleanup.callback(setattr, torch, "from_numpy", torch.from_numpy)
        setattr(torch, "from_numpy", self._from_numpy(torch.from_numpy))  # noqa: B010  no mode sees this way into torch
        self._cleanup.enter_context(_Mode(self))
        self._first = next_number()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._cleanup.close()
        self._after = next_number()
        self._starts, self._paths = _flatten(self._spans)

    def module(self, number: int) -> str:
        """Return the path of the innermost module in which a node was made; empty outside of all."""
        place = bisect.bisect_right(self._starts, number) - 1
        return self._paths[place] if place >= 0 else ""

    def value(self, number: int) -> Tensor | None:
        """Return the forward value of a node's output, where it is small."""
        return self._values.get(number)

    def line(self, number: int) -> str:
        """Return file and line of the user's code that made a node."""
        return self._lines.get(number, "")

    def cuts(self, loss: Tensor) -> Iterator[Cutting]:
        """Return the cuts whose values went into the loss; all of them for a loss that was made after the record."""
        inside = loss.grad_fn is not None and self._first <= loss.grad_fn._sequence_nr() < self._after
        marks = self._marks_of([loss])
        return (cut for place, cut in enumerate(self._cuts) if not inside or place in marks)

    def ways_out(self) -> Iterator[Cutting]:
        """Return the cuts whose values cannot be followed: Python insists on a plain float, NumPy on a plain array."""
        return (cut for cut in self._cuts if cut.operation.split()[0] in PLAIN)

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda module, inputs: self._open.append((module, name, next_number()))

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is module:  # else another hook raised before ours had seen it come in
            _, name, first = self._open.pop()
            self._spans.append((first, next_number(), len(self._open), name))

    def _from_numpy(self, original: Callable[[np.ndarray], Tensor]) -> Callable[[np.ndarray], Tensor]:
        def from_numpy(array: np.ndarray) -> Tensor:
            tensor = original(array)
            self._mark(tensor, getattr(array, "marks", NONE))
            return tensor

        return from_numpy

    def _marks_of(self, things: list[Any]) -> Marks:
        found = NONE
        for thing in things:
            if isinstance(thing, Tensor):
                known = self._marks.get(id(thing))
                if known is not None and known[0]() is thing:
                    found |= known[1]
            else:
                found |= thing.marks
        return found

    def _mark(self, tensor: Tensor, marks: Marks) -> None:
        self._marks[id(tensor)] = (weakref.ref(tensor), marks)

    def saw(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one torch function, and note its line, its small value, and whether it cut the graph."""
        before = next_number()
        output = function(*args, **named)
        after = next_number()
        if after > before:
            self._lines[after - 1] = _line()
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.numel() <= SMALL and first.layout is torch.strided:
                self._values[after - 1] = first.detach().clone()
        name = getattr(function, "__name__", "")
        if name == "__get__":  # an attribute, as .data or .T
            attribute = function.__self__  # type: ignore[attr-defined]
            name = getattr(getattr(attribute, "fget", attribute), "__name__", "")
        if name in QUIET:
            return output
        inputs = list(_followed((args, tuple(named.values()))))
        outputs = [out for out in _followed(output) if isinstance(out, Tensor)]
        marks = self._marks_of(inputs)
        leaves = name in LEAVES
        if leaves or any(not out.requires_grad for out in outputs):
            asking = [thing for thing in inputs if isinstance(thing, Tensor) and thing.requires_grad]
            if asking:
                marks |= {len(self._cuts)}
                called = name if torch.is_grad_enabled() else f"{name} under no_grad"
                self._cuts.append(Cutting(_line(), called, asking))
        if marks:
            for out in outputs:
                self._mark(out, marks)
            if name == "__setitem__" and isinstance(args[0], Tensor):
                self._mark(args[0], marks)
        return _carry(output, marks) if leaves and marks and name not in PLAIN else output


# Ways out of torch: what they return is a number, a list or an array.
LEAVES = {"item", "tolist", "__float__", "numpy", "__array__"}
PLAIN = {"__float__", "__array__"}
# Questions about a tensor, and what makes it a part of no loss: they cut nothing.
QUIET = {
    "grad",
    "grad_fn",
    "requires_grad_",
    "zeros_like",
    "ones_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "full_like",
    "new_zeros",
}


class _Mode(TorchFunctionMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._record.saw(func, args, kwargs or {})


class Number(float):
    """A Python number that came out of a graph, and remembers where it was cut off."""

    marks: Marks = NONE

    def _with(self, value: Any, other: Any = None) -> Any:
        if not isinstance(value, float):
            return value
        result = Number(value)
        result.marks = self.marks | getattr(other, "marks", NONE)
        return result


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)
    return lambda self, *others: self._with(plain(self, *others), *others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(f"__{_name}__"))


class Array(np.ndarray):
    """A NumPy array that came out of a graph; what is computed from it remembers so too."""

    marks: Marks

    def __array_finalize__(self, source: Any) -> None:
        self.marks = getattr(source, "marks", NONE)


def _carry(value: Any, marks: Marks) -> Any:
    if isinstance(value, np.ndarray):
        array = value.view(Array)
        array.marks = marks
        return array
    if isinstance(value, float):
        number = Number(value)
        number.marks = marks
        return number
    return [_carry(item, marks) for item in value] if isinstance(value, list) else value


def _followed(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and numbers with a past in (nested) arguments."""
    waiting = [value]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, (Tensor, Number, Array)):
            yield thing
        elif isinstance(thing, (tuple, list)):
            waiting += reversed(thing)
        elif isinstance(thing, dict):
            waiting += reversed(list(thing.values()))


def _line() -> str:
    """Return file and line of the nearest caller that is neither torch nor this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    path = frame.f_code.co_filename
    # A notebook's cell has a file name made of numbers that say nothing.
    return f"{'cell' if 'ipykernel_' in path else os.path.basename(path)}:{frame.f_lineno}"


def next_number() -> int:
    """Return the number that autograd will give to the next node of this thread."""
    peek = getattr(torch._C._autograd, "_get_sequence_nr", None)
    if peek is not None:
        return peek()
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        return torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # type: ignore[union-attr]


def _flatten(spans: list[tuple[int, int, int, str]]) -> tuple[list[int], list[str]]:
    """Return the numbers at which the innermost module changes, and the module from there on."""
    events = []
    for first, after, depth, name in spans:
        if after > first:
            events += [(first, 1, depth, name), (after, 0, -depth, name)]
    events.sort(key=lambda event: event[:3])
    starts, paths, inside = [], [], []
    for number, enters, _, name in events:
        if enters:
            inside.append(name)
        else:
            inside.pop()
        starts.append(number)
        paths.append(inside[-1] if inside else "")
    return starts, paths
