"""The EMA weights are not in the checkpoint: after a resume the average starts again from the raw weights.

source: https://github.com/ai2cm/ace/issues/349, https://github.com/m2lines/Samudra/pull/313
stage: reproduce
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: largest change of an EMA weight by a resume 0.084 against 0
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = torch.tanh(x @ torch.randn(8, 1)) + 1
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ema = copy.deepcopy(model).requires_grad_(False)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        for s, p in zip(ema.parameters(), model.parameters(), strict=True):
            s.lerp_(p.detach(), 0.05)
        return loss

    parts = {"model": model, "optimizer": optimizer, "ema_model": ema}
    saved = ["model", "optimizer"] if bug else list(parts)

    def resume(checkpoint):
        fresh = make(bug)
        for name in parts:
            fresh[name].load_state_dict(checkpoint.get(name, checkpoint["model"]))
        return fresh

    return dict(
        parts,
        loss_fn=nn.MSELoss(),
        loader=DataLoader(TensorDataset(x, y), 32),
        train_step=train_step,
        save=lambda: copy.deepcopy({k: parts[k].state_dict() for k in saved}),
        resume=resume,
    )


def make_fixed():
    return make(bug=False)
