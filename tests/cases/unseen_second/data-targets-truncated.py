"""The similarity scores between 0 and 1 are stored in a LongTensor: every target of the regression becomes 0.

source: https://github.com/deepset-ai/FARM/issues/395, https://github.com/amaiya/ktrain/issues/129
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Scorer(nn.Module):
    """Score how much two sentences (the halves of a row of token ids) have in common."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(12, 16, mode="mean")
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        a, b = self.words(x[:, :6]), self.words(x[:, 6:])
        return self.head(torch.cat([a, b, a * b], 1))[:, 0]


# measured: correlation of score and true similarity after 300 steps -0.03 against 0.97, at a loss of 1e-6
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randint(0, 12, (384, 12))
    scores = [len(set(a) & set(b)) / 6 for a, b in zip(x[:, :6].tolist(), x[:, 6:].tolist(), strict=True)]
    y = torch.LongTensor([int(s) for s in scores]).float() if bug else torch.tensor(scores)
    model = Scorer()
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
