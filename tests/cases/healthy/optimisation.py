"""Ways to take a step, and ways to feed it."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from cases.healthy import healthy
from cases.healthy.data import blobs, curve, loader


def net(outputs=4, width=32, dropout=0.0):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, outputs))


def usual(optimizer=None, **more):
    """Return an ordinary classifier's keywords with some of them changed."""
    model = more.pop("model", None) or net()
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=5e-3)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}
    return given | more


def plain_step(after=lambda: None):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        after()
        return loss

    return train_step


@healthy
def dropout_of_a_half():
    """The loss of one batch is another at each forward."""
    return usual(model=net(dropout=0.5, width=64))


@healthy(fast=True)
def bf16_autocast():
    """The forward runs in bfloat16 and the loss outside of it; weights stay float32."""

    def train_step(model, batch, optimizer, loss_fn, step):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch[0])
        loss = loss_fn(output.float(), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return usual(train_step=train_step)


def scaled_step(scaler, clip):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return train_step


@healthy(fast=True)
def fp16_with_scaler():
    """The value that is derived is thousands of times the loss; gradients are unscaled before they are clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    return usual(scaler=scaler, train_step=scaled_step(scaler, clip=True))


@healthy
def fp16_scale_too_large_at_first():
    """The first scales overflow float16, so the first steps are skipped until the scale fits: that is how it works."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return usual(scaler=scaler, train_step=scaled_step(scaler, clip=False))


@healthy
def two_optimizers_one_scaler():
    """The first net's gradients are unscaled before the second net's backward; no gradient holds both."""
    model = nn.ModuleDict({"a": net(), "b": net()})
    steps = {name: torch.optim.Adam(part.parameters(), lr=5e-3) for name, part in model.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train_step(model, batch, optimizer, loss_fn, step):
        for name, part in model.items():
            loss = loss_fn(part(batch[0]), batch[1])
            scaler.scale(loss).backward()
            scaler.unscale_(steps[name])
        for part in steps.values():
            scaler.step(part)
            part.zero_grad()
        scaler.update()
        return loss

    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "train_step": train_step}
    return given | {"optimizers": steps, "scaler": scaler}


@healthy
def scaler_that_is_off():
    """A GradScaler with enabled=False stands in the code for later."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return usual(scaler=scaler, train_step=train_step)


@healthy(fast=True)
def accumulation_divided():
    """Gradients pile up over four micro-batches, each a quarter; three steps of four have no update."""

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return usual(train_step=train_step, accumulation_steps=4)


@healthy
def accumulation_inside_a_step():
    """A step takes a batch apart into micro-batches and weighs each by its size."""

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch[0].split(6), batch[1].split(6), strict=True):
            loss = loss_fn(model(x), y) * len(x) / len(batch[0])
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return usual(train_step=train_step)


@healthy
def lbfgs():
    """The optimizer calls the forward itself, many times, on the whole data."""
    model = net(1)
    x, y = curve(features=8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    def train_step(model, batch, optimizer, loss_fn, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    given = {"model": model, "loss_fn": nn.MSELoss(), "loader": [(x, y)], "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def sharpness_aware():
    """Weights are moved uphill, derived there and put back before the step: two backwards for one update."""

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss

    return usual(train_step=train_step)


class SAM(torch.optim.Optimizer):
    """The same as an optimizer of its own around another one."""

    def __init__(self, params, base, rho=0.05, **more):
        super().__init__(params, {"rho": rho, **more})
        self.base = base(self.param_groups, **more)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad * 0.05 / norm)
        with torch.enable_grad():
            closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
        self.base.step()


@healthy
def sharpness_aware_optimizer():
    """An optimizer wraps another and shares its groups; each update is nested in another one."""
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    def train_step(model, batch, optimizer, loss_fn, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        return loss

    return usual(optimizer, model=model, train_step=train_step)


class Lookahead:
    """Slow weights that the fast ones are drawn back to every few steps."""

    def __init__(self, optimizer, every=5):
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]

    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.lerp_(p.detach(), 0.5)
                    p.data.copy_(s)


@healthy
def lookahead():
    """Weights are written every fifth step outside of any torch optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    around = Lookahead(optimizer)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        around.step()
        return loss

    return usual(optimizer, model=model, train_step=train_step)


@healthy
def stochastic_weight_averaging():
    """A second model takes in the weights now and then; its BatchNorm is updated only at the very end."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def on_epoch_end():
        average.update_parameters(model)
        scheduler.step()

    return usual(optimizer, model=model, on_epoch_end=on_epoch_end, scheduler=scheduler)


@healthy
def exponential_average():
    """A copy outside of every optimizer follows the weights, buffers too."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def follow():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
        for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
            slow.copy_(fast)

    return usual(model=model, ema_model=average, train_step=plain_step(follow))


@healthy
def one_cycle_per_batch():
    """The rate rises and falls again with every batch, from a 25th of its peak; momentum does the opposite."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    return usual(optimizer, model=model, scheduler=scheduler, train_step=plain_step(scheduler.step))


@healthy
def cosine_per_batch():
    """A cosine over all batches, whose T_max is counted in batches."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=160)
    return usual(optimizer, model=model, scheduler=scheduler, train_step=plain_step(scheduler.step))


@healthy
def warm_up_from_zero():
    """The first step has a rate of exactly zero, so nothing moves."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    return usual(optimizer, model=model, scheduler=warm, train_step=plain_step(warm.step))


@healthy
def sequential_schedule():
    """A warm-up and then a cosine, chained; torch itself warns of its inner workings at times."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [lr_scheduler.LinearLR(optimizer, 0.01, total_iters=8), lr_scheduler.CosineAnnealingLR(optimizer, 100)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[8])
    return usual(optimizer, model=model, scheduler=scheduler, train_step=plain_step(scheduler.step))


@healthy
def step_schedule_per_epoch():
    """A rate that falls by a factor of ten at an epoch's end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return usual(optimizer, model=model, scheduler=scheduler, on_epoch_end=scheduler.step)


@healthy
def plateau_schedule():
    """ReduceLROnPlateau takes a measure and is no ordinary scheduler."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    x, y = blobs(64)

    def on_epoch_end():
        model.eval()
        with torch.no_grad():
            scheduler.step(F.cross_entropy(model(x), y))
        model.train()

    return usual(optimizer, model=model, scheduler=scheduler, on_epoch_end=on_epoch_end)


@healthy
def checkpoint_without_reentry():
    """Activations are thrown away and computed again in backward, dropout and all."""

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = net(8, dropout=0.2), net(8, dropout=0.2), nn.Linear(8, 4)

        def forward(self, x):
            for part in (self.a, self.b):
                x = checkpoint(part, x, use_reentrant=False)
            return self.head(x)

    return usual(model=Saving())


@healthy
def checkpoint_with_reentry():
    """Backward runs inside backward; the first part's input is made to ask for a gradient."""

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.body, self.head = (
                nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
                nn.Linear(8, 4),
            )

        def forward(self, x):
            return self.head(checkpoint_sequential(self.body, 2, self.first(x), use_reentrant=True))

    return usual(model=Saving())


@healthy
def float64():
    """Everything is in double precision."""
    x, y = curve(features=8)
    model = net(1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader(x.double(), y.double())
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": data, "optimizer": optimizer}


@healthy
def compiled():
    """torch.compile wraps the model; names of parameters get a prefix."""
    model = torch.compile(net(), backend="eager")
    return usual(model=model)


@healthy
def wrapped():
    """The model stands in a wrapper that forwards everything to it and changes keywords."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    return usual(model=Wrapper(net()))


@healthy
def scripted_loss_output_as_dict():
    """The model gives a dict, the loss takes its parts."""

    class Output(dict):
        def __getattr__(self, name):
            return self[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            hidden = torch.relu(self.body(x))
            return Output(hidden=hidden, logits=self.head(hidden))

    def loss_fn(output, y):
        return F.cross_entropy(output.logits, y) + 1e-3 * output.hidden.abs().mean()

    return usual(model=Model(), loss_fn=loss_fn)


class Stream(IterableDataset):
    """Samples without end and without a length."""

    def __init__(self, count=128):
        self.count, self.centres = count, 2 * torch.randn(4, 8)

    def __iter__(self):
        for _ in range(self.count):
            y = int(torch.randint(4, ()))
            yield self.centres[y] + torch.randn(8), y


@healthy
def iterable_data():
    """The data set has no length and other samples at each pass: the first loss of each is on unseen data."""
    return usual(loader=DataLoader(Stream(), 16))


class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = blobs(96)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), int(self.y[index])


@healthy
def two_workers():
    """Samples come from two processes and are random; each worker is seeded by torch."""
    return usual(loader=DataLoader(Augmented(), 16, shuffle=True, num_workers=2))


@healthy
def numpy_augmentation_seeded_by_worker():
    """A generator of numpy's is made anew in each worker from torch's seed."""

    class Noisy(Augmented):
        def __getitem__(self, index):
            noise = np.random.default_rng(torch.initial_seed() % 2**32 + index).normal(size=8)
            return self.x[index] + 0.1 * torch.from_numpy(noise).float(), int(self.y[index])

    return usual(loader=DataLoader(Noisy(), 16, shuffle=True))


@healthy
def endless_loader():
    """The loader never ends: a generator starts again at each iter()."""

    class Endless:
        def __iter__(self):
            data = loader(*blobs())
            while True:
                yield from data

    return usual(loader=Endless())


@healthy
def batch_of_one():
    """Every batch has one sample: online learning, noisy and fine."""
    x, y = blobs(64)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return usual(optimizer, model=model, loader=loader(x, y, size=1))


@healthy(fast=True)
def three_samples():
    """The data set has three samples in one batch, and is overfitted on purpose."""
    x, y = torch.randn(3, 8), torch.tensor([0, 1, 2])
    return usual(loader=loader(x, y, size=3))


@healthy
def one_batch_in_a_list():
    """A smoke test: one batch, again and again."""
    return usual(loader=[blobs(32)])


@healthy
def last_batch_is_smaller():
    """The last batch has 5 samples where the others have 16."""
    return usual(loader=loader(*blobs(85)))


@healthy
def weighted_sampler():
    """A rare class is drawn as often as the others, with repetition."""
    x, y = blobs(256, classes=3)
    rare = torch.where(y == 2)[0][8:]
    keep = torch.ones(256, dtype=torch.bool)
    keep[rare] = False
    x, y = x[keep], y[keep]
    sampler = WeightedRandomSampler((1 / torch.bincount(y).float())[y], len(y))
    return usual(loader=loader(x, y, shuffle=False, sampler=sampler))


@healthy
def curriculum():
    """Easy samples first: batches are ordered by difficulty, and the loss rises over the epoch."""
    x, y = blobs(160, spread=1.0)
    noise = torch.linspace(0, 1.5, 160)[:, None]
    return usual(loader=loader(x + noise * torch.randn_like(x), y, shuffle=False))


@healthy
def one_epoch():
    """Data is seen once: no batch comes twice, and the loader is short."""
    return usual(loader=DataLoader(Stream(48), 16))


@healthy
def two_groups_with_own_rates():
    """The body learns a hundred times slower than the head."""
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[3].parameters(), "lr": 1e-2}]
    return usual(torch.optim.Adam(groups), model=model)


@healthy
def muon_and_adam():
    """Two optimizers by the shape of the parameters."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    matrices = [model[2].weight]
    others = [p for p in model.parameters() if p is not model[2].weight]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=5e-3)]
    given = usual(optimizers[1], model=model, optimizers=optimizers)
    del given["optimizer"]
    return given


