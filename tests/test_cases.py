"""Every case is found, at its stage and with its cause; no healthy set-up raises an error."""

import re
from collections import Counter

import pytest
from cases import CASES, HEALTHY

import dxdy_nb as dx
from dxdy_nb.diagnosis.report import STAGES, causes

# What `make test` runs: a few quick ones of every stage. `make test-all` and `make cases` run all.
SPREAD = {
    "nan-in-inputs", "mask-0-255-bce", "train-val-overlap", "label-out-of-range",
    "detach-cut", "unregistered-list", "view-not-permute", "causal-leak", "where-nan-grad",
    "softmax-then-ce", "mse-broadcast", "labels-shifted-twice", "trains-on-padding",
    "zero-grad-missing", "backward-twice", "wrong-custom-backward",
    "step-missing", "clip-before-unscale", "optimizer-stale-head", "weights-reset-in-loop",
    "resume-no-optimizer-state", "eval-updates-bn", "unseeded-run",
    "gan-alternating", "lora-zero-init", "contrastive-infonce", "policy-gradient-loss",
}  # fmt: skip


def some(names):
    return [pytest.param(name, marks=[] if name in SPREAD else pytest.mark.slow) for name in names]


def diagnosed(setup):
    """Return the report, and its errors as stage/cause."""
    report = dx.diagnose(**setup)
    return report, [f"{finding.stage}/{finding.cause}" for finding in report.errors]


@pytest.mark.parametrize("name", some(CASES))
def test_a_fault_is_found_and_its_twin_is_not_accused(name):
    case = CASES[name]
    report, errors = diagnosed(case.build(True))
    told = report.errors or (report.findings if case.hint else ())
    assert any(f.stage in case.stages for f in told) and (not errors or report.stage in case.stages), str(report)
    assert any(f.cause in case.causes for f in told), str(report)
    report, errors = diagnosed(case.build(False))
    assert errors == [], str(report)


@pytest.mark.parametrize("name", some(HEALTHY))
def test_what_only_looks_odd_raises_no_error(name):
    report, errors = diagnosed(HEALTHY[name].build())
    assert errors == [], str(report)


def test_every_case_says_where_it_was_seen_and_what_may_be_said_of_it():
    for case in CASES.values():
        assert re.fullmatch(r"https://\S+|[\w.-]+/[\w.-]+#\d+", case.source), case.name
        assert 1 <= len(case.causes) <= 3 and set(case.causes) <= set(causes()), case.name
        assert set(case.stages) <= set(STAGES), case.name
    assert set(CASES) | set(HEALTHY) >= SPREAD
    assert len(CASES) >= 114 and len(HEALTHY) >= 40


def test_every_stage_has_cases_in_the_spread():
    stages = Counter(stage for name in SPREAD & set(CASES) for stage in CASES[name].stages)
    assert set(stages) == set(STAGES) - {"comm"}
