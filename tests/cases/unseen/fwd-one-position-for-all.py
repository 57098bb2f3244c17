"""pe[:, T] instead of pe[:, :T]: every position gets the same encoding, so the model cannot see the order.

source: https://github.com/DiffPoseTalk/DiffPoseTalk/issues/20
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH = 6, 6


class Reader(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(VOCAB, 32)
        self.position = nn.Parameter(torch.randn(1, LENGTH + 4, 32))
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.attention = nn.MultiheadAttention(32, 1, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        t = tokens.shape[1]
        h = self.embed(tokens) + (self.position[:, t : t + 1] if self.bug else self.position[:, :t])
        return self.head(self.attention(self.query.expand(len(h), 1, 32), h, h)[0][:, 0])


# measured: loss after 40 steps 1.5 against 0.00012
def make(bug=True):
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (512, LENGTH))
    model = Reader(bug)
    data = TensorDataset(tokens, tokens[:, 0])  # the label is the first token
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(data, 64, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
