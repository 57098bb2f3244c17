"""A lesson through papermill: checked before it starts, recorded like any other run."""

import ast
import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dxdy_nb.config import as_number
from dxdy_nb.errors import DxdyError, suggestion
from dxdy_nb.runs import record
from dxdy_nb.runs.environment import variable

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELL_TIMEOUT = 1800  # seconds: a cell that takes longer hangs


@dataclass(frozen=True)
class LessonRun:
    """One executed lesson: its status, its named results, and where the executed copy lies.

    ``failure`` is the failed cell and its error, for people; None when nothing failed. ``bad_input`` is true where the
    error was one that the reader can put right: a value out of range, a damaged data file.
    """

    lesson: str
    status: str
    seconds: float
    notebook: Path
    metrics: Mapping[str, Any]
    failure: str | None = None
    bad_input: bool = False


def names() -> list[str]:
    """Return the names of all lessons, in their order.

    Raises
    ------
    DxdyError
        The workbook is not beside the package.
    """
    found = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise DxdyError(
            f"{NOTEBOOKS}: no lessons there. The workbook comes with its repository; install it with make lab."
        )
    return found


def resolve(lesson: str) -> Path:
    """Return a lesson's notebook by its name, its number, or its file name.

    Raises
    ------
    DxdyError
        There is no such lesson; the nearest name is suggested.

    Examples
    --------
    >>> resolve("02").stem
    '02_hand_check'
    """
    known = names()
    wanted = Path(lesson).stem if lesson.endswith(".ipynb") else lesson
    exact = [name for name in known if wanted in (name, name[:2], name[:2].lstrip("0") or "0", name[3:])]
    if exact:
        found = NOTEBOOKS / f"{exact[0]}.ipynb"
        if wanted != lesson and os.path.dirname(lesson) and Path(lesson).resolve() != found.resolve():
            raise DxdyError(f"{lesson}: is not in the workbook, {NOTEBOOKS}. Its own lesson is called {exact[0]!r}.")
        return found
    close = difflib.get_close_matches(wanted, [*known, *(name[3:] for name in known)], n=1, cutoff=0.5)
    near = next((name for name in known if close and close[0] in (name, name[3:])), None)
    hint = f" Did you mean {near!r}?" if near else suggestion(wanted, known)
    raise DxdyError(f"no lesson is called {lesson!r}.{hint}")


def parameters(notebook: Path) -> dict[str, Any]:
    """Return the names and default values in a lesson's parameters cell, which holds plain literals only.

    Raises
    ------
    DxdyError
        The file is no notebook, or its parameters cell computes something.
    """
    import nbformat  # it builds a grammar when it is loaded, which takes as long as a short training

    restore = f"Restore it with: git checkout -- {notebook.parent.name}/{notebook.name}"
    try:
        cells = nbformat.read(notebook, as_version=4).cells
        source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
    except Exception as error:  # nbformat has many ways to say that a file is damaged
        raise DxdyError(f"{notebook}: cannot be read as a notebook ({type(error).__name__}). {restore}") from None
    found = {}
    try:
        for line in ast.parse(source).body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                found[line.targets[0].id] = ast.literal_eval(line.value)
    except (SyntaxError, ValueError) as error:
        raise DxdyError(f"{notebook}: its parameters cell holds more than values ({error}). {restore}") from None
    return found


