"""The GradScaler's state is not in the checkpoint: after a resume the loss scale starts from its default again.

source: https://github.com/huggingface/transformers/pull/11663, https://github.com/ultralytics/ultralytics/pull/22189
stage: reproduce
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss scale after a resume 1024 against 8192
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = torch.tanh(x @ torch.randn(8, 1)) + 1
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    saved = ["model", "optimizer"] if bug else list(parts)

    def resume(checkpoint):
        fresh = make(bug)
        for name, state in checkpoint.items():
            fresh[name].load_state_dict(state)
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
