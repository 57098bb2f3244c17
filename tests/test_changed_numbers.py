"""A lesson whose stored outputs were changed by one number a cell must fail in every such cell."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from dxdy_nb.runs import lessons

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def change_first_number(cell: nbformat.NotebookNode) -> bool:
    """Change the first number in a cell's checked outputs, and return whether there was one."""
    for output in cell.outputs:
        texts = output.get("data", {})
        for holder, key in [(output, "text"), *((texts, kind) for kind in texts if kind.startswith("text/"))]:
            found = NUMBER.search(holder.get(key, "")) if isinstance(holder.get(key, ""), str) else None
            if found:
                digits = found.group()
                other = str((int(digits[0]) + 1) % 10) + digits[1:]
                holder[key] = holder[key][: found.start()] + other + holder[key][found.end() :]
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", lessons.names())
def test_every_changed_number_is_noticed(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(lessons.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    changed = copy.deepcopy(notebook)
    code = [cell for cell in changed.cells if cell.cell_type == "code"]
    expected = set()
    for number, cell in enumerate(code):
        if "nbval-ignore-output" not in cell.metadata.get("tags", []) and change_first_number(cell):
            expected.add(f"Cell {number}")
    assert len(expected) >= 5, "a lesson's outputs hold numbers"
    copy_path = tmp_path / f"{name}.ipynb"
    copy_path.write_text(json.dumps(changed))
    report = tmp_path / "report.xml"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "nbval_strict", "--nbval", "--nbval-current-env"),
            *("--nbval-cell-timeout=300", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)),
            *(f"--junitxml={report}", str(copy_path)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        check=False,
    )
    failed = {
        case.get("name") for case in ElementTree.parse(report).iter("testcase") if case.find("failure") is not None
    }
    assert failed == expected
