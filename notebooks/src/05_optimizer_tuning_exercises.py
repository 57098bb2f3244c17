"""The exercises of lesson 05: be the optimizer, and be compared with torch's own."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def by_torch(make, w, gradients):
    """Return a weight after torch's optimizer has been fed the gradients."""
    weight = torch.nn.Parameter(w.clone())
    optimizer = make([weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def momentum_sgd(w, gradients, lr, beta):
    """Ask torch."""
    return by_torch(lambda p: torch.optim.SGD(p, lr=lr, momentum=beta), w, gradients)


def with_momentum(w, gradients, lr, fade, join, uphill=False, ahead=0.0):
    """Return what a velocity gives that fades and joins as said."""
    v = torch.zeros_like(w)
    for g in gradients:
        v = fade * v + join * g
        w = w + (lr if uphill else -lr) * (v + ahead * g)
    return w


def damped(w, gradients, lr, beta):
    """Average the gradient in place of adding it."""
    return with_momentum(w, gradients, lr, beta, 1 - beta)


def uphill(w, gradients, lr, beta):
    """Add the step."""
    return with_momentum(w, gradients, lr, beta, 1, uphill=True)


def forgetful(w, gradients, lr, beta):
    """Leave the old velocity out."""
    return with_momentum(w, gradients, lr, 0, 1)


def undamped(w, gradients, lr, beta):
    """Never let the velocity fade."""
    return with_momentum(w, gradients, lr, 1, 1)


def nesterov(w, gradients, lr, beta):
    """Look ahead."""
    v = torch.zeros_like(w)
    for g in gradients:
        v = beta * v + g
        w = w - lr * (g + beta * v)
    return w


def fades_by_the_rest(w, gradients, lr, beta):
    """Multiply the old velocity by 1 - beta."""
    return with_momentum(w, gradients, lr, 1 - beta, 1)


def exchanged(w, gradients, lr, beta):
    """Put beta where the rate belongs, and the rate where beta does."""
    return with_momentum(w, gradients, beta, lr, 1)


def rate_in_the_velocity_twice(w, gradients, lr, beta):
    """Multiply by the rate where the gradient joins, and again."""
    return with_momentum(w, gradients, lr, beta, lr)


def from_the_start(w, gradients, lr, beta):
    """Take each step from where the walk began."""
    v, start = torch.zeros_like(w), w
    for g in gradients:
        v = beta * v + g
        w = start - lr * v
    return w


def adam(w, gradients, lr, beta1, beta2):
    """Ask torch."""
    return by_torch(lambda p: torch.optim.Adam(p, lr=lr, betas=(beta1, beta2)), w, gradients)


def adam_like(
    w, gradients, lr, beta1, beta2, *, correct=(True, True), count=1, root=True, inside=False, square=True, eps=1e-8
):
    """Return what Adam gives with one of its parts another."""
    m, s = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, start=count):
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g**2 if square else g.abs())
        mean = m / (1 - beta1**t) if correct[0] else m
        size = s / (1 - beta2**t) if correct[1] else s
        under = size.sqrt() if root else size
        w = w - lr * mean / ((size + eps).sqrt() if inside else under + eps)
    return w


def uncorrected(*arguments):
    """Correct neither average."""
    return adam_like(*arguments, correct=(False, False))


def half_corrected(*arguments):
    """Correct the mean alone."""
    return adam_like(*arguments, correct=(True, False))


def other_half_corrected(*arguments):
    """Correct the square alone."""
    return adam_like(*arguments, correct=(False, True))


def counted_late(*arguments):
    """Begin to count at 2."""
    return adam_like(*arguments, count=2)


def corrected_as_at_first(w, gradients, lr, beta1, beta2):
    """Correct each step as if it were the first."""
    m, s = torch.zeros_like(w), torch.zeros_like(w)
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * g**2
        w = w - lr * m / (1 - beta1) / ((s / (1 - beta2)).sqrt() + 1e-8)
    return w


def without_eps(*arguments):
    """Divide by the root alone."""
    return adam_like(*arguments, eps=0.0)


def without_root(*arguments):
    """Divide by the square."""
    return adam_like(*arguments, root=False)


def eps_inside(*arguments):
    """Put eps under the root."""
    return adam_like(*arguments, inside=True)


def of_absolute_values(*arguments):
    """Average absolute values, and take their root."""
    return adam_like(*arguments, square=False)


