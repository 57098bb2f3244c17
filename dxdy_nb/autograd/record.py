"""What a graph does not hold: forward values, the module an operation ran in, and the lines that cut the graph.

While a record runs, every torch function is seen on its way (a ``TorchFunctionMode``): slow, and meant for a look, not
for training. A value that leaves the graph is followed further: through other operations, through NumPy arrays, and
through the Python numbers that ``.item()`` returns. So a ``.detach()`` that only feeds a log is told from one that
feeds the loss.
"""

import bisect
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dxdy_nb.autograd.graph import small_copy
from dxdy_nb.errors import DxdyError

NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


@dataclass(eq=False)
class Cutting:
    """A call that took tensors with a graph and gave something without: file and line, its name, those tensors.

    ``left``: its value left for where it cannot be followed.
    """

    where: str
    operation: str
    tensors: list[Tensor]
    left: bool = False


Marks = frozenset[Cutting]  # the cuts that a value went through
NONE: Marks = frozenset()


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
    if not isinstance(model, nn.Module):
        raise DxdyError(f"record: expected a torch.nn.Module, got {type(model).__name__}. Without one: nn.Identity().")
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
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                    stack.callback(module.register_forward_pre_hook(self._entered(name)).remove)
                    stack.callback(module.register_forward_hook(self._left, always_call=True).remove)
            stack.enter_context(_numpy_followed(self))
            stack.enter_context(_Mode(self))
            self._cleanup = stack.pop_all()
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
        return (cut for cut in self._cuts if not inside or cut in marks)

    def ways_out(self) -> Iterator[Cutting]:
        """Return the cuts whose values cannot be followed: Python insists on a plain float, NumPy on a plain array."""
        return (cut for cut in self._cuts if cut.left)

    def _entered(self, name: str) -> Callable[..., None]:
        def entered(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling():  # a compiled part is one box
                self._open.append((module, name, next_number()))

        return entered

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._open and self._open[-1][0] is module:  # else another hook raised before ours had seen it come in
            _, name, first = self._open.pop()
            self._spans.append((first, next_number(), len(self._open), name))

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

    def mark(self, tensor: Tensor, marks: Marks) -> None:
        """Remember the cuts that a tensor's value went through."""
        self._marks[id(tensor)] = (weakref.ref(tensor), marks)

    def saw(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one torch function, and note its line, its small value, and whether it cut the graph."""
        name = getattr(function, "__name__", "")
        if name == "__get__":  # an attribute, as .data or .T
            attribute = function.__self__  # type: ignore[attr-defined]
            name = getattr(getattr(attribute, "fget", attribute), "__name__", "")
        shape_only = name.startswith("new_") or name.endswith("_like")  # what is made has no value of the first one
        inputs = list(_followed((args[shape_only:], tuple(named.values()))))
        tensors = [thing for thing in inputs if isinstance(thing, Tensor)]
        asking = [t for t in tensors if t.requires_grad and not _is_stopped_view(t)]
        if name == "detach_":
            asking = [t.view_as(t) for t in asking]  # it takes the graph from the tensor itself
        before = next_number()
        output = function(*args, **named)
        after = next_number()
        if after > before:
            self._lines[after - 1] = _line()
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and (value := small_copy(first)) is not None:
                self._values[after - 1] = value
        if name in QUIET:
            return output
        outputs = [out for out in _followed(output) if isinstance(out, Tensor)]
        marks = self._marks_of(inputs)
        leaves = name in LEAVES
        if asking and (leaves or any(not o.requires_grad or _is_stopped_view(o) for o in outputs)):
            cut = Cutting(_line(), name if torch.is_grad_enabled() else f"{name} under no_grad", asking)
            marks |= {cut}
            self._cuts.append(cut)
        for cut in marks if name in PLAIN else ():
            cut.left = True
        if marks:
            for out in outputs:
                self.mark(out, marks)
            if name == "__setitem__" and isinstance(args[0], Tensor):
                self.mark(args[0], marks)
        return _carry(output, marks) if leaves and marks and name not in PLAIN else output


# Ways out of torch: what they return is a number, a list or an array; of those, what nothing can be told of afterwards.
LEAVES = {"item", "tolist", "__float__", "__int__", "__array__", "numpy", "__dlpack__"}
PLAIN = {"__float__", "__int__", "__array__", "__dlpack__"}
QUIET = {"grad", "grad_fn", "requires_grad_"}  # questions about a tensor, and what makes it a part of no loss


class _Mode(TorchFunctionMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self._record.saw(func, args, kwargs or {})


_running: list[Record] = []
_from_numpy = torch.from_numpy


def _from_numpy_followed(array: np.ndarray) -> Tensor:
    tensor = _from_numpy(array)
    for record in _running:
        record.mark(tensor, _marks_on(array))
    return tensor


@contextmanager
def _numpy_followed(record: Record) -> Iterator[None]:
    """Follow what comes back by ``torch.from_numpy``, which no mode sees, while any record runs in any thread."""
    _running.append(record)
    setattr(torch, "from_numpy", _from_numpy_followed)  # noqa: B010  the stubs call it final
    try:
        yield
    finally:
        _running.remove(record)
        if not _running:
            setattr(torch, "from_numpy", _from_numpy)  # noqa: B010


def _leaving(thing: Any) -> Any:
    """Return what leaves for where it cannot be followed, after noting so."""
    for cut in thing.marks:
        cut.left = True
    return thing


@functools.cache
def _numbered(kind: type) -> Any:
    """Return a kind of number, Python's or NumPy's, that remembers where it was cut off; so do its results.

    One base only: NumPy's numbers crash when they are not the first.
    """
    plain = kind.__int__ if issubclass(kind, (int, np.integer)) else kind.__float__  # type: ignore[attr-defined]

    def following(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)
        return lambda self, *others: _carry(method(self, *others), self.marks.union(*map(_marks_on, others)))

    def leaving(to: type) -> Callable[..., Any]:
        return lambda self: to(plain(_leaving(self)))

    two = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    names = ["item", "__neg__", "__abs__", "__round__", *(f"__{r}{name}__" for name in two for r in ("", "r"))]
    ways = {name: following(name) for name in names if hasattr(kind, name)}
    ways |= {"__float__": leaving(float), "__int__": leaving(int), "__reduce__": lambda self: (kind, (plain(self),))}
    return type(kind.__name__, (kind,), {"marks": NONE} | ways)


class Array(np.ndarray):
    """A NumPy array that came out of a graph; what is computed from it remembers so too."""

    marks: Marks

    def __array_finalize__(self, source: Any) -> None:
        self.marks = _marks_on(source)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        named |= {"out": tuple(map(_bare, named["out"]))} if "out" in named else {}
        marks = NONE.union(*map(_marks_on, inputs))
        return _carry(getattr(ufunc, method)(*map(_bare, inputs), **named), marks)

    def __array_function__(self, func: Any, types: Any, args: Any, named: Any) -> Any:
        marks = NONE.union(*map(_marks_on, _followed((args, named))))
        return _carry(super().__array_function__(func, types, args, named), marks)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __float__(self) -> float:
        return float(_bare(_leaving(self)))


def _scalar_too(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)
    return functools.wraps(method)(lambda self, *args, **named: _carry(method(self, *args, **named), self.marks))


for _name in ("__getitem__", "item", "tolist", "mean", "std", "var", "argmax", "argmin", "dot"):
    setattr(Array, _name, _scalar_too(_name))


def _bare(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, Array) else array


def _marks_on(thing: Any) -> Marks:
    """Return the cuts that a number or an array went through; none for what else may have such an attribute."""
    return getattr(thing, "marks", NONE) if isinstance(thing, (int, float, np.generic, np.ndarray)) else NONE


def _carry(value: Any, marks: Marks) -> Any:
    """Return an array, a number, or a list of them, so that it remembers the cuts it went through."""
    if isinstance(value, np.ndarray):
        carrier: Any = value.view(Array)
    elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        carrier = _numbered(type(value).__mro__[hasattr(value, "marks")])(value)
    else:
        return type(value)(_carry(item, marks) for item in value) if type(value) in (list, tuple) else value
    carrier.marks = marks
    return carrier


def _followed(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and numbers with a past in (nested) arguments."""
    waiting = [value]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor) or _marks_on(thing):
            yield thing
        elif isinstance(thing, (tuple, list)):
            waiting += reversed(thing)
        elif isinstance(thing, dict):
            waiting += reversed(list(thing.values()))


def _is_stopped_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view made under no_grad, which says that it requires a gradient and gets none."""
    return tensor.is_leaf and not isinstance(tensor, nn.Parameter) and tensor._is_view()


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
