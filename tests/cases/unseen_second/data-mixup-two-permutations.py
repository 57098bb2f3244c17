"""mixup draws one permutation for the inputs and another for the labels: the mixed label names a class not mixed in.

source: https://github.com/xudonmao/VMT/issues/1
stage: data
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate


# measured: loss after 120 steps 1.23 against 0.46; on clean samples 0.29 against 0.03
def make(bug=True):
    torch.manual_seed(0)
    y = torch.randint(0, 6, (384,))
    x = 2 * torch.randn(6, 20)[y] + 0.5 * torch.randn(384, 20)

    def mixup(samples):
        inputs, targets = default_collate(samples)
        targets = F.one_hot(targets, 6).float()
        lam = torch.rand(())
        order = torch.randperm(len(inputs))
        inputs = lam * inputs + (1 - lam) * inputs[order]
        if bug:
            order = torch.randperm(len(inputs))
        return inputs, lam * targets + (1 - lam) * targets[order]

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 6))
    data = TensorDataset(x, y)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(data, 32, shuffle=True, collate_fn=mixup),
        "dataset": data,
    }


def make_fixed():
    return make(bug=False)
