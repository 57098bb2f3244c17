"""A generator and a discriminator, each with its own optimizer and loss."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
update_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
update_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()

for _ in range(20):
    real, made = torch.randn(32, 2) + 3, generator(torch.randn(32, 4))
    update_d.zero_grad()
    loss_d = criterion(discriminator(real), torch.ones(32, 1))
    loss_d = loss_d + criterion(discriminator(made.detach()), torch.zeros(32, 1))
    loss_d.backward()
    update_d.step()
    update_g.zero_grad()
    loss_g = criterion(discriminator(made), torch.ones(32, 1))
    loss_g.backward()
    update_g.step()
print(f"{loss_d.item():.6f} {loss_g.item():.6f}")
