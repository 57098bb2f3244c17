"""The exercises of lesson 06: the gradient of a large batch from micro-batches, and the order of a scaled step."""

import torch
from torch.nn.functional import cross_entropy

from dxdy_nb.lesson.exercise import Exercise, Mistake


def added(w, losses):
    """Return the gradient of a sum of losses of w, one backward each."""
    w = w.detach().clone().requires_grad_()
    for loss in losses:
        loss(w).backward()
    return w.grad


def squares(x, y):
    return lambda w: (x @ w - y).square()


def labels(x, y, reduction="sum"):
    return lambda w: cross_entropy(x @ w, y, reduction=reduction)


def mean_over_parts(w, batches):
    return added(w, [lambda w, b=b: squares(*b)(w).mean() / len(batches) for b in batches])


def any_parts(w, batches):
    total = sum(len(y) for _, y in batches)
    return added(w, [lambda w, b=b: squares(*b)(w).sum() / total for b in batches])


def mean_over_all(w, batches):
    total = sum(len(y) for _, y in batches)
    return added(w, [lambda w, b=b: squares(*b)(w).mean() / total for b in batches])


def sum_over_parts(w, batches):
    return added(w, [lambda w, b=b: squares(*b)(w).sum() / len(batches) for b in batches])


def undivided_sum(w, batches):
    return added(w, [lambda w, b=b: squares(*b)(w).sum() for b in batches])


def undivided_mean(w, batches):
    return added(w, [lambda w, b=b: squares(*b)(w).mean() for b in batches])


def last_part(w, batches):
    return any_parts(w, batches[-1:])


def counted_parts(w, batches):
    total = sum((y != -100).sum() for _, y in batches)
    return added(w, [lambda w, b=b: labels(*b)(w) / total for b in batches])


def counts_everything(w, batches):
    total = sum(len(y) for _, y in batches)
    return added(w, [lambda w, b=b: labels(*b)(w) / total for b in batches])


def mean_of_means(w, batches):
    return added(w, [lambda w, b=b: labels(*b, "mean")(w) / len(batches) for b in batches])


def undivided_labels(w, batches):
    return added(w, [lambda w, b=b: labels(*b)(w) for b in batches])


def weighted_by_length(w, batches):
    total = sum(len(y) for _, y in batches)
    return added(w, [lambda w, b=b: labels(*b, "mean")(w) * len(b[1]) / total for b in batches])


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(6)
EQUAL = (numbers(3), [(numbers(4, 3), numbers(4)) for _ in range(3)])
UNEQUAL = (numbers(3), [(numbers(n, 3), numbers(n)) for n in (5, 2, 1)])
LABELLED = [
    (numbers(4, 3), torch.tensor([0, 1, -100, -100])),
    (numbers(3, 3), torch.tensor([2, 0, 1])),
    (numbers(2, 3), torch.tensor([-100, 2])),
]
EMPTY = (numbers(2, 3), torch.tensor([-100, -100]))

EXERCISES = (
    Exercise(
        "equal_parts",
        mean_over_parts,
        asks="parts of equal size give the gradient of the mean over all samples",
        trials=(EQUAL,),
        mistakes=(Mistake(undivided_mean, "the gradient is as many times too large as there are parts."),),
    ),
    Exercise(
        "any_parts",
        any_parts,
        asks="the gradient is that of the mean squared error over all samples, however they are split",
        trials=(EQUAL, UNEQUAL),
        mistakes=(
            Mistake(mean_over_parts, "a small part counts as much as a large one. What does a mean hide?"),
            Mistake(mean_over_all, "each mean got the same small weight: too small. What do the weights add up to?"),
            Mistake(sum_over_parts, "it is too large, by the mean size of a part. Divide by samples, not by parts."),
            Mistake(undivided_sum, "it is the gradient of the sum over all samples. What makes a mean of a sum?"),
            Mistake(undivided_mean, "the means were added as they are: too large, and small parts count too much."),
            Mistake(last_part, "only the last part arrived. Was something cleared or replaced between two backwards?"),
        ),
    ),
    Exercise(
        "counted_parts",
        counted_parts,
        asks="the gradient is that of the mean cross-entropy over all labels that count, however they are split",
        trials=((numbers(3, 3), LABELLED), (numbers(3, 3), [*LABELLED, EMPTY])),
        mistakes=(
            Mistake(counts_everything, "labels that do not count were counted. Which ones belong in the denominator?"),
            Mistake(mean_of_means, "a mean of means: a label counts more where few are left. And what is 0/0?"),
            Mistake(undivided_labels, "that is the gradient of a sum over labels. What makes a mean of it?"),
            Mistake(weighted_by_length, "each mean was weighted by its part's length. How many labels in it count?"),
        ),
    ),
    Exercise(
        "line_order",
        ["E", "C", "G", "F", "B", "D", "A"],
        asks="one scaled step with a clip of the real gradients",
        before=(
            ("E", "G", "zero_grad comes after backward and throws away what backward has just computed."),
            ("C", "G", "backward comes before there is a loss. What does it start from?"),
            ("G", "F", "unscale_ comes before backward: there is nothing yet that holds the scale."),
            ("F", "B", "the clip comes before unscale_. How large is a norm that still holds the scale?"),
            ("B", "D", "the clip comes after the step. Which gradients did the step use?"),
            ("D", "A", "the scale changes before the step. What would the step divide by?"),
        ),
    ),
)  # fmt: skip
