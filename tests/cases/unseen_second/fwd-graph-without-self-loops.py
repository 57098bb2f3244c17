"""The adjacency of the graph convolution has no self-loops: a node sees its neighbours but never its own features.

source: https://github.com/pmernyei/wiki-cs-dataset/issues/4, https://github.com/dmlc/dgl/pull/1587
stage: forward, data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NODES = 24


class GCN(nn.Module):
    """One graph convolution and a head per node, for signals (batch, node, feature) on a fixed graph."""

    def __init__(self, adjacency, self_loops):
        super().__init__()
        if self_loops:
            adjacency = adjacency + torch.eye(NODES)
        scale = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", scale[:, None] * adjacency * scale[None, :])
        self.first = nn.Linear(6, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(torch.relu(self.adjacency @ self.first(x)))


# measured: loss after 150 steps 0.63 against 0.07
def make(bug=True):
    torch.manual_seed(0)
    ring = torch.eye(NODES)
    adjacency = sum(ring.roll(s, 0) for s in (1, -1))
    x = torch.randn(256, NODES, 6)
    y = (x + adjacency @ x)[..., :3].argmax(-1)
    model = GCN(adjacency, self_loops=not bug)

    def loss_fn(out, target):
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, y), 16, shuffle=True),
    }


def make_fixed():
    return make(bug=False)
