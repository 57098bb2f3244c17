"""What all tests share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from playwright.sync_api import Browser, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a window; where none is installed the test is skipped, but never in CI."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no chromium on this machine")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=FLAGS)
