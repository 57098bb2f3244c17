"""The public surface, frozen: who changes a line here changes what others rely on, and says so in CHANGELOG.md."""

import argparse
import inspect

import pytest

import dxdy_nb as dx
from dxdy_nb import cli
from dxdy_nb.autograd.check import SEVERITY
from dxdy_nb.diagnosis.report import STAGES, Finding
from dxdy_nb.runs.folder import FILES
from dxdy_nb.runs.record import STATUSES

NAMES = {
    "ablate": "baseline changes budget seeds metric jobs limits out",
    "check_gradients": "fn inputs model loss_fn batch order seed",
    "compare": "first second",
    "diagnose": "batches steps time_limit given",
    "diagnose_ranks": "worker world_size time_limit",
    "graph": "loss model record gradients saved",
    "launch": "function args world_size timeout stall",
    "live": "record controls",
    "lr_range_test": "model loss_fn loader optimizer low high steps max_grad_norm",
    "lr_search": "config steps out",
    "preflight": "make world_size out time_limit memory",
    "record": "model",
    "result": "metrics",
    "session": "device timeout",
    "sharpness": "model loss_fn batch iterations seed",
    "train": "config out resume allow_changes",
    "verify_ranks": "run",
    "watch": "model optimizer out budget",
}
CLASSES = ["DxdyError", "Run", "RunConfig"]
FIELDS = (
    "seed data model loss optimizer lr momentum weight_decay schedule warmup_steps batch_size accumulation_steps "
    "precision max_grad_norm init epochs max_steps device world_size num_workers checkpoint_every validate_every"
)
STEPS = (
    "loss lr grad_norm effective_batch step_time data_time forward_time backward_time update_time memory skipped "
    "bad_samples"
)
GRADIENTS = "mean max min norm nonzero nonfinite update_ratio"
COMMANDS = {
    "lab": "--no-browser --port",
    "run": "lesson --parameter --all --out --json",
    "watch": "script --steps --out --json --nproc-per-node -m",
    "check": "target --json",
    "preflight": "target --world-size --json --out",
    "sweep": "target --grid --parameter --jobs --time-limit --memory-limit --out --json",
    "replay": "run",
    "inspect": "file later --json",
    "runs": "--in --json --all --status --where --sort",
    "env": "--json",
}


def test_the_names():
    assert sorted([*NAMES, *CLASSES]) == dx.__all__


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_of_a_function(name):
    assert " ".join(inspect.signature(getattr(dx, name)).parameters) == NAMES[name]


def test_the_fields_of_a_configuration():
    assert set(dx.RunConfig().to_dict()) == set(FIELDS.split())


def test_the_columns_of_a_record(tmp_path):
    run = dx.train(dx.RunConfig(max_steps=2), out=tmp_path / "run")
    assert set(STEPS.split()) <= set(run.steps.columns) and run.steps.index.name == "step"
    assert set(GRADIENTS.split()) <= set(run.gradients.columns) and run.gradients.index.names == ["step", "parameter"]


def test_the_words():
    assert STAGES == ("data", "forward", "loss", "backward", "update", "comm", "reproduce")
    ended = "completed diverged failed out_of_memory timed_out interrupted killed"
    assert set(STATUSES) == {"running", *ended.split()}
    assert {"right", "wrong", "nondeterministic", "precision", "kink", "detached"} <= set(SEVERITY)
    finding = "stage cause severity where evidence fix check lesson"
    assert set(finding.split()) <= set(Finding.__dataclass_fields__) and callable(Finding.try_fix)


def test_the_files_of_a_run():
    files = "config.yaml environment.json diff.patch result.json trace.json trace.bin notebook.ipynb checkpoints"
    assert set(files.split()) == set(FILES)


def test_the_commands_and_their_options():
    (commands,) = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert set(commands.choices) == set(COMMANDS)
    for name, parser in commands.choices.items():
        known = {word for action in parser._actions for word in action.option_strings or [action.dest]}
        assert set(COMMANDS[name].split()) <= known, name
