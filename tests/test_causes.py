import ast
import re
from pathlib import Path
from string import Template

import pytest

from dxdy_nb.diagnosis.report import STAGES, causes

HERE = Path(__file__).resolve().parents[1]
CODE = "\n".join(path.read_text() for path in sorted((HERE / "dxdy_nb" / "diagnosis").glob("*.py")))
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
