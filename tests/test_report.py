import json

import pytest

from dxdy_nb.diagnosis.report import STAGES, Finding, Report, Trial, found, ordered
from dxdy_nb.errors import DxdyError


def finding(stage, severity="error", cause="some-cause", **more):
    return Finding(stage, cause, severity, "where", "evidence 3 < 4", "fix", "print(1)", "07", **more)


def test_findings_stand_with_errors_first_in_the_order_of_the_stages():
    given = [finding("update"), finding("data", "hint"), finding("loss"), finding("loss", "hint")]
    report = Report(tuple(given))
    assert [(f.stage, f.severity) for f in report.findings] == [
        ("loss", "error"), ("update", "error"), ("data", "hint"), ("loss", "hint"),
    ]  # fmt: skip
    assert report.stage == "loss" and not report.healthy


def test_hints_leave_a_report_healthy():
    report = Report((finding("data", "hint"),))
    assert report.healthy and report.stage is None
    assert "no error found (1 hint)" in str(report)


def test_the_words_of_a_report_name_stage_evidence_fix_and_check():
    text = str(Report((finding("backward"),), {"model": "Net"}, ("a rule: no time was left",)))
    assert "data → forward → loss → [backward] → update → comm → reproduce" in text
    for words in ("error · backward · some-cause · where", "evidence 3 < 4", "print(1)", "Net", "no time was left"):
        assert words in text


def test_html_is_escaped_and_marks_the_stage():
    page = Report((finding("loss"),))._repr_html_()
    assert "evidence 3 &lt; 4" in page and "<b" in page.split("loss</b>")[0]


def test_json_holds_what_a_program_needs():
    read = json.loads(Report((finding("loss"),), {"model": "Net"}).to_json())
    assert (read["healthy"], read["stage"]) == (False, "loss")
    assert read["findings"][0]["cause"] == "some-cause" and not read["findings"][0]["can_try"]


def test_a_fix_is_tried_where_there_is_a_trial_and_refused_where_there_is_none():
    trial = Trial("lr=0.1", "loss 3", "loss 1", True)
    assert finding("update", trial=lambda: trial).try_fix() is trial
    with pytest.raises(DxdyError, match="cannot be tried"):
        finding("update").try_fix()


def test_a_cause_is_named_once():
    assert len(ordered([finding("loss"), finding("loss"), finding("data")])) == 2


def test_a_finding_of_the_catalogue_takes_its_stage_and_values_from_there():
    one = found("lr-too-large", "lr=1", "rose", lr="0.1")
    assert one.stage == "update" and one.fix == "lr=0.1" and one.stage in STAGES


def test_nothing_to_reproduce_is_said():
    with pytest.raises(DxdyError, match="no error"):
        Report(()).save_repro("x.py")
