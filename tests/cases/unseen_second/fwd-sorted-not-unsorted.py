"""The encoder sorts the batch by length for packing and returns its states in that order: rows answer for others.

source: https://github.com/Lizhen0628/text_classification/issues/12, https://github.com/flairNLP/flair/issues/865
stage: forward
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    """GRU over padded token ids; 0 is the padding."""

    def __init__(self, restore):
        super().__init__()
        self.restore = restore
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        lengths, order = (x != 0).sum(1).sort(descending=True, stable=True)
        packed = pack_padded_sequence(self.embed(x[order]), lengths.cpu(), batch_first=True)
        state = self.rnn(packed)[1][0]
        if self.restore:
            state = state[order.argsort()]
        return self.head(state)


# measured: loss after 120 steps 1.38 against 0.00
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randint(1, 20, (384, 12))
    lengths = torch.randint(3, 13, (384,))
    last = x[torch.arange(384), lengths - 1]
    x[torch.arange(12)[None] >= lengths[:, None]] = 0
    model = Encoder(restore=not bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, last % 4), 32, shuffle=True),
        "pad_id": 0,
    }


def make_fixed():
    return make(bug=False)
