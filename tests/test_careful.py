"""What a watch met in legal loops and should not have let the loop feel, or recorded otherwise than it was."""

import collections
import dataclasses
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, Dataset

from dxdy_nb.diagnosis.written import WrittenLoss
from dxdy_nb.observe.hooks import Careful, listening
from dxdy_nb.observe.observer import watch

Named = collections.namedtuple("Named", "x ids")


def line():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def fit(model, optimizer, steps=3, clip=None):
    """Return the norms that clipping found."""
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        norms += (
            [float(clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip))] if clip else []
        )
        optimizer.step()
    return norms


def test_models_called_one_after_the_other_have_their_norm_before_clipping_from_the_first_step_on():
    encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
    with watch() as w:
        norms = fit(lambda x: decoder(encoder(x)), optimizer, clip=0.01)
    assert w.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def test_a_scale_that_was_halved_down_to_zero_ends_no_loop():
    (model, optimizer), scaler = line(), torch.amp.GradScaler("cpu", init_scale=2.0**-140)
    with watch() as w:
        for _ in range(15):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 4), torch.nan)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 0 and len(w.steps) == 15 and w.steps["skipped"].all()


def test_forwards_before_training_are_not_held():
    model, outputs = nn.Linear(4, 4), []
    with watch(), torch.no_grad():
        for _ in range(4):
            outputs.append(weakref.ref(model(torch.randn(2, 4))))
        assert [output() for output in outputs] == [None] * 4


def test_forwards_that_nothing_follows_are_held_in_bounded_number():
    model = nn.Linear(4, 4)
    with watch() as w:
        for _ in range(40):
            model(torch.randn(2, 4))
        assert sum(call.output.grad_fn is not None for call in w._witness.step.calls) <= 8


def test_what_is_heard_behind_the_first_steps_is_not_kept():
    model, optimizer = line()
    with watch() as w:
        fit(model, optimizer, 40, clip=1.0)
        before = len(w._witness.step.events), len(w._witness.step.clips)
        fit(model, optimizer, 10, clip=1.0)
        assert (len(w._witness.step.events), len(w._witness.step.clips)) == before


def test_a_long_argument_is_not_looked_through_at_each_call(monkeypatch):
    looked = []
    monkeypatch.setattr("dxdy_nb.diagnosis.written.tensors_in", lambda value: looked.append(value) or [])
    vocabulary = dict.fromkeys(range(10_000))

    def look(words, word):
        return words[word]

    heard = WrittenLoss()
    heard.listen()
    look(vocabulary, 3)
    heard.forget()
    assert not any(vocabulary in given for given in looked if isinstance(given, list))


class Dotted(dict):
    __getattr__ = dict.__getitem__


class Unsized(Dataset):
    def __len__(self):
        raise RuntimeError("not opened")

    def __getitem__(self, place):
        return torch.ones(4)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(torch.ones(4, 4), 2, collate_fn=lambda rows: Dotted(x=torch.stack(rows))),
        DataLoader(Unsized(), batch_sampler=[[0, 1], [2, 3]], collate_fn=lambda rows: Dotted(x=torch.stack(rows))),
    ],
)
def test_batches_and_data_sets_may_raise_what_they_like(loader):
    model, optimizer = line()
    with watch() as w:
        for batch in loader:
            model(batch.x).mean().backward()
            optimizer.step()
    assert len(w.steps) == 2


def test_the_default_device_is_no_business_of_a_bad_batch():
    model, optimizer = line()
    loader = DataLoader([Named(torch.full((2, 4), torch.nan), torch.arange(2))], batch_size=None)
    with watch() as w:
        for batch in loader:
            with torch.device("meta"):
                model(batch.x).mean().backward()
                optimizer.step()
    assert w.steps["bad_samples"].tolist() == [[0, 1]]


def test_weights_of_functional_call_are_neither_kept_nor_taken_for_the_models():
    model, optimizer = line()
    noisy = lambda x: functional_call(model, {n: p + 0.1 for n, p in model.named_parameters()}, (x,))  # noqa: E731
    with warnings.catch_warnings(), watch() as w:
        warnings.simplefilter("error")
        norms = fit(noisy, optimizer, clip=0.01)
    assert w.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert set(w.gradients.index.get_level_values("parameter")) == {"weight", "bias"}


