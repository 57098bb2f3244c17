"""Faults of the backward pass: the gradients that reach the weights are not those of the loss."""

import torch
from torch import nn
from torch.optim import LBFGS
from torch.utils.checkpoint import checkpoint

from cases.builders import batches, classification, clusters, mlp, plain_step, regression
from cases.registry import case


@case(
    "backward-missing",
    stages=("backward",),
    causes=("backward-missing",),
    source="orobix/Prototypical-Networks-for-Few-shot-Learning-PyTorch#20",
)
def backward_missing(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        if not bug:
            loss.backward()
        optimizer.step()
        return loss

    return classification(train_step=train_step)


@case(
    "backward-twice",
    stages=("backward", "update"),
    causes=("backward-twice",),
    source="dropreg/R-Drop#8",
)
def backward_twice(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        if bug:
            loss.backward(retain_graph=True)  # a helper has done it already
        loss.backward()
        optimizer.step()
        return loss

    return regression(train_step=train_step)


@case(
    "exploding-gradients",
    stages=("forward", "backward"),
    causes=("exploding-init", "exploding-gradients"),
    source="https://arxiv.org/abs/2103.03376",
)
def exploding_gradients(bug):
    layers = [nn.Linear(12, 12, bias=False) for _ in range(24)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=5.0 if bug else 12**-0.5)
    x = torch.randn(64, 12)
    return regression(x=x, y=x[:, :1], model=nn.Sequential(*layers, nn.Linear(12, 1)), lr=1e-3)


@case(
    "frozen-all-but-norm",
    stages=("backward", "update"),
    causes=("frozen-all-but-norm",),
    source="https://discuss.pytorch.org/t/84911",
    hint=True,
)
def frozen_all_but_norm(bug):
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 40))
    model.add_module("norm", nn.BatchNorm1d(40))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(40, 3))
    for name, p in model.named_parameters():
        p.requires_grad = not bug or "norm" in name
    return classification(model=model, optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad]))


@case(
    "graph-kept-by-logging",
    stages=("loss", "backward", "update"),
    causes=("graph-kept-by-logging",),
    source="horovod/horovod#641",
)
def graph_kept_by_logging(bug):
    log = {"total": 0.0}

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = plain_step(model, batch, optimizer, loss_fn, step)
        log["total"] += loss if bug else loss.item()
        return loss.detach()

    return regression(train_step=train_step)


@case(
    "reentrant-checkpoint-no-grad",
    stages=("forward", "backward"),
    causes=("reentrant-checkpoint-no-grad",),
    source="mlfoundations/open_clip#573",
)
def reentrant_checkpoint_no_grad(bug):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = mlp(8, 20, 20), nn.Linear(20, 3)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=bug))

    return classification(model=Saves())


@case(
    "vanishing-gradients",
    stages=("forward", "backward"),
    causes=("vanishing-gradients",),
    source="phlippe/uvadlc_notebooks#119",
)
def vanishing_gradients(bug):
    model = mlp(*[14] * 15, 1, between=nn.Sigmoid if bug else nn.ReLU)
    if not bug:
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = torch.randn(64, 14)
    return regression(x=x, y=x[:, :1], model=model, lr=0.01)


class Square(torch.autograd.Function):
    """x², with a derivative that forgets the chain rule."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x


@case(
    "wrong-custom-backward",
    stages=("forward", "backward"),
    causes=("wrong-custom-backward",),
    source="pytorch/pytorch#4355",
)
def wrong_custom_backward(bug):
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)

        def forward(self, x):
            h = self.first(x)
            return self.last(Square.apply(h) if bug else h * h)

    x = torch.randn(64, 6)
    return regression(x=x, y=x[:, :1].square(), model=Squares(), lr=0.01)


@case(
    "zero-grad-after-backward",
    stages=("backward", "update"),
    causes=("zero-grad-after-backward",),
    source="cloneofsimo/lora#263",
)
def zero_grad_after_backward(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        if not bug:
            optimizer.zero_grad()
        loss.backward()
        if bug:
            optimizer.zero_grad()
        optimizer.step()
        return loss

    return classification(train_step=train_step)


@case(
    "zero-grad-missing",
    stages=("backward", "update"),
    causes=("zero-grad-missing",),
    source="meta-pytorch/torchforge#71",
)
def zero_grad_missing(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if not bug:
            optimizer.zero_grad()
        return loss

    x, y = clusters(3, 96, 8, 1.0)
    model = mlp(8, 16, 3)
    return classification(
        x=x, y=y, model=model, train_step=train_step, optimizer=torch.optim.SGD(model.parameters(), 0.05)
    )


class Checkpointed(nn.Module):
    """A block with dropout that is computed again in backward."""

    def __init__(self, preserve, reentrant):
        super().__init__()
        self.first, self.last, self.preserve, self.reentrant = nn.Linear(8, 32), nn.Linear(32, 3), preserve, reentrant
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x):
        options = {"use_reentrant": self.reentrant, "preserve_rng_state": self.preserve}
        return self.last(checkpoint(self.block, self.first(x), **options))


@case(
    "checkpoint-other-dropout",
    stages=("backward",),
    causes=("checkpoint-computes-another",),
    source="allenai/OLMo-core#828",
)
def checkpoint_other_dropout(bug):
    return classification(model=Checkpointed(not bug, False))


@case(
    "reentrant-checkpoint-other-dropout",
    stages=("backward",),
    causes=("checkpoint-computes-another",),
    source="openai/guided-diffusion#167",
)
def reentrant_checkpoint_other_dropout(bug):
    return classification(model=Checkpointed(not bug, True))


@case(
    "closure-without-zero-grad",
    stages=("backward", "update"),
    causes=("zero-grad-missing",),
    source="skorch-dev/skorch#636",
)
def closure_without_zero_grad(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()

        def closure():
            if not bug:
                optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    model = mlp(6, 20, 1)
    return regression(model=model, optimizer=LBFGS(model.parameters(), 0.5, max_iter=5), train_step=train_step)


class Views(nn.Module):
    """Embeddings of two views of a thing, and what each says of the other."""

    def __init__(self, detach):
        super().__init__()
        self.body, self.says, self.detach = mlp(12, 32, 8), mlp(8, 16, 8), detach

    def forward(self, x):
        z = self.body(x)
        return self.says(z), z.flip(1).detach() if self.detach else z.flip(1)


@case(
    "stop-gradient-missing",
    stages=("backward", "loss"),
    causes=("collapse-to-constant",),
    source="lightly-ai/lightly#559",
)
def stop_gradient_missing(bug):
    x = torch.randn(128, 1, 12) + 0.5 * torch.randn(128, 2, 12)

    def loss_fn(output, target):
        return -torch.cosine_similarity(*output, -1).mean()

    model = Views(not bug)
    more = {"loss_fn": loss_fn, "loader": batches(x, torch.arange(128), 32)}
    return classification(x=x, y=torch.arange(128), model=model, **more)
