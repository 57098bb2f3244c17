"""The exercises of lesson 04: curvature in growing dimension, and the step that uses it."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def _vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def _leaf(w):
    return w.detach().clone().requires_grad_()


def _gradient(f, w, create_graph=False):
    return torch.autograd.grad(f(w), w, create_graph=create_graph)[0]


def _second(f, x):
    x = _leaf(x)
    return torch.autograd.grad(_gradient(f, x, create_graph=True), x)[0]


def _hessian(f, w):
    w = _leaf(w)
    gradient = _gradient(f, w, create_graph=True)
    return torch.stack([torch.autograd.grad(entry, w, retain_graph=True)[0] for entry in gradient])


def _hessian_of_sum(f, w):
    w = _leaf(w)
    return torch.autograd.grad(_gradient(f, w, create_graph=True).sum(), w)[0]


def _hessian_sum_each_row(f, w):
    return torch.stack([_hessian_of_sum(f, w)] * len(w))


def _outer_product(f, w):
    gradient = _gradient(f, _leaf(w))
    return torch.outer(gradient, gradient)


def _gradient_each_row(f, w):
    return torch.stack([_gradient(f, _leaf(w))] * len(w))


def _slope_at(w, f):
    return _gradient(f, _leaf(w))


def _newton(f, w):
    return w - torch.linalg.solve(_hessian(f, w), _slope_at(w, f))


def _cube(x):
    return x**3


def _valley(w):
    return (1 - w[0]) ** 2 + 5 * (w[1] - w[0] ** 2) ** 2


def _coupled(w):
    return (w**4).sum() + w.sum() ** 2 + w[0] * w[-1]


PLACES = ((_valley, _vector(1.5, 2.0)), (_coupled, _vector(1.0, -0.5, 2.0)))

EXERCISES = (
    Exercise(
        "second_derivative",
        _second,
        asks="the slope of the slope, with the slope recorded so that it can be differentiated",
        trials=((_cube, _vector(3.0)[0]), (torch.exp, _vector(-1.0)[0]), (torch.sin, _vector(1.0)[0])),
        mistakes=(
            Mistake(lambda f, x: _slope_at(x, f), "this is the slope itself. How often was f differentiated?"),
            Mistake(lambda f, x: _slope_at(x, f) ** 2, "this is the square of the slope, not the slope of the slope."),
        ),
    ),
    Exercise(
        "hessian",
        _hessian,
        asks="entry (i, j) is the derivative with respect to w[j] of the gradient's entry i",
        trials=PLACES,
        mistakes=(
            Mistake(
                _hessian_of_sum,
                "one row came out where n are asked for: the entries of the gradient were summed before they were "
                "differentiated. How many backward passes should the second line make?",
            ),
            Mistake(
                _hessian_sum_each_row,
                "all rows are alike: each is the gradient of the sum of the entries. Which one entry belongs to a row?",
            ),
            Mistake(
                lambda f, w: torch.diag(torch.diagonal(_hessian(f, w))),
                "the diagonal is right, and all else is zero. Which entries of w does entry 0 of the gradient need?",
            ),
            Mistake(
                lambda f, w: torch.diagonal(_hessian(f, w)),
                "this is the diagonal alone. Which derivatives of each entry of the gradient were left out?",
            ),
            Mistake(
                _outer_product,
                "this is the gradient times itself: no curvature is in it. What was differentiated a second time?",
            ),
            Mistake(
                _gradient_each_row,
                "each row is the gradient of f. Of which tensor is the gradient taken in the second line?",
            ),
        ),
    ),
    Exercise(
        "newton_step",
        _newton,
        asks="the place where the slope would be zero if the curvature stayed as it is at w",
        trials=PLACES,
        mistakes=(
            Mistake(
                lambda f, w: 2 * w - _newton(f, w),
                "it goes exactly the other way: the distance is right, the sign of the step is not.",
            ),
            Mistake(
                lambda f, w: w - _newton(f, w),
                "this is how far to go, not where one arrives. What is the step taken from?",
            ),
            Mistake(
                lambda f, w: _newton(f, w) - w,
                "this is the step, not the place where it ends. What is it added to?",
            ),
            Mistake(
                lambda f, w: w - _slope_at(w, f),
                "this is a gradient step with rate one. Where does the curvature come in?",
            ),
            Mistake(
                lambda f, w: w - _hessian(f, w) @ _slope_at(w, f),
                "the Hessian multiplies the gradient here. Should a large curvature make the step longer or shorter?",
            ),
            Mistake(
                lambda f, w: w - _slope_at(w, f) / torch.diagonal(_hessian(f, w)),
                "each entry is divided by its own curvature alone. What about the entries beside the diagonal?",
            ),
        ),
    ),
    Exercise(
        "order",
        ["D", "E", "B", "F", "C", "G", "A"],
        asks="the inner step makes new weights, the outer loss is computed with them and moves the old ones",
        before=(
            ("E", "B", "the inner gradient is taken of a loss. Which line computes it?"),
            ("B", "F", "the inner step subtracts gradients. Which line computes them?"),
            ("F", "C", "the query loss is the one of the adapted weights. Which line makes these?"),
            ("C", "G", "the outer backward pass starts from the query loss. Which line computes it?"),
            ("D", "G", "zero_grad comes after backward and throws away what backward has just computed."),
            ("G", "A", "the optimizer steps before it has outer gradients. Which line fills .grad?"),
        ),
    ),
)
