"""The loss function that a script wrote itself: heard of as Python runs it, since torch is not told."""

import inspect
import sys
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dxdy_nb.diagnosis.observation import Call
from dxdy_nb.nested import tensors_in

HERE, TORCH = (str(Path(file).parents[up]) for file, up in ((__file__, 1), (torch.__file__, 0)))
SHORT = 100  # items: to look through a longer argument, as a vocabulary, at each call takes too long
LAST = 8  # calls that are kept: a loop that never goes back makes ever more
FAR = 8  # operations between a loss and what backward begins at: it is divided, scaled, negated
MANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class WrittenLoss:
    """Between a model's forward and backward, notes each function that makes one number of a tensor with a graph."""

    def __init__(self) -> None:
        self._listens = False
        self._running: dict[types.FrameType, Call] = {}
        self._made: list[Call] = []

    def listen(self) -> None:
        """Hear from now on; nobody else's profiler is put aside for it."""
        if sys.getprofile() is None:
            self._listens = True
            sys.setprofile(self._hear)

    def forget(self) -> None:
        """Hear no more."""
        self._listens = False
        if sys.getprofile() == self._hear:
            sys.setprofile(None)
        self._running.clear()
        self._made.clear()

    def behind(self, root: Tensor) -> Call | None:
        """Return the outermost call that made what a backward begins at, or what it is a multiple of."""
        found = [call for call in self._made if is_multiple(root, call.output)]
        self.forget()
        return found[-1] if found else None

    def _hear(self, frame: types.FrameType, event: str, value: Any) -> None:
        if not self._listens:
            sys.setprofile(None)  # another thread's
        elif event == "call" and (_is_theirs(frame) or (_is_theirs(frame.f_back) and _file(frame) == F.__file__)):
            try:
                call = _called(frame)
            except Exception:  # a frame of an unusual kind
                return
            if call is not None:
                self._running[frame] = call
        elif event == "return":
            call = self._running.pop(frame, None)
            if call is not None and torch.is_tensor(value) and value.numel() == 1 and value.grad_fn is not None:
                call.output = value
                self._made += [call] * all(t is not value for t in tensors_in(call.args))  # else it was made before
                del self._made[:-LAST]


def given_to_raise(error: BaseException) -> list[Tensor]:
    """Return what stood beside a tensor with a graph in the call that an error came out of: targets, most likely."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        with suppress(Exception):
            if (call := _called(frame)) is not None:
                return [t for t in tensors_in(call.args) if t.grad_fn is None]
    return []


def _file(frame: types.FrameType | None) -> str:
    return frame.f_code.co_filename if frame is not None else ""


def _is_theirs(frame: types.FrameType | None) -> bool:
    return not _file(frame).startswith((HERE, TORCH))


def is_multiple(root: Tensor, of: Any) -> bool:
    """Return whether a tensor is another one, or made of nothing else: divided, scaled, negated."""
    node, wanted = root.grad_fn, getattr(of, "grad_fn", None)
    for _ in range(FAR):
        if node is None or node is wanted:
            break
        inputs = [child for child, _ in node.next_functions if child is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return node is not None and node is wanted


def _called(frame: types.FrameType) -> Call | None:
    """Return a function as it was called, if one of its arguments has a graph, and is more than a loss."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    args = [values[name] for name in names]
    first = int(names[:1] == ("self",))
    short = [arg for arg in args[first:] if not (isinstance(arg, (list, tuple, dict)) and len(arg) > SHORT)]
    if code.co_flags & MANY or not any(t.grad_fn is not None and t.dim() for t in tensors_in(short)):
        return None
    cells = tuple(types.CellType(values[name]) for name in code.co_freevars)
    last = max(place for place, arg in enumerate(args) if tensors_in(arg)) + 1
    function: Any = types.FunctionType(code, frame.f_globals, code.co_name, tuple(args[last:]), cells)
    function.__kwdefaults__ = {
        name: values[name] for name in code.co_varnames[len(names) : len(names) + code.co_kwonlyargcount]
    }
    if first:
        own = isinstance(args[0], nn.Module) and code.co_name == "forward"
        function = args[0] if own else types.MethodType(function, args[0])
    return Call(function, tuple(args[first:last]), {})
