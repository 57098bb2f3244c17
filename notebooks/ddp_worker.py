"""What each process of lesson 08 runs.

`spawn` starts a fresh Python, which can only find functions that stand in a file. The same file under torchrun, which
tells each process its place through the environment:

    torchrun --standalone --nproc-per-node 2 notebooks/ddp_worker.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dxdy_nb.training import datasets


def by_hand(rank, world_size):
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = (w * (rank + 1)) ** 2  # one sample on each rank: 1 on rank 0, 2 on rank 1
    loss.backward()
    own = w.grad.clone()
    dist.all_reduce(w.grad)  # adds up; every rank gets the sum
    w.grad /= world_size
    return own, w.grad


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(rank, world_size, seed, batch_size):
    torch.set_num_threads(1)
    data = datasets.load("digits").train
    net = build(seed)
    model = DistributedDataParallel(net)  # from here on every rank has the weights of rank 0
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=seed)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    losses, ids, weights = [], [], []
    for epoch in range(1):
        sampler.set_epoch(epoch)  # another order in each epoch
        for x, y, i in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()  # and average the gradients over the ranks
            optimizer.step()
            losses.append(loss.item())
            ids.append(i)
            weights.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    return {"losses": losses, "ids": ids, "weights": weights}


def worker(rank, world_size, folder, seed, batch_size):
    dist.init_process_group(
        "gloo",  # on GPUs: "nccl"
        init_method=f"file://{folder}/store",  # where the ranks find each other
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),  # else a rank waits half an hour for one that is gone
    )
    result = {"by hand": by_hand(rank, world_size), "trained": train(rank, world_size, seed, batch_size)}
    torch.save(result, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # the place of this process: from the environment
    end = train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), seed=0, batch_size=32)
    total = end["weights"][-1].double().sum().item()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the weights sum to {total:.6f}")
    dist.destroy_process_group()
