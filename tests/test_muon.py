"""Muon and AdamW as one optimizer: each moves its own parameters as torch's own would, and both act as one."""

import copy

import pytest
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.training import models
from dxdy_nb.training.muon import MuonAdamW

X, Y = torch.randn(32, 2, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


def train(model, *optimizers, steps=5):
    for _ in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        (models.CNN(), {"fc1.weight"}),
        (models.MLP(2, 3), {"fc1.weight", "fc2.weight"}),
        (models.GRU(8, 8), {"gru.weight_ih_l0", "gru.weight_hh_l0"}),
    ],
    ids=["cnn", "mlp", "gru"],
)
def test_muon_has_the_matrices_of_hidden_layers_and_adamw_all_else(model, hidden):
    names = {p: name for name, p in model.named_parameters()}
    muons, others = ({names[p] for p in group["params"]} for group in MuonAdamW(model, lr=0.01).param_groups)
    assert muons == hidden
    assert muons | others == set(names.values())


def test_each_moves_as_torchs_own_would():
    model = models.MLP(2, 3)
    apart = copy.deepcopy(model)
    hidden = [apart.fc1.weight, apart.fc2.weight]
    others = [apart.fc1.bias, apart.fc2.bias, apart.fc3.weight, apart.fc3.bias]
    muon = torch.optim.Muon(hidden, lr=0.01, momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = train(model, MuonAdamW(model, lr=0.01, momentum=0.8, weight_decay=0.1))
    for p, q in zip(ours, train(apart, muon, torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("model", [nn.Linear(2, 3), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))])
def test_a_model_without_a_hidden_matrix_is_refused_with_what_it_has(model):
    with pytest.raises(dx.DxdyError, match=r"^optimizer: 'muon' moves the 2-D.*weight \(3, "):
        MuonAdamW(model, lr=0.01)


@pytest.mark.parametrize("again", ["state", "copy"])
def test_a_restored_one_goes_on_as_the_one_never_stopped(again):
    model = models.MLP(2, 3)
    optimizer = MuonAdamW(model, lr=0.01)
    train(model, optimizer)
    if again == "copy":
        other, restored = copy.deepcopy((model, optimizer))
    else:
        other = copy.deepcopy(model)
        restored = MuonAdamW(other, lr=0.5)
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(train(model, optimizer), train(other, restored), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("bad", ["fc1.weight", "fc3.bias"])
def test_an_overflow_in_one_part_leaves_out_the_step_of_both(bad):
    model = models.MLP(2, 3)
    optimizer, scaler = MuonAdamW(model, lr=0.01), torch.amp.GradScaler("cpu")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(nn.functional.cross_entropy(model(X), Y)).backward()
    model.get_parameter(bad).grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.get_scale() == 2.0**15


def test_a_schedule_reaches_both():
    optimizer = MuonAdamW(models.MLP(2, 3), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.005, 0.005]


def test_watched_it_is_one_optimizer_with_a_row_a_step():
    model = models.MLP(2, 3)
    optimizer = MuonAdamW(model, lr=0.01)
    with dx.watch(model, optimizer) as w:
        train(model, optimizer, steps=3)
    assert len(w.steps) == 3
    assert list(w.optimizers) == ["MuonAdamW"]
    assert w.gradients.loc[0, "update_ratio"].notna().all()
