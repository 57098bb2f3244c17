"""Models that make data."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import loader, pictures


def ring(n=256):
    """Return points on a noisy circle."""
    angle = 6.2832 * torch.rand(n)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


class VAE(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decoder(z), mean, logvar


@healthy(fast=True)
def vae():
    """The output is a tuple, random in eval mode too; the loss is a sum over pixels, so it is large."""
    x = (torch.randn(256, 3) @ torch.randn(3, 16) * 2).sigmoid()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(output, x):
        logits, mean, logvar = output
        rebuilt = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        return rebuilt - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()

    data = [batch for (batch,) in loader(x)]
    return {"model": model, "loss_fn": loss_fn, "loader": data, "optimizer": optimizer}


class VectorQuantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(8, 4), nn.Embedding(16, 4), nn.Linear(4, 8)

    def forward(self, x):
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        through = z + (code - z).detach()
        own = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.decoder(through), own


@healthy
def vq_vae():
    """An argmin cuts the graph on purpose; most codes are never chosen, and detach is everywhere."""
    model = VectorQuantised()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x = torch.randn(256, 3) @ torch.randn(3, 8)

    def loss_fn(output, x):
        return F.mse_loss(output[0], x) + output[1]

    return {"model": model, "loss_fn": loss_fn, "loader": loader(x, x), "optimizer": optimizer}


@healthy
def autoencoder_sigmoid_mse():
    """A sigmoid and a squared error, on targets within 0 and 1: slow at times, and legal."""
    x, _ = pictures(96, 1, 8)
    x = x.sigmoid()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 64), nn.Sigmoid(),
        nn.Unflatten(1, (1, 8, 8)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": loader(x, x), "optimizer": optimizer}


@healthy
def denoising_autoencoder_linear():
    """Linear layers without an activation: a principal component analysis, on purpose."""
    x = torch.randn(256, 3) @ torch.randn(3, 12)
    model = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(x + 0.3 * torch.randn_like(x), x)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": data, "optimizer": optimizer}


def pair(critic_last=1):
    generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, critic_last))
    return nn.ModuleDict({"G": generator, "D": critic})


@healthy
def gan():
    """Two optimizers pull in opposite directions; neither loss falls; the fakes are detached for one of them."""
    model = pair()
    steps = {name: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for name, net in model.items()}

    def train_step(model, batch, optimizer, loss_fn, step):
        real = batch[0]
        fake = model["G"](torch.randn(len(real), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        loss_d = loss_fn(model["D"](real), ones) + loss_fn(model["D"](fake.detach()), zeros)
        steps["D"].zero_grad()
        loss_d.backward()
        steps["D"].step()
        loss_g = loss_fn(model["D"](fake), ones)
        steps["G"].zero_grad()
        loss_g.backward()
        steps["G"].step()
        return loss_d

    given = {"model": model, "loss_fn": nn.BCEWithLogitsLoss(), "loader": loader(ring()), "train_step": train_step}
    return given | {"optimizers": steps}


@healthy
def wgan_clipped():
    """The critic's weights are clipped in place after its step, and its loss falls below zero without bound."""
    model = pair()
    critic = torch.optim.RMSprop(model["D"].parameters(), lr=1e-3)
    maker = torch.optim.RMSprop(model["G"].parameters(), lr=1e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        real = batch[0]
        fake = model["G"](torch.randn(len(real), 4))
        loss = model["D"](fake.detach()).mean() - model["D"](real).mean()
        critic.zero_grad()
        loss.backward()
        critic.step()
        with torch.no_grad():
            for p in model["D"].parameters():
                p.clamp_(-0.1, 0.1)
        if step % 3 == 2:
            maker.zero_grad()
            (-model["D"](fake).mean()).backward()
            maker.step()
        return loss

    return {"model": model, "loader": loader(ring()), "optimizers": [critic, maker], "train_step": train_step}


@healthy
def wgan_gradient_penalty():
    """A gradient of a gradient: autograd.grad with create_graph inside the loss."""
    model = pair()
    critic = torch.optim.Adam(model["D"].parameters(), lr=1e-3, betas=(0.0, 0.9))
    maker = torch.optim.Adam(model["G"].parameters(), lr=1e-3, betas=(0.0, 0.9))

    def train_step(model, batch, optimizer, loss_fn, step):
        real = batch[0]
        with torch.no_grad():
            fake = model["G"](torch.randn(len(real), 4))
        mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(model["D"](mixed).sum(), mixed, create_graph=True)
        loss = model["D"](fake).mean() - model["D"](real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        critic.zero_grad()
        loss.backward()
        critic.step()
        if step % 2:
            maker.zero_grad()
            (-model["D"](model["G"](torch.randn(len(real), 4))).mean()).backward()
            maker.step()
        return loss

    return {"model": model, "loader": loader(ring()), "optimizers": [critic, maker], "train_step": train_step}


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU())
        self.body = nn.Sequential(nn.Linear(2, 32), nn.SiLU())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        angle = t[:, None] * torch.exp(-math.log(1000) * torch.arange(4) / 4)
        return self.head(self.body(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1)))


