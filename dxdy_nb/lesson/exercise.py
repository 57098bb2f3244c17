"""Predictions that stand beside results, and checks that say what is wrong without saying the answer."""

import copy
import html
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dxdy_nb.errors import DxdyError, suggestion

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"
LONGEST = 200  # characters of an answer that are shown
COLOURS = {"right": "#1b7837", "wrong": "#b2182b", "open": "#5e6a75"}


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer, and what to tell the person who gives it.

    Parameters
    ----------
    answer : a value, or a function that is tried on the same arguments as the reader's
    message : which property is violated, and what to look at next
    """

    answer: Any
    message: str


@dataclass(frozen=True)
class Exercise:
    """One question of a lesson with everything that is needed to judge an answer.

    Parameters
    ----------
    name : how the lesson's cell calls it
    solution : the right value, or a right function
    asks : the property a right answer has; it is what a reader with a wrong value is told
    trials : for a function, the argument tuples it is tried on
    mistakes : typical wrong answers, each with its own message
    before : for an ordering, ``(first, then, why)`` triples; every order that keeps them all is right
    rtol : relative tolerance of the value
    """

    name: str
    solution: Any
    asks: str
    trials: tuple[tuple[Any, ...], ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    before: tuple[tuple[str, str, str], ...] = ()
    rtol: float = 1e-6


@dataclass(frozen=True)
class Note:
    """A short message to the reader: coloured in a notebook, plain text anywhere else.

    Examples
    --------
    >>> Note("right", "centred: right.")
    ✓ centred: right.
    """

    state: str
    text: str
    folded: str = ""  # what a notebook shows only when it is asked: a result before its prediction would spoil it

    @property
    def right(self) -> bool:
        """True for an accepted answer."""
        return self.state == "right"

    def __repr__(self) -> str:
        return " ".join(filter(None, ({"right": "✓", "wrong": "✗", "open": "·"}[self.state], self.text, self.folded)))

    def _repr_html_(self) -> str:
        style = f"border-left:4px solid {COLOURS[self.state]};padding:2px 10px"
        shown = html.escape(repr(Note(self.state, self.text)))
        if self.folded:
            shown = f"<details><summary>{shown}</summary>{html.escape(self.folded)}</details>"
        return f'<div style="{style}">{shown}</div>'


@dataclass(frozen=True)
class Score:
    """All predictions of a lesson beside what was measured: a table, ``predictions`` in the order they were made."""

    predictions: tuple[tuple[str, Any, Any], ...]

    def __repr__(self) -> str:
        rows = [("question", "you said", "measured"), *((q, _show(g), _show(m)) for q, g, m in self.predictions)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("   ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        cells = (
            "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in (q, _show(g), _show(m)))
            for q, g, m in self.predictions
        )
        head = "".join(f"<th style='text-align:left'>{text}</th>" for text in ("question", "you said", "measured"))
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


@dataclass
class Lesson:
    """The predictions and exercises of one lesson, held by the notebook under a name of its own.

    Parameters
    ----------
    name : the notebook's name without its ending; its exercises stand beside its source

    Raises
    ------
    DxdyError
        There is no such lesson.

    Examples
    --------
    >>> lesson = Lesson("02_hand_check")
    >>> lesson.predict("dy/dx at 5", None)
    · dy/dx at 5: no prediction yet. Put yours in place of None; then run on.
    """

    name: str
    guesses: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    exercises: dict[str, Exercise] = field(init=False)

    def __post_init__(self) -> None:
        self.exercises = {exercise.name: exercise for exercise in load_exercises(self.name)}

    def predict(self, question: str, guess: Any) -> Note:
        """Keep the reader's guess until the result is there; ``None`` leaves the question open and blocks nothing."""
        self.guesses[question] = (guess, None)
        if guess is None:
            return Note("open", f"{question}: no prediction yet. Put yours in place of None; then run on.")
        return Note("open", f"{question}: you say {_show(guess)}. Now run on.")

    def reveal(self, question: str, measured: Any) -> Note:
        """Show what was measured beside what was predicted.

        Numbers count as right within 5 % (and zero exactly), words without regard to case.
        """
        if question not in self.guesses:
            raise DxdyError(f"nothing was asked as {question!r}.{suggestion(question, self.guesses)}")
        guess, _ = self.guesses[question]
        self.guesses[question] = (guess, measured)
        if guess is None:
            return Note("open", f"{question}: you made no prediction.", f"Measured: {_show(measured)}.")
        if _agrees(guess, measured):
            return Note("right", f"{question}: you said {_show(guess)}, measured {_show(measured)}.")
        return Note(
            "wrong", f"{question}: you said {_show(guess)}, measured {_show(measured)}. Say why before you go on."
        )

    def check(self, name: str, answer: Any) -> Note:
        """Judge an answer: attempted, type, shape, dtype, finite, value, in this order; the first that fails is told.

        The right value is never printed.
        """
        if name not in self.exercises:
            raise DxdyError(f"{self.name} has no exercise {name!r}.{suggestion(name, self.exercises)}")
        exercise = self.exercises[name]
        try:
            if _untouched(exercise, answer):
                text = f"{name}: not tried yet. Put your own in place of every ..., then run the cell again."
                return Note("open", text)
            problem = judge(exercise, answer)
        except Exception as error:  # a list within itself, an object that cannot be compared: no answer ends a lesson
            problem = f"this cannot be judged ({type(error).__name__}). Hand over {_kind(exercise.solution)}."
        return Note("wrong", f"{name}: {problem}") if problem else Note("right", f"{name}: right.")

    def score(self) -> Score:
        """Return all predictions of this lesson beside their results."""
        return Score(tuple((question, *pair) for question, pair in self.guesses.items()))


