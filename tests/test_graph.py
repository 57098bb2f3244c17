"""A graph is walked as torch made it, and every gradient on it is torch's own; looking changes nothing."""

import gc
import subprocess
import sys
import threading

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dxdy_nb as dx
from dxdy_nb.errors import DxdyError

NETS = {"mlp": nets.mlp_loss, "transformer": nets.transformer_loss, "resnet": nets.resnet_loss}


def leaf(g, name):
    return next(entry for entry in g.leaves if entry.name == name)


def operations(g):
    return [node.leaf or node.operation for node in g.nodes]


def ways(g):
    """Return the edges with names: (from, to, position, slot)."""
    names = operations(g)
    return [(names[edge.source], names[edge.target], edge.position, edge.slot) for edge in g.edges]


def test_the_example_of_the_workbook():
    x, w, b = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 1.0))
    g = dx.graph((w * x + b) ** 2)
    assert operations(g) == ["Pow", "Add", "Mul", "b", "w", "x"]
    assert {entry.name: entry.norm for entry in g.leaves} == {"x": 42, "w": 28, "b": 14}
    assert [node.gradient.item() for node in g.nodes] == [1, 14, 14, 14, 28, 42]
    assert [node.depth for node in g.nodes] == [0, 1, 2, 2, 3, 3]
    assert {(e.source, e.target): e.gradient.item() for e in g.edges} == {
        (0, 1): 14, (1, 2): 14, (1, 3): 14, (2, 4): 28, (2, 5): 42,
    }  # fmt: skip
    assert (x.grad, w.grad, b.grad) == (None, None, None)
    assert {entry.kind for entry in g.leaves} == {"input"} and g.cuts == () and g.notes == ()


def test_a_leaf_used_several_times():
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    g = dx.graph((x * x).sum())
    assert [way for way in ways(g) if way[1] == "x"] == [("Mul", "x", 0, 0), ("Mul", "x", 1, 0)]
    assert torch.equal(g.nodes[leaf(g, "x").node].gradient, torch.tensor([2.0, -6.0]))
    y = torch.tensor([1.0, 2.0], requires_grad=True)
    assert leaf(dx.graph((y - y).sum()), "y").norm == 0  # tensors are summed, norms never


def test_several_outputs_and_their_slots():
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    first, _, third = x.unbind()
    g = dx.graph((first * 3 + third * 4).sum())
    assert sorted(way[3] for way in ways(g) if way[1] == "Unbind") == [0, 2]
    unbind = next(node for node in g.nodes if node.operation == "Unbind")
    assert unbind.shapes == ((2,), (2,), (2,))
    assert unbind.norm == pytest.approx(50**0.5)  # of (3, 3) and (4, 4) as one vector
    assert unbind.gradient is None
    assert {e.slot: e.gradient.tolist() for e in g.edges if g.nodes[e.target] is unbind} == {0: [3, 3], 2: [4, 4]}
    parts = torch.ones(6, requires_grad=True).chunk(2)
    chunked = dx.graph((parts[1] * 2).sum())
    assert [way[3] for way in ways(chunked) if way[1] == "Split"] == [1]


def test_views_and_edits_in_place():
    x = torch.ones(2, 3, requires_grad=True)
    y = x * 1
    y[0].mul_(3)
    y += 1
    loss = (y.view(-1) ** 2).sum()
    g = dx.graph(loss)
    assert "CopySlices" in operations(g)
    loss.backward()
    assert leaf(g, "x").norm == x.grad.norm().item()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unused=None):
        ctx.save_for_backward(x)
        return x * 2, x * 5

    @staticmethod
    def backward(ctx, grad, other):
        return grad * 2 + other * 5, None


def test_a_custom_function_with_an_unused_output():
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    g = dx.graph(Doubled.apply(x)[0].sum())
    node = next(node for node in g.nodes if node.operation == "Doubled")
    assert node.norm == pytest.approx(2**0.5)
    assert leaf(g, "x").norm == pytest.approx(8**0.5)
    assert [(kept.name, kept.shape, kept.bytes) for kept in node.saved] == [("tensors", (2,), 8)]


