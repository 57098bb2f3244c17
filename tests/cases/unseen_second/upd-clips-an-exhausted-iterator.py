"""model.parameters() is an iterator that the optimizer has used up: clip_grad_norm_ gets nothing and clips nothing.

source: https://github.com/pytorch/pytorch/issues/148259, https://github.com/PixArt-alpha/PixArt-alpha/pull/160
stage: update, backward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adder(nn.Module):
    """A plain RNN over (batch, time, 2): adds up the marked numbers."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.rnn.weight_hh_l0.data *= 1.02

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


# measured: loss after 100 steps 4e17 against 1.1
def make(bug=True):
    torch.manual_seed(0)
    x = torch.stack([torch.rand(512, 30), (torch.rand(512, 30) < 0.15).float()], 2)
    y = x.prod(2).sum(1, keepdim=True)
    model = Adder()
    params = model.parameters() if bug else list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.02)

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
