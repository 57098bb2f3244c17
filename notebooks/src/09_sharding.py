# %% [markdown]
# # 09 · Sharding
#
# **Question.** What if the model does not fit on one device?
#
# **You will**
# - count by pen what a training holds, and say whether it fits
# - gather a sharded weight for the forward pass, and scatter its gradient, by hand
# - run one training as DDP, as ZeRO and as FSDP2, and measure what each rank holds
# - read gradients of which every rank has only a part
# - save from two ranks, and go on with one and with three
#
# **Know before.** Ranks, `all_reduce` and DistributedDataParallel (08), Adam (05).
#
# **Minutes.** 40
#
# **Last verified.** torch 2.13.0, CPU. Nothing here was run on GPUs.
#
# data → forward → loss → backward → update → **comm**
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>What does DistributedDataParallel exchange, and what does each rank keep for itself?</summary>
#
# It averages gradients. Weights and the optimizer's state are whole on every rank, and stay equal because they start
# equal and take equal steps. Nothing is split but the data.
#
# </details>
#
# <details><summary>Why do ranks hold the same bits, when one process differs in the last digit?</summary>
#
# The ranks receive one sum. One process adds the same numbers in another order, and float32 sums round.
#
# </details>
#
# <details><summary>Four ranks. One says KeyError, three say Connection closed by peer. Who is at fault?</summary>
#
# The one with the KeyError. The others lost it in the middle of a collective.
#
# </details>

# %% tags=["parameters"]
seed = 0
world_size = 2

# %%
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.runs.lessons import NOTEBOOKS

# %%
sys.path.append(str(NOTEBOOKS))  # what torchrun starts lies beside the notebooks
from fsdp_worker import full, local, share

dx.RunConfig(seed=seed, world_size=world_size)  # refuses what makes no sense, before anything runs
if world_size > 5:
    raise dx.DxdyError(f"world_size: this lesson is for 1 to 5 processes on one machine, got {world_size}")
several = world_size > 1
torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="launch: .* share")  # more ranks than cores: known, and slow only
lesson = Lesson("09_sharding")
if not several:
    print("One process has nobody to share with: all ways hold the same here, and faults between ranks are left out.")

# %% [markdown]
# ## 1 · Does it fit?
#
# Eight layers, and a device of **four million bytes**. No device is that small, but the sum is the one that you do for
# a large one: 7 billion weights trained in float32 with Adam need 112 GB, and the device has 80.


# %% tags=["same-as:fsdp_worker.build"]
def build(seed):
    torch.manual_seed(seed)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))
    for layer in net[1::2]:
        nn.init.kaiming_normal_(layer.weight)  # torch's own start is too small for eight layers: lesson 05
    return net


# %% [markdown]
# Per weight: the weight itself, its gradient, and Adam's two moments, each a float32 of four bytes. Layers: 64 × 256,
# six times 256 × 256, 256 × 10, and a bias for each output.

# %%
device = 4_000_000  # bytes
lesson.predict("Bytes for weights, gradients and Adam's moments, in one process", None)

# %% [markdown]
# One process first, as always: it is what the ranks are compared with. A step takes 120 samples, whoever reads them;
# `share` gives a rank its part.

# %%
net = build(seed)
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
alone = []


def steps():
    for number in range(18):
        x, y = share(number, rank=0, world_size=1)
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        alone.append(loss.item())
        yield


# %%
with dx.watch(net, optimizer) as w:
    await dx.live(w).run(steps())

# %% [markdown]
# Now count what is there. `local` is the part of a tensor that this process holds; here that is all of it.


# %% tags=["same-as:fsdp_worker.held"]
def held(net, optimizer):
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO keeps an Adam inside
    kinds = {
        "weights": net.parameters(),
        "gradients": [p.grad for p in net.parameters()],
        "Adam": [state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")],
    }
    return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in kinds.items()}


# %%
layers = [layer.weight.numel() + layer.bias.numel() for layer in net[1::2]]
P = sum(layers)
one = held(net, optimizer)
assert sum(one.values()) == 16 * P

# %%
print(f"{P:,} weights:", one)
print("fits:", sum(one.values()) <= device)
lesson.reveal("Bytes for weights, gradients and Adam's moments, in one process", sum(one.values()))

