"""Set-ups that are right and look odd: none of them may raise an error."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR
from torch.utils.checkpoint import checkpoint

from cases.backward import mlp
from cases.builders import batches, classification, clusters, plain_step, regression, shuffled
from cases.registry import healthy
from cases.update import Tied


@healthy("accumulation-sum-loss", trap="no step for three batches of four; losses in the hundreds")
def accumulation_sum_loss():
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 64).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss / len(batch[0])

    return regression(loss_fn=nn.MSELoss(reduction="sum"), train_step=train_step, accumulation_steps=4)


@healthy("clip-with-large-early-norms", trap="the gradient norm starts a hundred times above max_norm")
def clip_with_large_early_norms():
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(2 * model(batch[0]), 25 * batch[1])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return regression(train_step=train_step)


@healthy("frozen-backbone-eval", trap="most weights have no gradient; a part of the model is in eval mode")
def frozen_backbone_eval():
    body = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU()).requires_grad_(False).eval()
    return regression(model=nn.Sequential(body, nn.Linear(40, 1)))


@healthy("frozen-backbone-no-grad", trap="a part of the forward runs without gradients, and stays in eval mode")
def frozen_backbone_no_grad():
    class Tunes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU()).requires_grad_(False)
            self.head = nn.Linear(24, 3)

        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x):
            with torch.no_grad():
                h = self.body(x)
            return self.head(h)

    model = Tunes().train()
    return classification(model=model, optimizer=Adam(model.head.parameters(), 0.01))


@healthy("gan-alternating", trap="two optimizers over one graph; gradients that nobody wanted are left in the critic")
def gan_alternating():
    model = nn.ModuleDict({"maker": nn.Linear(3, 2), "critic": mlp(2, 10, 1)})
    makes, judges = (SGD(model[name].parameters(), 0.02) for name in ("maker", "critic"))
    bce = nn.BCEWithLogitsLoss()

    def train_step(model, batch, optimizer, loss_fn, step):
        made = model["maker"](torch.randn(16, 3))
        makes.zero_grad()
        bce(model["critic"](made), torch.ones(16, 1)).backward()
        makes.step()
        judges.zero_grad()
        loss = bce(model["critic"](batch[0]), torch.ones(16, 1))
        loss = loss + bce(model["critic"](made.detach()), torch.zeros(16, 1))
        loss.backward()
        judges.step()
        return loss

    return {
        "model": model,
        "loss_fn": bce,
        "loader": batches(torch.randn(64, 2) + 1, torch.ones(64, 1)),
        "optimizer": judges,
        "optimizers": [makes, judges],
        "train_step": train_step,
    }


@healthy("group-with-lr-zero", trap="weights with gradients that never move: their group is parked")
def group_with_lr_zero():
    model = mlp(6, 20, 1)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    return regression(model=model, optimizer=SGD(groups, 0.04))


@healthy("lbfgs-closure", trap="several backward passes in a step, none of them before it")
def lbfgs_closure():
    model = mlp(6, 20, 1)

    def train_step(model, batch, optimizer, loss_fn, step):
        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    return regression(model=model, optimizer=LBFGS(model.parameters(), 0.2, max_iter=3), train_step=train_step)


@healthy("reinforce-noisy", trap="a loss that changes its sign and does not fall")
def reinforce_noisy():
    model = nn.Linear(5, 3)
    states = torch.randn(240, 5)

    def train_step(model, batch, optimizer, loss_fn, step):
        policy = torch.distributions.Categorical(logits=model(batch[0]))
        action = policy.sample()
        reward = (action == batch[1]).float() + torch.randn(len(action))
        loss = -(policy.log_prob(action) * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    y = states[:, :3].argmax(1)
    return classification(x=states, y=y, model=model, loader=shuffled(states, y, 30), train_step=train_step, lr=0.02)


@healthy("policy-gradient-loss", trap="a loss about zero, of either sign")
def policy_gradient_loss():
    states = torch.randn(240, 5)

    def loss_fn(output, best):
        action = torch.distributions.Categorical(logits=output).sample()
        reward = (action == best).float()
        return -(output.log_softmax(1).gather(1, action[:, None])[:, 0] * (reward - reward.mean())).mean()

    return classification(
        x=states, y=(states @ torch.randn(5, 3)).argmax(1), model=nn.Linear(5, 3), loss_fn=loss_fn, lr=0.03
    )


@healthy("sparse-adam", trap="most rows of the weight never change")
def sparse_adam():
    model = nn.Sequential(nn.Embedding(800, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1).requires_grad_(False))
    words = torch.randint(0, 40, (64, 2))
    return regression(x=words, y=words[:, :1] / 40, model=model, optimizer=SparseAdam(model[0].parameters(), lr=0.05))


@healthy("sparse-embedding", trap="nearly all rows of a gradient are zero")
def sparse_embedding():
    words = torch.randint(0, 900, (64, 3))
    model = nn.Sequential(nn.Embedding(900, 12), nn.Flatten(), nn.Linear(36, 2))
    return classification(x=words, y=(words.float().mean(1) > 450).long(), model=model, lr=0.02)


@healthy("swa-copy", trap="an average that starts late lags behind and has no gradients")
def swa_copy():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    average = torch.optim.swa_utils.AveragedModel(model)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = plain_step(model, batch, optimizer, loss_fn, step)
        if step >= 5:
            average.update_parameters(model)
        return loss

    return regression(model=model, train_step=train_step, lr=0.02)


@healthy("target-network-polyak", trap="weights that no optimizer owns change with every step")
def target_network_polyak():
    class Learns(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = nn.Linear(5, 2)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, x):
            return self.online(x)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1] + 0.8 * model.target(batch[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    model, x = Learns(), torch.randn(64, 5)
    optimizer = SGD(model.online.parameters(), 0.04)
    return regression(x=x, y=x[:, :2], model=model, optimizer=optimizer, train_step=train_step)


@healthy("tied-weights", trap="one weight under two names")
def tied_weights():
    words = torch.randint(0, 10, (80,))
    model = Tied(10, 6)
    return classification(x=words, y=words.roll(1), model=model, optimizer=SGD(model.parameters(), 0.1))


@healthy("weight-tying-causal", trap="one tensor used at both ends of a language model")
def weight_tying_causal():
    text = torch.randint(0, 10, (96, 8))
    for t in range(1, 8):
        text[:, t] = (3 * text[:, t - 1] + 2) % 10

    class Between(Tied):
        def __init__(self):
            super().__init__(10, 14)
            self.mid = nn.Linear(14, 14)

        def forward(self, words):
            return self.head(self.mid(self.word(words)).tanh())

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return classification(x=text[:, :-1], y=text[:, 1:], model=Between(), loss_fn=loss_fn, causal=True)


@healthy("warm-restarts", trap="the learning rate rises again, on purpose")
def warm_restarts():
    setup = regression()
    scheduler = CosineAnnealingWarmRestarts(setup["optimizer"], 5)

    def train_step(*step):
        loss = plain_step(*step)
        scheduler.step()
        return loss

    return {**setup, "train_step": train_step, "scheduler": scheduler}


@healthy("warmup-lr-zero-at-step-0", trap="the first step moves nothing")
def warmup_lr_zero_at_step_0():
    model = mlp(6, 20, 1)
    optimizer = SGD([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}], 0.04)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 3))

    def train_step(*step):
        loss = plain_step(*step)
        scheduler.step()
        return loss

    return regression(model=model, optimizer=optimizer, train_step=train_step, scheduler=scheduler)


class Adapted(nn.Module):
    """A frozen layer with a correction of low rank that starts at zero."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@healthy("zero-init-branch", trap="a gradient that is exactly zero in the first step only")
