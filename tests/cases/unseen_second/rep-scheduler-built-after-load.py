"""On resume the scheduler is built on the loaded optimizer and resets its rate: an epoch runs at the first rate.

source: https://github.com/torch-points3d/torch-points3d/pull/630, https://github.com/ultralytics/yolov5/issues/292
stage: reproduce, update
"""

import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def build():
    """Return a fresh model and optimizer."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)


def schedule(optimizer):
    """Return a schedule for epochs: a third each time."""
    return LambdaLR(optimizer, lambda epoch: 0.33**epoch)


# measured: lr after a resume from epoch 3 0.3 against 0.011; loss an epoch later 0.30 against 0.10
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = torch.sin(x @ torch.randn(8, 1) / 2)
    model, optimizer = build()
    scheduler = schedule(optimizer)

    def save():
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        return {**state, "rng": torch.get_rng_state()}

    def resume(saved):
        model, optimizer = build()
        if not bug:
            scheduler = schedule(optimizer)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if bug:
            scheduler = schedule(optimizer)
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "scheduler": scheduler,
        "on_epoch_end": lambda *_: scheduler.step(),
        "save": save,
        "resume": resume,
    }


def make_fixed():
    return make(bug=False)