# %% [markdown]
# 16 bytes a weight, and half of them are Adam's. It does not fit. `DistributedDataParallel` is of no help: it puts all
# of this on *every* rank.
#
# Left out of the sum are the **activations**. They grow with the batch, and sharding does not touch them: for those
# there are smaller micro-batches with accumulation (06) and `torch.utils.checkpoint`.
#
# ## 2 · Gather and scatter, by hand
#
# The idea: each rank **keeps** a part of the weights (a *shard*), and with it the gradient and the moments of that part
# only. To compute, it needs them all, for a moment. Two collectives do it:
#
# - `all_gather_single`: from the parts of all ranks, the whole, on every rank. Before the forward pass.
# - `reduce_scatter_single`: adds up over the ranks, as `all_reduce` does, and leaves each rank *its part* of the sum.
#   After the backward pass.
#
# Older texts call them `all_gather_into_tensor` and `reduce_scatter_tensor`.
#
# As many weights as ranks, all of them 1, one on each rank. Rank $r$ has the sample
# $x_r = (r+1)\,(1, 2, \dots)$ and the loss $(w\cdot x_r)^2$.


# %% tags=["same-as:fsdp_worker.by_hand"]
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


# %%
lesson.predict("The gradient that the last rank keeps", None)

# %% [markdown]
# Processes from the warm pool of 08, on loopback only. Functions may stand in a cell, and you may edit them.


# %%
def in_pool(job, *args):
    with dx.session(device="cpu") as s:
        return job(s.rank, s.world_size, *args)


def on_ranks(job, *args):
    return dx.launch(in_pool, job, *args, world_size=world_size)


# %%
parts = on_ranks(by_hand)
for rank, (own, part) in enumerate(parts):
    print(f"rank {rank}: gradient of its own sample {own.tolist()}, keeps {part.item():.4f}")
lesson.reveal("The gradient that the last rank keeps", part.item())

# %% [markdown]
# By pen, for two ranks: $w\cdot x_r = 3(r+1)$, so the gradient is $2\cdot 3(r+1)\cdot(r+1)\,(1,2)$, which is (6, 12) on
# rank 0 and (24, 48) on rank 1. The mean is (15, 30): rank 0 keeps the 15, rank 1 the 30. Pen, a finite difference and
# autograd in one process, in float64:

# %%
n = world_size
samples = torch.arange(1, n + 1, dtype=torch.float64)
x = samples[:, None] * samples  # a row for each rank's sample


def mean_loss(w):
    return ((x @ w) ** 2).mean()


# %%
w1 = torch.ones(n, dtype=torch.float64, requires_grad=True)
(autograd,) = torch.autograd.grad(mean_loss(w1), w1)
little = 1e-5 * torch.eye(n, dtype=torch.float64)
difference = torch.stack([(mean_loss(1 + h) - mean_loss(1 - h)) / 2e-5 for h in little])
pen = n * (n + 1) * (n + 1) * (2 * n + 1) / 6 * samples  # 2 · sum(1…n) · mean(1², …, n²) · place
ranks = torch.cat([part for _, part in parts])
assert torch.allclose(ranks, pen, rtol=1e-12) and torch.allclose(autograd, pen, rtol=1e-12)
assert torch.allclose(difference, pen, rtol=1e-7)
print("ranks, autograd, finite difference and pen:", [round(value, 4) for value in pen.tolist()])

# %% [markdown]
# An `all_reduce` is these two in a row, scatter and gather. So sharding is not another algorithm: it stops in the
# middle of the one you know, keeps the part, steps with it, and gathers *weights* where DDP gathers gradients.
#
# ## 3 · Three ways
#
# | | weights | gradients | Adam |
# |---|---|---|---|
# | DDP | whole | whole | whole |
# | ZeRO (stage 1) | whole | whole | **shared out** |
# | FSDP2 | **sharded** | **sharded** | **sharded** |
#
# Torch has the second as `ZeroRedundancyOptimizer`: each rank steps some of the tensors, and sends them to the others.
# The third is `fully_shard`. It replaces each parameter by a `DTensor`, which knows the whole shape and holds the rows
# of this rank.


# %% tags=["same-as:fsdp_worker.shard"]
def shard(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)  # a group of its own: made whole when its turn comes, and let go after it
    return fully_shard(net)  # the root comes last, and gets what is left


