"""What a right answer is in lesson 00, and what to say to a wrong one."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake

LINE = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
UNEVEN = torch.tensor([0.5, 1.5, -1.0])
TARGETS = torch.tensor([1.0, -2.0, 0.5])


def step(w, b, x, y, lr):
    """Return w and b after one step of gradient descent on the mean squared error, by the pen's formula."""
    residual = w * x + b - y
    return torch.stack([w - lr * 2 * (residual * x).mean(), b - lr * 2 * residual.mean()])


def uphill(w, b, x, y, lr):
    """Step the wrong way."""
    return step(w, b, x, y, -lr)


def summed(w, b, x, y, lr):
    """Use a sum over the samples as the loss."""
    return step(w, b, x, y, lr * len(x))


def whole(w, b, x, y, lr):
    """Forget the learning rate."""
    return step(w, b, x, y, 1.0)


def lazy(w, b, x, y, lr):
    """Move w only."""
    return torch.stack([step(w, b, x, y, lr)[0], b])


def unsquared(w, b, x, y, lr):
    """Use the mean residual, without a square."""
    return torch.stack([w - lr * x.mean(), b - lr])


def repeat(x, y, lr, steps):
    """Return w and b after some steps from zero."""
    wb = torch.zeros(2)
    for _ in range(steps):
        wb = step(wb[0], wb[1], x, y, lr)
    return wb


def accumulated(x, y, lr, steps):
    """Never clear the gradients."""
    wb, total = torch.zeros(2), torch.zeros(2)
    for _ in range(steps):
        total = total + (wb - step(wb[0], wb[1], x, y, lr))
        wb = wb - total
    return wb


def once(x, y, lr, steps):
    """Ignore the number of steps."""
    return repeat(x, y, lr, 1)


def one_more(x, y, lr, steps):
    """Count one step too many."""
    return repeat(x, y, lr, steps + 1)


def still(x, y, lr, steps):
    """Return the start."""
    return torch.zeros(2)


EXERCISES = (
    Exercise(
        "chain_rule",
        30.0,
        asks="the outer derivative, taken at the inner value, times the inner derivative",
        mistakes=(
            Mistake(10.0, "one factor of the chain is missing: how fast does the inside, 3x - 1, change with x?"),
            Mistake(
                12.0, "the outer derivative is taken at the wrong place: what is the value of the inside at x = 2?"
            ),
        ),
    ),
    Exercise(
        "broadcast",
        (5, 4, 3),
        asks="shapes are lined up at their last dimension; a dimension of size 1, or a missing one, is repeated",
        mistakes=(
            Mistake((4, 3), "a dimension that only one of the shapes has must survive. Which one is it?"),
            Mistake((5, 1, 3), "all four rows of the second tensor must survive. What stands above them?"),
            Mistake((5, 4, 1), "the last dimension pairs a 3 with a 1. Which of the two sizes wins?"),
        ),
    ),
    Exercise(
        "sgd_step",
        2.3,
        asks="the old weight, and a step against the gradient whose length is lr times the gradient",
        mistakes=(
            Mistake(1.7, "this step goes uphill: a gradient points to where the loss grows."),
            Mistake(5.0, "the step is as long as the gradient itself. Which factor shortens it?"),
            Mistake(0.3, "this is the change alone. What does it change?"),
            Mistake(2.1, "the length of the step does not depend on the gradient. Which factor is missing?"),
        ),
    ),
    Exercise(
        "order",
        ["R", "S", "Q", "T", "P"],
        asks="each line finds what it reads",
        before=(
            ("S", "Q", "the loss reads `prediction`, which is not there yet. Which line makes it?"),
            ("Q", "T", "backward starts from `loss`, which is not there yet. Which line makes it?"),
            ("T", "P", "the step would use the gradients of an earlier step. Which line makes this step's?"),
            ("R", "T", "backward adds to the old numbers in .grad; and what is cleared after it, no step can use."),
        ),
    ),
    Exercise(
        "line_step",
        step,
        asks="w and b both move against their gradient of the mean squared error, lr times its size",
        trials=(
            (torch.tensor(0.0), torch.tensor(0.0), LINE, 2 * LINE + 1, 0.1),
            (torch.tensor(1.5), torch.tensor(-0.5), UNEVEN, TARGETS, 0.05),
        ),
        mistakes=(
            Mistake(uphill, "after this step the loss is larger than before. Which way does a gradient point?"),
            Mistake(summed, "the step grows with the number of samples. Is the loss a mean over them, or a sum?"),
            Mistake(whole, "the step does not shrink when lr shrinks. Where does lr enter?"),
            Mistake(lazy, "the second entry has not moved. Which gradient is not used?"),
            Mistake(
                unsquared,
                "the step is the same however far the line is off. What becomes of a residual before the mean?",
            ),
        ),
        rtol=1e-4,
    ),
    Exercise(
        "fit",
        repeat,
        asks="steps from w = 0 and b = 0, each with the gradients of its own loss alone",
        trials=(
            (LINE, 2 * LINE + 1, 0.1, 3),
            (UNEVEN, TARGETS, 0.05, 5),
        ),
        mistakes=(
            Mistake(accumulated, "from the second step on it goes too far: what earlier steps left is still in .grad."),
            Mistake(once, "the result is that of a single step, whatever `steps` says. What stands inside the loop?"),
            Mistake(one_more, "one step too many is taken. How often does the loop run?"),
            Mistake(still, "w and b are where they started. Does the update reach the tensors that are returned?"),
        ),
        rtol=1e-4,
    ),
)
