"""Loops of many kinds: watching changes no bit of any, and has the right rows of each."""

import contextlib
import itertools
import math
import os
import re
import time
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dxdy_nb as dx
from dxdy_nb.observe import recorder, row
from dxdy_nb.observe.observer import Watch
from dxdy_nb.observe.recorder import Enough
from dxdy_nb.observe.statistics import Budget, Statistics
from dxdy_nb.observe.trace import TraceWriter

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
SCALE = 1024.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


def batches(workers, size=8):
    return DataLoader(TensorDataset(X, Y), size, shuffle=True, num_workers=workers)


# Each loop is a generator: first it yields its models, then a number for each batch.


def plain(workers):
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def accumulation(workers):
    yield (net := Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for i, (x, y) in enumerate(batches(workers, 2)):
        loss = F.cross_entropy(net(x), y) / 4
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def two_optimizers(workers):
    yield (net := Net())
    optimizers = [torch.optim.SGD(net.body.parameters(), lr=0.1), torch.optim.Adam(net.head.parameters(), lr=0.01)]
    for x, y in batches(workers):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def gan(workers):
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    yield generator, critic
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, critic)]
    for x, _ in batches(workers):
        made = generator(torch.randn(len(x), 2))
        optimizers[1].zero_grad()
        loss = F.softplus(-critic(x)).mean()
        loss.backward()
        fake = F.softplus(critic(made.detach())).mean()
        fake.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = F.softplus(-critic(made)).mean()
        fooled.backward()
        optimizers[0].step()
        yield from (loss.item(), fake.item(), fooled.item())


def lbfgs(workers):
    yield (net := Net())
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for x, y in batches(workers):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure).item()


