"""Every lesson has what `lessons.md` of this project asks of a lesson; its exercises judge as they should."""

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import nbformat
import pytest
import torch

from dxdy_nb.lesson.exercise import Exercise, Lesson, judge, load_exercises
from dxdy_nb.runs import lessons

STRIP = ("data", "forward", "loss", "backward", "update", "comm")
NAMES = lessons.names()


class Notebook:
    """A lesson as a test reads it: all its markdown, its code cells, their tags."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cells = nbformat.read(lessons.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
        self.markdown = "\n\n".join(cell.source for cell in self.cells if cell.cell_type == "markdown")
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]

    def tagged(self, tag: str) -> list:
        return [cell for cell in self.code if tag in cell.metadata.get("tags", [])]

    def section(self, heading: str) -> str:
        """Return the markdown from a heading to the next one of its level or above."""
        level = heading.split(" ")[0]
        found = re.search(rf"^{re.escape(heading)}\b.*?(?=^#{{1,{len(level)}}} |\Z)", self.markdown, re.M | re.S)
        assert found, f"{self.name} has no section {heading!r}"
        return found.group()

    def checks(self, *, worked: bool = True) -> dict[str, tuple[str, int]]:
        """Return, for each exercise that a cell checks, the checked expression and the cell's number.

        A worked example is checked too, and is right as it stands; ``worked=False`` leaves it out.
        """
        found = {}
        for number, cell in enumerate(self.cells):
            if cell.cell_type == "code":
                for call in calls(cell.source, "check"):
                    name = call.args[0].value
                    if worked or f"✓ {name}: right" not in text_of(cell):
                        found[name] = (ast.unparse(call.args[1]), number)
        return found


def text_of(cell: nbformat.NotebookNode) -> str:
    """Return the plain text that a code cell left."""
    return "\n".join(o.get("data", {}).get("text/plain", "") + o.get("text", "") for o in cell.outputs)


def calls(source: str, method: str) -> list[ast.Call]:
    """Return the calls ``lesson.method(...)`` of a cell."""
    tree = ast.parse(re.sub(r"\bawait\b", "", source))
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == f"lesson.{method}"
    ]


@pytest.fixture(params=NAMES)
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(request.param)


def test_the_card_says_what_the_lesson_is_for(notebook: Notebook) -> None:
    card = notebook.cells[0].source
    assert re.match(rf"# {notebook.name[:2]} · \S", card)
    for label in ("Question.", "You will", "Know before.", "Minutes.", "Last verified."):
        assert re.search(rf"^\*\*{re.escape(label)}\*\*", card, re.M), label
    objectives = re.search(r"\*\*You will\*\*.*?\n((?:\s*[-*] .*\n(?:  .*\n)*)+)", card)
    assert objectives and 3 <= len(re.findall(r"^\s*[-*] ", objectives.group(1), re.M)) <= 5
    assert int(re.search(r"\*\*Minutes\.\*\*\s*(\d+)", card).group(1)) <= 45
    assert f"torch {torch.__version__.split('+')[0]}" in card


def test_the_strip_marks_the_lessons_stage(notebook: Notebook) -> None:
    lines = [line for line in notebook.cells[0].source.splitlines() if line.count("→") == 5]
    assert len(lines) == 1
    assert tuple(word.strip(" *") for word in lines[0].split("→")) == STRIP
    assert "**" in lines[0]


def test_it_begins_with_recall(notebook: Notebook) -> None:
    first = notebook.name.startswith("00")
    text = notebook.section("## Self-test" if first else "## Recall")
    questions = len(re.findall(r"<details>", text))
    assert questions == 10 if first else 2 <= questions <= 3


def test_it_has_one_parameters_cell_of_plain_literals(notebook: Notebook) -> None:
    cells = notebook.tagged("parameters")
    assert len(cells) == 1
    assigned = ast.parse(cells[0].source).body
    assert all(isinstance(line, ast.Assign) for line in assigned)
    assert [ast.literal_eval(line.value) for line in assigned]  # raises for anything but a literal
    assert "seed" in lessons.parameters(lessons.NOTEBOOKS / f"{notebook.name}.ipynb")


def test_every_prediction_is_asked_before_it_is_revealed(notebook: Notebook) -> None:
    asked: list[str] = []
    revealed: list[str] = []
    for cell in notebook.code:
        for call in calls(cell.source, "predict"):
            assert call.args[1].value is None, "the reader's own prediction stands in place of None"
            asked.append(call.args[0].value)
        for call in calls(cell.source, "reveal"):
            assert call.args[0].value in asked
            revealed.append(call.args[0].value)
    assert asked and sorted(asked) == sorted(revealed)


def test_the_torch_code_is_in_the_open(notebook: Notebook) -> None:
    code = "\n".join(cell.source for cell in notebook.code)
    for idea in (r"\.backward\(", r"zero_grad\(", r"optimizer\.step\(", r"loss\w* = "):
        assert re.search(idea, code), idea


def test_a_hand_check_asserts_its_tolerance(notebook: Notebook) -> None:
    code = "\n".join(cell.source for cell in notebook.code)
    assert re.search(r"^\s*assert .*(abs|allclose|isclose)", code, re.M)
    assert re.search(r"float64|\.double\(", code)
    assert "finite difference" in notebook.markdown.lower() or "centred difference" in notebook.markdown.lower()


def test_cells_are_short(notebook: Notebook) -> None:
    lengths = [len(cell.source.splitlines()) for cell in notebook.code]
    assert max(lengths) <= 25
    assert sorted(lengths)[len(lengths) // 2] <= 6


def test_the_exercises_have_three_levels_and_an_ordering(notebook: Notebook) -> None:
    for level in ("worked", "faded", "own"):
        assert re.search(rf"^### Exercise · {level}\b", notebook.markdown, re.M), level
    assert any(exercise.before for exercise in load_exercises(notebook.name))


def test_every_exercise_of_the_lesson_is_checked_and_has_hints_and_a_solution(notebook: Notebook) -> None:
    assert set(notebook.checks()) == {exercise.name for exercise in load_exercises(notebook.name)}
    for name, (_, cell) in notebook.checks(worked=False).items():
        help_text = notebook.cells[cell + 1].source
        for step in ("Hint 1", "Hint 2", f"Solution: {name}"):
            assert f"<summary>{step}</summary>" in help_text, f"{name}: {step}"
        assert help_text.index("Hint 1") < help_text.index("Hint 2") < help_text.index("Solution:")


def test_an_untouched_exercise_is_open_and_says_what_to_do(notebook: Notebook) -> None:
    text = "\n".join(text_of(cell) for cell in notebook.code)
    untouched = notebook.checks(worked=False)
    assert len(untouched) >= 2
    for name in untouched:
        assert f"· {name}: not tried yet" in text


def test_the_solution_that_the_lesson_shows_is_right(notebook: Notebook) -> None:
    lesson = Lesson(notebook.name)
    for name, (expression, cell) in notebook.checks(worked=False).items():
        shown = notebook.cells[cell + 1].source.split(f"Solution: {name}")[1]
        code = re.search(r"```python\n(.*?)```", shown, re.S).group(1)
        namespace = {"torch": torch, "math": importlib.import_module("math")}
        exec(textwrap.dedent(code), namespace)
        note = lesson.check(name, eval(expression, namespace))
        assert note.right, f"{name}: {note}"


def all_exercises() -> list[tuple[str, Exercise]]:
    return [(name, exercise) for name in NAMES for exercise in load_exercises(name)]


@pytest.mark.parametrize(("lesson", "exercise"), all_exercises(), ids=lambda v: getattr(v, "name", v))
def test_a_typical_wrong_answer_gets_its_own_message(lesson: str, exercise: Exercise) -> None:
    assert judge(exercise, exercise.solution) is None
    assert exercise.mistakes or exercise.before
    for mistake in exercise.mistakes:
        assert judge(exercise, mistake.answer) == mistake.message
    for first, then, why in exercise.before:
        order = [line for line in exercise.solution if line not in (first, then)]
        told = judge(exercise, [then, first, *order])
        assert told is not None
        assert why in {reason for _, _, reason in exercise.before}
    messages = [mistake.message for mistake in exercise.mistakes] + [why for _, _, why in exercise.before]
    assert len(set(messages)) == len(messages)
    if isinstance(exercise.solution, float):
        assert not any(f"{exercise.solution:g}" in message for message in messages), "the answer must not be printed"


def test_a_deliberate_break_shows_torchs_own_error(notebook: Notebook) -> None:
    assert any(
        re.search(r"except (RuntimeError|\(?[A-Z]\w*Error)", cell.source)
        and re.search(r"Error", "".join(o.get("text", "") for o in cell.outputs))
        for cell in notebook.code
    )


def test_gradients_are_seen_live_and_a_picture_is_left(notebook: Notebook) -> None:
    cell = next(cell for cell in notebook.code if "dx.live(" in cell.source)
    assert "await" in cell.source and "yield" in "\n".join(c.source for c in notebook.code)
    assert any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_pictures_carry_a_text_without_digits(notebook: Notebook) -> None:
    pictures = [o.data for cell in notebook.code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
    for data in pictures:
        assert len(data["text/plain"]) > 10
        assert not re.search(r"\d", data["text/plain"])


def test_few_outputs_go_unchecked(notebook: Notebook) -> None:
    assert len(notebook.tagged("nbval-ignore-output")) <= 3
    assert not notebook.tagged("raises-exception")


def test_the_exit_ticket_has_three_quiz_items_with_reasons_and_an_open_task(notebook: Notebook) -> None:
    ticket = notebook.section("## Exit ticket")
    items = re.split(r"\*\*Quiz \d\.\*\*", ticket.split("**Open task.**")[0])[1:]
    assert len(items) == 3
    for item in items:
        reasons = re.findall(r"<summary>.*?</summary>\s*(.*?)</details>", item, re.S)
        assert len(reasons) >= 3
        assert sum(reason.startswith("Right.") for reason in reasons) == 1
        assert all(reason.startswith(("Right.", "Not so:")) and len(reason.strip()) > 25 for reason in reasons)
    assert "**Open task.**" in ticket
    sources = ticket.split("**Sources.**")[1]
    assert 2 <= len(re.findall(r"https?://", sources)) <= 5


def test_it_reports_named_results(notebook: Notebook) -> None:
    assert any("dx.result(" in cell.source for cell in notebook.code)
    assert any(calls(cell.source, "score") for cell in notebook.code)


def test_code_that_a_lesson_shows_and_the_package_holds_is_the_same(notebook: Notebook) -> None:
    shown = [
        (tag.removeprefix("same-as:"), cell)
        for cell in notebook.code
        for tag in cell.metadata.get("tags", [])
        if tag.startswith("same-as:")
    ]
    assert shown or not notebook.name.startswith("03")
    for path, cell in shown:
        module, name = path.rsplit(".", 1)
        held = inspect.getsource(getattr(importlib.import_module(module), name))
        assert plain(cell.source) == plain(held), path


def plain(source: str) -> str:
    """Return code without docstrings and comments, in one form."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def test_links_between_lessons_lead_somewhere(notebook: Notebook) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", notebook.markdown):
        assert (Path(lessons.NOTEBOOKS) / target).exists(), target
