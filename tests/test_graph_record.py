"""What is recorded of a forward pass: modules, values, and the lines that cut the graph; and nothing is left behind."""

import copy
import inspect
import json
import math
import pickle
import threading
import warnings

import nets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dxdy_nb as dx
from dxdy_nb.autograd.record import next_number

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


class Two(nn.Module):
    """Two layers; what happens between them is given."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(2, 2), nn.Linear(2, 2), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def no_grad(h):
    with torch.no_grad():
        return h * 2


def argmax(h):
    return F.one_hot(h.argmax(1), 2).float()


def through_numpy(h):
    return torch.from_numpy(np.tanh(h.detach().numpy()))


def tensor_of_numpy(h):
    return torch.tensor(h.detach().numpy() * 2)


def wrapped(h):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tensor(h)


def setitem(h):
    out = torch.zeros(2, 2)
    out[0] = h.detach()[0]
    return out


def array_at(h):
    return torch.ones(2, 2) * h.detach().numpy()[0, 1]


def scalar_of_numpy(h):
    return h.detach().numpy().mean() * torch.ones(2, 2)


def float_of_numpy(h):
    return torch.tensor([[float(v) for v in row] for row in h.detach().numpy()])


def asarray(h):
    return torch.from_numpy(np.asarray(h.detach()) * 2)


def numpy_where(h):
    values = h.detach().numpy()
    return torch.from_numpy(np.concatenate([np.where(values > 0, values, 0)[:1], np.zeros((1, 2), np.float32)]))


def numpy_in_place(h):
    out = np.zeros((2, 2), np.float32)
    out += h.detach().numpy()
    return torch.as_tensor(out)


def view_under_no_grad(h):
    out = torch.zeros(2, 2)
    with torch.no_grad():
        out[0] = h[0]
    return out


CUTS = {
    "array at": (array_at, "detach"),
    "scalar of numpy": (scalar_of_numpy, "detach"),
    "float of numpy": (float_of_numpy, "detach"),
    "asarray": (asarray, "detach"),
    "numpy where": (numpy_where, "detach"),
    "numpy in place": (numpy_in_place, "detach"),
    "view under no_grad": (view_under_no_grad, "getitem__ under no_grad"),
    "detach_": (lambda h: (h * 1).detach_(), "detach_"),
    "rounded": (lambda h: torch.ones(2, 2) * round(h.sum().item() % 7 // 0.1, 3), "item"),
    "int": (lambda h: torch.ones(2, 2) * int(10 * h.sum().item()), "item"),
    "place": (lambda h: torch.eye(2)[[h[0].argmax().item(), 0]], "argmax"),
    "new": (lambda h: h.new_tensor(h.detach().tolist()), "detach"),
    "dlpack": (lambda h: torch.from_dlpack(h.detach()) * 1, "detach"),
    "detach": (lambda h: h.detach(), "detach"),
    "data": (lambda h: h.data, "data"),
    "no_grad": (no_grad, "mul under no_grad"),
    "item": (lambda h: torch.ones(2, 2) * (h.sum().item() / 3), "item"),
    "tolist": (lambda h: torch.tensor(h.tolist()), "tolist"),
    "float": (lambda h: torch.full((2, 2), 1.0) * float(h.sum()), "__float__"),
    "argmax": (argmax, "argmax"),
    "numpy": (through_numpy, "detach"),
    "tensor of numpy": (tensor_of_numpy, "detach"),
    "torch.tensor": (wrapped, "tensor"),
    "setitem": (setitem, "detach"),
    "comparison": (lambda h: (h > 0).float(), "gt"),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_found_with_its_line_and_parameters(name):
    between, operation = CUTS[name]
    model = Two(between)
    with dx.record(model) as seen:
        loss = model(X).sum()
    cuts = dx.graph(loss, record=seen).cuts
    assert [(cut.kind, cut.parameters) for cut in cuts] == [("cut", ("first.weight", "first.bias"))]
    assert operation in cuts[0].operation
    lines, start = inspect.getsourcelines(between)
    file, line = cuts[0].where.split(":")
    assert file == "test_graph_record.py" and start <= int(line) < start + len(lines)


def test_a_line_that_runs_many_times_is_one_cut():
    model = Two(lambda h: sum(h.detach() * k for k in range(5)))
    with dx.record(model) as seen:
        loss = model(X).sum()
    assert len(dx.graph(loss, record=seen).cuts) == 1


HARMLESS = {
    "detach": lambda h: h.detach().mean(),
    "item": lambda h: f"{h.sum().item():.3f}",
    "argmax": lambda h: (h.argmax(1) == 1).float().mean().item(),
    "numpy": lambda h: h.detach().numpy().mean(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_logging_is_no_cut(name):
    log = []
    model = Two(lambda h: (log.append(HARMLESS[name](h)), h)[1])
    model.unused = nn.Linear(2, 2)  # something is lost, so that every cut is weighed
    with dx.record(model) as seen:
        loss = model(X).sum()
        log.append(HARMLESS[name](model.unused(X)))
    cuts = dx.graph(loss, record=seen).cuts
    assert [(cut.where, cut.operation, cut.parameters) for cut in cuts] == [
        ("", "not reached", ("unused.weight", "unused.bias"))
    ]


def test_half_detached_is_no_cut():
    model = Two(lambda h: h * h.detach())
    with dx.record(model) as seen:
        loss = model(X).sum()
    assert dx.graph(loss, record=seen).cuts == ()


@pytest.mark.parametrize("flat", [torch.round, torch.sign])
def test_zero_is_told_from_cut_and_has_its_line(flat):
    model = Two(lambda h: flat(h))
    with dx.record(model) as seen:
        loss = model(X).sum()
    (cut,) = dx.graph(loss, record=seen).cuts
    assert (cut.kind, cut.operation, set(cut.parameters)) == ("zero", flat.__name__, {"first.weight", "first.bias"})
    assert cut.where.startswith("test_graph_record.py:")


HEALTHY = {
    "where": lambda h: torch.where(h > 0, h, h.exp()),
    "mask": lambda h: h * (h > 0),
    "index": lambda h: h[h.argmax(1)],
    "max": lambda h: h - h.max(1, keepdim=True).values,
    "dropout": lambda h: F.dropout(h, 0.5),
    "attention": lambda h: h.masked_fill(torch.ones(2, 2).tril() == 0, -1e9).softmax(-1),
    "no_grad mean": lambda h: h - h.detach().mean(),
    "norm": lambda h: F.layer_norm(h, (2,)),
    "new": lambda h: h + h.new_ones(2) + torch.zeros_like(h),
    "clipped": lambda h: h * min(1.0, 5 / h.norm().item()),
    "scaled": lambda h: h / np.float32(1 + h.detach().abs().numpy().max()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_cut(name):
    model = Two(HEALTHY[name])
    with dx.record(model) as seen:
        loss = F.cross_entropy(model(X), torch.tensor([0, 1]))
    assert dx.graph(loss, record=seen).cuts == ()


@pytest.mark.parametrize("make", [nets.transformer_loss, nets.resnet_loss, nets.mlp_loss])
def test_recording_changes_no_number_and_leaves_nothing(make):
    model, forward = make()
    plain = forward()
    plain.backward()
    want, state = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    model, forward = make()
    from_numpy = torch.from_numpy
    with dx.record(model) as seen:
        loss = forward()
    dx.graph(loss, record=seen)
    loss.backward()
    assert loss.item() == plain.item() and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, p.grad) for a, p in zip(want, model.parameters(), strict=True))
    assert torch.from_numpy is from_numpy and clean(model)


def clean(model):
    modes = torch.overrides._get_current_function_mode_stack()
    return not modes and not any(t for m in model.modules() for k, t in vars(m).items() if "hooks" in k)


def test_nothing_stays_after_an_error():
    from_numpy = torch.from_numpy
    model = Two(lambda h: h.view(7))
    with pytest.raises(RuntimeError, match="invalid for input"), dx.record(model):
        model(X)
    assert torch.from_numpy is from_numpy and clean(model)


def test_an_error_that_the_program_catches_closes_its_modules():
    model = Two(lambda h: h.view(7))
    with dx.record(model) as seen:
        with pytest.raises(RuntimeError):
            model(X)
        loss = model.second(X).exp().sum()
    modules = [(node.operation, node.module) for node in dx.graph(loss, record=seen).nodes if node.leaf is None]
    assert modules == [("Sum", ""), ("Exp", ""), ("Addmm", "second"), ("T", "second")]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.block = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "again": self.shared})

    def forward(self, x, *, scale=1.0):
        x = self.shared(x).exp()
        x = self.block["inner"](x) * scale
        return self.block["again"](x)


def test_modules_nested_shared_and_called_twice():
    model = Nested()
    with dx.record(model) as seen:
        loss = model(x=X, scale=2.0).sum()
    found = [(node.operation, node.module) for node in dx.graph(loss, record=seen).nodes if node.leaf is None]
    assert found == [
        ("Sum", ""), ("Addmm", "shared"), ("T", "shared"), ("Mul", ""), ("Tanh", "block.inner.1"),
        ("Addmm", "block.inner.0"), ("T", "block.inner.0"), ("Exp", ""), ("Addmm", "shared"), ("T", "shared"),
    ]  # fmt: skip


def test_forward_values():
    x, w, b = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 1.0))
    with dx.record(nn.Identity()) as seen:
        loss = (w * x + b) ** 2
    g = dx.graph(loss, record=seen)
    assert {node.leaf or node.operation: node.value.item() for node in g.nodes} == {
        "Pow": 49, "Add": 7, "Mul": 6, "x": 2, "w": 3, "b": 1,
    }  # fmt: skip


def test_a_value_has_the_shape_of_its_node():
    x = torch.ones(2, 3, requires_grad=True)
    with dx.record(nn.Identity()) as seen:
        y = x * 1
        y[0].mul_(3)
        loss = y.sum()
    for node in dx.graph(loss, record=seen).nodes:
        assert node.value is None or tuple(node.value.shape) == node.shapes[0]


def test_a_recorded_number_is_a_number():
    w = torch.tensor([1.25, 2.0], requires_grad=True)
    with dx.record(nn.Identity()):
        number, array = w.sum().item(), w.detach().numpy()
    assert isinstance(number, float) and number == 3.25 and 3 < number < 4 and hash(number) == hash(3.25)
    assert f"{number:.1f} {number}" == "3.2 3.25" and repr(number) == "3.25" and "%.2f" % number == "3.25"  # noqa: UP031
    assert json.dumps({"loss": number}) == '{"loss": 3.25}'
    assert (round(number), round(number, 1), int(number), math.floor(number)) == (3, 3.2, 3, 3)
    assert math.sqrt(number) == math.sqrt(3.25) and bool(number) and divmod(number, 2) == (1, 1.25)
    assert (number + 1, 1 + number, -number, abs(number), number**2, 2**number) == (
        4.25,
        4.25,
        -3.25,
        3.25,
        10.5625,
        2**3.25,
    )
    assert sum([number, number]) == 6.5 and max(number, 1) == 3.25 and np.mean([number]) == 3.25
    assert hasattr(number / 2, "marks") and number + 1j == 3.25 + 1j
    with pytest.raises(TypeError):
        number + "a"
    assert np.array_equal(np.asarray(array), [1.25, 2]) and array.mean() == 1.625 and array.tolist() == [1.25, 2]
    assert isinstance(array, np.ndarray) and np.concatenate([array, array]).shape == (4,) and array.dtype == np.float32


def test_what_else_has_marks_is_left_alone():
    class Ruler(nn.Module):
        marks = (1, 2)

        def __rmul__(self, other):
            return other * 2

    model = Two(lambda h: torch.stack([h, h]).mean(0) * Ruler() + 0 * (h.detach().numpy().max() * Ruler()))
    with dx.record(model) as seen:
        loss = model(X).sum()
    assert dx.graph(loss, record=seen).cuts == ()


def test_recorded_numbers_can_be_stored_and_copied():
    w = torch.tensor([[1.25, 2.0], [0.5, 4.0]], requires_grad=True)
    with dx.record(nn.Identity()):
        number, place, array = w.sum().item(), w.argmax().item(), w.detach().numpy()
        for value in (number, place, array[1, 0], array.mean(), array):
            for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
                assert np.array_equal(again, value)
        assert [[10, 20, 30, 40][place], list(range(place))] == [40, [0, 1, 2]] and {number: 1}[7.75] == 1
        assert type(array[0, 0].item() + 0.5).__mro__[1] is float and array[0, 0].dtype == np.float32
        assert torch.full((1,), array[0, 0]).item() == 1.25 and torch.zeros(place).shape == (3,)
        assert torch.clamp(w, max=array.max() / 2).max() == 2 and f"{array[0, 0]:.1f}" == "1.2"
        assert [row.tolist() for row in array] == array.tolist() == [[1.25, 2.0], [0.5, 4.0]]
        assert np.linalg.norm(array) == pytest.approx(np.linalg.norm(np.array(array)))


def test_records_in_several_threads_leave_numpy_as_it_was():
    from_numpy, done, both = torch.from_numpy, [], threading.Barrier(2, timeout=60)

    def run(place):
        model = Two(through_numpy)
        with dx.record(model) as seen:
            both.wait()
            loss = model(X).sum()
        if place:
            both.wait()  # one ends first, whichever began first
        done.append(dx.graph(loss, record=seen).cuts[0].operation)
        if not place:
            both.wait()

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == ["detach", "detach"] and torch.from_numpy is from_numpy


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_module_that_takes_no_hooks_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Tanh()))
    with dx.record(model) as seen:
        loss = model(X).sum()
    g = dx.graph(loss, record=seen)
    assert {node.operation: node.module for node in g.nodes}["Tanh"] == "" and clean(model[0])


def test_a_record_that_cannot_start_leaves_nothing():
    class Stubborn(nn.Linear):
        def register_forward_hook(self, *args, **named):
            raise RuntimeError("no hooks")

    model, from_numpy = nn.Sequential(nn.Linear(2, 2), Stubborn(2, 2)), torch.from_numpy
    with pytest.raises(RuntimeError, match="no hooks"), dx.record(model):
        pass
    assert clean(model) and torch.from_numpy is from_numpy


def test_a_loss_made_after_the_record_is_weighed_by_what_is_lost():
    model = Two(lambda h: h.detach())
    with dx.record(model) as seen:
        out = model(X)
    (cut,) = dx.graph(out.sum(), record=seen).cuts
    assert cut.operation == "detach" and cut.parameters == ("first.weight", "first.bias")


def test_the_public_way_to_the_next_number(monkeypatch):
    number = next_number()
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    assert next_number() >= number


def test_a_compiled_model_can_be_recorded():
    model = Two(torch.tanh)
    compiled = torch.compile(model, backend="aot_eager")
    with dx.record(model) as seen:
        loss = compiled(X).sum()
    dx.graph(loss, record=seen)
    loss.backward()
    assert model.first.weight.grad is not None