def zero_init_branch():
    model = Adapted(6, 1)
    return regression(model=model, optimizer=SGD([model.down.weight, model.up.weight], 0.2))


@healthy("lora-zero-init", trap="a weight of zeros, and two linear layers without an activation")
def lora_zero_init():
    x = torch.randn(96, 12)
    model = Adapted(12, 12)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 0.02)
    return regression(x=x, y=x @ (0.4 * torch.randn(12, 12)), model=model, optimizer=optimizer)


@healthy("attention-over-padding", trap="half the targets are ignored; every word sees every other, as is meant")
def attention_over_padding():
    x = torch.randint(1, 11, (96, 7))
    y = (3 * x) % 10 + 1
    padding = torch.arange(7) >= torch.randint(2, 8, (96, 1))
    x[padding], y[padding] = 0, -100

    class Labels(nn.Module):
        def __init__(self):
            super().__init__()
            self.word = nn.Embedding(11, 16, padding_idx=0)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 11)

        def forward(self, words):
            return self.head(self.layer(self.word(words), src_key_padding_mask=words == 0))

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return classification(x=x, y=y, model=Labels(), loss_fn=loss_fn, lr=3e-3)


@healthy("batchnorm-mixes-batch", trap="every output depends on the whole batch")
def batchnorm_mixes_batch():
    return classification(model=nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)))


