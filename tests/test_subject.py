import math
import random
import re
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dxdy_nb as dx
from dxdy_nb.diagnosis import witness
from dxdy_nb.diagnosis.diagnose import diagnose
from dxdy_nb.diagnosis.subject import preserved, subject_of
from dxdy_nb.errors import DxdyError
from dxdy_nb.observe.batches import is_one_shot


def set_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    given = {"model": model, "loss_fn": nn.MSELoss(), "loader": loader, "optimizer": optimizer, "scheduler": scheduler}
    return subject_of(given)


def train(subject):
    for x, y in subject.loader:
        subject.optimizer.zero_grad()
        subject.loss_fn(subject.model(x), y).backward()
        subject.optimizer.step()
        subject.scheduler.step()


def state(subject):
    tensors = [*subject.model.state_dict().values(), *(p.grad for p in subject.model.parameters())]
    moments = [v for s in subject.optimizer.state.values() for v in s.values()]
    plain = [g["lr"] for g in subject.optimizer.param_groups], subject.scheduler.last_epoch, subject.model.training
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    return [None if t is None else t.clone() for t in (*tensors, *moments)], plain, generators


def same(a, b):
    tensors = all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    return tensors and a[1] == b[1] and torch.equal(a[2][0], b[2][0]) and a[2][1:] == b[2][1:]


@pytest.mark.parametrize("trained", [False, True])
def test_what_belongs_to_the_subject_is_put_back_bit_by_bit(trained):
    subject = set_up()
    if trained:
        train(subject)
    before = state(subject)
    gradients = [p.grad for p in subject.model.parameters()]
    with preserved(subject):
        train(subject)
        subject.model.eval()
        subject.model[0].weight.requires_grad_(False)
        subject.model.double()
        np.random.rand()
        random.random()
        assert not torch.equal(subject.model[3].weight.float(), before[0][0])
    assert same(before, state(subject))
    assert all(a is p.grad for a, p in zip(gradients, subject.model.parameters(), strict=True))
    assert all(p.requires_grad for p in subject.model.parameters())


def test_a_run_after_it_is_the_run_without_it():
    plain, other = set_up(), set_up()
    with preserved(other):
        train(other)
    torch.manual_seed(5)
    train(plain)
    torch.manual_seed(5)
    train(other)
    assert same(state(plain), state(other))


def test_a_module_that_was_replaced_and_hooks_are_put_back():
    subject = set_up()
    layer = subject.model[0]
    with preserved(subject):
        subject.model[0] = nn.Linear(3, 4)
        layer.register_forward_hook(lambda *_: None)
    assert subject.model[0] is layer
    assert not layer._forward_hooks


def test_hooks_on_gradients_are_put_back_and_those_that_were_there_stay():
    subject, heard = set_up(), []
    weight, bias = subject.model[3].parameters()
    weight.register_hook(lambda _: heard.append("mine"))
    with preserved(subject):
        for p in (weight, bias):
            p.register_hook(lambda _: heard.append("left"))
            p.register_post_accumulate_grad_hook(lambda _: heard.append("left"))
    bias.register_post_accumulate_grad_hook(lambda _: heard.append("later"))
    train(subject)
    assert sorted(set(heard)) == ["later", "mine"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "torch.nn.Module"),
        ({"model": nn.LazyLinear(2)}, "without a shape"),
        ({"model": nn.Linear(1, 1, device="meta")}, "meta"),
        ({"model": nn.Linear(1, 1), "loss_fn": 3}, "loss_fn="),
        ({"model": nn.Linear(1, 1), "optimizer": "adam"}, "optimizer"),
        ({"model": nn.Linear(1, 1), "loader": 7}, "loader="),
        ({"model": nn.Linear(1, 1), "loader": "train"}, "loader= .* got str"),
        ({"model": nn.Linear(1, 1), "val_loader": 7}, "val_loader="),
        ({"model": nn.Linear(1, 1), "accumulation_steps": 0}, "accumulation_steps="),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_is_no_set_up_is_refused_with_words(given, words):
    with pytest.raises(DxdyError, match=words):
        subject_of(given)


def test_an_iterator_can_be_read_only_once():
    assert is_one_shot(iter([1]))
    assert not is_one_shot([1])


