"""Logits of a causal model are scored against the same position's token: it learns to copy and the loss falls to 0.

source: https://github.com/KempnerInstitute/KempnerForge/issues/154, https://github.com/macrocosm-os/pretraining/pull/64
stage: loss, data
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 10


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


# measured: next-token accuracy after 40 steps 0.013 against 0.88
def make(bug=True):
    torch.manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (256,))]
    for _ in range(9):
        jump = torch.where(torch.rand(256) < 0.85, 3, torch.randint(0, VOCAB, (256,)))
        tokens.append((tokens[-1] + jump) % VOCAB)
    x = torch.stack(tokens, 1)
    model = LM()

    def loss_fn(out, target):
        if not bug:
            out, target = out[:, :-1], target[:, 1:]
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "causal": True,
        "loader": DataLoader(TensorDataset(x, x), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
