"""Reinforcement learning: targets that move, losses that do not fall."""

import collections
import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import loader


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h)[:, 0]


def rewards(state, action):
    return (state.gather(1, action[:, None])[:, 0] > 0).float()


@healthy
def ppo():
    """Several updates on one batch, clipped ratios with zero gradients, an entropy bonus with a minus sign."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)

    def train_step(model, batch, optimizer, loss_fn, step):
        (state,) = batch
        with torch.no_grad():
            logits, value = model(state)
            chosen = torch.distributions.Categorical(logits=logits)
            action = chosen.sample()
            before = chosen.log_prob(action)
            reward = rewards(state, action)
            advantage = reward - value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(3):
            logits, value = model(state)
            now = torch.distributions.Categorical(logits=logits)
            ratio = (now.log_prob(action) - before).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = policy + 0.5 * F.mse_loss(value, reward) - 0.01 * now.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss

    states = loader(torch.randn(512, 4), size=64)
    return {"model": model, "loader": states, "optimizer": optimizer, "train_step": train_step}


@healthy
def reinforce_with_baseline():
    """The loss is no measure of success and is negative at times; the baseline is a plain number that moves."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    baseline = [0.0]

    def train_step(model, batch, optimizer, loss_fn, step):
        (state,) = batch
        chosen = torch.distributions.Categorical(logits=model(state))
        action = chosen.sample()
        reward = rewards(state, action)
        baseline[0] = 0.9 * baseline[0] + 0.1 * reward.mean().item()
        loss = -(chosen.log_prob(action) * (reward - baseline[0])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    states = loader(torch.randn(512, 4), size=32)
    return {"model": model, "loader": states, "optimizer": optimizer, "train_step": train_step}


@healthy
def dqn():
    """A target network outside the optimizer, copied now and then; a replay buffer that grows."""
    online = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    memory = collections.deque(maxlen=500)

    def train_step(model, batch, optimizer, loss_fn, step):
        (state,) = batch
        with torch.no_grad():
            action = torch.where(torch.rand(len(state)) < 0.2, torch.randint(3, (len(state),)), model(state).argmax(1))
        memory.extend(zip(state, action, rewards(state, action), state.roll(1, 1), strict=True))
        s, a, r, after = (torch.stack(part) for part in zip(*random.sample(memory, 16), strict=True))
        with torch.no_grad():
            wanted = r + 0.9 * target(after).max(1).values
        loss = loss_fn(model(s).gather(1, a[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            target.load_state_dict(model.state_dict())
        return loss

    given = {
        "model": online,
        "loss_fn": nn.SmoothL1Loss(),
        "loader": loader(torch.randn(512, 4)),
        "optimizer": optimizer,
    }
    return given | {"train_step": train_step}


@healthy
def soft_actor_critic():
    """Three optimizers over four nets; the actor climbs what the critics say, through them but not into them."""
    actor = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    critic = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    slow = copy.deepcopy(critic).requires_grad_(False)
    model = nn.ModuleDict({"actor": actor, "critic": critic, "slow": slow})
    model.log_alpha = nn.Parameter(torch.zeros(()))
    steps = {
        "actor": torch.optim.Adam(actor.parameters(), lr=1e-3),
        "critic": torch.optim.Adam(critic.parameters(), lr=1e-3),
        "alpha": torch.optim.Adam([model.log_alpha], lr=1e-3),
    }

    def act(state):
        mean, log = actor(state).chunk(2, 1)
        chosen = torch.distributions.Normal(mean, log.clamp(-4, 1).exp())
        raw = chosen.rsample()
        action = raw.tanh()
        return action, (chosen.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(1)

    def train_step(model, batch, optimizer, loss_fn, step):
        state, action, reward, after = batch
        alpha = model.log_alpha.exp().detach()
        with torch.no_grad():
            following, log = act(after)
            wanted = reward + 0.9 * (slow(torch.cat([after, following], 1))[:, 0] - alpha * log)
        loss = F.mse_loss(critic(torch.cat([state, action], 1))[:, 0], wanted)
        steps["critic"].zero_grad()
        loss.backward()
        steps["critic"].step()
        mine, log = act(state)
        steps["actor"].zero_grad()
        (alpha * log - critic(torch.cat([state, mine], 1))[:, 0]).mean().backward()
        steps["actor"].step()
        steps["alpha"].zero_grad()
        (-model.log_alpha * (log.detach() - 2)).mean().backward()
        steps["alpha"].step()
        with torch.no_grad():
            for p, q in zip(slow.parameters(), critic.parameters(), strict=True):
                p.lerp_(q, 0.01)
        return loss

    state = torch.randn(256, 4)
    action = torch.rand(256, 2) * 2 - 1
    reward = -(state[:, :2] - action).square().sum(1)
    data = loader(state, action, reward, torch.randn(256, 4))
    return {"model": model, "loader": data, "optimizers": steps, "train_step": train_step}


@healthy
def behaviour_cloning():
    """Ordinary regression on actions, squashed by tanh; targets lie on its bounds at times."""
    state = torch.randn(256, 4)
    action = (state[:, :2] * 2).clamp(-1, 1)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": loader(state, action), "optimizer": optimizer}


@healthy
def preference_optimisation():
    """Two policies, one of them a frozen reference in a list; the loss begins at log 2 with equal models."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    reference = [copy.deepcopy(model).requires_grad_(False)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    state = torch.randn(256, 4)
    good, bad = state[:, :3].argmax(1), state[:, :3].argmin(1)

    def train_step(model, batch, optimizer, loss_fn, step):
        state, good, bad = batch
        rows = torch.arange(len(state))
        mine = model(state).log_softmax(1)
        with torch.no_grad():
            theirs = reference[0](state).log_softmax(1)
        margin = (mine - theirs)[rows, good] - (mine - theirs)[rows, bad]
        loss = -F.logsigmoid(0.5 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "loader": loader(state, good, bad), "optimizer": optimizer, "train_step": train_step}
