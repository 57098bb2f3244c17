"""The patients of lesson 07: small training set-ups, most of them with one fault, each made by a function of its own.

A function takes a healthy set-up and spoils one thing; the line above it says at which stage, what a report calls it,
and why it is one. A set-up is a dictionary of keywords as ``dx.diagnose`` takes them.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dxdy_nb.lesson.exercise import Lesson, Note
from dxdy_nb.training import datasets

SetUp = dict[str, Any]
STAGES = ("data", "forward", "loss", "backward", "update", "healthy")


def standardised(x: Tensor) -> Tensor:
    """Return pictures with mean 0 and variance 1 over the training set."""
    return (x - SPLITS.train.x.mean()) / SPLITS.train.x.std()


def ink(x: Tensor) -> Tensor:
    """Return how much ink each standardised picture holds, (N, 1), with variance 1 over the training set."""
    return x.flatten(1).mean(1, keepdim=True) / X.flatten(1).mean(1).std()


SPLITS = datasets.load("digits")
X, Y = standardised(SPLITS.train.x), SPLITS.train.y  # (1199, 1, 8, 8) and (1199,)
HELD_X, HELD_Y = standardised(SPLITS.validation.x), SPLITS.validation.y  # kept apart


def train_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_fn: Any, step: int) -> Tensor:
    """Take the usual step. Where the step itself is at fault, the patient brings another one."""
    x, y = batch
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def sgd(model: nn.Module, lr: float = 0.02, **options: Any) -> torch.optim.SGD:
    """Return the optimizer that most patients have."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def batches(x: Tensor, y: Tensor, seed: int, *, shuffle: bool = True) -> DataLoader[Any]:
    """Return batches of 64, shuffled in an order that the seed decides."""
    return DataLoader(TensorDataset(x, y), 64, shuffle=shuffle, generator=torch.Generator().manual_seed(seed))