def load_exercises(lesson: str) -> Sequence[Exercise]:
    """Return the exercises that stand beside a lesson's source.

    Raises
    ------
    DxdyError
        There is no such lesson, or the workbook is not beside the package.
    """
    path = SOURCES / f"{lesson}_exercises.py"
    if not path.exists():
        known = [p.stem.removesuffix("_exercises") for p in SOURCES.glob("*_exercises.py")]
        if not known:
            raise DxdyError(f"the workbook is not beside the package: {SOURCES} has no lessons. Install with make lab.")
        raise DxdyError(f"no lesson is called {lesson!r}.{suggestion(lesson, known)}")
    spec = importlib.util.spec_from_file_location(f"exercises_{lesson}", path)
    assert spec is not None and spec.loader is not None  # a path that exists always has a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES


def judge(exercise: Exercise, answer: Any) -> str | None:
    """Return what is wrong with an answer, or None when it is right.

    Examples
    --------
    >>> slope = Exercise("slope", 4.0, asks="dy/dx of (x-3)² is 2(x-3)")
    >>> judge(slope, -4.0)
    'the sign is the wrong one. A right answer: dy/dx of (x-3)² is 2(x-3).'
    >>> judge(slope, 4.0) is None
    True
    """
    if exercise.before:
        return _judge_order(exercise, answer)
    if callable(exercise.solution):
        return _judge_function(exercise, answer)
    problem = _differs(exercise, answer, exercise.solution)
    if problem is None:
        return None
    for mistake in exercise.mistakes:
        if _differs(exercise, answer, mistake.answer) is None:
            return mistake.message
    return problem


def _judge_function(exercise: Exercise, answer: Any) -> str | None:
    if not callable(answer):
        return f"a function is asked for, this is {_kind(answer)}. Hand over its name, without calling it."
    outcomes = [_call(answer, arguments) for arguments in exercise.trials]
    raised = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if raised is not None:
        return f"it raised {type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else 'no message'}"
    if all(outcome is None for outcome in outcomes):
        return "it returns None. Does it end with return?"
    rights = [_call(exercise.solution, arguments) for arguments in exercise.trials]
    problems = [_differs(exercise, mine, right) for mine, right in zip(outcomes, rights, strict=True)]
    problem = next((found for found in problems if found), None)
    if problem is None:
        return None
    for mistake in exercise.mistakes:
        same = [_call(mistake.answer, arguments) for arguments in exercise.trials]
        if all(_differs(exercise, mine, wrong) is None for mine, wrong in zip(outcomes, same, strict=True)):
            return mistake.message
    return problem


def _judge_order(exercise: Exercise, answer: Any) -> str | None:
    if not isinstance(answer, (list, tuple)):
        return f"a list of lines in order is asked for, this is {_kind(answer)}."
    lines = [str(line) for line in answer]
    if sorted(lines) != sorted(exercise.solution):
        missing = [line for line in exercise.solution if line not in lines]
        if missing:
            return f"every line is used once; missing here: {', '.join(missing)}."
        extra = next(line for line in lines if line not in exercise.solution or lines.count(line) > 1)
        return f"every line is used once; {extra!r} should not be there (again)."
    place = {line: lines.index(line) for line in exercise.solution}
    return next((why for first, then, why in exercise.before if place[first] > place[then]), None)


def _untouched(exercise: Exercise, answer: Any) -> bool:
    """Return whether the placeholder ``...`` is still there: as the answer, in it, or in the function's body."""
    if answer is None or _holds_dots(answer):
        return True
    if not callable(answer) or not exercise.trials:
        return False
    outcome = _call(answer, exercise.trials[0])
    code = getattr(answer, "__code__", None)
    empty = outcome is None and code is not None and len(code.co_code) <= len(_empty.__code__.co_code)
    inside = isinstance(outcome, (TypeError, AttributeError)) and "ellipsis" in str(outcome).lower()
    return empty or inside or _holds_dots(outcome)


