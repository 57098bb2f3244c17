"""The script that a report writes runs in a process of its own, and shows the first error there."""

import contextlib
import subprocess
import sys

import pytest
import torch
from cases import CASES
from torch import nn

import dxdy_nb as dx
from dxdy_nb.errors import DxdyError


def run(path):
    return subprocess.run([sys.executable, path.name], cwd=path.parent, capture_output=True, text=True, timeout=120)


def set_up(batches, head=2, **more):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, head))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": batches, "optimizer": optimizer, **more}


def batches(*largest):
    return [(torch.randn(8, 3), torch.arange(8) % (top + 1)) for top in largest]


def test_a_crash_raises_the_same_exception_again(tmp_path):
    report = dx.diagnose(**set_up(batches(1, 1, 4, 1)))
    path = report.save_repro(tmp_path / "broken.py")
    assert report.errors[0].cause == "label-out-of-range"
    done = run(path)
    assert done.returncode == 1
    assert done.stdout == "tensor(0) tensor(4) 2\n"  # the check: smallest and largest label, width of the head
    assert "IndexError: Target 2 is out of bounds." in done.stderr
    assert "# error · data · label-out-of-range" in path.read_text()
    assert len(torch.load(path.with_suffix(".pt"), weights_only=True)["recorded"]) == 1  # the third alone will do


def test_a_model_that_became_another_type_since_is_kept_as_its_batches_were(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    report = dx.diagnose(model=model, loss_fn=nn.CrossEntropyLoss(), loader=batches(1, 1, 4, 1), optimizer=optimizer)
    model.double()(torch.ones(8, 3).double()).sum().backward()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    path = report.save_repro(tmp_path / "broken.py")
    assert "IndexError: Target 2 is out of bounds." in run(path).stderr
    assert all(t.dtype == before[name].dtype and t.equal(before[name]) for name, t in model.state_dict().items())
    assert all(p.grad.equal(grad) for p, grad in zip(model.parameters(), gradients, strict=True))


def test_a_crash_that_needs_the_step_before_it_gets_it(tmp_path):
    model = nn.RNN(3, 2, batch_first=True)
    carried = [torch.zeros(1, 4, 2)]

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        out, carried[0] = model(batch[0], carried[0])
        loss = loss_fn(out, batch[1])
        loss.backward()
        optimizer.step()
        return loss

    report = dx.diagnose(
        model=model,
        loss_fn=nn.MSELoss(),
        loader=[(torch.randn(4, 5, 3), torch.randn(4, 5, 2)) for _ in range(4)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=train_step,
    )
    assert report.errors[0].cause == "graph-used-twice"
    carried[0] = torch.zeros(1, 4, 2)
    done = run(report.save_repro(tmp_path / "twice.py"))
    assert done.returncode == 1
    assert "Trying to backward through the graph a second time" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["nan-in-inputs", "step-missing", "train-val-overlap", "graph-kept-by-logging"])
def test_the_evidence_is_printed_and_the_step_runs(name, tmp_path):
    setup = CASES[name].build(True)
    before = {n: v.clone() for n, v in setup["model"].state_dict().items()}
    done = run(dx.diagnose(**setup).save_repro(tmp_path / "case.py"))
    assert done.returncode == 0, done.stderr
    *evidence, step = done.stdout.splitlines()
    assert evidence and "the check raised" not in done.stdout
    assert step.startswith("step 0: loss")
    assert all(torch.equal(v, before[n]) for n, v in setup["model"].state_dict().items())


def test_the_loss_is_that_of_the_usual_step_in_this_process(tmp_path):
    given = set_up(batches(1, 1))
    given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=0.1, maximize=True)
    report = dx.diagnose(**given)
    assert report.errors[0].cause == "gradient-ascent"
    state = torch.get_rng_state()
    done = run(report.save_repro(tmp_path / "loss.py"))
    torch.set_rng_state(state)
    x, y = given["loader"][0]
    loss = nn.functional.cross_entropy(given["model"](x), y)
    assert done.stdout.splitlines()[-1] == f"step 0: loss {loss}"


class Named(nn.Linear):
    def forward(self, input, labels):
        return super().forward(input)