def classifier(seed: int) -> SetUp:
    """Return a healthy set-up that names the digit: an MLP, cross-entropy, SGD with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": batches(X, Y, seed),
        "val_loader": batches(HELD_X, HELD_Y, seed, shuffle=False),
        "optimizer": sgd(model),
        "train_step": train_step,
    }


def regressor(seed: int) -> SetUp:
    """Return a healthy set-up that estimates the ink: the same MLP with one output, squared error."""
    run = classifier(seed)
    run["model"][5] = nn.Linear(32, 1)
    run["optimizer"] = sgd(run["model"])
    held = batches(HELD_X, ink(HELD_X), seed, shuffle=False)
    return run | {"loss_fn": nn.MSELoss(), "loader": batches(X, ink(X), seed), "val_loader": held}


@dataclass(frozen=True)
class Patient:
    """A set-up to be made, and what is known of it: the stage at fault, the cause a report may name, and the reason."""

    stage: str
    cause: str
    reason: str
    make: Callable[[int], SetUp]


PATIENTS: list[Patient] = []


def patient(stage: str, cause: str, reason: str) -> Callable[[Callable[[int], SetUp]], Callable[[int], SetUp]]:
    """Put a function on the list of patients."""

    def listed(make: Callable[[int], SetUp]) -> Callable[[int], SetUp]:
        PATIENTS.append(Patient(stage, cause, reason, make))
        return make

    return listed


def draw(seed: int, number: int) -> Sequence[Patient]:
    """Return patients in an order that the seed decides: among the first ten one or two of each stage."""
    order = random.Random(seed).sample(PATIENTS, len(PATIENTS))
    by_stage = [[p for p in order if p.stage == stage] for stage in dict.fromkeys(p.stage for p in order)]
    mixed = [p for turn in itertools.zip_longest(*by_stage) for p in turn if p is not None]
    first = random.Random(seed).sample(mixed[:10], 10)
    return (first + mixed[10:])[:number]


def verdict(lesson: Lesson, name: str, said: str | None, patient: Patient) -> Note:
    """Return what becomes of an answer, with the reason; where none was given, both stay folded."""
    question = f"patient {name}"
    lesson.predict(question, said)
    note = lesson.reveal(question, patient.stage)
    if said is None:
        return Note("open", f"{question}: no stage named.", f"{patient.stage}. {patient.reason}")
    return Note(note.state, f"{question}: you said {said}, it is {patient.stage}. {patient.reason}")


# ---- healthy ----


@patient("healthy", "", "Nothing is wrong. Dropout makes the loss noisy, and in training mode it should.")
def nothing_wrong(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"].insert(5, nn.Dropout(0.2))
    return run


@patient(
    "healthy",
    "",
    "Nothing is wrong. A squared error has another first value than cross-entropy, and no ln 10 to begin at.",
)
def nothing_wrong_in_regression(seed: int) -> SetUp:
    return regressor(seed)


# ---- data ----


@patient(
    "data",
    "nan-in-inputs",
    "One of the 1,199 pictures holds a NaN. Its batch makes the loss NaN, and one update later every weight is.",
)
def one_bad_sample(seed: int) -> SetUp:
    x = X.clone()
    x[200, 0, 3, 3] = float("nan")
    return classifier(seed) | {"loader": batches(x, Y, seed)}


@patient(
    "data",
    "labels-shifted-by-one",
    "Each picture has the label of the picture before it: the labels carry no signal about their own pictures.",
)
def neighbours_labels(seed: int) -> SetUp:
    data = TensorDataset(X, Y.roll(1))
    return classifier(seed) | {"loader": batches(*data.tensors, seed), "dataset": data}


@patient(
    "data",
    "same-batch-forever",
    "The iterator is made anew at each step, so that every step sees one batch. The net learns it by heart.",
)
def first_batch_again(seed: int) -> SetUp:
    run = classifier(seed)
    first = next(iter(run["loader"]))
    return run | {"loader": [[part.clone() for part in first] for _ in range(19)]}


@patient(
    "data",
    "no-shuffle-sorted",
    "The pictures are sorted by class and not shuffled: each batch pulls all weights towards the one digit it has.",
)
def sorted_by_class(seed: int) -> SetUp:
    order = Y.argsort(stable=True)
    return classifier(seed) | {"loader": batches(X[order], Y[order], seed, shuffle=False)}


# ---- forward ----


class RowsFirst(nn.Module):
    """Is meant to exchange two axes. ``view`` only cuts the same numbers anew; ``transpose(0, 1)`` was needed."""

    def forward(self, x: Tensor) -> Tensor:  # (B, 64)
        rows = x.view(8, -1, 8)  # meant: row, picture, pixel
        return rows.transpose(0, 1).flatten(1)  # (B, 64) again, and no row of it is one picture


@patient(
    "forward",
    "view-not-permute",
    "view stands where an exchange of axes was meant. The shape is right, and each row holds pieces of 8 pictures.",
)
def mixed_pictures(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"].insert(1, RowsFirst())
    return run


@patient(
    "forward",
    "dead-relu",
    "A bias of -10 keeps a whole layer below zero: its ReLUs are off for every picture, and nothing passes back.",
)
def dead_units(seed: int) -> SetUp:
    run = classifier(seed)
    nn.init.constant_(run["model"][3].bias, -10.0)
    return run


@patient(
    "forward",
    "left-in-eval",
    "A validation left the model in eval mode, so that dropout is off. The curve only looks smoother for it.",
)
def never_back_to_train(seed: int) -> SetUp:
    run = nothing_wrong(seed)
    run["model"].eval()
    return run


class Dropped(nn.Module):
    """Dropout by the function, which does not know of eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2)  # training=self.training is missing


