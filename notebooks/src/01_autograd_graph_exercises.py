"""The exercises of lesson 01: walk a graph, and push a gradient through it by hand."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def slope(x):
    return 2 * (x - 3)


def push(w, x, b):
    y = w * x + b
    grad_y = 2 * y
    grad_w = grad_y * x
    return grad_y, grad_w


def push_without_b(w, x, b):
    return 2 * w * x, 2 * w * x * x


def push_by_w(w, x, b):
    y = w * x + b
    return 2 * y, 2 * y * w


def push_value(w, x, b):
    y = w * x + b
    return 2 * y, 2 * y * w * x


def push_loss(w, x, b):
    y = (w * x + b) ** 2
    return 2 * y, 2 * y * x


def push_local(w, x, b):
    return 2 * (w * x + b), x


def sweep(a, b):
    y = a * b + a
    grad_y = 2 * y
    return grad_y * b + grad_y, grad_y * a


def sweep_product_only(a, b):
    grad_y = 2 * (a * b + a)
    return grad_y * b, grad_y * a


def sweep_direct_only(a, b):
    grad_y = 2 * (a * b + a)
    return grad_y, grad_y * a


def sweep_without_square(a, b):
    return b + 1, a


def sweep_without_a(a, b):
    grad_y = 2 * (a * b)
    return grad_y * b + grad_y, grad_y * a


def sweep_swapped(a, b):
    grad_a, grad_b = sweep(a, b)
    return grad_b, grad_a


def walk(root):
    names, waiting, seen = [], [root], {root}
    while waiting:
        node = waiting.pop(0)
        names.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return names


def walk_twice(root):
    names, waiting = [], [root]
    while waiting:
        node = waiting.pop(0)
        names.append(node.name())
        waiting += [following for following, _ in node.next_functions if following is not None]
    return names


def walk_one_way(root):
    names, node = [], root
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def walk_deep(root):
    names, waiting, seen = [], [root], {root}
    while waiting:
        node = waiting.pop()
        names.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return names


def walk_by_name(root):
    names, waiting = [], [root]
    while waiting:
        node = waiting.pop(0)
        if node.name() not in names:
            names.append(node.name())
        waiting += [following for following, _ in node.next_functions if following is not None]
    return names


def walk_short_names(root):
    return [name.split("::")[-1] for name in walk(root)]


def root_of_diamond():
    a = torch.tensor(2.0, requires_grad=True)
    b = torch.tensor(3.0, requires_grad=True)
    return (a * b + a).grad_fn


def root_of_square():
    w = torch.tensor(3.0, requires_grad=True)
    return ((w * 2 + 1) ** 2).grad_fn


def root_of_sum():
    a, b, c = (torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    return (a + b * c).grad_fn


EXERCISES = (
    Exercise(
        "slope",
        slope,
        asks="the outer derivative at the inner value, times the inner derivative",
        trials=((5.0,), (-1.0,), (3.0,)),
        mistakes=(Mistake(lambda x: x - 3, "The outer derivative lacks its factor: what does the square contribute?"),),
    ),
    Exercise(
        "push",
        push,
        asks="each node multiplies what arrives by its local derivative",
        trials=((3.0, 2.0, 1.0), (-1.0, 4.0, 0.5)),
        mistakes=(
            Mistake(push_without_b, "The square was taken of something else than what Pow received. What does Add do?"),
            Mistake(push_by_w, "At a product each factor receives the other one. Which one is the other one of w?"),
            Mistake(push_value, "The local derivative of a product is one factor alone, not the product's value."),
            Mistake(push_loss, "The square is what Pow made of it. What went into Pow, before it was squared?"),
            Mistake(push_local, "What arrives at w here is the local derivative alone. What does it multiply?"),
        ),
    ),
    Exercise(
        "sweep",
        sweep,
        asks="each node multiplies what arrives by its local derivative, and what arrives twice is added",
        trials=((2.0, 3.0), (-1.0, 0.5)),
        mistakes=(
            Mistake(sweep_product_only, "a has two uses. Which of the two gradients has not arrived?"),
            Mistake(sweep_direct_only, "Only what Add sends to a directly is there. What does the product send to it?"),
            Mistake(sweep_without_square, "These are the gradients of the sum inside. What does Pow make of them?"),
            Mistake(sweep_without_a, "Pow received the whole sum. Which of its two terms is missing in the factor?"),
            Mistake(sweep_swapped, "The two numbers are right and change places. Which of them is asked for first?"),
        ),
    ),
    Exercise(
        "order",
        list("CEBAD"),
        asks="a node runs when all gradients that flow into it have arrived",
        before=(
            ("C", "E", "The loss comes first: its derivative by itself is where everything begins."),
            ("E", "B", "The Add node hands the gradient to both of its inputs; the product is one of them."),
            ("B", "A", "a has two uses. Before the product ran, one of its two gradients is still missing."),
            ("E", "A", "The sum's direct gradient for a comes from the Add node, which has not run yet."),
            ("A", "D", "The optimizer reads .grad: every gradient of a must be added up before."),
        ),
    ),
    Exercise(
        "walk",
        walk,
        asks="the names as node.name() gives them, level by level from the root, each node once, None left out",
        trials=((root_of_square(),), (root_of_diamond(),), (root_of_sum(),)),
        mistakes=(
            Mistake(walk_twice, "A leaf that is used twice was visited twice. What do you remember of the nodes seen?"),
            Mistake(walk_one_way, "Only the first input of each node was followed. A graph has branches."),
            Mistake(walk_by_name, "Two nodes may have the same name. Remember the nodes you have seen, not the names."),
            Mistake(walk_short_names, "Nodes and order are right. Leave the names as node.name() gives them."),
            Mistake(walk_deep, "All nodes are there, in another order: level by level means first in, first out."),
        ),
    ),
)
