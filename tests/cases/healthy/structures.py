"""Graphs, sets, trees of modules and other unusual computations."""

import torch
import torch.nn.functional as F
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import blobs, curve, loader


def graph(n=60, classes=3):
    """Return features, a normalised adjacency and labels of nodes that mostly have neighbours of their class."""
    y = torch.randint(classes, (n,))
    likely = torch.where(y[:, None] == y, 0.2, 0.02)
    edges = (torch.rand(n, n) < likely).triu(1)
    a = (edges | edges.T | torch.eye(n, dtype=torch.bool)).float()
    scale = a.sum(1).rsqrt()
    x = F.one_hot(y, classes).float() + torch.randn(n, classes)
    return x, scale[:, None] * a * scale, y


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 3)

    def forward(self, x, adjacency):
        return adjacency @ self.b(F.dropout(F.relu(adjacency @ self.a(x)), 0.3, self.training))


@healthy
def graph_nodes():
    """The data set is one graph: every batch is the same, and each node depends on its neighbours."""
    x, a, y = graph()
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": [(x, a, y)], "optimizer": optimizer}


@healthy
def graph_nodes_with_a_mask():
    """Only the nodes of a mask enter the loss; the model keeps the graph, and the batch holds numbers of nodes."""
    x, a, y = graph()

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = GCN()
            self.register_buffer("x", x)
            self.register_buffer("a", a)

        def forward(self, nodes):
            return self.net(self.x, self.a)[nodes]

    model = Held()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(torch.arange(60), y, size=12)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def graph_pooled():
    """A batch is one big graph of several, with an index that says which node belongs to which."""
    batches = []
    for _ in range(8):
        y = torch.randint(2, (8,))
        sizes = torch.randint(4, 9, (8,))
        owner = torch.arange(8).repeat_interleave(sizes)
        x = torch.randn(len(owner), 4) + y[owner, None]
        near = ((owner[:, None] == owner) & (torch.rand(len(owner), len(owner)) < 0.5)).float()
        batches.append((x, near / near.sum(1, keepdim=True).clamp(min=1), owner, y))

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x, near, owner):
            h = F.relu(self.a(torch.cat([x, near @ x], 1)))
            count = int(owner.max()) + 1
            total = torch.zeros(count, 16).index_add(0, owner, h)
            return self.b(total / torch.bincount(owner)[:, None])

    model = Pooled()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": batches, "optimizer": optimizer}


@healthy
def transductive_single_batch():
    """One batch, the whole data set, fully attended to: samples are related by design, and that is declared."""
    x, y = blobs(64)

    class Among(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mix, self.b = (
                nn.Linear(8, 16),
                nn.MultiheadAttention(16, 2, batch_first=True),
                nn.Linear(16, 4),
            )

        def forward(self, x):
            h = F.relu(self.a(x))[None]
            return self.b((h + self.mix(h, h, h)[0])[0])

    model = Among()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(x, y), "optimizer": optimizer}
    return given | {"batch_coupled": True}


@healthy
def neural_ode():
    """One small net is called forty times in a forward."""

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.field, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 4)

        def forward(self, x):
            for _ in range(20):
                half = x + 0.025 * self.field(x)
                x = x + 0.05 * self.field(half)
            return self.head(x)

    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def deep_equilibrium():
    """A fixed point is found without gradients, and one more application carries them."""

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside, self.head = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 4)
            with torch.no_grad():
                self.inside.weight.mul_(0.5)

        def forward(self, x):
            u = self.outside(x)
            with torch.no_grad():
                z = torch.zeros_like(u)
                for _ in range(15):
                    z = torch.tanh(self.inside(z) + u)
            return self.head(torch.tanh(self.inside(z) + u))

    model = Fixed()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def attention_pooling():
    """Bags of instances with one label each; attention weights nearly vanish for most instances."""
    y = torch.randint(2, (128,))
    x = torch.randn(128, 10, 6)
    x[:, 0] += 2.0 * (2 * y[:, None] - 1)
    x = torch.stack([bag[torch.randperm(10)] for bag in x])

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score, self.head = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.head((self.score(h).softmax(1) * h).sum(1))[:, 0]

    model = Bags()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(x, y.float())
    return {"model": model, "loss_fn": nn.BCEWithLogitsLoss(), "loader": data, "optimizer": optimizer}


@healthy
def mixture_of_experts():
    """Each sample goes to one expert, so some experts get no gradient in some steps."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(4))

        def forward(self, x):
            p = self.gate(x).softmax(1)
            best, which = p.max(1)
            out = torch.zeros(len(x), 4)
            for i, expert in enumerate(self.experts):
                chosen = which == i
                if chosen.any():
                    out[chosen] = expert(x[chosen])
            self.balance = 4 * (p.mean(0) * F.one_hot(which, 4).float().mean(0)).sum()
            return out * best[:, None]

    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1]) + 0.01 * model.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def hyper_network():
    """Weights are computed by another net and used through F.linear: the layer itself has no parameters."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(2, 4))
            self.make = nn.Linear(4, 8 * 8)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for code in self.codes:
                x = x + torch.tanh(F.linear(x, self.make(code).view(8, 8) / 3))
            return self.head(x)

    model = Hyper()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy(fast=True)
