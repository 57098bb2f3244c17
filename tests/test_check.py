"""The gradient check: every verdict on functions whose right answer is known from mathematics; no false alarm."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from dxdy_nb.autograd.check import FEW, SWEEP, Check, check_gradients
from dxdy_nb.errors import DxdyError

torch.set_num_threads(1)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


X = double(0.3, -1.2, 0.8, 2.1, -0.4)


class Square(torch.autograd.Function):
    """The square, with the gradient 2 · factor · x."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.factor * ctx.saved_tensors[0] * grad, None


class SquareInFloat32(torch.autograd.Function):
    """The square by way of numpy in float32, which torch cannot see; its gradient is right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy((x.detach().numpy().astype(np.float32) ** 2).astype(np.float64))

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class SquareOfDetached(torch.autograd.Function):
    """The square, right in both directions, although its forward detaches."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class SquareOnce(torch.autograd.Function):
    """The square, whose gradient is right and whose second derivative is 1 % off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (Square.apply(x + 1, 1.01) - Square.apply(x, 1.01) - 1)  # 2x in value


def sum_without_graph(x):
    with torch.no_grad():
        total = x.sum()
    return x * total


def sum_in_inference_mode(x):
    with torch.inference_mode():
        total = x.sum()
    return x * total.clone()


def slope(fn, x, create_graph):
    """Return fn's derivative, as a physics-informed loss or a gradient penalty takes it."""
    return torch.autograd.grad(fn(x).sum(), x, create_graph=create_graph)[0] * x


