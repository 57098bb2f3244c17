"""The parts of a run are what the configuration names, and what cannot be built is refused."""

import math

import pytest
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.training import models
from dxdy_nb.training.parts import lr_factor, pick_loss, pick_optimizer, pick_precision


class OnlyFp32(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel for this\nand more")
        return super().forward(x)


def test_a_precision_that_a_device_cannot_compute_in_is_told():
    model, x = OnlyFp32(2, 3), torch.zeros(1, 2)
    assert pick_precision("fp32", model, x)[0] is None
    with pytest.raises(
        dx.DxdyError, match=r"^precision: 'bf16' does not run on cpu \(no kernel for this\). Use 'fp32'.$"
    ):
        pick_precision("bf16", model, x)


def test_fp16_without_a_working_scaler_is_refused(monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, enabled=False))
    pick_precision("bf16", models.MLP(2, 3), torch.zeros(1, 2))
    with pytest.raises(dx.DxdyError, match=r"^precision: 'fp16' needs a GradScaler, and on cpu it switched itself off"):
        pick_precision("fp16", models.MLP(2, 3), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulation_steps": 8}, "^accumulation_steps: an epoch has 7 batches, so 8 never come together"),
        ({"precision": "fp16"}, "^precision: 'fp16' does not run on cpu"),
        ({"optimizer": "muon"}, "^optimizer: 'muon' moves the 2-D weights of hidden layers"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(here, monkeypatch, changes, message):
    monkeypatch.setattr(models, "build", lambda name, sample, classes: OnlyFp32(2, 3))
    with pytest.raises(dx.DxdyError, match=message):
        dx.train(dx.RunConfig(data="spirals", model="mlp", **changes))
    assert list(here.iterdir()) == []


def test_mse_compares_with_one_hot_targets():
    logits, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    expected = sum((logits[i, c] - float(c == y[i])) ** 2 for i in range(5) for c in range(3)) / 15
    torch.testing.assert_close(pick_loss("mse")(logits, y), expected)


@pytest.mark.parametrize(
    ("name", "kind", "decoupled"),
    [("sgd", torch.optim.SGD, None), ("adam", torch.optim.Adam, False), ("adamw", torch.optim.AdamW, True)],
)
def test_the_optimizer_is_the_one_that_was_asked_for(name, kind, decoupled):
    optimizer = pick_optimizer(dx.RunConfig(optimizer=name, lr=0.3, weight_decay=0.2), nn.Linear(2, 1))
    assert type(optimizer) is kind
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.3, 0.2)
    assert optimizer.defaults.get("decoupled_weight_decay") == decoupled


@pytest.mark.parametrize(
    ("values", "factors"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 1 / 2, (1 - math.sqrt(0.5)) / 2]),
        ({"schedule": "linear", "warmup_steps": 2}, [1 / 2, 1, 1, 1 / 2]),
        ({"schedule": "constant", "warmup_steps": 8}, [1 / 8, 2 / 8, 3 / 8, 4 / 8]),
        ({"schedule": "step", "warmup_steps": 1}, [1, 1, 0.1, 0.01]),
    ],
)
def test_the_learning_rate_follows_its_schedule(values, factors):
    config = dx.RunConfig(**values)
    assert [lr_factor(config, step, 4) for step in range(4)] == pytest.approx(factors)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 57, 380, 1000])
def test_one_cycle_has_the_shape_of_torchs(total):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total, cycle_momentum=False)
    config = dx.RunConfig(schedule="one_cycle")
    for step in range(total):
        assert lr_factor(config, step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step < total - 1:
            torchs.step()


@pytest.mark.parametrize("third", [1, 3, 19, 127])
def test_step_has_the_shape_of_torchs(third):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.StepLR(optimizer, third, gamma=0.1)
    config = dx.RunConfig(schedule="step")
    for step in range(3 * third):
        assert lr_factor(config, step, 3 * third) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        torchs.step()
