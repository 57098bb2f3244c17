"""The advantage in the policy loss is not detached: the policy's gradient drives the critic's values up.

source: https://github.com/astariul/encode-attend-navigate-pytorch/issues/2,
    https://github.com/keras-team/keras-io/issues/194
stage: backward, loss
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class ActorCritic(nn.Module):
    """Return action logits and the value of the state."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.actor(x), self.critic(x)[:, 0]


# measured: after 60 steps the critic is too high by 0.37 against -0.07 (rewards are 0 or 1)
def make(bug=True):
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    best = (x @ torch.randn(6, 4)).argmax(1)
    model = ActorCritic()

    def train_step(model, batch, optimizer, loss_fn, step):
        logits, value = model(batch[0])
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = (action == batch[1]).float()
        advantage = reward - (value if bug else value.detach())
        loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * loss_fn(value, reward)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "loss_fn": F.mse_loss,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(x, best), 64, shuffle=True),
        "train_step": train_step,
    }


def make_fixed():
    return make(bug=False)
