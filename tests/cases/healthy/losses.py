"""Losses and targets of many kinds."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import blobs, curve, loader


def net(features, outputs, *last):
    return nn.Sequential(nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, outputs), *last)


def training(model, loss_fn, *tensors, lr=5e-3, **more):
    optimizer = torch.optim.Adam([*model.parameters(), *more.pop("with_", [])], lr=lr)
    return {"model": model, "loss_fn": loss_fn, "loader": loader(*tensors), "optimizer": optimizer} | more


@healthy
def two_tasks_one_in_a_batch():
    """Batches take turns between two tasks, so each head is unused in every other step."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 1)])

        def forward(self, x, task):
            return self.heads[task](torch.relu(self.body(x)))

    x, y = blobs()
    batches = [(x[i : i + 16], y[i : i + 16], i // 16 % 2) for i in range(0, 256, 16)]
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y, task = batch
        out = model(x, task)
        loss = F.mse_loss(out[:, 0], x.mean(1)) if task else F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "loader": batches, "optimizer": optimizer, "train_step": train_step}


@healthy
def unused_head():
    """A head for later is registered and owned by the optimizer, and never called."""
    model = net(8, 4)
    model.later = nn.Linear(32, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return training(model, nn.CrossEntropyLoss(), *blobs())


@healthy
def auxiliary_output():
    """In train mode the model gives two outputs, in eval mode one."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.early, self.b = nn.Linear(8, 16), nn.Linear(16, 4), net(16, 4)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return (self.b(h), self.early(h)) if self.training else self.b(h)

    def loss_fn(output, y):
        if isinstance(output, tuple):
            return F.cross_entropy(output[0], y) + 0.4 * F.cross_entropy(output[1], y)
        return F.cross_entropy(output, y)

    return training(Two(), loss_fn, *blobs())


@healthy
def uncertainty_weighting():
    """The loss has parameters of its own that weigh two tasks; it falls below zero."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2))

        def forward(self, output, y):
            parts = torch.stack([F.mse_loss(output[:, 0], y[:, 0]), F.mse_loss(output[:, 1], y[:, 1])])
            return (parts * (-self.logs).exp() + self.logs).sum()

    loss_fn = Weighed()
    return training(net(6, 2), loss_fn, *curve(outputs=2), with_=loss_fn.parameters())


@healthy(fast=True)
def focal():
    """A loss of its own: confident samples have hardly any gradient."""

    def loss_fn(logits, y):
        log = F.log_softmax(logits, 1).gather(1, y[:, None])[:, 0]
        return (-((1 - log.exp()) ** 2) * log).mean()

    return training(net(8, 4), loss_fn, *blobs())


@healthy
def focal_binary_imbalanced():
    """Nine of ten labels are 0, and the focal weight makes up for it."""
    x = torch.randn(512, 8)
    y = (x[:, 0] > 1.28).float()

    def loss_fn(logits, y):
        plain = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        p = torch.exp(-plain)
        return ((1 - p) ** 2 * plain * torch.where(y > 0, 0.75, 0.25)).mean()

    return training(net(8, 1, nn.Flatten(0)), loss_fn, x, y)


@healthy
def poisson():
    """Targets are counts, outputs are logs of rates; the loss is negative."""
    x = torch.randn(256, 6)
    y = torch.poisson((x[:, :1] + 1).exp())
    return training(net(6, 1), nn.PoissonNLLLoss(), x, y)


@healthy
def gaussian_likelihood():
    """The output holds a mean and a log-variance; the loss goes below zero."""

    def loss_fn(output, y):
        mean, log = output.chunk(2, 1)
        return F.gaussian_nll_loss(mean, y, log.exp())

    return training(net(6, 2), loss_fn, *curve())


@healthy
def mixture_density():
    """Twelve outputs for one target: a mixture of four bells."""

    def loss_fn(output, y):
        weight, mean, log = output.chunk(3, 1)
        bells = -0.5 * ((y - mean) / log.exp()) ** 2 - log
        return -torch.logsumexp(weight.log_softmax(1) + bells, 1).mean()

    return training(net(6, 12), loss_fn, *curve())


@healthy
def quantiles():
    """Three outputs for one target, which is broadcast on purpose along the quantiles."""
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss_fn(output, y):
        gap = y - output
        return torch.maximum(levels * gap, (levels - 1) * gap).mean()

    return training(net(6, 3), loss_fn, *curve())


@healthy
def huber_with_outliers():
    """A few targets are far off, and their gradient is bounded."""
    x, y = curve()
    y[::37] += 30
    return training(net(6, 1), nn.HuberLoss(), x, y)


@healthy
def log_cosh():
    """A formula that torch has no name for."""
    return training(net(6, 1), lambda out, y: (F.softplus(2 * (out - y)) - (out - y) - math.log(2)).mean(), *curve())


@healthy
def label_smoothing():
    """The loss cannot reach zero."""
    return training(net(8, 4), nn.CrossEntropyLoss(label_smoothing=0.2), *blobs())


@healthy
def mixed_pairs():
    """Inputs and targets are mixtures of two samples; targets are rows of probabilities."""
    x, y = blobs()

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y = batch
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(len(x))
        soft = F.one_hot(y, 4).float()
        out = model(share * x + (1 - share) * x[order])
        loss = loss_fn(out, share * soft + (1 - share) * soft[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return training(net(8, 4), nn.CrossEntropyLoss(), x, y, train_step=train_step)


@healthy
def soft_targets_from_the_loader():
    """Targets are probabilities that sum to one, of the shape of the output."""
    x, y = blobs()
    return training(net(8, 4), nn.CrossEntropyLoss(), x, F.one_hot(y, 4) * 0.9 + 0.025)


@healthy
def class_weights():
    """A rare class is weighted up."""
    x, y = blobs(300, classes=3)
    keep = (y != 2) | (torch.rand(300) < 0.15)
    counts = torch.bincount(y[keep])
    return training(net(8, 3), nn.CrossEntropyLoss(weight=counts.sum() / (3 * counts)), x[keep], y[keep])


@healthy
def many_labels_with_positive_weight():
    """Several labels a sample, most of them 0; logits and targets have one shape."""
    x = torch.randn(256, 8)
    y = (x[:, :5] > 1).float()
    return training(net(8, 5), nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 5.0)), x, y)


@healthy
def probabilities_with_bce():
    """A sigmoid at the end, and the loss that is made for it."""
    x = torch.randn(256, 8)
    return training(net(8, 1, nn.Sigmoid()), nn.BCELoss(), x, (x[:, :1] > 0).float())


@healthy
def log_probabilities_with_nll():
    """A log-softmax at the end, and the loss that is made for it."""
    return training(net(8, 4, nn.LogSoftmax(1)), nn.NLLLoss(), *blobs())


@healthy
def log_softmax_and_cross_entropy():
    """The softmax of a log-softmax is itself: redundant, not wrong."""
    return training(net(8, 4, nn.LogSoftmax(1)), nn.CrossEntropyLoss(), *blobs())


@healthy
def divergence_per_batch():
    """kl_div with batchmean, log-probabilities first, on targets that are probabilities."""
    x = torch.randn(256, 8)
    y = (x[:, :4] * 2).softmax(1)
    return training(net(8, 4, nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), x, y)


@healthy
def hinge():
    """Targets are 1 and -1 as numbers; most samples have no gradient once learned."""
    x = torch.randn(256, 8)
    y = (x[:, 0] + x[:, 1]).sign()
    return training(net(8, 1, nn.Flatten(0)), lambda out, y: F.relu(1 - out * y).mean(), x, y)


@healthy
def multi_margin():
    """A hinge over classes, on scores that are no probabilities."""
    return training(net(8, 4), nn.MultiMarginLoss(), *blobs())


@healthy
def distillation_teacher_in_a_list():
    """The teacher stands in a plain list, so it is no part of the model; it runs in eval mode under no_grad."""
    x, y = blobs()

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = net(8, 4), [net(8, 4).eval().requires_grad_(False)]

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher[0](x)
            return self.net(x), wanted

    def loss_fn(output, y):
        mine, theirs = output
        soft = F.kl_div((mine / 2).log_softmax(1), (theirs / 2).softmax(1), reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(mine, y)

    return training(Student(), loss_fn, x, y)


@healthy
def distillation_teacher_in_the_model():
    """The teacher is a submodule in eval mode with BatchNorm, frozen and outside of the optimizer."""
    x, y = blobs()
    teacher = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    warm = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(30):
        warm.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        warm.step()
    teacher.eval().requires_grad_(False)
    teacher.zero_grad()

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = net(8, 4), teacher

    model = Student()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        x, _ = batch
        with torch.no_grad():
            wanted = model.teacher(x).softmax(1)
        loss = loss_fn(model.net(x).log_softmax(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.KLDivLoss(reduction="batchmean"), "optimizer": optimizer}
    return given | {"loader": loader(x, y), "train_step": train_step}


@healthy
def standardised_regression():
    """Raw targets in hundreds of thousands, standardised before training; inputs have a wide and a narrow column."""
    x, y = curve()
    raw = 250_000 + 80_000 * y
    return training(net(6, 1), nn.MSELoss(), x, (raw - raw.mean()) / raw.std())


@healthy
def bias_at_the_mean():
    """Targets stand around 50, and the last bias begins there."""
    x, y = curve()
    model = net(6, 1)
    with torch.no_grad():
        model[2].bias.fill_(50.0)
    return training(model, nn.MSELoss(), x, 50 + 3 * y)


@healthy
def noisy_labels():
    """Three of ten labels are wrong, and there is still much to learn."""
    x, y = blobs(512)
    y = torch.where(torch.rand(512) < 0.3, torch.randint(4, (512,)), y)
    return training(net(8, 4), nn.CrossEntropyLoss(), x, y)


@healthy
def imbalanced_and_learned():
    """Nine of ten samples are one class, and the other is recognised all the same."""
    y = (torch.rand(512) < 0.1).long()
    return training(net(8, 2), nn.CrossEntropyLoss(), torch.randn(512, 8) + 2.5 * y[:, None], y, lr=2e-2)


@healthy
def loss_sum_over_the_batch():
    """reduction="sum" with a small rate: the loss is large and depends on the size of the batch."""
    x, y = curve()
    model = net(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = loader(x, y)
    return {"model": model, "loss_fn": nn.MSELoss(reduction="sum"), "loader": data, "optimizer": optimizer}


@healthy
def masked_regression():
    """Missing targets are replaced before the loss and weighed with zero."""
    x, y = curve(outputs=3)
    known = (torch.rand_like(y) < 0.7).float()

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y, known = batch
        loss = (known * (model(x) - y).square()).sum() / known.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return training(net(6, 3), None, x, y * known, known, train_step=train_step)


@healthy
def missing_targets_as_nan():
    """NaN marks a missing target, and the loss picks the others before it computes."""
    x, y = curve(outputs=3)
    y[torch.rand_like(y) < 0.3] = torch.nan

    def loss_fn(out, y):
        known = ~torch.isnan(y)
        return F.mse_loss(out[known], y[known])

    return training(net(6, 3), loss_fn, x, y)


@healthy
def missing_inputs_as_nan():
    """NaN marks a missing value of the input, and the model replaces it and says so in another column."""

    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(12, 1)

        def forward(self, x):
            gone = torch.isnan(x)
            return self.net(torch.cat([x.masked_fill(gone, 0), gone.float()], 1))

    x, y = curve()
    x[torch.rand_like(x) < 0.1] = torch.nan
    return training(Filled(), nn.MSELoss(), x[:192], y[:192], val_loader=loader(x[192:], y[192:], shuffle=False))


@healthy
def ordinal():
    """Ranks from 0 to 4 as several yes-or-no questions, built in the loss."""
    x = torch.randn(256, 8)
    y = (x[:, 0] * 1.2 + 2).round().clamp(0, 4).long()

    def loss_fn(out, y):
        return F.binary_cross_entropy_with_logits(out, (y[:, None] > torch.arange(4)).float())

    return training(net(8, 4), loss_fn, x, y)


@healthy
def survival():
    """Cox's partial likelihood: every sample's loss depends on the whole batch, sorted."""
    x = torch.randn(256, 6)
    time = torch.distributions.Exponential((0.8 * x[:, 0]).exp()).sample()
    seen = (torch.rand(256) < 0.8).float()

    def loss_fn(risk, target):
        order = target[:, 0].argsort(descending=True)
        risk, seen = risk[order, 0], target[order, 1]
        return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum().clamp(min=1)

    data = torch.stack([time, seen], 1)
    return training(net(6, 1), loss_fn, x, data) | {"loader": loader(x, data, size=64)}


@healthy
def earth_mover():
    """Targets are histograms; the loss compares their running sums, and the softmax is the model's own."""
    x = torch.randn(256, 6)
    places = torch.arange(8)
    y = (-(places - 4 - 2 * x[:, :1]).square()).softmax(1)
    return training(net(6, 8, nn.Softmax(1)), lambda p, y: (p.cumsum(1) - y.cumsum(1)).square().mean(), x, y)


@healthy
def squared_error_on_probabilities():
    """The Brier score: softmax outputs against one-hot targets."""
    x, y = blobs()
    return training(net(8, 4, nn.Softmax(1)), nn.MSELoss(), x, F.one_hot(y, 4).float(), lr=1e-2)


@healthy
def knowledge_of_the_future_as_input():
    """A forecast from a window: input and target overlap in time, shifted, as floats."""
    series = torch.sin(torch.arange(300) / 5.0) + 0.1 * torch.randn(300)
    windows = series.unfold(0, 17, 1)
    return training(net(16, 1), nn.MSELoss(), windows[:, :16], windows[:, 16:])


@healthy
def evidential():
    """Outputs are squeezed through softplus, and the loss uses digammas."""

    def loss_fn(out, y):
        alpha = F.softplus(out) + 1
        return (alpha.sum(1).digamma() - alpha.gather(1, y[:, None])[:, 0].digamma()).mean()

    return training(net(8, 4), loss_fn, *blobs())


@healthy
def consistency_with_a_teacher():
    """Half of the batch has no label; an averaged teacher's answer on other noise takes its place."""
    x, y = blobs()
    model = net(8, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)
    y = torch.where(torch.rand(256) < 0.5, y, torch.full_like(y, -1))

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y = batch
        mine = model(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            theirs = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        loss = F.cross_entropy(mine, y, ignore_index=-1) + min(1.0, step / 20) * F.mse_loss(mine.softmax(1), theirs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return loss

    return training(model, None, x, y, train_step=train_step, ema_model=teacher)


@healthy
def regularised_by_hand():
    """The loss that is derived is larger than the loss function's value: a penalty on the weights is added."""

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1]) + 1e-3 * sum(p.abs().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return training(net(8, 4), nn.CrossEntropyLoss(), *blobs(), train_step=train_step)


@healthy
def maximised_on_purpose():
    """A score is to be large, so its negative is derived: the returned score rises, and that is success."""

    def train_step(model, batch, optimizer, loss_fn, step):
        score = loss_fn(model(batch[0]), batch[1])
        optimizer.zero_grad()
        (-score).backward()
        optimizer.step()
        return score

    def score(out, y):
        return out.log_softmax(1).gather(1, y[:, None]).mean()

    return training(net(8, 4), score, *blobs(), train_step=train_step)
