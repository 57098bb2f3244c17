"""A call as bytes that another process can run, also where that process cannot import the function."""

import inspect
import io
import marshal
import os
import pickle
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from dxdy_nb.errors import DxdyError


def packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the pickle of a call; functions and classes travel by value where they cannot be imported.

    That is what a notebook's cell, a script or standard input has defined, and what was loaded from a file by its path.

    Raises
    ------
    DxdyError
        Something in it cannot be pickled: its name, and how the function comes to it.
    """
    try:
        return _dumps((function, args))
    except Exception as error:
        parts = {"arguments": args, getattr(function, "__name__", "the function"): function}
        way = next((_way(name, part, set()) for name, part in parts.items() if not _can_be_sent(part)), "")
        reason = f"{type(error).__name__}: {error}"
    raise DxdyError(
        f"launch: {way or 'the call'} cannot be sent to another process ({reason}). "
        "Make it inside the function, or pass what it is made from."
    )


def _way(name: str, thing: Any, seen: set[int]) -> str:
    """Return the names that lead to the innermost thing that cannot be pickled."""
    seen.add(id(thing))
    for key, part in _parts(thing).items():
        if id(part) not in seen and not _can_be_sent(part):
            return f"{name} → {_way(str(key), part, seen)}"
    return f"{name} (a {type(thing).__qualname__})"


def _parts(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, FunctionType):
        used = inspect.getclosurevars(thing)
        return {**used.globals, **used.nonlocals}
    if isinstance(thing, (list, tuple)):
        return {f"[{place}]": part for place, part in enumerate(thing)}
    return thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})


def _can_be_sent(thing: Any) -> bool:
    try:
        _dumps(thing)
    except Exception:
        return False
    return True


def _dumps(thing: Any) -> bytes:
    pickler = _Pickler(buffer := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(thing)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Takes along the contents of modules that a fresh process could not import."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.by_value: list[ModuleType] = []
        self._looked_at: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        """Return how a thing is pickled."""
        if isinstance(thing, CodeType):  # with its file's name, which cloudpickle leaves out: tracebacks show its lines
            return marshal.loads, (marshal.dumps(thing),)
        if isinstance(thing, (type, FunctionType, ModuleType)):
            name = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
            if name in sys.modules and name not in self._looked_at:
                self._looked_at.add(name)
                if not _can_be_imported(module := sys.modules[name]):
                    cloudpickle.register_pickle_by_value(module)
                    self.by_value.append(module)
        return super().reducer_override(thing)


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether an import in a fresh process finds the same file."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(top, "__file__", None)
    if file is None:
        return True  # built in, or a folder without a file; a script's own module goes by value anyway
    specs = (finder.find_spec(top.__name__, None) for finder in sys.meta_path)
    found = next(filter(None, specs), None)
    if found is None or not found.has_location:
        return found is not None  # a part of Python itself
    return os.path.realpath(found.origin or "") == os.path.realpath(file)