def scaled(workers, **settings):
    yield (net := Net())
    optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=0.01, **settings), GradScaler("cpu", init_scale=SCALE)
    for i, (x, y) in enumerate(batches(workers, 4)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        if i in (0, 3):
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


def scaled_and_fused(workers):
    return scaled(workers, fused=True)


def scaled_gan(workers):
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    yield generator, critic
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (generator, critic)]
    scaler = GradScaler("cpu", init_scale=SCALE)
    for i, (x, _) in enumerate(batches(workers)):
        made = generator(torch.randn(len(x), 2))
        optimizers[1].zero_grad()
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(made.detach())).mean() * (math.inf if i == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        optimizers[0].zero_grad()
        fooled = F.softplus(-critic(made)).mean()
        scaler.scale(fooled).backward()
        scaler.step(optimizers[0])
        scaler.update()
        yield from (loss.item(), fooled.item())


def bfloat16(workers):
    yield (net := Net().to(torch.bfloat16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.bfloat16()), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def checkpointing(workers, reentrant=False):
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches(workers):
        optimizer.zero_grad()
        inside = checkpoint(net.body, x.requires_grad_(), use_reentrant=reentrant)
        loss = F.cross_entropy(net.head(inside), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def reentrant_checkpointing(workers):
    return checkpointing(workers, reentrant=True)


def compiled(workers, fused=False, method=False):
    torch._dynamo.reset()
    yield (net := Net())
    if method:
        net.compile(backend="aot_eager", fullgraph=True)
    ready = net if method else torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(ready(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def compiled_in_place(workers):
    return compiled(workers, method=True)


def compiled_and_fused(workers):
    return compiled(workers, fused=True)


def compiled_loss(workers):
    torch._dynamo.reset()
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x, y):
        return F.cross_entropy(net(x), y)

    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def compiled_step(workers):
    torch._dynamo.reset()
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend="eager")
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        step()
        yield loss.item()


@contextlib.contextmanager
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # gloo's thread lets go of its last work only while nobody holds the interpreter's lock; the group's end waits
        # for that thread with the lock held: without a pause the two may wait for each other for ever.
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


def data_parallel(workers):
    with alone():
        yield (net := Net())
        ready = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i, (x, y) in enumerate(batches(workers, 4)):
            with ready.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                loss = F.cross_entropy(ready(x), y)
                loss.backward()
            if i % 2:
                clip_grad_norm_(ready.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            yield loss.item()


def sharded(workers):
    with alone():
        yield (net := Net())
        for part in (net.body, net):
            fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for x, y in batches(workers):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            yield loss.item()


class LowRank(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.linear(x) + x @ self.a.T @ self.b.T


def low_rank(workers):
    net = Net().requires_grad_(False)
    net.body[0] = LowRank(net.body[0])
    yield net
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.01)
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def schedule_and_clip(workers):
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        [1],
    )
    for x, y in batches(workers):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        yield loss.item()


def gradient_penalty(workers):
    yield (critic := nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    for x, _ in batches(workers):
        mixed = (x + torch.randn_like(x)).requires_grad_()
        optimizer.zero_grad()
        score = critic(mixed).sum()
        score.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(score, mixed, create_graph=True)
        penalty = (slope.norm(2, 1) - 1).square().mean()
        penalty.backward()
        optimizer.step()
        yield penalty.item()


def validation_between(workers):
    yield (net := Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches(workers):
        net.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            yield sum(F.cross_entropy(net(x), y).item() for x, y in batches(workers))


def by_hand(workers):
    yield (net := Net())
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        yield loss.item()


def without_backward(workers):
    yield (net := Net())
    for x, y in batches(workers):
        loss = F.cross_entropy(net(x), y)
        with torch.no_grad():
            for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p -= 0.1 * g
        yield loss.item()


ROWS = {  # of each loop: whether each row was skipped
    plain: [False] * 3,
    accumulation: [False] * 3,
    two_optimizers: [False] * 3,
    gan: [False] * 6,
    lbfgs: [False] * 3,
    scaled: [True, False, False, True, False, False],
    scaled_and_fused: [True, False, False, True, False, False],
    scaled_gan: [False, False, True, False, False, False],
    bfloat16: [False] * 3,
    checkpointing: [False] * 3,
    reentrant_checkpointing: [False] * 3,
    low_rank: [False] * 3,
    schedule_and_clip: [False] * 3,
    gradient_penalty: [False] * 3,
    validation_between: [False] * 3,
    by_hand: [False] * 3,
    without_backward: [],
    # These leave threads behind (of the compiler, of gloo), and a fork after that is not safe: they come last.
    compiled: [False] * 3,
    compiled_in_place: [False] * 3,
    compiled_and_fused: [False] * 3,
    compiled_loss: [False] * 3,
    compiled_step: [False] * 3,
    data_parallel: [False] * 3,
    sharded: [False] * 3,
}


def run(loop, workers, watched):
    """Return all that must not change: numbers, weights, random state; and what was observed, if it was."""
    torch.manual_seed(5)
    torch._dynamo.utils.counters.clear()
    with dx.watch(budget=None) if watched else contextlib.nullcontext() as w, warnings.catch_warnings():
        warnings.simplefilter("error")
        # aot_eager itself, and torch's test of hooks in a reentrant checkpoint
        warnings.filterwarnings("ignore", message=".*(lru_cache|torch.jit).*")
        parts = loop(workers)
        models = next(parts)
        numbers = list(parts)
    models = models if isinstance(models, tuple) else (models,)
    weights = [getattr(p, "full_tensor", p.detach)().tolist() for model in models for p in model.parameters()]
    counters = {k: dict(v) for k, v in torch._dynamo.utils.counters.items() if k in ("stats", "graph_break")}
    return (numbers, weights, torch.get_rng_state().tolist(), counters), w


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loop", ROWS, ids=lambda loop: loop.__name__)
def test_watching_changes_no_bit(loop, workers):
    bare, _ = run(loop, workers, False)
    seen, w = run(loop, workers, True)
    assert seen == bare
    assert loop is compiled_step or not bare[3].get("graph_break")  # torch breaks the graph in its own wrapper of step
    assert w.steps["skipped"].tolist() == ROWS[loop]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_and_losses_are_recorded_without_the_scale(fused):
    net = nn.Linear(4, 3)
    optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=fused), GradScaler("cpu", init_scale=SCALE)
    losses, norms = [], []
    with dx.watch(budget=None) as w:
        for factor in (1, math.inf, 2):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X), Y) * factor
            losses.append(loss.item())
            norms.append([g.norm().item() for g in torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert w.steps["loss"].tolist() == losses
    assert w.steps["skipped"].tolist() == [False, True, False]
    for step in (0, 2):
        assert w.gradients.loc[step, "norm"].tolist() == pytest.approx(norms[step], rel=1e-5)
        assert w.steps["grad_norm"][step] == pytest.approx(math.hypot(*norms[step]), rel=1e-5)
    assert w.gradients.loc[1, "nonfinite"].tolist() == [12, 3]
    assert w.gradients.loc[1, "update_ratio"].isna().all()
    kinds = [event.kind for event in w.events if event.kind in ("step", "skip", "scale")]
    assert kinds == ["scale", "step", "skip", "scale", "step"]
    assert list(w.scalers) == ["GradScaler"]


@pytest.mark.parametrize("expected", [1, 3])
def test_gradients_are_those_before_a_clip_also_when_a_step_has_fewer_backwards_than_the_last(expected):
    net = nn.Linear(4, 3)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.1), []
    with dx.watch(budget=None) as w:
        for backwards in (expected, 2, 1, 4):
            optimizer.zero_grad()
            for x, y in zip(X.split(4)[:backwards], Y.split(4), strict=False):
                F.cross_entropy(net(x), y).backward()
            before.append(clip_grad_norm_(net.parameters(), 0.01).item())
            optimizer.step()
    assert w.steps["grad_norm"].tolist() == pytest.approx(before, rel=1e-5)
    assert [event.value for event in w.events if event.kind == "clip"] == before
    assert w.steps["effective_batch"].tolist() == [4 * expected, 8, 4, 16]
    assert "edited" not in {event.kind for event in w.events}


def test_gradients_that_the_loop_changes_by_itself_are_noted():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dx.watch(budget=None) as w:
        F.cross_entropy(net(X), Y).backward()
        before = net.weight.grad.norm().item()
        net.weight.grad.mul_(0.1)
        optimizer.step()
    assert w.gradients.loc[(0, "weight"), "norm"] == pytest.approx(before, rel=1e-5)
    assert [event.where for event in w.events if event.kind == "edited"] == ["SGD"]


def test_each_row_of_a_gan_has_the_gradients_of_the_network_that_moves():
    _, w = run(gan, 0, True)
    assert str(w) == "6 steps of Linear, Sequential (61 parameters in 6 tensors) with Adam, Adam2"
    norms = w.gradients["norm"].unstack("parameter")
    assert list(norms.columns) == sorted([*(f"Linear.{n}" for n in ("weight", "bias")), *CRITIC])
    for step in range(6):
        moves = CRITIC if step % 2 == 0 else ["Linear.bias", "Linear.weight"]
        assert set(norms.columns[norms.loc[step].notna()]) == set(moves)
    assert w.steps["effective_batch"].tolist() == [16, 8] * 3  # the critic sees real and made samples


CRITIC = ["Sequential.0.weight", "Sequential.0.bias", "Sequential.2.weight", "Sequential.2.bias"]


@pytest.mark.parametrize("loop", [plain, two_optimizers, compiled, compiled_in_place, data_parallel, sharded])
def test_parameters_are_named_as_in_the_model_itself(loop):
    _, w = run(loop, 0, True)
    names = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]
    assert w.gradients.loc[2].index.tolist() == names
    assert w.gradients["norm"].notna().all()
    assert w.sizes == dict(zip(names, (32, 8, 24, 3), strict=True))
    assert str(w).startswith(f"3 steps of {'FSDPNet' if loop is sharded else 'Net'} (67 parameters in 4 tensors) with ")


def test_frozen_parameters_are_left_out():
    _, w = run(low_rank, 0, True)
    assert w.gradients.loc[0].index.tolist() == ["body.0.a", "body.0.b"]


def test_a_parameter_that_only_an_optimizer_knows_has_its_place_there():
    net, free = nn.Linear(4, 3), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": [free], "lr": 1.0}], lr=0.1)
    with dx.watch(budget=None) as w:
        for _ in range(2):
            F.cross_entropy(net(X) + free, Y).backward()
            optimizer.step()
    assert w.gradients.loc[0].index.tolist() == ["weight", "bias", "SGD.1.0"]
    assert w.gradients.loc[(0, "SGD.1.0"), "norm"] == w.gradients.loc[(0, "bias"), "norm"] > 0


def train_step(net, optimizer, dtype=torch.float32):
    optimizer.zero_grad()
    F.cross_entropy(net(X.to(dtype)), Y).backward()
    optimizer.step()


def test_parameters_that_come_later_are_in_the_rows_from_then_on():
    net = Net()
    net.head.requires_grad_(False)
    optimizer = torch.optim.SGD(net.body.parameters(), lr=0.1)
    with dx.watch(budget=None) as w:
        train_step(net, optimizer)
        net.head.requires_grad_(True)
        optimizer.add_param_group({"params": net.head.parameters()})
        train_step(net, optimizer)
        net.head = nn.Linear(8, 3)
        train_step(net, torch.optim.Adam(net.parameters()))
    assert [w.gradients.loc[step, "norm"].notna().sum() for step in range(3)] == [2, 4, 4]


def test_a_model_that_is_built_anew_takes_the_place_of_the_one_that_is_gone():
    with dx.watch(budget=None) as w:
        for _ in range(3):
            net = Net()
            train_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert list(w.models.values()) == [net]
    assert w.steps["skipped"].tolist() == [False] * 3
    assert w.gradients["norm"].notna().all()
    assert list(w.sizes) == ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_a_model_may_be_moved_to_another_type_in_between():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dx.watch(budget=None) as w:
        train_step(net, optimizer)
        net.to(torch.float64)
        train_step(net, optimizer, torch.float64)
    assert w.gradients["norm"].notna().all()
    assert w.gradients.loc[(1, "weight"), "norm"] == pytest.approx(net.weight.grad.norm().item(), rel=1e-9)


def test_events_tell_what_happened_in_its_order():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with dx.watch(budget=None) as w:
        for x, y in DataLoader(TensorDataset(X, Y), 24):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        net.eval()
        with torch.no_grad():
            net(X)
    kinds = ["fetch", "zero_grad", "train", "forward", "loss", "backward", "clip", "step", "scheduler", "eval"]
    assert [event.kind for event in w.events if event.kind != "watch"] == [*kinds, "no_grad_forward"]
    events = {event.kind: event for event in w.events}
    assert events["loss"].value == loss.item()
    assert events["scheduler"].value == 0.05
    assert (events["forward"].where, events["forward"].value) == ("Linear", 1)
    assert (events["no_grad_forward"].step, events["no_grad_forward"].value) == (1, 0)
    assert [a.time <= b.time for a, b in itertools.pairwise(w.events)] == [True] * 11
    assert list(w.schedulers.values()) == [scheduler]


def test_numbers_that_the_loop_takes_out_of_tensors_are_counted_and_torchs_own_are_not():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=True)  # reads its own count of steps
    with dx.watch(budget=None) as w:
        for x, y in batches(0, 12):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.zero_grad() if loss.item() + loss.item() > 1e9 else optimizer.step()
    assert [(event.step, event.value) for event in w.events if event.kind == "item"] == [(0, 2), (1, 2)]


def test_what_is_known_of_loaders_is_told_and_one_that_is_built_anew_is_the_same():
    loader = DataLoader(TensorDataset(X, Y), 12, num_workers=1, persistent_workers=True)
    with dx.watch() as w:
        for _ in range(2):
            list(loader)
            list(DataLoader(X, batch_sampler=[[0], [1]]))
            list(DataLoader(X[:8], 4, shuffle=True, num_workers=1))
    found = [(name, r.batch_size, r.workers, r.restarts, r.epochs) for name, r in w.loaders.items()]
    assert found == [
        ("DataLoader", 12, 1, False, 2),
        ("DataLoader2", None, 0, False, 2),
        ("DataLoader3", 4, 1, True, 2),
    ]


def test_an_optimizer_made_of_others_makes_one_step():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self):
            self.base.step()

    net = nn.Linear(4, 3)
    optimizer = Lookahead(torch.optim.SGD(net.parameters(), lr=0.1))
    with dx.watch(budget=None) as w:
        for _ in range(3):
            train_step(net, optimizer)
    assert w.steps["skipped"].tolist() == [False] * 3
    assert w.gradients["norm"].notna().all()