class _Stream(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(3)
            yield x, x.sum(0, keepdim=True)


def _set_up(**given):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return {"model": model, "loss_fn": nn.MSELoss(), "optimizer": optimizer} | given


def test_a_stream_without_a_length_is_healthy():
    assert diagnose(**_set_up(loader=DataLoader(_Stream(), 8)), time_limit=6).healthy


def test_batches_without_tensors_are_told_apart():
    def train_step(model, batch, optimizer, loss_fn, step):
        x = torch.tensor(batch)
        optimizer.zero_grad()
        loss = loss_fn(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss

    assert diagnose(**_set_up(loader=torch.randn(8, 8, 3).tolist(), train_step=train_step)).healthy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loader": []}, "no batch came"),
        ({}, "without a loader"),
        ({"loader": [(torch.randn(4, 3), torch.randn(4, 1))], "optimizer": None}, "no optimizer was given"),
    ],
)
def test_what_is_missing_is_said(given, words):
    report = diagnose(**_set_up(**given))
    assert words in str(report)
    assert report.healthy == (given.get("loader") != [])


def test_the_time_limit_holds_for_slow_steps():
    def train_step(model, batch, optimizer, loss_fn, step):
        time.sleep(0.4)
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    began = time.monotonic()
    diagnose(**_set_up(loader=[(torch.randn(4, 3), torch.randn(4, 1))] * 4, train_step=train_step), time_limit=2)
    assert time.monotonic() - began < 4


def test_numbers_that_make_no_sense_are_refused():
    for given in ({"time_limit": "3"}, {"steps": 0}, {"batches": -1}):
        with pytest.raises(DxdyError, match=next(iter(given))):
            diagnose(**_set_up(loader=[]), **given)


def _loop(model, optimizer, loss):
    for _ in range(6):
        optimizer.zero_grad()
        loss(model, torch.randn(4, 3)).backward()
        optimizer.step()


def test_an_error_of_ours_does_not_reach_the_loop(monkeypatch):
    monkeypatch.setattr(witness, "_gradient", lambda p: 1 / 0)
    model = nn.Linear(3, 1)
    with dx.watch() as w:
        _loop(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x).square().mean())
    report = w.diagnose()
    assert report.healthy
    assert "ZeroDivisionError" in str(report.unchecked)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_losses_under_watch_can_be_scripted_and_mapped():
    class Scored(nn.Module):
        def forward(self, x):
            return F.mse_loss(x, torch.zeros_like(x))

    with dx.watch():
        torch.jit.script(Scored())
        torch.func.vmap(torch.func.grad(lambda x: F.mse_loss(x, x.detach() * 2)))(torch.ones(3, 2))


def test_losses_are_torchs_own_again_whichever_watch_ends_first():
    before = {name: value for name, value in vars(F).items() if callable(value)}
    first, second = dx.watch(), dx.watch()
    first.__enter__()
    second.__enter__()
    assert F.mse_loss is not before["mse_loss"]
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert {name: value for name, value in vars(F).items() if callable(value)} == before


def test_forwards_without_training_are_no_missing_backward():
    model = nn.Linear(3, 1)
    with dx.watch() as w:
        for (x,) in DataLoader(TensorDataset(torch.randn(32, 3)), 4):
            model(x)
    assert w.diagnose().healthy


class Cleans(nn.Linear):
    def forward(self, x):
        return super().forward(x.nan_to_num())


@pytest.mark.parametrize(("part", "layer", "told"), [
    ("input", nn.Linear, ["nan-in-inputs"]), ("target", nn.Linear, ["nan-in-targets"]), ("input", Cleans, []),
])  # fmt: skip
def test_nan_in_the_data_is_found_where_the_loss_is_written_by_hand_and_no_step_can_be_run_again(part, layer, told):
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x.sum(1, keepdim=True)
    (x if part == "input" else y)[21, 0] = math.nan  # in the third batch of eight
    model = layer(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dx.watch(model, optimizer) as w:
        for a, b in DataLoader(TensorDataset(x, y), 8):
            optimizer.zero_grad()
            ((model(a) - b) ** 2).mean().backward()
            optimizer.step()
    errors = w.diagnose().errors
    assert [e.cause for e in errors] == told
    assert all(e.where == "step 2, samples 5" for e in errors)


def test_a_loss_that_is_lost_is_told_where_nothing_could_be_tried():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e4)
    with dx.watch(model, optimizer) as w:
        for (a,) in DataLoader(TensorDataset(x), 4):
            optimizer.zero_grad()
            ((model(a) - 1) ** 2).mean().backward()
            optimizer.step()
    report = w.diagnose()
    first = int(w.steps["loss"].map(math.isfinite).idxmin())
    assert f"not finite, first at step {first}," in str(report)


