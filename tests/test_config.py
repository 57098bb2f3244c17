"""Every field of a configuration changes the run; whatever is wrong with one is said at once and by name."""

import contextlib
import dataclasses
import multiprocessing
import resource
from enum import StrEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import dxdy_nb as dx
from dxdy_nb.config import ALIASES, parse_assignments

# Two epochs of four steps: a run takes a tenth of a second.
BASE = {"data": "spirals", "model": "mlp", "epochs": 2, "batch_size": 100}
# A field, a value that BASE does not have, and the column of the record that it must change.
CHANGES = [
    ("seed", 1, "loss"),
    ("world_size", 2, "effective_batch"),
    ("data", "digits", "loss"),
    ("model", "cnn", "loss"),
    ("loss", "mse", "loss"),
    ("optimizer", "adam", "loss"),
    ("optimizer", "adamw", "loss"),
    ("optimizer", "muon", "loss"),
    ("lr", 0.1, "lr"),
    ("lr", 0.1, "loss"),
    ("momentum", 0.5, "loss"),
    ("weight_decay", 0.1, "loss"),
    ("schedule", "constant", "lr"),
    ("schedule", "linear", "lr"),
    ("schedule", "step", "lr"),
    ("schedule", "one_cycle", "lr"),
    ("warmup_steps", 3, "lr"),
    ("warmup_steps", 3, "loss"),
    ("batch_size", 50, "effective_batch"),
    ("accumulation_steps", 2, "effective_batch"),
    ("accumulation_steps", 2, "step"),
    ("precision", "bf16", "loss"),
    ("precision", "fp16", "loss"),
    ("max_grad_norm", 0.01, "loss"),
    ("init", "default", "loss"),
    ("init", "xavier", "loss"),
    ("epochs", 3, "step"),
    ("max_steps", 5, "step"),
    ("validate_every", 2, "validated"),
    ("num_workers", 2, "fetched"),
    ("checkpoint_every", 3, "checkpoints"),
]
ALSO = {"model": {"data": "digits", "epochs": 1, "max_steps": 2}}  # what the field needs on both sides


