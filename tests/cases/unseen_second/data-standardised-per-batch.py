"""collate standardises each batch by its own mean and deviation: a validation batch of one class loses its class.

source: https://github.com/deepinv/deepinv/issues/908, https://github.com/deepinv/deepinv/pull/1079
stage: data
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate


# measured: validation accuracy after 80 steps 0.24 against 0.98 (training loss 0.31 against 0.10)
def make(bug=True):
    torch.manual_seed(0)
    centres = torch.tensor([20.0, 30.0, 40.0, 50.0])
    y, yv = torch.randint(0, 4, (512,)), torch.arange(4).repeat_interleave(32)
    x, xv = (centres[t][:, None] + 6 * torch.randn(len(t), 8) for t in (y, yv))
    mean, std = x.mean(0), x.std(0)

    def collate(samples):
        inputs, targets = default_collate(samples)
        if bug:
            return (inputs - inputs.mean(0)) / inputs.std(0), targets
        return (inputs - mean) / std, targets

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    train = TensorDataset(x, y)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(train, 32, shuffle=True, collate_fn=collate),
        "val_loader": DataLoader(TensorDataset(xv, yv), 32, collate_fn=collate),
        "dataset": train,
    }


def make_fixed():
    return make(bug=False)
