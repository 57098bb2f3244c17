"""Only named_parameters() are saved: batch norm's running statistics are back at 0 and 1 after a resume.

source: https://github.com/torch/nn/issues/1165, https://github.com/NVIDIA/DIGITS/issues/496
stage: reproduce
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: running_mean[0] after a resume 0 against 3.3
def make(bug=True):
    torch.manual_seed(0)
    x = 3 * torch.randn(128, 8) + 5
    y = torch.tanh((x - 5) @ torch.randn(8, 1) / 3)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def save():
        state = dict(model.named_parameters()) if bug else model.state_dict()
        state = {k: v.detach().clone() for k, v in state.items()}
        return {"model": state, "optimizer": copy.deepcopy(optimizer.state_dict())}

    def resume(checkpoint):
        fresh = make(bug)
        fresh["model"].load_state_dict(checkpoint["model"], strict=not bug)
        fresh["optimizer"].load_state_dict(checkpoint["optimizer"])
        return fresh

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "loader": DataLoader(TensorDataset(x, y), 32),
        "optimizer": optimizer,
        "save": save,
        "resume": resume,
    }


def make_fixed():
    return make(bug=False)