@contextlib.contextmanager
def fetchers():
    """Collect the processes that fetch batches."""
    started, start = [], multiprocessing.Process.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.Process, "start", lambda process: started.append(process) or start(process))
        yield started


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Return a function from changes of BASE to what the run recorded; equal configurations run once."""
    known = {}

    def run(changes):
        config = dx.RunConfig(**BASE | changes)
        if config not in known:
            with fetchers() as fetched:
                done = dx.train(config, out=tmp_path_factory.mktemp("run") / "run")
            columns = {name: done.steps[name].tolist() for name in ("loss", "lr", "effective_batch")}
            saved = sorted(path.name for path in (done.folder / "checkpoints").glob("*.pt"))
            known[config] = columns | {"step": list(done.steps.index), "validated": list(done.validation.index)}
            known[config] |= {"checkpoints": saved, "fetched": len(fetched)}
        return known[config]

    return run


@pytest.mark.parametrize(("field", "value", "column"), CHANGES)
def test_a_changed_field_changes_the_run(record, field, value, column):
    also = ALSO.get(field, {})
    assert record(also | {field: value})[column] != record(also)[column]


def test_momentum_is_that_of_muon_too(record):
    assert record({"optimizer": "muon", "momentum": 0.5})["loss"] != record({"optimizer": "muon"})["loss"]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_weights_decay_whatever_the_optimizer(record, name):
    assert record({"optimizer": name, "weight_decay": 0.1})["loss"] != record({"optimizer": name})["loss"]


def test_adam_and_adamw_differ_in_how_weights_decay(record):
    adam, adamw = (record({"optimizer": name, "weight_decay": 0.1})["loss"] for name in ("adam", "adamw"))
    assert adam != adamw


def test_validating_less_often_changes_nothing_else(record):
    assert record({"validate_every": 2})["loss"] == record({})["loss"]


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(dx.DxdyError, match=r"device: 'cuda'.*no GPU"):
        dx.train(dx.RunConfig(device="cuda"))
    assert list(here.iterdir()) == []


def test_device_decides_where_the_model_lives(here, monkeypatch):
    where = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: where.append(device) or model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("cpu", "cuda", "auto"):
        monkeypatch.setattr("dxdy_nb.training.parts.pick_optimizer", lambda config, model: 1 / 0)  # far enough
        with pytest.raises(ZeroDivisionError):
            dx.train(dx.RunConfig(**BASE, device=name))
    assert [device.type for device in where] == ["cpu", "cuda", "cuda"]


def test_every_field_is_among_the_changes():
    assert {field for field, *_ in CHANGES} | {"device"} == {f.name for f in dataclasses.fields(dx.RunConfig)}


def says(fragment):
    """Return a context that expects one DxdyError whose text holds a fragment, and keeps the error."""
    return pytest.raises(dx.DxdyError, match=fragment)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epoch", "epochs"),
        ("bach_size", "batch_size"),
        ("learning_rate", "lr"),
        ("Learning_Rate", "lr"),
        ("wd", "weight_decay"),
    ],
)
def test_an_unknown_key_is_named_with_what_was_meant(key, meant):
    with says(f"^{key}: unknown. Did you mean '{meant}'[?]$"):
        dx.RunConfig.from_dict({key: 1})


def test_an_unknown_key_that_resembles_nothing_lists_what_is_known():
    with says("^qqq: unknown. Known: accumulation_steps, batch_size, checkpoint_every, data, .*, world_size[.]$"):
        dx.RunConfig().override({"qqq": 1})


def test_every_alias_leads_to_a_field():
    fields = {f.name for f in dataclasses.fields(dx.RunConfig)}
    assert set(ALIASES.values()) <= fields
    assert not set(ALIASES) & fields


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"lr": 0}, "a number above 0 and at most 1000"),
        ({"lr": "fast"}, "a number above 0 and at most 1000"),
        ({"lr": float("nan")}, "a number above 0 and at most 1000"),
        ({"lr": True}, "a number above 0 and at most 1000"),
        ({"lr": None}, "a number above 0 and at most 1000"),
        ({"lr": [0.1]}, "a number above 0 and at most 1000"),
        ({"momentum": 1.5}, "a number from 0 to 1"),
        ({"momentum": -0.1}, "a number from 0 to 1"),
        ({"epochs": 2.5}, "a whole number from 1 to 1000000"),
        ({"epochs": False}, "a whole number from 1 to 1000000"),
        ({"epochs": float("inf")}, "a whole number from 1 to 1000000"),
        ({"seed": 2**32}, "a whole number from 0 to 4294967295"),
        ({"seed": 10**400}, "a whole number from 0 to 4294967295"),
        ({"lr": 10**400}, "a number above 0 and at most 1000"),
        ({"max_steps": 0}, "a whole number from 1 to 1000000000, or null"),
        ({"max_grad_norm": 0}, "a number above 0 and at most 1000000000000"),
        ({"optimizer": "rmsprop"}, "one of sgd, adam, adamw, muon"),
        ({"schedule": 1}, "one of constant, cosine, linear, step, one_cycle"),
        ({"accumulation_steps": 0}, "a whole number from 1 to 1000000"),
        ({"precision": "fp8"}, "one of fp32, bf16, fp16"),
        ({"data": ["digits"]}, "one of digits, spirals, sequences"),
    ],
)
def test_a_wrong_value_is_told_with_its_path_and_with_what_is_allowed(here, values, allowed):
    ((name, value),) = values.items()
    (here / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(dx.DxdyError) as caught:
        dx.RunConfig.load("run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {name}: expected {allowed}")
    assert f"got {value!r}" in str(caught.value)


def test_a_misspelt_choice_is_told_with_the_nearest():
    with says("optimizer: expected one of sgd, adam, adamw, muon; got 'adamm'. Did you mean 'adam'[?]$"):
        dx.RunConfig(optimizer="adamm")


def test_all_that_is_wrong_is_said_at_once(here):
    (here / "run.yaml").write_text("lr: -1\nepochs: many\nlearning_rate: 0.1\nmodel: cn\n")
    with pytest.raises(dx.DxdyError) as caught:
        dx.RunConfig.load(here / "run.yaml")
    lines = str(caught.value).splitlines()
    assert {line.removeprefix(f"{here}/run.yaml: ").split(":")[0] for line in lines} == {
        "lr", "epochs", "learning_rate", "model",
    }  # fmt: skip
    assert all(line.startswith(f"{here}/run.yaml: ") for line in lines)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": "cnn", "data": "spirals"}, "model"),
        ({"model": "gru", "data": "digits"}, "model"),
        ({"model": "mlp", "data": "sequences"}, "model"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum"),
        ({"schedule": "one_cycle", "warmup_steps": 3}, "warmup_steps"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(values, field):
    with says(f"^{field}: "):
        dx.RunConfig(**values)


@pytest.mark.parametrize("text", ["", "- lr\n", "lr\n", "3\n"])
def test_yaml_that_holds_no_fields_is_refused(here, text):
    (here / "run.yaml").write_text(text)
    with says("^run.yaml: expected lines like"):
        dx.RunConfig.load("run.yaml")


@pytest.mark.parametrize("content", [b"lr: [1", b"lr: \xff\xfe", b"lr: 2026-13-45", b"? [a]\n: 1", b"[" * 5000])
def test_a_file_that_is_not_yaml_is_named(here, content):
    (here / "run.yaml").write_bytes(content)
    with says("^run.yaml: not YAML"):
        dx.RunConfig.load("run.yaml")


def test_a_missing_file_is_named(here):
    with says("^absent.yaml: cannot be read"):
        dx.RunConfig.load("absent.yaml")


def test_a_number_that_yaml_reads_as_text_is_a_number(here):
    assert yaml.safe_load("1e-3") == "1e-3"
    (here / "run.yaml").write_text("lr: 1e-3\nmax_steps: 1e2\n")
    config = dx.RunConfig.load("run.yaml")
    assert (config.lr, config.max_steps) == (0.001, 100)
    assert type(config.max_steps) is int


def test_numbers_of_numpy_are_numbers():
    config = dx.RunConfig(lr=np.float32(0.5), seed=np.int64(3), momentum=np.float64(0.5))
    assert config == dx.RunConfig(lr=0.5, seed=3, momentum=0.5)
    assert [type(v) for v in (config.lr, config.seed, config.momentum)] == [float, int, float]


def test_a_text_of_another_kind_is_kept_as_a_plain_one(here):
    config = dx.RunConfig(optimizer=StrEnum("Kinds", ["ADAM"]).ADAM)
    config.save("config.yaml")
    assert dx.RunConfig.load("config.yaml") == config == dx.RunConfig(optimizer="adam")


@pytest.mark.parametrize("value", [np.array(["cnn", "mlp"]), np.bool_(True), SimpleNamespace()])
def test_what_no_field_holds_is_refused(value):
    with says("^model: expected one of cnn, mlp, gru; got "):
        dx.RunConfig(model=value)


@pytest.mark.parametrize("path", ["absent/config.yaml", "."])
def test_a_configuration_that_cannot_be_written_is_told_with_its_path(here, path):
    with says(f"^{path}: cannot be written"):
        dx.RunConfig().save(path)


def test_a_full_disk_leaves_the_configuration_that_was_there(here):
    dx.RunConfig(lr=0.1).save("config.yaml")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with says("^config.yaml: cannot be written"):
            dx.RunConfig(lr=0.2).save("config.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert dx.RunConfig.load("config.yaml").lr == 0.1
    assert [path.name for path in here.iterdir()] == ["config.yaml"]


def test_override_takes_texts_and_leaves_the_rest_alone():
    config = dx.RunConfig(momentum=0.5).override({"lr": "0.1", "seed": "3", "max_steps": None})
    assert config == dx.RunConfig(momentum=0.5, lr=0.1, seed=3)


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        dx.RunConfig().lr = 1.0


def test_assignments_are_read_as_numbers_truths_and_texts():
    items = ["lr=1e-3", "seed=3", "model=mlp", "max_steps=null", "flag=true", "name = a=b"]
    expected = {"lr": 0.001, "seed": 3, "model": "mlp", "max_steps": None, "flag": True, "name": "a=b"}
    assert parse_assignments(items) == expected


@pytest.mark.parametrize("text", ["[1", "2026-13-45", "[" * 5000])
def test_an_assignment_that_is_not_yaml_is_a_text(text):
    assert parse_assignments([f"name={text}"]) == {"name": text}


@pytest.mark.parametrize("items", [["lr"], ["=0.1"], [" =1"], ["lr=1", "lr=2"]])
def test_an_assignment_without_a_name_or_given_twice_is_refused(items):
    with pytest.raises(dx.DxdyError):
        parse_assignments(items)


NAMES = SimpleNamespace(
    fitting=st.sampled_from([("digits", "cnn"), ("digits", "mlp"), ("spirals", "mlp"), ("sequences", "gru")]),
    optimizing=st.one_of(
        st.tuples(st.sampled_from(["sgd", "muon"]), st.floats(0, 1)),
        st.tuples(st.sampled_from(["adam", "adamw"]), st.just(0.9)),
    ),
    scheduling=st.one_of(
        st.tuples(st.sampled_from(["constant", "cosine", "linear", "step"]), st.integers(0, 10**9)),
        st.just(("one_cycle", 0)),
    ),
)


@st.composite
def configs(draw):
    data, model = draw(NAMES.fitting)
    optimizer, momentum = draw(NAMES.optimizing)
    schedule, warmup_steps = draw(NAMES.scheduling)
    return dx.RunConfig(
        seed=draw(st.integers(0, 2**32 - 1)),
        data=data,
        model=model,
        loss=draw(st.sampled_from(["cross_entropy", "mse"])),
        optimizer=optimizer,
        lr=draw(st.floats(0, 1000, exclude_min=True)),
        momentum=momentum,
        weight_decay=draw(st.floats(0, 1000)),
        schedule=schedule,
        warmup_steps=warmup_steps,
        batch_size=draw(st.integers(1, 10**6)),
        accumulation_steps=draw(st.integers(1, 10**6)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        max_grad_norm=draw(st.none() | st.floats(0, 1e12, exclude_min=True)),
        init=draw(st.sampled_from(["default", "xavier", "kaiming"])),
        epochs=draw(st.integers(1, 10**6)),
        max_steps=draw(st.none() | st.integers(1, 10**9)),
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        validate_every=draw(st.integers(1, 10**6)),
    )


@given(config=configs())
def test_what_is_saved_is_loaded_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    config.save(path)
    assert dx.RunConfig.load(path) == config


@given(one=configs(), other=configs())
def test_fingerprints_are_equal_exactly_for_equal_configurations(one, other):
    assert (one.fingerprint == other.fingerprint) == (one == other)


@pytest.mark.parametrize(("field", "value"), sorted({(f, v) for f, v, _ in CHANGES} | {("device", "cpu")}, key=str))
def test_the_fingerprint_differs_when_a_field_differs(field, value):
    also = ALSO.get(field, {})
    config = dx.RunConfig(**BASE | also)
    assert config.override({field: value}).fingerprint != config.fingerprint


def test_the_fingerprint_does_not_depend_on_how_a_number_was_written():
    assert dx.RunConfig(lr=1, seed=2).fingerprint == dx.RunConfig(lr="1.0", seed=2.0).fingerprint


def test_a_record_from_before_a_field_came_into_being_is_read(here):
    old = (  # with the fingerprint that it was given then
        "seed: 0\ndata: digits\nmodel: cnn\nloss: cross_entropy\noptimizer: sgd\nlr: 0.05\nmomentum: 0.9\n"
        "weight_decay: 0.0\nschedule: cosine\nwarmup_steps: 0\nbatch_size: 64\nmax_grad_norm: null\ninit: kaiming\n"
        "epochs: 20\nmax_steps: null\ndevice: auto\nvalidate_every: 1\nfingerprint: eb0a59993018\n"
    )
    (here / "config.yaml").write_text(old)
    assert dx.RunConfig.load("config.yaml") == dx.RunConfig()
    (here / "config.yaml").write_text(old.replace("lr: 0.05\n", ""))
    with says("^config.yaml: was edited after it was recorded"):
        dx.RunConfig.load("config.yaml")


def test_a_file_that_was_edited_after_the_run_is_noticed(here):
    dx.RunConfig(lr=0.05).save("config.yaml")
    (here / "config.yaml").write_text((here / "config.yaml").read_text().replace("lr: 0.05", "lr: 0.06"))
    with says("^config.yaml: was edited after it was recorded"):
        dx.RunConfig.load("config.yaml")


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    for save, name in ((dx.RunConfig().save, "c.yaml"), (picture().save, "g.svg")):
        for place in ("file", "missing"):
            with pytest.raises(dx.DxdyError, match="cannot be written"):
                save(tmp_path / place / name)


def picture():
    return dx.graph((torch.ones(1, requires_grad=True) * 2).sum()).draw()