def _empty() -> None: ...


def _holds_dots(value: Any) -> bool:
    return value is ... or (isinstance(value, (list, tuple)) and any(map(_holds_dots, value)))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a function's result, or the exception: the reader's mistake must not end the lesson."""
    try:
        fresh = copy.deepcopy(arguments)  # what one function changes in place, the next one must not see
    except TypeError:  # what cannot be copied, like a node of a graph, cannot be changed either
        fresh = arguments
    try:
        return function(*fresh)
    except (Exception, SystemExit) as error:
        return error


def _differs(exercise: Exercise, answer: Any, right: Any) -> str | None:
    """Return the first property in which an answer differs from the right one."""
    if isinstance(answer, np.generic):
        answer = answer.item()
    if isinstance(right, (str, bool)) or right is None:
        if type(answer) is not type(right):
            return f"expected {_kind(right)}, this is {_kind(answer)}."
        same = str(answer).strip().casefold() == right.casefold() if isinstance(right, str) else answer is right
        return None if same else f"not so. A right answer: {exercise.asks}."
    if isinstance(right, (list, tuple)) and isinstance(answer, (list, tuple)):
        if len(answer) != len(right):
            return f"expected {len(right)} entries, got {len(answer)}."
        return next((p for a, r in zip(answer, right, strict=True) if (p := _differs(exercise, a, r))), None)
    return _differs_in_number(exercise, answer, right)


def _differs_in_number(exercise: Exercise, answer: Any, right: Any) -> str | None:
    if isinstance(answer, bool) or not (torch.is_tensor(answer) or isinstance(answer, (int, float))):
        return f"expected {_kind(right)}, this is {_kind(answer)}."
    if torch.is_tensor(right) and not torch.is_tensor(answer):
        return f"expected {_kind(right)}, this is {_kind(answer)}. Was .item() or float() called too early?"
    try:
        r = _as_tensor(right)
    except (TypeError, ValueError, RuntimeError):  # words, or whatever a typical mistake gives instead of a number
        return f"expected {_kind(right)}, this is {_kind(answer)}."
    a = _as_tensor(answer)
    if a.shape != r.shape:
        return f"expected shape {tuple(r.shape)}, got {tuple(a.shape)}. Which dimension was summed, kept or added?"
    if (torch.is_tensor(right) or a.is_complex()) and a.dtype != r.dtype:
        return f"expected dtype {r.dtype}, got {a.dtype}. Where did the dtype change?"
    a, r = a.double(), r.double()
    if not bool(torch.isfinite(a).all()) and bool(torch.isfinite(r).all()):
        return "it is not finite. Which operation makes the first inf or nan?"
    known = r[torch.isfinite(r)].abs()
    scale = max(float(known.max()) if known.numel() else 0.0, 1e-12)
    if torch.allclose(a, r, rtol=exercise.rtol, atol=exercise.rtol * scale, equal_nan=True):
        return None
    turned = torch.allclose(a, -r, rtol=1e-3, atol=0)
    seen = "the sign is the wrong one" if turned else "type and shape fit, the value does not"
    return f"{seen}. A right answer: {exercise.asks}."


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, (int, float)):  # float64, as precise as Python's own numbers
        return torch.tensor(math.inf if abs(value) > sys.float_info.max else value, dtype=torch.float64)
    return torch.as_tensor(value).detach().to_dense()


def _agrees(guess: Any, measured: Any) -> bool:
    try:
        return _near(guess, measured)
    except Exception:  # whatever cannot be compared does not agree
        return False


def _near(guess: Any, measured: Any) -> bool:
    guess, measured = _plain(guess), _plain(measured)
    if isinstance(measured, str) or isinstance(guess, str):
        return str(guess).strip().casefold() == str(measured).strip().casefold()
    if isinstance(measured, bool) or isinstance(guess, bool):
        return guess is measured
    try:
        return math.isclose(float(guess), float(measured), rel_tol=0.05)
    except (TypeError, ValueError, OverflowError):
        return bool(guess == measured)


def _plain(value: Any) -> Any:
    """Return what tensors, arrays and tuples hold, as numbers and lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _kind(value: Any) -> str:
    if torch.is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    names = {float: "a number", int: "a number", str: "a text", list: "a list", tuple: "a tuple", type(None): "None"}
    return names.get(type(value), f"a {type(value).__name__}")


def _show(value: Any) -> str:
    if value is None:
        return "—"
    try:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    except Exception:  # of an object, of a number with too many digits, of a list thousands deep
        return f"{_kind(value)} that cannot be shown"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