def test_a_closure_with_a_clip_has_the_gradients_before_it():
    net = nn.Linear(4, 3)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=0.1), []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        before.append(clip_grad_norm_(net.parameters(), 0.01).item())
        return loss

    with dx.watch(budget=None) as w:
        for _ in range(2):
            optimizer.step(closure)
    assert w.steps["grad_norm"].tolist() == pytest.approx(before, rel=1e-5)
    assert (w.steps["step_time"] > w.steps["update_time"]).all()


SENTENCES = {
    "forward only": (lambda net: net(X), "no step of Net .*: it ran with gradients, and no backward"),
    "no gradients": (lambda net: net.requires_grad_(False)(X), "no step of Net"),
    "nothing": (lambda net: None, "no step: no model ran here"),
}


@pytest.mark.parametrize(("loop", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_a_loop_that_never_steps_is_told(loop, sentence):
    net = Net()
    with dx.watch() as w:
        loop(net)
    assert len(w.steps) == len(w.gradients) == 0
    assert re.match(sentence, str(w))


def test_a_loop_may_be_ended_after_some_steps():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    w = Watch(stop_after=2)
    with pytest.raises(Enough) as caught, w:
        while True:
            train_step(net, optimizer)
    assert caught.value.code == 0
    assert len(w.steps) == 2


class Box:
    """Stands for black box and replay: notes what it is told."""

    due = True

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))

    def batch(self, *args):
        self.told.append(("batch",))
        return args[0] if len(args) == 2 else None


