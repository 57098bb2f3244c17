"""The sum of both losses is built and logged, but backward() is called on the first one only: the second never trains.

source: https://github.com/oclivegriffin/crosscode/pull/3, https://github.com/LixiangHan/GANs-for-1D-Signal/issues/7
stage: backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.ReLU())
        self.main, self.aux = nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.cat([self.main(h), self.aux(h)], 1)


# measured: loss after 40 steps 4.8 against 0.52
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    y = torch.tanh(x @ torch.randn(10, 2)) + torch.tensor([0.0, 2.0])
    model = TwoHeads()

    def train_step(model, batch, optimizer, loss_fn, step):
        out = model(batch[0])
        total = loss_fn(out, batch[1])
        optimizer.zero_grad()
        (nn.functional.mse_loss(out[:, :1], batch[1][:, :1]) if bug else total).backward()
        optimizer.step()
        return total

    return {
        "model": model,
        "loss_fn": lambda out, t: ((out - t) ** 2).mean(0).sum(),
        "train_step": train_step,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
    }


def make_fixed():
    return make(bug=False)