def test_gradients_that_were_assigned_have_their_norm_before_clipping():
    (model, optimizer), norms = line(), []
    with watch() as w:
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            for p, grad in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                p.grad = grad
            norms.append(float(clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
    assert w.steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def test_gradients_made_in_inference_mode_end_no_loop():
    model, optimizer = line()
    with watch() as w:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).mean().backward()
            with torch.inference_mode():
                for p in model.parameters():
                    p.grad = p.grad * 0.5
            optimizer.step()
    assert len(w.steps) == 3


@pytest.mark.parametrize("budget", [0.03, None])
def test_a_model_that_is_gone_before_the_watch_ends_leaves_its_last_row(budget):
    def train():
        model, optimizer = line()
        for step in range(10):
            model(torch.randn(8, 4)).mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    with watch(budget=budget) as w:
        train()
    assert w.steps["skipped"].tolist() == [False, False, True]


def test_an_optimizer_that_follows_one_whose_step_failed_is_recorded():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    model, optimizer = line()
    with watch() as w:
        with pytest.raises(MemoryError):
            fit(model, Failing(model.parameters(), 0.1))
        fit(model, optimizer, 3)
    assert len(w.steps) == 3 and not w.steps["skipped"].any()


def test_a_forward_of_another_thread_that_ends_within_a_backward_leaves_no_trace():
    (model, optimizer), other, inside, go = line(), nn.Linear(4, 1), threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        go.wait(10)

    def end(_):
        go.set()
        thread.join()

    hook = other.register_forward_pre_hook(wait)
    thread = threading.Thread(target=torch.no_grad()(other), args=(torch.randn(8, 4),))
    with watch() as w:
        loss = model(torch.randn(8, 4)).mean()
        thread.start()
        inside.wait(10)
        loss.register_hook(end)
        loss.backward()
        optimizer.step()
        hook.remove()
        fit(model, optimizer, 2)
    assert w.steps["effective_batch"].tolist() == [8, 8, 8]


def test_layers_that_a_model_makes_in_its_first_forward_are_found():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = None

        def forward(self, x):
            self.layer = self.layer or nn.Linear(x.shape[1], 1)
            return self.layer(x)

    model = Late()
    with watch() as w:
        model(torch.randn(8, 4))
        fit(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert w.steps["effective_batch"].tolist()[1] == 8 and list(w.models) == ["Late"]


@dataclasses.dataclass
class Scaled(nn.Module):  # equal to others of its numbers, and so without a hash
    factor: float = 2.0

    def __post_init__(self):
        super().__init__()

    def forward(self, x):
        return self.factor * x


def test_a_module_without_a_hash_may_be_called():
    (model, optimizer), scaled = line(), Scaled()
    with watch() as w:
        fit(lambda x: scaled(model(x)), optimizer)
    assert len(w.steps) == 3 and w._witness.seen.notes == []


def test_values_that_a_tensor_shows_to_nobody_are_nan():
    model = nn.Linear(4, 1)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(TwoTensor(p.detach(), p.detach().clone())))
    with watch() as w:
        fit(model, torch.optim.SGD(model.parameters(), 0.1), 12)
    assert len(w.steps) == 12 and w.gradients["norm"].isna().all()


def test_a_model_on_the_device_meta_may_train():
    with torch.device("meta"):
        model, optimizer = line()
        with watch() as w:
            fit(model, optimizer)
    assert w.steps["loss"].isna().all()


@pytest.mark.parametrize("action", ["default", "error"])
def test_an_error_of_the_recorder_is_kept_away_from_the_loop(monkeypatch, action):
    def broken(*_):
        raise ZeroDivisionError

    model, optimizer = line()
    with warnings.catch_warnings(record=action == "default") as caught:
        warnings.simplefilter(action)
        with watch() as w:
            fit(model, optimizer, 2)
            monkeypatch.setattr("dxdy_nb.observe.recorder.total_norm", broken)
            monkeypatch.setattr("dxdy_nb.observe.row.total_norm", broken)
            fit(model, optimizer, 2)
    assert len(w.steps) == 2
    assert action == "error" or "nothing is recorded from step 2 on (ZeroDivisionError" in str(caught[-1].message)


def test_what_a_receiver_that_fails_was_to_hand_on_is_handed_on():
    class Failing:
        given: frozenset[int] = frozenset()
        forked = item = staticmethod(lambda: None)

        def iterate(self, loader, begin):
            begin()
            raise ValueError

    failed = []
    with listening(Careful(Failing(), failed.append)):
        assert len(list(DataLoader(torch.ones(4, 1), 2))) == 2
        assert len(list(DataLoader(torch.ones(4, 1), 2))) == 2
    assert [type(error) for error in failed] == [ValueError]


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_parameters_that_processes_share_are_left_alone_by_the_witness():
    """No communication that the loop itself does not make: perhaps this process alone is watched."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))

        def run():
            model = distribute_module(nn.Linear(4, 1), mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
            with CommDebugMode() as counted:
                fit(lambda x: model(DTensor.from_local(x, mesh, [Shard(0)])), optimizer, 1)
            return counted.get_total_counts()

        plain = run()
        with watch():
            assert run() == plain > 0
    finally:
        torch.distributed.destroy_process_group()


class Pair(list):
    made = 0

    def __init__(self, x, y):
        super().__init__([x, y])
        Pair.made += 1


def test_a_batch_of_a_class_of_ones_own_is_heard_and_made_by_nobody_else():
    model, optimizer = line()
    loader = DataLoader(torch.randn(16, 4), 8, collate_fn=lambda rows: Pair(torch.stack(rows), "names"))
    with watch() as w:
        for x, _ in loader:
            fit(lambda _, x=x: model(x), optimizer, 1)
    assert Pair.made == 2 and w._witness.seen.notes == []
