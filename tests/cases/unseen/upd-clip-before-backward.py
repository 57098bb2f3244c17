"""clip_grad_norm_ is called before backward(), on gradients that were just cleared: nothing is ever clipped.

source: https://github.com/Cranial-XIX/FAMO/issues/4, https://github.com/simchowitzlabpublic/nano-world-model/pull/22
stage: update, backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps nan against 0.78
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 6, 8)
    y = 3 * x[:, :, :1].sum(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        optimizer.zero_grad()
        if bug:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        loss.backward()
        if not bug:
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.15),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