def test_a_black_box_is_told_before_the_update_and_of_the_error_last():
    net = nn.Linear(4, 3)
    optimizer, box = torch.optim.SGD(net.parameters(), lr=0.1), Box()
    weights = []
    box.ended = lambda step, loss, norm, nonfinite, full: weights.append((step, loss, norm, net.weight.clone()))
    first = net.weight.clone()
    error = ValueError()
    with contextlib.suppress(ValueError), Watch(blackbox=box) as w:
        for x, y in DataLoader(TensorDataset(X, Y), 12):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        raise error
    assert [told[0] for told in box.told] == ["batch", "forward", "batch", "forward", "failed", "close"]
    assert [told[1] for told in box.told if told[0] == "forward"] == [0, 1]
    assert box.told[-2] == ("failed", 2, error)
    assert torch.equal(weights[0][3], first)
    assert [step for step, *_ in weights] == [0, 1]
    assert [row[1] for row in weights] == w.steps["loss"].tolist()
    assert [row[2] for row in weights] == w.steps["grad_norm"].tolist()


def test_a_replay_hands_on_its_batches_and_ends_the_loop():
    net = nn.Linear(4, 3)
    optimizer, box = torch.optim.SGD(net.parameters(), lr=0.1), Box()
    box.batch = lambda batch, loader: (batch[0] * 0, batch[1])
    box.ended = lambda loss, norm, full: len(w.steps) == 1
    with pytest.raises(Enough), Watch(replay=box) as w:
        for x, y in itertools.cycle(DataLoader(TensorDataset(X, Y), 12)):
            assert not x.any()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    assert len(w.steps) == 2
    assert [told[0] for told in box.told] == ["forward", "restore", "forward"]


