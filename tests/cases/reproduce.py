"""Faults that show when a run is evaluated, stopped and resumed, or run again."""

import copy

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR

from cases.builders import batches, classification, clusters, mlp, plain_step, regression, shuffled
from cases.registry import case, seed


@case(
    "checkpoint-omits-frozen",
    stages=("reproduce",),
    causes=("checkpoint-omits-frozen",),
    source="deepspeedai/DeepSpeed#3090",
)
def checkpoint_omits_frozen(bug, process=0):
    seed(process)
    model = mlp(8, 20, 3)
    model[0].requires_grad_(False)
    setup = classification(model=model, optimizer=SGD(model[2].parameters(), 0.05))

    def save():
        kept = {name for name, p in model.named_parameters() if p.requires_grad or not bug}
        return copy.deepcopy({name: value for name, value in model.state_dict().items() if name in kept})

    def resume(checkpoint):
        again = checkpoint_omits_frozen(bug, process=1)  # a new process draws other first weights
        again["model"].load_state_dict(checkpoint, strict=False)
        return again

    return {**setup, "save": save, "resume": resume}


@case(
    "eval-updates-bn",
    stages=("forward", "reproduce"),
    causes=("eval-updates-bn",),
    source="wolny/pytorch-3dunet#53",
)
def eval_updates_bn(bug):
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    x, y = clusters()
    held = x[:30] + 3

    def validate():
        model.train(bug)
        with torch.no_grad():
            right = (model(held).argmax(1) == y[:30]).float().mean()
        model.train()
        return right

    return classification(x=x, y=y, model=model, validate=validate)


def resumable(start, parts):
    """Return a set-up that saves the states of these parts of it, and resumes from them in a new start."""
    setup = start()

    def save():
        return {part: copy.deepcopy(setup[part].state_dict()) for part in parts}

    def resume(checkpoint):
        again = start()
        for part, state in checkpoint.items():
            again[part].load_state_dict(state)
        return again

    return {**setup, "save": save, "resume": resume}


@case(
    "resume-no-optimizer-state",
    stages=("reproduce",),
    causes=("resume-no-optimizer-state",),
    source="PolymathicAI/the_well#77",
)
def resume_no_optimizer_state(bug):
    def start():
        seed()
        return classification()

    return resumable(start, ["model"] if bug else ["model", "optimizer"])


@case(
    "resume-no-scheduler",
    stages=("reproduce",),
    causes=("resume-no-scheduler",),
    source="PolymathicAI/the_well#77",
)
def resume_no_scheduler(bug):
    def start():
        seed()
        setup = regression()
        scheduler = StepLR(setup["optimizer"], 3, 0.5)

        def train_step(*step):
            loss = plain_step(*step)
            scheduler.step()
            return loss

        return {**setup, "train_step": train_step, "scheduler": scheduler}

    return resumable(start, ["model"] if bug else ["model", "optimizer", "scheduler"])


class Branches(nn.Module):
    """Two layers of one shape, made in one order or the other."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(6, 6))

    def forward(self, x):
        return self.get_submodule("right")(self.get_submodule("left")(x).relu())


@case(
    "resume-param-order-swapped",
    stages=("reproduce",),
    causes=("resume-param-order-swapped",),
    source="pytorch/pytorch#1489",
)
def resume_param_order_swapped(bug):
    orders = iter([("left", "right")] + [("right", "left")] * 20)  # the code was tidied up between the two runs

    def start():
        seed()
        model = Branches(next(orders))
        named = dict(model.named_parameters())
        parameters = [named[name] for name in (named if bug else sorted(named))]
        x = torch.randn(64, 6)
        return regression(x=x, y=x.flip(1), model=model, optimizer=Adam(parameters, 0.01))

    return resumable(start, ["model", "optimizer"])


@case(
    "resume-replays-order",
    stages=("reproduce",),
    causes=("resume-replays-order",),
    source="huggingface/transformers#17032",
)
def resume_replays_order(bug):
    def start():
        seed()
        x, y = clusters(3, 48)
        model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3))
        return classification(x=x, y=y, model=model, loader=shuffled(x, y, 12))

    setup = resumable(start, ["model", "optimizer"])

    def save():
        return {"states": setup["save"](), "random": torch.get_rng_state()}

    def resume(checkpoint):
        again = setup["resume"](checkpoint["states"])
        if not bug:
            torch.set_rng_state(checkpoint["random"])
        return again

    return {**setup, "save": save, "resume": resume}


@case(
    "unseeded-run",
    stages=("reproduce",),
    causes=("unseeded-run",),
    source="emidan19/deep-tempest#13",
    hint=True,
)
def unseeded_run(bug):
    if bug:
        torch.seed()  # what a process starts from when nobody seeds it
    x, y = clusters()
    return classification(x=x, y=y, loader=shuffled(x, y))


@case(
    "best-state-aliased",
    stages=("reproduce",),
    causes=("best-state-aliased",),
    source="https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
)
def best_state_aliased(bug):
    model = mlp(8, 24, 3)
    x, y = clusters()
    state = model.state_dict()
    return classification(
        x=x, y=y, model=model, val_loader=batches(x + 0.1, y), best_state=state if bug else copy.deepcopy(state)
    )


class Continues:
    """A loader that goes on where it stands, and can be told where that is."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@case(
    "resume-restarts-epoch",
    stages=("reproduce",),
    causes=("resume-replays-order",),
    source="huggingface/transformers#38939",
)
def resume_restarts_epoch(bug):
    def start():
        seed()
        setup = classification()
        return {**setup, "loader": Continues(setup["loader"])}

    return resumable(start, ["model", "optimizer"] if bug else ["model", "optimizer", "loader"])


