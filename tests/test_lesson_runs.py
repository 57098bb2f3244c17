"""Every lesson runs with other parameters; its named results keep within their bounds, and it listens to no network."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import sockets

from dxdy_nb.runs import lessons

TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads((Path(__file__).parent / "lessons.toml").read_text())
# The first of each lesson in `make test`, all in `make test-all`.
CASES = [
    pytest.param(lesson, case, marks=[pytest.mark.slow] * (place > 0))
    for lesson, cases in TABLE.items()
    for place, case in enumerate(cases)
]


def test_every_lesson_is_run_with_other_parameters_than_its_own() -> None:
    assert set(TABLE) == set(lessons.names())
    for lesson, cases in TABLE.items():
        defaults = lessons.parameters(lessons.resolve(lesson))
        assert any(case["parameters"] != {name: defaults[name] for name in case["parameters"]} for case in cases)


@pytest.mark.parametrize(("lesson", "case"), CASES, ids=lambda v: v if isinstance(v, str) else str(v["parameters"]))
def test_results_keep_within_their_bounds(lesson: str, case: dict[str, Any], here: Path) -> None:
    with sockets.watched() as seen:
        run = lessons.run(lesson, case["parameters"])
    assert any("ipykernel" in command for _, command in seen)  # the kernel and the ranks it started were looked at
    assert run.status == "completed", run.failure
    for name, bound in case["results"].items():
        seen = run.metrics[name]
        if isinstance(bound, list):
            assert bound[0] <= seen <= bound[1], f"{name} = {seen}, expected {bound}"
        else:
            assert seen == bound, name
