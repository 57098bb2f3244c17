"""Draw the picture of the README: a small net one of whose branches is cut from the loss.

python docs/make_picture.py
"""

from pathlib import Path

import torch
from torch import nn

import dxdy_nb as dx


class Net(nn.Module):
    """Two layers, side by side; the forward pass detaches what the second one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10)."""
        return self.head(torch.tanh(self.body(x)) * torch.sigmoid(self.gate(x)).detach())


if __name__ == "__main__":
    torch.manual_seed(0)
    model, x, y = Net(), torch.rand(16, 64), torch.randint(10, (16,))
    with dx.record(model) as seen:
        loss = nn.functional.cross_entropy(model(x), y)
    graph = dx.graph(loss, model, record=seen)
    Path(__file__).with_name("picture.svg").write_text(graph.draw().svg + "\n")
    print(graph.cuts)