# %% tags=["same-as:fsdp_worker.prepare"]
def prepare(how, net):
    if how == "FSDP2":
        model = shard(net)
        return model, torch.optim.Adam(model.parameters(), lr=0.001)  # made after sharding
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)  # else a second copy of the gradients
    if how == "ZeRO":
        return model, ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.001)
    return model, torch.optim.Adam(net.parameters(), lr=0.001)


# %% [markdown]
# The training does not know which of the three it is.


# %% tags=["same-as:fsdp_worker.train"]
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


# %% tags=["same-as:fsdp_worker.measured"]
def measured(rank, world_size, how, seed, steps):
    net = build(seed)
    model, optimizer = prepare(how, net)
    losses = train(model, optimizer, rank, world_size, range(steps))
    return held(net, optimizer), losses


# %%
lesson.predict("What a rank holds under FSDP2, as a share of what it holds under DDP", None)

# %%
lesson.predict("The loss after eighteen steps: does it differ between the ways by more than rounding, yes or no", None)

# %%
ways = {how: on_ranks(measured, how, seed, 18) for how in ("DDP", "ZeRO", "FSDP2")}
most = {how: max(sum(sizes.values()) for sizes, _ in ranks) for how, ranks in ways.items()}  # the fullest rank
for how, total in most.items():
    print(f"{how:5} holds up to {total:9,} bytes on a rank   fits: {total <= device}")

# %%
ratio = most["FSDP2"] / most["DDP"]
assert most["DDP"] == 16 * P and (ratio <= 0.55 or not several)
lesson.reveal("What a rank holds under FSDP2, as a share of what it holds under DDP", ratio)

# %%
alt = "bytes held on each rank: ways that shard hold less, and only the one that shards all stays below the line"
figure, axes = plots.new_figure(alt, width=8, height=0.8 + 0.32 * 3 * world_size)
ax = axes[0, 0]
names = [f"{how}, rank {rank}" for how in ways for rank in range(world_size)]
left = torch.zeros(len(names))
for kind in one:
    width = torch.tensor([sizes[kind] for ranks in ways.values() for sizes, _ in ranks]) / 1e6
    ax.barh(names, width, left=left, label=kind)
    left = left + width
ax.axvline(device / 1e6, color="black", linestyle="--", label="the device")
ax.set(xlabel="million bytes")
ax.invert_yaxis()
figure.legend(loc="outside right upper", frameon=False)
plots.show(figure)

# %% [markdown]
# With two ranks: ZeRO saves half of Adam, 4 of 16 bytes, which is not enough here. It deals out whole *tensors*, so the
# shares are as even as the sizes allow. FSDP2 cuts each tensor into rows, and halves everything.
#
# (Counted are bytes of tensors. What the system reports of a process has torch itself in it, and freed buffers that
# were not given back: by that number a small sharded run may look larger than a whole one.)
#
# And the training?

# %%
losses = torch.tensor([alone, *(ranks[0][1] for ranks in ways.values())])
apart = (losses - losses[0]).abs().max().item()
assert apart < 0.01 and alone[-1] < 1
differs = "yes" if apart >= 0.01 else "no"

# %%
print("DDP, ZeRO, FSDP2 and the one process differ by less than 0.01 in every loss:", apart < 0.01)
lesson.reveal(
    "The loss after eighteen steps: does it differ between the ways by more than rounding, yes or no", differs
)

# %% [markdown]
# Where the numbers lie does not change what they are.
#
# ## 4 · A layer at a time
#
# A shard alone computes nothing: for its forward pass a layer must be whole, on every rank. `fully_shard` was called on
# *each layer* so that only one needs to be whole at a time. It gathers the layer's weights when its turn comes, and
# lets them go after it; in the backward pass once more. What if somebody forgets the layers, and calls it on the root
# alone?

# %%
lesson.predict("fully_shard(net) on the root alone: which share of the weights is whole at the peak, 0 to 1", None)


# %%
def whole_bytes(rank, world_size, model):
    """Return how many bytes of weights are whole at each moment of a step, looked at by hooks of each layer."""
    seen = []

    def look(*_):
        seen.append(sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor)))

    def after(layer, x, y):
        look()
        y.register_hook(look)  # called when the backward pass comes to this layer

    for layer in model[1::2]:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(after)
    x, y = share(0, rank, world_size)
    look()
    cross_entropy(model(x), y).backward()
    look()
    return seen


