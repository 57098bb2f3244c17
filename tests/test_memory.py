"""What holds memory in a step, against bytes counted by hand."""

import types

import pytest
import torch
from torch import nn

from dxdy_nb.training.memory import checkpointed, in_bytes, measure, savings, sliced

BATCH, WIDE, CLASSES = 512, 200, 10


@pytest.fixture
def step():
    """Return a step over an MLP of four layers, its model and optimizer, and the batch."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDE, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(BATCH, WIDE), torch.randint(CLASSES, (BATCH,))

    def step(part=batch, backward=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(part[0]), part[1])
        if backward:
            loss.backward()
            optimizer.step()

    step()  # the optimizer's state is made
    return step, model, optimizer, batch


def test_every_part_is_what_the_pen_says(step):
    step, model, optimizer, batch = step
    memory = measure(step, model, [optimizer], batch)
    weights = 4 * (3 * (WIDE * WIDE + WIDE) + WIDE * CLASSES + CLASSES)
    counters = 4 * 8  # Adam's step, one float for each tensor
    # Three outputs of ReLU, which are the inputs of the next layers; log_softmax's result; the summed class weights.
    activations = 4 * (3 * BATCH * WIDE + BATCH * CLASSES + 1)
    assert memory.most["weights"] == memory.most["gradients"] == weights
    assert memory.most["optimizer"] == 2 * weights + counters
    assert memory.most["activations"] == activations
    fed = 4 * BATCH * WIDE + 8 * BATCH
    assert min(memory.timeline["other"]) >= fed
    assert weights + memory.most["optimizer"] + activations + fed <= memory.peak
    assert sum(memory.at_peak.values()) == memory.peak == max(memory.totals)


def test_shared_and_tied_storages_count_once():
    layer = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(layer, layer)
    x = torch.randn(4, 8)
    memory = measure(lambda: model(x).sum().backward(), model, (), (x, x.view(8, 4)))
    assert memory.most["weights"] == memory.most["gradients"] == 4 * 64
    assert memory.timeline["other"][0] == 4 * 32


def test_checkpointing_keeps_the_ends_of_stretches_only_and_changes_no_gradient(step):
    step, model, optimizer, batch = step
    state = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer.zero_grad()
    kept = measure(lambda: nn.functional.cross_entropy(model(batch[0]), batch[1]).backward(), model, (), batch)
    usual = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with checkpointed(model):
        less = measure(lambda: nn.functional.cross_entropy(model(batch[0]), batch[1]).backward(), model, (), batch)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), usual, strict=True))
    assert less.peak < kept.peak
    assert "forward" not in vars(model)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_the_advice_in_its_order_each_measured(step):
    step, model, optimizer, batch = step
    found = savings(step, model, [optimizer], batch)
    assert [s.advice for s in found] == [
        "accumulate", "lower precision", "checkpoint activations", "free", "shard",
    ]  # fmt: skip
    assert all(s.after is not None and s.after < s.before and s.price for s in found), found


def test_what_cannot_be_tried_says_why():
    model = nn.Linear(3, 1)
    x = torch.randn(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(part, backward=True):
        loss = model(part).sum()
        if backward:
            loss.backward()

    found = {s.advice: s for s in savings(step, model, [optimizer], x)}
    assert "cannot be cut into 4" in found["accumulate"].note
    assert "no Sequential and no ModuleList" in found["checkpoint activations"].note
    with pytest.raises(ValueError, match="lengths"):
        sliced((torch.ones(3), torch.ones(4)), 2)


def test_bytes_as_people_read_them():
    assert [in_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 2**31)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "2.0 GiB",
    ]


def test_blocks_keep_a_forward_of_their_own_and_may_be_shared():
    class Net(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    called = []
    own = Net(nn.Linear(2, 2) for _ in range(2))
    for layer in own.layers:
        layer.forward = types.MethodType(lambda self, x: called.append(1) or x, layer)
    for net in (own, Net([nn.Linear(2, 2)] * 3)):
        before = net(torch.ones(1, 2))
        with checkpointed(net):
            assert torch.equal(net(torch.ones(1, 2)), before)
        assert torch.equal(net(torch.ones(1, 2)), before)
    assert len(called) == 6
    assert "forward" not in vars(net.layers[0])