def _lost(loss_of, at=0, steps=32, update=lambda optimizer, loss: optimizer.step()):
    """Train a line under watch by a loss that is written out, from step ``at`` on ``loss_of``; return what is found."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(4 * steps, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for step, (a,) in enumerate(DataLoader(TensorDataset(x), 4)):
            out = model(a)
            loss = loss_of(out) if step >= at else ((out - 1) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            update(optimizer, loss)
    return [(e.stage, e.cause, e.where, e.evidence) for e in w.diagnose().errors]


@pytest.mark.parametrize(
    ("operation", "loss_of"),
    [
        ("exp", lambda out: torch.exp(out * 1e5 + 1e5).mean()),
        ("div", lambda out: ((out + 1) / (out - out.detach())).mean()),
    ],
)
def test_a_loss_that_is_written_out_and_overflows_is_an_error_of_the_loss(operation, loss_of):
    ((stage, cause, where, evidence),) = _lost(loss_of)
    assert (stage, cause, where) == ("loss", "loss-not-finite", "step 0")
    assert all(f"{part} are finite" in evidence for part in ("inputs and targets", "outputs", "parameters"))
    assert evidence.endswith(f"the first operation whose result is not finite is {operation}")


def test_a_logarithm_of_zero_is_named_in_a_loss_that_no_function_made():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), 1e4 * torch.randn(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for a, y in DataLoader(TensorDataset(x, torch.eye(3).repeat(22, 1)[:64]), 8):
            p = model(a).softmax(1)
            loss = (-(y * torch.log(p))).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (error,) = w.diagnose().errors
    assert (error.stage, error.cause, error.where) == ("loss", "log-of-zero", "step 0")
    assert error.evidence.startswith("step 0: the loss is nan; inputs and targets are finite")


def test_a_loss_that_is_lost_behind_the_first_steps_is_found_in_the_record():
    ((stage, cause, where, evidence),) = _lost(lambda out: torch.exp(out + 1e3).mean(), at=28)
    assert (stage, cause, where) == ("loss", "loss-not-finite", "step 28")
    assert evidence.startswith("step 28: the loss is inf; losses before it: 0.")


def _cut(out):
    """A finite loss, with a root whose slope at 0 is not."""
    return (out * out).mean() + (out - out).square().sum().sqrt()


def test_a_gradient_that_is_lost_behind_the_first_steps_is_found_in_the_record():
    ((stage, cause, where, evidence),) = _lost(_cut, at=28)
    assert (stage, cause, where) == ("backward", "nan-gradient", "weight, bias")
    told = r"step 28: the loss is \d\S+; the gradient of weight, bias is not finite; .*before it: 0\."
    assert re.match(told, evidence)


def test_a_gradient_that_a_loop_mends_or_leaves_out_behind_the_first_steps_is_none_that_is_lost():
    def mended(optimizer, loss):
        for p in optimizer.param_groups[0]["params"]:
            p.grad.nan_to_num_()
        optimizer.step()

    def left_out(optimizer, loss):
        if all(p.grad.isfinite().all() for p in optimizer.param_groups[0]["params"]):
            optimizer.step()

    assert [_lost(_cut, at=28, update=update) for update in (mended, left_out)] == [[], []]


def test_a_loop_that_leaves_out_a_loss_that_is_not_finite_misses_no_step():
    left_out = _lost(lambda out: torch.exp(out + 1e3).mean(), update=lambda o, loss: loss.isfinite() and o.step())
    assert [cause for _, cause, *_ in left_out] == ["loss-not-finite"]


@pytest.mark.parametrize(("of", "power"), [(torch.square, 1), (torch.abs, 1), (torch.square, 0.5)])
@pytest.mark.parametrize(
    ("apart_of", "found"),
    [
        (lambda out, y: out - y, ["mse-broadcast"]),  # [8, 1] - [8]: all 64 pairs
        (lambda out, y: out - y[:, None], []),
        (lambda out, y: out[:, 0] - y, []),
    ],
)
def test_a_loss_that_is_written_out_over_all_pairs_is_found_by_its_slope(of, power, apart_of, found):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(96, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for a, y in DataLoader(TensorDataset(x, x.sum(1)), 8):
            optimizer.zero_grad()
            (3 * of(apart_of(model(a), y)).mean() ** power).backward()
            optimizer.step()
    report = w.diagnose()
    assert [error.cause for error in report.errors] == found
    assert not any("raised" in note for note in report.unchecked)


def _by_hand(loss, model):
    for p, gradient in zip(model.parameters(), torch.autograd.grad(loss.mean(), [*model.parameters()]), strict=True):
        p.grad = gradient


@pytest.mark.parametrize(
    ("loss_of", "backward", "told"),
    [
        (lambda e: (e * e).mean() + (e - e).square().sum().sqrt(), lambda loss, model: loss.backward(), "the loss is "),
        (lambda e: e * math.nan, lambda loss, model: loss.backward(torch.ones_like(loss)), "no loss was heard, "),
        (lambda e: e * math.nan, _by_hand, "no loss was heard, "),
    ],
)
def test_a_gradient_that_is_not_finite_is_found_where_the_step_cannot_be_run_again(loss_of, backward, told):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for step, (a,) in enumerate(DataLoader(TensorDataset(x), 4)):
            optimizer.zero_grad()
            error = model(a) - 1
            backward(loss_of(error) if step >= 2 else (error * error).mean(), model)
            optimizer.step()
    (error,) = w.diagnose().errors
    assert (error.stage, error.cause) == ("backward", "nan-gradient")
    assert error.evidence.startswith(f"step 2: {told}")


def test_what_a_loop_makes_of_a_loss_functions_value_is_the_loss():
    torch.manual_seed(0)
    model, x, loss_fn = nn.Linear(3, 1), torch.randn(64, 3), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for step, (a,) in enumerate(DataLoader(TensorDataset(x), 4)):
            optimizer.zero_grad()
            (loss_fn(model(a), a[:, :1]) * (math.nan if step == 2 else 1)).backward()
            optimizer.step()
    (error,) = w.diagnose().errors
    assert (error.stage, error.where) == ("loss", "step 2")


def test_a_batch_that_the_loop_spoils_itself_is_not_called_finite():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for (a,) in DataLoader(TensorDataset(x), 4):
            optimizer.zero_grad()
            ((model(a / 0) - 1) ** 2).mean().backward()
            optimizer.step()
    assert "inputs and targets are not finite" in w.diagnose().errors[0].evidence


def test_a_loss_that_a_scaler_has_scaled_too_far_is_none_that_is_lost():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(256, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        for (a,) in DataLoader(TensorDataset(x), 4):
            optimizer.zero_grad()
            scaler.scale(((model(a) - 1e5) ** 2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.steps["loss"].map(math.isinf)[0] and w.diagnose().healthy


def _classes(loss, step=lambda optimizer, closure: (closure(), optimizer.step()), optimizer=torch.optim.Adam):
    """Train on three classes under watch, and return the report."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, y = optimizer(model.parameters()), torch.arange(48) % 3
    x = torch.randn(3, 3)[y] + torch.randn(48, 3)
    with suppress(TypeError), dx.watch() as w:
        for _ in range(3):
            for a, b in DataLoader(TensorDataset(x, y), 12):

                def closure(a=a, b=b):
                    optimizer.zero_grad()
                    value = loss(model(a), b)
                    value.backward()
                    return value

                step(optimizer, closure)
    assert sys.getprofile() is None
    return w.diagnose()


