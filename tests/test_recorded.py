"""What is judged from the whole record of a watched loop, and what of a loop may not upset its judge."""

import itertools
from collections import deque
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dxdy_nb as dx
from dxdy_nb.observe import events


def _data(steps, size=8):
    torch.manual_seed(0)
    x = torch.randn(size * steps, 8)
    return DataLoader(TensorDataset(x, (x @ torch.randn(8, 3)).argmax(1)), size)


def _watched(model, loader, loss_of=F.cross_entropy, before=lambda step: None, ready=lambda: None):
    """Train under watch with all that has a gradient; return the watch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)], 0.1)
    with dx.watch() as w:
        for step, (x, y) in enumerate(loader):
            before(step)
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            ready()
            optimizer.step()
    return w


@pytest.mark.parametrize(
    ("cause", "told"), [("loss-not-finite", "the loss is nan; losses before it: "), ("nan-gradient", "the loss is ")]
)
def test_a_long_record_whose_middle_has_no_events_is_judged_by_its_rows(cause, told, monkeypatch):
    monkeypatch.setattr(events, "FIRST", 400)
    monkeypatch.setattr(events, "LAST", 400)
    model, steps = nn.Linear(8, 3), itertools.count()

    def loss_of(out, y):
        now = next(steps) >= 100
        if now and cause == "loss-not-finite":
            return F.cross_entropy(out * torch.nan, y)
        return F.cross_entropy(out, y) + (now and (model.weight.sum() * 0).abs().sqrt())

    watch = _watched(model, _data(200), loss_of)
    assert 100 not in {event.step for event in watch.events}
    (error,) = watch.diagnose().errors
    assert error.cause == cause
    assert error.evidence.startswith(f"step 100: {told}")
    assert "nan, nan" not in error.evidence


@pytest.mark.parametrize(("batches", "told"), [(100, "the first 6 of 25 steps"), (80, "the first 6 of 20 steps")])
def test_judged_are_updates_where_batches_add_up_to_one(batches, told):
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dx.watch() as w:
        for index, (x, y) in enumerate(_data(batches), 1):
            (F.cross_entropy(model(x), y) / 4).backward()
            if index % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert w.diagnose().saw["judged"].startswith(f"{told};")


class Headed(nn.Module):
    """A backbone with modes, and a head without."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def test_a_backbone_that_is_frozen_on_the_way_may_go_into_eval_mode():
    model = Headed()

    def before(step):
        if step == 32:
            model.backbone.requires_grad_(False)
            model.eval()

    assert _watched(model, _data(48), before=before).diagnose().errors == ()


class Beside(nn.Module):
    """A layer, and beside it a weight that no forward uses."""

    def __init__(self, unused):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.unused = unused

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    "unused",
    [
        lambda: nn.LazyLinear(3),
        lambda: nn.Linear(4, 4, device="meta").requires_grad_(False),
        lambda: nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False),
        lambda: nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False),
    ],
)
def test_weights_that_hold_no_numbers_or_odd_ones_do_not_upset_the_judgement(unused):
    model, steps = Beside(unused()), itertools.count()
    model.layer.bias.register_hook(lambda gradient: gradient * torch.nan if next(steps) == 30 else gradient)
    watch = _watched(model, _data(40), ready=lambda: model.layer.bias.grad.nan_to_num_())
    assert watch.gradients["nonfinite"].sum() == 3
    report = watch.diagnose()
    assert report.errors == ()
    assert not any("nothing was heard" in note for note in report.unchecked)
    assert report.saw["steps"].startswith("24 watched")


def test_steps_of_lbfgs_on_all_data_at_once_are_steps():
    (x, y) = next(iter(_data(1, size=64)))
    model = nn.Linear(8, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with dx.watch() as w:
        deque((optimizer.step(closure) for _ in range(30)), 0)
    saw = w.diagnose().saw
    assert saw["steps"] == "24 watched in 1 epoch, 24 updates"
    assert saw["judged"].startswith("the first 24 of 30 steps;")


@pytest.mark.parametrize("watched", [False, True])
def test_a_loss_inside_a_checkpoint_is_computed_as_often_as_without_a_watch(watched):
    body, head = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
    calls = itertools.count()

    def loss_of(hidden, y):
        next(calls)
        return F.cross_entropy(head(hidden), y)

    with dx.watch() if watched else nullcontext():
        for x, y in _data(10):
            optimizer.zero_grad()
            checkpoint(loss_of, body(x), y, use_reentrant=False).backward()
            optimizer.step()
    assert next(calls) == 20
    assert int(head[1].num_batches_tracked) == 20


def test_a_saved_tensor_that_is_handed_out_once_is_left_to_backward():
    model = nn.Linear(8, 3)
    store, names = {}, itertools.count()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: store.update({(name := next(names)): tensor}) or name, store.pop
    )

    def loss_of(out, y):
        with hooks:
            return F.cross_entropy(out, y)

    assert len(_watched(model, _data(10), loss_of).steps) == 10
    assert store == {}


class Hidden(torch.autograd.Function):
    """A log_softmax whose name and saved tensors are not torch's."""

    @staticmethod
    def forward(ctx, x):
        y = x.log_softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient - y.exp() * gradient.sum(-1, keepdim=True)


LogSoftmax = type("LogSoftmax", (Hidden,), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [Hidden, LogSoftmax])
def test_a_log_softmax_that_the_graph_does_not_show_is_taken_by_its_numbers(function, dtype):
    model = nn.Linear(8, 3).to(dtype)
    loader = [(x.to(dtype), y) for x, y in _data(10)]
    report = _watched(model, DataLoader(loader, None), lambda out, y: F.nll_loss(function.apply(out), y)).diagnose()
    assert report.errors == ()
    assert not any("raised" in note or "nothing was heard" in note for note in report.unchecked)
