"""Trainings that were accused though nothing is wrong with them, and faults that went unheard, through both doors."""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dxdy_nb as dx


def net(features=8, outputs=4):
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, outputs))


def blobs(n=256, classes=4, spread=0.6):
    y = torch.arange(n) % classes
    return (1.5 * torch.randn(classes, 8))[y] + spread * torch.randn(n, 8), y


def batches(*tensors, size=16, shuffle=True):
    return DataLoader(TensorDataset(*tensors), size, shuffle=shuffle)


def usual(model=None, data=None, loss_fn=None, optimizer=None, **more):
    model = model or net()
    given = {"model": model, "loader": batches(*(data or blobs())), "loss_fn": loss_fn or nn.CrossEntropyLoss()}
    return given | {"optimizer": optimizer or torch.optim.Adam(model.parameters(), 5e-3)} | more


def step_of(model, batch, optimizer, loss_fn, step):
    *x, y = batch
    optimizer.zero_grad()
    loss = loss_fn(model(*x), y)
    loss.backward()
    optimizer.step()
    return loss


def watched(given):
    """Return the report on a plain loop over what ``diagnose`` would be given."""
    step, number = given.get("train_step", step_of), 0
    with dx.watch() as w:
        for _ in range(3):
            for batch in given["loader"]:
                step(given["model"], batch, given["optimizer"], given["loss_fn"], number)
                number += 1
    return w.diagnose()


def both(make):
    torch.manual_seed(0)
    yield dx.diagnose(**make())
    torch.manual_seed(0)
    yield watched(make())


def void_class():
    x, y = blobs()
    y = torch.where((y == 3) & (torch.rand(256) < 0.85), 0, y)
    return usual(data=(x, y), loss_fn=nn.CrossEntropyLoss(torch.tensor([1.0, 1.0, 1.0, 0.0])))


def log_likelihood(out, y):
    return -F.cross_entropy(out, y)


def likelihood_minus_in_the_step():
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        value = loss_fn(model(batch[0]), batch[1])
        (-value).backward()
        optimizer.step()
        return value

    return usual(loss_fn=log_likelihood, train_step=train_step)


def likelihood_maximised():
    model = net()
    return usual(model, loss_fn=log_likelihood, optimizer=torch.optim.Adam(model.parameters(), 5e-3, maximize=True))


def closure_at_the_minimum():
    def train_step(model, batch, optimizer, loss_fn, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    x, model = torch.randn(200, 5), nn.Linear(5, 1)
    y = x @ torch.randn(5, 1) + 0.1 * torch.randn(200, 1)
    loader = [(x, y)] * 8
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1)
    return usual(model, loader=loader, loss_fn=nn.MSELoss(), optimizer=optimizer, train_step=train_step)


def last_layer_near_zero():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    nn.init.normal_(model[-1].weight, std=1e-5)
    x = torch.randn(256, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return usual(model, (x, x.roll(1, 1) / 2), nn.MSELoss(), optimizer)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score, self.head = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.head((self.score(h).softmax(0) * h).sum(0, keepdim=True))


def one_bag_a_batch():
    x = torch.randn(60, 12, 6)
    return usual(Bag(), loader=list(zip(x, (x[:, :, :1].amax(1) > 1.6).long().unbind(), strict=True)))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(5, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x)[0])


def one_sequence_a_batch():
    x = torch.randn(40, 12, 5)
    data = TensorDataset(x, (x[..., 0].cumsum(1) > 0).long())
    return usual(Tagger(), loader=DataLoader(data, batch_size=None, shuffle=True))


def windows_of_a_series():
    r = torch.randn(700)
    return usual(net(10, 2), loader=batches(r.unfold(0, 10, 1)[:-1], (r[10:] > 0).long(), shuffle=False))


