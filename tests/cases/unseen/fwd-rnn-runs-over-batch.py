"""A GRU without batch_first gets (batch, time, feature): it steps through the samples and mixes them.

source: https://github.com/salesforce/cove/issues/10, https://github.com/Cadene/vqa.pytorch/issues/40
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.rnn = nn.GRU(4, 24, batch_first=batch_first)
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


# measured: accuracy on samples fed one by one after 40 steps 0.62 against 0.99
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(256, 6, 4)
    y = (x[:, :, 0].sum(1) > 0).long()
    model = Net(batch_first=not bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 2e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
