"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# Properties are tried on the same examples everywhere, and a slow machine fails none of them.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("house")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Start every test from one seed, and give back the random state it found."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a test in an empty folder, where `runs/` may appear."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