# %%
def by_layer(rank, world_size):
    return whole_bytes(rank, world_size, shard(build(seed)))


def root_alone(rank, world_size):
    return whole_bytes(rank, world_size, fully_shard(build(seed)))


# %%
seen = {"root alone": on_ranks(root_alone)[0], "each layer": on_ranks(by_layer)[0]}
peaks = {how: max(moments) / (4 * P) for how, moments in seen.items()}
assert max(seen["each layer"]) == 4 * max(layers) and peaks["root alone"] == 1

# %%
print("whole at the peak:", {how: round(peak, 3) for how, peak in peaks.items()})
lesson.reveal(
    "fully_shard(net) on the root alone: which share of the weights is whole at the peak, 0 to 1", peaks["root alone"]
)

# %%
alt = "weights that are whole over one step: all of them from start to end, or one layer after the other"
figure, axes = plots.new_figure(alt, width=8, height=3)
ax = axes[0, 0]
for how, moments in seen.items():
    ax.step(range(len(moments)), [bytes_ / 1e6 for bytes_ in moments], where="mid", label=how)
ax.axvline(2 * len(layers) + 0.5, color="0.6", linestyle=":")
ax.set(xlabel="moments of one step: forward, then (right of the dots) backward", ylabel="whole weights, million bytes")
ax.legend(frameon=False, loc="center left")
plots.show(figure)

# %% [markdown]
# (The lower line is flat in the backward pass because the hooks look only when some layer is whole, and the six in the
# middle are of one size.)
#
# The root alone gives no error and no warning, and the same losses. It needs 8 bytes a weight beside the shards: all
# weights, and soon all gradients. With two ranks that is as much as DDP holds. The peak to plan with is the shards and,
# beside them, the largest *group* whole: its weights and, until they are scattered, its gradients.

# %%
peak = most["FSDP2"] + 2 * 4 * max(layers)
print(f"shards and the largest layer: {peak:,} bytes   fits: {peak <= device}")

# %% [markdown]
# (While one layer computes, torch may already be gathering the next, so that nobody waits. On a GPU plan for two.)
# In large nets a *block* is the group: one transformer block, one `fully_shard`.
#
# ## 5 · Gradients in parts
#
# After `backward` a rank holds its rows of each gradient, averaged over all ranks. A norm of those is the norm of a
# shard.

# %%
lesson.predict("The norms of the ranks' shards, added up: are they the norm of the gradient, yes or no", None)


# %%
def norms(rank, world_size):
    model, optimizer = prepare("FSDP2", build(seed))
    rows = []
    for number in range(18):
        x, y = share(number, rank, world_size)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        own = torch.stack([local(p.grad).norm() for p in model.parameters()]).norm()
        total = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # measures, and clips nothing
        optimizer.step()
        rows.append([own.item(), total.full_tensor().item()])
    return rows


# %%
table = torch.tensor(on_ranks(norms))  # (ranks, steps, own and total)
shards, total = table[..., 0], table[0, :, 1]
alone_norm = torch.tensor(w.steps["grad_norm"].to_numpy(), dtype=torch.float32)
squares = (shards**2).sum(0)
assert torch.allclose(squares, total**2, rtol=1e-4)
assert torch.allclose(total[:3], alone_norm[:3], rtol=1e-3)
added = "no" if several and (shards.sum(0) > 1.01 * total).all() else "yes"
lesson.reveal("The norms of the ranks' shards, added up: are they the norm of the gradient, yes or no", added)

# %%
alt = "the squared norms of the ranks' shards, stacked, reach the squared norm of the one process at every step"
figure, axes = plots.new_figure(alt, width=8, height=3)
ax = axes[0, 0]
ax.stackplot(range(18), shards**2, labels=[f"shard of rank {rank}" for rank in range(world_size)], alpha=0.6)
ax.plot(alone_norm**2, color="black", linewidth=1.5, label="one process, whole")
ax.set(xlabel="step", ylabel="squared gradient norm", xticks=range(0, 18, 3))
ax.legend(frameon=False)
plots.show(figure)

# %% [markdown]
# *Squares* add up: $\lVert g\rVert^2=\sum_r\lVert g_r\rVert^2$. `clip_grad_norm_` knows of shards, asks all ranks, and
# returns a `DTensor`; `full_tensor()` makes a number of it. Who clips by hand with the norm of the own shard scales
# each rank's rows by another factor, and turns the gradient into another direction.
#
# ### A break that torch names
#
# A penalty that holds the first layer near its start, with a copy taken before sharding.


