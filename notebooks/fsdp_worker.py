"""What the ranks of lesson 09 run: the same training three ways, what each rank holds of it, sharded files.

The same file under torchrun, which tells each process its place through the environment:

    torchrun --standalone --nproc-per-node 2 notebooks/fsdp_worker.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dxdy_nb as dx
from dxdy_nb.training import datasets

BATCH = 120  # samples a step, of all ranks together; equal shares for 1 to 6 ranks


def by_hand(rank, world_size):
    shard = torch.ones(1, dtype=torch.float64)  # each rank keeps one weight of the model
    w = torch.empty(world_size, dtype=torch.float64)
    dist.all_gather_single(w, shard)  # for the forward pass all of them are needed
    w.requires_grad_()
    x = (rank + 1) * torch.arange(1, world_size + 1, dtype=torch.float64)  # one sample on each rank
    loss = (w @ x) ** 2
    loss.backward()
    part = torch.empty(1, dtype=torch.float64)
    dist.reduce_scatter_single(part, w.grad)  # adds up over the ranks; each gets its own place of the sum
    return w.grad, part / world_size


def build(seed):
    torch.manual_seed(seed)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))
    for layer in net[1::2]:
        nn.init.kaiming_normal_(layer.weight)  # torch's own start is too small for eight layers: lesson 05
    return net


def shard(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)  # a group of its own: made whole when its turn comes, and let go after it
    return fully_shard(net)  # the root comes last, and gets what is left


def prepare(how, net):
    if how == "FSDP2":
        model = shard(net)
        return model, torch.optim.Adam(model.parameters(), lr=0.001)  # made after sharding
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)  # else a second copy of the gradients
    if how == "ZeRO":
        return model, ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.001)
    return model, torch.optim.Adam(net.parameters(), lr=0.001)


def share(number, rank, world_size):
    data, start = datasets.load("digits").train, BATCH * (number % 9)
    mine = slice(start + rank, start + BATCH, world_size)
    return data.x[mine], data.y[mine]


def train(model, optimizer, rank, world_size, numbers):
    losses = []
    for number in numbers:
        x, y = share(number, rank, world_size)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)  # equal shares: the mean of means is the loss of the step
        losses.append(mean.item())
    return losses


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(net, optimizer):
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO keeps an Adam inside
    kinds = {
        "weights": net.parameters(),
        "gradients": [p.grad for p in net.parameters()],
        "Adam": [state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")],
    }
    return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in kinds.items()}


def measured(rank, world_size, how, seed, steps):
    net = build(seed)
    model, optimizer = prepare(how, net)
    losses = train(model, optimizer, rank, world_size, range(steps))
    return held(net, optimizer), losses


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # all ranks take part


def totals(net, optimizer):
    kinds = {"weights": [p.detach() for p in net.parameters()]}
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        kinds[moment] = [optimizer.state[p][moment] for p in net.parameters()]
    return {kind: sum(full(t).double().sum().item() for t in tensors) for kind, tensors in kinds.items()}


def save(net, optimizer, folder):
    weights, states = get_state_dict(net, optimizer)  # names that do not depend on the wrapper
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)  # each rank writes its own part


def load(net, optimizer, folder):
    weights, states = get_state_dict(net, optimizer)  # this rank's parts of this net, to be filled in place
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)  # each rank reads what it needs
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)


def leg(rank, world_size, seed, numbers, came_from, goes_to):
    model, optimizer = prepare("FSDP2", build(seed))
    if came_from:
        load(model, optimizer, came_from)
    found = totals(model, optimizer) if came_from else {}
    losses = train(model, optimizer, rank, world_size, numbers)
    if goes_to:
        save(model, optimizer, goes_to)
    return found, losses, totals(model, optimizer)


if __name__ == "__main__":
    with dx.session(device="cpu") as s:
        for how in ("DDP", "ZeRO", "FSDP2"):
            sizes, losses = measured(s.rank, s.world_size, how, seed=0, steps=9)
            print(f"rank {s.rank} of {s.world_size}, {how:5}: loss {losses[-1]:.4f}, holds", sizes)
