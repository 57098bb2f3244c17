"""Environments that people have reported: the doctor's first word is the right one, and it names what to do.

A file in `environments` holds what a public report tells (its `source`), as changes to the facts of a fit environment:
`base_cpu` was recorded on a machine, `base_gpu` is put together from torch 2.13's own metadata and public reports.
"""

import ast
import inspect
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from dxdy_nb import cli
from dxdy_nb.runs import doctor, machine

FOLDER = Path(__file__).parent / "environments"
BASES = {path.stem.removeprefix("base_"): json.loads(path.read_text()) for path in FOLDER.glob("base_*.json")}
REPORTED = sorted(path for path in FOLDER.glob("*.json") if not path.name.startswith("base_"))
Json = dict[str, Any]


def merged(base: Json, change: Json) -> Json:
    """Return a base with a report's own facts put in, at any depth."""
    facts = deepcopy(base)
    for name, value in change.items():
        nested = isinstance(value, dict) and isinstance(facts.get(name), dict) and value
        facts[name] = merged(facts[name], value) if nested else value
    return facts


def facts_of(path: Path) -> tuple[Json, Json]:
    report = json.loads(path.read_text())
    return report, merged(BASES[report["base"]], report["facts"])


@pytest.fixture(scope="module")
def here() -> Json:
    return machine.facts()


def told(line: doctor.Line) -> str:
    return f"{line.evidence} {line.next}"


@pytest.mark.parametrize("path", REPORTED, ids=lambda path: path.stem)
def test_a_reported_environment_gets_the_right_first_line(path: Path) -> None:
    report, facts = facts_of(path)
    lines = doctor.judge(facts)
    first = next(line for line in lines if line.state in (doctor.PROBLEM, doctor.WARNING))
    assert (first.check, first.state) == (report["check"], report["state"]), doctor.text(lines)
    for word in report["words"]:
        assert word in told(first), doctor.text(lines)
    assert first.next
    assert doctor.fit(lines) == (report["state"] != doctor.PROBLEM)


@pytest.mark.parametrize("path", REPORTED, ids=lambda path: path.stem)
def test_a_report_has_a_source_and_only_facts_that_the_machine_is_asked_for(path: Path, here: Json) -> None:
    report, facts = facts_of(path)
    assert report["source"].startswith("https://")
    assert set(facts) == set(here)
    for name, value in facts.items():
        if isinstance(value, dict) and name not in ("variables", "tested", "torch"):
            assert set(value) == set(here[name]), name
    assert set(facts["variables"]) <= set(machine.VARIABLES)


@pytest.mark.parametrize("name", BASES)
def test_a_fit_environment_has_nothing_to_mend(name: str) -> None:
    lines = doctor.judge(BASES[name])
    assert {line.state for line in lines} <= {doctor.OK, doctor.NOT_APPLICABLE}, doctor.text(lines)
    assert not any(line.next for line in lines)
    assert [line.check for line in lines] == list(doctor.CHECKS)


def test_a_torch_that_conda_alone_installed_is_no_mixture() -> None:
    # Conda leaves a record that pip reads too: https://github.com/pytorch/pytorch/issues/12470
    installed = {"pip torch": [], "conda torch": ["pytorch-2.13.0-cpu_mkl_py312"]}
    assert doctor.fit(doctor.judge(merged(BASES["cpu"], {"installed": installed})))


def test_a_cuda_build_without_a_gpu_is_fit_for_the_cpu() -> None:
    nothing = {"error": "Found no NVIDIA driver on your system.", "devices": [], "processes": []}
    driver = {"version": None, "on the bus": False, "device files": []}
    lines = doctor.judge(merged(BASES["gpu"], {"driver": driver, "gpus": nothing}))
    assert doctor.fit(lines)
    assert [line.state for line in lines[:3]] == ["ok", "not applicable", "not applicable"]


@pytest.mark.parametrize(
    ("capability", "runs"),
    [("7.0", False), ("7.5", True), ("8.0", True), ("8.9", True), ("9.0", True), ("12.0", True), ("12.1", True)],
)
def test_a_gpu_runs_code_of_its_own_major_version_and_no_newer(capability: str, runs: bool) -> None:
    assert doctor._listed(capability, ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]) == runs


def test_code_for_one_gpu_alone_counts_for_no_other() -> None:
    assert not doctor._listed("9.0", ["sm_90a", "sm_80"])
    assert doctor._listed("13.0", ["compute_120"])  # PTX is compiled on the machine itself
    assert not doctor._listed("10.0", ["compute_120"])


def test_here_the_facts_are_those_of_torch_and_of_the_machine(here: Json) -> None:
    facts = here
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["cuda"] == torch.version.cuda
    assert len(facts["gpus"]["devices"]) == torch.cuda.device_count()
    assert facts["processors"]["threads"] == torch.get_num_threads()
    assert facts["network"]["gloo error"] is None
    assert len(facts["installed"]["pip torch"]) == 1


def test_what_breaks_while_ranks_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LOOPBACK", "no-such-interface")
    error = machine._network()["gloo error"]
    assert "no-such-interface" in error
    (line,) = [line for line in doctor.judge(merged(BASES["cpu"], {"network": {"gloo error": error}})) if line.next]
    assert (line.check, line.state) == ("ranks", "problem")


def test_a_torch_that_cannot_be_imported_is_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol: iJIT')\n")
    program = "import sys; sys.path.insert(0, sys.argv[1]); from dxdy_nb.cli import main; sys.exit(main(['env']))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "import torch fails: libtorch_cpu.so: undefined symbol: iJIT" in done.stdout.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_a_containers_limit_counts_and_not_the_cores_of_its_host(tmp_path: Path, monkeypatch: Any) -> None:
    def cgroup(files: dict[str, str]) -> None:
        monkeypatch.setattr(machine, "_cgroup", lambda name: files.get(name, ""))

    cgroup({"cpu.max": "400000 100000", "memory.max": "3000", "memory.current": "1000"})
    assert (machine._quota(), machine._memory_limit()) == (4.0, 2000)
    cgroup({"cpu.max": "max 100000", "memory.max": "max", "memory.current": "1000"})
    assert (machine._quota(), machine._memory_limit()) == (None, sys.maxsize)
    cgroup({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"})
    assert machine._quota() == 1.5


def test_nvcc_is_never_evidence_and_nothing_is_changed() -> None:
    for module in (machine, doctor):
        code = ast.unparse(ast.parse(inspect.getsource(module)).body[1:])  # all but the docstring
        assert "nvcc" not in code
    assert "nvidia-smi" in inspect.getsource(machine._smi)


def test_the_command_prints_a_line_a_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "facts", lambda: BASES["cpu"])
    assert cli.main(["env"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(doctor.CHECKS)
    assert cli.main(["env", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fit"] is True
    assert answer["facts"] == BASES["cpu"]
    monkeypatch.setattr(machine, "facts", lambda: facts_of(FOLDER / "container_without_gpus.json")[1])
    assert cli.main(["env"]) == 1
    out = capsys.readouterr().out
    assert "problem" in out and "--gpus all" in out
