"""The class-to-index map is built per split from an unordered set: validation labels mean other classes than training.

source: https://github.com/google-deepmind/dmvr/issues/6, https://github.com/weecology/DeepForest/pull/1147
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAIN_NAMES = ["cat", "dog", "fox", "owl"]
VAL_NAMES = ["fox", "cat", "owl", "dog"]  # the order in which a set happened to give them


# measured: validation loss after 40 steps 7.7 against 0.0053
def make(bug=True):
    torch.manual_seed(0)
    centre = 2 * torch.randn(4, 12)
    kind = torch.arange(384) % 4
    x = centre[kind] + torch.randn(384, 12)
    names = [TRAIN_NAMES[k] for k in kind.tolist()]
    index = {n: i for i, n in enumerate(TRAIN_NAMES)}
    val_index = {n: i for i, n in enumerate(VAL_NAMES if bug else TRAIN_NAMES)}
    y = torch.tensor([index[n] for n in names[:256]])
    yv = torch.tensor([val_index[n] for n in names[256:]])
    model = nn.Linear(12, 4)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(x[:256], y), 32, shuffle=True),
        "val_loader": DataLoader(TensorDataset(x[256:], yv), 64),
    }


def make_fixed():
    return make(bug=False)
