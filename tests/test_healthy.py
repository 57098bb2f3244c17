"""No error on healthy trainings, and nothing of the caller's is changed."""

import warnings

import pytest
from cases.healthy import CASES, make
from cases.healthy.state import state_of

import dxdy_nb as dx


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if case.fast else pytest.mark.slow) for n, case in CASES.items()]
)
def test_a_healthy_training_raises_no_error_and_is_left_as_it_was(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and other libraries warn of what a case does, not of the diagnosis
        given = make(name)
        before = state_of(given)
        report = dx.diagnose(**given)
        after = state_of(given)
    assert report.errors == (), str(report)
    assert {path for path in before | after if before.get(path) != after.get(path)} == set()
    assert not [line for line in report.unchecked if " raised " in line], report.unchecked


def test_every_case_says_what_misleads():
    assert len(CASES) >= 200
    assert all(len(case.trap.split()) > 4 for case in CASES.values())
    assert 8 <= sum(case.fast for case in CASES.values()) <= 20
