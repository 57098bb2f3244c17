"""A classifier of points with a held-out set, options, a file beside it and a log where it is told to."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--log", type=Path, default=Path("log.txt"))
parser.add_argument("--spoil", type=int, help="a sample that holds an infinity")
options = parser.parse_args()

torch.manual_seed(0)
names = Path("classes.txt").read_text().split()  # relative: from where the script is started
x = torch.randn(640, 8)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
if options.spoil is not None:
    x[options.spoil, 0] = float("inf")
training, held_out = (TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 512), (512, 640)))
loader = DataLoader(training, batch_size=32, shuffle=True, num_workers=options.workers)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, len(names)))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

for epoch in range(options.epochs):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in DataLoader(held_out, 64))
    print(f"epoch {epoch}: loss {loss.item():.6f}, {right} of {len(held_out)} right")
    with options.log.open("a") as file:
        file.write(f"{epoch} {loss.item()}\n")