def typed(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return given parameters with the types of the lesson's own.

    Raises
    ------
    DxdyError
        Unknown names and values of another type: all of them, a line each.
    """
    known, values, problems = parameters(notebook), {}, []
    for name, value in given.items():
        if name not in known:
            problems.append(f"{notebook.stem} has no parameter {name!r}.{suggestion(name, known)}")
            continue
        values[name], problem = _like(known[name], value)
        if problem:
            problems.append(f"{notebook.stem}: {name}: expected {problem}, like {known[name]!r}; got {value!r}")
    if problems:
        raise DxdyError("\n".join(problems))
    return values


def run(lesson: str, given: Mapping[str, Any], out: str | Path | None = None) -> LessonRun:
    """Execute a lesson with parameters and record it; a failing cell ends it, and the record says which.

    Raises
    ------
    DxdyError
        Before anything starts: an unknown lesson or parameter, a value of the wrong type, a folder that cannot be
        written.
    KeyboardInterrupt
        After the record says ``interrupted``.
    """
    return run_notebook(resolve(lesson), given, out)


def run_notebook(notebook: Path, given: Mapping[str, Any], out: str | Path | None = None) -> LessonRun:
    """Execute and record a notebook that has a parameters cell, as ``run`` does it with a lesson."""
    values = typed(notebook, given)
    folder = record.new_folder(notebook.stem, out)
    target = folder / "notebook.ipynb"
    failed = None
    recorder = record.Recorder(folder, kind="lesson", lesson=notebook.stem, metrics={})
    with contextlib.suppress(_LessonFailed), recorder:
        record.write_environment(folder)
        write_parameters(folder, {**parameters(notebook), **values})
        try:
            # Kernels that start inside inherit where the lesson's record is, and whose the runs are that they make.
            with variable(record.LESSON_FOLDER, str(folder.resolve())), variable(record.PARENT, _id(folder.resolve())):
                _execute(notebook, target, values)
        except _LessonFailed as error:
            failed = error
            raise
        finally:
            with contextlib.suppress(DxdyError):  # a folder that is gone has no results
                recorder.result["metrics"] = record.read_result(folder).get("metrics", {})
    if failed:
        recorder.write(status=failed.status)
    result = recorder.result
    failure, bad_input = (str(failed), failed.bad_input) if failed else (None, False)
    return LessonRun(notebook.stem, result["status"], result["seconds"], target, result["metrics"], failure, bad_input)


def _id(folder: Path) -> str:
    """Return what the list of runs calls a run."""
    return f"{folder.parent.name}/{folder.name}" if folder.parent.name == os.environ.get(record.PARENT) else folder.name


class _LessonFailed(Exception):
    """A cell failed, or the kernel died; the text is for the reader."""

    def __init__(self, text: str, status: str = "failed", *, bad_input: bool = False) -> None:
        super().__init__(text)
        self.status, self.bad_input = status, bad_input


def _execute(notebook: Path, target: Path, values: Mapping[str, Any]) -> None:
    """Run papermill, and turn the ways in which a lesson can fail into one."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.iorw import papermill_io

    papermill_io.register(str(target), _ExecutedCopy(target))
    try:
        papermill.execute_notebook(
            *(str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, target)),  # a path is a template
            parameters=dict(values),
            kernel_name="python3",
            progress_bar={"desc": notebook.stem, "unit": "cell", "leave": False, "disable": None},
            execution_timeout=CELL_TIMEOUT,
            # Else every kernel warns that what it sends over loopback is not encrypted.
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
        )
    except papermill.PapermillExecutionError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        if error.ename == DxdyError.__name__:
            raise _LessonFailed(error.evalue, bad_input=True) from None
        text = _story(error.cell_index, error.source, f"{error.ename}: {error.evalue}")
        raise _LessonFailed(text, record.status_named([error.ename], error.evalue)) from None
    except DeadKernelError:
        raise _LessonFailed("the kernel died. Was it killed, or out of memory?", "killed") from None
    except (RuntimeError, NoSuchKernel) as error:  # what a cell raises comes as papermill's own error
        raise _LessonFailed(f"the kernel did not start: {error}. Install the workbook anew with make lab.") from None
    except CellTimeoutError as error:
        text = f"a cell took longer than {CELL_TIMEOUT} s. {str(error).splitlines()[0]}"
        raise _LessonFailed(text, "timed_out") from None


class _ExecutedCopy:
    """Writes the executed copy for papermill: whole or not at all, and a disk that is full does not end the lesson."""

    def __init__(self, target: Path) -> None:
        self._target = target.absolute()
        self._told = False

    def write(self, text: str, path: str) -> None:
        try:
            record.write_text(self._target, text)
        except OSError as error:
            if not self._told:
                self._told = True
                warnings.warn(
                    f"{path}: {error.strerror}. The lesson goes on; what it showed after this is not in the copy.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def pretty_path(self, path: str) -> str:
        return path


def _story(index: int, source: str, error: str) -> str:
    code = "\n".join(f"    {line}" for line in source.splitlines())
    return f"cell {index} failed:\n{code}\n{error}"


def _like(default: Any, value: Any) -> tuple[Any, str | None]:
    """Return a value as the type of a default, and what was expected where it is none."""
    if isinstance(default, bool):
        return value, None if isinstance(value, bool) else "true or false"
    if isinstance(default, (int, float)):
        kind, number = type(default), as_number(value)
        fits = isinstance(number, (int, float)) and not isinstance(number, bool)
        fits = fits and abs(number) <= sys.float_info.max and number == kind(number)  # neither infinite nor NaN
        return (kind(number), None) if fits else (value, "a whole number" if kind is int else "a number")
    if isinstance(default, str):
        return value, None if isinstance(value, str) else "a text"
    return value, None if isinstance(value, type(default)) else f"a {type(default).__name__}"


def write_parameters(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the parameters of a lesson's run as its ``config.yaml``.

    Raises
    ------
    DxdyError
        The folder cannot be written.
    """
    import yaml

    try:
        record.write_text(folder / "config.yaml", yaml.safe_dump(dict(values), sort_keys=False))
    except OSError as error:
        raise DxdyError(f"{folder}: cannot be written ({error.strerror}). Give a folder that can be.") from None
