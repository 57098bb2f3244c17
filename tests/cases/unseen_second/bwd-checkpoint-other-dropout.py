"""Activation checkpointing with preserve_rng_state=False recomputes with another dropout mask: wrong gradients.

source: https://github.com/allenai/OLMo-core/pull/828, https://github.com/openai/guided-diffusion/issues/167
stage: backward
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two checkpointed residual blocks with dropout."""

    def __init__(self, preserve):
        super().__init__()
        self.preserve = preserve
        self.stem = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
            for _ in range(2)
        )
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.head(torch.relu(h))


# measured: cosine to the right gradient of the blocks 0.52 against 1.00; loss nan from step 120 on against 0.13 at 300
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 24)).relu() @ torch.randn(24, 4)
    model = Net(preserve=not bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        "loader": DataLoader(TensorDataset(x, y.argmax(1)), 32, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
