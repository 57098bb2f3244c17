"""The classifier of a bidirectional GRU reads out[:, -1]: the backward half of that step has seen one token only.

source: https://github.com/yunjey/pytorch-tutorial/issues/149,
    https://github.com/aymericdamien/TensorFlow-Examples/issues/201
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    """Bidirectional GRU over token ids, one label a sequence."""

    def __init__(self, last_step):
        super().__init__()
        self.last_step = last_step
        self.embed = nn.Embedding(16, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        out, state = self.rnn(self.embed(x))
        return self.head(out[:, -1] if self.last_step else torch.cat([state[0], state[1]], 1))


# measured: loss after 120 steps 0.55 against 0.00
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randint(0, 16, (384, 16))
    y = x[:, 0] // 4  # what it is about stands at the front
    model = Reader(last_step=bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
