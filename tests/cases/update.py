"""Faults of the update: right gradients, and weights that do not follow them."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR

from cases.builders import batches, classification, clusters, mlp, plain_step, regression
from cases.registry import case


@case(
    "accum-not-divided",
    stages=("update",),
    causes=("accum-not-divided",),
    source="fastai/fastai#3023",
    hint=True,
)
def accum_not_divided(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        (loss if bug else loss / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return regression(train_step=train_step, accumulation_steps=4, lr=0.02)


@case(
    "accum-tail-dropped",
    stages=("update",),
    causes=("accum-tail-dropped",),
    source="timoschick/pet#36",
)
def accum_tail_dropped(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        place = step % 5  # five batches are an epoch
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 3).backward()
        if place % 3 == 2 or (place == 4 and not bug):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return regression(x=torch.randn(80, 6), train_step=train_step, accumulation_steps=3, lr=0.02)


@case(
    "bf16-params-stuck",
    stages=("update",),
    causes=("bf16-params-stuck",),
    source="pytorch/ao#1124",
)
def bf16_params_stuck(bug):
    kind = torch.bfloat16 if bug else torch.float32
    x = torch.randn(64, 6)
    y = x @ torch.randn(6, 1)
    model = mlp(6, 20, 1)
    with torch.no_grad():
        model[0].weight += model[0].weight.sign()  # weights near 1, where the next number is far
    return regression(x=x, y=y, model=model.to(kind), lr=2e-5, loader=batches(x.to(kind), y.to(kind)))


@case(
    "clip-before-unscale",
    stages=("update",),
    causes=("clip-before-unscale",),
    source="milesial/Pytorch-UNet#468",
)
def clip_before_unscale(bug):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if not bug:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return regression(train_step=train_step, scaler=scaler)


@case(
    "clip-too-tight",
    stages=("update",),
    causes=("clip-too-tight",),
    source="victorchall/EveryDream2trainer#175",
)
def clip_too_tight(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        clip_grad_norm_(model.parameters(), 2e-5 if bug else 4.0)
        optimizer.step()
        return loss

    return regression(train_step=train_step)


@case(
    "cosine-past-tmax",
    stages=("update",),
    causes=("cosine-past-tmax",),
    source="CodefyUI/CodefyUI#205",
    hint=True,
)
def cosine_past_tmax(bug):
    setup = regression()
    scheduler = CosineAnnealingLR(setup["optimizer"], T_max=5 if bug else 24)  # five epochs, stepped once a batch

    def train_step(*step):
        loss = plain_step(*step)
        scheduler.step()
        return loss

    return {**setup, "train_step": train_step, "scheduler": scheduler}


@case(
    "ema-buffers-stale",
    stages=("update", "reproduce"),
    causes=("ema-buffers-stale",),
    source="lucidrains/ema-pytorch#8",
)
def ema_buffers_stale(bug):
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    average = copy.deepcopy(model)

    def train_step(*step):
        loss = plain_step(*step)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
        if not bug:
            for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
                slow.copy_(fast)
        return loss

    return classification(model=model, train_step=train_step, ema_model=average)


class Wrapped(nn.Module):
    """What compiling or data parallelism does to a model: another prefix to every name."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, x):
        return self._orig_mod(x)


@case(
    "ema-name-mismatch",
    stages=("update", "reproduce"),
    causes=("ema-name-mismatch",),
    source="wandb/senpai#2899",
)
def ema_name_mismatch(bug):
    inner = mlp(6, 20, 1)
    average = {name: p.detach().clone() for name, p in inner.named_parameters()}

    def train_step(*step):
        loss = plain_step(*step)
        for name, p in step[0].named_parameters():
            known = name if bug else name.removeprefix("_orig_mod.")
            if known in average:
                average[known].lerp_(p.detach(), 0.2)
        return loss

    return regression(model=Wrapped(inner), train_step=train_step, ema_model=average)


@case(
    "ema-not-restored",
    stages=("forward", "update", "reproduce"),
    causes=("weights-changed-outside",),
    source="PKU-YuanGroup/Open-Sora-Plan#186",
    hint=True,  # whose average the step's own closure keeps: Lookahead writes such weights on purpose
)
def ema_not_restored(bug):
    model = mlp(6, 20, 1)
    average = copy.deepcopy(model.state_dict())

    def train_step(*step):
        loss = plain_step(*step)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.05)
        return loss

    def validate():
        trained = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        with torch.no_grad():
            value = model(torch.ones(1, 6))
        if not bug:
            model.load_state_dict(trained)
        return value

    return regression(model=model, train_step=train_step, on_epoch_end=validate)


