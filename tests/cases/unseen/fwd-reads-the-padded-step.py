"""The classifier reads out[:, -1] of a right-padded sequence: a step that saw nothing but padding for a long while.

source: https://github.com/thtrieu/qclass_dl/issues/1, https://github.com/Atcold/NYU-DLSP20/pull/19
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAD, VOCAB, LENGTH = 0, 8, 40


class Net(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.RNN(16, 24, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tokens):
        h = self.rnn(self.embed(tokens))[0]
        last = (tokens != PAD).sum(1) - 1
        return self.head(h[:, -1] if self.bug else h[torch.arange(len(h)), last])


# measured: loss after 40 steps 2 against 0.023
def make(bug=True):
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCAB, (192, LENGTH))
    length = torch.randint(2, 8, (192,))
    y = tokens[torch.arange(192), length - 1]  # the last real token
    tokens[torch.arange(LENGTH)[None] >= length[:, None]] = PAD
    model = Net(bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(tokens, y), 32, shuffle=True),
        "pad_id": PAD,
    }


def make_fixed():
    return make(bug=False)