def test_classes_that_are_one_hot_for_a_squared_error_are_no_numbers():
    report = _classes(lambda out, y: F.mse_loss(out, F.one_hot(y, 3).float()))
    assert [finding.cause for finding in report.findings] == []


def test_a_closure_that_is_asked_often_accumulates_nothing():
    report = _classes(F.cross_entropy, lambda optimizer, closure: optimizer.step(closure), torch.optim.LBFGS)
    assert [finding.cause for finding in report.findings] == []
    assert report.unchecked == ()


def _by_hand_softmax(out):
    return out.exp() / out.exp().sum(1, keepdim=True)


def _taught(y):
    return (2.0 * F.one_hot(y, 4)).softmax(1)


@pytest.mark.parametrize(
    ("loss_of", "cause"),
    [
        (lambda out, y: F.cross_entropy(out.softmax(1), y), "softmax-then-ce"),
        (lambda out, y: nn.CrossEntropyLoss(label_smoothing=0.1)(out.softmax(1)[2:], y[2:]), "softmax-then-ce"),
        (lambda out, y: F.cross_entropy(out.softmax(1), _taught(y)), "softmax-then-ce"),
        (lambda out, y: F.nll_loss(out.softmax(1).log_softmax(1), y), "softmax-then-ce"),
        (lambda out, y: F.cross_entropy(_by_hand_softmax(out), y), "softmax-then-ce"),
        (lambda out, y: F.binary_cross_entropy_with_logits(out.sigmoid(), _taught(y)), "sigmoid-then-bcelogits"),
        (lambda out, y: F.nll_loss(out, y), "nll-on-logits"),
        (lambda out, y: F.nll_loss(out.softmax(1), y), "nll-on-logits"),
        (lambda out, y: F.nll_loss(out.softmax(1).log(), y), ""),
        (lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 4).float()), ""),
        (lambda out, y: F.nll_loss((1 - out.softmax(1)) ** 2 * out.log_softmax(1), y), ""),  # the focal loss
        (lambda out, y: F.cross_entropy(out, _taught(y)), ""),  # distillation
        (lambda out, y: F.kl_div(out.log_softmax(1), _taught(y), reduction="batchmean"), ""),
        (lambda out, y: F.cross_entropy(out.softmax(1) @ torch.eye(4).mul(9), y), ""),  # a gate, and a layer behind it
    ],
)
def test_what_a_loss_takes_is_read_wherever_it_was_made(loss_of, cause):
    torch.manual_seed(0)
    y = torch.randint(0, 4, (96,))
    loader = DataLoader(TensorDataset(3 * torch.randn(4, 5)[y] + torch.randn(96, 5), y), 8, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    given = {"model": model, "loader": loader, "optimizer": optimizer}
    numbers = "_by_hand_softmax" in loss_of.__code__.co_names  # no operation tells: cross_entropy must be heard itself
    reports = [] if numbers else [dx.diagnose(**given, loss_fn=loss_of), dx.diagnose(**given, train_step=train_step)]
    with dx.watch(model, optimizer) as w:
        for batch in loader:
            train_step(model, batch, optimizer, None, 0)
    causes = [[finding.cause for finding in report.errors] for report in (*reports, w.diagnose())]
    assert causes == [[cause] * bool(cause)] * len(causes)
    assert not any("the output is" in finding.evidence for finding in w.diagnose().errors)  # the model gives logits


@pytest.mark.parametrize("own", ["loss_fn", "train_step"])
def test_a_softmax_is_left_out_wherever_it_stands(own):
    def loss_fn(out, y):
        return F.cross_entropy(out.softmax(1) if own == "loss_fn" else out, y)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss_fn(model(batch[0]).softmax(1), batch[1]).backward()
        optimizer.step()

    torch.manual_seed(0)
    y, model = torch.randint(0, 4, (96,)), nn.Linear(5, 4)
    x = 3 * torch.randn(4, 5)[y] + torch.randn(96, 5)
    given = {"model": model, "loader": DataLoader(TensorDataset(x, y), 8), "loss_fn": loss_fn}
    given |= {"train_step": train_step} if own == "train_step" else {}
    (error,) = dx.diagnose(**given, optimizer=torch.optim.Adam(model.parameters(), 0.01)).errors
    assert error.try_fix().confirmed


def _drops():
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def _epochs(model, optimizer, epochs, before):
    for epoch in range(epochs):
        before(epoch)
        for x, y in DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 1)), 4):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        F.mse_loss(model(torch.randn(8, 3)), torch.randn(8, 1))  # a validation that forgot no_grad


