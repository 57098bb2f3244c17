"""The exercises of lesson 07: name the first stage of one step that breaks."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def finite(t):
    return bool(t.isfinite().all())


def first_nonfinite(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((place for place, tensors in places.items() if not all(map(finite, tensors))), "none")


def nan_alone(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((p for p, tensors in places.items() if any(bool(t.isnan().any()) for t in tensors)), "none")


def all_values_bad(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((p for p, tensors in places.items() if any(not bool(t.isfinite().any()) for t in tensors)), "none")


def all_tensors_bad(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((p for p, tensors in places.items() if not any(map(finite, tensors))), "none")


def first_tensor_alone(x, out, loss, grads):
    return first_nonfinite(x, out, loss, grads[:1])


def last_place(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((p for p in reversed(places) if not all(map(finite, places[p]))), "none")


def upside_down(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    return next((p for p, tensors in places.items() if all(map(finite, tensors))), "none")


def triage(x, y, classes, out, loss, grads, moves, *, low=True, high=0, none=True, zero=True, still=True, blown=True):
    """Return the first stage that breaks; each keyword leaves out a part of the judgement."""
    if not finite(x) or (low and int(y.min()) < 0) or int(y.max()) >= classes + high:
        return "data"
    if not finite(out):
        return "forward"
    if not finite(loss):
        return "loss"
    if any((none and g is None) or (g is not None and ((zero and not g.any()) or not finite(g))) for g in grads):
        return "backward"
    if any((still and not m.any()) or (blown and not finite(m)) for m in moves):
        return "update"
    return "none"


def first_stage(x, y, classes, out, loss, grads, moves):
    return triage(x, y, classes, out, loss, grads, moves)


def without(**left_out):
    return lambda *given: triage(*given, **left_out)


def some_zeros(x, y, classes, out, loss, grads, moves):
    found = first_stage(x, y, classes, out, loss, grads, moves)
    partly = any(g is not None and not bool(g.all()) for g in grads)
    return "backward" if found in ("update", "none") and partly else found


def every_parameter(x, y, classes, out, loss, grads, moves):
    found = triage(x, y, classes, out, loss, grads, moves, still=False)
    return "update" if found == "none" and not any(bool(m.any()) for m in moves) else found


def labels_forgotten(x, y, classes, out, loss, grads, moves):
    return triage(x, y.clamp(0, classes - 1), classes, out, loss, grads, moves)


def the_last_one(x, y, classes, out, loss, grads, moves):
    alone = {
        "update": (x[:0], y[:0].new_zeros(1), out[:0], torch.zeros(()), [], moves),
        "backward": (x[:0], y[:0].new_zeros(1), out[:0], torch.zeros(()), grads, []),
        "loss": (x[:0], y[:0].new_zeros(1), out[:0], loss, [], []),
        "forward": (x[:0], y[:0].new_zeros(1), out, torch.zeros(()), [], []),
        "data": (x, y, out[:0], torch.zeros(()), [], []),
    }
    for stage, (x_, y_, *rest) in alone.items():
        if triage(x_, y_, classes, *rest) == stage:
            return stage
    return "none"


NAN, INF = float("nan"), float("inf")
X, OUT, LOSS = (
    torch.tensor([[0.5, -1.0], [2.0, 0.0]]),
    torch.tensor([[0.1, 2.0, -1.0], [0.0, 0.3, 0.2]]),
    torch.tensor(1.1),
)
GRADS = [torch.tensor([[0.2, -0.1], [0.3, 0.0]]), torch.tensor([0.1, -0.1])]
BAD_X, BAD_OUT = torch.tensor([[0.5, NAN], [2.0, 0.0]]), torch.tensor([[0.1, INF, -1.0], [0.0, 0.3, 0.2]])
ALL_BAD = [torch.full((2, 2), NAN), torch.full((2,), NAN)]


def step(**changed):
    """Return the values of a healthy step, some of them changed."""
    usual = {"x": X, "y": torch.tensor([0, 2]), "classes": 3, "out": OUT, "loss": LOSS}
    usual |= {"grads": GRADS, "moves": [-0.1 * g for g in GRADS]}
    return tuple((usual | changed).values())


EXERCISES = (
    Exercise(
        "first_nonfinite",
        first_nonfinite,
        asks="the name of the first place that holds a nan or an infinity anywhere, and 'none' where nothing does",
        trials=(
            (BAD_X, torch.full((2, 3), NAN), torch.tensor(NAN), ALL_BAD),
            (X, OUT, LOSS, GRADS),
            (X, BAD_OUT, torch.tensor(INF), ALL_BAD),
            (X, OUT, torch.tensor(-INF), ALL_BAD),
            (X, OUT, LOSS, [GRADS[0], torch.tensor([0.1, INF])]),
            (X, OUT, LOSS, [torch.tensor([[NAN, NAN], [NAN, NAN]]), GRADS[1]]),
            (X, torch.tensor([[NAN, 1.0, 0.0]]), LOSS, GRADS),
        ),
        mistakes=(
            Mistake(nan_alone, "an infinity came through. Which question is False for nan and for both infinities?"),
            Mistake(all_values_bad, "one bad value among good ones came through. Any, or all?"),
            Mistake(all_tensors_bad, "a bad gradient came through because another one was good. Any, or all?"),
            Mistake(first_tensor_alone, "only the first gradient was looked at. The place holds a list."),
            Mistake(last_place, "an echo was named: the last place that is bad. At which end does the search begin?"),
            Mistake(upside_down, "a place in order was named. Is the condition the wrong way round?"),
        ),
    ),
    Exercise(
        "first_stage",
        first_stage,
        asks="the first line of the list that holds, asked from the top",
        trials=(
            step(),
            step(x=BAD_X, out=BAD_OUT, loss=torch.tensor(NAN), grads=ALL_BAD, moves=ALL_BAD),
            step(y=torch.tensor([0, 3])),
            step(y=torch.tensor([1, 3]), grads=[None, GRADS[1]]),
            step(y=torch.tensor([-1, 2])),
            step(y=torch.tensor([0, 7])),
            step(out=BAD_OUT, loss=torch.tensor(INF), grads=ALL_BAD, moves=ALL_BAD),
            step(loss=torch.tensor(INF), grads=ALL_BAD, moves=ALL_BAD),
            step(grads=[None, GRADS[1]]),
            step(grads=[torch.zeros(2, 2), GRADS[1]]),
            step(grads=[torch.tensor([[NAN, 0.1], [0.2, 0.3]]), GRADS[1]], moves=ALL_BAD),
            step(moves=[torch.zeros(2, 2), torch.tensor([0.1, 0.0])]),
            step(moves=[torch.zeros(2, 2), torch.zeros(2)]),
            step(moves=[torch.tensor([[INF, 0.1], [0.0, 0.0]]), torch.tensor([0.1, 0.0])]),
        ),
        mistakes=(
            Mistake(labels_forgotten, "a label outside the classes came through. What else belongs to the data?"),
            Mistake(without(high=1), "a label equal to the number of classes came through. Where does counting begin?"),
            Mistake(without(high=10), "a label above the last class came through. Labels have two ends."),
            Mistake(without(low=False), "a label below the first class came through. Labels have two ends."),
            Mistake(without(none=False), "a parameter without a gradient came through. What does .grad hold then?"),
            Mistake(without(zero=False), "a gradient of zeros came through. It is finite, and it moves nothing."),
            Mistake(
                some_zeros, "a gradient with a few zeros was called dead. Behind a ReLU that is usual: any, or all?"
            ),
            Mistake(without(still=False), "a parameter that stands still came through. What is its move?"),
            Mistake(every_parameter, "one parameter stood still among others that moved, and came through."),
            Mistake(without(blown=False), "a move that is not finite came through: the step itself can overflow."),
            Mistake(the_last_one, "an echo was named: where the first break is earlier. At which end do you begin?"),
        ),
    ),
    Exercise(
        "look_order",
        ["C", "H", "F", "A", "G", "B", "D", "E"],
        asks="a usual step, with each look where its values are there and nothing has spoilt them",
        before=(
            (
                "C",
                "F",
                "the labels are checked after the loss has used them. What would a label out of range do there?",
            ),
            ("F", "A", "backward comes before there is a loss. What does it start from?"),
            ("H", "A", "the gradients are cleared after backward has made them. What is left for the step?"),
            ("A", "G", "somebody asks who has a gradient before backward has run. What would every answer be?"),
            ("A", "D", "the optimizer steps before backward. Which gradients would it use?"),
            ("B", "D", "the copy of the weights is made after the step. What would it be compared with?"),
            ("D", "E", "the weights are compared before the step. What could have moved them?"),
        ),
    ),
)
