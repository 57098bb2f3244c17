"""Watching a loop changes nothing, leaves nothing behind, and sees what happened."""

import copy
import math
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dxdy_nb as dx
from dxdy_nb.observe import hooks, recorder, trace
from dxdy_nb.training.datasets import Batch, Samples

PLACES = [(owner, name) for owner, name, _ in hooks._places()]
TORCHS = [getattr(owner, name) for owner, name in PLACES]
X, Y = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """Whatever a test does, torch's own functions are back in place after it."""
    yield
    assert as_it_was()


def as_it_was():
    own = all(name in vars(owner) for owner, name in PLACES if (owner, name) != (torch.Tensor, "item"))
    inherited = "item" not in vars(torch.Tensor)
    hooked = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return own and inherited and not hooked and [getattr(owner, name) for owner, name in PLACES] == TORCHS


def small_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def loss_of(model, x=X, y=Y):
    return nn.functional.cross_entropy(model(x), y)


def train_step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.item()


def hooks_of(model, optimizer):
    """Return all hooks that stand anywhere in a model, its parameters and an optimizer."""
    owners = [*model.modules(), optimizer]
    tables = [value for owner in owners for name, value in vars(owner).items() if "hooks" in name]
    tables += [table for p in model.parameters() for table in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return [table for table in tables if table]


def sgd(model):
    yield (optimizer := torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    yield [train_step(model, optimizer) for _ in range(12)]


def adam_with_clipping(model):
    yield (optimizer := torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model)
        torch.autograd.backward([loss])
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    yield losses


def accumulation(model):
    yield (optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for i, x, y in zip(range(24), X.repeat(6, 1).split(16), Y.repeat(6).split(16), strict=True):
        loss = loss_of(model, x, y) / 4
        loss.backward()
        losses.append(loss.item())
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    yield losses


def closure(model):
    yield (optimizer := torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    losses = []

    def evaluate():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(4):
        optimizer.step(evaluate)
    yield losses


def shuffled_loader_and_validation(model):
    yield (optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        model.train()
        for x, y in DataLoader(TensorDataset(X, Y), 20, shuffle=True):
            losses.append(train_step(model, optimizer, x, y))
        model.eval()
        with torch.no_grad():
            losses += [loss_of(model, x, y).item() for x, y in DataLoader(TensorDataset(X, Y), 20)]
    yield losses


LOOPS = [sgd, adam_with_clipping, accumulation, closure, shuffled_loader_and_validation]
STEPS = {"sgd": 12, "adam_with_clipping": 12, "accumulation": 6, "closure": 4, "shuffled_loader_and_validation": 12}


@pytest.mark.parametrize("loop", LOOPS)
def test_watching_changes_no_bit(loop):
    def run(watched):
        torch.manual_seed(3)
        model = small_model()
        parts = loop(model)
        optimizer = next(parts)
        if not watched:
            losses = next(parts)
        else:
            with dx.watch(model, optimizer) as w:
                losses = next(parts)
            assert len(w.steps) == STEPS[loop.__name__]
        return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (losses, weights, random), (same_losses, same_weights, same_random) = run(False), run(True)
    assert losses == same_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))
    assert torch.equal(random, same_random)


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()])
def test_nothing_of_the_observer_stays_behind(error):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with dx.watch(model, optimizer):
            assert hooks_of(model, optimizer) == []
            assert not any(getattr(owner, name) is torchs for (owner, name), torchs in zip(PLACES, TORCHS, strict=True))
            train_step(model, optimizer)
            if error:
                raise error
    except (ValueError, KeyboardInterrupt) as caught:
        assert caught is error
    assert hooks_of(model, optimizer) == []
    assert as_it_was()


def test_an_error_of_the_loop_keeps_the_steps_before_it():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = dx.watch(model, optimizer)
    with pytest.raises(RuntimeError, match="shape"), w:
        train_step(model, optimizer)
        train_step(model, optimizer, X[:, :2])
    assert w.steps.index.tolist() == [0]


def test_copies_of_the_model_are_free_of_the_observer():
    """The mean of the weights, the best model so far, and a model that is saved whole are such copies."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved_before = pickle.dumps(model)
    with dx.watch(model, optimizer) as w:
        saved, twin = pickle.dumps(model), copy.deepcopy(model)
        train_step(model, optimizer)
        loss_of(twin)
        loss_of(pickle.loads(saved))
    assert saved == saved_before
    assert hooks_of(twin, copy.deepcopy(optimizer)) == []
    assert w.steps["effective_batch"].tolist() == [64]


@pytest.mark.parametrize("compiling", ["torch.compiler.is_compiling", "torch.jit.is_tracing"])
def test_a_compiler_reads_the_model_as_it_is(watched, monkeypatch, compiling):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        with monkeypatch.context() as patch:
            patch.setattr(compiling, lambda: True)
            model(X)
        train_step(model, optimizer)
    assert w.steps["effective_batch"].tolist() == [64]


@pytest.fixture
def watched():
    """Return a model without dropout, and its optimizer."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_loss_and_learning_rate_are_those_of_each_step(watched):
    model, optimizer = watched
    losses = []
    with dx.watch(model, optimizer) as w:
        for lr in (0.1, 0.05, 0.2):
            optimizer.param_groups[0]["lr"] = lr
            losses.append(train_step(model, optimizer))
    assert w.steps["loss"].tolist() == losses
    assert w.steps["lr"].tolist() == [0.1, 0.05, 0.2]
    assert w.steps["skipped"].tolist() == [False] * 3


def test_gradients_are_those_before_clipping(watched):
    model, optimizer = watched
    before = []
    with dx.watch(model, optimizer) as w:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            norms = [p.grad.norm().item() for p in model.parameters()]
            before.append((nn.utils.clip_grad_norm_(model.parameters(), 0.01).item(), norms))
            optimizer.step()
    assert w.steps["grad_norm"].tolist() == pytest.approx([total for total, _ in before], rel=1e-5)
    for step, (_, norms) in enumerate(before):
        assert w.gradients.loc[step, "norm"].tolist() == pytest.approx(norms, rel=1e-5)
        assert w.gradients.loc[step].index.tolist() == [name for name, _ in model.named_parameters()]


def test_the_batches_of_accumulation_are_added_up(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for sizes in ((16, 16, 8), (5,), (30, 2)):
            losses = [loss_of(model, X[:size], Y[:size]) for size in sizes]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.steps["effective_batch"].tolist() == [40, 5, 32]
    assert w.steps["loss"].iloc[-1] == pytest.approx(sum(loss.item() for loss in losses))  # as their gradients are


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loss_whose_gradients_were_dropped_is_not_added(watched, set_to_none):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for _ in range(2):
            loss_of(model).backward()
            optimizer.zero_grad(set_to_none)
            loss = loss_of(model, X[:5], Y[:5])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.steps["loss"].iloc[-1] == loss.item()


def test_a_batch_given_by_name_is_counted_too():
    class Named(nn.Linear):
        def forward(self, *, scale, x):
            return super().forward(x) * scale

    model = Named(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dx.watch(model, optimizer) as w:
        model(scale=torch.tensor(2.0), x=X).mean().backward()
        optimizer.step()
    assert w.steps["effective_batch"].tolist() == [64]


def test_a_loop_that_stops_between_backward_and_step_leaves_a_skipped_row(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        train_step(model, optimizer)
        loss = loss_of(model)
        loss.backward()
    assert w.steps["skipped"].tolist() == [False, True]
    assert w.steps["loss"][1] == loss.item()
    assert w.gradients.loc[1, "norm"].notna().all()
    assert w.gradients.loc[1, "update_ratio"].isna().all()


def test_a_forward_without_backward_leaves_no_row(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        train_step(model, optimizer)
        loss_of(model)
    assert len(w.steps) == 1


def test_a_backward_that_began_at_no_single_number_leaves_a_row_too(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        nn.functional.cross_entropy(model(X), Y, reduction="none").backward(torch.ones(64))
    assert w.steps["skipped"].tolist() == [True]
    assert math.isnan(w.steps["loss"][0])
    assert w.steps["grad_norm"][0] > 0


STARTS = {
    "a generator": (lambda loss: [(t for t in [loss])], True),
    "an edge of the graph": (lambda loss: [torch.autograd.graph.get_gradient_edge(loss), torch.ones(())], False),
    "a complex number": (lambda loss: [loss * (1 + 0j), torch.ones((), dtype=torch.complex64)], False),
}


@pytest.mark.parametrize(("start", "known"), STARTS.values(), ids=STARTS)
def test_a_backward_may_begin_at_other_things_than_a_loss(watched, start, known):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        loss = loss_of(model)
        torch.autograd.backward(*start(loss))
        norm = math.hypot(*(p.grad.norm().item() for p in model.parameters()))
        optimizer.step()
    assert w.steps["loss"][0] == pytest.approx(loss.item() if known else math.nan, nan_ok=True)
    assert w.steps["grad_norm"][0] == pytest.approx(norm, rel=1e-5)


def test_the_inner_backward_of_a_checkpoint_is_part_of_the_outer_one(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        inner = checkpoint(lambda x: loss_of(model[2], x), model[:2](X).detach().requires_grad_(), use_reentrant=True)
        (3 * inner).backward()
        optimizer.step()
    assert w.steps["loss"].tolist() == [3 * inner.item()]


@pytest.mark.parametrize("target_first", [True, False])
def test_a_training_step_may_use_the_model_without_gradients_too(watched, target_first):
    model, optimizer = watched

    def target(x):
        with torch.no_grad():
            return model(x).softmax(1)

    with dx.watch(model, optimizer) as w:
        for x, _ in DataLoader(TensorDataset(X, Y), 16):
            early = target(x) if target_first else None
            output = model(x)
            late = None if target_first else target(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(output, early if target_first else late).backward()
            optimizer.step()
    assert w.steps["effective_batch"].tolist() == [16] * 4
    assert (w.steps["data_time"] > 0).all()


class OwnOptimizer(torch.optim.Optimizer):
    """It subtracts the gradient; its groups hold what they are given."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= p.grad


@pytest.mark.parametrize("defaults", [{}, {"lr": None}])
def test_an_optimizer_without_a_learning_rate_has_none_in_the_table(watched, defaults):
    model, _ = watched
    optimizer = OwnOptimizer(model.parameters(), defaults)
    with dx.watch(model, optimizer) as w:
        train_step(model, optimizer)
    assert math.isnan(w.steps["lr"][0])


def test_gradients_that_come_from_elsewhere_are_seen_at_the_step(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert math.isnan(w.steps["loss"][0])
    assert w.steps["grad_norm"][0] == pytest.approx(math.sqrt(sum(w.sizes.values())))


def test_a_missing_gradient_is_nan_and_a_gradient_of_zero_is_zero(watched):
    model, optimizer = watched
    model[0].weight.requires_grad_(False)
    nn.init.constant_(model[0].bias, -100)  # nothing passes the ReLU, so nothing comes back either
    with dx.watch(model, optimizer) as w:
        train_step(model, optimizer)
    measured = ["mean", "max", "min", "norm", "nonzero", "nonfinite"]
    assert w.gradients.loc[(0, "0.weight"), measured].isna().all()
    assert w.gradients.loc[(0, "0.bias"), measured].tolist() == [0] * 6
    assert w.steps["grad_norm"][0] == pytest.approx(model[2].bias.grad.norm().item(), rel=1e-5)


def test_the_update_ratio_is_sampled_at_every_tenth_step(watched):
    model, optimizer = watched
    by_hand = {}
    with dx.watch(model, optimizer) as w:
        for step in range(21):
            before = [p.detach().clone() for p in model.parameters()]
            train_step(model, optimizer)
            by_hand[step] = [
                (0.1 * p.grad.norm() / old.norm()).item() for p, old in zip(model.parameters(), before, strict=True)
            ]
    ratios = w.gradients["update_ratio"].unstack("parameter", sort=False)
    for step in (0, 10, 20):
        assert ratios.loc[step].tolist() == pytest.approx(by_hand[step], rel=1e-3)
    assert ratios.drop([0, 10, 20]).isna().all(axis=None)


def seven(**changes):
    """Return seven samples whose ids are their place plus 100."""
    x, y = X[:7].clone(), Y[:7]
    for place, value in changes.items():
        x[int(place[1:]), 2] = value
    return Samples(x, y, torch.arange(7) + 100)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_is_named(watched, value):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for batch in DataLoader(seven(_4=value), 3):
            train_step(model, optimizer, batch.x, batch.y)
    assert w.steps["bad_samples"][0] == []
    assert w.steps["bad_samples"][1] == [104]


def test_when_every_value_is_finite_all_samples_of_the_step_are_named(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for batch in DataLoader(seven(), 3):
            optimizer.zero_grad()
            (loss_of(model, batch.x, batch.y) * math.inf).backward()
    assert w.steps["bad_samples"].iloc[-1] == [100, 101, 102, 103, 104, 105, 106]


@pytest.mark.parametrize("fetched", [iter, list], ids=["one by one", "all at once"])
def test_with_accumulation_only_the_batch_that_spoilt_the_step_is_blamed(watched, fetched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for batch in fetched(DataLoader(seven(_3=math.nan), 2)):
            loss_of(model, batch.x, batch.y).backward()
        optimizer.step()
    assert w.steps["bad_samples"].tolist() == [[103]]


def test_an_infinite_gradient_of_a_finite_loss_names_its_samples():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.zero_()
    with dx.watch(model, optimizer) as w:
        for batch in DataLoader(seven(), 7):
            model(batch.x).sum().abs().sqrt().add(0 * batch.y.sum()).backward()  # the slope of a root at zero
    assert w.steps["loss"].tolist() == [0]
    assert w.steps["bad_samples"].tolist() == [list(range(100, 107))]


class Weighted(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor
    weight: torch.Tensor


class Plain:
    """A batch that is no tuple."""

    def __init__(self, x, y):
        self.x, self.y, self.ids = x, y, torch.arange(len(x))


NAN = torch.full((3, 4), math.nan)


def weighted(samples):
    return Weighted(*map(torch.stack, zip(*samples, strict=True)), weight=torch.tensor(math.nan))


UNUSUAL = {
    "single samples": (DataLoader(seven(_1=math.nan), batch_size=None), [[], [101], [], [], [], [], []]),
    "a number beside the samples": (DataLoader(seven(_1=math.nan), 7, collate_fn=weighted), [[101]]),
    "no tuple": (DataLoader([0], collate_fn=lambda _: Plain(NAN, Y[:3])), [[]]),
    "ids that are no tensor": (DataLoader([0], collate_fn=lambda _: Batch(NAN, Y[:3], [1, 2, 3])), [[]]),
}


@pytest.mark.parametrize(("batches", "named"), UNUSUAL.values(), ids=UNUSUAL)
def test_a_batch_of_an_unusual_form_does_not_end_the_loop(watched, batches, named):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch.x.reshape(-1, 4), batch.y.reshape(-1)).backward()
            optimizer.step()
            for p in model.parameters():
                nn.init.constant_(p, 0.1)
    assert w.steps["bad_samples"].tolist() == named


def test_batches_without_ids_name_nobody(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        for x, y in DataLoader(TensorDataset(NAN, Y[:3]), 3):
            train_step(model, optimizer, x, y)
    assert w.steps["bad_samples"].tolist() == [[]]


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now


class Slow(TensorDataset):
    """Samples, each of which takes some seconds of a clock."""

    def __init__(self, clock, seconds):
        super().__init__(X, Y)
        self.clock, self.seconds = clock, seconds

    def __getitem__(self, index):
        self.clock.now += self.seconds
        return super().__getitem__(index)


def test_times_are_those_of_the_parts_of_a_step_and_validation_is_in_none(watched, monkeypatch):
    model, optimizer = watched
    clock = Clock()
    monkeypatch.setattr(recorder, "perf_counter", clock)

    def taking(seconds, function):
        def slow(*arguments):
            clock.now += seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr(model[0], "forward", taking(100, model[0].forward))
    with dx.watch(model, optimizer) as w:
        for x, y in DataLoader(Slow(clock, 1), 16):
            loss = loss_of(model, x, y)
            loss.register_hook(taking(1000, lambda gradient: None))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.now += 1e6  # printing, plotting
            with torch.no_grad():
                for x, y in DataLoader(Slow(clock, 1e4), 16):
                    loss_of(model, x, y)
    assert w.steps["data_time"].tolist() == [16] * 4
    assert w.steps["forward_time"].tolist() == [100] * 4
    assert w.steps["backward_time"].tolist() == [1000] * 4
    assert w.steps["update_time"].tolist() == [0] * 4
    assert w.steps["step_time"].tolist() == [1116] * 4
    assert w.steps["effective_batch"].tolist() == [16] * 4


def test_memory_is_at_least_what_the_loop_holds(watched):
    model, optimizer = watched
    held = torch.ones(2**24)  # 64 MiB
    with dx.watch(model, optimizer) as w:
        train_step(model, optimizer)
    assert w.steps["memory"][0] > held.nbytes


def test_tables_can_be_read_while_the_loop_runs(watched, tmp_path):
    model, optimizer = watched
    with dx.watch(model, optimizer, out=tmp_path) as w:
        for step in range(3):
            train_step(model, optimizer)
            assert w.steps.index.tolist() == list(range(step + 1))
            assert len(w.gradients) == 4 * (step + 1)


def test_a_record_on_disk_is_the_record_that_memory_would_keep(watched, tmp_path):
    model, optimizer = watched
    with dx.watch(model, optimizer, out=tmp_path) as on_disk, dx.watch(model, optimizer) as in_memory:
        for _ in range(3):
            train_step(model, optimizer)
    stored = trace.read(tmp_path)
    for name in ("loss", "lr", "grad_norm", "effective_batch", "skipped"):
        assert stored.steps[name].tolist() == on_disk.steps[name].tolist() == in_memory.steps[name].tolist()
    np.testing.assert_array_equal(stored.gradients.to_numpy(), in_memory.gradients.to_numpy())


def test_sizes_are_the_numbers_of_elements(watched):
    assert dx.watch(*watched).sizes == {"0.weight": 32, "0.bias": 8, "2.weight": 24, "2.bias": 3}


def test_a_model_with_shared_weights_has_them_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(dx.watch(model, torch.optim.SGD(model.parameters())).sizes) == ["0.weight", "0.bias", "1.bias"]


LINEAR = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("model", "optimizer", "text"),
    [
        ([LINEAR], torch.optim.SGD(LINEAR.parameters()), "expected a torch.nn.Module as model, got list"),
        (LINEAR, LINEAR.parameters, "expected a torch.optim.Optimizer as optimizer, got method"),
        (nn.ReLU(), torch.optim.SGD(LINEAR.parameters()), "the model has no parameters"),
        (nn.LazyLinear(1), torch.optim.SGD(LINEAR.parameters()), "the model has weights without a shape"),
        (nn.Linear(2, 1, device="meta"), torch.optim.SGD(LINEAR.parameters()), "the model is on the device 'meta'"),
    ],
)
def test_what_cannot_be_watched_is_refused(model, optimizer, text):
    with pytest.raises(dx.DxdyError, match=f"^watch: {text}"):
        dx.watch(model, optimizer)


def test_a_watch_is_for_one_loop(watched):
    with dx.watch(*watched) as w:
        pass
    with pytest.raises(dx.DxdyError, match="used already"), w:
        pass


def test_tables_before_anything_was_watched_are_refused(watched):
    with pytest.raises(dx.DxdyError, match="nothing was observed yet"):
        _ = dx.watch(*watched).steps


def test_the_loss_of_another_model_is_not_this_ones(watched):
    model, optimizer = watched
    other = small_model()
    with dx.watch(model, optimizer) as w, dx.watch(other, torch.optim.SGD(other.parameters(), lr=0.1)) as beside:
        optimizer.zero_grad()
        (1000 * loss_of(other)).backward()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        loss_of(other).backward()
    assert w.steps["loss"].tolist() == [loss.item()]
    assert beside.steps["effective_batch"].tolist() == [128]


def test_a_loss_that_does_not_reach_the_model_is_still_its_loss(watched):
    model, optimizer = watched
    head = nn.Linear(3, 3)
    with dx.watch(model, optimizer) as w:
        loss = nn.functional.cross_entropy(head(model(X).detach()), Y)
        loss.backward()
        optimizer.step()
        nn.functional.cross_entropy(head(model(X).detach()), Y).backward()
    assert w.steps["loss"][0] == loss.item()
    assert w.steps["skipped"].tolist() == [False, True]
    assert w.gradients["norm"].isna().all()


def test_losses_of_one_backward_are_added_up(watched):
    model, optimizer = watched
    with dx.watch(model, optimizer) as w:
        losses = [loss_of(model), loss_of(model, X[:8], Y[:8])]
        torch.autograd.backward(losses)
        optimizer.step()
    assert w.steps["loss"][0] == pytest.approx(sum(loss.item() for loss in losses))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_watches_may_end_in_another_order_than_they_began(first):
    parts = [(model := small_model(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(3)]

    def steps(model, optimizer):
        with dx.watch(model, optimizer) as w:
            while True:
                train_step(model, optimizer)
                yield w

    loops = [steps(*part) for part in parts]
    watches = [next(loop) for loop in loops]
    loops.pop(first).close()
    for loop in loops:
        next(loop)
    loops.pop().close()
    next(loops[0])
    loops.pop().close()
    assert sorted(len(w.steps) for w in watches) == [1, 2, 3]
    assert len(watches[first].steps) == 1
    assert all(hooks_of(*part) == [] for part in parts)


def test_what_somebody_else_put_over_a_watch_stays(watched, monkeypatch):
    model, optimizer = watched
    calls = []
    with dx.watch(model, optimizer) as w, monkeypatch.context() as patch:
        observed = torch.autograd.backward

        def counted(*args, **kwargs):
            calls.append(1)
            observed(*args, **kwargs)

        patch.setattr(torch.autograd, "backward", counted)
        w.__exit__(None, None, None)
        train_step(model, optimizer)
        assert torch.autograd.backward is counted
    assert calls == [1]
    assert len(w.steps) == 0
    torch.autograd.backward = TORCHS[PLACES.index((torch.autograd, "backward"))]


def test_a_folder_that_cannot_be_used_leaves_no_hooks_behind(watched, tmp_path):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(dx.DxdyError, match="cannot be written"), dx.watch(*watched, out=tmp_path / "a_file" / "run"):
        pass
    assert hooks_of(*watched) == []
