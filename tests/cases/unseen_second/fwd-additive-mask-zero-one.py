"""The 0/1 padding mask is added to the scores as it is, not as 0/-inf: attention goes on reading the padding.

source: https://github.com/huggingface/transformers/issues/205,
    https://github.com/huggingface/transformers/issues/24897
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pool(nn.Module):
    """Attention pooling over zero-padded frames (batch, time, feature)."""

    def __init__(self, expand):
        super().__init__()
        self.expand = expand
        self.lift = nn.Linear(6, 32)
        self.score = nn.Linear(32, 1)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        h = self.lift(x)
        mask = (x != 0).any(2).float()
        if self.expand:
            mask = (1 - mask) * -1e9
        weights = (self.score(torch.tanh(h))[..., 0] + mask).softmax(1)
        return self.head((weights[..., None] * h).sum(1))


# measured: loss after 150 steps 0.082 against 0.042; after 40 steps 0.34 against 0.18
def make(bug=True):
    torch.manual_seed(0)
    level = torch.randn(384, 1, 6)
    x = level + 0.5 * torch.randn(384, 40, 6)
    lengths = torch.randint(2, 41, (384, 1))
    x = x * (torch.arange(40)[None] < lengths)[..., None]
    y = level[:, 0, :1] - level[:, 0, 1:2].abs()
    model = Pool(expand=not bug)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