RIGHT = {
    "sine": lambda: check_gradients(torch.sin, X),
    "a matrix": lambda: check_gradients(lambda a, b: a @ b, torch.eye(3).double() + 0.1, torch.ones(3, 2).double()),
    "a custom function": lambda: check_gradients(lambda x: Square.apply(x, 1.0), X),
    "a custom function that detaches": lambda: check_gradients(SquareOfDetached.apply, X),
    "a tiny input": lambda: check_gradients(torch.sqrt, double(1e-8)),
    "a huge input": lambda: check_gradients(torch.log, double(1e12)),
    "inputs of all sizes": lambda: check_gradients(lambda a, b: a.sum() * b.sum(), 1e-9 * X, 1e9 * X),
    "an unused input": lambda: check_gradients(lambda a, b: a.sum(), X, X),
    "zero for ever": lambda: check_gradients(lambda x: x - x, X),
    "zero but for rounding": lambda: check_gradients(lambda x: (x - x.mean()).sum(), X),
    "a sum of large numbers": lambda: check_gradients(lambda x: (x + 1e6).sum(), X),
    "linear": lambda: check_gradients(lambda x: 3 * x, X),
    "flat almost everywhere": lambda: check_gradients(torch.round, X),
    "steep": lambda: check_gradients(lambda x: (30 * x).exp(), X),
    "wild": lambda: check_gradients(lambda x: (1e5 * x).sin(), X),
    "a kink that is near": lambda: check_gradients(torch.relu, double(1e-3, 1.0)),
    "dropout": lambda: check_gradients(lambda x: F.dropout(x).exp(), X),
    "noise from torch": lambda: check_gradients(lambda x: x * torch.randn(5), X),
    "a slope taken inside": lambda: check_gradients(lambda x: slope(lambda v: v**3, x, True), X),
    "second order": lambda: check_gradients(lambda x: x**3, X, order=2),
    "second order of a line": lambda: check_gradients(lambda x: 3 * x, X, order=2),
    "wrong only in the first order": lambda: check_gradients(lambda x: Square.apply(x, 1.01), X, order=2),
    "right in the first order": lambda: check_gradients(SquareOnce.apply, X),
}
WRONG = {
    "a custom function": lambda: check_gradients(lambda x: Square.apply(x, 1.01), X),
    "a fault of one in a million": lambda: check_gradients(lambda x: Square.apply(x, 1 + 1e-6), X),
    "a sign": lambda: check_gradients(lambda x: Square.apply(x, -1.0), X),
    "in a slope taken inside": lambda: check_gradients(lambda x: slope(SquareOnce.apply, x, True), X),
    "beside a kink": lambda: check_gradients(lambda x: Square.apply(x, 1.01) + torch.relu(x), double(0.0, 1.0, 2.0)),
    "beside a detached part": lambda: check_gradients(lambda x: Square.apply(x, 1.01) * x.detach(), X),
    "in float32": lambda: check_gradients(lambda x: Square.apply(x.float(), 1.01), X),
    "where does not guard": lambda: check_gradients(lambda x: torch.where(x > 0, x.sqrt(), 0 * x), double(-1.0, 2.0)),
    "in the second order": lambda: check_gradients(SquareOnce.apply, X, order=2),
}
KINK = {
    "relu at 0": lambda: check_gradients(torch.relu, double(0.0)),
    "relu at many zeros": lambda: check_gradients(torch.relu, double(0.0, 0.0, 1.0, 0.0)),
    "relu nearly at 0": lambda: check_gradients(torch.relu, double(1e-13)[0] + double(0.0, 1.0)),
    "abs at 0": lambda: check_gradients(torch.abs, double(0.0)),
    "norm at 0": lambda: check_gradients(torch.linalg.vector_norm, torch.zeros(3).double()),
    "sqrt at 0": lambda: check_gradients(torch.sqrt, double(0.0)),
    "hinge at its corner": lambda: check_gradients(lambda x: F.relu(1 - x).mean(), double(1.0, 0.5)),
    "max of equals": lambda: check_gradients(torch.max, torch.ones(6).double()),
    "max-pool of equals": lambda: check_gradients(lambda x: F.max_pool1d(x[None], 2), torch.ones(6).double()),
    "clamp at its bound": lambda: check_gradients(lambda x: x.clamp(max=1.0), double(1.0, 0.0)),
    "two that cancel": lambda: check_gradients(lambda x: torch.relu(x) - torch.relu(-x), double(0.0)),
    "in the second order": lambda: check_gradients(lambda x: torch.relu(x) ** 2, double(0.0), order=2),
}
DETACHED = {
    "one factor": lambda: check_gradients(lambda x: x * x.detach(), X),
    "data": lambda: check_gradients(lambda x: x * x.data, X),
    "no_grad": lambda: check_gradients(sum_without_graph, X),
    "inference mode": lambda: check_gradients(sum_in_inference_mode, X),
    "item": lambda: check_gradients(lambda x: x * x.detach().sum().item(), X),
    "a list": lambda: check_gradients(lambda x: x * torch.tensor(x.tolist()), X),
    "numpy": lambda: check_gradients(lambda x: x * torch.from_numpy(np.exp(x.detach().numpy())), X),
    "all of it": lambda: check_gradients(lambda x: (x.detach() ** 2).sum(), X),
    "beside a custom function that detaches": lambda: check_gradients(lambda x: SquareOfDetached.apply(x) * x.data, X),
    "a slope without its graph": lambda: check_gradients(lambda x: slope(lambda v: v**3, x, False), X),
    "straight through": lambda: check_gradients(lambda x: x + (x.round() - x).detach(), X),
    "in the second order": lambda: check_gradients(lambda x: x**2 * x.detach(), X, order=2),
}
PRECISION = {
    "float32 inside": lambda: check_gradients(lambda x: (x.float() - 3) ** 2, double(5.0)),
    "bfloat16 inside": lambda: check_gradients(lambda x: (x.bfloat16() - 3) ** 2, double(5.0)),
    "float32 that torch cannot see": lambda: check_gradients(SquareInFloat32.apply, X),
    "cancellation": lambda: check_gradients(lambda x: (x + 1e9).sum() - 5e9, X),
    "fn that takes float32 only": lambda: check_gradients(lambda x: x @ torch.ones(5, dtype=torch.float32), X.float()),
}
GENERATOR = torch.Generator()
NONDETERMINISTIC = {
    "its own generator": lambda: check_gradients(lambda x: x * torch.randn(5, generator=GENERATOR), X),
    "the time": lambda: check_gradients(lambda x: x * time.perf_counter(), X),
    "numpy's generator": lambda: check_gradients(lambda x: x * np.random.rand(), X),
}
CASES = {
    "right": RIGHT,
    "wrong": WRONG,
    "kink": KINK,
    "detached": DETACHED,
    "precision": PRECISION,
    "nondeterministic": NONDETERMINISTIC,
}