def complex_layers():
    """Weights and activations are complex numbers; the loss is real."""

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16, dtype=torch.complex64), nn.Linear(16, 4, dtype=torch.complex64)

        def forward(self, x):
            h = self.a(x)
            return self.b(h * torch.sigmoid(h.abs())).abs()

    x, y = blobs()
    model = Waves()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = loader(torch.complex(x, x.roll(1, 1)), y)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def spectral_convolution():
    """A Fourier layer: real in and out, complex weights between."""

    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(1, 8), nn.Linear(8, 1)
            self.weight = nn.Parameter(torch.randn(8, 8, 6, dtype=torch.cfloat) / 8)

        def forward(self, x):
            h = self.up(x[..., None]).transpose(1, 2)
            f = torch.fft.rfft(h)[..., :6]
            h = h + torch.fft.irfft(torch.einsum("bim,iom->bom", f, self.weight), n=h.size(-1))
            return self.down(F.gelu(h).transpose(1, 2))[..., 0]

    x = torch.cumsum(torch.randn(96, 24), 1) / 3
    model = Fourier()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": loader(x, x.roll(2, 1)), "optimizer": optimizer}


@healthy
def stochastic_depth():
    """Whole layers are left out at random, so their gradients are missing in some steps."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for layer in self.layers:
                if not self.training or torch.rand(()) > 0.3:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def shared_layers():
    """One block is applied four times on purpose, as in a universal transformer, and listed once."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            for _ in range(4):
                x = x + self.block(x)
            return self.head(x)

    model = Loop()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def ensemble_in_one_batch():
    """Several members answer at once: the output is (members, N, classes), the target is given to each."""

    class Members(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 8, 16) / 3)
            self.b = nn.Parameter(torch.randn(3, 16, 4) / 4)

        def forward(self, x):
            return torch.relu(x @ self.a) @ self.b

    def loss_fn(output, y):
        return F.cross_entropy(output.flatten(0, 1), y.repeat(3))

    model = Members()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": loss_fn, "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def gumbel_softmax():
    """A hard choice in the forward, a soft one in the backward."""

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.table = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.table(F.gumbel_softmax(self.gate(x), tau=1.0, hard=True))

    model = Choice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def quantisation_aware():
    """Weights are rounded in the forward, with a straight-through gradient."""

    class Rounded(nn.Linear):
        def forward(self, x):
            step = self.weight.detach().abs().max() / 7
            rounded = (self.weight / step).round() * step
            return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    model = nn.Sequential(Rounded(8, 32), nn.ReLU(), Rounded(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*blobs()), "optimizer": optimizer}


@healthy
def domain_adversarial():
    """A custom function turns the gradient round: to autograd's check it is wrong, and it is meant."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -0.1 * gradient

    class Adversarial(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x):
            h = torch.relu(self.body(x))
            return self.label(h), self.domain(Reverse.apply(h))

    x, y = blobs()
    domain = torch.randint(2, y.shape)
    model = Adversarial()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y, domain = batch
        label, guess = model(x)
        loss = loss_fn(label, y) + loss_fn(guess, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = loader(x + domain[:, None] * 0.5, y, domain)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy
def physics_informed():
    """The loss is a differential equation: the model's derivative by its input, and no target."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        t = batch[0].requires_grad_()
        u = model(t)
        (speed,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        start = model(torch.zeros(1, 1))
        loss = (speed + u).square().mean() + (start - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = loader(2 * torch.rand(128, 1), size=32)
    return {"model": model, "loader": data, "optimizer": optimizer, "train_step": train_step}


@healthy
def wide_and_deep_with_dict_batches():
    """A batch is a dict of keywords with labels among them; the step takes it apart."""
    words = torch.randint(20, (256,))
    x, _ = curve()
    y = ((words < 10).float() + x[:, 0] > 0.5).float()

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.deep = nn.Embedding(20, 4), nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
            self.wide = nn.Embedding(20, 1)

        def forward(self, word, dense):
            return self.deep(torch.cat([self.table(word), dense], 1))[:, 0] + self.wide(word)[:, 0]

    model = Wide()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    rows = [{"word": w, "dense": d, "label": t} for w, d, t in zip(words, x, y, strict=True)]

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch["word"], batch["dense"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    data = torch.utils.data.DataLoader(rows, 16, shuffle=True)
    given = {"model": model, "loss_fn": nn.BCEWithLogitsLoss(), "loader": data, "optimizer": optimizer}
    return given | {"train_step": train_step}