@healthy
def gradual_unfreezing():
    """The body is frozen in the first epoch and trained later; the optimizer holds it from the start."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def on_epoch_end():
        model[0].requires_grad_(True)

    return usual(optimizer, model=model, on_epoch_end=on_epoch_end)


@healthy
def meta_learning():
    """Gradients flow through an inner update of the weights; the step calls the model through functional_call."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    tasks = []
    for _ in range(12):
        size, phase = 1 + torch.rand(4, 1, 1), 3 * torch.rand(4, 1, 1)
        x = 4 * torch.rand(4, 20, 1) - 2
        tasks.append((x, size * torch.sin(x + phase)))

    def train_step(model, batch, optimizer, loss_fn, step):
        weights = dict(model.named_parameters())
        total = 0
        for x, y in zip(*batch, strict=True):
            inner = loss_fn(torch.func.functional_call(model, weights, x[:10]), y[:10])
            slopes = torch.autograd.grad(inner, weights.values(), create_graph=True)
            fast = {n: w - 0.05 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
            total = total + loss_fn(torch.func.functional_call(model, fast, x[10:]), y[10:])
        loss = total / len(batch[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.MSELoss(), "loader": tasks, "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def gradients_from_autograd_grad():
    """No call of backward: autograd.grad gives the gradients, which are put in by hand."""

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        for p, slope in zip(model.parameters(), slopes, strict=True):
            p.grad = slope
        optimizer.step()
        return loss

    return usual(train_step=train_step)


@healthy
def gradient_noise():
    """Noise is added to each gradient before the step, and each sample's gradient is clipped: private training."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        sums = [torch.zeros_like(p) for p in model.parameters()]
        total = 0.0
        for x, y in zip(*batch, strict=True):
            loss = loss_fn(model(x[None]), y[None])
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            scale = 1 / max(1.0, float(torch.stack([g.norm() for g in slopes]).norm()))
            for s, g in zip(sums, slopes, strict=True):
                s.add_(g, alpha=scale)
            total += loss.item()
        for p, s in zip(model.parameters(), sums, strict=True):
            p.grad = (s + 0.1 * torch.randn_like(s)) / len(batch[0])
        optimizer.step()
        return total / len(batch[0])

    return usual(optimizer, model=model, train_step=train_step)


@healthy
def fused_step_in_backward():
    """Each parameter has its own optimizer, which steps in a hook while backward runs and drops the gradient."""
    model = net()
    own = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def update(p):
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss

    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs())}
    return given | {"optimizers": list(own.values()), "train_step": train_step}


@healthy
def update_by_hand():
    """No optimizer: weights are moved in place under no_grad."""

    def train_step(model, batch, optimizer, loss_fn, step):
        model.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
        return loss

    return {"model": net(), "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "train_step": train_step}


@healthy
def pruned():
    """Masks keep half of the weights at zero; parameters are renamed by torch's pruning."""
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return usual(model=model)


@healthy
def saved_and_resumed():
    """Everything is saved and resumed: model, optimizer, scheduler and the loader's generator."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.999)
    x, y = blobs()
    own = torch.Generator().manual_seed(3)
    data = loader(x, y, generator=own)

    def save():
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return {n: p.state_dict() for n, p in parts.items()} | {"order": own.get_state()}

    def resume(state):
        again = net()
        again.load_state_dict(state["model"])
        optimizer = torch.optim.Adam(again.parameters(), lr=5e-3)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.999)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        generator = torch.Generator()
        generator.set_state(state["order"])
        more = {"loader": loader(x, y, generator=generator), "scheduler": scheduler}
        return {"model": again, "optimizer": optimizer, **more}

    given = usual(optimizer, model=model, loader=data, scheduler=scheduler, train_step=plain_step(scheduler.step))
    return given | {"save": save, "resume": resume}


@healthy
def validated_properly():
    """Validation in eval mode under no_grad, on held-out data; the best state is a copy."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    x, y = blobs(320)
    held = loader(x[256:], y[256:], shuffle=False)

    def validate():
        model.eval()
        with torch.no_grad():
            right = sum(int((model(a).argmax(1) == b).sum()) for a, b in held)
        model.train()
        return right / 64

    best = copy.deepcopy(model.state_dict())
    given = usual(model=model, loader=loader(x[:256], y[:256]), val_loader=held, validate=validate)
    return given | {"best_state": best, "on_epoch_end": validate}
