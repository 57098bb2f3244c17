"""Set-ups that look like a fault at first sight: each one is a question to a single rule."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from cases.healthy import healthy
from cases.healthy.data import blobs, curve, loader, pictures


def net(features=8, outputs=4, width=32):
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, outputs))


def usual(model=None, **more):
    model = model or net()
    optimizer = more.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=5e-3)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}
    return given | more


@healthy
def time_comes_first():
    """Batches are (time, samples, features), as torch's recurrent layers take them; both directions are read."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(5, 12, bidirectional=True), nn.Linear(24, 2)

        def forward(self, x):
            return self.head(self.body(x)[0])

    x = torch.randn(8, 10, 16, 5)
    batches = [(part, (part[..., 0] + part.roll(1, 0)[..., 0] > 0).long()) for part in x]

    def loss_fn(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    return usual(Tagger(), loader=batches, loss_fn=loss_fn)


@healthy
def rewards_below_zero():
    """Every reward is a cost, so going down the loss makes each action that was taken less likely."""
    model = net(4, 3)
    state = torch.randn(256, 4)

    def loss_fn(logits, action, reward):
        return -(logits.log_softmax(1).gather(1, action[:, None])[:, 0] * reward).mean()

    def train_step(model, batch, optimizer, loss_fn, step):
        (state,) = batch
        logits = model(state)
        action = torch.distributions.Categorical(logits=logits.detach()).sample()
        reward = -1 - (state.argmax(1) != action).float()
        loss = loss_fn(logits, action, reward)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return usual(model, loss_fn=loss_fn, loader=loader(state), train_step=train_step)


@healthy
def complementary_labels():
    """A label names a class that a sample does not belong to, so its score should fall."""
    x, y = blobs()
    other = (y + torch.randint(1, 4, y.shape)) % 4

    def loss_fn(logits, y):
        return -torch.log(1 - logits.softmax(1).gather(1, y[:, None]) + 1e-6).mean()

    return usual(loss_fn=loss_fn, loader=loader(x, other))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


@healthy
def binarised():
    """The forward takes signs, whose slope is zero; the backward takes that of a clipped line."""

    class Binary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

        def forward(self, x):
            return self.b(Sign.apply(self.norm(self.a(x))))

    return usual(Binary())


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -0.1 * gradient


@healthy
def reversed_gradient():
    """Autograd's gradient is not the slope of the loss, on purpose: the domain should not be told apart."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return torch.cat([self.label(h), self.domain(Reverse.apply(h))], 1)

    def loss_fn(out, y):
        return F.cross_entropy(out[:, :4], y % 4) + F.cross_entropy(out[:, 4:], y // 4)

    x, y = blobs()
    return usual(Two(), loss_fn=loss_fn, loader=loader(x, y + 4 * torch.randint(2, y.shape)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


@healthy
def own_function_that_is_right():
    """A custom function with its right derivative, to save memory."""

    class Swish(nn.Module):
        def forward(self, x):
            return Scaled.apply(x)

    return usual(nn.Sequential(nn.Linear(8, 32), Swish(), nn.Linear(32, 4)))


@healthy
def rare_words():
    """Most columns are zero in the few training documents, and not in all of the others; rows have length one."""
    topic = torch.randint(3, (160,))
    rate = torch.rand(3, 400) ** 8
    x = torch.poisson(rate[topic])
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1)
    model = nn.Linear(400, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    data, held = loader(x[:48], topic[:48], size=8), loader(x[48:], topic[48:], shuffle=False)
    return usual(model, optimizer=optimizer, loader=data, val_loader=held)


@healthy
def rows_of_length_one():
    """Embeddings of another model, 4096 numbers each, normalised: every single number is tiny."""
    x, y = blobs(192, 4096)
    x = F.normalize(x, dim=1)
    model = nn.Linear(4096, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return usual(model, optimizer=optimizer, loader=loader(x, y))


@healthy
def filled_when_first_read():
    """The data set computes a sample when it is first asked for, and keeps it in a tensor of its own."""

    class Lazy(torch.utils.data.Dataset):
        def __init__(self):
            self.x, self.y = blobs(96)
            self.ready, self.cache = torch.zeros(96, dtype=torch.bool), torch.zeros(96, 8)

        def __len__(self):
            return 96

        def __getitem__(self, index):
            if not self.ready[index]:
                self.cache[index] = self.x[index].sinh().asinh()
                self.ready[index] = True
            return self.cache[index], self.y[index]

    return usual(loader=torch.utils.data.DataLoader(Lazy(), 16, shuffle=True))


@healthy
def warm_up_by_tenths():
    """The rate is 0.1 and the first factor is 0.1, so the first rate happens to be the rate squared."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return usual(model, optimizer=optimizer, scheduler=scheduler, train_step=train_step)


@healthy
def clipped_without_backward():
    """Gradients come from autograd.grad, and are clipped: no backward stands before the clipping."""

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        for p, slope in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = slope
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return usual(train_step=train_step)


@healthy
def window_over_the_end_of_an_epoch():
    """Six batches an epoch and windows of four: every second epoch ends in the midst of a window, and none is lost."""

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return usual(loader=loader(*blobs(96)), train_step=train_step, accumulation_steps=4)


@healthy
def last_window_is_short():
    """The last window of an epoch has fewer micro-batches, and is applied."""
    data = loader(*blobs(96))

    def train_step(model, batch, optimizer, loss_fn, step):
        place = step % 6
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / (4 if place < 4 else 2)).backward()
        if place in (3, 5):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return usual(loader=data, train_step=train_step, accumulation_steps=4)


