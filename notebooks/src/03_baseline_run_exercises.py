"""The exercises of lesson 03: judge one gradient by its size and by what the step did with it."""

import math

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def sizes(grad, before, after):
    return float(grad.square().mean().sqrt()), float((after - before).norm() / before.norm())


def sizes_norm(grad, before, after):
    return float(grad.norm()), sizes(grad, before, after)[1]


def sizes_mean(grad, before, after):
    return float(grad.mean()), sizes(grad, before, after)[1]


def sizes_spread(grad, before, after):
    return float(grad.std()), sizes(grad, before, after)[1]


def sizes_absolute(grad, before, after):
    return float(grad.abs().mean()), sizes(grad, before, after)[1]


def sizes_mean_square(grad, before, after):
    return float(grad.square().mean()), sizes(grad, before, after)[1]


def sizes_norm_per_element(grad, before, after):
    return float(grad.norm() / grad.numel()), sizes(grad, before, after)[1]


def sizes_over_after(grad, before, after):
    return sizes(grad, before, after)[0], float((after - before).norm() / after.norm())


def sizes_change_of_length(grad, before, after):
    return sizes(grad, before, after)[0], float((after.norm() - before.norm()).abs() / before.norm())


def sizes_gradient_ratio(grad, before, after):
    return sizes(grad, before, after)[0], float(grad.norm() / before.norm())


def judge(rms, ratio):
    if not math.isfinite(rms) or not math.isfinite(ratio) or rms > 1 or ratio > 0.1:
        return "exploding"
    return "too small" if rms < 1e-4 or ratio < 1e-4 else "fine"


def regime(grad, before, after):
    return "none" if grad is None else judge(*sizes(grad, before, after))


def regime_zero_is_none(grad, before, after):
    return "none" if grad is None or not bool(grad.any()) else regime(grad, before, after)


def regime_nan_passes(grad, before, after):
    if grad is None:
        return "none"
    rms, ratio = sizes(grad, before, after)
    if rms > 1 or ratio > 0.1:
        return "exploding"
    return "too small" if rms < 1e-4 or ratio < 1e-4 else "fine"


def regime_nan_weight_passes(grad, before, after):
    if grad is None or not bool(grad.isfinite().all()):
        return regime(grad, before, after)
    rms, ratio = sizes(grad, before, after)
    return judge(rms, 0.01 if math.isnan(ratio) else ratio)


def regime_small_if_both(grad, before, after):
    found = regime(grad, before, after)
    rms, ratio = (1.0, 1.0) if grad is None else sizes(grad, before, after)
    return "fine" if found == "too small" and not (rms < 1e-4 and ratio < 1e-4) else found


def regime_by_norm(grad, before, after):
    return "none" if grad is None else judge(*sizes_norm(grad, before, after))


def regime_by_mean(grad, before, after):
    return "none" if grad is None else judge(abs(float(grad.mean())), sizes(grad, before, after)[1])


def regime_by_ratio_alone(grad, before, after):
    return "none" if grad is None else judge(0.01, sizes(grad, before, after)[1])


def regime_by_rms_alone(grad, before, after):
    return "none" if grad is None else judge(sizes(grad, before, after)[0], 0.01)


def regime_small_first(grad, before, after):
    if grad is None:
        return "none"
    rms, ratio = sizes(grad, before, after)
    return "too small" if rms < 1e-4 or ratio < 1e-4 else regime(grad, before, after)


def step(grad, rate):
    """Return a gradient with the weights before and after one step of plain SGD."""
    before = torch.tensor([0.3, -0.4, 1.2, 0.0])
    return grad, before, before if grad is None else before - rate * grad


GRADIENT = torch.tensor([0.03, -0.04, 0.0, 0.02])
NAN, INF = float("nan"), float("inf")