def missing_labels():
    x = torch.randn(256, 8)
    y = (x[:, :3] > 0).float().masked_fill(torch.rand(256, 3) < 0.3, -1)

    def loss_fn(out, y):
        known = (y >= 0).float()
        return (F.binary_cross_entropy_with_logits(out, y, reduction="none") * known).sum() / known.sum()

    return usual(net(8, 3), (x, y), loss_fn)


def statistics_kept_by_a_momentum_of_zero():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model(blobs()[0])
    model[1].momentum = 0.0
    return usual(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.drop = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.body(self.table(x))[0]) @ self.table.weight.T


def dropout_before_a_tied_product():
    tokens = (torch.arange(13) * 3 + torch.randint(0, 20, (128, 1))) % 20
    return usual(
        Tied(), (tokens[:, :-1], tokens[:, 1:]), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    )


def judged_by_a_network_that_nobody_froze():
    judge, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)).eval(), torch.randn(256, 8)
    return usual(net(8, 8), (x, x.roll(1, 1)), lambda out, y: F.mse_loss(judge(out), judge(y)))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net(8, 6)

    def forward(self, x):
        return self.body(x).masked_fill(F.pad(x[:, :2] > 0, (4, 0)), -math.inf)


def logarithms_of_large_targets():
    x = torch.randn(256, 8)
    return usual(net(8, 1), (x, (11.5 + x[:, :1] / 2).exp()), lambda out, y: F.mse_loss(out, y.log()))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        scores = torch.bmm(self.query(x), x.transpose(1, 2))
        scores.data.masked_fill_(torch.ones(6, 6).triu(1).bool(), -math.inf)
        return self.head((scores.softmax(-1) @ x)[:, -1])


def masked_behind_autograd():
    x = torch.randn(256, 6, 8)
    return usual(Attention(), (x, x[:, :2].sum(1)[:, :3].argmax(1)))


class Visited(Dataset):
    def __init__(self):
        (self.x, self.y), self.visits = blobs(), torch.zeros(256)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        self.visits[i] += 1
        return self.x[i], self.y[i]


def begins_at_the_minimum():
    x, model = torch.randn(256, 4), nn.Linear(4, 1)
    y = x @ model.weight.detach().T + model.bias.detach() + 1e-7
    return usual(model, (x, y), nn.MSELoss(), torch.optim.Adam(model.parameters(), 1e-3))


def distance_of_two_sets():
    def loss_fn(out, y):
        return (out.flatten().sort().values - y.sort().values).abs().mean()

    return usual(net(4, 1), (torch.randn(256, 4), torch.rand(256)), loss_fn)


def decay_of_a_loss_below_zero():
    x, model = torch.randn(256, 8), net(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.3)
    return usual(model, (x, x[:, :1]), lambda out, y: F.mse_loss(out, y) - 50, optimizer)


class Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        unit = w.abs().max() / 127
        return (w / unit).round() * unit

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(nn.Linear):
    def forward(self, x):
        return F.linear(x, Quantised.apply(self.weight), self.bias)


@pytest.mark.parametrize(
    "make",
    [
        void_class,
        likelihood_minus_in_the_step,
        likelihood_maximised,
        closure_at_the_minimum,
        last_layer_near_zero,
        one_bag_a_batch,
        one_sequence_a_batch,
        windows_of_a_series,
        missing_labels,
        statistics_kept_by_a_momentum_of_zero,
        dropout_before_a_tied_product,
        judged_by_a_network_that_nobody_froze,
        lambda: usual(Masked()),
        logarithms_of_large_targets,
        masked_behind_autograd,
        lambda: usual(loader=DataLoader(Visited(), 16, shuffle=True)),
        begins_at_the_minimum,
        distance_of_two_sets,
        decay_of_a_loss_below_zero,
        lambda: usual(nn.Sequential(Rounding(8, 32), nn.ReLU(), Rounding(32, 4))),
    ],
)
def test_what_is_meant_is_no_error_through_either_door(make):
    for report in both(make):
        assert report.errors == (), str(report)