# %%
def anchored(rank, world_size):
    net = build(seed)
    anchor = net[1].weight.detach().clone()
    weight = shard(net)[1].weight
    try:
        (weight - anchor).square().sum()
    except RuntimeError as error:
        anchor = distribute_tensor(anchor, weight.device_mesh, weight.placements)  # the remedy
        return type(error).__name__, str(error), full((weight - anchor).square().sum()).item()


name, text, penalty = on_ranks(anchored)[0]
print(name, "-", text)
print("with the remedy the penalty is", penalty)

# %% [markdown]
# How to read it: `aten.sub.Tensor` is the minus sign. *Mixed* means that one side is a `DTensor` (the weight) and the
# other a plain tensor, and torch does not guess whether that is a whole or a part. `distribute_tensor` says it.
#
# ### A break that torch does not name
#
# The optimizer is made first, and the net sharded after it.


# %%
def late(rank, world_size, init_method=None):
    if init_method:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    net = build(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    model = shard(net)  # one line too late
    losses = train(model, optimizer, rank, world_size, range(10))
    if init_method:
        dist.destroy_process_group()
    return losses


# %%
lesson.predict("The optimizer is made before fully_shard: which error, its name or none", None)

# %%
stuck = on_ranks(late)[0]
assert stuck[0] == stuck[9]  # the tenth batch is the first again
print("the loss of a batch, and of the same batch nine steps later, are equal:", stuck[0] == stuck[9])
lesson.reveal("The optimizer is made before fully_shard: which error, its name or none", "none")

# %% [markdown]
# `fully_shard` put new parameters into the net. The optimizer still holds the old ones, which never get a gradient, and
# steps over them in silence. The check in plain torch: which parameters do the two share? Here an empty set, `set()`.
#
# ```python
# print({id(p) for p in model.parameters()} & {id(p) for g in optimizer.param_groups for p in g["params"]})
# ```

# %%
named = []
if several:
    report = dx.diagnose_ranks(late, world_size=world_size)
    named = [finding.cause for finding in report.errors]
    print(*[f"{finding.stage}: {finding.cause}, {finding.fix}" for finding in report.errors], sep="\n")

# %% [markdown]
# ## 6 · Save, and load on another number of ranks
#
# In 08 rank 0 wrote the file. Let it.

# %%
lesson.predict("torch.save(net.state_dict()) on rank 0: which share of the weights is in the file, 0 to 1", None)


# %%
def plain_file(rank, world_size, folder):
    net, path = shard(build(seed)), f"{folder}/rank{rank}.pt"
    torch.save(net.state_dict(), path)
    weights = torch.load(path)
    inside = sum(local(tensor).numel() for tensor in weights.values())
    return tuple(weights["1.weight"].shape), tuple(local(weights["1.weight"]).shape), inside


# %%
folder = tempfile.TemporaryDirectory()  # only its owner may read it
shape, held_shape, inside = on_ranks(plain_file, folder.name)[0]
print("the first weight says", shape, "and holds", held_shape)
lesson.reveal("torch.save(net.state_dict()) on rank 0: which share of the weights is in the file, 0 to 1", inside / P)

# %% [markdown]
# The file is written without a word, and each tensor in it *says* that it is whole. Nobody notices before the day on
# which it is needed.
#
# `torch.distributed.checkpoint` is made for this. All ranks write, each its own part, into one folder, with an index of
# who has which rows. On loading each rank reads the rows that *it* needs, so the number of ranks may be another one.
# `get_state_dict` gives names that are the same under every wrapper, for the weights and for Adam's moments.


# %% tags=["same-as:fsdp_worker.save"]
def save(net, optimizer, folder):
    weights, states = get_state_dict(net, optimizer)  # names that do not depend on the wrapper
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)  # each rank writes its own part


# %% tags=["same-as:fsdp_worker.load"]
def load(net, optimizer, folder):
    weights, states = get_state_dict(net, optimizer)  # this rank's parts of this net, to be filled in place
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)  # each rank reads what it needs
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)


# %% [markdown]
# What must be the same before and after: the sum over all weights, over both moments, and over Adam's step counters.
# `full` gathers a sharded tensor, so that every rank adds up the same numbers.