@pytest.mark.parametrize(("verdict", "case"), [(verdict, case) for verdict, cases in CASES.items() for case in cases])
def test_each_way_to_differ_has_its_name(verdict, case):
    check = CASES[verdict][case]()
    assert check.verdict == verdict, check
    assert repr(check).startswith(f"{verdict}: ") and "\n" not in repr(check)


def test_slopes_are_those_of_the_function():
    row = check_gradients(torch.exp, double(0.7)).rows[0]
    direction = row.analytic / np.exp(0.7)
    assert row.numeric == pytest.approx(direction * np.exp(0.7), rel=1e-9)
    assert row.verdict == "right" and row.error < 1e-9 and row.step in SWEEP


def test_a_kink_has_one_sided_slopes_and_a_wrong_gradient_a_plateau():
    kink = check_gradients(torch.abs, double(0.0)).rows[0]
    assert kink.left == pytest.approx(-kink.right) and kink.analytic == 0
    wrong = check_gradients(lambda x: Square.apply(x, 1.01), X).rows[0]
    assert wrong.analytic / wrong.numeric == pytest.approx(1.01)
    right = check_gradients(torch.sin, X).rows[0]
    middle = slice(2, 6)
    assert wrong.curve[1][middle] == pytest.approx([0.01 / 1.01] * 4, rel=1e-3)
    assert max(right.curve[1][middle]) < 1e-4
    assert min(kink.curve[1]) > 0.9


def test_the_worst_verdict_of_any_input_counts():
    def fn(fine, cut, corner, fault):
        return fine.sum() + (cut.detach() ** 2).sum() + corner.abs().sum() + Square.apply(fault, 1.01).sum()

    check = check_gradients(fn, X, X, double(0.0), X)
    assert check.table["verdict"].to_dict() == {"fine": "right", "cut": "detached", "corner": "kink", "fault": "wrong"}
    assert (check.verdict, check.worst) == ("wrong", "fault")
    assert check_gradients(lambda a, b, c: fn(a, b, c, 0 * X), X, X, double(0.0)).verdict == "kink"


def test_inputs_in_float32_are_checked_as_float64_copies():
    check = check_gradients(torch.sin, X.float())
    assert check.verdict == "right" and "float32 inputs checked as float64 copies" in repr(check)


# --- models -----------------------------------------------------------------------------------------------------------


def classes(features=20, count=10, size=32):
    return torch.randn(size, features), torch.randint(count, (size,))


def images(value=None):
    x = torch.randn(8, 1, 12, 12) if value is None else torch.full((8, 1, 12, 12), value)
    return x, torch.randint(10, (8,))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNNCell(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 8)  # of the default dtype, as many models do
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.out(h)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.out = nn.Linear(16, 30, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x):
        return self.out(self.layer(self.tokens(x))).mean(1)


def tokens():
    return torch.randint(30, (4, 6)), torch.randint(30, (4,))


def zeroed(module):
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def convolutional(*norm):
    layers = nn.Conv2d(1, 8, 3), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 10)
    return nn.Sequential(*layers)


def without_bias(model):
    nn.init.zeros_(model[0].bias)
    return model