class Late:
    """Measured numbers that come one row late, as those of a GPU do."""

    def __init__(self, measured):
        self.rows, self.ready = measured.rows, False


def test_numbers_that_come_late_are_stored_with_their_row(monkeypatch):
    measure = Statistics.measure
    monkeypatch.setattr(Statistics, "measure", lambda self, tensors: Late(measure(self, tensors)))
    monkeypatch.setattr(row, "kept", lambda number: number.detach().clone())
    monkeypatch.setattr(recorder, "kept", lambda number: number.detach().clone())
    stored = []
    append = TraceWriter.append
    monkeypatch.setattr(TraceWriter, "append", lambda self, n, *a, **k: stored.append(n) or append(self, n, *a, **k))
    net = nn.Linear(4, 3)
    optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=True), GradScaler("cpu", init_scale=SCALE)
    losses = []
    with dx.watch(budget=None) as w:
        for step, factor in enumerate((1, math.inf, 1)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X), Y) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            assert stored == list(range(step))
    assert w.steps["loss"].tolist() == losses
    assert w.steps["skipped"].tolist() == [False, True, False]
    assert w.gradients.loc[0, "norm"].tolist() != w.gradients.loc[2, "norm"].tolist()
    assert [event.kind for event in w.events if event.kind in ("step", "skip")] == ["step", "skip", "step"]