# %% tags=["same-as:fsdp_worker.totals"]
def totals(net, optimizer):
    kinds = {"weights": [p.detach() for p in net.parameters()]}
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        kinds[moment] = [optimizer.state[p][moment] for p in net.parameters()]
    return {kind: sum(full(t).double().sum().item() for t in tensors) for kind, tensors in kinds.items()}


# %% [markdown]
# A relay of three legs, six steps each: some ranks, one rank, one rank more than at first.


# %% tags=["same-as:fsdp_worker.leg"]
def leg(rank, world_size, seed, numbers, came_from, goes_to):
    model, optimizer = prepare("FSDP2", build(seed))
    if came_from:
        load(model, optimizer, came_from)
    found = totals(model, optimizer) if came_from else {}
    losses = train(model, optimizer, rank, world_size, numbers)
    if goes_to:
        save(model, optimizer, goes_to)
    return found, losses, totals(model, optimizer)


# %%
lesson.predict("The sums after loading on another number of ranks: equal to the last bit, yes or no", None)

# %%
relay = [world_size, 1, world_size + 1]
legs, came_from = [], None
for place, ranks in enumerate(relay):
    numbers, goes_to = range(6 * place, 6 * place + 6), f"{folder.name}/{place}"
    legs.append(dx.launch(in_pool, leg, seed + place, numbers, came_from, goes_to, world_size=ranks)[0])
    came_from = goes_to
print("written by the first leg:", *sorted(os.listdir(f"{folder.name}/0")))

# %%
for place, ranks in enumerate(relay[1:], start=1):
    left, found = legs[place - 1][2], legs[place][0]
    print(f"{relay[place - 1]} → {ranks} ranks, equal sums:", {kind: left[kind] == found[kind] for kind in left})

# %%
sums_equal = all(legs[place - 1][2] == legs[place][0] for place in (1, 2))
assert sums_equal
lesson.reveal("The sums after loading on another number of ranks: equal to the last bit, yes or no", "yes")

# %% [markdown]
# Each leg started from a net with another seed, so whatever is equal came from the files. And the relay runs the course
# of the one process:

# %%
alt = "the losses of three legs on different numbers of ranks lie on the curve of the one process"
series = {"one process": (range(18), alone)}
for place, (ranks, (_, losses, _)) in enumerate(zip(relay, legs, strict=True)):
    series[f"leg {place + 1}: {ranks} rank" + "s" * (ranks > 1)] = (range(6 * place, 6 * place + 6), losses)
figure = plots.curves(series, alt=alt, x="step", y="loss")
figure.axes[0].set_xticks(range(0, 18, 6))  # where a leg begins
plots.show(figure)

# %%
gap = max(abs(a - b) for a, b in zip(alone, [loss for _, losses, _ in legs for loss in losses], strict=True))
assert gap < 0.01
print("the relay and the one process differ by less than 0.01 in every loss:", gap < 0.01)

# %% [markdown]
# Not in these files: the position in the data, the schedule, the random generators. They are yours to add. To get one
# ordinary file out of such a folder there is `torch.distributed.checkpoint.format_utils.dcp_to_torch_save`.
#
# ## 7 · Which way?
#
# | what you see | take | why |
# |---|---|---|
# | weights, gradients and Adam fit | DDP | the fewest bytes on the wire, the least to go wrong |
# | only Adam's state is too much | ZeRO, or FSDP2 | one line changed in a DDP script; FSDP2 saves more |
# | weights and gradients are too much | FSDP2 | all three are sharded |
# | *activations* are too much | smaller micro-batches, `torch.utils.checkpoint` | no sharding of weights reaches them |
# | *one layer*, whole, is too much | [tensor parallel][tp] | a layer is computed in parts, and never made whole |
# | deep, and the links are slow | [pipeline][pp] | only activations pass from stage to stage |
#
# [tp]: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
# [pp]: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
#
# Before any of them: bfloat16 for what may be in it (06), and an optimizer with less state (SGD with momentum has 4
# bytes a weight where Adam has 8).
#
# ## Further
#
# ### 8 · A model that no device ever held
#
# So far `build` made the whole net on each rank, and cut it then. What does not fit cannot be made whole. On the device
# *meta* a tensor has a shape and no bytes: build there, shard, make the shards real, and fill them from a file.


