"""``%%watch``: the cell runs as it would without it, and what it trained is told afterwards."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import dxdy_nb as dx

TRAINING = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
words = '''a
b'''
for step in range(10):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
    if step == 5 and broken:
        raise ValueError("the cell's own error")
words
"""


@pytest.fixture
def shell(here, monkeypatch):
    """A shell with the magic, that keeps no history and is no notebook's."""
    monkeypatch.setenv("IPYTHONDIR", str(here / "ipython"))
    quiet = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    shell = InteractiveShell.instance(config=quiet)
    shell.run_cell("%load_ext dxdy_nb").raise_error()
    shell.user_ns["broken"] = False
    yield shell
    shell.run_cell("%unload_ext dxdy_nb")
    InteractiveShell.clear_instance()


def test_a_cell_runs_as_it_would_and_what_it_trained_is_told(shell, capsys):
    done = shell.run_cell(f"%%watch{TRAINING}")
    assert done.result == "a\nb"  # its last value, and no string of it indented
    assert len(shell.user_ns["_watch"].steps) == 10
    assert not shell.user_ns["_watch"].active
    shown = capsys.readouterr().out
    assert "10" in shown
    assert "loss, gradient norm, gradient size" in shown


def test_the_record_has_the_name_that_is_given(shell):
    shell.run_cell(f"%%watch mine{TRAINING}")
    assert len(shell.user_ns["mine"].steps) == 10
    assert "_watch" not in shell.user_ns


def test_an_error_is_the_cells_own_and_the_record_up_to_it_is_kept_and_shown(shell, capsys):
    shell.user_ns["broken"] = True
    done = shell.run_cell(f"%%watch{TRAINING}")
    assert isinstance(done.error_in_exec, ValueError)
    assert len(shell.user_ns["_watch"].steps) == 6
    shown = capsys.readouterr().out
    assert "loss, gradient norm" in shown
    assert "line 12" in shown  # of the cell as it was written
    assert "contextlib" not in shown


def test_it_ends_after_so_many_steps_without_an_error(shell):
    shell.run_cell(f"%%watch --steps 3{TRAINING}").raise_error()
    assert len(shell.user_ns["_watch"].steps) == 3


def test_a_cell_may_await(shell):
    cell = "%%watch\nimport asyncio\nawait asyncio.sleep(0, 'slept')"
    assert shell.run_cell(cell).result == "slept"


def test_a_cell_that_trains_nothing_says_so(shell, capsys):
    assert shell.run_cell("%%watch\nx = 1").success
    assert shell.user_ns["x"] == 1
    assert "gradient norm" not in capsys.readouterr().out


@pytest.mark.parametrize("cell", ["%%watch", "%%watch\n", "%%watch\n# nothing", "\n\n%%watch   \nx = 1"])
def test_a_cell_with_little_in_it(shell, cell):
    assert shell.run_cell(cell).success


def test_the_record_is_kept_in_a_folder(shell, here):
    shell.run_cell(f"%%watch --out kept --budget none{TRAINING}").raise_error()
    assert (here / "kept" / "trace.bin").stat().st_size > 0
    again = shell.run_cell("%%watch --out kept\nran = True")
    assert isinstance(again.error_in_exec, dx.DxdyError)
    assert "already holds" in str(again.error_in_exec)
    assert "ran" not in shell.user_ns


@pytest.mark.parametrize(
    "options, said",
    [("--stepz 3", "--stepz"), ("--steps x", "invalid int"), ("--budget x", "invalid"), ("a-b", "a-b"), ("a b", "b")],
)
def test_an_option_that_is_not_understood_is_one_line_and_nothing_runs(shell, capsys, options, said):
    done = shell.run_cell(f"%%watch {options}\nran = True")
    assert not done.success
    assert "ran" not in shell.user_ns
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert told.err.startswith("UsageError: ")
    assert said in told.err
    assert told.out == ""


def test_other_cells_and_other_magics_are_left_alone(shell, capsys):
    assert shell.run_cell("%%watching\n1").success is False
    assert shell.run_cell("1 + 1").result == 2
    assert shell.run_cell("%%capture captured\nprint('hidden')").success
    assert "hidden" not in capsys.readouterr().out
    assert shell.user_ns["captured"].stdout == "hidden\n"


def test_help_tells_the_options(shell, capsys):
    shell.run_cell("%%watch?")
    assert "--steps N" in capsys.readouterr().out


def test_it_can_be_reloaded_and_unloaded(shell):
    shell.run_cell("%reload_ext dxdy_nb").raise_error()
    assert len(shell.ast_transformers) == 1
    assert shell.run_cell("%%watch\n7").result == 7
    shell.run_cell("%unload_ext dxdy_nb").raise_error()
    assert shell.ast_transformers == []
    assert shell.run_cell("%%watch\n7").success is False
