"""Hooks tell receivers what torch is called for, and go when nobody listens."""

import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader

from dxdy_nb.observe import hooks
from dxdy_nb.observe.hooks import listening

PLACES = [(owner, name) for owner, name, _ in hooks._places()]
BEFORE = [vars(owner).get(name) for owner, name in PLACES]


class Ear:
    """A receiver that notes what it hears."""

    def __init__(self, *given):
        self.given = frozenset(map(id, given))
        self.heard, self.outputs = [], []

    def __getattr__(self, name):
        return lambda *args: self.heard.append(name)

    def iterate(self, loader, begin):
        self.heard.append("iterate")
        return begin()

    def forwarded(self, module, inputs, named, output):
        self.outputs.append(output)

    @contextmanager
    def forward(self, module, inputs, named):
        self.heard.append(module)
        try:
            yield
        except Exception as error:
            self.heard.append(error)
            raise
        self.heard.append("done")


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    assert [vars(owner).get(name) for owner, name in PLACES] == BEFORE
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert hooks._depth.forward == 0
    assert not hooks._sets


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))


X = torch.ones(3, 2)


def test_only_the_outermost_module_is_told_and_those_that_were_given(model):
    with listening(everything := Ear()), listening(inside := Ear(model[1])):
        model(X)
    assert everything.heard == [model, "done"]
    assert inside.heard == [model, model[1], "done", "done"]


def test_what_comes_out_of_an_outermost_module_is_told_once(model):
    with listening(ear := Ear()):
        output = model(X)
    assert len(ear.outputs) == 1
    assert ear.outputs[0] is output


def test_everything_that_is_called_is_told(model):
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with listening(ear := Ear()):
        for x in DataLoader(X):
            loss = model(x).sum()
        loss.item()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        nn.utils.clip_grad_value_(model.parameters(), 1)
        scaler.step(optimizer)
        scheduler.step()
        model.zero_grad()
        optimizer.zero_grad()
    heard = [what for what in ear.heard if isinstance(what, str) and what != "done"]
    clipping = ["reading_gradients", "clip", "reading_gradients", "reading_gradients"]
    assert heard == [
        *["iterate", "item", "item", "scale", "backward", "unscale", *clipping],
        *["scaled_step", "item", "before_step", "after_step", "schedule", "zero_grad", "zero_grad"],
    ]


def test_a_scheduler_made_of_others_is_told_once(model):
    optimizer = torch.optim.SGD(model.parameters())
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.LinearLR(optimizer)]
    chained = torch.optim.lr_scheduler.ChainedScheduler(parts)
    optimizer.step()
    with listening(ear := Ear()):
        chained.step()
    assert ear.heard == ["schedule"]


@pytest.mark.parametrize("first", [0, 1])
def test_receivers_may_leave_in_any_order(model, first):
    ears = [Ear(), Ear()]
    contexts = [listening(ear) for ear in ears]
    for context in contexts:
        context.__enter__()
    contexts[first].__exit__(None, None, None)
    model(X)
    contexts[1 - first].__exit__(None, None, None)
    assert ears[first].heard == []
    assert ears[1 - first].heard == [model, "done"]


def test_an_error_is_told_and_passes_unchanged(model):
    with listening(ear := Ear()), pytest.raises(RuntimeError, match="shape") as caught:
        model(torch.ones(3, 3))
    assert ear.heard == [model, caught.value]


def test_what_was_put_over_a_stand_in_stays_and_a_later_receiver_hears_once(model, monkeypatch):
    calls = []
    with monkeypatch.context() as patch:
        with listening(Ear()):
            over = nn.Module._call_impl
            patch.setattr(nn.Module, "_call_impl", lambda self, *inputs: calls.append(1) or over(self, *inputs))
        with listening(ear := Ear()):
            model(X)
    assert ear.heard == [model, "done"]
    assert len(calls) == 4
    nn.Module._call_impl = BEFORE[0]


def test_a_stand_in_that_somebody_kept_is_the_original_afterwards(model):
    with listening(ear := Ear()):
        kept = model._call_impl
    assert torch.equal(kept(X), model(X))
    assert ear.heard == []


@pytest.mark.parametrize("imported", ["before", "meanwhile"])
def test_the_compiler_takes_the_stand_in_for_the_original(monkeypatch, imported):
    original = nn.Module._call_impl
    module = SimpleNamespace(unpatched_nn_module_call_impl=original)
    if imported == "before":
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", module)
    with listening(Ear()):
        if imported == "meanwhile":
            module.unpatched_nn_module_call_impl = nn.Module._call_impl
            monkeypatch.setitem(sys.modules, "torch._dynamo.utils", module)
        assert module.unpatched_nn_module_call_impl is nn.Module._call_impl is not original
    assert module.unpatched_nn_module_call_impl is original


def test_without_the_private_names_of_torch_less_is_seen_and_nothing_breaks(model, monkeypatch):
    monkeypatch.setattr(hooks, "_dynamo", None)
    monkeypatch.delattr(nn.utils.clip_grad, "_clip_grads_with_norm_")
    with listening(ear := Ear()):
        model(X).sum().backward()
    assert ear.heard == [model, "done", "backward"]


def test_copies_to_a_device_are_told_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with listening(ear := Ear()):
        X.to(torch.float64)
        X.to("cpu")
        X.to("meta", non_blocking=True)
        X.to("meta").to("meta")
    assert ear.heard == ["copied"]
    assert "to" not in vars(torch.Tensor)


def test_another_process_records_nothing(model):
    with listening(ear := Ear()):
        child = os.fork()
        if not child:
            model(X)
            os._exit(0 if ear.heard == ["forked"] else 1)
        assert os.waitpid(child, 0)[1] == 0
        model(X)
    assert ear.heard == [model, "done"]