def test_a_graph_of_gradients():
    x = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(x**3, x, create_graph=True)
    g = dx.graph(slope)
    assert leaf(g, "x").norm == 12  # the second derivative of x³
    assert torch.autograd.grad(slope, x)[0] == 12


def test_nodes_of_several_threads_stay_in_order():
    x = torch.ones(3, requires_grad=True)
    for _ in range(20):
        y = x * 2  # numbers of this thread are higher than those of the other
    made = []
    thread = threading.Thread(target=lambda: made.append(y.exp().sin().cos()))
    thread.start()
    thread.join()
    g = dx.graph((made[0] * y).sum())
    assert all(edge.source < edge.target for edge in g.edges)
    for edge in g.edges:
        assert g.nodes[edge.target].depth > g.nodes[edge.source].depth
    assert operations(g) == ["Sum", "Mul", "Cos", "Sin", "Exp", "Mul", "x"]


def test_looking_does_not_run_a_checkpoint_again():
    calls = []
    model = nn.Linear(3, 3)

    def part(x):
        calls.append(1)
        return model(x).tanh().sin()

    x = torch.ones(2, 3, requires_grad=True)
    loss = checkpoint(part, x, use_reentrant=False).sum()
    g = dx.graph(loss, model, gradients=False)
    assert len(calls) == 1
    assert any("not unpacked" in note for note in g.notes)
    assert any(kept.dtype == "packed" for node in g.nodes for kept in node.saved)
    whole = dx.graph(loss, model)
    assert len(calls) == 2  # the backward pass itself has to
    loss.backward()
    assert leaf(whole, "weight").norm == model.weight.grad.norm().item()


