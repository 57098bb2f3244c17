"""What a checkpoint or a table of losses still tells, held against faults that were planted in real ones."""

import csv
import json
import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dxdy_nb import cli
from dxdy_nb.diagnosis.inspect import inspect
from dxdy_nb.errors import DxdyError


class Net(torch.nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def trained(steps=3, frozen=False, optimizer=torch.optim.AdamW):
    """Return model, optimizer, scheduler and scaler after some real steps."""
    torch.manual_seed(0)
    model = Net(frozen)
    optimizer = optimizer(model.parameters(), lr=0.1)
    scheduler, scaler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), torch.amp.GradScaler("cpu")
    advance(model, optimizer, scheduler, scaler, steps)
    return model, optimizer, scheduler, scaler


def advance(model, optimizer, scheduler, scaler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def checkpoint(model, optimizer, scheduler, scaler):
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return {name: thing.state_dict() for name, thing in states.items()} | {"epoch": 3, "last_epoch": 3}


def evidence(here, saved):
    torch.save(saved, here / "a.pt")
    return [finding.evidence for finding in inspect(here / "a.pt").findings]


@pytest.mark.parametrize("legacy", [False, True])
def test_a_healthy_checkpoint_raises_nothing_and_is_described(here, legacy):
    torch.save(checkpoint(*trained()), here / "a.pt", _use_new_zipfile_serialization=not legacy)
    report = inspect(here / "a.pt")
    assert report.findings == ()
    assert report.saw["weights ['model']"] == "9 tensors, 69 values: 8 float32, 1 int64"
    assert report.saw["optimizer ['optimizer'] group 0"].startswith("6 parameters, lr 0.0")
    assert report.saw["optimizer ['optimizer']"] == "6 parameters with state, steps 3"
    assert "last_epoch 3" in report.saw["scheduler ['scheduler']"]
    assert "scale 65536" in report.saw["scaler ['scaler']"]


def plant(part, name, value):
    def edit(saved):
        saved[part][name] = value

    return edit


def weight(name, index, value):
    def edit(saved):
        saved["model"][name][index] = value

    return edit


def moment(key, name, value):
    def edit(saved):
        saved["optimizer"]["state"][key][name].fill_(value)

    return edit


BROKEN = {"weights-not-finite", "optimizer-state-not-finite"}
FAULTS = [
    (weight("last.weight", (1, 3), math.nan), "weights-not-finite", "last.weight: 1 of 12 values, the first at [1, 3]"),
    (weight("norm.running_var", 2, math.inf), "weights-not-finite", "norm.running_var: 1 of 6 values"),
    (weight("norm.running_var", 2, 1e-20), "bn-statistics-odd", "norm.running_var goes from 1e-20 to"),
    (plant("model", "norm.num_batches_tracked", torch.tensor(0)), "bn-statistics-odd", "norm.num_batches_tracked is 0"),
    (weight("last.weight", ..., 0.5), "constant-weights", "last.weight [2, 6] is 0.5 everywhere"),
    (weight("first.weight", slice(2, 4), 0.0), "dead-units", "first.weight: 2 of 6 rows are zero"),
    (moment(0, "exp_avg_sq", math.inf), "optimizer-state-not-finite", "exp_avg_sq of first.weight"),
    (moment(4, "exp_avg_sq", 0.0), "never-stepped", "exp_avg_sq is zero for last.weight"),
    (moment(1, "step", 2.0), "never-stepped", "most parameters made 3 steps, but first.bias 2"),
    (lambda saved: saved["optimizer"]["state"].pop(5), "never-stepped", "no state for last.bias; 5 of 6"),
    (lambda saved: saved["optimizer"]["param_groups"][0].update(lr=0.0), "lr-is-zero", "lr is 0 in group 0"),
    (plant("scheduler", "last_epoch", 12), "cosine-past-tmax", "last_epoch 12, T_max 10"),
    (plant("scaler", "scale", 2.0**-4), "scaler-out-of-range", "scale 0.0625: gradients are not finite"),
    (plant("scaler", "scale", 0.0), "scaler-out-of-range", "scale 0: "),
    (plant("scaler", "scale", 2.0**60), "scaler-out-of-range", "no gradient ever overflows"),
    (plant("model", "more", torch.ones(2, 2).cumsum(0)), "not-in-optimizer", "it owns 6 parameters, and 7 tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "cause", "words"), FAULTS)
def test_a_planted_fault_is_found_alone(here, edit, cause, words):
    saved = checkpoint(*trained())
    edit(saved)
    torch.save(saved, here / "a.pt")
    (finding,) = inspect(here / "a.pt").findings
    assert (finding.cause, finding.severity) == (cause, "error" if cause in BROKEN or "scale 0:" in words else "hint")
    assert words in finding.evidence


def test_a_unit_that_nothing_reads_either_can_never_learn(here):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).requires_grad_(False)
    net[0].weight[1], net[2].weight[:, 1] = 0.0, 0.0
    net[0].weight[3] = 0.0
    assert evidence(here, net.state_dict()) == [
        "0.weight: 2 of 4 rows are zero; 1 of them are not read by 2.weight either: they can never learn"
    ]


def test_an_attention_mask_is_no_broken_weight(here):
    mask = torch.full((3, 3), -math.inf).triu(1)
    assert evidence(here, {"mask": mask, "first.weight": torch.randn(3, 3)}) == []


def test_two_checkpoints_tell_what_did_not_move_and_whose_it_is(here):
    model, *others = trained(frozen=True)
    saved = checkpoint(model, *others)
    torch.save(saved, here / "a.pt")
    advance(model, *others, steps=2)
    torch.save({"state_dict": {f"module.{n}": t for n, t in model.state_dict().items()}}, here / "b.pt")
    torch.save(checkpoint(model, *others), here / "c.pt")
    (finding,) = [f for f in inspect(here / "a.pt", here / "b.pt").findings if f.cause == "weights-frozen"]
    assert finding.evidence == "2 of 6 are as in a.pt: module.first.weight, module.first.bias"
    (finding,) = [f for f in inspect(here / "a.pt", here / "c.pt").findings if f.cause == "weights-frozen"]
    assert finding.evidence.endswith("first.weight, first.bias; in the optimizer: first.weight, first.bias")
    exec(finding.check.replace("a, b =", "import torch; a, b ="), {})  # the check is code that runs
    with pytest.raises(DxdyError, match="nothing to compare"):
        torch.save({"x": torch.ones(3)}, here / "d.pt")
        inspect(here / "d.pt", here / "c.pt")


def test_a_flipped_byte_is_found_by_the_checksum_that_torch_writes(here):
    saved = checkpoint(*trained())
    torch.save(saved, here / "a.pt")
    raw = bytearray((here / "a.pt").read_bytes())
    raw[raw.find(saved["model"]["first.weight"].numpy().tobytes()) + 3] ^= 1
    (here / "b.pt").write_bytes(raw)
    torch.load(here / "b.pt", weights_only=True)  # not a word
    assert [f.cause for f in inspect(here / "b.pt").errors] == ["checkpoint-damaged"]
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(saved, here / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert inspect(here / "c.pt").healthy  # without checksums nothing is proven


def test_other_nests_dtypes_and_odd_states_are_read(here):
    odd = {
        "state_dict": {"w": torch.randn(3, 2, dtype=torch.bfloat16), "c": torch.randn(3, dtype=torch.complex64)},
        "optimizer_states": [{"state": {0: "odd"}, "param_groups": [{"params": [0]}]}],
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(math.inf)}},
        "ema": [torch.randn(2), torch.randn(2).to(torch.float8_e4m3fn), torch.eye(2).to_sparse(), torch.empty(0)],
    }
    torch.save(odd, here / "a.ckpt")
    report = inspect(here / "a.ckpt")
    assert report.findings == ()
    assert report.saw["weights ['ema']"] == "4 tensors, 8 values: 3 float32, 1 float8_e4m3fn"
    assert not any(name.startswith("optimizer") for name in report.saw)


def test_safetensors_is_read_where_the_library_is_there(here):
    save = pytest.importorskip("safetensors.torch").save_file
    save({"w": torch.tensor([1.0, math.nan])}, here / "m.safetensors")
    assert [f.cause for f in inspect(here / "m.safetensors").errors] == ["weights-not-finite"]
    (here / "m.safetensors").write_bytes(b"abc")
    with pytest.raises(DxdyError, match="damaged, or no safetensors file"):
        inspect(here / "m.safetensors")


def zipped(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "hello")


def cut(path):
    torch.save({"w": torch.randn(99)}, path)
    path.write_bytes(path.read_bytes()[:-20])


BAD = [
    ("a.pt", lambda p: None, "cannot be read: No such file"),
    ("a.pt", Path.mkdir, "is no file"),
    ("a.pt", Path.touch, "is empty"),
    ("a.pt", cut, "is cut off: its end is missing"),
    ("a.pt", zipped, "is no checkpoint that torch.load can read: [enforce fail"),
    ("a.pt", lambda p: p.write_bytes(b"\x93\x01\xff" * 99), "is no checkpoint that torch.load can read safely"),
    ("a.pt", lambda p: p.write_text("hello\n"), "is no checkpoint that torch.load can read"),
    ("a.pt", lambda p: torch.save({"model": Net(), "at": Path("x")}, p), "holds more than tensors ("),
    ("a.pt", lambda p: torch.save({"at": Path("x")}, p, _use_new_zipfile_serialization=False), "(pathlib.PosixPath)"),
    ("a.pt", lambda p: torch.save({"epoch": 3}, p), "holds no tensor and no state of an optimizer: dict"),
    ("a.npz", lambda p: np.savez(p, x=np.ones(3)), "is no checkpoint that torch.load can read"),
    ("a.csv", lambda p: p.write_bytes(b"step,loss\n\0\0\xff"), "neither a checkpoint nor a text table"),
    ("a.csv", lambda p: p.write_bytes(b"\xff\xfe1,2\n"), "neither a checkpoint nor a text table"),
    ("a.csv", lambda p: p.write_text("\n\n\n"), "no column of numbers is called loss"),
    ("a.csv", lambda p: p.write_text("step,loss\n1,0.5\n2,n/a\n"), "column loss cannot be read: line 3 has 'n/a'"),
    ("a.csv", lambda p: p.write_text("step;loss\n1;0,5\n"), "line 2 has '0,5', and a number is written like 1234.5"),
    ("a.csv", lambda p: p.write_text("step,loss\n"), "column loss cannot be read: no cell has a number"),
    ("a.csv", lambda p: p.write_text("step,name\n1,a\n2,b\n"), "Columns: step, name"),
    ("a.csv", lambda p: p.write_text("1,2,3\n4,5,6\n"), "Columns: 0, 1, 2"),
    ("a.csv", lambda p: p.write_text("step,loss\n1,nan\n2,0.5\n3,inf\n"), "3 losses in column loss, fewer than two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "words"), BAD)
def test_bad_input_is_one_clear_line_and_ends_with_2(here, capsys, name, make, words):
    make(here / name)
    assert cli.main(["inspect", str(here / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err


def test_losses_up_to_the_end_of_a_floats_range_have_a_picture(here):
    (here / "a.csv").write_text("loss\n" + "".join(f"{sign}1e308\n" for sign in ("-", "") * 20))
    assert inspect(here / "a.csv").saw["curve"] == "▁█" * 20


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(here):
    (here / "a.pt").touch(0)
    with pytest.raises(DxdyError, match="cannot be read: Permission denied"):
        inspect(here / "a.pt")


def test_the_command_ends_with_0_for_hints_and_1_for_an_error(here, capsys):
    (here / "a.csv").write_text("loss\n" + "0.6931\n" * 30)
    assert cli.main(["inspect", str(here / "a.csv")]) == 0
    assert "chance level of 2 classes, ln(2)" in capsys.readouterr().out
    (here / "b.csv").write_text("loss\n2\n1\nnan\n")
    assert cli.main(["inspect", str(here / "b.csv"), "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["healthy"], read["stage"], read["findings"][0]["cause"]) == (False, "loss", "loss-not-finite")
    assert cli.main(["inspect", str(here / "a.csv"), str(here / "b.csv")]) == 2
    assert "two files are compared when both are checkpoints" in capsys.readouterr().err


# --- curves ---------------------------------------------------------------------------------------------------------


def curve(rng, rows=400, noise=0.05):
    """Return a healthy curve: a fall, a floor, and noise in proportion."""
    fall = rng.uniform(1.5, 4) * np.exp(-np.arange(rows) / (rows * rng.uniform(0.03, 0.4)))
    return (rng.uniform(0.05, 0.6) + fall) * np.exp(noise * rng.standard_normal(rows))


def of(here, losses, steps=None, head="step,loss"):
    with (here / "loss.csv").open("w", newline="") as file:
        file.write(head + "\n")
        csv.writer(file).writerows(zip(range(len(losses)) if steps is None else steps, losses, strict=True))
    return inspect(here / "loss.csv").findings


NOISE = np.random.default_rng(7).standard_normal(400)


def single(y):
    y[200] += 3


def slow(y):
    y[200:] += 3 * np.exp(-np.arange(200) / 20)


def step_up(y):
    y[200:] += 2


def collapse(y):
    y[200:] = math.log(10) + 0.01 * NOISE[:200]


def diverge(y):
    y[300:] *= 1.05 ** np.arange(100)


def saw(y):
    y += 0.5 * (np.arange(400) % 23.5) / 23.5


def chance(y):
    y[:] = math.log(10) + 0.02 * NOISE


def repeated(y):
    y[100::75] += 4


KINDS = [
    (single, "loss-spike", 200, "at step 200 ("),
    (slow, "loss-spike-decays", 200, "back at step 2"),
    (step_up, "loss-steps-up", 200, "; 200 rows later, at the end, "),
    (collapse, "loss-steps-up", 200, "the chance level of 10 classes, ln(10)"),
    (diverge, "loss-rises", 300, "by a factor of 1.0"),
    (saw, "loss-periodic", 0, "falls at once and rises in between every 23.5 rows"),
    (chance, "loss-flat", 0, "the chance level of 10 classes, ln(10)"),
    (repeated, "loss-spike", 100, "every 75 rows: at step 100"),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("plant", "cause", "row", "words"), KINDS)
def test_a_planted_kind_is_told_where_it_begins(here, seed, plant, cause, row, words):
    y = curve(np.random.default_rng(seed))
    plant(y)
    (finding,) = of(here, y)
    assert (finding.cause, finding.severity) == (cause, "hint")
    assert words in finding.evidence
    assert abs(int(finding.where.rsplit(" ", 1)[1]) - row) <= 15


NOISES = {
    "proportional": lambda rng, y: y * np.exp(rng.uniform(0.01, 0.3) * rng.standard_normal(len(y))),
    "even": lambda rng, y: y + 0.1 * rng.standard_normal(len(y)),
    "exponential": lambda rng, y: y + 0.05 * rng.laplace(size=len(y)),
    "none": lambda rng, y: y,
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rows", [40, 300, 1000])
def test_a_healthy_curve_gives_no_finding_over_60_seeds(here, noise, rows):
    for seed in range(60):
        rng = np.random.default_rng([seed, rows])
        assert of(here, NOISES[noise](rng, curve(rng, rows, 0.0))) == (), seed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_subnormal=False) | st.sampled_from([0.0, 1.0, math.nan]), min_size=1, max_size=120))
def test_any_numbers_get_a_report_or_a_clear_line(tmp_path_factory, losses):
    here = tmp_path_factory.getbasetemp()
    if np.isfinite(losses).sum() < 2:
        with pytest.raises(DxdyError, match="fewer than two"):
            of(here, losses)
    else:
        found = of(here, losses)
        bad = ~np.isfinite(losses)
        assert any(f.severity == "error" for f in found) == (bad.any() and bad[bad.argmax() :].all())


def test_not_finite_is_an_error_when_it_stays_and_the_rows_before_are_shown(here, capsys):
    y = curve(np.random.default_rng(0), noise=0.0)
    y[350:] = math.nan
    (finding,) = of(here, y)
    assert finding.severity == "error"
    assert finding.evidence.startswith("nan first at step 350, and in every row after it; the rows before: ")
    assert finding.evidence.endswith(f"{y[349]:.4g}") and finding.evidence.count(",") == 10
    exec(finding.check, {})
    assert capsys.readouterr().out.splitlines()[10] == "350,nan"
    y[360:] = 0.1
    assert [f.severity for f in of(here, y) if f.cause == "loss-not-finite"] == ["hint"]


def test_a_counter_that_goes_back_is_a_resume_and_steps_made_twice_are_compared(here):
    y = np.concatenate([curve(np.random.default_rng(0), noise=0.0), np.full(200, 0.9)])
    steps = [*range(400), *range(300, 500)]
    finding = next(f for f in of(here, y, steps) if f.cause == "resumed-earlier")
    assert "the counter goes from 399 back to 300" in finding.evidence
    assert f"the loss is {y[300:400].mean():.4g} and then 0.9 in 100 steps that it made twice" in finding.evidence
    assert of(here, curve(np.random.default_rng(0)), [i % 50 for i in range(400)]) == ()  # the step within an epoch


@pytest.mark.parametrize(
    ("text", "column", "rows"),
    [
        ("loss\n3\n2\n1\n", "loss", 3),
        ("3\n2\n1\n", "loss", 3),
        ("0 3\n10 2\n20 1\n", "loss", 3),
        ("step;train/loss;val_loss\n1;3;4\n2;;\n3;2;\n", "train/loss", 2),
        ("\ufeffWall time,Step,Value\n0.5,1,3\n0.6,2,2\n", "Value", 2),
        ("epoch\tval_loss\tacc\n1\t2\t3\n2\t1\t3\n", "val_loss", 2),
        ("val_loss,Training Loss\n1,5\n2,6\n", "Training Loss", 2),
        ('"loss","note"\n"3","a, b"\n"2","c"\n', "loss", 2),
    ],
)
def test_tables_of_many_kinds_are_read(here, text, column, rows):
    (here / "t.csv").write_text(text)
    assert inspect(here / "t.csv").saw["column"] == f"{column}: {rows} losses, 0 not finite"


@pytest.mark.parametrize("count", [20, 60])
def test_a_loss_that_rises_from_its_first_row_on(tmp_path, count):
    (tmp_path / "loss.csv").write_text("step,loss\n" + "".join(f"{i},{i}\n" for i in range(1, count + 1)))
    assert [finding.cause for finding in inspect(tmp_path / "loss.csv").findings] == ["loss-rises"]


def test_losses_near_the_end_of_a_floats_range_are_read_without_a_warning(tmp_path):
    (tmp_path / "loss.csv").write_text("step,loss\n" + "".join(f"{i},1.{i:02}e308\n" for i in range(60)))
    assert inspect(tmp_path / "loss.csv").errors == ()  # warnings are errors here