@case(
    "fp16-adam-eps",
    stages=("update",),
    causes=("fp16-adam-eps",),
    source="pytorch/pytorch#8860",
)
def fp16_adam_eps(bug):
    words = torch.randint(0, 8, (64, 3))  # of sixteen words; the others never have a gradient
    model = nn.Sequential(nn.Embedding(16, 4), nn.Flatten(), nn.Linear(12, 1)).half()
    optimizer = Adam(model.parameters(), lr=1e-3, eps=1e-8 if bug else 1e-4)
    return regression(x=words, y=torch.randn(64, 1).half(), model=model, optimizer=optimizer)


@case(
    "fp16-underflow-no-scaler",
    stages=("backward", "update"),
    causes=("fp16-underflow-no-scaler",),
    source="engichang1467/Open-Rig3R#35",
)
def fp16_underflow_no_scaler(bug):
    scaler = torch.amp.GradScaler("cpu", enabled=not bug)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(batch[0])
        loss = loss_fn(output.float(), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def loss_fn(output, target):
        return 2e-7 * (output - target).square().mean()  # a term with a small weight

    return regression(model=mlp(6, 16, 16, 1, between=nn.Tanh), loss_fn=loss_fn, train_step=train_step)


@case(
    "frozen-still-decays",
    stages=("update",),
    causes=("frozen-still-decays",),
    source="pytorch/pytorch#22049",
    hint=True,
)
def frozen_still_decays(bug):
    model = mlp(6, 20, 1)
    model[0].requires_grad_(bug)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.2)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        if bug:
            for p in model[0].parameters():
                p.grad.zero_()  # "frozen"
        optimizer.step()
        return loss

    return regression(model=model, optimizer=optimizer, train_step=train_step)


@case(
    "gradient-ascent",
    stages=("loss", "backward", "update"),
    causes=("gradient-ascent",),
    source="LuEE-C/PPO-Keras#4",
)
def gradient_ascent(bug):
    model = mlp(6, 20, 1)
    return regression(model=model, optimizer=SGD(model.parameters(), 0.02, maximize=bug))


@case(
    "lr-too-large",
    stages=("update",),
    causes=("lr-too-large",),
    source="facebookresearch/grid-feats-vqa#26",
)
def lr_too_large(bug):
    return regression(lr=15.0 if bug else 0.04)


@case(
    "lr-too-small",
    stages=("update",),
    causes=("lr-too-small",),
    source="AmingWu/Single-DGOD#21",
)
def lr_too_small(bug):
    return regression(lr=2e-9 if bug else 0.04)


@case(
    "manual-update-rebinds",
    stages=("update",),
    causes=("manual-update-rebinds", "step-missing"),
    source="pytorch/pytorch#74158",
)
def manual_update_rebinds(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        model.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if bug:
                    p = p - 0.04 * p.grad
                else:
                    p -= 0.04 * p.grad
        return loss

    return regression(train_step=train_step)


@case(
    "optimizer-recreated-each-step",
    stages=("update",),
    causes=("optimizer-recreated-each-step",),
    source="fastai/fastai#369",
)
def optimizer_recreated_each_step(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        return plain_step(model, batch, Adam(model.parameters(), 0.01) if bug else optimizer, loss_fn, step)

    return classification(train_step=train_step)


@case(
    "optimizer-stale-head",
    stages=("update",),
    causes=("optimizer-stale-head", "not-in-optimizer"),
    source="microsoft/nni#4521",
)
def optimizer_stale_head(bug):
    model = mlp(8, 20, 5)
    before = Adam(model.parameters(), 0.01)
    model[2] = nn.Linear(20, 3)  # a head for the new task
    return classification(model=model, optimizer=before if bug else Adam(model.parameters(), 0.01))


@case(
    "scaler-bypassed",
    stages=("update",),
    causes=("scaler-bypassed",),
    source="IAHispano/Applio#860",
)
def scaler_bypassed(bug):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        if bug:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss

    return regression(train_step=train_step, scaler=scaler)


@case(
    "scaler-update-missing",
    stages=("update",),
    causes=("scaler-update-missing",),
    source="Haian-Jin/LVSM#19",
)
def scaler_update_missing(bug):
    scaler = torch.amp.GradScaler("cpu")

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not bug:
            scaler.update()
        return loss

    return classification(train_step=train_step, scaler=scaler)


@case(
    "scaler-unscales-twice",
    stages=("update",),
    causes=("scaler-order",),
    source="microsoft/Swin-Transformer#311",
)
def scaler_unscales_twice(bug):
    scaler = torch.amp.GradScaler("cpu")

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss / 2).backward()
        if bug or step % 2:
            scaler.unscale_(optimizer)
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss

    return classification(train_step=train_step, scaler=scaler, accumulation_steps=2)


@case(
    "unscale-each-micro-batch",
    stages=("update",),
    causes=("unscale-each-micro-batch",),
    source="pytorch/pytorch#36601",
)
def unscale_each_micro_batch(bug):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss / 4).backward()
        if bug:
            scaler.unscale_(optimizer)
            scaler.update()
        if step % 4 == 3:
            if bug:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return loss

    return classification(train_step=train_step, scaler=scaler, accumulation_steps=4)


