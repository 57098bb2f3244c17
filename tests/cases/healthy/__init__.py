"""Healthy trainings: ``dx.diagnose(**make(name))`` must find no error in any of them.

Each case is a function that returns diagnose's keywords; its docstring says what would mislead a naive checker.
"""

import importlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MODULES = (
    "vision",
    "language",
    "generative",
    "policies",
    "similarity",
    "structures",
    "optimisation",
    "losses",
    "doubts",
    "peers",
)


@dataclass(frozen=True)
class Case:
    """A healthy training: how to make it, what misleads, and whether it belongs to the short tests."""

    name: str
    make: Callable[[], dict[str, Any]]
    trap: str
    fast: bool


CASES: dict[str, Case] = {}


def healthy(make: Callable[[], dict[str, Any]] | None = None, *, fast: bool = False, needs: str = "") -> Any:
    """Register a case; one that ``needs`` a package is registered where that package is installed."""

    def register(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        assert function.__name__ not in CASES, function.__name__
        if not needs or importlib.util.find_spec(needs):
            CASES[function.__name__] = Case(function.__name__, function, function.__doc__ or "", fast)
        return function

    return register(make) if make is not None else register


def make(name: str, seed: int = 0) -> dict[str, Any]:
    """Return the keywords of a case, made from a seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return CASES[name].make()


for module in MODULES:
    importlib.import_module(f"{__name__}.{module}")
