"""The cases: small training set-ups with one fault each, and their healthy twins; and healthy ones that look odd."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SEED = int(os.environ.get("CASES_SEED", "0"))  # `make cases SEED=1` runs every case on other random numbers
Setup = dict[str, Any]  # the keywords of diagnose


def seed(number: int = 0) -> None:
    """Seed torch; every case draws its numbers after this, and a resumed run seeds again as a new process would."""
    torch.manual_seed(number + 1000 * SEED)


@dataclass(frozen=True)
class Case:
    """A fault with the stages and the causes (at most three) that a report may name for it, and where it was seen.

    ``make(True)`` is the fault and ``make(False)`` its twin. Where ``hint`` is set the fault cannot be proven from the
    objects alone, since the same code is right where it is meant.
    """

    name: str
    stages: tuple[str, ...]
    causes: tuple[str, ...]
    source: str
    hint: bool
    make: Callable[[bool], Setup]

    def build(self, bug: bool) -> Setup:
        """Return the set-up, with the fault or without it."""
        seed()
        return self.make(bug)


@dataclass(frozen=True)
class Healthy:
    """A right set-up, and what about it misleads a checker that goes by thresholds."""

    name: str
    trap: str
    make: Callable[[], Setup]

    def build(self) -> Setup:
        """Return the set-up."""
        seed()
        return self.make()


CASES: dict[str, Case] = {}
HEALTHY: dict[str, Healthy] = {}


def case(
    name: str, *, stages: tuple[str, ...], causes: tuple[str, ...], source: str, hint: bool = False
) -> Callable[[Callable[[bool], Setup]], Callable[[bool], Setup]]:
    """Register a function of ``bug`` as a case."""

    def register(make: Callable[[bool], Setup]) -> Callable[[bool], Setup]:
        assert name not in CASES, f"{name} is there already"
        CASES[name] = Case(name, stages, causes, source, hint, make)
        return make

    return register


def healthy(name: str, *, trap: str) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Register a function without arguments as a healthy set-up."""

    def register(make: Callable[[], Setup]) -> Callable[[], Setup]:
        assert name not in HEALTHY, f"{name} is there already"
        HEALTHY[name] = Healthy(name, trap, make)
        return make

    return register