def test_a_reentrant_checkpoint_is_noted():
    model = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    loss = checkpoint(lambda x: model(x).tanh(), x, use_reentrant=True).sum()
    g = dx.graph(loss, model)
    assert "CheckpointFunction" in operations(g)
    assert any("use_reentrant=False" in note for note in g.notes) and any("not seen" in note for note in g.notes)
    assert leaf(g, "x").norm is None and g.cuts == ()
    loss.backward()
    assert model.weight.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_one_box():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    loss = torch.compile(model, backend="aot_eager")(torch.ones(2, 3)).sum()
    g = dx.graph(loss, model)
    assert operations(g).count("CompiledFunction") == 1
    assert any("one box" in note for note in g.notes)
    loss.backward()
    assert {e.name: e.norm for e in g.leaves} == {n: p.grad.norm().item() for n, p in model.named_parameters()}


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    loss = (model(torch.tensor([1, 1, 3])) * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum()
    g = dx.graph(loss, model)
    wanted = torch.tensor([[4.0, 6.0], [5.0, 6.0]]).norm().item()  # the rows of word 1 are summed first
    assert leaf(g, "weight").norm == wanted
    assert [edge.norm for edge in g.edges if g.nodes[edge.target].leaf] == [pytest.approx(wanted)]
    assert g.nodes[leaf(g, "weight").node].gradient.tolist()[1] == [4, 6]


def test_complex_gradients():
    z = torch.tensor([3 + 4j, 1j], requires_grad=True)
    loss = (z * z.conj()).real.sum()
    g = dx.graph(loss)
    loss.backward()
    assert leaf(g, "z").norm == z.grad.norm().item()
    assert all(isinstance(edge.norm, float) for edge in g.edges)


def test_constants_have_no_node():
    x = torch.ones(2, requires_grad=True)
    g = dx.graph((x * torch.ones(2) + 3).sum())
    assert operations(g) == ["Sum", "Add", "Mul", "x"] and len(g.edges) == 3


def test_a_freed_graph_gives_its_structure():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    g = dx.graph(loss, model)
    assert operations(g)[:4] == ["Sum", "Pow", "Tanh", "Addmm"]
    assert sum("freed by an earlier backward" in note for note in g.notes) == 2
    assert all(edge.norm is None for edge in g.edges) and g.saved_bytes == 0


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        torch.randn(3)  # a backward that draws, as stochastic rounding does
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_buffers_random_states_and_retained_gradients_are_put_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    x = torch.randn(4, 3, requires_grad=True)
    hidden = Cubed.apply(x)
    hidden.retain_grad()
    loss = checkpoint(model, hidden, use_reentrant=False).sum()
    before, buffers = state(model), [id(buffer) for buffer in model.buffers()]
    dx.graph(loss, model)  # runs the forward of the batch norm again
    assert same(before, state(model)) and buffers == [id(buffer) for buffer in model.buffers()]
    assert hidden.grad is None
    hidden.grad = torch.ones(4, 3)
    dx.graph(loss, model)
    assert torch.equal(hidden.grad, torch.ones(4, 3))


def test_a_graph_that_cannot_run_backward_gives_its_structure():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.mul_(2)
    for broken, words in ((loss, "changed in place"), ((x // 2).sum(), "no derivative")):
        g = dx.graph(broken)
        assert operations(g)[0] == "Sum" and operations(g)[-1] == "x" and leaf(g, "x").norm is None
        assert len(g.notes) == 1 and words in g.notes[0] and g.cuts == ()


def test_half_precision_norms_do_not_overflow():
    x = torch.ones(10_000, dtype=torch.float16, requires_grad=True)
    g = dx.graph((1000 * x).mean() * 10)
    assert leaf(g, "x").norm == pytest.approx(100, rel=1e-2)
    g = dx.graph((1000 * x)[:5000].max() + (x * 1000).sum() / 10_000 + (x * 1000).chunk(2)[0].sum())
    assert 70_000 < leaf(g, "x").norm < 80_000 and g.draw().diagram.boxes[-1].grade != "none"


def test_a_model_without_values_has_a_structure():
    model = nn.Linear(2, 1, device="meta")
    g = dx.graph(model(torch.ones(1, 2, device="meta")).sum(), model)
    assert "no values" in g.notes[0] and str(g) and "No gradients are known" in repr(g.draw())
    assert [entry.shape for entry in g.leaves] == [(1,), (1, 2)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    model = nn.Linear(5, 2)
    parts = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)], layout=layout)
    loss = sum(part.square().sum() for part in model(parts).unbind())
    g = dx.graph(loss, model)
    assert str(g) and g.draw()._repr_mimebundle_()
    loss.backward()
    assert {e.name: e.norm for e in g.leaves} == {n: p.grad.norm().item() for n, p in model.named_parameters()}


def test_tied_weights_have_one_name_and_one_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    loss = model(torch.ones(1, 3)).sum()
    g = dx.graph(loss, model)
    loss.backward()
    assert sorted(entry.name for entry in g.leaves) == ["0.bias", "0.weight", "1.bias"]
    assert leaf(g, "0.weight").norm == model[0].weight.grad.norm().item()
    assert g.cuts == ()


class HalfUsed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_leaf_that_gets_no_gradient():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    g = dx.graph(HalfUsed.apply(x, y).sum())
    assert leaf(g, "y").norm is None and leaf(g, "x").norm == pytest.approx(2**0.5)


def test_parameters_that_are_not_reached():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "not": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    g = dx.graph(model["used"](torch.ones(1, 2)).sum(), model)
    assert [(cut.kind, cut.operation, cut.parameters) for cut in g.cuts] == [
        ("cut", "not reached", ("not.weight", "not.bias"))
    ]


def test_a_derivative_that_is_zero_is_told_apart():
    model = nn.Linear(2, 2)
    g = dx.graph(model(torch.ones(1, 2)).round().sum(), model)
    assert [(cut.kind, cut.operation, set(cut.parameters)) for cut in g.cuts] == [("zero", "round", {"weight", "bias"})]


ZERO = {
    "clamp": lambda h: h.clamp(100, 101),
    "relu": lambda h: F.relu(h - 100),
    "mul": lambda h: 0 * h,
    "softmax": lambda h: h[:, :1].softmax(1),
    "sigmoid": lambda h: torch.sigmoid(h + 100),
}


@pytest.mark.parametrize("operation", ZERO)
def test_any_operation_that_lets_no_gradient_by_is_named_with_its_node(operation):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    g = dx.graph(ZERO[operation](model(torch.ones(1, 2))).sum(), model)
    (cut,) = g.cuts
    assert (cut.kind, cut.operation) == ("zero", operation) and {"0.weight", "0.bias"} == set(cut.parameters)
    assert g.nodes[cut.node].norm > 0 and not any(edge.norm for edge in g.outgoing[cut.node])
    assert sum(box.red for box in g.draw().diagram.boxes) == 1  # and no other node of its kind


def test_zeros_that_cancel_or_start_are_no_cuts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    nn.init.zeros_(model[2].weight)  # the first layer learns from the second step on
    assert dx.graph(model(torch.ones(1, 2)).sum(), model).cuts == ()
    x = torch.ones(2, requires_grad=True)
    assert dx.graph((x - x).sum()).cuts == () and dx.graph(torch.ones(0, requires_grad=True).sum()).cuts == ()


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_function_that_returns_no_gradient_is_a_cut():
    x = torch.ones(2, requires_grad=True)
    g = dx.graph(Nothing.apply(2 * x).sum())
    assert [(cut.kind, cut.operation, cut.parameters, cut.node) for cut in g.cuts] == [("cut", "nothing", ("x",), 1)]


@pytest.mark.parametrize("name", NETS)
def test_norms_against_a_naive_way(name):
    model, forward = NETS[name]()
    loss = forward()
    g = dx.graph(loss, model)
    want: dict = {}

    def measure(place):
        def after(leaving, arriving):
            for position, grad in enumerate(leaving):
                if grad is not None:
                    want[place, position] = torch.linalg.vector_norm(grad, dtype=torch.float64).item()

        return after

    order, waiting = {}, [loss.grad_fn]  # by the same edges from the root, so that places agree
    order[loss.grad_fn] = 0
    out = g.outgoing
    while waiting:
        node = waiting.pop()
        real = [(k, n) for k, (n, _) in enumerate(node.next_functions) if n is not None]
        assert [k for k, _ in real] == [edge.position for edge in out[order[node]]]
        for (_, child), edge in zip(real, out[order[node]], strict=True):
            if child not in order:
                order[child] = edge.target
                waiting.append(child)
            assert order[child] == edge.target
    assert len(order) == len(g.nodes)
    for node, place in order.items():
        if type(node).__name__ != "AccumulateGrad":
            node.register_hook(measure(place))
    loss.backward()
    for entry in g.leaves:
        assert entry.norm == dict(model.named_parameters())[entry.name].grad.norm().item()
    for edge in g.edges:
        assert edge.norm == pytest.approx(want[edge.source, edge.position], rel=1e-6, abs=1e-30)


def state(model):
    hooks = [len(table) for m in model.modules() for key, table in vars(m).items() if "hooks" in key]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    tensor_hooks = [p._backward_hooks for p in model.parameters()]
    return torch.get_rng_state().tolist(), [m.training for m in model.modules()], hooks, grads, tensor_hooks


def same(a, b):
    return a[:3] == b[:3] and all(x is y or torch.equal(x, y) for x, y in zip(a[3] + a[4], b[3] + b[4], strict=True))


@pytest.mark.parametrize("name", NETS)
def test_looking_changes_nothing(name):
    model, forward = NETS[name]()
    model.train()
    forward().backward()  # some .grad to be left alone
    loss = forward()
    before, on = state(model), gc.isenabled()
    dx.graph(loss, model)
    assert same(before, state(model)) and gc.isenabled() is on
    loss.backward()
    looked = [p.grad.clone() for p in model.parameters()]
    other, again = NETS[name]()
    again().backward()
    again().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(looked, other.parameters(), strict=True))


def test_the_users_hooks_stay_and_ours_go():
    x = torch.ones(2, requires_grad=True)
    seen = []
    y = x * 2
    y.register_hook(lambda grad: seen.append("tensor"))
    y.grad_fn.register_hook(lambda *grads: seen.append("node"))
    x.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    loss = y.sum()
    dx.graph(loss)
    assert sorted(seen) == ["node", "tensor"]
    seen.clear()
    loss.backward()
    assert sorted(seen) == ["accumulated", "node", "tensor"]
    assert len(y.grad_fn._register_hook_dict if hasattr(y.grad_fn, "_hooks") else [1]) == 1


def test_an_error_in_a_users_hook_passes_through_and_nothing_stays():
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def angry(grad):
        raise RuntimeError("mine")

    handle = y.register_hook(angry)
    loss = y.exp().sum()
    with pytest.raises(RuntimeError, match="mine"):
        dx.graph(loss)
    handle.remove()
    assert gc.isenabled() and x.grad is None
    loss.backward()
    assert x.grad is not None


def test_saved_bytes_count_each_storage_once():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    g = dx.graph((y * y).sum())
    assert [len(node.saved) for node in g.nodes] == [0, 2, 1, 0]
    assert g.saved_bytes == 16
    assert dx.graph((y * y).sum(), saved=False).saved_bytes == 0


def test_modules_are_guessed_from_parameters():
    model, forward = nets.transformer_loss(2)
    g = dx.graph(forward(), model, gradients=False)
    where = {node.operation: node.module for node in g.nodes if node.leaf is None}
    assert where["Embedding"] in ("word", "place")
    mine = [node.module for node in g.nodes if node.operation == "Gelu"]
    assert mine == ["blocks.1.up", "blocks.0.up"]
    assert all(node.module for node in g.nodes)


def test_names_of_inputs_are_the_callers_variables():
    def lesson():
        weight = torch.ones(2, requires_grad=True)
        return dx.graph((weight * 2).sum()), weight

    assert [entry.name for entry in lesson()[0].leaves] == ["weight"]
    assert [entry.name for entry in dx.graph(torch.ones(1, requires_grad=True) * 2).leaves] == ["leaf 0"]
    cell = {"dx": dx, "torch": torch}
    exec("w = torch.ones(2, requires_grad=True)\ng = dx.graph((w * 2).sum())", cell)
    assert [entry.name for entry in cell["g"].leaves] == ["w"]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x: 3.0, "got float"),
        (lambda x: None, "got NoneType"),
        (lambda x: x.detach().sum(), "detached"),
        (lambda x: x[0].detach().requires_grad_(), "it is a leaf"),
        (lambda x: x * 2, r"got shape \(2,\)"),
        (lambda x: x.argmax(), "whole numbers"),
        (lambda x: x[0] * 1j, "is complex"),
    ],
)
def test_what_has_no_graph_is_refused(loss, words):
    with pytest.raises(DxdyError, match=words):
        dx.graph(loss(torch.ones(2, requires_grad=True)))


