import ast
import re
from pathlib import Path
from string import Template

import pytest

from dxdy_nb.diagnosis.report import STAGES, causes

HERE = Path(__file__).resolve().parents[1]
LESSONS = [p for p in sorted((HERE / "notebooks" / "src").glob("[0-9][0-9]_*.py")) if not p.stem.endswith("_exercises")]
RULES = [path for path in sorted((HERE / "dxdy_nb" / "diagnosis").glob("*.py")) if path.stem != "fixes"]
CODE = "\n".join(path.read_text() for path in RULES)
NAMED = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+|exception)"', CODE))


@pytest.mark.parametrize("cause", causes())
def test_a_cause_is_complete_and_its_check_is_python(cause):
    entry = causes()[cause]
    assert set(entry) == {"stage", "lesson", "fix", "check"}
    assert entry["stage"] in STAGES
    assert re.fullmatch(r"\d\d(#[a-z-]+)?", entry["lesson"])
    assert entry["fix"].strip() and entry["check"].strip()
    assert len(entry["check"].strip().splitlines()) <= 6
    names = dict.fromkeys(re.findall(r"\$\{(\w+)\}", entry["check"]), "0")
    ast.parse(Template(entry["check"]).substitute(names))


def test_the_catalogue_and_the_rules_name_the_same_causes():
    assert set(causes()) <= NAMED, "in the catalogue, and found by no rule"
    assert {name for name in NAMED if name in causes()} == set(causes())


def explained() -> dict[str, str]:
    """Return where each cause is explained, as the lessons say it: an anchor, then the causes, each in backticks."""
    found: dict[str, str] = {}
    for lesson in LESSONS:
        lists = re.findall(
            r'<a id="([a-z-]+)"></a>Causes explained here(.*?)(?=<a id=|^# #|^# %%|\Z)', lesson.read_text(), re.M | re.S
        )
        for anchor, text in lists:
            for cause in re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+|exception)`", text):
                assert cause not in found, f"{cause}: in {found[cause]} and in {lesson.stem}"
                found[cause] = f"{lesson.stem[:2]}#{anchor}"
    return found


def test_each_cause_leads_to_the_lesson_that_explains_it_and_back():
    built = {lesson.stem[:2] for lesson in LESSONS}
    named = {cause: entry["lesson"] for cause, entry in causes().items() if entry["lesson"][:2] in built}
    assert named == explained()
