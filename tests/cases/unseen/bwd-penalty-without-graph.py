"""The gradient penalty is computed with create_graph=False: it is a constant that regularises nothing.

source: https://github.com/ooples/AiDotNet/issues/1844, https://github.com/igul222/improved_wgan_training/issues/18
stage: backward, loss
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: mean squared slope after 40 steps 4.4 against 2
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    y = 2 * torch.sign(x[:, :1])
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def train_step(model, batch, optimizer, loss_fn, step):
        at = batch[0].clone().requires_grad_()
        slope = torch.autograd.grad(model(at).sum(), at, create_graph=not bug)[0]
        loss = loss_fn(model(batch[0]), batch[1]) + 0.3 * slope.pow(2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 3e-2),
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