@healthy
def mixture_of_layers():
    """A softmax over the first axis of a parameter whose length happens to be that of the batch."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
            self.weights, self.head = nn.Parameter(torch.zeros(8, 1, 1)), nn.Linear(8, 4)

        def forward(self, x):
            outputs = []
            for layer in self.layers:
                x = torch.tanh(layer(x))
                outputs.append(x)
            return self.head((self.weights.softmax(0) * torch.stack(outputs)).sum(0))

    return usual(Mix(), loader=loader(*blobs(), size=8))


@healthy
def bags_of_one():
    """Attention over the instances of a bag; in some batches a bag has one instance, which takes it all."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score, self.head = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.head((self.score(h).softmax(1) * h).sum(1))

    x, y = blobs()
    sizes = [1, 3, 2, 1, 4, 2, 3, 1, 2, 3, 1, 4, 2, 2, 1, 3]
    rows = zip(x.split(16), y.split(16), sizes, strict=True)
    batches = [(a[:, None] + 0.3 * torch.randn(16, n, 8), b) for a, b, n in rows]
    return usual(Bag(), loader=batches)


@healthy
def softmax_over_the_columns():
    """Texts look for their picture: the softmax of the loss runs down the columns of the scores, over the samples."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = net(8, 8), net(8, 8)

        def forward(self, x, z):
            return 5 * F.normalize(self.a(x), dim=1) @ F.normalize(self.b(z), dim=1).T

    x, y = blobs(classes=16)

    def loss_fn(scores, _):
        return F.cross_entropy(scores.T, torch.arange(len(scores)))

    data = loader(x, x + 0.2 * torch.randn_like(x), y)
    return usual(Towers(), loader=data, loss_fn=loss_fn, batch_coupled=True)


@healthy
def dropout_is_the_view():
    """The encoder ends in a dropout, which makes the two views of a sample that are compared."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Dropout(0.2))

    def train_step(model, batch, optimizer, loss_fn, step):
        a, b = F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[0]), dim=1)
        loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return usual(model, loss_fn=None, train_step=train_step)


@healthy
def four_samples_one_by_one():
    """Four samples have only 24 orders, so two epochs may well have the same."""
    return usual(loader=loader(*blobs(4), size=1))