def test_what_is_no_model_or_record_is_refused():
    loss = torch.ones(2, requires_grad=True).sum()
    for wrong in ({"model": "net"}, {"model": [nn.Linear(1, 1)]}, {"record": loss}):
        with pytest.raises(DxdyError, match=r"expected (model|record) as .*, got (str|list|Tensor)"):
            dx.graph(loss, **wrong)
    with pytest.raises(DxdyError, match=r"expected a torch.nn.Module, got NoneType.*nn.Identity"):
        dx.record(None)


def test_a_tensor_of_inference_mode_is_refused():
    with torch.inference_mode():
        loss = torch.ones(2).sum()
    with pytest.raises(DxdyError, match="inference mode"):
        dx.graph(loss)


DEEP = """
import gc, sys, torch, dxdy_nb as dx
from dxdy_nb.errors import DxdyError
sys.path.insert(0, "tests")
import nets
model, forward = nets.recurrent_loss(int(sys.argv[1]))
loss = forward()
try:
    g = dx.graph(loss, model, gradients=False)
    print("walked", max(node.depth for node in g.nodes), sys.getrecursionlimit())
except DxdyError as error:
    print("refused", error)
del loss
gc.collect()
print("freed")
"""


@pytest.mark.parametrize(("steps", "words"), [(10_000, "walked 3000"), (12_000, "refused graph: deeper than 32000")])
def test_depth(steps, words):
    done = subprocess.run([sys.executable, "-c", DEEP, str(steps)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(words) and done.stdout.endswith("freed\n")


def test_cross_entropy_and_dropout_are_no_cuts():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    with dx.record(model) as seen:
        hidden = model(torch.tensor([1, 2, 3]))
        loss = F.cross_entropy(torch.where(hidden > 0, hidden, 0.1 * hidden)[:2], torch.tensor([0, 1]))
    assert dx.graph(loss, record=seen).cuts == ()
