"""Somebody's script, run in this process as ``python script.py`` runs it: unchanged, and not noticing.

Nothing here imports torch: a script may set environment variables that torch reads while it is imported.
"""

import builtins
import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from dxdy_nb.errors import DxdyError

PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Script:
    """A script by its path, or a module by its name, and the arguments that are its own."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name


@dataclass(frozen=True)
class Program:
    """A script that is ready to run: the module that it becomes, and a function that compiles it."""

    main: ModuleType
    compiled: Callable[[], CodeType]


@contextlib.contextmanager
def as_main(script: Script) -> Iterator[Program]:
    """Make ``sys`` look as it does to a script that Python was started with; give back what was there before.

    Raises
    ------
    DxdyError
        There is no such script or module.
    """
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    try:
        program = _module(script.name) if script.is_module else _file(script.name)
        sys.argv = [str(program.main.__file__) if script.is_module else script.name, *script.arguments]
        sys.modules["__main__"] = program.main
        yield program
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _file(name: str) -> Program:
    path = os.path.abspath(name)  # as Python does: a traceback and __file__ tell the whole path, sys.argv[0] does not
    try:
        source = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise DxdyError(
            f"{name}: cannot be read ({getattr(error, 'strerror', None) or error}). Name a script, like train.py."
        ) from None
    _first_on_the_path(os.path.dirname(os.path.realpath(path)))
    main = ModuleType("__main__")
    # No spec, as Python has it: processes that the script spawns find it by its file.
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None, __annotations__={}, __builtins__=builtins)
    return Program(main, lambda: compile(source, path, "exec", dont_inherit=True))


def _module(name: str) -> Program:
    _first_on_the_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)  # imports the packages around it, as Python does
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError):
        spec = None
    loader: Any = spec.loader if spec else None
    if spec is None or not hasattr(loader, "get_code"):
        raise DxdyError(f"-m {name}: no such module, or none that can be run. Name one, like package.train.")
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=spec.origin,
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
        __builtins__=builtins,
    )
    found = spec.name
    return Program(main, lambda: loader.get_code(found))


def _first_on_the_path(folder: str) -> None:
    if not sys.flags.safe_path:  # else Python puts nothing there
        sys.path[0] = folder


def run(program: Program) -> BaseException | None:
    """Run a script to its end, and return what ended it: None, or an exception, which was printed as Python does it.

    Like Python at its end this waits for the threads that the script left, unless they are daemons. What was
    registered with ``atexit`` is called when this process ends.
    """
    try:
        exec(program.compiled(), program.main.__dict__)
        # The function is private, and there is no other: the workers of a ThreadPoolExecutor end only by it.
        getattr(threading, "_shutdown", lambda: None)()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return error
    except BaseException as error:
        told = type(error), error, _without_us(error)
        try:
            sys.excepthook(*told)  # the script may have put its own there
        except Exception:
            sys.__excepthook__(*told)
        return error
    return None


def exit_code(error: BaseException | None) -> int:
    """Return the exit code that Python gives to what ended a script; 130 for Ctrl-C, as a shell sees it.

    Examples
    --------
    >>> exit_code(None), exit_code(SystemExit(3)), exit_code(SystemExit("no data")), exit_code(ValueError())
    (0, 3, 1, 1)
    """
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
    return 0 if error is None else 130 if isinstance(error, KeyboardInterrupt) else 1


def _without_us(error: BaseException) -> TracebackType | None:
    """Take this package's frames out of the tracebacks of an error and of those behind it; return the error's own."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _rest(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return error.__traceback__


def _rest(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(PACKAGE + os.sep + "observe"):
            frames.append(trace)
        trace = trace.tb_next
    rest = None
    for frame in reversed(frames):
        rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rest


@contextlib.contextmanager
def when_imported(name: str, tell: Callable[[], None]) -> Iterator[None]:
    """Call a function once, as soon as a module has been imported; now, where it already is.

    A process that is forked inside is not told.
    """
    if name in sys.modules:
        tell()
        yield
        return
    arrival = _Arrival(name, tell)
    sys.meta_path.insert(0, arrival)
    try:
        yield
    finally:
        arrival.leave()


class _Arrival:
    """A finder of modules that finds one as the others do, and tells when it has been imported."""

    def __init__(self, name: str, tell: Callable[[], None]) -> None:
        self._name, self._tell, self._process = name, tell, os.getpid()

    def leave(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or os.getpid() != self._process:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the loader is its own again
                execute(module)
                self.leave()
                self._tell()

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def before_os_exit(tell: Callable[[int], None]) -> Iterator[None]:
    """Call a function with the exit code before ``os._exit`` ends this process; not in one that is forked inside."""
    original, process = os._exit, os.getpid()

    def _exit(status: int) -> None:
        try:
            if os.getpid() == process:
                tell(status)
        finally:
            original(status)

    os._exit = _exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = original
