"""The three files that say what is installed agree, and a record says where a run took place."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dxdy_nb.runs import environment
from dxdy_nb.training.models import CNN

ROOT = Path(__file__).resolve().parents[1]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINNED = {canonicalize_name(line.split("==")[0]): line.partition("==")[2] for line in PINS}
ASKED = [*PROJECT["dependencies"], *(item for extra in PROJECT["optional-dependencies"].values() for item in extra)]


def conda_packages():
    return [item for item in CONDA["dependencies"] if isinstance(item, str)]


def pip_lines():
    (section,) = [item["pip"] for item in CONDA["dependencies"] if isinstance(item, dict)]
    return section


def test_conda_takes_nothing_from_a_channel_that_has_ended():
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]


def test_conda_installs_no_torch_of_its_own():
    names = {re.split(r"[=<>:: ]+", item)[-2 if "::" in item else 0] for item in conda_packages()}
    assert names == {"python", "pip", "make"}
    assert not [item for item in conda_packages() if "torch" in item or "cuda" in item or "::" in item]


def test_conda_takes_the_projects_own_list_at_the_projects_versions():
    assert pip_lines() == ["--constraint constraints.txt", "--editable .[test]"]


def test_condas_python_is_one_that_the_project_allows():
    (python,) = [item.partition("=")[2].strip("=") for item in conda_packages() if item.startswith("python=")]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(f"{python}.0")


def test_every_pin_is_exact_and_named_once():
    names = [canonicalize_name(line.split("==")[0]) for line in PINS]
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+!]*", line)] == []
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("item", ASKED)
def test_every_dependency_is_pinned(item):
    asked = Requirement(item)
    assert canonicalize_name(asked.name) in PINNED
    assert str(asked.specifier) == ""  # versions stand in one file


def test_torch_is_the_version_that_is_promised():
    assert PINNED["torch"] == "2.13.0"


@pytest.mark.parametrize("item", PROJECT["dependencies"])
def test_what_is_installed_is_what_is_pinned(item):
    installed = importlib.metadata.version(Requirement(item).name)
    assert installed.partition("+")[0] == PINNED[canonicalize_name(item)]


def test_a_record_says_where_a_run_took_place():
    seen = environment.describe(CNN(), torch.zeros(1))
    assert seen["torch"] == torch.__version__
    assert seen["dxdy_nb"] == PROJECT["version"]
    assert seen["python"] == ".".join(map(str, sys.version_info[:3]))
    assert seen["threads"] == torch.get_num_threads()
    assert (seen["cuda"], len(seen["gpus"])) == (torch.version.cuda, torch.cuda.device_count())
    assert (seen["model"], seen["data"]) == ("dxdy_nb.training.models.CNN", "torch.Tensor")


def test_a_record_says_how_numbers_were_computed():
    plain = environment.describe()
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        seen = environment.describe()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert (plain["deterministic_algorithms"], plain["default_dtype"]) == (False, "float32")
    assert (seen["deterministic_algorithms"], seen["default_dtype"]) == (True, "float64")
    assert (plain["model"], plain["data"]) == (None, None)


def test_outside_a_repository_there_is_no_commit(here, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    seen = environment.describe()
    assert (seen["project"], seen["commit"], seen["uncommitted_changes"]) == (here.name, None, None)
    assert environment.uncommitted_diff() == ""


def test_uncommitted_changes_are_kept(here, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (here / "train.py").write_text("lr = 0.1\n")
    for command in ("init -q", "add train.py", "-c user.name=a -c user.email=a@b commit -q -m start"):
        subprocess.run(["git", *command.split()], check=True)
    clean = environment.describe()
    (here / "train.py").write_text("lr = 0.2\n")
    changed = environment.describe()
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert (clean["commit"], clean["project"]) == (changed["commit"], here.name)
    assert (clean["uncommitted_changes"], changed["uncommitted_changes"]) == (False, True)
    assert "+lr = 0.2" in environment.uncommitted_diff().splitlines()
    (here / "new.py").write_text("lr = 0.3\n")
    assert {"train.py", "new.py"} <= environment.describe()["files"].keys()
    assert "train.py" not in clean["files"]


@pytest.mark.parametrize("change", [("train.py", b"lr = 0.2\n"), ("new.py", b"")])
def test_outside_a_repository_the_files_beside_each_other_are_told_apart(here, monkeypatch, change):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    (here / "train.py").write_text("lr = 0.1\n")
    before = environment.describe()["files"]
    (here / change[0]).write_bytes(change[1])
    after = environment.describe()["files"]
    assert {name for name in before | after if before.get(name) != after.get(name)} == {change[0]}


@pytest.mark.parametrize("other", [torch.ones(2), torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)])
def test_a_digest_tells_values_shapes_and_types_apart(other):
    assert environment.digest([torch.zeros(2)]) == environment.digest([torch.zeros(4)[::2]])
    assert environment.digest([torch.zeros(2)]) != environment.digest([other])


def test_without_git_a_run_is_described_all_the_same(monkeypatch):
    monkeypatch.setenv("PATH", "")
    seen = environment.describe()
    assert (seen["commit"], seen["torch"]) == (None, torch.__version__)


def test_nobody_watches_a_test():
    assert environment.attended() is sys.stderr.isatty()
