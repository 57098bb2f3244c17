"""Samples that are compared with each other."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import blobs, loader, pictures


def encoder(outputs=8):
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, outputs))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = encoder()

    def forward(self, a, b):
        return self.body(a), self.body(b)


def pairs():
    x, y = blobs()
    order = torch.randperm(len(x))
    return x, x[order], (y == y[order]).float()


@healthy(fast=True)
def siamese():
    """One net is called twice; pairs that are far enough apart have a gradient of zero."""
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(output, same):
        distance = F.pairwise_distance(*output)
        return (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()

    return {"model": model, "loss_fn": loss_fn, "loader": loader(*pairs()), "optimizer": optimizer}


@healthy
def cosine_embedding():
    """Targets are 1 and -1, and the loss takes three arguments."""
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CosineEmbeddingLoss(margin=0.2)

    def loss_fn(output, sign):
        return criterion(*output, sign)

    a, b, same = pairs()
    return {"model": model, "loss_fn": loss_fn, "loader": loader(a, b, 2 * same - 1), "optimizer": optimizer}


def triples():
    x, y = blobs()
    alike = torch.stack([x[torch.nonzero(y == c).flatten()[torch.randint(int((y == c).sum()), ())]] for c in y])
    other = torch.stack([x[torch.nonzero(y != c).flatten()[torch.randint(int((y != c).sum()), ())]] for c in y])
    return x, alike, other


@healthy
def triplet():
    """No target at all: three inputs, one net; the loss is zero for triples that are learned."""
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(*(model(part) for part in batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.TripletMarginLoss(), "loader": loader(*triples()), "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def margin_ranking():
    """Two scores of one net are compared; a target of 1 or -1 says which should be larger."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    a, b = torch.randn(2, 256, 8)
    sign = (a[:, 0] - b[:, 0]).sign()
    criterion = nn.MarginRankingLoss(margin=0.1)

    def train_step(model, batch, optimizer, loss_fn, step):
        a, b, sign = batch
        loss = loss_fn(model(a)[:, 0], model(b)[:, 0], sign)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": criterion, "loader": loader(a, b, sign), "optimizer": optimizer}
    return given | {"train_step": train_step}


def two_views(x):
    return x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)


def info_nce(a, b, temperature=0.2):
    z = F.normalize(torch.cat([a, b]), dim=1)
    scores = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(a)))