class Noisy(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.3 * torch.randn(8), self.y[i]


@pytest.mark.parametrize("restores", [True, False])
def test_noise_in_validation_is_a_fault_unless_it_is_to_be_taken_away(restores):
    x, y = blobs(300)
    data = Noisy(x, x if restores else y)
    train, held = (torch.utils.data.Subset(data, part) for part in (range(256), range(256, 300)))
    more = {"loader": DataLoader(train, 16, shuffle=True), "val_loader": DataLoader(held, 16)}
    report = dx.diagnose(**usual(net(8, 8 if restores else 4), loss_fn=nn.MSELoss() if restores else None, **more))
    assert [error.cause for error in report.errors] == ([] if restores else ["augment-on-val"])


@pytest.mark.parametrize("scale", [1, 100])
def test_categories_that_are_missing_in_a_small_validation_set_are_no_other_scale(scale):
    kinds = torch.multinomial(1 / torch.arange(1, 201.0) ** 0.6, 2000, True)
    x, y = F.one_hot(kinds, 200).float(), torch.randn(200, 3)[kinds].argmax(1)
    report = dx.diagnose(
        **usual(net(200, 3), (x[:1900], y[:1900])), val_loader=batches(scale * x[1900:], y[1900:], shuffle=False)
    )
    assert ("val-not-scaled" in {error.cause for error in report.errors}) == (scale == 100)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = net(4, 2)
        self.target = copy.deepcopy(self.online)

    def forward(self, x):
        return self.online(x)


def test_a_target_network_that_the_optimizer_holds_needs_no_gradient():
    def train_step(model, batch, optimizer, loss_fn, step):
        with torch.no_grad():
            wanted = batch[1] + 0.9 * model.target(batch[0]).amax(1)
        return step_of(model, (batch[0], wanted), optimizer, lambda out, y: loss_fn(out[:, 0], y), step)

    state = torch.randn(256, 4)
    report = dx.diagnose(**usual(Agent(), (state, state[:, 0]), nn.SmoothL1Loss(), train_step=train_step))
    assert report.errors == (), str(report)


def test_steps_that_only_collect_are_not_asked_for_a_backward():
    seen = []

    def train_step(model, batch, optimizer, loss_fn, step):
        with torch.no_grad():
            seen.append(model(batch[0]))

    assert dx.diagnose(**usual(train_step=train_step)).errors == ()


def test_what_an_epoch_left_over_may_be_cleared():
    given, count = usual(data=blobs(90), accumulation_steps=4), [0]

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 4).backward()
        count[0] += 1
        if count[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_epoch_end():
        given["optimizer"].zero_grad()
        count[0] = 0

    assert dx.diagnose(**given, train_step=train_step, on_epoch_end=on_epoch_end).errors == ()


@pytest.mark.parametrize("anew", [True, False])
def test_weights_that_go_back_begin_another_run_where_the_optimizer_is_new(anew):
    torch.manual_seed(0)
    given = usual(data=blobs(96))
    first = copy.deepcopy(given["model"].state_dict())
    with dx.watch() as w:
        for _ in range(4):
            given["model"].load_state_dict(first)
            if anew:
                given["optimizer"] = torch.optim.Adam(given["model"].parameters(), 5e-3)
            for batch in given["loader"]:
                step_of(given["model"], batch, given["optimizer"], given["loss_fn"], 0)
    assert [error.cause for error in w.diagnose().errors] == ([] if anew else ["weights-changed-outside"])


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_of_an_optimizer_that_comes_later_is_not_taken_for_the_one_that_trains():
    torch.manual_seed(0)
    one, two = net(), net()
    first, later = (torch.optim.Adam(model.parameters(), 5e-3) for model in (one, two))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in (later, first)]
    with dx.watch() as w:
        for _ in range(3):
            for batch in batches(*blobs()):
                step_of(one, batch, first, F.cross_entropy, 0)
            for schedule in schedules:
                schedule.step()
    assert w.diagnose().errors == ()


