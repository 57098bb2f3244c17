"""Set-ups for the preflight: the digits baseline, what is broken in it at each point, healthy ones of other kinds."""

import math
import os

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, random_split

from dxdy_nb.training import datasets, models


def digits(**changed):
    torch.manual_seed(0)
    data = datasets.load("digits")
    model = changed.pop("model", None) or models.CNN()
    train, held = (TensorDataset(part.x, part.y) for part in (data.train, data.validation))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loaders = {"loader": DataLoader(train, 64, shuffle=True), "val_loader": DataLoader(held, 128)}
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "optimizer": optimizer, **loaders, **changed}


# ---- one point broken ----


def float_labels():
    given = digits()
    x, y = given["loader"].dataset.tensors
    return given | {"loader": DataLoader(TensorDataset(x, y.float()), 64, shuffle=True)}


def doubled_by_a_hook():
    given = digits()
    given["model"].fc2.bias.register_hook(lambda gradient: 2 * gradient)
    return given


def rate_too_large():
    given = digits()
    return given | {"optimizer": torch.optim.SGD(given["model"].parameters(), lr=50.0, momentum=0.9)}


def steps_at_each_batch():
    """Four batches are declared to be accumulated, and each makes an update."""
    return digits(accumulation_steps=4)


def rank_zero_everywhere():
    """The share of rank 0 is read by every rank."""
    given = digits()
    data, world_size = given["loader"].dataset, int(os.environ.get("WORLD_SIZE", "1"))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=0)
    return given | {"loader": DataLoader(data, 64, sampler=sampler)}


class Counting(models.CNN):
    """A plain attribute, which no state_dict knows, changes what the model computes."""

    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (1 + 0.1 * math.exp(-self.calls / 10))


def counts_in_an_attribute():
    return digits(model=Counting())


# ---- further broken ones ----


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] * gradient  # 2 x


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x)


def flat(*middle):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *middle, nn.Linear(32, 10))


def wrong_backward():
    return digits(model=flat(Square()))


def softmax_in_the_model():
    return digits(model=nn.Sequential(flat(nn.ReLU()), nn.Softmax(1)))


class Late(nn.CrossEntropyLoss):
    """Not finite from the fiftieth call on."""

    calls = 0

    def forward(self, output, target):
        self.calls += 1
        return super().forward(output, target) * (1 if self.calls < 50 else math.nan)


def not_finite_late():
    return digits(loss_fn=Late())


