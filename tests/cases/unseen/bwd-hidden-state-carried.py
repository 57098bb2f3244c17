"""The hidden state is carried to the next batch without detach: the second backward() meets a freed graph.

source: https://github.com/MorvanZhou/PyTorch-Tutorial/issues/57, https://github.com/quark0/darts/issues/56
stage: backward, forward
"""

import torch
from torch import nn


class Stateful(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.rnn = nn.GRU(2, 16, batch_first=True)
        self.head = nn.Linear(16, 1)
        self.state = None

    def forward(self, x):
        fits = self.state is not None and self.state.shape[1] == len(x)
        h, state = self.rnn(x, self.state if fits else None)
        if self.training:
            self.state = state if self.bug else state.detach()
        return self.head(h)


# measured: raises RuntimeError in step 2; the twin's loss after 40 steps is 0.0017
def make(bug=True):
    torch.manual_seed(0)
    t = torch.arange(400.0).view(1, 400) / 5 + torch.rand(8, 1) * 6
    x = torch.stack([torch.sin(t), torch.cos(t)], -1)
    y = torch.sin(t + 0.7)[..., None]
    model = Stateful(bug)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": list(zip(x.split(20, 1), y.split(20, 1), strict=True)),
    }


def make_fixed():
    return make(bug=False)