@healthy
def pruned_after_each_epoch():
    """The smallest weights are set to zero at the end of an epoch: a jump that no optimizer made."""
    model = net()

    @torch.no_grad()
    def on_epoch_end():
        for p in (model[0].weight, model[2].weight):
            p.mul_(p.abs() > p.abs().flatten().kthvalue(p.numel() // 5).values)

    return usual(model, on_epoch_end=on_epoch_end)


@healthy
def first_order_meta_learning():
    """After five steps on a task the weights go back nine tenths of the way, which is how the method learns."""
    model = net(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kept = [p.detach().clone() for p in model.parameters()]
    batches = []
    for _ in range(6):
        phase = 3 * torch.rand(())
        for x in (4 * torch.rand(5, 20, 1) - 2).unbind():
            batches.append((x, torch.sin(x + phase)))

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            with torch.no_grad():
                for p, slow in zip(model.parameters(), kept, strict=True):
                    p.copy_(slow.lerp_(p, 0.1))
        return loss

    return usual(model, optimizer=optimizer, loader=batches, loss_fn=nn.MSELoss(), train_step=train_step)


@healthy
def averages_swapped_in_for_validation():
    """At an epoch's end averaged weights are put into the model, validated, and the old ones are put back."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    x, y = blobs(64)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    def on_epoch_end():
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float().mean()
        model.load_state_dict(own)
        model.train()
        return float(right)

    return usual(model, ema_model=average, train_step=train_step, on_epoch_end=on_epoch_end)


@healthy
def average_begins_later():
    """The averaged copy takes nothing in before step 100."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if step >= 100:
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        return loss

    return usual(model, ema_model=average, train_step=train_step)


@healthy
def average_whose_statistics_come_last():
    """torch's own averaged model leaves BatchNorm's statistics alone: update_bn computes them after training."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    average = swa_utils.AveragedModel(model)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return usual(model, ema_model=average, train_step=train_step)


@healthy
def one_batch_repeated():
    """The test whether a model can overfit one batch: a list that holds the same batch ten times."""
    return usual(loader=[blobs(16)] * 10)


@healthy
def input_is_its_own_target():
    """Input and target of a batch are one and the same tensor object."""
    x = torch.randn(128, 3) @ torch.randn(3, 8)
    return usual(net(8, 8, 4), loader=[(part, part) for part in x.split(16)], loss_fn=nn.MSELoss())


@healthy
def first_state_in_the_batch():
    """The first tensor of each batch is the state that a recurrent net begins with: zeros, all of it."""

    class Begun(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, h, x):
            return self.head(self.cell(x, h[None].contiguous())[0][:, -1])

    x = torch.randn(128, 6, 4)
    y = (x[:, -2:, 0].sum(1) > 0).long()
    return usual(Begun(), loader=loader(torch.zeros(128, 16), x, y))


@healthy
def few_bits_and_a_validation_set():
    """Inputs are nine bits, so training and validation share samples by mere chance."""
    x = (torch.rand(300, 9) < 0.5).float()
    y = (x.sum(1) > 4).long()
    held = loader(x[200:], y[200:], shuffle=False)
    return usual(net(9, 2), loader=loader(x[:200], y[:200]), val_loader=held)


@healthy
def imbalanced_and_slow():
    """Nine of ten samples are one class, and the rate is small: the other one is learned after some epochs."""
    y = (torch.rand(512) < 0.09).long()
    x = torch.randn(512, 8) + 2.5 * y[:, None]
    model = net(8, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return usual(model, optimizer=optimizer, loader=loader(x, y, size=32))


@healthy
def sparse_code():
    """Five hundred units of which a sample uses a few: nearly all are zero in any one batch."""

    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)
            with torch.no_grad():
                self.up.weight.copy_(F.normalize(torch.randn(512, 16), dim=1))
                self.up.bias.fill_(-2.2)
                self.down.weight.copy_(self.up.weight.T)

        def forward(self, x):
            return self.down(F.relu(self.up(x)))

    x = torch.randn(512, 16) * 1.3
    model = Code()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_fn(out, x):
        return F.mse_loss(out, x)

    return usual(model, optimizer=optimizer, loader=loader(x, x, size=8), loss_fn=loss_fn)


@healthy
def units_of_the_world_inside():
    """The model's last layer brings its answer to prices of hundreds of thousands; the loss is relative."""

    class Priced(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = net(6, 1), nn.Identity()
            self.scale.register_forward_hook(lambda m, i, o: 250_000 + 80_000 * o)

        def forward(self, x):
            return self.scale(self.body(x))

    x, y = curve()

    def loss_fn(price, y):
        return F.mse_loss(price / 80_000, y / 80_000)

    return usual(Priced(), loader=loader(x, 250_000 + 80_000 * y), loss_fn=loss_fn)


@healthy
def mask_in_a_module():
    """A module of its own puts minus a thousand million where attention may not look."""

    class Mask(nn.Module):
        def forward(self, scores):
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            return scores.masked_fill(hidden, -1e9)

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.mask, self.head = nn.Linear(4, 24), Mask(), nn.Linear(8, 1)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.head(self.mask(q @ k.mT / 3).softmax(-1) @ v)

    x = torch.randn(128, 8, 4)
    y = x[..., :1].cumsum(1) / torch.arange(1, 9)[:, None]
    return usual(Look(), loader=loader(x, y), loss_fn=nn.MSELoss())


@healthy
def probe_on_a_model_in_eval():
    """The whole model is in eval mode, since all that behaves otherwise in training is frozen."""

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.backbone(x))

    model = Probe()
    model.backbone(blobs()[0])
    model.backbone.requires_grad_(False)
    model.eval()
    return usual(model, optimizer=torch.optim.Adam(model.head.parameters(), lr=1e-2))


@healthy
def eval_mode_without_consequence():
    """The model is in eval mode, and holds nothing that would care: a dropout of zero."""
    return usual(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 4)).eval())


@healthy
def norm_over_time_and_a_last_sample():
    """One sample is left for the last batch, and BatchNorm1d over a long signal can train on it."""
    y = torch.randint(2, (401,))
    x = torch.randn(401, 1, 32) + y[:, None, None]
    model = nn.Sequential(
        nn.Conv1d(1, 4, 5), nn.BatchNorm1d(4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    return usual(model, loader=loader(x, y))


@healthy
def head_and_a_temperature():
    """Only the head and a number outside of the model are trained; nobody bothered to freeze the body."""
    model = net()
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*model[2].parameters(), temperature], lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]) * temperature, batch[1])
        model.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return usual(model, optimizer=optimizer, train_step=train_step)


@healthy
def shifted_domain():
    """Validation pictures are brighter than training pictures: that is what is to be measured."""
    x, y = pictures(192)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4))
    held = loader(x[128:] + 1.0, y[128:], shuffle=False)
    return usual(model, loader=loader(x[:128], y[:128]), val_loader=held)


@healthy
def counter_in_the_closure():
    """The step counts its calls and keeps a running mean, in names of its own that nobody else can reach."""
    calls, mean = 0, None

    def train_step(model, batch, optimizer, loss_fn, step):
        nonlocal calls, mean
        calls += 1
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        return loss

    return usual(train_step=train_step)


class Trainer:
    """A loop as many write it: an object that holds everything."""

    def __init__(self, model):
        self.model, self.history, self.best = model, [], float("inf")
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.average = copy.deepcopy(model)

    def step(self, model, batch, optimizer, loss_fn, step):
        self.optimizer.zero_grad()
        loss = loss_fn(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())
        self.best = min(self.best, loss.item())
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss


@healthy
def trainer_object():
    """The step is a bound method of an object with a history and an averaged copy."""
    model = net()
    trainer = Trainer(model)
    return usual(model, optimizer=trainer.optimizer, train_step=trainer.step)
