"""An answer is judged by its first wrong property, the right one is never printed, and no answer ends a lesson."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dxdy_nb import DxdyError
from dxdy_nb.lesson import exercise
from dxdy_nb.lesson.exercise import Exercise, Lesson, Mistake, Note, judge

SECRET = 4.8151623  # digits that stand nowhere else

SOURCE = """
import torch
from dxdy_nb.lesson.exercise import Exercise, Mistake

def double(x):
    return 2 * x

EXERCISES = (
    Exercise("slope", 4.8151623, asks="a rise over a run", mistakes=(Mistake(0.5, "that is the run over the rise."),)),
    Exercise("pair", [1.0, 2.0], asks="two numbers"),
    Exercise("double", double, asks="twice as much", trials=((torch.ones(2),), (torch.tensor([3.0]),))),
    Exercise("order", ["A", "B"], asks="an order", before=(("A", "B", "B reads what A makes."),)),
)
"""


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(exercise, "SOURCES", tmp_path)
    (tmp_path / "07_slopes_exercises.py").write_text(SOURCE)
    return Lesson("07_slopes")


def ask(solution, **more):
    return Exercise("x", solution, asks="what is asked", **more)


# ---- predictions


def test_an_open_question_blocks_nothing(lesson):
    assert lesson.predict("how many?", None).state == "open"
    assert repr(lesson.reveal("how many?", 3)) == "· how many?: you made no prediction. Measured: 3."
    shown = lesson.reveal("how many?", 3)._repr_html_()
    assert "3" not in shown.split("<summary>")[1].split("</summary>")[0], "a result must not spoil the prediction"


def test_a_prediction_stands_beside_what_was_measured(lesson):
    assert repr(lesson.predict("how many?", 3)) == "· how many?: you say 3. Now run on."
    assert repr(lesson.reveal("how many?", 3)) == "✓ how many?: you said 3, measured 3."
    lesson.predict("how long?", 1.0)
    assert repr(lesson.reveal("how long?", 2.0)).startswith("✗ how long?: you said 1, measured 2. Say why")


@pytest.mark.parametrize(
    ("guess", "measured", "right"),
    [
        (100, 104.9, True),
        (100, 106.0, False),
        (-1, 1, False),
        (0, 0.0, True),
        (0, 1e-9, False),
        ("Yes ", "yes", True),
        ("yes", "no", False),
        (3, "3", True),
        (True, True, True),
        (True, False, False),
        (1, True, False),
        (True, torch.tensor(True), True),
        (True, np.bool_(True), True),
        (2.0, torch.tensor(2.01), True),
        ((2, 3), torch.zeros(2, 3).shape, True),
        ([2, 3], (2, 3), True),
        ([2, 3], [3, 2], False),
        ([1.0, 2.0], torch.tensor([1.0, 2.0]), True),
        ([1.0, 2.0], np.array([1.0, 3.0]), False),
        (math.nan, math.nan, False),
        ([1], 1, False),
    ],
)
def test_a_prediction_counts_as_right_when_it_is_near(lesson, guess, measured, right):
    lesson.predict("?", guess)
    assert lesson.reveal("?", measured).right is right


def test_a_question_that_nobody_asked_is_refused_with_the_nearest(lesson):
    lesson.predict("how many?", 3)
    with pytest.raises(DxdyError, match=r"nothing was asked as 'how mny\?'\. Did you mean 'how many\?'"):
        lesson.reveal("how mny?", 3)


def test_the_score_has_all_predictions_in_their_order(lesson):
    lesson.predict("b <i>", 1.5)
    lesson.predict("a", None)
    lesson.reveal("b <i>", 2.0)
    assert repr(lesson.score()).splitlines() == [
        "question   you said   measured",
        "b <i>      1.5        2",
        "a          —          —",
    ]
    assert "b &lt;i&gt;" in lesson.score()._repr_html_()


# ---- lessons and notes


def test_an_unknown_lesson_or_exercise_is_refused_with_the_nearest(lesson):
    with pytest.raises(DxdyError, match=r"no lesson is called '07_slope'\. Did you mean '07_slopes'"):
        Lesson("07_slope")
    with pytest.raises(DxdyError, match=r"07_slopes has no exercise 'slop'\. Did you mean 'slope'"):
        lesson.check("slop", 1)


def test_a_package_without_its_workbook_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(exercise, "SOURCES", tmp_path / "absent")
    with pytest.raises(DxdyError, match="the workbook is not beside the package"):
        Lesson("07_slopes")


def test_a_note_is_safe_to_show():
    assert "&lt;script&gt;" in Note("wrong", "<script>")._repr_html_()
    assert (Note("right", "x").right, Note("open", "x").right) == (True, False)


# ---- what is not tried yet


def untouched(x):
    return ...


def untouched_line(x):
    y = ...
    return x * y


def untouched_argument(x):
    return torch.exp(...)


def untouched_attribute(x):
    y = ...
    return y.sum()


def untouched_entry(x):
    return [x, ...]


def untouched_body(x): ...


def untouched_documented(x):
    """Return twice x."""


UNTOUCHED = [untouched, untouched_line, untouched_argument, untouched_attribute, untouched_entry, untouched_body]


@pytest.mark.parametrize("answer", [*UNTOUCHED, untouched_documented], ids=lambda answer: answer.__name__)
def test_a_function_with_dots_left_is_not_tried_yet(lesson, answer):
    note = lesson.check("double", answer)
    assert note.state == "open"
    assert repr(note) == "· double: not tried yet. Put your own in place of every ..., then run the cell again."


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("slope", ...),
        ("slope", None),
        ("pair", [1.0, ...]),
        ("pair", [[...], 2.0]),
        ("order", ...),
        ("order", ["A", ...]),
    ],
)
def test_an_answer_with_dots_left_is_not_tried_yet(lesson, name, answer):
    assert lesson.check(name, answer).state == "open"


def test_dots_that_are_an_index_are_no_placeholder(lesson):
    assert lesson.check("double", lambda x: 2 * x[...]).right


# ---- values


@pytest.mark.parametrize(
    "answer", [SECRET, SECRET * (1 + 1e-7), torch.tensor(SECRET), np.float64(SECRET), np.float32(SECRET)]
)
def test_a_right_value_is_right_in_whatever_form(lesson, answer):
    assert repr(lesson.check("slope", answer)) == "✓ slope: right."


RIGHT = torch.tensor([[1.0, -2.0, SECRET]])
# Each answer is wrong from one property on; everything after it is wrong as well.
IN_ORDER = [
    ([[math.nan]], "expected a tensor of shape (1, 3), this is a list."),
    (math.nan, "expected a tensor of shape (1, 3), this is a number. Was .item() or float() called too early?"),
    (torch.full((3, 1), math.nan).double(), "expected shape (1, 3), got (3, 1). Which dimension"),
    (torch.full((1, 3), math.nan).double(), "expected dtype torch.float32, got torch.float64. Where"),
    (torch.full((1, 3), math.nan), "it is not finite. Which operation"),
    (torch.zeros(1, 3), "type and shape fit, the value does not. A right answer: what is asked."),
    (-RIGHT, "the sign is the wrong one. A right answer: what is asked."),
]


@pytest.mark.parametrize(("answer", "told"), IN_ORDER)
def test_the_first_wrong_property_is_told(answer, told):
    assert judge(ask(RIGHT), answer).startswith(told)


def test_numbers_are_compared_as_closely_as_the_exercise_asks():
    assert judge(ask(1 / 3, rtol=1e-9), 1 / 3 + 1e-11) is None
    assert judge(ask(1 / 3, rtol=1e-9), 1 / 3 + 1e-8).startswith("type and shape fit")


def test_a_tensor_that_asks_for_gradients_is_as_right_as_one_that_does_not():
    assert judge(ask(RIGHT), RIGHT.clone().requires_grad_()) is None
    assert judge(ask(RIGHT), RIGHT.to_sparse()) is None


@pytest.mark.parametrize(
    ("right", "answer", "told"),
    [
        (2.0, True, "expected a number, this is a bool."),
        (2.0, "2", "expected a number, this is a text."),
        (2.0, 2 + 1j, "expected a number, this is a complex."),
        (2.0, torch.tensor(2 + 1j), "expected dtype torch.float64, got torch.complex64."),
        (2.0, torch.ones(2), "expected shape (), got (2,)."),
        (2.0, math.inf, "it is not finite."),
        (2.0, 10**400, "it is not finite."),
        (2.0, -(10**20), "type and shape fit, the value does not."),
        (2.0, 1e300, "type and shape fit, the value does not."),
        (True, 1, "expected a bool, this is a number."),
        (True, np.bool_(False), "not so. A right answer: what is asked."),
        ("relu", 3, "expected a text, this is a number."),
        ("relu", "tanh", "not so. A right answer: what is asked."),
        ([1.0, 2.0], 1.0, "expected shape (2,), got ()."),
        ([1.0, 2.0], [1.0], "expected 2 entries, got 1."),
        ([1.0, 2.0], [1.0, "b"], "expected a number, this is a text."),
        (["a", "b"], 3, "expected a list, this is a number."),
        (["a", "b"], torch.ones(2), "expected a list, this is a tensor of shape (2,)."),
        ([1.0, 2.0], {1.0, 2.0}, "expected a list, this is a set."),
        (math.inf, 3.0, "type and shape fit, the value does not."),
        (math.nan, 3.0, "type and shape fit, the value does not."),
        (1e-9, 5e-9, "type and shape fit, the value does not."),
        (0.0, 1e-9, "type and shape fit, the value does not."),
    ],
)
def test_a_wrong_answer_of_any_type_is_told_what_is_wrong(right, answer, told):
    assert judge(ask(right), answer).startswith(told)


@pytest.mark.parametrize(
    ("right", "answer"),
    [(2.0, 2), (2, np.int64(2)), (True, True), (False, np.bool_(False)), ("relu", " ReLU "), ([1.0, "a"], (1.0, "A")),
     ((4, 3), [4, 3]), ([1.0, 2.0], torch.tensor([1.0, 2.0])), (math.inf, math.inf), (math.nan, math.nan), (0.0, 0.0)],
)  # fmt: skip
def test_forms_that_mean_the_same_are_right(right, answer):
    assert judge(ask(right), answer) is None


@given(answer=st.floats(allow_nan=True) | st.integers() | st.text() | st.lists(st.floats(width=32)) | st.booleans())
def test_the_right_value_is_never_printed(answer):
    typed = {"4815", "8151", "1516", "5162", "1623"}
    told = judge(ask(SECRET, mistakes=(Mistake(2.0, "twice nothing"),)), answer) or ""
    assert not {part for part in typed if part in told.replace(".", "")}


@pytest.mark.parametrize(("answer", "_"), IN_ORDER)
def test_no_message_has_the_digits_of_the_right_tensor(answer, _):
    assert "815" not in judge(ask(RIGHT), answer)


# ---- mistakes


def test_a_typical_mistake_is_told_what_it_is(lesson):
    assert repr(lesson.check("slope", 0.5)) == "✗ slope: that is the run over the rise."


def test_the_first_mistake_that_fits_is_told():
    asked = ask(1.0, mistakes=(Mistake(2.0, "one"), Mistake(3.0, "two"), Mistake(3.0, "three")))
    assert judge(asked, 3.0) == "two"


@pytest.mark.parametrize("odd", ["a text", None, [1, 2], torch.ones(3), {"a": 1}, ValueError("no"), math.nan])
def test_a_mistake_of_another_type_does_not_disturb(odd):
    assert judge(ask(1.0, mistakes=(Mistake(odd, "odd"), Mistake(2.0, "two"))), 2.0) == "two"


# ---- functions

TRIALS = ((torch.tensor([1.0, 2.0]),), (torch.tensor([-3.0]),))
DOUBLE = ask(lambda x: 2 * x, trials=TRIALS, mistakes=(Mistake(lambda x: x * x, "that is a square."),))


def test_a_right_function_is_right():
    assert judge(DOUBLE, lambda x: x + x) is None


def test_a_function_that_is_right_once_only_is_wrong():
    assert judge(DOUBLE, lambda x: 2 * x if len(x) > 1 else x).startswith("type and shape fit")


def test_a_mistaken_function_is_told_what_it_does():
    assert judge(DOUBLE, lambda x: x**2) == "that is a square."


def fails(x):
    raise IndexError("dimension out of range\nmore of it")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (3.0, "a function is asked for, this is a number. Hand over its name, without calling it."),
        (fails, "it raised IndexError: dimension out of range"),
        (lambda x: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda: 3, "it raised TypeError: "),
        (lambda x: print(end=""), "it returns None. Does it end with return?"),
        (lambda x: None if len(x) > 1 else 2 * x, "expected a tensor of shape (2,), this is None."),
        (lambda x: 2 * x.sum(), "expected shape (2,), got ()."),
        (lambda x: 2 * x.double(), "expected dtype torch.float32, got torch.float64."),
        (lambda x: x / 0, "it is not finite."),
        (lambda x: "text", "expected a tensor of shape (2,), this is a text."),
    ],
)
def test_a_wrong_function_is_told_what_is_wrong(answer, told):
    assert judge(DOUBLE, answer).startswith(told)


def test_a_mistake_that_raises_does_not_disturb():
    asked = ask(lambda x: 2 * x, trials=TRIALS, mistakes=(Mistake(fails, "fails"), Mistake(lambda x: x, "unchanged.")))
    assert judge(asked, lambda x: 1 * x) == "unchanged."


def test_what_an_answer_changes_in_place_is_not_judged_against_itself():
    def spoil(values, x, layer):
        values.clear()
        x.zero_()
        torch.nn.init.zeros_(layer.weight)
        return x.sum() + layer.weight.detach().sum() + len(values)

    def right(values, x, layer):
        return x.sum() + layer.weight.detach().sum() + len(values)

    trials = (([1, 2], torch.ones(3), torch.nn.Linear(2, 2)),)
    assert judge(ask(right, trials=trials), spoil).startswith("type and shape fit")
    assert judge(ask(right, trials=trials), right) is None


def test_a_trial_keeps_asking_for_gradients():
    def slope(x):
        (x**3).sum().backward()
        return x.grad

    x = torch.tensor([2.0], requires_grad=True)
    assert judge(ask(lambda x: 3 * x.detach() ** 2, trials=((x,),)), slope) is None
    assert x.grad is None


# ---- orders

ORDER = ask(
    ["A", "B", "C"],
    before=(("A", "B", "B reads what A makes."), ("A", "C", "C reads what A makes.")),
)


@pytest.mark.parametrize("answer", [["A", "B", "C"], ("A", "C", "B")])
def test_every_order_that_keeps_the_constraints_is_right(answer):
    assert judge(ORDER, answer) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["B", "A", "C"], "B reads what A makes."),
        (["C", "A", "B"], "C reads what A makes."),
        (["A", "B"], "every line is used once; missing here: C."),
        (["A", "B", "B"], "every line is used once; missing here: C."),
        (["A", "B", "C", "B"], "every line is used once; 'B' should not be there (again)."),
        (["A", "D", "B", "C"], "every line is used once; 'D' should not be there (again)."),
        ("ABC", "a list of lines in order is asked for, this is a text."),
        ([["A"], ["B"], ["C"]], "every line is used once; missing here: A, B, C."),
    ],
)
def test_a_wrong_order_is_told_which_constraint_it_breaks(answer, told):
    assert judge(ORDER, answer) == told


def test_numbered_lines_may_be_given_as_numbers():
    asked = ask(["1", "2"], before=(("1", "2", "two reads what one makes."),))
    assert judge(asked, [1, 2]) is None
    assert judge(asked, [2, 1]) == "two reads what one makes."