CE = nn.CrossEntropyLoss()
HEALTHY = {
    "tanh": lambda: (nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10)), CE, classes()),
    "relu": lambda: (nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10)), CE, classes(size=128)),
    "dropout": lambda: (nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)), CE, classes()),
    "in place": lambda: (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(20, 10)), CE, classes()),
    "batch norm after a bias": lambda: (convolutional(nn.BatchNorm2d(8)), CE, images()),
    "max-pool of black images": lambda: (without_bias(convolutional()), CE, images(0.0)),
    "max-pool of equals": lambda: (convolutional(), CE, images(1.0)),
    "recurrent": lambda: (Recurrent(), CE, (torch.randn(4, 20, 8), torch.randint(10, (4,)))),
    "attention, tied weights": lambda: (Attention(), CE, tokens()),
    "attention, fast path": lambda: (Attention().eval(), CE, tokens()),
    "hinge": lambda: (nn.Linear(20, 10), nn.MultiMarginLoss(), classes()),
    "hinge at its corner": lambda: (zeroed(nn.Linear(20, 1)), lambda o, y: F.relu(o).mean(), classes()),
    "L1 at 0": lambda: (zeroed(nn.Linear(20, 5)), nn.L1Loss(), (torch.randn(8, 20), torch.zeros(8, 5))),
    "nothing learnt yet": lambda: (nn.Sequential(nn.Linear(20, 9), zeroed(nn.Linear(9, 10))), CE, classes()),
    "weighted loss": lambda: (nn.Linear(20, 10), nn.CrossEntropyLoss(weight=torch.rand(10)), classes()),
    "weight norm": lambda: (nn.Sequential(parametrizations.weight_norm(nn.Linear(20, 10))), CE, classes()),
    "sparse gradient": lambda: (
        nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(24, 30)),
        CE,
        tokens(),
    ),
    "bfloat16": lambda: (nn.Linear(20, 10).bfloat16(), CE, classes()),
}


def stacked(activation, layers, width=20):
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


# Gradients that rounding nearly hides, and kinks that are always near: neither is a kink at this point.
HEALTHY |= {
    "vanishing, sigmoid": lambda: (stacked(nn.Sigmoid, 8), CE, classes()),
    "vanishing, tanh": lambda: (stacked(nn.Tanh, 30), CE, classes()),
    "deep relu": lambda: (stacked(nn.ReLU, 8), CE, classes(size=256)),
}
WITH_A_KINK = {"max-pool of black images", "hinge at its corner", "L1 at 0"}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_model_raises_no_alarm(name, seed):
    torch.manual_seed(seed)
    model, loss_fn, batch = HEALTHY[name]()
    check = check_gradients(model=model, loss_fn=loss_fn, batch=batch, seed=seed)
    assert check.verdict == ("kink" if name in WITH_A_KINK else "right"), check