@case(
    "strict-false-loads-nothing",
    stages=("reproduce",),
    causes=("strict-false-loads-nothing",),
    source="pytorch/examples#1029",
)
def strict_false_loads_nothing(bug, process=0):
    seed(process)
    model = mlp(8, 20, 3)

    def save():
        return {f"module.{name}": value.clone() for name, value in model.state_dict().items()}

    def resume(checkpoint):
        again = strict_false_loads_nothing(bug, process=1)
        known = checkpoint if bug else {name.removeprefix("module."): value for name, value in checkpoint.items()}
        again["model"].load_state_dict(known, strict=False)
        return again

    return classification(model=model, optimizer=SGD(model.parameters(), 0.05), save=save, resume=resume)


class Standardises(nn.Module):
    """Inputs are scaled by a running mean, which may be a plain attribute."""

    def __init__(self, buffer):
        super().__init__()
        self.body = mlp(6, 20, 1)
        if buffer:
            self.register_buffer("mean", torch.zeros(6))
        else:
            self.mean = torch.zeros(6)

    def forward(self, x):
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.mean(0)
        return self.body(x - self.mean)


@case(
    "statistics-not-a-buffer",
    stages=("reproduce", "forward"),
    causes=("resume-differs",),
    source="hill-a/stable-baselines#228",
)
def statistics_not_a_buffer(bug, process=0):
    seed(process)
    setup = regression(x=torch.randn(64, 6) + 2, model=Standardises(not bug))
    return {**setup, **_kept(setup, ("model", "optimizer"), lambda: statistics_not_a_buffer(bug, process=1))}


@case(
    "scaler-not-saved",
    stages=("reproduce",),
    causes=("resume-differs",),
    source="huggingface/transformers#11663",
)
def scaler_not_saved(bug, process=0):
    seed(process)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    setup = regression(train_step=train_step, scaler=scaler)
    saved = ("model", "optimizer", *["scaler"] * (not bug))
    return {**setup, **_kept(setup, saved, lambda: scaler_not_saved(bug, process=1))}


@case(
    "scheduler-built-after-load",
    stages=("reproduce", "update"),
    causes=("resume-no-scheduler",),
    source="ultralytics/yolov5#292",
)
def scheduler_built_after_load(bug, process=0):
    seed(process)
    setup = regression()
    scheduler = LambdaLR(setup["optimizer"], lambda epoch: 0.5**epoch)
    setup |= {"scheduler": scheduler, "on_epoch_end": scheduler.step}
    kept = _kept(setup, ("model", "optimizer", "scheduler"), lambda: scheduler_built_after_load(bug, process=1))

    def resume(checkpoint):
        again = kept["resume"](checkpoint)
        if bug:
            again["scheduler"] = LambdaLR(again["optimizer"], lambda epoch: 0.5**epoch)  # sets its first rate
            again["scheduler"].load_state_dict(checkpoint["scheduler"])
        return again

    return {**setup, **kept, "resume": resume}


def _kept(setup, names, again):
    """Return how a set-up saves some of its parts, and how another process loads them."""

    def resume(checkpoint):
        fresh = again()
        for name in names:
            fresh[name].load_state_dict(checkpoint[name])
        return fresh

    return {"save": lambda: copy.deepcopy({name: setup[name].state_dict() for name in names}), "resume": resume}