@pytest.mark.parametrize(
    ("make", "back", "found"),
    [
        (_drops, 2, True),
        (_drops, 9, False),  # each epoch begins with model.train()
        (lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)), 2, False),
    ],
)
def test_a_model_that_stays_in_eval_mode_behind_the_first_steps_is_found_in_the_record(make, back, found):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch(model, optimizer) as w:
        _epochs(model, optimizer, 4, lambda epoch: epoch < back and model.train())
    report = w.diagnose()
    assert [(f.cause, "from step 32 to 63" in f.evidence) for f in report.errors] == [("eval-mode-stuck", True)] * found
    assert " of 64 steps; of the later ones only " in report.saw["judged"]


def test_a_part_that_is_done_with_training_may_be_in_eval_mode():
    torch.manual_seed(0)
    model, head = _drops(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dx.watch() as w:
        _epochs(model, optimizer, 2, lambda _: model.train())
        _epochs(nn.Sequential(model.eval(), head), torch.optim.SGD(head.parameters(), 0.01), 2, lambda _: model.eval())
    assert not w.diagnose().errors


def rings():
    y = torch.arange(1024) % 4
    angle = 2 * math.pi * torch.rand(1024)
    radius = y + 1 + 0.1 * torch.randn(1024)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y


@pytest.mark.parametrize(("mixed", "causes"), [(False, []), (True, ["labels-misaligned"])])
def test_labels_that_are_in_no_linear_relation_are_no_wrong_ones(mixed, causes):
    torch.manual_seed(0)
    x, y = rings()
    model = nn.Linear(2, 4)
    loader = DataLoader(TensorDataset(x, y[torch.randperm(1024)] if mixed else y), 64, shuffle=True)
    given = {"model": model, "loader": loader, "optimizer": torch.optim.SGD(model.parameters(), 0.01)}
    report = dx.diagnose(**given, loss_fn=nn.CrossEntropyLoss())
    assert [finding.cause for finding in report.findings] == causes


def test_a_rate_that_is_too_large_is_lowered_until_the_loss_falls_no_further_and_blames_no_decay():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    given = {"model": model, "loader": DataLoader(TensorDataset(*rings()), 64), "loss_fn": nn.CrossEntropyLoss()}
    (finding,) = dx.diagnose(**given, optimizer=torch.optim.AdamW(model.parameters(), 10.0)).findings
    assert finding.cause == "lr-too-large" and finding.fix in ("lr=0.1", "lr=0.01")
    lowest = float(finding.evidence.rpartition(" ")[2])
    assert lowest < math.log(4) - 0.1


@pytest.mark.parametrize("loss", [lambda out, y: F.cross_entropy(out), lambda out, y: nn.CrossEntropyLoss()(out)])
def test_a_loss_that_is_called_with_too_little_is_an_error_of_the_loss(loss):
    report = _classes(loss)
    assert (report.stage, report.errors[0].cause) == ("loss", "exception")


@pytest.mark.parametrize("layout", ["sparse", "nested"])
@pytest.mark.filterwarnings("ignore:.*sparse|.*Sparse|.*nested")
def test_batches_of_another_layout_leave_one_sentence(layout):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x.to_dense() if layout == "sparse" else torch.nested.to_padded_tensor(x, 0.0, (4, 3)))

    made = (lambda x: x.to_sparse()) if layout == "sparse" else (lambda x: torch.nested.nested_tensor(list(x)))
    model, y = Dense(), torch.arange(4) % 2
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = [(made(torch.randn(4, 3)), y) for _ in range(4)]
    report = dx.diagnose(model=model, loss_fn=nn.CrossEntropyLoss(), loader=loader, optimizer=optimizer)
    assert report.healthy
    (line,) = report.unchecked
    assert line.endswith(f": the batches hold {layout} tensors, which these rules do not read")