@case(
    "scheduler-before-optimizer",
    stages=("update",),
    causes=("scheduler-before-optimizer",),
    source="princeton-vl/RAFT#104",
)
def scheduler_before_optimizer(bug):
    setup = regression()
    scheduler = ExponentialLR(setup["optimizer"], 0.7)

    def train_step(*step):
        if bug:
            scheduler.step()
        loss = plain_step(*step)
        if not bug:
            scheduler.step()
        return loss

    return {**setup, "train_step": train_step, "scheduler": scheduler}


@case(
    "scheduler-per-batch",
    stages=("update",),
    causes=("scheduler-per-batch",),
    source="pytorch/vision#1261",
)
def scheduler_per_batch(bug):
    setup = regression()
    scheduler = StepLR(setup["optimizer"], step_size=2, gamma=0.1)  # meant: every two epochs

    def train_step(*step):
        loss = plain_step(*step)
        if bug:
            scheduler.step()
        return loss

    end = {} if bug else {"on_epoch_end": scheduler.step}
    return {**setup, "train_step": train_step, "scheduler": scheduler, **end}


@case(
    "step-missing",
    stages=("update",),
    causes=("step-missing",),
    source="tedlasai/learn2refocus#5",
)
def step_missing(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        if not bug:
            optimizer.step()
        optimizer.zero_grad()
        return loss

    return classification(train_step=train_step)


class Tied(nn.Module):
    """A language model whose head shares the weight of its embedding."""

    def __init__(self, words, width):
        super().__init__()
        self.word, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.head.weight = self.word.weight

    def forward(self, words):
        return self.head(self.word(words))


@case(
    "tied-weights-broken",
    stages=("update",),
    causes=("tied-weights-broken",),
    source="facebookresearch/lingua#74",
)
def tied_weights_broken(bug):
    words = torch.randint(0, 10, (80,))
    model = Tied(10, 6)
    if bug:
        model.head.weight = nn.Parameter(model.word.weight.detach().clone())  # an initialisation that comes later
    return classification(x=words, y=words.roll(1), model=model, optimizer=SGD(model.parameters(), 0.1))


class IntoACopy(SGD):
    """Writes the update into a contiguous copy where the weight is stored otherwise, as one kernel for Macs did."""

    copies = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                place = p.contiguous() if self.copies else p
                place -= group["lr"] * p.grad


@case(
    "update-on-a-copy",
    stages=("update",),
    causes=("update-on-a-copy",),
    source="https://elanapearl.github.io/blog/2025/the-bug-that-taught-me-pytorch",
)
def update_on_a_copy(bug):
    model = mlp(6, 20, 1)
    model[0].weight = nn.Parameter(0.4 * torch.randn(6, 20).t())
    optimizer = IntoACopy(model.parameters(), 0.04)
    optimizer.copies = bug
    return regression(model=model, optimizer=optimizer)


@case(
    "warmup-zero-division",
    stages=("update",),
    causes=("warmup-zero-division",),
    source="pytorch/torchtitan#1010",
)
def warmup_zero_division(bug):
    setup = regression()
    warmup = np.float64(0 if bug else 3)
    with np.errstate(invalid="ignore"):
        scheduler = LambdaLR(setup["optimizer"], lambda step: float(np.minimum((step + 0.0) / warmup, 1.0)))

    def train_step(*step):
        loss = plain_step(*step)
        scheduler.step()
        return loss

    return {**setup, "train_step": train_step, "scheduler": scheduler}


@case(
    "weight-decay-on-norm",
    stages=("update",),
    causes=("weight-decay-on-norm",),
    source="huggingface/transformers#16908",
    hint=True,
)
def weight_decay_on_norm(bug):
    model = nn.Sequential()
    model.add_module("dense", nn.Linear(8, 20))
    model.add_module("ln", nn.LayerNorm(20))
    model.add_module("act", nn.ReLU())
    model.add_module("out", nn.Linear(20, 3))
    spared = ("bias", "LayerNorm.weight" if bug else "ln.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith(spared) == last], "weight_decay": decay}
        for last, decay in ((False, 0.1), (True, 0.0))
    ]
    return classification(model=model, optimizer=AdamW(groups, lr=0.01))


@case(
    "weights-reset-in-loop",
    stages=("update",),
    causes=("weights-changed-outside",),
    source="huggingface/transformers#17877",
)
def weights_reset_in_loop(bug):
    model = mlp(8, 24, 3)
    first = copy.deepcopy(model.state_dict())

    def start_again():
        if bug:
            model.load_state_dict(first)

    x, y = clusters()
    return classification(x=x, y=y, model=model, on_epoch_end=start_again)


@case(
    "clips-nothing",
    stages=("update", "backward"),
    causes=("clips-nothing",),
    source="pytorch/pytorch#148259",
)
def clips_nothing(bug):
    model = mlp(6, 20, 1)
    other = copy.deepcopy(model)  # what the loop took for the model

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        clip_grad_norm_((other if bug else model).parameters(), 1.0)
        optimizer.step()
        return loss

    return regression(model=model, train_step=train_step)


@case(
    "two-optimizers-one-weight",
    stages=("update",),
    causes=("two-optimizers-one-weight",),
    source="MishaLaskin/curl#28",
)
def two_optimizers_one_weight(bug):
    model = mlp(8, 24, 3)
    rest = model if bug else model[2]
    optimizers = [Adam(model[0].parameters(), 0.01), Adam(rest.parameters(), 0.01)]
    return classification(model=model, optimizer=optimizers[0], optimizers=optimizers)


@case(
    "group-setting-ignored",
    stages=("update",),
    causes=("group-setting-ignored",),
    source="facebookresearch/ConvNeXt-V2#40",
)
def group_setting_ignored(bug):
    model = mlp(6, 20, 1)
    groups = [{"params": part.parameters(), "lr_mult": mult} for part, mult in ((model[0], 1.0), (model[2], 0.02))]
    for group in groups:
        group["lr"] = 2.0 if bug else 2.0 * group["lr_mult"] * 0.02
    return regression(model=model, optimizer=SGD(groups, 2.0))


@case(
    "copied-onto-itself",
    stages=("update",),
    causes=("copied-onto-itself",),
    source="thesouther/MARL#8",
)
def copied_onto_itself(bug):
    model = nn.ModuleDict({"net": mlp(6, 20, 1), "slow": mlp(6, 20, 1)})
    model["slow"].requires_grad_(False)

    def train_step(model, batch, optimizer, loss_fn, step):
        with torch.no_grad():
            wanted = batch[1] + 0.5 * model["slow"](batch[0])
        loss = plain_step(model["net"], (batch[0], wanted), optimizer, loss_fn, step)
        with torch.no_grad():
            for slow, fast in zip(model["slow"].parameters(), model["net"].parameters(), strict=True):
                slow.copy_(slow if bug else fast)
        return loss

    return regression(model=model, optimizer=SGD(model["net"].parameters(), 0.04), train_step=train_step)


@case(
    "ema-pushed-away",
    stages=("update", "reproduce"),
    causes=("ema-pushed-away",),
    source="ostris/ai-toolkit#1034",
)
def ema_pushed_away(bug):
    model = mlp(6, 20, 1)
    slow = copy.deepcopy(model)

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = plain_step(model, batch, optimizer, loss_fn, step)
        with torch.no_grad():
            for average, p in zip(slow.parameters(), model.parameters(), strict=True):
                average.sub_((p if bug else average) - (average if bug else p), alpha=0.2)
        return loss

    return regression(model=model, train_step=train_step, ema_model=slow)
