"""L-BFGS calls its closure many times a step, but the gradients are cleared once, outside it: they pile up.

source: https://github.com/skorch-dev/skorch/issues/636, https://github.com/Lightning-AI/pytorch-lightning/pull/6147
stage: backward, update
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


# measured: loss after 40 steps 0.026 against 0.0007
def make(bug=True):
    torch.manual_seed(0)
    x = 4 * torch.rand(96, 2) - 2
    y = torch.sin(2 * x[:, :1]) * x[:, 1:]
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))

    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()

        def closure():
            if not bug:
                optimizer.zero_grad()
            loss = loss_fn(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
        "loader": DataLoader(TensorDataset(x, y), 96),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