@patient(
    "forward",
    "functional-dropout-eval",
    "F.dropout was not told the mode, so that it drops units in evaluation too. Training shows nothing of it.",
)
def dropout_always(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"].insert(5, Dropped())
    return run


class PerPixel(nn.Module):
    """Standardises each pixel over the batch by hand."""

    def forward(self, x: Tensor) -> Tensor:  # (B, 64)
        return (x - x.mean(0)) / x.std(0)  # a pixel that is blank in all pictures: 0 / 0


@patient(
    "forward",
    "nonfinite-activation",
    "Each pixel is divided by its spread over the batch, and the corners are blank in every picture: 0 / 0 is NaN.",
)
def blank_pixels(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"].insert(1, PerPixel())
    return run


# ---- loss ----


@patient(
    "loss",
    "softmax-then-ce",
    "The model returns probabilities, and cross-entropy takes a softmax of them again: 1.46 is as low as it goes.",
)
def softmax_twice(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"].append(nn.Softmax(dim=1))
    return run


@patient(
    "loss",
    "wrong-sign",
    "The minus before the log-probability is missing. Going down makes the right answer less likely.",
)
def lost_minus(seed: int) -> SetUp:
    return classifier(seed) | {"loss_fn": lambda out, y: out.log_softmax(1).gather(1, y[:, None]).mean()}


@patient(
    "loss",
    "nll-on-logits",
    "nll_loss is made for log-probabilities and gets logits: it has no floor, and the logits grow without end.",
)
def logits_for_nll(seed: int) -> SetUp:
    return classifier(seed) | {"loss_fn": nn.NLLLoss()}


@patient(
    "loss",
    "mse-broadcast",
    "Outputs are (64, 1), targets (64,): their difference is 64 by 64, each output against every target.",
)
def broadcast_targets(seed: int) -> SetUp:
    run = regressor(seed)
    return run | {"loader": batches(X, ink(X)[:, 0], seed), "val_loader": batches(HELD_X, ink(HELD_X)[:, 0], seed)}


@patient(
    "loss",
    "log-of-zero",
    "Scores are cut at zero and divided by their sum, in place of a softmax. A share of 0 has an infinite logarithm.",
)
def shares(seed: int) -> SetUp:

    def log_of_shares(out: Tensor, y: Tensor) -> Tensor:
        positive = out.relu()
        share = positive / positive.sum(1, keepdim=True)
        return -share.gather(1, y[:, None]).log().mean()

    return classifier(seed) | {"loss_fn": log_of_shares}


# ---- backward ----


@patient(
    "backward",
    "zero-grad-missing",
    "Nobody clears the gradients, so that each update uses the sum of all gradients since the first step.",
)
def never_cleared(seed: int) -> SetUp:

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_fn: Any, step: int) -> Tensor:
        x, y = batch
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return classifier(seed) | {"train_step": step}


@patient(
    "backward",
    "zero-grad-after-backward",
    "zero_grad stands between backward and step, and throws away what backward has just computed.",
)
def cleared_too_late(seed: int) -> SetUp:

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss_fn: Any, step: int) -> Tensor:
        x, y = batch
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss

    return classifier(seed) | {"train_step": step}


@patient(
    "backward",
    "vanishing-gradients",
    "Ten sigmoids in a row, each passing on at most a quarter of the gradient: the first layers get next to none.",
)
def ten_sigmoids(seed: int) -> SetUp:
    run = classifier(seed)
    layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))
    return run | {"model": model, "optimizer": sgd(model)}


@patient(
    "backward",
    "nan-gradient",
    "A penalty takes the root of the logits' variance, and the head starts at zero. There a root's slope is infinite.",
)
def root_at_zero(seed: int) -> SetUp:
    run = classifier(seed)
    nn.init.zeros_(run["model"][5].weight)
    nn.init.zeros_(run["model"][5].bias)

    def penalised(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + 1e-3 * out.var(1).sqrt().mean()

    return run | {"loss_fn": penalised}


# ---- update ----


@patient(
    "update",
    "lr-too-large",
    "The learning rate is a hundred times too large: each step overshoots by more than the one before it.",
)
def rate_too_large(seed: int) -> SetUp:
    run = regressor(seed)
    return run | {"optimizer": torch.optim.SGD(run["model"].parameters(), lr=2.0)}


@patient(
    "update",
    "lr-too-small",
    "The learning rate is a million times too small: the direction is right, and nothing gets anywhere.",
)
def rate_too_small(seed: int) -> SetUp:
    run = classifier(seed)
    return run | {"optimizer": sgd(run["model"], lr=2e-8)}


@patient("update", "gradient-ascent", "maximize=True: the optimizer climbs the loss that it should go down.")
def uphill(seed: int) -> SetUp:
    run = classifier(seed)
    return run | {"optimizer": sgd(run["model"], maximize=True)}


@patient(
    "update",
    "optimizer-stale-head",
    "The last layer was replaced after the optimizer had been built: it gets gradients, and nobody moves it.",
)
def stale_head(seed: int) -> SetUp:
    run = classifier(seed)
    run["model"][5] = nn.Linear(32, 10)
    return run