@healthy
def simclr():
    """Every sample is the others' negative; the matrix of scores holds minus infinity on its diagonal."""
    model = nn.Sequential(encoder(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        a, b = two_views(batch[0])
        loss = info_nce(*model(torch.cat([a, b])).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = loader(blobs()[0], size=32)
    return {"model": model, "loader": data, "optimizer": optimizer, "train_step": train_step}


@healthy
def simclr_views_from_the_loader():
    """The loss takes one tensor of two stacked views and no target that means anything."""
    x, y = pictures(96)
    batches = [
        (torch.cat([x[i : i + 16] + 0.1 * torch.randn(16, 3, 12, 12), x[i : i + 16].flip(3)]), y[i : i + 16].repeat(2))
        for i in range(0, 96, 16)
    ]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_fn(z, _):
        return info_nce(*z.chunk(2))

    return {"model": model, "loss_fn": loss_fn, "loader": batches, "optimizer": optimizer}


@healthy
def image_and_text():
    """Two towers and a learned temperature; the target is the sample's own place in the batch."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = encoder(), nn.Embedding(30, 8)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, words):
            a, b = F.normalize(self.left(x), dim=1), F.normalize(self.right(words).mean(1), dim=1)
            return self.scale.exp() * a @ b.T

    def loss_fn(scores, _):
        places = torch.arange(len(scores))
        return (F.cross_entropy(scores, places) + F.cross_entropy(scores.T, places)) / 2

    x, y = blobs(classes=8)
    words = torch.stack([y, y + 8, torch.randint(16, 30, y.shape)], 1)
    model = Towers()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = loader(x, words, y)
    return {"model": model, "loss_fn": loss_fn, "loader": data, "optimizer": optimizer, "batch_coupled": True}


@healthy
def byol():
    """A teacher that is the average of the student, stop-gradients, and a loss that could collapse but need not."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Sequential(encoder(16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            self.predict = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
            self.teacher = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, a, b):
            with torch.no_grad():
                wanted = F.normalize(self.teacher(b), dim=1)
            return 2 - 2 * (F.normalize(self.predict(self.online(a)), dim=1) * wanted).sum(1).mean()

    model = Pair()
    optimizer = torch.optim.Adam([*model.online.parameters(), *model.predict.parameters()], lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        a, b = two_views(batch[0])
        loss = model(a, b) + model(b, a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return loss

    data = loader(blobs()[0], size=32)
    return {"model": model, "loader": data, "optimizer": optimizer, "train_step": train_step}


@healthy
def momentum_queue():
    """Keys of earlier batches stand in a buffer that each step overwrites; the key encoder learns by averaging."""

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = encoder(), encoder().requires_grad_(False)
            self.key.load_state_dict(self.query.state_dict())
            self.register_buffer("keys", F.normalize(torch.randn(64, 8), dim=1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, a, b):
            q = F.normalize(self.query(a), dim=1)
            with torch.no_grad():
                for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    slow.mul_(0.99).add_(fast, alpha=0.01)
                k = F.normalize(self.key(b), dim=1)
            scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.keys.clone().T], 1) / 0.2
            begin = int(self.place)
            self.keys[begin : begin + len(k)] = k
            self.place.copy_((self.place + len(k)) % 64)
            return scores

    model = Queue()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9)

    def train_step(model, batch, optimizer, loss_fn, step):
        scores = model(*two_views(batch[0]))
        loss = loss_fn(scores, torch.zeros(len(scores), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(blobs()[0]), "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def barlow_twins():
    """The loss is about a matrix of correlations over the batch."""
    model = encoder(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        a, b = (model(view) for view in two_views(batch[0]))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (a, b))
        c = a.T @ b / len(a)
        loss = (c.diagonal() - 1).square().sum() + 0.01 * (c - c.diagonal().diag()).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = loader(blobs()[0], size=32)
    return {"model": model, "loader": data, "optimizer": optimizer, "train_step": train_step}


@healthy
def prototypes():
    """Few-shot episodes: classes are renamed in each batch, support and query come stacked."""
    centres = 2 * torch.randn(12, 8)
    batches = []
    for _ in range(10):
        classes = torch.randperm(12)[:4]
        support, query = (centres[classes].repeat(3, 1) + 0.5 * torch.randn(12, 8) for _ in range(2))
        batches.append((torch.cat([support, query]), torch.arange(4).repeat(3)))
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(z, y):
        support, query = z.chunk(2)
        middle = torch.stack([support[y == c].mean(0) for c in range(4)])
        return F.cross_entropy(-torch.cdist(query, middle).square(), y)

    return {"model": model, "loss_fn": loss_fn, "loader": batches, "optimizer": optimizer}


@healthy
def angular_margin():
    """The classifier's weights live in the loss, which the same optimizer trains."""

    class Margin(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, z, y):
            cosine = F.normalize(z, dim=1) @ F.normalize(self.weight, dim=1).T
            return F.cross_entropy(10 * (cosine - 0.2 * F.one_hot(y, 4)), y)

    model, loss_fn = encoder(), Margin()
    optimizer = torch.optim.Adam([*model.parameters(), *loss_fn.parameters()], lr=3e-3)
    return {"model": model, "loss_fn": loss_fn, "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def metric_learning_in_the_batch():
    """The loss takes distances between all samples of a batch, hardest negatives first; zero distances are clamped."""
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(z, y):
        d = (z[:, None] - z).square().sum(2).clamp(min=1e-9).sqrt()
        same = y[:, None] == y
        return F.softplus((d * same).max(1).values - d.masked_fill(same, torch.inf).min(1).values).mean()

    data = loader(*blobs(), size=32)
    return {"model": model, "loss_fn": loss_fn, "loader": data, "optimizer": optimizer}
