"""The target network is synchronised with its own state dict: it keeps its random values and so do the Q targets.

source: https://github.com/thesouther/MARL/issues/8
stage: update
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DoubleNet(nn.Module):
    """Q values of a point on a line for three moves, and their slowly moving target copy."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 3))
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x)


# measured: root mean square error of Q after 600 steps 1.76 against 0.17 (mean Q: -1.5)
def make(bug=True):
    torch.manual_seed(0)
    place, goal = 2 * torch.rand(1024) - 1, 2 * torch.rand(1024) - 1
    move = torch.randint(0, 3, (1024,))
    after = (place + 0.15 * (move - 1)).clamp(-1, 1)
    reward = -(after - goal).abs()
    data = TensorDataset(torch.stack([place, goal], 1), move, reward, torch.stack([after, goal], 1))
    model = DoubleNet()

    def train_step(model, batch, optimizer, loss_fn, step):
        state, action, reward, following = batch
        with torch.no_grad():
            wanted = reward + 0.9 * model.target_net(following).amax(1)
        loss = loss_fn(model(state).gather(1, action[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 7:
            source = model.target_net if bug else model.net
            model.target_net.load_state_dict(source.state_dict())
        return loss

    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.net.parameters(), 5e-3),
        "loader": DataLoader(data, 64, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
