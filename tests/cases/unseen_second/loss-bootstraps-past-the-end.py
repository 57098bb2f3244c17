"""The Q target ignores done: at the end of an episode it adds the value of the next episode's first state.

source: https://github.com/navneet-nmk/pytorch-rl/issues/2, https://github.com/cyoon1729/deep-Q-networks/pull/5
stage: loss, data
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CELLS, GAMMA = 6, 0.9


class Agent(nn.Module):
    """Q values of a corridor's cells (left, right), and their target copy."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(CELLS, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        return self.online(x)


# measured: Q of the step into the goal after 600 steps 2.14 against 1.01 (right: 1)
def make(bug=True):
    torch.manual_seed(0)
    cell, action = torch.randint(0, CELLS, (512,)), torch.randint(0, 2, (512,))
    nxt = (cell + 2 * action - 1).clamp(min=0)
    done = nxt == CELLS
    nxt = torch.where(done, 0, nxt)  # the environment resets by itself
    seen = F.one_hot(cell, CELLS).float(), action, done.float(), F.one_hot(nxt, CELLS).float(), done.float()
    model = Agent()

    def train_step(model, batch, optimizer, loss_fn, step):
        state, action, reward, after, done = batch
        if step % 10 == 0:
            model.target.load_state_dict(model.online.state_dict())
        with torch.no_grad():
            value = model.target(after).amax(1)
            goal = reward + GAMMA * (value if bug else value * (1 - done))
        loss = loss_fn(model(state).gather(1, action[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": nn.SmoothL1Loss(),
        "optimizer": torch.optim.Adam(model.online.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(*seen), 64, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