@healthy
def diffusion():
    """The target is noise drawn in the step, so the loss is noisy; an averaged copy follows the weights."""
    model = Denoiser()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0)

    def train_step(model, batch, optimizer, loss_fn, step):
        (x,) = batch
        t = torch.randint(50, (len(x),))
        noise = torch.randn_like(x)
        a = kept[t, None]
        loss = loss_fn(model(a.sqrt() * x + (1 - a).sqrt() * noise, t.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        return loss

    given = {"model": model, "loss_fn": nn.MSELoss(), "loader": loader(ring(), size=64), "optimizer": optimizer}
    return given | {"train_step": train_step, "ema_model": average}


@healthy
def flow_matching():
    """The batch holds no target at all: it is drawn within the loss."""

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))

        def forward(self, x):
            noise, t = torch.randn_like(x), torch.rand(len(x), 1)
            speed = self.body(torch.cat([(1 - t) * noise + t * x, t], 1))
            return (speed - (x - noise)).square().mean()

    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = [batch for (batch,) in loader(ring(), size=64)]
    return {"model": model, "loader": batches, "optimizer": optimizer}


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.net, self.flip = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)), flip
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        return torch.cat([a, b * scale.exp() + shift], 1), scale.sum(1)


@healthy
def normalising_flow():
    """Begins as the identity with zero last layers; the loss is a negative log-likelihood, below zero later."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))

        def forward(self, x):
            total = 0
            for part in self.parts:
                x, log = part(x)
                total = total + log
            return x, total

    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss_fn(output, _):
        z, log = output
        return (0.5 * z.square().sum(1) + math.log(2 * math.pi) - log).mean()

    batches = [batch for (batch,) in loader(ring(), size=32)]
    return {"model": model, "loss_fn": loss_fn, "loader": batches, "optimizer": optimizer}


@healthy
def energy_based():
    """The model is derived by its input to draw negatives, with its weights' gradients switched off for the while."""
    model = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        (x,) = batch
        fake = torch.randn_like(x)
        model.requires_grad_(False)
        for _ in range(5):
            fake.requires_grad_()
            (slope,) = torch.autograd.grad(model(fake).sum(), fake)
            fake = (fake - 0.1 * slope + 0.05 * torch.randn_like(fake)).detach()
        model.requires_grad_(True)
        good, bad = model(x), model(fake)
        loss = good.mean() - bad.mean() + 0.1 * (good.square() + bad.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "loader": loader(ring(), size=32), "optimizer": optimizer, "train_step": train_step}


@healthy
def score_matching():
    """The loss needs the model's own derivative by its input."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        x = batch[0].requires_grad_()
        score = model(x)
        trace = sum(torch.autograd.grad(score[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
        loss = (trace + 0.5 * score.square().sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "loader": loader(ring(), size=64), "optimizer": optimizer, "train_step": train_step}


@healthy
def cycle_consistency():
    """Two generators, one optimizer over a chain of their parameters, and a loss of four parts."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"a": a, "b": b})
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], lr=5e-3)
    x = torch.randn(128, 4)
    y = x @ torch.randn(4, 4) * 0.7

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y = batch
        there, back = model["a"](x), model["b"](y)
        loss = loss_fn(model["b"](there), x) + loss_fn(model["a"](back), y)
        loss = loss + 0.5 * (loss_fn(there.mean(0), y.mean(0)) + loss_fn(back.mean(0), x.mean(0)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": nn.L1Loss(), "loader": loader(x, y), "optimizer": optimizer}
    return given | {"train_step": train_step}
