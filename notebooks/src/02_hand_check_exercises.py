"""The exercises of lesson 02: from a centred difference that is given to the gradient of a function of a vector."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def _number(value):
    return torch.tensor(value, dtype=torch.float64)


def _numeric(f, x, h):
    return (f(x + h) - f(x - h)) / (2 * h)


def _autograd(f, x):
    x = x.detach().clone().requires_grad_()
    f(x).backward()
    return x.grad


def _parabola(x):
    return (x - 3) ** 2


def _cube(x):
    return (x - 3) ** 3


def _slope(x, h):
    return _numeric(_parabola, x, h)


def _slope_one_sided(x, h):
    return (_parabola(x + h) - _parabola(x)) / h


def _slope_over_h(x, h):
    return (_parabola(x + h) - _parabola(x - h)) / h


def _slope_turned(x, h):
    return (_parabola(x - h) - _parabola(x + h)) / (2 * h)


def _relative_error(f, x, h):
    numeric, exact = _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact).abs() / torch.maximum(numeric.abs(), exact.abs()))


def _absolute_error(f, x, h):
    return float((_numeric(f, x, h) - _autograd(f, x)).abs())


def _signed_error(f, x, h):
    numeric, exact = _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact) / torch.maximum(numeric.abs(), exact.abs()))


def _error_of_signed_size(f, x, h):
    numeric, exact = _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact).abs() / torch.maximum(numeric, exact))


def _error_of_exact(f, x, h):
    numeric, exact = _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact).abs() / exact.abs())


def _error_of_sum(f, x, h):
    numeric, exact = _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact).abs() / (numeric.abs() + exact.abs()))


def _error_one_sided(f, x, h):
    numeric, exact = (f(x + h) - f(x)) / h, _autograd(f, x)
    return float((numeric - exact).abs() / torch.maximum(numeric.abs(), exact.abs()))


def _error_over_h(f, x, h):
    numeric, exact = 2 * _numeric(f, x, h), _autograd(f, x)
    return float((numeric - exact).abs() / torch.maximum(numeric.abs(), exact.abs()))


def _error_times_h(f, x, h):
    numeric, exact = (f(x + h) - f(x - h)) / 2 * h, _autograd(f, x)
    return float((numeric - exact).abs() / torch.maximum(numeric.abs(), exact.abs()))


def _squares(v):
    return ((v - 3) ** 2).sum()


def _mixed(v):
    return (v**3).sum() + 2 * v[0] * v[-1]


def _numeric_gradient(f, x, h):
    gradient = torch.zeros_like(x)
    for i in range(len(x)):
        step = torch.zeros_like(x)
        step[i] = h
        gradient[i] = (f(x + step) - f(x - step)) / (2 * h)
    return gradient


def _gradient_one_sided(f, x, h):
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(f(x + step) - f(x)) / h for step in steps])


def _gradient_over_h(f, x, h):
    return 2 * _numeric_gradient(f, x, h)


def _gradient_times_h(f, x, h):
    return h**2 * _numeric_gradient(f, x, h)


def _gradient_of_one_tensor(f, x, h):
    return torch.zeros_like(x)  # `ahead = x; ahead[i] += h; behind = x; behind[i] -= h`: both are x


def _gradient_all_at_once(f, x, h):
    return torch.full_like(x, float((f(x + h) - f(x - h)) / (2 * h)))


def _gradient_piled_up(f, x, h):
    gradient, ahead, behind = torch.zeros_like(x), x.clone(), x.clone()
    for i in range(len(x)):
        ahead[i] += h
        behind[i] -= h
        gradient[i] = (f(ahead) - f(behind)) / (2 * h)
    return gradient


def _gradient_left_behind(f, x, h):
    gradient, moved = torch.zeros_like(x), x.clone()
    for i in range(len(x)):
        moved[i] += h
        ahead = f(moved)
        moved[i] -= 2 * h
        gradient[i] = (ahead - f(moved)) / (2 * h)
    return gradient


EXERCISES = (
    Exercise(
        "slope",
        _slope,
        asks="the rise between x-h and x+h, over the run between the two",
        trials=((_number(5.0), 0.1), (_number(-1.5), 0.5), (_number(4.0), 0.25)),
        mistakes=(
            Mistake(_slope_one_sided, "one point is x itself, so the error is of the order of h. Step to both sides."),
            Mistake(_slope_over_h, "the rise is right, the run is not. How far apart are x-h and x+h?"),
            Mistake(_slope_turned, "the sign is the wrong one. Which of the two points comes later on the x axis?"),
        ),
    ),
    Exercise(
        "relative_error",
        _relative_error,
        asks="the distance between the two gradients, as a share of the larger of their magnitudes",
        trials=(
            (_cube, _number(5.0), 0.5),
            (torch.sin, _number(1.0), 0.5),
            (torch.exp, _number(-1.0), 0.25),
            (torch.cos, _number(1.0), 0.5),
        ),
        mistakes=(
            Mistake(
                _absolute_error,
                "this one has the gradient's own size in it: scale the function by ten, and the error is scaled too. "
                "What must the distance be divided by?",
            ),
            Mistake(_signed_error, "an error below zero passes every `error < tolerance`. What is missing around it?"),
            Mistake(
                _error_of_signed_size,
                "where the slope points down it comes out below zero. Of what should the larger one be taken?",
            ),
            Mistake(
                _error_of_exact,
                "swap the two gradients, and the answer changes: it trusts one of them. Which size treats both alike?",
            ),
            Mistake(
                _error_of_sum,
                "the distance is right, its scale is about twice too large. Which size does the comment ask for?",
            ),
            Mistake(_error_one_sided, "the numeric gradient has an error of the order of h. Which point is missing?"),
            Mistake(_error_over_h, "the numeric gradient is twice too large. How long is the run from x-h to x+h?"),
            Mistake(_error_times_h, "the numeric gradient shrinks with h. In which order is `a / 2 * h` computed?"),
        ),
    ),
    Exercise(
        "numeric_gradient",
        _numeric_gradient,
        asks="one centred difference for each entry of x, with all other entries left where they are",
        trials=(
            (_squares, torch.tensor([5.0, -1.5, 0.5], dtype=torch.float64), 0.1),
            (_mixed, torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64), 0.5),
        ),
        mistakes=(
            Mistake(_gradient_one_sided, "each entry has an error of the order of h. Does it step to both sides?"),
            Mistake(_gradient_over_h, "every entry is twice too large. How long is the run of a centred difference?"),
            Mistake(_gradient_times_h, "every entry shrinks with h. In which order is `a / 2 * h` computed?"),
            Mistake(
                _gradient_of_one_tensor,
                "every entry is zero: the two points are one. Does `a = x` make a second tensor, or a second name?",
            ),
            Mistake(
                _gradient_all_at_once,
                "all entries are alike: x moved as a whole, which sums the slopes. How is one entry moved alone?",
            ),
            Mistake(
                _gradient_piled_up,
                "the first entry is right, later ones have the earlier ones in them. Which entries have moved by then?",
            ),
            Mistake(
                _gradient_left_behind,
                "the first entry is right, a later one is measured elsewhere. Is x back where it was before the next?",
            ),
            Mistake(
                lambda f, x, h: _autograd(f, x),
                "this does not depend on h: it comes from backward, so it cannot be used to check backward. "
                "Use calls of f alone.",
            ),
        ),
    ),
    Exercise(
        "order",
        ["A", "B", "C", "D", "E", "F"],
        asks="both gradients belong to the same x, no older one is added, and the check comes before the use",
        before=(
            ("A", "C", "backward adds to what stands in .grad. What has to happen to the old gradient, and when?"),
            ("B", "C", "backward starts from a loss. Where does it come from?"),
            ("C", "E", "the comparison reads x.grad. Which line fills it?"),
            ("D", "E", "the comparison needs both gradients. Which one is not there yet?"),
            ("C", "F", "the step uses x.grad. Which line fills it?"),
            ("D", "F", "after the step x is elsewhere. At which x is the numeric gradient taken?"),
            ("E", "F", "a gradient is to be checked before it is used. Which line uses it?"),
        ),
    ),
)
