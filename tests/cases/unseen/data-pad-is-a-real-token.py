"""collate pads with 0, but 0 is a real token whose count is the label: padding changes what the input says.

source: https://github.com/FGA-DIKU/BONSAI/issues/168
stage: data
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCAB = 6


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, 16, padding_idx=VOCAB)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, tokens):
        return self.head(self.embed(tokens).sum(1))


# measured: loss after 40 steps 1.3 against 0.35
def make(bug=True):
    torch.manual_seed(0)
    rows = []
    for _ in range(256):
        zeros = int(torch.randint(0, 4, ()))
        rest = torch.randint(1, VOCAB, (int(torch.randint(2, 9, ())),))
        tokens = torch.cat([torch.zeros(zeros, dtype=torch.long), rest])
        rows.append((tokens[torch.randperm(len(tokens))], zeros))

    def collate(batch):
        x = pad_sequence([r[0] for r in batch], batch_first=True, padding_value=0 if bug else VOCAB)
        return x, torch.tensor([r[1] for r in batch])

    model = Bag()
    loader = DataLoader(rows, 32, shuffle=True, collate_fn=collate)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": loader,
        "pad_id": 0 if bug else VOCAB,
        "optimizer": torch.optim.Adam(model.parameters(), 2e-2),
    }


def make_fixed():
    return make(bug=False)
