"""Faults that were written without sight of the diagnosis: none of their twins is accused, and most are found."""

import importlib.util
import re
from pathlib import Path

import pytest

import dxdy_nb as dx

CASES = Path(__file__).with_name("cases")
STAGES = re.compile(r"^stage: (.*)$", re.MULTILINE)


def made(path, variant):
    """Return the keywords of a case, whose file is loaded anew."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, variant)()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's remarks on what is wrong
@pytest.mark.parametrize(("folder", "enough"), [("unseen", 0.7), ("unseen_second", 0.55)])
def test_no_twin_of_an_unseen_fault_is_accused_and_most_faults_are_found(folder, enough):
    paths = sorted((CASES / folder).glob("*.py"))
    accused = {path.stem for path in paths if not dx.diagnose(**made(path, "make_fixed")).healthy}
    assert accused == set()
    stages = [STAGES.search(path.read_text())[1].split(", ") for path in paths]
    found = [dx.diagnose(**made(path, "make")).stage in wanted for path, wanted in zip(paths, stages, strict=True)]
    assert sum(found) >= enough * len(paths), f"{sum(found)} of {len(paths)}"