def test_a_glance_is_enough_until_something_is_strange(monkeypatch):
    monkeypatch.setattr(Budget, "full", lambda self, step: step == 0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with dx.watch() as w:
        for factor in (1, 1, 20, 20, math.inf):
            optimizer.zero_grad()
            (F.cross_entropy(net(X), Y) * factor).backward()
            optimizer.step()
    assert w.steps["full"].tolist() == [True, False, True, False, True]
    assert w.gradients["nonzero"].isna().groupby("step").all().tolist() == [False, True, False, True, False]
    assert w.gradients.loc[1, "norm"].tolist() == pytest.approx(w.gradients.loc[0, "norm"].tolist())


def test_a_process_that_is_forked_within_records_nothing(tmp_path):
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dx.watch(out=tmp_path / "run") as w:
        train_step(net, optimizer)
        child = os.fork()
        if not child:
            train_step(net, optimizer)
            w.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train_step(net, optimizer)
    assert w.steps.index.tolist() == [0, 1]


def test_watches_may_be_nested():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dx.watch(budget=None) as outer:
        train_step(net, optimizer)
        with dx.watch(budget=None) as inner:
            train_step(net, optimizer)
        train_step(net, optimizer)
    assert outer.steps["loss"].tolist()[1:2] == inner.steps["loss"].tolist()
    assert len(outer.steps) == 3


def test_a_frozen_model_beside_the_other_changes_no_name_and_may_go_at_any_time():
    net, teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dx.watch(budget=None) as w:
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(net(X), teacher(X) if teacher else Y.float()[:, None].expand(24, 3))
            teacher = None
            loss.backward()
            optimizer.step()
    assert w.gradients["norm"].notna().tolist() == [True] * 4
    assert list(w.sizes) == ["weight", "bias"]


def test_watching_does_not_keep_a_model_alive():
    with dx.watch(budget=None) as w:  # with a budget it keeps what diagnose needs
        net = Net()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1))
        gone = [weakref.ref(thing) for thing in (net, net.head.weight)]
        del net
        assert [reference() for reference in gone] == [None, None]
    assert len(w.steps) == 1
    assert str(w) == "1 step of Net (67 parameters in 4 tensors) with SGD"