EXERCISES = (
    Exercise(
        "sizes",
        sizes,
        asks="the first number stays the same when a tensor is repeated to twice its length and does not let signs "
        "cancel; the second is the length of what the step changed over the length of what was there before it",
        trials=(
            step(GRADIENT, 0.05),
            (torch.tensor([[3.0, -4.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, 2.5]])),
            (torch.full((3, 3), -0.01), torch.ones(3, 3), torch.full((3, 3), 1.01)),
        ),
        mistakes=(
            Mistake(sizes_norm, "the size grows with the number of elements. Is there a sum where a mean belongs?"),
            Mistake(sizes_mean, "positive and negative elements cancel. What makes every element positive first?"),
            Mistake(
                sizes_spread,
                "the size of a constant gradient comes out as zero: the mean was subtracted. Measure from zero.",
            ),
            Mistake(sizes_absolute, "that is the mean of the absolute values. Which power stands under the root?"),
            Mistake(sizes_mean_square, "ten times the gradient gives a hundred times the size. Which step is missing?"),
            Mistake(
                sizes_norm_per_element, "the size now shrinks with the number of elements. What stands under the root?"
            ),
            Mistake(sizes_over_after, "the ratio compares with the wrong weights. From where did the step start?"),
            Mistake(
                sizes_change_of_length,
                "a step that turns the weights at equal length counts as nothing. Subtract before you take the length.",
            ),
            Mistake(
                sizes_gradient_ratio,
                "that is gradient over weight; the learning rate is missing. Which two tensors show what really moved?",
            ),
        ),
    ),
    Exercise(
        "regime",
        regime,
        asks="the four texts, tested in the order of the list, each by the limits that stand there",
        trials=(
            step(GRADIENT, 0.05),
            step(None, 0.05),
            step(torch.zeros(4), 0.05),
            step(1e-6 * GRADIENT, 0.05),
            step(GRADIENT, 1e-5),
            step(GRADIENT, 50.0),
            step(1000 * GRADIENT, 1e-5),
            step(1000 * GRADIENT, 1e-9),
            step(torch.tensor([NAN, 0.0, 0.0, 0.0]), 0.05),
            step(torch.tensor([INF, 0.0, 0.0, 0.0]), 0.05),
            (GRADIENT, torch.ones(4), torch.tensor([NAN, 1.0, 1.0, 1.0])),
            step(torch.tensor([0.02, -0.02, 0.02, -0.02]), 0.05),
            (torch.full((400, 100), 0.02), torch.ones(400, 100), torch.full((400, 100), 0.999)),
            (torch.full((100, 100), 1e-6), torch.full((100, 100), 1e-4), torch.full((100, 100), 1.01e-4)),
        ),
        mistakes=(
            Mistake(
                regime_zero_is_none,
                "a gradient of zeros was taken for a missing one. What does .grad hold when nothing was computed?",
            ),
            Mistake(
                regime_nan_passes,
                "a gradient with nan came through. Every comparison with nan is False; what is asked before it?",
            ),
            Mistake(
                regime_nan_weight_passes,
                "a step that left nan in a weight came through. Which of the two numbers tells of the weights?",
            ),
            Mistake(
                regime_small_if_both,
                "a tiny gradient that moves its weights, or a usual one that does not, was called fine: and, or or?",
            ),
            Mistake(
                regime_by_norm,
                "a large tensor of small elements was called exploding: this size grows with the number of elements.",
            ),
            Mistake(
                regime_by_mean,
                "a gradient whose elements cancel was called too small. Which size does not let signs cancel?",
            ),
            Mistake(
                regime_by_ratio_alone,
                "only the update ratio was judged. A tiny gradient can move tiny weights well: look at the RMS too.",
            ),
            Mistake(
                regime_by_rms_alone,
                "only the RMS was judged. A usual gradient at an extreme rate is not fine: look at the update ratio.",
            ),
            Mistake(
                regime_small_first,
                "a huge gradient with a tiny rate was called too small. In which order are the regimes tested?",
            ),
        ),
    ),
    Exercise(
        "line_order",
        ["E", "F", "C", "A", "D", "B", "G"],
        asks="one step in training mode, then a look in evaluation mode",
        before=(
            ("E", "C", "the forward pass that trains comes before model.train(). In which mode would it run?"),
            ("C", "A", "backward comes before there is a loss. What does it start from?"),
            ("F", "A", "zero_grad comes after backward and throws away what backward has just computed."),
            ("A", "D", "the optimizer steps before backward. Which gradients would it use?"),
            ("C", "B", "the forward pass that trains runs in evaluation mode. Which line switches dropout off?"),
            ("B", "G", "the validation runs in training mode. Does no_grad switch dropout off?"),
            ("D", "G", "the validation looks at the weights before the step. Which line changes them?"),
        ),
    ),
)