class Planted(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.fault(grad), None


class Faulty(nn.Module):
    """A parametrization goes along into a deep copy, a hook on the parameter does not."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        return Planted.apply(x, self.fault)


def noise(grad):
    return torch.randn(grad.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


FAULTS = {
    "all 1 % too large": lambda g: 1.01 * g,
    "one row 1 % too large": lambda g: torch.cat([1.01 * g[:1], g[1:]]),
    "two signs flipped": lambda g: torch.cat([-g.flatten()[:2], g.flatten()[2:]]).view_as(g),
    "noise of 1 %": lambda g: g + 0.01 * g.std() * noise(g),
    "transposed": lambda g: g.T,
    "lost": lambda g: 0 * g,
}


def deep(layers=6, width=24):
    inner = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


PLANTED = [(fault, name) for fault in FAULTS for name in ("0.weight", "6.weight", "7.weight", "15.bias")]
PLANTED = [(fault, name) for fault, name in PLANTED if fault != "transposed" or name in ("0.weight", "6.weight")]


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_fault_in_any_one_parameter_is_found_and_named(fault, name):
    torch.manual_seed(0)
    model, batch = deep(), classes(24)
    place, _, leaf = name.partition(".")
    parametrize.register_parametrization(model[int(place)], leaf, Faulty(FAULTS[fault]))
    check = check_gradients(model=model, loss_fn=CE, batch=batch)
    found = [row.name for row in check.rows if row.verdict != "right"]
    assert check.verdict == ("detached" if fault == "lost" else "wrong")
    assert found == [check.worst] == [f"{place}.parametrizations.{leaf}.original"]
    assert len(check.rows) > FEW and np.isfinite(check.table.loc[check.worst, "error"])


def test_what_detects_says_shows_and_what_is_far_smaller_does_not():
    torch.manual_seed(0)
    model, batch = deep(), classes(24)
    limit = check_gradients(model=model, loss_fn=CE, batch=batch).table.loc["0.weight", "detects"]
    assert limit < 1e-4
    for factor, verdict in ((100 * limit, "wrong"), (limit / 1000, "right")):
        faulty = copy.deepcopy(model)
        parametrize.register_parametrization(faulty[0], "weight", Faulty(lambda g, f=factor: g + f * g))
        assert check_gradients(model=faulty, loss_fn=CE, batch=batch).verdict == verdict


def test_faults_in_several_parameters_are_all_named():
    torch.manual_seed(0)
    model, batch = deep(), classes(24)
    for place in (0, 3, 9):
        parametrize.register_parametrization(model[place], "weight", Faulty(FAULTS["all 1 % too large"]))
    check = check_gradients(model=model, loss_fn=CE, batch=batch)
    wrong = {row.name for row in check.rows if row.verdict == "wrong"}
    assert wrong == {f"{place}.parametrizations.weight.original" for place in (0, 3, 9)}


def test_a_frozen_parameter_is_a_row_without_a_verdict_on_it():
    model = nn.Sequential(nn.Linear(20, 5), nn.Linear(5, 10))
    model[0].requires_grad_(False)
    check = check_gradients(model=model, loss_fn=CE, batch=classes())
    verdicts = check.table["verdict"].to_dict()
    assert verdicts == {"1.weight": "right", "1.bias": "right", "0.weight": "frozen", "0.bias": "frozen"}
    assert check.verdict == "right"


def test_parameters_of_the_loss_are_checked_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return F.cross_entropy(output * Square.apply(self.scale, 1.01), y)

    check = check_gradients(model=nn.Linear(20, 10), loss_fn=Scaled(), batch=classes())
    assert (check.verdict, check.worst) == ("wrong", "loss_fn.scale")


def test_a_loss_that_is_a_method_of_the_model_uses_the_copy():
    class Model(nn.Linear):
        def loss(self, output, y):
            return F.cross_entropy(output, y) + self.weight.square().sum()

    model = Model(20, 10)
    check = check_gradients(model=model, loss_fn=model.loss, batch=classes())
    assert check.verdict == "right" and list(check.table.index) == ["weight", "bias"]
    assert model.weight.grad is None


def test_a_detached_encoder_is_told_from_a_right_head():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(20, 8), nn.Linear(8, 10)

        def forward(self, x):
            return self.head(self.encoder(x).detach())

    check = check_gradients(model=Cut(), loss_fn=CE, batch=classes())
    assert check.verdict == "detached"
    assert check.table["verdict"].to_dict() == {
        "encoder.weight": "detached",
        "encoder.bias": "detached",
        "head.weight": "right",
        "head.bias": "right",
    }


def test_float32_inside_a_model_is_said_to_be_coarse():
    class Norm(nn.Module):
        def forward(self, x):
            y = x.float()
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)

    model = nn.Sequential(nn.Linear(20, 20), Norm(), nn.Linear(20, 10))
    assert check_gradients(model=model, loss_fn=CE, batch=classes()).verdict == "precision"


def test_second_order_of_a_model():
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 10))
    assert check_gradients(model=model, loss_fn=CE, batch=classes(), order=2).verdict == "right"


# --- nothing is left behind -------------------------------------------------------------------------------------------


def test_everything_is_left_as_it_was():
    torch.manual_seed(3)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10))
    model[4].eval()
    x, y = classes()
    CE(model(x.clone()), y).backward()
    tensors = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}, "x": x, "y": y}
    before = {name: (id(t), t._version, t.clone()) for name, t in tensors.items()}
    objects = [id(p) for p in model.parameters()], [id(p.grad) for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with torch.no_grad():
        check_gradients(model=model, loss_fn=lambda o, y: CE(o, y) * (1 + 0 * np.random.rand()), batch=(x, y))
        assert not torch.is_grad_enabled()
    after = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}, "x": x, "y": y}
    for name, (_, version, value) in before.items():
        assert tensors[name]._version == version and torch.equal(after[name], value), name
    assert objects == ([id(p) for p in model.parameters()], [id(p.grad) for p in model.parameters()])
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert torch.get_default_dtype() == torch.float32


def test_inputs_are_left_as_they_were_even_after_an_error():
    x = X.clone().requires_grad_()
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        check_gradients(lambda x: x.sum() / (1 // 0), x)
    check_gradients(torch.sin, x)
    assert x.grad is None and x._version == 0 and torch.equal(x, X)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32


def test_the_same_call_gives_the_same_result():
    torch.manual_seed(0)
    model, batch = deep(), classes(24)
    once, again = (check_gradients(model=model, loss_fn=CE, batch=batch, seed=5) for _ in range(2))
    assert repr(once.rows) == repr(again.rows)


# --- bad input --------------------------------------------------------------------------------------------------------


def change_in_place(x):
    x.mul_(2)
    return x.sum()


def change_data(x):
    x.data.mul_(2)
    return x.sum()


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.ones(3)


class Clipping(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(torch.float32))


class Stubborn(nn.Linear):
    def _apply(self, *_):
        return self


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


def of_model(model=None, loss_fn=CE, batch=None):
    return check_gradients(
        model=model or nn.Linear(20, 10), loss_fn=loss_fn, batch=classes() if batch is None else batch
    )


def frozen(model):
    return model.requires_grad_(False)


BAD = {
    "nothing": (lambda: check_gradients(), "got nothing"),
    "half a model": (lambda: check_gradients(model=nn.Linear(2, 2)), "got model"),
    "no inputs": (lambda: check_gradients(torch.sin), "expected fn and its tensors, .* got fn"),
    "both": (lambda: check_gradients(torch.sin, X, model=nn.Linear(2, 2)), "got fn, 1 inputs, model"),
    "a model as fn": (lambda: check_gradients(nn.Linear(5, 5), X), "Pass model=, loss_fn= and batch="),
    "order": (lambda: check_gradients(torch.sin, X, order=3), "order: expected 1 or 2, got 3"),
    "seed": (lambda: check_gradients(torch.sin, X, seed="a"), "seed: expected a whole number, got 'a'"),
    "no function": (lambda: check_gradients(3, X), "fn: expected a function of tensors, got int"),
    "sparse": (
        lambda: check_gradients(lambda x: x.to_dense(), torch.eye(2).to_sparse()),
        "x: .*layout torch.sparse_coo",
    ),
    "meta": (lambda: check_gradients(torch.sin, torch.ones(2, device="meta")), "input: .*no values"),
    "batch": (lambda: of_model(batch=torch.ones(2)), r"batch: expected a pair \(x, y\), got Tensor"),
    "integers": (lambda: check_gradients(lambda x: x * 2, torch.tensor([1])), "x: .*got torch.int64.*Close over it"),
    "complex": (lambda: check_gradients(torch.abs, torch.ones(2) * 1j), "got torch.complex64"),
    "a number": (lambda: check_gradients(lambda x: x, 2.0), "x: expected a tensor of real floating point, got float"),
    "no elements": (lambda: check_gradients(torch.sin, torch.ones(0)), "got none"),
    "NaN": (lambda: check_gradients(torch.sin, double(np.nan)), "got NaN or infinity"),
    "inference": (lambda: check_gradients(torch.sin, made_in_inference_mode()), r"input: .*Pass input\.clone\(\)"),
    "inside inference": (lambda: torch.inference_mode()(check_gradients)(torch.sin, X), "Call it outside"),
    "returns a float": (lambda: check_gradients(lambda x: x.detach().sum().item(), X), "got float"),
    "returns a pair": (lambda: check_gradients(lambda x: (x, x), X), "got tuple"),
    "returns integers": (lambda: check_gradients(lambda x: x.long(), X), "got torch.int64"),
    "infinite": (lambda: check_gradients(lambda x: x.abs().sum() / 0, X), "the value is inf here"),
    "constant": (lambda: check_gradients(lambda x: torch.ones(1), X), "no graph and does not change"),
    "a count": (lambda: check_gradients(lambda x: x.argmax().double(), X), "no graph and does not change"),
    "in place": (lambda: check_gradients(change_in_place, X), "x: fn changes it in place"),
    "data": (lambda: check_gradients(change_data, X), "x: fn changes it in place"),
    "frozen": (lambda: of_model(frozen(nn.Linear(20, 10))), "no parameter requires a gradient"),
    "loss of two": (
        lambda: of_model(loss_fn=nn.CrossEntropyLoss(reduction="none")),
        r"got shape \(32,\)\. Reduce it: \.mean\(\)",
    ),
    "loss a float": (lambda: of_model(loss_fn=lambda o, y: 1.0), "got float"),
    "changes itself": (lambda: of_model(Clipping(20, 10)), "the forward pass changes parameters"),
    "float32 for ever": (lambda: of_model(Fixed(20, 10)), r"float64 copy does not .*x\.to\(weight\.dtype\)"),
    "no double": (lambda: of_model(Stubborn(20, 10)), r"weight: stays torch\.float32 after \.double\(\)"),
    "no copy": (lambda: of_model(Uncopied(20, 10)), r"no float64 copy \(RuntimeError: no copies\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_to_be_bad(name):
    call, message = BAD[name]
    with pytest.raises(DxdyError, match=message):
        call()


@pytest.mark.parametrize(
    "batch", [(torch.randn(4, 7), torch.zeros(4).long()), (torch.randn(4, 20, device="meta"), torch.zeros(4).long())]
)
def test_an_error_of_torch_passes_through(batch):
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        of_model(batch=batch)
    assert not isinstance(caught.value, DxdyError)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_plot_has_a_line_for_each_suspicious_row():
    check = check_gradients(lambda a, b: Square.apply(a, 1.01).sum() + b.sin().sum(), X, X)
    axes = check.plot().axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["a: wrong"]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert len(check_gradients(torch.add, X, X).plot().axes[0].get_lines()) == 2


def test_a_large_healthy_model_has_no_curves_to_draw():
    torch.manual_seed(0)
    figure = check_gradients(model=deep(), loss_fn=CE, batch=classes(24)).plot()
    assert not figure.axes[0].get_lines() and figure.get_label().endswith("verdict right")


def test_rows_are_named_after_the_arguments():
    def names(fn, *inputs):
        return [row.name for row in check_gradients(fn, *inputs).rows]

    assert names(lambda a, b=X: a * b, X) == ["a"] and names(lambda a, b: a * b, X, X) == ["a", "b"]
    assert names(SquareOfDetached.apply, X) == names(torch.sin, X) == ["input"]
    assert names(lambda *all: all[0] * all[1], X, X) == ["input 0", "input 1"]


def test_the_table_has_a_row_for_each_tensor():
    check = check_gradients(torch.mul, X, X)
    assert isinstance(check, Check)
    assert list(check.table.index) == ["input 0", "input 1"]
    assert list(check.table.columns) == ["verdict", "error", "step", "analytic", "numeric", "left", "right", "detects"]
    assert repr(check).startswith("right: autograd and finite differences agree; a fault of ")


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(DxdyError, match="loss_fn: expected a function"):
        check_gradients(model=nn.Linear(1, 1), loss_fn="mse", batch=(torch.ones(1, 1), torch.ones(1, 1)))