def worse_than_untrained():
    """Another start, from which no single step proves that the rate is too large; the baseline shows it."""
    given = digits()
    torch.manual_seed(1)
    given["model"].__init__()
    optimizer = torch.optim.SGD(given["model"].parameters(), lr=50.0, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(2):
        next(iter(given["loader"]))
    return given | {"optimizer": optimizer}


def by_hand(model, batch, optimizer, loss_fn, step):
    model.zero_grad()
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
    return loss


def updates_by_hand():
    return digits(optimizer=None, train_step=by_hand)


def past_the_wrapper():
    """The step calls the model that it knows from outside, and not the one that it is given."""
    given = digits()
    inner = given["model"]

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(inner(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return given | {"train_step": train_step}


def split_without_a_seed():
    given = digits()
    data = given["loader"].dataset
    torch.seed()
    train, held = random_split(data, [1000, 199])
    return given | {"loader": DataLoader(train, 64, shuffle=True), "val_loader": DataLoader(held, 64)}


def saves_no_optimizer():
    given = digits()
    model, optimizer = given["model"], given["optimizer"]

    def resume(state):
        model.load_state_dict(state["model"])
        optimizer.state.clear()
        return {"model": model, "optimizer": optimizer}

    return given | {"save": lambda: {"model": model.state_dict()}, "resume": resume}


def validates_with_noise():
    given = digits()
    model, (x, y) = given["model"], given["val_loader"].dataset.tensors

    def validate():
        with torch.no_grad():
            return (model(x + 0.3 * torch.randn_like(x)).argmax(1) == y).float().mean()

    return given | {"validate": validate}


# ---- healthy ones of other kinds ----


class LanguageModel(nn.Module):
    def __init__(self, symbols=12, width=32):
        super().__init__()
        self.embedding, self.place = nn.Embedding(symbols, width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embedding(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.body(x, mask=mask, is_causal=True))


def next_token(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def language_model():
    torch.manual_seed(0)
    start = torch.randint(12, (400, 1))
    ids = (start + torch.arange(17) * (1 + start % 3)) % 12
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held = DataLoader(TensorDataset(ids[:40, :-1], ids[:40, 1:]), 20)
    loader = DataLoader(data, 20, shuffle=True)
    given = {"model": model, "loss_fn": next_token, "loader": loader, "optimizer": optimizer, "causal": True}
    return given | {"val_loader": held}


def gru():
    torch.manual_seed(0)
    data = datasets.load("sequences")
    model = models.GRU(8, 8)
    loader = DataLoader(TensorDataset(data.train.x, data.train.y), 50, shuffle=True)
    held = DataLoader(TensorDataset(data.validation.x, data.validation.y), 50)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader, "optimizer": optimizer}
    return given | {"val_loader": held}


def frozen_backbone():
    given = digits()
    model = given["model"]
    for part in (model.conv1, model.conv2):
        part.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return given | {"optimizer": torch.optim.Adam(trained, lr=3e-3)}


class Stream(IterableDataset):
    def __iter__(self):
        data = datasets.load("digits").train
        for place in torch.randperm(len(data.y), generator=torch.Generator().manual_seed(1)).tolist():
            yield data.x[place], data.y[place]


def stream():
    return digits(loader=DataLoader(Stream(), 64))


def regression():
    torch.manual_seed(0)
    x = torch.randn(320, 6)
    y = x @ torch.randn(6, 1) + 0.1 * torch.randn(320, 1)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    loader = DataLoader(TensorDataset(x[:256], y[:256]), 32, shuffle=True)
    held = DataLoader(TensorDataset(x[256:], y[256:]), 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    return {
        "model": model, "loss_fn": nn.MSELoss(), "loader": loader, "val_loader": held, "optimizer": optimizer,
        "scheduler": scheduler, "on_epoch_end": scheduler.step,
    }  # fmt: skip


def norm_and_dropout():
    model = flat(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))
    return digits(model=model)


def smoothed():
    """At the start its loss is nearly that without smoothing, and its gradient is not."""
    return digits(loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1))


def accumulates():
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1]) / 2
        loss.backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return digits(accumulation_steps=2, train_step=train_step)


class OwnLoss(nn.Module):
    """A dictionary in, a dictionary with the loss out."""

    def __init__(self):
        super().__init__()
        self.net = flat(nn.ReLU())

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def named(rows):
    pixels, labels = zip(*rows, strict=True)
    return {"pixels": torch.stack(pixels), "labels": torch.stack(labels)}


def own_loss():
    given = digits(model=OwnLoss(), loss_fn=None)
    loader, held = (DataLoader(given[name].dataset, 32, collate_fn=named) for name in ("loader", "val_loader"))
    return given | {"loader": loader, "val_loader": held}


BROKEN = {
    float_labels: 1, doubled_by_a_hook: 2, rate_too_large: 3, steps_at_each_batch: 4, rank_zero_everywhere: 5,
    counts_in_an_attribute: 6,
}  # fmt: skip
MORE = {
    wrong_backward: 2, softmax_in_the_model: 2, not_finite_late: 3, worse_than_untrained: 3, updates_by_hand: 4,
    past_the_wrapper: 5, split_without_a_seed: 5, saves_no_optimizer: 6, validates_with_noise: 6,
}  # fmt: skip
HEALTHY = (
    *(digits, language_model, gru, frozen_backbone, stream, regression, norm_and_dropout),
    *(smoothed, accumulates, own_loss),
)
