"""One training function for every launcher: ``torchrun ... ranked.py FOLDER`` leaves each rank's result in a folder."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import dxdy_nb as dx


def train(steps: int = 5) -> dict:
    """Train a small net on 63 samples, and return the bits of its weights with what its session says."""
    with dx.session(device="cpu") as s:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        x, y = torch.randn(63, 4), torch.randint(2, (63,))
        trained = DistributedDataParallel(model) if s.world_size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        mine = list(DistributedSampler(range(63), s.world_size, s.rank))
        total, count = 0.0, 0
        for step in range(steps):
            ids = mine[step * 6 : step * 6 + 6 - s.rank]  # unequal counts
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(trained(x[ids]), y[ids])
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(ids), count + len(ids)
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        place = [s.rank, s.world_size, s.local_rank, str(s.device), s.is_main]
        mean = s.mean(total, count)
    return {"weights": hashlib.sha256(bits).hexdigest(), "mean": mean, "place": place, "local": [total, count]}


def descend(dtype: torch.dtype, batch: int = 64, updates: int = 50) -> torch.Tensor:
    """Return the whole gradient of each update (updates, parameters); the ranks share each batch."""
    with dx.session(device="cpu") as s:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
        x, y = torch.randn(updates, batch, 8, dtype=dtype), torch.randint(4, (updates, batch))
        trained = DistributedDataParallel(model) if s.world_size > 1 else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for inputs, targets in zip(x, y, strict=True):
            optimizer.zero_grad()
            mine = slice(s.rank, None, s.world_size)
            nn.functional.cross_entropy(trained(inputs[mine]), targets[mine]).backward()
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.step()
    return torch.stack(seen)


def keep(folder: str) -> None:
    """Train and write the result as a file of this rank."""
    result = train()
    (Path(folder) / f"{result['place'][0]}.json").write_text(json.dumps(result))


def spawned(rank: int, folder: str, port: int, world_size: int = 2) -> None:
    """Be one process of ``torch.multiprocessing.spawn``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    keep(folder)


if __name__ == "__main__":
    keep(sys.argv[1])
