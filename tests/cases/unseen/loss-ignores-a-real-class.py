"""ignore_index=0 was copied from a padding set-up, but 0 is a real class here: it is never trained.

source: https://github.com/CSAILVision/semantic-segmentation-pytorch/issues/76
stage: loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: accuracy on class 0 after 40 steps 0.078 against 1
def make(bug=True):
    torch.manual_seed(0)
    y = torch.arange(256) % 4
    x = 2 * torch.randn(4, 10)[y] + torch.randn(256, 10)
    data = TensorDataset(x, y)
    model = nn.Linear(10, 4)
    loss_fn = nn.CrossEntropyLoss(ignore_index=0 if bug else -100)
    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(data, 32, shuffle=True),
        "dataset": data,
    }


def make_fixed():
    return make(bug=False)