@dataclass(frozen=True)
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, y):
        out = self.body(x)
        return Answer(F.cross_entropy(out, y), out)


def test_an_output_in_a_dataclass_is_kept_without_its_graph():
    torch.manual_seed(0)
    model = Answering()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with dx.watch() as w:
        for _ in range(2):
            for x, y in batches(*blobs()):
                optimizer.zero_grad()
                model(x, y).loss.backward()
                optimizer.step()
    assert w.diagnose().errors == ()


# ---- faults that went unheard ----


def test_step_before_backward_after_clearing_trains_nothing():
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        optimizer.step()
        loss.backward()
        return loss

    for report in both(lambda: usual(train_step=train_step)):
        assert [error.cause for error in report.errors] == ["zero-grad-after-backward"]


def test_a_detached_output_that_asks_for_a_gradient_reaches_no_weight():
    def train_step(model, batch, optimizer, loss_fn, step):
        return step_of(lambda x: model(x).detach().requires_grad_(), batch, optimizer, loss_fn, step)

    for report in both(lambda: usual(train_step=train_step)):
        assert [error.cause for error in report.errors] == ["detach-cut"]


def test_two_models_that_train_in_eval_mode_are_heard():
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()).eval(), nn.Linear(32, 4)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], 5e-3)
    with dx.watch() as w:
        for batch in batches(*blobs()):
            step_of(lambda x: head(body(x)), batch, optimizer, F.cross_entropy, 0)
    assert [error.cause for error in w.diagnose().errors] == ["left-in-eval"]


def test_an_exponential_schedule_that_ends_within_an_epoch_is_perhaps_one_for_epochs():
    given = usual()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.5)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = step_of(model, batch, optimizer, loss_fn, step)
        scheduler.step()
        return loss

    report = dx.diagnose(**given, train_step=train_step, scheduler=scheduler)
    assert [(one.cause, one.severity) for one in report.findings] == [("scheduler-per-batch", "hint")]


def test_a_step_that_is_missing_in_a_loop_is_named():
    given = usual()
    with dx.watch() as w:
        for x, y in given["loader"]:
            given["optimizer"].zero_grad()
            F.cross_entropy(given["model"](x), y).backward()
    assert [error.cause for error in w.diagnose().errors] == ["step-missing"]


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, h):
        out, h = self.body(x, h)
        return self.head(out[:, -1]), h


def test_a_carried_graph_is_not_taken_for_an_operation_in_place():
    state = [None]

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        out, state[0] = model(batch[0], state[0])
        loss = loss_fn(out, batch[1])
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    x = torch.randn(256, 5, 8)
    report = dx.diagnose(**usual(Carrying(), (x, x[:, -1, :4].argmax(1)), train_step=train_step))
    assert [error.cause for error in report.errors] == ["graph-used-twice"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_forward_without_gradients_is_named_in_a_loop_that_calls_backward(asks):
    model, loss_fn = net(), nn.CrossEntropyLoss()
    torch_says = pytest.raises(RuntimeError, match="does not require grad") if not asks else nullcontext()
    with torch_says, dx.watch() as w:
        for x, y in batches(*blobs()):
            with torch.no_grad():
                loss = loss_fn(model(x), y)
            loss.requires_grad_(asks).backward()
    (error,) = w.diagnose().errors
    assert (error.stage, error.cause) == ("forward", "whole-forward-no-grad")


def test_a_backward_beside_a_model_that_is_only_evaluated_is_no_fault():
    model, free = net(), torch.zeros(8, requires_grad=True)
    with dx.watch() as w:
        for x, _ in batches(*blobs()):
            with torch.no_grad():
                answer = model(x).mean()
            (free.square().sum() + answer).backward()
    assert w.diagnose().errors == ()
