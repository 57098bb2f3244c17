"""Functions that ranks run in tests: a small data-parallel training with one thing wrong at a time."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# What can be wrong, and the cause that is to be named.
FAULTS = {
    "shard": "sampler-wrong-rank",
    "sampler": "no-distributed-sampler",
    "epoch": "set-epoch-missing",
    "rate": "lr-differs-by-rank",
    "module": "forward-through-module",
    "no_sync": "no-sync-wrong-parity",
    "summed": "grad-sum-not-mean",
    "raises": "exception",
    "only": "collective-mismatch",
}


def train(rank, world_size, init_method, *, fault="", steps=4):
    """Train a linear model on two ranks; ``fault`` names what is wrong."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x[:, :1] * 2)
    sampler = DistributedSampler(data, shuffle=True, rank=0 if fault == "shard" else rank)
    loader = DataLoader(data, 8, shuffle=True) if fault == "sampler" else DataLoader(data, 8, sampler=sampler)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + rank) if fault == "rate" else 0.1)
    for epoch in range(2):
        if fault != "epoch":
            sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            if fault == "raises" and rank == 1 and step == 2:
                raise ValueError("a bad record")
            optimizer.zero_grad()
            quiet = model.no_sync() if fault == "no_sync" else contextlib.nullcontext()
            with quiet:
                output = net(inputs) if fault == "module" else model(inputs)
                loss = nn.functional.mse_loss(output, targets)
                loss.backward()
            if fault == "summed":
                for p in net.parameters():
                    dist.all_reduce(p.grad)
            optimizer.step()
            total = loss.detach().clone()
            if fault != "only" or rank == 0:
                dist.all_reduce(total)
            if step + 1 == steps:
                break
    dist.destroy_process_group()
