"""`dxdy check`: the report on what somebody's function returns, and one clear line for what cannot be checked."""

import json
import subprocess
import sys

import pytest

from dxdy_nb import cli

MAKE = """
import torch
print("a module may talk")

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(32, 3)
    y = x @ torch.ones(3, 1)
    loader = list(zip(x.split(8), y.split(8)))
    optimizer = torch.optim.SGD({owned}.parameters(), lr=0.1)
    return dict(model=model, loss_fn=torch.nn.MSELoss(), loader=loader, optimizer=optimizer)
"""
HEALTHY, STRANGER = MAKE.format(owned="model"), MAKE.format(owned="torch.nn.Linear(3, 1)")


@pytest.fixture
def check(here, monkeypatch, capsys):
    """Return a function that writes a module, checks it in this process, and returns code, stdout and stderr."""

    def check(source, target="mine:make", *options):
        monkeypatch.setattr(sys, "path", sys.path[:])
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        (here / "mine.py").write_text(source)
        code = cli.main(["check", target, *options])
        sys.modules.pop("mine", None)
        return code, *capsys.readouterr()

    return check


def test_a_healthy_set_up_ends_with_0(check):
    code, told, aside = check(HEALTHY)
    assert code == 0
    assert told.splitlines()[1].startswith("no error found")
    assert aside == "a module may talk\n"


def test_an_error_in_the_report_ends_with_1_and_json_is_for_programs(here):
    (here / "package").mkdir()
    (here / "package" / "module.py").write_text(STRANGER)
    command = [sys.executable, "-m", "dxdy_nb.cli", "check", "package.module:make", "--json"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    read = json.loads(done.stdout)
    assert (read["healthy"], read["stage"]) == (False, "update")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("", "mine", "expected a module and a function of it, like package.module:make; got 'mine'"),
        ("", "mine.py:make", "got 'mine.py:make'"),
        ("", "no_such.thing:make", "no module 'no_such' here"),
        ("", "mine.part:make", "no module 'mine.part' here"),
        ("def make(): pass", "mine:mak", "mine has no function 'mak'. Did you mean 'make'?"),
        ("make = 3", "mine:make", "mine has no function 'make'."),
        ("import no_such_module", "mine:make", "importing mine raised ModuleNotFoundError: No module named"),
        ("\n1 / 0", "mine:make", "importing mine raised ZeroDivisionError: division by zero (mine.py:2)"),
        ("def make(:", "mine:make", "importing mine raised SyntaxError"),
        ("exit(3)", "mine:make", "importing mine raised SystemExit: 3"),
        ("def make():\n    raise OSError('no\\nfile')", "mine:make", "make() raised OSError: no file (mine.py:2)"),
        ("def make(x): pass", "mine:make", "make() raised TypeError: make() missing 1 required positional"),
        ("def make(): pass", "mine:make", "make() returns a dictionary of dx.diagnose's keywords"),
        ("def make(): return {1: 2}", "mine:make", "make() returns a dictionary"),
        ("def make(): return {'modle': 2}", "mine:make", "diagnose: unknown modle. Known: model"),
        ("def make(): return {}", "mine:make", "expected a torch.nn.Module as model=, got NoneType"),
    ],
)
def test_bad_input_is_one_clear_line_and_ends_with_2(check, source, target, words):
    code, told, aside = check(source, target)
    assert (code, told) == (2, "")
    assert words in aside
    assert aside.startswith("dxdy: ") and len(aside.splitlines()) == 1


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", "--help"])
    assert stopped.value.code == 0
    assert "example: dxdy check package.module:make" in capsys.readouterr().out