class OwnLoss(nn.Module):
    """Counts the tokens that a mask leaves, and returns its own loss beside its logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 16), nn.Linear(16, 3)

    def forward(self, ids, mask, labels):
        logits = self.head((self.embed(ids) * mask[..., None]).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def tokens(count, shift):
    ids = torch.randint(0, 6, (count, 5))
    mask = (torch.rand(count, 5) < 0.7).float()
    mask[:, 0] = 1.0
    labels = torch.stack([((ids % 3 == c) * mask).sum(1) for c in range(3)], 1).argmax(1)
    return TensorDataset(ids, mask, (labels + shift) % 3)


@pytest.mark.parametrize(("shift", "causes"), [(0, []), (1, ["val-permuted"])])
def test_a_model_with_a_loss_of_its_own_is_judged_on_batches_of_other_sizes(shift, causes):
    torch.manual_seed(0)
    model = OwnLoss()
    report = dx.diagnose(
        model=model,
        loader=DataLoader(tokens(200, 0), 32, shuffle=True),  # the last batch has 8
        val_loader=DataLoader(tokens(100, shift), 32),  # and here 4
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        train_step=lambda model, batch, optimizer, loss_fn, step: own_step(model, batch, optimizer),
    )
    assert [finding.cause for finding in report.errors] == causes
    assert not report.unchecked


def own_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(*batch)["loss"]
    loss.backward()
    optimizer.step()
    return loss