@healthy("contrastive-infonce", trap="the other samples of a batch are the wrong answers; there are no labels")
def contrastive_infonce():
    seen = torch.randn(96, 7)
    a, b = seen + 0.3 * torch.randn(96, 7), seen + 0.3 * torch.randn(96, 7)
    model = mlp(7, 24, 12)

    def loss_fn(output, other):
        likeness = F.normalize(output, dim=1) @ F.normalize(model(other), dim=1).t()
        return F.cross_entropy(likeness / 0.3, torch.arange(len(output)))

    return classification(x=a, y=b, model=model, loss_fn=loss_fn, lr=5e-3)


@healthy("gradient-checkpointing", trap="the forward runs a second time during the backward")
def gradient_checkpointing():
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(8, 24, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False).relu())

    return classification(model=Saves(), lr=5e-3)


@healthy("hidden-teacher-in-list", trap="layers in a Python list that ask for gradients: a teacher that is to stay")
def hidden_teacher_in_list():
    class Distils(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = mlp(8, 24, 3)
            self.teacher = [copy.deepcopy(self.student)]

        def forward(self, x):
            with torch.no_grad():
                taught = self.teacher[0](x)
            return torch.cat([self.student(x), taught], 1)

    def loss_fn(output, target):
        return F.cross_entropy(output[:, :3], target) + 0.2 * F.mse_loss(output[:, :3], output[:, 3:])

    return classification(model=Distils(), loss_fn=loss_fn, lr=5e-3)


@healthy("hinge-zero-loss-samples", trap="most samples have a loss and a gradient of exactly zero")
def hinge_zero_loss_samples():
    sign = (torch.arange(96) % 2 * 2.0 - 1)[:, None]

    def loss_fn(output, target):
        return (1 - output * target).relu().mean()

    return regression(x=torch.randn(96, 6) + 1.8 * sign, y=sign, model=nn.Linear(6, 1), loss_fn=loss_fn)


@healthy("imbalanced-but-learned", trap="nine samples of ten are of one class")
def imbalanced_but_learned():
    y = (torch.arange(300) % 10 == 0).long()
    x = torch.randn(300, 4) + 3 * y[:, None]
    return classification(x=x, y=y, loader=shuffled(x, y, 50), lr=0.02)


@healthy("intersample-attention-declared", trap="samples attend to each other; the reader says so")
def intersample_attention_declared():
    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 14), nn.Linear(14, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last((h + (h @ h.t() / 4).softmax(1) @ h).relu())

    return classification(model=Meets(), batch_coupled=True)


@healthy("log-softmax-then-ce", trap="a softmax of a softmax, which changes nothing")
def log_softmax_then_ce():
    return classification(model=nn.Sequential(*mlp(8, 24, 3), nn.LogSoftmax(1)))


@healthy("mc-dropout-explicit", trap="random answers in eval mode, on purpose")
def mc_dropout_explicit():
    class Samples(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.last(F.dropout(self.first(x).relu(), 0.4, training=True))

    return classification(model=Samples())


@healthy("multiple-losses", trap="a sum of losses, one of which starts at zero; the output is wider than the target")
def multiple_losses():
    x = (2 * torch.randn(96, 2) @ torch.randn(2, 10)).sigmoid()

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(10, 6), nn.Linear(3, 10)

        def forward(self, x):
            mean, logs = self.encoder(x).chunk(2, 1)
            return torch.cat([self.decoder(mean + torch.randn_like(mean) * (logs / 2).exp()), mean, logs], 1)

    def loss_fn(output, target):
        again, mean, logs = output.split([10, 3, 3], 1)
        likelihood = F.binary_cross_entropy_with_logits(again, target, reduction="sum") / len(target)
        return likelihood - 0.5 * (1 + logs - mean.square() - logs.exp()).sum(1).mean()

    return classification(x=x, y=x, model=Codes(), loss_fn=loss_fn, lr=0.02)


@healthy("negative-loss-gaussian-nll", trap="a negative loss: a density may exceed one")
def negative_loss_gaussian_nll():
    x = torch.randn(96, 5)
    model = mlp(5, 24, 2, between=nn.Tanh)

    def loss_fn(output, target):
        return F.gaussian_nll_loss(output[:, :1], target, F.softplus(output[:, 1:]) + 1e-4)

    y = 0.02 * x.sum(1, keepdim=True)
    return regression(x=x, y=y, model=model, loss_fn=loss_fn, optimizer=Adam(model.parameters(), 0.01))


@healthy("quantile-loss", trap="predictions that are too high nine times of ten, on purpose")
def quantile_loss():
    x = torch.randn(200, 4)

    def loss_fn(output, target):
        return torch.maximum(0.9 * (target - output), 0.1 * (output - target)).mean()

    model = nn.Linear(4, 1)
    y = x.sum(1, keepdim=True) + torch.randn(200, 1)
    return regression(x=x, y=y, model=model, loss_fn=loss_fn, optimizer=Adam(model.parameters(), 0.03))


@healthy("raw-pixels-with-input-norm", trap="inputs of 0 to 255, which the first layer normalises")
def raw_pixels_with_input_norm():
    y = torch.arange(120) % 4
    x = (160 * torch.rand(4, 40)[y] + 95 * torch.rand(120, 40)).round()
    model = nn.Sequential(nn.BatchNorm1d(40), mlp(40, 48, 4))
    return classification(x=x, y=y, model=model, optimizer=SGD(model.parameters(), 0.1))


@healthy("relu-half-zero", trap="half of all activations are zero")
def relu_half_zero():
    return classification(model=mlp(8, 48, 48, 3), lr=3e-3)


@healthy("rnn-clipped-gradients", trap="a large gradient norm, clipped in every step")
def rnn_clipped_gradients():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(3, 16, batch_first=True, nonlinearity="relu")
            self.head = nn.Linear(16, 1)
            nn.init.eye_(self.rnn.weight_hh_l0)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    x, model = 2 * torch.randn(96, 25, 3), Sums()
    y = x.sum((1, 2))[:, None] / 5
    return regression(x=x, y=y, model=model, train_step=train_step, optimizer=Adam(model.parameters(), 3e-3))


@healthy("sigmoid-output-mse", trap="probabilities against a squared error: pictures between 0 and 1")
def sigmoid_output_mse():
    x = torch.rand(96, 3) @ torch.rand(3, 16) / 3
    model = nn.Sequential(mlp(16, 8, 16), nn.Sigmoid())
    return regression(x=x, y=x, model=model, optimizer=Adam(model.parameters(), 0.01))


@healthy("soft-labels-probabilities", trap="fractions as classes, and a loss that cannot reach zero")
def soft_labels_probabilities():
    x, y = clusters()
    share, other = torch.rand(96, 1), torch.randperm(96)
    known = F.one_hot(y, 3).float()
    return classification(
        x=share * x + (1 - share) * x[other], y=share * known + (1 - share) * known[other], model=mlp(8, 24, 3)
    )


@healthy("straight-through-quantiser", trap="a detach in the forward, and nearly a straight line")
def straight_through_quantiser():
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(h + (h.round() - h).detach())

    return classification(model=Rounds())


@healthy("unused-head-by-design", trap="a part of the model that never runs, though an optimizer owns it")
def unused_head_by_design():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.other = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 5)

        def forward(self, x):
            return self.one(self.body(x).relu())

    return classification(model=Heads())


@healthy("summed-loss", trap="a loss in the thousands, with soft targets")
def summed_loss():
    x = (2 * torch.randn(160, 4) @ torch.randn(4, 40)).sigmoid()
    return classification(x=x, y=x, model=mlp(40, 14, 40), loss_fn=nn.BCEWithLogitsLoss(reduction="sum"))


@healthy("directions-through-tanh", trap="targets far beyond a tanh, and only their direction counts")
def directions_through_tanh():
    x = torch.randn(96, 4)
    y = 20 * x @ torch.randn(4, 3)

    def loss_fn(output, target):
        return 1 - F.cosine_similarity(output, target).mean()

    return regression(x=x, y=y, model=nn.Sequential(*mlp(4, 24, 3), nn.Tanh()), loss_fn=loss_fn)


@healthy("outliers-beyond-tanh", trap="some targets lie beyond the last tanh")
def outliers_beyond_tanh():
    x = torch.randn(96, 4)
    y = 0.5 * x[:, :1] + 0.2 * torch.randn(96, 1)
    return regression(x=x, y=y, model=nn.Sequential(*mlp(4, 24, 1), nn.Tanh()))


class Crowd(nn.Module):
    """A score that also counts how many samples of the batch are near: minibatch discrimination."""

    def __init__(self):
        super().__init__()
        self.body, self.last = mlp(8, 16, 6), nn.Linear(7, 3)

    def forward(self, x):
        h = self.body(x)
        near = (-torch.cdist(h, h)).exp().sum(1, keepdim=True)
        return self.last(torch.cat([h, near], 1))


@healthy("minibatch-discrimination", trap="a score grows with the number of samples in the batch, by design")
def minibatch_discrimination():
    return classification(model=Crowd())


@healthy(
    "all-data-at-once", trap="every batch is standardised by itself: it holds the whole data set, in another order"
)
def all_data_at_once():
    x, y = clusters(3, 48)
    x = (x - x.mean(0)) / x.std(0)
    return classification(x=x, y=y, loader=shuffled(x, y, 48))


@healthy("category-not-in-validation", trap="a feature is constant in validation: a rare category is not there")
def category_not_in_validation():
    x, y = clusters(2, 160)
    x[:, 0] = (torch.rand(160) < 0.2).float()
    x[96:, 0] = 0
    return classification(x=x[:96], y=y[:96], val_loader=batches(x[96:], y[96:], 32))


@healthy("memorises-noise", trap="every training sample is recognised, and validation is left to chance")
def memorises_noise():
    x, y = torch.randn(120, 64), torch.randint(0, 3, (120,))
    more = {"val_loader": batches(torch.randn(64, 64), torch.randint(0, 3, (64,)), 32), "lr": 0.02}
    return classification(x=x, y=y, model=mlp(64, 64, 3), **more)


class Words(nn.Module):
    """Words beyond the table are one unknown word; padding is not read; the head begins at zero."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 12), nn.Linear(12, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        real = (x != 0).float()[..., None]
        h = self.table(x.clamp(max=self.table.num_embeddings - 1))
        return self.head((h * real).sum(1) / real.sum(1).clamp_min(1))


def texts(samples=120, length=8, words=40, longest=9):
    x = (words * torch.rand(samples, length) ** 3).long() + 1
    return x * (torch.arange(length) < torch.randint(2, longest, (samples, 1)))


@healthy("rare-words-unknown", trap="many ids share the last row of the table: rare words are all unknown")
def rare_words_unknown():
    x = texts()
    return classification(x=x, y=x[:, 0] % 3, model=Words(16))


@healthy(
    "zero-head-warming-up", trap="outputs that no token changes: the head begins at zero, and the first rates are tiny"
)
def zero_head_warming_up():
    x = texts()
    setup = classification(x=x, y=x[:, 0] % 3, model=Words(64), pad_id=0)
    return {**setup, "scheduler": LambdaLR(setup["optimizer"], lambda step: min(1.0, step / 1000))}


class Reads(nn.Module):
    """A recurrent net that is read at its last step, and where asked for at its final states too."""

    def __init__(self, both):
        super().__init__()
        self.table, self.both = nn.Embedding(48, 12), both
        self.rnn, self.head = nn.GRU(12, 16, batch_first=True, bidirectional=both), nn.Linear(48 if both else 16, 3)

    def forward(self, x):
        steps, states = self.rnn(self.table(x))
        last = steps[:, -1]
        return self.head(torch.cat([last, states[1]], 1) if self.both else last)


@healthy("padded-on-the-left", trap="only the last step is read, and there is much padding: in front")
def padded_on_the_left():
    x = texts().flip(1)
    return classification(x=x, y=x[:, -1] % 3, model=Reads(False), pad_id=0)


@healthy("last-step-and-states", trap="the last step of both directions is read, beside the final states")
def last_step_and_states():
    x = torch.randint(1, 48, (120, 8))
    return classification(x=x, y=x[:, 0] % 3, model=Reads(True))


@healthy("checkpoint-without-randomness", trap="checkpoints that do not keep the generators: nothing in them is random")
def checkpoint_without_randomness():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(8, 24), nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU())
            self.last = nn.Sequential(nn.Dropout(0.3), nn.Linear(24, 3))

        def forward(self, x):
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=False, preserve_rng_state=False))

    return classification(model=Net())


@healthy("closure-over-micro-batches", trap="gradients add up inside a closure that is called many times")
def closure_over_micro_batches():
    model = mlp(6, 20, 1)

    def train_step(model, batch, optimizer, loss_fn, step):
        def closure():
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                loss = loss_fn(model(x), y) / 2
                loss.backward()
                total += loss.detach()
            return total

        return optimizer.step(closure)

    return regression(model=model, optimizer=LBFGS(model.parameters(), 0.2, max_iter=3), train_step=train_step)


@healthy(
    "spread-against-collapse", trap="both branches are trained towards each other: a variance term keeps them apart"
)
def spread_against_collapse():
    x = torch.randn(128, 1, 12) + 0.5 * torch.randn(128, 2, 12)

    def loss_fn(output, target):
        a, b = output[:, 0], output[:, 1]
        return (a - b).square().mean() + sum((1 - z.std(0)).relu().mean() for z in (a, b))

    y = torch.arange(128)
    return classification(x=x, y=y, model=mlp(12, 32, 8), loss_fn=loss_fn, loader=batches(x, y, 32), batch_coupled=True)


@healthy("two-tasks-in-turn", trap="an encoder belongs to two optimizers, each with the gradient of its own loss")
def two_tasks_in_turn():
    model = nn.ModuleDict({"body": mlp(8, 16), "kind": nn.Linear(16, 3), "size": nn.Linear(16, 1)})
    optimizers = [Adam([*model["body"].parameters(), *model[name].parameters()], 0.01) for name in ("kind", "size")]

    def train_step(model, batch, optimizer, loss_fn, step):
        for one, name in zip(optimizers, ("kind", "size"), strict=True):
            one.zero_grad()
            out = model[name](model["body"](batch[0]).relu())
            loss = loss_fn(out, batch[1]) if name == "kind" else F.mse_loss(out[:, 0], batch[0].norm(dim=1))
            loss.backward()
            one.step()
        return loss

    return classification(model=model, optimizer=optimizers[0], optimizers=optimizers, train_step=train_step)


@healthy(
    "factor-read-by-the-loop", trap="groups have a setting that torch does not know: the loop reads it at each step"
)
def factor_read_by_the_loop():
    model = mlp(6, 20, 1)
    groups = [{"params": model[0].parameters(), "lr_scale": 1.0}, {"params": model[2].parameters(), "lr_scale": 0.5}]

    def train_step(model, batch, optimizer, loss_fn, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.04 * group["lr_scale"]
        return plain_step(model, batch, optimizer, loss_fn, step)

    return regression(model=model, optimizer=SGD(groups, 0.04), train_step=train_step)


@healthy("random-network-as-target", trap="a part of the model is never moved: its random answers are what is learnt")
def random_network_as_target():
    model = nn.ModuleDict({"learns": mlp(6, 20, 4), "fixed": mlp(6, 20, 4).requires_grad_(False)})

    def train_step(model, batch, optimizer, loss_fn, step):
        with torch.no_grad():
            wanted = model["fixed"](batch[0])
        return plain_step(model["learns"], (batch[0], wanted), optimizer, loss_fn, step)

    return regression(model=model, optimizer=SGD(model["learns"].parameters(), 0.04), train_step=train_step)


@healthy("average-of-leaping-weights", trap="weights leap to and fro at each step, and their average goes another way")
def average_of_leaping_weights():
    model = mlp(6, 20, 1)
    slow = copy.deepcopy(model)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = plain_step(model, batch, optimizer, loss_fn, step)
        with torch.no_grad():
            for average, p in zip(slow.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss

    return regression(model=model, lr=0.25, train_step=train_step, ema_model=slow)


@healthy("resume-in-place", trap="resume gives back model and optimizer alone: it loads the scaler where it is")
def resume_in_place():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    setup = regression(train_step=train_step, scaler=scaler)
    parts = {name: setup[name] for name in ("model", "optimizer", "scaler")}

    def resume(checkpoint):
        fresh = mlp(6, 20, 1)
        again = {"model": fresh, "optimizer": SGD(fresh.parameters(), 0.04)}
        for name, state in checkpoint.items():
            (again | {"scaler": scaler})[name].load_state_dict(state)
        return again

    save = {"save": lambda: copy.deepcopy({name: part.state_dict() for name, part in parts.items()})}
    return {**setup, **save, "resume": resume}


@healthy("expected-reward", trap="the loss is lowest far from the targets, which are rewards within 0 and 1")
def expected_reward():
    x = torch.randn(96, 6)
    y = (x @ torch.randn(6, 4)).sigmoid()

    def loss_fn(output, target):
        return -(output * target).sum(1).mean()

    return regression(x=x, y=y, model=nn.Sequential(*mlp(6, 20, 4), nn.Softmax(1)), loss_fn=loss_fn)


@healthy("energy-without-target", trap="a loss that falls below zero; the targets are zeros that nothing reads")
def energy_without_target():
    x = torch.rand(64, 1)

    def loss_fn(output, target):
        return (0.5 * output.square() - output * torch.sin(3 * x[: len(output)])).mean()

    return regression(x=x, y=torch.zeros(64, 1), model=mlp(1, 20, 1), loss_fn=loss_fn, loader=batches(x, x * 0, 64))


@healthy(
    "labels-smoothed-by-hand",
    trap="the loss of the targets themselves is high: it asks for a little less than certainty",
)
def labels_smoothed_by_hand():
    x, y = clusters(3)

    def loss_fn(output, target):
        soft = 0.9 * target + 0.05
        return -(soft * output.log() + (1 - soft) * (1 - output).log()).clamp(-50, 50).mean()

    y = F.one_hot(y, 3).float()
    return regression(x=x, y=y, model=nn.Sequential(*mlp(8, 20, 3), nn.Sigmoid()), loss_fn=loss_fn)


@healthy("transcripts-padded-with-blank", trap="transcripts are filled up with the blank, beyond their lengths")
def transcripts_padded_with_blank():
    y = torch.randint(1, 5, (64, 3))
    y[::2, 2] = 0
    x = 2 * F.one_hot(y, 5).float().repeat_interleave(3, 1) + 0.3 * torch.randn(64, 9, 5)

    def loss_fn(output, target):
        lengths = torch.full((len(output),), 9), (target > 0).sum(1)
        return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), target, *lengths)

    return classification(x=x, y=y, model=mlp(5, 24, 5), loss_fn=loss_fn)


@healthy("ranks-with-ties", trap="targets of a ranking loss are 1, -1, and 0 where two are alike")
def ranks_with_ties():
    x = torch.randn(96, 2, 6)
    y = (x[:, 0, 0] - x[:, 1, 0]).mul(2).round().sign()

    def loss_fn(output, target):
        return F.margin_ranking_loss(output[:, 0, 0], output[:, 1, 0], target, margin=0.2)

    return regression(x=x, y=y, model=mlp(6, 20, 1), loss_fn=loss_fn)


@healthy("divided-by-the-window", trap="the mean is divided by a number that happens to be that of the samples")
def divided_by_the_window():
    def loss_fn(output, target):
        return F.mse_loss(output, target) / 16

    return regression(loss_fn=loss_fn, lr=0.8)
