"""The page of benchmarks: what is printed becomes a table, and a peer that is better is named."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPEC = importlib.util.spec_from_file_location("bench_report", BENCHMARKS / "report.py")
report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(report)


@pytest.fixture
def printed(capsys):
    report.summary("a step", "ms", {"dxdy": 1.5, "dx.watch": 0.25, "torch-audit": 30.0})
    report.summary("faults not told apart, of 8", "", {"dxdy": 2, "torch": 6, "torchtest": 1})
    return "bare loop  4.5 ms\n" + capsys.readouterr().out


def test_a_comparison_is_read_as_it_was_printed(printed):
    assert report.comparisons(printed) == [
        ("a step", "ms", {"dxdy": 1.5, "dx.watch": 0.25, "torch-audit": 30.0}),
        ("faults not told apart, of 8", "", {"dxdy": 2.0, "torch": 6.0, "torchtest": 1.0}),
    ]


def test_a_page_has_a_table_and_says_where_a_peer_is_better_and_what_failed(printed):
    results = {
        "loop": report.Result("python benchmarks/loop.py", printed, 1, 90.0, 0.5),
        "check": report.Result("python benchmarks/check.py", "no line of ours", -11, 30.0, 0.5),
    }
    page = report.render(results, "2026-01-01, torch 2.13.0.")
    assert "in 2 minutes" in page
    assert "| a step | ms | 1.5, dx.watch 0.25 | torch-audit 30 |" in page
    assert "\n- faults not told apart, of 8: torchtest\n" in page and "- a step" not in page
    assert "```text\nbare loop  4.5 ms\n```" in page  # the comparisons stand above
    assert "`python benchmarks/loop.py`: a bar was missed" in page and "failed, exit code -11" in page


def test_every_section_is_a_benchmark_that_knows_its_arguments():
    for section in report.SECTIONS:
        text = (BENCHMARKS / f"{section.name}.py").read_text()
        flags = {word for word in (*section.arguments, *section.quick) if word.startswith("--")}
        assert all(f'"{flag}"' in text for flag in flags), section.name
        assert "summary(" in text, section.name


def test_the_page_that_is_kept_names_no_path_of_a_machine():
    page = (BENCHMARKS / "REPORT.md").read_text()
    assert [section.title for section in report.SECTIONS if f"## {section.title}" not in page] == []
    assert not [word for word in ("/home/", "/root/", "/tmp/", "site-packages", "Traceback", "://") if word in page]
