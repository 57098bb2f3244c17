"""Things as bytes that another process can read, also where it cannot import their functions and classes."""

import inspect
import io
import marshal
import os
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from dxdy_nb.errors import DxdyError


def packed(things: dict[str, Any]) -> bytes:
    """Return the pickle of a tuple of things; what could not be imported goes by value.

    That is what a notebook's cell, a script or standard input has defined, and what was loaded from a file by its path.

    Raises
    ------
    DxdyError
        Something in them cannot be pickled: its name, and by which names it is reached.
    """
    try:
        return _dumps(tuple(things.values()))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise DxdyError(
        f"launch: {_way(things, set())} cannot be sent to another process ({reason}). "
        "Make it where it is used, or pass what it is made from."
    )


def _way(thing: Any, seen: set[int]) -> str:
    """Return the names that lead to the thing that cannot be pickled, and its type."""
    seen.add(id(thing))
    for name, part in _parts(thing).items():
        if id(part) not in seen:
            try:
                _dumps(part)
            except Exception:
                return f"{name} → {_way(part, seen)}"
    return f"a {type(thing).__qualname__}"


def _parts(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, FunctionType):
        used = inspect.getclosurevars(thing)
        return {**used.globals, **used.nonlocals}
    if isinstance(thing, (list, tuple)):
        return {f"[{place}]": part for place, part in enumerate(thing)}
    return thing if isinstance(thing, dict) else {}


def _dumps(thing: Any) -> bytes:
    pickler = _Pickler(buffer := io.BytesIO())
    try:
        pickler.dump(thing)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Takes along the contents of modules that a fresh process could not import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.by_value: list[ModuleType] = []
        self._looked_at: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        """Return how a thing is pickled."""
        if isinstance(thing, CodeType):  # with its file's name, which cloudpickle leaves out: tracebacks show its lines
            return marshal.loads, (marshal.dumps(thing),)
        if isinstance(thing, (type, FunctionType, ModuleType)):
            name = str(getattr(thing, "__module__", None) or thing.__name__)
            module = None if name in self._looked_at else sys.modules.get(name)
            self._looked_at.add(name)
            if module and not _can_be_imported(module):
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
