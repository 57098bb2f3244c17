"""The running mean and scale of the observations are plain attributes: state_dict() does not know them.

source: https://github.com/ligerlac/torchlogix/pull/23, https://github.com/hill-a/stable-baselines/issues/228
stage: reproduce, forward
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Critic(nn.Module):
    """A value net that standardises its observations by running statistics, kept while it trains."""

    def __init__(self, registered):
        super().__init__()
        if registered:
            self.register_buffer("mean", torch.zeros(5))
            self.register_buffer("scale", torch.ones(5))
        else:
            self.mean, self.scale = torch.zeros(5), torch.ones(5)
        self.body = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        if self.training:
            self.mean = self.mean.lerp(x.mean(0), 0.1)
            self.scale = self.scale.lerp(x.std(0), 0.1)
        return self.body((x - self.mean) / self.scale)


# measured: after 150 steps the loss is 0.05; the resumed model's is 3.13 against 0.05
def make(bug=True):
    torch.manual_seed(0)
    z = torch.randn(384, 5)
    x = z * torch.tensor([0.5, 20.0, 3.0, 100.0, 1.0]) + torch.tensor([5.0, -60.0, 10.0, 300.0, -2.0])
    y = torch.sin(z[:, :2].sum(1, keepdim=True)) + 0.5 * z[:, 3:4]

    def build():
        model = Critic(registered=not bug)
        return model, torch.optim.Adam(model.parameters(), 1e-2)

    model, optimizer = build()

    def save():
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return {**state, "rng": torch.get_rng_state()}

    def resume(saved):
        model, optimizer = build()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        return {"model": model, "optimizer": optimizer}

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": optimizer,
        "loader": DataLoader(TensorDataset(x, y), 32, shuffle=True),
        "save": save,
        "resume": resume,
    }


def make_fixed():
    return make(bug=False)