def swapped(w, gradients, lr, beta1, beta2):
    """Exchange the betas."""
    return adam_like(w, gradients, lr, beta2, beta1)


def last_gradient(w, gradients, lr, beta1, beta2):
    """Use the gradient itself over its size, as RMSProp does."""
    s = torch.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        s = beta2 * s + (1 - beta2) * g**2
        w = w - lr * g / ((s / (1 - beta2**t)).sqrt() + 1e-8)
    return w


def gradients(count, seed, size=1.0):
    """Return gradients that a seed decides."""
    drawn = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [size * g for g in drawn]


START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
TINY = [1e-8 * g for g in gradients(3, 2)]  # beside these eps counts

EXERCISES = (
    Exercise(
        "loop_order",
        ["B", "E", "D", "A", "C", "F"],
        asks="inside the loop a loss, its gradients, a step along them, and nothing old in .grad",
        before=(
            ("B", "D", "the forward pass stands before the line that hands out x and y."),
            ("B", "E", "a line of the block stands before the line that opens it."),
            ("D", "A", "backward comes before there is a loss. What does it start from?"),
            ("E", "A", "zero_grad comes after backward: what was in .grad before the loop is still in the first step."),
            ("A", "C", "the optimizer steps before backward. Along which gradients?"),
            ("D", "F", "the loss is written down before it is computed."),
        ),
    ),
    Exercise(
        "momentum_sgd",
        momentum_sgd,
        asks="with beta zero it is plain SGD; along a steady gradient the velocity grows to 1/(1-beta) of it",
        trials=(
            (START, gradients(1, 0), 0.1, 0.9),
            (START, gradients(20, 0), 0.1, 0.9),
            (START, gradients(7, 1, size=5.0), 0.03, 0.5),
            (START, gradients(5, 3), 0.2, 0.0),
        ),
        mistakes=(
            Mistake(damped, "the gradient joins with a factor (1 - beta). That is an average; what does torch add?"),
            Mistake(uphill, "it goes uphill: the step has the sign of the gradient."),
            Mistake(forgetful, "the old velocity plays no part: this is plain SGD. What does beta multiply?"),
            Mistake(undamped, "the velocity never fades. What happens to the old one before the gradient joins?"),
            Mistake(nesterov, "that is Nesterov: the step looks ahead by one gradient more. Which line does that?"),
            Mistake(fades_by_the_rest, "the old velocity fades by 1 - beta. With beta = 0.9, how much of it stays?"),
            Mistake(exchanged, "beta and the rate have changed places. Which one makes the old velocity fade?"),
            Mistake(rate_in_the_velocity_twice, "the rate is in the velocity and in the step. Where does it belong?"),
            Mistake(from_the_start, "each step begins at the first weight. From where does the second step go on?"),
        ),
    ),
    Exercise(
        "adam",
        adam,
        asks="at the first step its length is lr for every gradient well above eps; both averages are corrected by "
        "their own beta to the power of the step, counted from one",
        trials=(
            (START, gradients(1, 0), 0.1, 0.9, 0.999),
            (START, gradients(20, 0), 0.1, 0.9, 0.999),
            (START, gradients(7, 1, size=50.0), 0.01, 0.5, 0.9),
            (START, TINY, 0.1, 0.9, 0.99),
        ),
        mistakes=(
            Mistake(uncorrected, "neither average is corrected for its start at zero. How long is the first step?"),
            Mistake(half_corrected, "the average of the squares is not corrected. What is it after one step?"),
            Mistake(other_half_corrected, "the average of the gradient is not corrected. What is it after one step?"),
            Mistake(counted_late, "the correction is that of the next step. At which number does the count begin?"),
            Mistake(corrected_as_at_first, "each step is corrected like the first. What happens to 1 - beta later on?"),
            Mistake(
                without_eps, "right for usual gradients; for tiny ones the step is too long. What guards the division?"
            ),
            Mistake(without_root, "a step now depends on the scale of the gradient. What has the unit of a gradient?"),
            Mistake(eps_inside, "eps stands under the root. For tiny gradients that is another step: add it after."),
            Mistake(of_absolute_values, "the second average is of absolute values, and a root is taken of it."),
            Mistake(swapped, "the betas are exchanged: which one belongs to the gradient, which to its square?"),
            Mistake(last_gradient, "the newest gradient alone sets the direction: that is RMSProp. Where is the mean?"),
        ),
    ),
)