# %%
def from_meta(rank, world_size, folder):
    with torch.device("meta"):
        net = build(seed)
    empty = sum(p.nbytes for p in net.parameters() if not p.is_meta)
    model = shard(net)
    model.to_empty(device="cpu")  # this rank's rows only, with whatever stood in memory
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    load(model, optimizer, folder)
    return empty, totals(model, optimizer)


# %%
empty, found = dx.launch(in_pool, from_meta, came_from, world_size=world_size + 1)[0]
assert found == legs[-1][2]
print("bytes held before sharding:", empty, "  all sums as they were saved:", found == legs[-1][2])

# %% [markdown]
# (With no file to load, call each layer's `reset_parameters()` after `to_empty`. The ranks then draw their rows
# themselves, and the start is another one than that of one process with this seed.)
#
# ### 9 · The price
#
# DDP: one `all_reduce`, which is a scatter and a gather, 2 × P numbers (times $(n-1)/n$). FSDP2: weights are gathered
# for the forward pass and once more for the backward pass, gradients are scattered: 3 × P.

# %%
sent = {how: times * 4 * P * (n - 1) // n for how, times in {"DDP": 2, "FSDP2": 3}.items()}
print("bytes that a rank sends in a step:", sent)

# %% [markdown]
# Half as much again. With `reshard_after_forward=False` weights stay whole from forward to backward, and the second
# gather falls away, for the memory of section 4's upper line. On several machines a two-dimensional mesh shards inside
# a machine, where links are fast, and replicates across machines. `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`
# halves what is gathered, and leaves the shards in float32. `CPUOffloadPolicy` moves shards from a GPU to the host; it
# was not run here.
#
# With accumulation FSDP2 has `model.set_requires_gradient_sync(False)` where DDP has `no_sync`. It saves scatters, and
# keeps the gradients *whole* on every rank until the last micro-batch.
#
# ### 10 · Under torchrun, and on several machines
#
# ```
# GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 notebooks/fsdp_worker.py
# ```
#
# prints what section 3 measured. (On macOS the loopback is called `lo0`.) torchrun's own store listens on *all*
# interfaces of the machine (08). For several machines, SLURM, and ranks that hang there:
# [Going further](../GOING_FURTHER.md).

# %% [markdown]
# ## Exercises
#
# How many bytes does the fullest rank hold? `layers` is a list of how many weights each layer has. float32, Adam, even
# shares.
#
# ### Exercise · worked
#
# DDP.


# %%
def ddp_bytes(layers, world_size):
    weights = gradients = 4 * sum(layers)
    moments = 2 * 4 * sum(layers)
    return weights + gradients + moments  # however many ranks there are


# %%
lesson.check("ddp_bytes", ddp_bytes)

# %% [markdown]
# ### Exercise · faded
#
# ZeRO, stage 1.


# %%
def zero_bytes(layers, world_size):
    everywhere = ...  # bytes of what every rank holds whole
    dealt_out = ...  # bytes of what the ranks share, on one of them
    return everywhere + dealt_out


# %%
lesson.check("zero_bytes", zero_bytes)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The table of section 3: which of the three columns is shared out?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Adam has two moments for each weight. The shares are even, so one rank has the whole over the number of ranks.
#
# </details>
#
# <details><summary>Solution: zero_bytes</summary>
#
# ```python
# def zero_bytes(layers, world_size):
#     everywhere = 2 * 4 * sum(layers)
#     dealt_out = 2 * 4 * sum(layers) / world_size
#     return everywhere + dealt_out
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# FSDP2, each layer a group, at the *peak* of the backward pass: the shards, and one layer whole with its gradient. No
# gathering ahead.


# %%
def fsdp_peak(layers, world_size): ...


# %%
lesson.check("fsdp_peak", fsdp_peak)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two terms. One falls with the number of ranks, the other does not.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Which layer decides about the peak? Section 4 added it to the shards: weights and gradient, four bytes each.
#
# </details>
#
# <details><summary>Solution: fsdp_peak</summary>
#
# ```python
# def fsdp_peak(layers, world_size):
#     shards = 16 * sum(layers) / world_size
#     return shards + 2 * 4 * max(layers)
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# Put the lines of a sharded run that resumes into order.
#
# - A: `dcp.save(...)`
# - B: `for block in net.blocks: fully_shard(block)`
# - C: `loss.backward()`
# - D: `optimizer = torch.optim.Adam(net.parameters())`
# - E: `dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)`
# - F: `nn.utils.clip_grad_norm_(net.parameters(), 1.0)`
# - G: `dcp.load(...)` and `set_state_dict(net, optimizer, ...)`
# - H: `fully_shard(net)`
# - I: `optimizer.step()`

# %%
order_of_lines = ...  # a list of nine letters, ["…", "…", …]

# %%
lesson.check("line_order", order_of_lines)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Sharding needs a group, and goes from the inside out.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# What does the optimizer hold if it is made before the parameters are replaced? And what can be loaded into it then?
#
# </details>
#
# <details><summary>Solution: line_order</summary>
#
# ```python
# order_of_lines = ["E", "B", "H", "D", "G", "C", "F", "I", "A"]
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** Adam, float32, 16 ranks, 1 billion weights. A device has 10 GB for weights, gradients and moments. What
# fits?
#
# <details><summary>a) DDP: sixteen devices have 160 GB together.</summary>
#
# Not so: DDP puts all 16 GB on each of them, however many there are.
#
# </details>
#
# <details><summary>b) ZeRO, stage 1.</summary>
#
# Right. 4 GB of weights, 4 GB of gradients, and a sixteenth of 8 GB: 8.5 GB.
#
# </details>
#
# <details><summary>c) Neither DDP nor ZeRO: it takes FSDP2.</summary>
#
# Not so: FSDP2 would need about 1 GB and the largest layer, but ZeRO gets below 10 already.
#
# </details>

# %% [markdown]
# **Quiz 2.** You double the number of ranks under FSDP2, and the peak of memory hardly falls. What is the likely
# reason?
#
# <details><summary>a) Adam's moments are not sharded.</summary>
#
# Not so: the optimizer was made from sharded parameters, so its moments are sharded as they are.
#
# </details>
#
# <details><summary>b) The gradients are averaged, and an average needs all of them.</summary>
#
# Not so: the scatter leaves each rank its part of the average. No rank ever needs the other parts.
#
# </details>
#
# <details><summary>c) The activations, or a group that is made whole and is very large, fill the device.</summary>
#
# Right. Both are the same on 8 ranks and on 16. Look for a `fully_shard` on the root alone, then at the batch.
#
# </details>

# %% [markdown]
# **Quiz 3.** Two ranks print the norm of their shard after `backward`: 3 and 4. `clip_grad_norm_(…, 1.0)` follows. By
# what are the gradients multiplied?
#
# <details><summary>a) Rank 0 by 1/3, rank 1 by 1/4.</summary>
#
# Not so: that would be two factors for one gradient, and another direction.
#
# </details>
#
# <details><summary>b) Both by 1/5.</summary>
#
# Right. 9 + 16 = 25: the norm is 5, and all ranks take the same factor.
#
# </details>
#
# <details><summary>c) Both by 1/7.</summary>
#
# Not so: norms do not add up. Their squares do.
#
# </details>

# %% [markdown]
# **Open task.** Write down, for three ranks, what the fullest one will hold under each of the three ways, and which of
# them fit into four million bytes. Then run this lesson on three, in a terminal. The run is recorded, and the results
# named `held_…` are the answer.
#
# ```
# dxdy run 09_sharding -p world_size=3
# ```

# %%
lesson.score()

# %%
dx.result(
    weights=P,
    gradient_by_hand=round(parts[-1][1].item(), 4),
    held_ddp=most["DDP"],
    held_zero=most["ZeRO"],
    held_fsdp=most["FSDP2"],
    ratio=round(ratio, 4),
    peak_fsdp=peak,
    whole_by_layer=round(peaks["each layer"], 4),
    whole_root_alone=peaks["root alone"],
    loss_difference=apart,
    stuck=stuck[0] == stuck[9],
    named=" ".join(named),
    file_share=round(inside / P, 4),
    sums_equal=sums_equal,
    relay_difference=gap,
)

# %% [markdown]
# **Sources.**
#
# - S. Rajbhandari and others: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020.
#   https://arxiv.org/abs/1910.02054 (the three stages, and the bytes)
# - Y. Zhao and others: *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023.
#   https://arxiv.org/abs/2304.11277 (groups, gathering ahead, peaks of memory)
# - *fully_shard* and *Distributed Checkpoint*, PyTorch documentation.
#   https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html and
#   https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