class Alone(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("model", "loss_fn", "kind", "loss"),
    [
        (
            Named(3, 2),
            nn.CrossEntropyLoss(),
            lambda x, y: {"input": x, "labels": y},
            lambda model, b: nn.functional.cross_entropy(model(**b), b["labels"]),
        ),
        (nn.Linear(3, 3), nn.MSELoss(), lambda x, y: x, lambda model, b: (model(b) - b).square().mean()),
        (Alone(3, 1), None, lambda x, y: x, lambda model, b: model(b)),
    ],
)
def test_batches_of_other_kinds(model, loss_fn, kind, loss, tmp_path):
    loader = [kind(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(3)]
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)  # it owns another model's weights
    report = dx.diagnose(model=model, loss_fn=loss_fn, loader=loader, optimizer=optimizer)
    assert not report.healthy
    done = run(report.save_repro(tmp_path / "other.py"))
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.split()
    torch.testing.assert_close(float(last), loss(model, loader[0]).item())


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        if i == 20:
            raise ValueError("sample 20 cannot be read")
        return torch.ones(3) * i, i % 2


def test_a_loader_that_raises_does_so_again(tmp_path):
    report = dx.diagnose(**set_up(torch.utils.data.DataLoader(Unreadable(), 8)))
    assert report.stage == "data"
    done = run(report.save_repro(tmp_path / "data.py"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: sample 20 cannot be read"


def test_what_cannot_be_pickled_is_left_out_or_said(tmp_path):
    class Loader(list):
        def __reduce__(self):
            raise TypeError("a database connection")

    report = dx.diagnose(**set_up(Loader(batches(4, 4))))
    assert "out of bounds" in run(report.save_repro(tmp_path / "less.py")).stderr

    class Loss(nn.CrossEntropyLoss):
        __reduce__ = Loader.__reduce__

    report = dx.diagnose(**set_up(batches(4, 4), loss_fn=Loss()))
    with pytest.raises(DxdyError, match="cannot be pickled: TypeError: a database connection"):
        report.save_repro(tmp_path / "none.py")


@pytest.mark.parametrize(("name", "words"), [("broken", "expected a script's name"), ("no/x.py", "cannot be written")])
def test_a_place_that_cannot_be_written_is_said(name, words, tmp_path):
    report = dx.diagnose(**set_up(batches(4)))
    with pytest.raises(DxdyError, match=words):
        report.save_repro(tmp_path / name)


def watched(loader, value=nn.functional.cross_entropy):
    torch.manual_seed(0)
    given = set_up(loader)
    model, optimizer = given["model"], given["optimizer"]
    with contextlib.suppress(IndexError), dx.watch() as w:
        for x, y in loader:
            optimizer.zero_grad()
            value(model(x), y).backward()
            optimizer.step()
    return w.diagnose(), given


def test_a_crash_that_was_watched_is_raised_again(tmp_path):
    report, _ = watched(batches(1, 1, 4, 1))
    assert report.errors[0].cause == "label-out-of-range"
    done = run(report.save_repro(tmp_path / "broken.py"))
    assert done.returncode == 1
    assert done.stdout == "tensor(0) tensor(4) 2\n"
    assert "IndexError: Target 2 is out of bounds." in done.stderr


def test_a_step_that_was_watched_runs_again_from_its_first_weights(tmp_path):
    def upside_down(output, target, weight=-1.0):
        return weight * nn.functional.cross_entropy(output, target)

    loader = batches(1, 1, 1, 1, 1)
    report, given = watched(loader, upside_down)
    now = {name: value.clone() for name, value in given["model"].state_dict().items()}
    state = torch.get_rng_state()
    done = run(report.save_repro(tmp_path / "sign.py"))
    assert done.returncode == 0 and "the check raised" not in done.stdout, done.stdout + done.stderr
    assert all(torch.equal(value, now[name]) for name, value in given["model"].state_dict().items())
    torch.manual_seed(0)
    first = set_up(loader)["model"]
    torch.set_rng_state(state)
    loss = upside_down(first(loader[0][0]), loader[0][1])
    assert done.stdout.splitlines()[-1] == f"step 0: loss {loss}"


@pytest.mark.parametrize("loader", [batches(4), batches(1, 1, 1)])
def test_what_cannot_be_run_again_is_said(loader, tmp_path):
    with contextlib.suppress(IndexError), dx.watch() as w:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        best = model.state_dict()
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(best)
    report = w.diagnose()
    assert report.errors[0].cause in ("label-out-of-range", "best-state-aliased")
    with pytest.raises(DxdyError, match=r"save_repro: (best_state|how the loop's step uses a batch) .*was not heard"):
        report.save_repro(tmp_path / "none.py")
