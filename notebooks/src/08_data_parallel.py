# %% [markdown]
# # 08 · Data parallel
#
# **Question.** How do I go to several processes without changing the result, and what is at fault in *comm*?
#
# **You will**
# - start processes that train together, and average their gradients by hand
# - prove that two ranks with 32 samples each do what one process does with 64
# - see which rank reads which sample, and find samples that are read twice or never
# - weigh unequal batches rightly, and find a gradient that was never averaged
# - name the rank that fails, and say where the time of a step goes
#
# **Know before.** A baseline on one device (03), accumulation (06), the order of the stages (07).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU. Nothing here was run on GPUs.
#
# data → forward → loss → backward → update → **comm**
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>In which order are the stages asked, and why is there an order?</summary>
#
# Data, forward, loss, backward, update. What is wrong at one stage spoils all that come after it, so only the first
# broken stage is the fault. *comm* is asked last: it exchanges what the others have made.
#
# </details>
#
# <details><summary>A label is out of range. What does a CPU say, and what a GPU?</summary>
#
# The CPU raises at the line, and names the label. The GPU reports a device-side assert, later than it happens and often
# at an innocent line.
#
# </details>
#
# <details><summary>A loss curve falls. What does that prove about the stages?</summary>
#
# Little. Most faults of the clinic leave a plausible curve. Each stage needs a probe of its own.
#
# </details>

# %% tags=["parameters"]
seed = 0
world_size = 2

# %%
import contextlib
import functools
import itertools
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.colors import ListedColormap
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.ranks.scaling import explain_scaling
from dxdy_nb.runs.lessons import NOTEBOOKS
from dxdy_nb.training import datasets

# %%
sys.path.append(str(NOTEBOOKS))  # what the processes run lies beside the notebooks
import ddp_worker

per_rank = 32  # samples that each rank takes at a step
dx.RunConfig(seed=seed, world_size=world_size)  # refuses what makes no sense, before anything runs
if world_size > 8:
    raise dx.DxdyError(f"world_size: this lesson is for 1 to 8 processes on one machine, got {world_size}")
several = world_size > 1
torch.set_num_threads(1)
lesson = Lesson("08_data_parallel")
if not several:
    print("One process has nobody to differ from: unequal batches, faults between ranks and failures are left out.")

# %% [markdown]
# ## 1 · One process first
#
# Whoever goes to several processes needs the run of one to compare with. Digits, two linear layers, one epoch. The
# batch is as large as those of all ranks together will be.


# %% tags=["same-as:ddp_worker.build"]
def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


# %%
data = datasets.load("digits").train
model = build(seed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
alone = {"losses": [], "ids": [], "weights": []}


def steps():
    for x, y, ids in datasets.loader(data, per_rank * world_size, shuffle_seed=seed):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        alone["losses"].append(loss.item())
        alone["ids"].append(ids)
        alone["weights"].append(nn.utils.parameters_to_vector(model.parameters()).detach())
        yield


# %%
with dx.watch(model, optimizer) as w:
    await dx.live(w).run(steps())

# %% [markdown]
# The loss starts at about ln 10 = 2.3 and halves within the epoch. This is the result that must not change.
#
# ## 2 · Several processes
#
# A **rank** is one process of those that train together, numbered from 0; their number is the **world size**. Each has
# a whole copy of the model and its own part of each batch. They must agree on one thing: the gradient. For that there
# are *collectives*, functions that all ranks call and in which they wait for each other.
#
# First by hand. One weight, $w=1$, and one sample on each rank, $r+1$. The loss of a rank is $(w\,(r+1))^2$.


# %% tags=["same-as:ddp_worker.by_hand"]
def by_hand(rank, world_size):
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = (w * (rank + 1)) ** 2  # one sample on each rank: 1 on rank 0, 2 on rank 1
    loss.backward()
    own = w.grad.clone()
    dist.all_reduce(w.grad)  # adds up; every rank gets the sum
    w.grad /= world_size
    return own, w.grad


# %%
lesson.predict("The gradient that every rank holds at the end", None)

# %% [markdown]
# Now a whole training. Compared with section 1, four things are new. `DistributedDataParallel` copies rank 0's weights
# to all ranks, and averages each gradient during `backward`. `DistributedSampler` deals the samples out.
# `set_epoch` gives each epoch an order of its own, the same on all ranks. And `batch_size` is that of *one* rank.


# %% tags=["same-as:ddp_worker.train"]
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


# %% [markdown]
# A break: the wrapper without anybody to share with.

# %%
try:
    DistributedDataParallel(build(seed))
except ValueError as error:
    print(type(error).__name__, "-", str(error).splitlines()[0])

# %% [markdown]
# Read it: a *process group* is the set of ranks that know of each other, and *default* is the one with all of them in
# it. Nothing has made it yet. So around the two functions stands what each process does: join the others, work, leave.


# %% tags=["same-as:ddp_worker.worker"]
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


# %% [markdown]
# The cells above only show these functions. `spawn` starts a fresh Python in each process, and that cannot look into a
# notebook: it imports functions by the name of their file. So the same text stands in `ddp_worker.py`, beside this
# notebook. (`fork` would copy the notebook's process as it is, and a copy of one that has computed with several threads
# may hang for ever.)
#
# Two lines keep others out. The ranks meet through a file in a private folder. And gloo, which moves the bytes, is told
# to listen on the loopback interface, which no other machine can reach. The usual `tcp://` or `env://` opens a port on
# *every* interface, and whoever connects may read and write there: torch asks for no password.

# %%
os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
with tempfile.TemporaryDirectory() as folder:  # only its owner may read it
    mp.spawn(ddp_worker.worker, args=(world_size, folder, seed, per_rank), nprocs=world_size)
    spawned = [torch.load(f"{folder}/rank{rank}.pt") for rank in range(world_size)]

# %%
for rank, result in enumerate(spawned):
    own, mean = result["by hand"]
    print(f"rank {rank}: own gradient {own:4.1f}, after all_reduce {mean:.4f}")
lesson.reveal("The gradient that every rank holds at the end", mean.item())

# %% [markdown]
# By pen: $\partial (w\,x)^2/\partial w = 2wx^2$. Rank 0 has 2, rank 1 has 8; the mean is 5. It is also the gradient of
# the mean loss over all samples, in one process: pen, finite difference and autograd, in float64.

# %%
samples = torch.arange(1, world_size + 1, dtype=torch.float64)


def mean_loss(w):
    return ((w * samples) ** 2).mean()


# %%
w1 = torch.ones((), dtype=torch.float64, requires_grad=True)
(autograd,) = torch.autograd.grad(mean_loss(w1), w1)
difference = (mean_loss(1 + 1e-5) - mean_loss(1 - 1e-5)) / 2e-5
pen = (world_size + 1) * (2 * world_size + 1) / 3  # 2 · (1² + 2² + … + n²) / n
assert abs(mean - pen) < 1e-12 and abs(autograd - pen) < 1e-12
assert abs(difference - pen) < 1e-8
print(f"ranks {mean:.4f}, autograd {autograd:.4f}, finite difference {difference:.4f}, pen {pen:.4f}")

# %% [markdown]
# ## 3 · Is it the same?
#
# The mean of equal parts' means is the mean of the whole. So the ranks' gradient must be that of the large batch, and
# the weights must be the same after each step. To the last bit?

# %%
lesson.predict("Weights of several ranks and of one process: bit for bit the same, yes or no", None)

# %%
trained = [result["trained"] for result in spawned]
full = len(data) // (per_rank * world_size)  # steps before the last batch, which is smaller
for step in range(full):
    together = torch.cat([one["ids"][step] for one in trained])
    assert set(together.tolist()) == set(alone["ids"][step].tolist())
print("at each step the ranks together read the batch of the one process")


# %%
def distance(vector, right):
    return ((vector - right).norm() / right.norm()).item()


# %%
ranks_agree = all(
    torch.equal(one["weights"][step], trained[0]["weights"][step]) for one in trained for step in range(full)
)
ends = trained[0]["weights"][full - 1], alone["weights"][full - 1]
apart = distance(*ends)
assert ranks_agree and apart < 1e-6
print("all ranks hold the same bits:", ranks_agree, "  one process, relative difference below 1e-6:", apart < 1e-6)
same = "yes" if torch.equal(*ends) else "no"
lesson.reveal("Weights of several ranks and of one process: bit for bit the same, yes or no", same)

# %% [markdown]
# <details><summary>Why not to the last bit?</summary>
#
# float32 sums round, and 64 numbers added in one go round otherwise than two sums of 32. A difference of 1e-7 is
# rounding. One of 1e-2 is a fault. In float64 it is about 1e-16. Between *ranks* there is no such excuse: they receive
# one sum, and must agree bit for bit.
#
# </details>
#
# ### The loss that you see
#
# What a rank prints is the loss of *its* samples.

# %%
losses = torch.tensor([one["losses"][:full] for one in trained])  # (ranks, steps)
curves = {f"rank {rank} alone": (range(full), row.tolist()) for rank, row in enumerate(losses)}
curves |= {"mean over ranks": (range(full), losses.mean(0).tolist())}
curves |= {"one process": (range(full), alone["losses"][:full])}
alt = "the losses of the ranks scatter; their mean lies on the loss of the one process"
plots.show(plots.curves(curves, alt=alt, x="step", y="loss"))

# %%
reference = torch.tensor(alone["losses"][:full])
off = (losses - reference).abs().max().item()
assert (losses.mean(0) - reference).abs().max() < 1e-5
assert off > 0.02 or not several
print("the mean over the ranks is the loss of the one process; a rank alone is off by more than 0.02:", off > 0.02)

# %% [markdown]
# (One line covers the other: the mean over ranks lies under the one process.)
#
# Rank 0's own loss is a loss over fewer samples: it is not wrong, and it is not the loss of the step. A decision that
# hangs on it, such as `ReduceLROnPlateau` or early stopping, may fall differently on each rank. To log the loss of the
# step, reduce its sum and its count (section 6).
#
# ## 4 · The same in a warm pool
#
# Each `spawn` imports torch again. `dx.launch` keeps the processes, so that the second call begins at once, and it
# sends functions by value: they may stand in a cell. It makes the process group as `worker` does, on loopback and
# through a private file; `dx.session()` tells a rank its place.


# %%
def in_pool(job, *args):
    with dx.session(device="cpu") as s:
        return job(s.rank, s.world_size, *args)


def on_ranks(job, *args, **limits):
    return dx.launch(in_pool, job, *args, world_size=world_size, **limits)


# %% [markdown]
# Comfort must not change a bit either. The pool gets the functions of the *cells*, `spawn` had those of the file:

# %%
pooled = on_ranks(train, seed, per_rank)
for one, other in zip(pooled, trained, strict=True):
    assert one["losses"] == other["losses"]
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
print("spawn and pool: the same bits at every step")

# %% [markdown]
# From here on you may edit `train` or any function below, and run it again in a moment.
#
# ## 5 · Who reads which sample?
#
# `DistributedSampler` shuffles by its seed and its epoch. Rank 0 takes the first, third, fifth … of that order, rank 1
# the others. No message is sent: all ranks must compute the *same* order. No process is needed to look at it, either.
#
# 21 samples, two epochs. An epoch has to be even, so that no rank waits for another at its end.

# %%
n = 21
lesson.predict("How many samples do the ranks read together in an epoch of 21?", None)


# %%
def samplers(own_seed=False):
    seeds = [seed + rank if own_seed else seed for rank in range(world_size)]
    return [DistributedSampler(range(n), world_size, rank, seed=seeds[rank]) for rank in range(world_size)]


def reading(samplers, batch_size, name_epoch=True):
    """Return a row a step: 0 nobody, 1 rank 0, 2 rank 1 …, -1 a sample that was read before in this epoch."""
    rows = []
    for epoch in range(2):
        for sampler in samplers if name_epoch else ():
            sampler.set_epoch(epoch)
        orders, read = [list(sampler) for sampler in samplers], set()
        for start in range(0, len(orders[0]), batch_size):
            rows.append(torch.zeros(n))
            for rank, order in enumerate(orders):
                for sample in order[start : start + batch_size]:
                    rows[-1][sample] = -1 if sample in read else rank + 1
                    read.add(sample)
    return torch.stack(rows)


# %%
matrices = {
    "as it should be": reading(samplers(), 4),
    "set_epoch forgotten": reading(samplers(), 4, name_epoch=False),
    "another seed on each rank": reading(samplers(own_seed=True), 4),
}
reads = sum(len(s) for s in samplers())
lesson.reveal("How many samples do the ranks read together in an epoch of 21?", reads)

# %%
alt = "which rank reads which sample at which step: dealt out evenly, the same order twice, samples read twice"
figure, axes = plots.new_figure(alt, width=9, height=3, columns=3)
colours = ListedColormap(["black", "white", *plots.PALETTE[:6], "gold", "0.5"])
for ax, (name, rows) in zip(axes.flat, matrices.items(), strict=True):
    ax.imshow(rows, cmap=colours, vmin=-1.5, vmax=8.5, aspect="auto", interpolation="nearest")
    ax.axhline(len(rows) / 2 - 0.5, color="0.3", linewidth=2)
    ax.set(title=name, xlabel="sample", ylabel="step")
    ax.grid(visible=False)
plots.show(figure)

# %% [markdown]
# Blue is rank 0, orange is rank 1, black a sample that somebody has read before in the same epoch; the line separates
# the epochs. Count:

# %%
for name, rows in matrices.items():
    first, second = rows.chunk(2)
    missing, twice = int((first == 0).all(0).sum()), int((first == -1).sum())
    print(f"{name:25}  missing {missing:2}, read again {twice:2}, epochs alike: {torch.equal(first, second)}")

# %% [markdown]
# - With two ranks 22 are read: one sample is there twice, so that both ranks get eleven (`drop_last=True` would leave
#   one out instead). In training that is nothing. In a **metric** it counts twice: evaluate
#   `range(rank, n, world_size)`, and add up sums and counts.
# - Without `set_epoch` every epoch has the order of the first. No error, no warning.
# - With a seed of its own each rank deals from another order: some samples are read twice, some never. The seed of
#   *dropout* and augmentation is another matter: that should differ between ranks.
#
# The same duplicate sits in our epoch of 1,199. At the last step the ranks read 1,200:

# %%
padded = distance(trained[0]["weights"][-1], alone["weights"][-1])
print("after the padded step the difference is above 1e-6:", padded > 1e-6)

# %% [markdown]
# ## 6 · Unequal batches
#
# `DistributedDataParallel` takes the mean of the ranks' gradients, whatever they were computed from. Let rank 0 have 32
# samples, and each other rank 8, as happens with a sampler of one's own, with filtered samples, or with tokens that are
# ignored.

# %%
lesson.predict("In a mean of means, a sample of the 8 counts how many times as much as one of the 32?", None)


# %%
def unequal(rank, world_size, sizes, counted):
    data, start = datasets.load("digits").train, sum(sizes[:rank])
    x, y = data.x[start : start + sizes[rank]], data.y[start : start + sizes[rank]]
    net = build(seed)
    model = DistributedDataParallel(net)
    total = torch.tensor(float(len(y)))
    dist.all_reduce(total)  # the number of samples on all ranks
    losses = cross_entropy(model(x), y, reduction="none")  # one a sample
    loss = losses.sum() * world_size / total if counted else losses.mean()
    loss.backward()
    return nn.utils.parameters_to_vector([p.grad for p in net.parameters()])


# %%
sizes = [32, *[8] * (world_size - 1)]
net = build(seed)
cross_entropy(net(data.x[: sum(sizes)]), data.y[: sum(sizes)]).backward()
whole = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])

# %%
gradients = [on_ranks(unequal, sizes, counted)[0] for counted in (False, True)]
mean_of_means, true_counts = (distance(gradient, whole) for gradient in gradients)
assert true_counts < 1e-6 and (mean_of_means > 0.1 or not several)
print(
    f"relative error of the gradient: mean of means {mean_of_means:.1f}, true counts below 1e-6: {true_counts < 1e-6}"
)
weight = (1 / sizes[-1]) / (1 / sizes[0])
lesson.reveal("In a mean of means, a sample of the 8 counts how many times as much as one of the 32?", weight)

# %% [markdown]
# The gradient of the mean of means is off by a large part of its own length, and there is no error and no warning. At
# the end of an epoch it happens once, with filtered samples at every step.
#
# The remedy: each rank gives its *sum*, divided by the count of *all*, times `world_size`, since the average divides by
# that once more. The count is one number: its `all_reduce` costs little. The loss to log comes out of the same two
# sums.
#
# ## 7 · A gradient that nobody averaged
#
# With accumulation (06) a rank makes several micro-batches before a step, and there is no need to average after each:
# `no_sync` leaves it out, and the gradients wait on their rank. The **last** micro-batch averages all that has been
# added up. What counts is in which context the *forward* ran: put forward and backward both inside.


# %%
def accumulated(rank, world_size, quiet):
    """One window; ``quiet`` says of each micro-batch whether it is in no_sync."""
    data, net = datasets.load("digits").train, build(seed)
    model = DistributedDataParallel(net)
    for place, silent in enumerate(quiet):
        start = 16 * (place * world_size + rank)
        x, y = data.x[start : start + 16], data.y[start : start + 16]
        with model.no_sync() if silent else contextlib.nullcontext():
            loss = cross_entropy(model(x), y) / len(quiet)
            loss.backward()
    return nn.utils.parameters_to_vector([p.grad for p in net.parameters()])


# %%
net = build(seed)
both = 2 * 16 * world_size  # per rank × ranks × micro-batches: the effective batch
cross_entropy(net(data.x[:both]), data.y[:both]).backward()
whole = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
for quiet in ((True, False), (False, True)):
    gradients = on_ranks(accumulated, quiet)
    agree = all(torch.equal(g, gradients[0]) for g in gradients)
    right = distance(gradients[0], whole) < 1e-6
    print(f"no_sync on the micro-batches {quiet!s:13}: ranks agree {agree!s:5}  right {right}")

# %% [markdown]
# The second is off by one, as a counter that begins at 1 makes it. Each rank then steps with a gradient of its own, and
# the ranks drift apart. Who would notice?

# %%
lesson.predict("no_sync on the wrong micro-batch: does the run end with an error, yes or no", None)


# %%
def suspect(rank, world_size, init_method, fault=""):
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    net = build(seed)
    model = DistributedDataParallel(net)
    data = datasets.load("digits").train
    batches = iter(DataLoader(data, 16, sampler=DistributedSampler(data, seed=seed)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            x, y, _ = next(batches)
            quiet = micro == (1 if fault == "off by one" else 0)
            with model.no_sync() if quiet else contextlib.nullcontext():
                output = net(x) if fault == "round the wrapper" else model(x)
                loss = cross_entropy(output, y) / 2
                loss.backward()
        optimizer.step()
        shown = loss.detach() / world_size
        dist.all_reduce(shown)  # the loss that is logged
    dist.destroy_process_group()


# %% [markdown]
# It runs to its end in each case. `dx.diagnose_ranks` starts it on ranks that write down what they do, and compares
# their notes. The third case calls `net(x)`, or `model.module(x)`, in place of `model(x)`: the wrapper never hears of
# that forward, and averages nothing.

# %%
faults = ("", "off by one", "round the wrapper") if several else ()
reports = {f: dx.diagnose_ranks(functools.partial(suspect, fault=f), world_size=world_size) for f in faults}
ended = all(not report.unchecked for report in reports.values())
named = [[finding.cause for finding in report.errors] for report in reports.values()]
for fault, causes in zip(faults, named, strict=True):
    print(f"{fault or 'nothing wrong':17}  {causes}")
lesson.reveal("no_sync on the wrong micro-batch: does the run end with an error, yes or no", "no" if ended else "yes")

# %%
for report in reports.values():
    for finding in report.errors:
        print(f"{finding.stage}, {finding.lesson}: {finding.fix}")

# %% [markdown]
# The check that found both is simple: *the same bits on every rank*, of each gradient before the step, and of each
# weight after it. In plain torch it is one line on each rank, and the numbers must be equal:
#
# ```python
# print(rank, [p.grad.norm().item() for p in model.parameters()])  # before optimizer.step()
# ```
#
# A script needs no change for it: `dxdy watch --nproc-per-node 2 train.py`. For a whole recorded run there is
# `dx.verify_ranks`; section 10 shows it.
#
# ### An unused parameter
#
# `DistributedDataParallel` waits for the gradient of every parameter. One that the forward pass leaves out gets none.

# %%
lesson.predict("An unused layer: in which iteration does torch complain?", None)


# %%
def unused(rank, world_size):
    net = build(seed)
    net.spare = nn.Linear(2, 2)
    model = DistributedDataParallel(net)
    net.forward = lambda x: net[3](net[2](net[1](net[0](x))))  # without spare
    for iteration in (1, 2, 3):
        try:
            cross_entropy(model(torch.ones(4, 64)), torch.arange(4)).backward()
        except RuntimeError as error:
            return iteration, type(error).__name__, str(error).split(". ")[0]
    return None


# %%
iteration, kind, text = on_ranks(unused)[0]
print(kind, "-", text)
lesson.reveal("An unused layer: in which iteration does torch complain?", iteration)

# %% [markdown]
# The first one passes, and the harm is done. Gradients travel in *buckets*; this small net fills only one, which waits
# for the unused layer and is never sent. So *nothing* was averaged, and nobody has asked yet. The second forward finds
# the first reduction unfinished. The rest of the message names three ways out. The best is to take
# the layer out, or to use it; `find_unused_parameters=True` searches the graph at every step.
#
# ## 8 · Failures on purpose
#
# When a rank fails, the others lose it in the middle of a collective. *They* raise too, often first, and their message
# is about the network. The mildest case: rank 0 has one batch more than the others.

# %%
lesson.predict("Rank 0 has a batch more. Which error does the last rank raise: its name, or none", None)


# %%
def one_more(rank, world_size):
    try:
        for _ in range(3 if rank == 0 else 2):
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return type(error).__name__, str(error).split("] ")[-1]
    return "none", "ended as usual"


# %%
said = on_ranks(one_more, timeout=5.0)
for rank, (name, text) in enumerate(said):
    print(f"rank {rank}: {name} - {text}")
lesson.reveal("Rank 0 has a batch more. Which error does the last rank raise: its name, or none", said[-1][0])

# %% [markdown]
# Rank 0 waits for somebody who has gone home, and only rank 0 complains. Without `timeout` it would have waited for
# half an hour. Two rougher cases: the last rank raises, and the last rank is late. Who is named?


# %%
def fails(rank, world_size, how):
    model = DistributedDataParallel(build(seed))
    for step in range(3):
        if step == 1 and rank == world_size - 1:
            if how == "raises":
                raise ValueError("a bad record")
            time.sleep(60)
        cross_entropy(model(torch.ones(4, 64)), torch.arange(4)).backward()


# %%
blamed = {}
for how in ("raises", "is late") if several else ():
    try:
        on_ranks(fails, how, timeout=5.0)
    except dx.DxdyError as error:
        blamed[how] = error.rank
        said = str(error).splitlines()[0].replace("launch: ", f"{how}: ")
        print(said.split(", /")[0])  # what follows is the file and the line in which it was

# %% [markdown]
# How to read such logs:
#
# - *Connection closed by peer*, *reset by peer*, *Broken pipe*: this rank is a **victim**. Look at the others.
# - *Timed out waiting 5000ms for recv*: a victim too. Somebody is late, has left early, or has one batch less.
# - `process 1 terminated with signal SIGKILL`: often memory. Nothing in Python will tell you.
# - Whatever is *not* about the network is the cause: here the ValueError.
#
# `mp.spawn` re-raises the error of whichever process ended first. `dx.launch` waits two seconds for a better reason,
# and names the rank that was lost, not the one that lost it.
#
# ## 9 · Why it is not faster here
#
# A step of a rank has three parts: it **computes**, it **waits** for the slowest, it **communicates**. Measured one by
# one, for two sizes of batch. A barrier ends the waiting, and is a small message itself.


# %%
def timed(rank, world_size, batch_size):
    torch.set_num_threads(1)
    net, rows = build(seed), []
    x, y = torch.rand(batch_size, 1, 8, 8), torch.randint(10, (batch_size,))
    gradient = torch.zeros(sum(p.numel() for p in net.parameters()))
    for _ in range(40):
        dist.barrier()
        marks = [time.perf_counter()]
        for part in (lambda: cross_entropy(net(x), y).backward(), dist.barrier, lambda: dist.all_reduce(gradient)):
            part()
            marks.append(time.perf_counter())
        rows.append([after - before for before, after in itertools.pairwise(marks)])
    return torch.tensor(rows).median(0).values * 1000  # milliseconds: compute, wait, communicate


# %%
times = {size: on_ranks(timed, size) for size in (per_rank, per_rank * world_size, 32 * per_rank)}
bars = {(size, rank): t for size in (per_rank, 32 * per_rank) for rank, t in enumerate(times[size])}
figure, axes = plots.new_figure("compute, wait and communicate, by rank, for a small and a large batch", 8, 2.6)
ax, left = axes[0, 0], torch.zeros(len(bars))
for part, name in enumerate(("compute", "wait", "communicate")):
    width = torch.stack([t[part] for t in bars.values()])
    ax.barh([f"batch {size}, rank {rank}" for size, rank in bars], width, left=left, label=name)
    left = left + width
ax.set(xlabel="milliseconds a step (median)")
ax.legend(frameon=False)
ax.invert_yaxis()
plots.show(figure)

# %% [markdown]
# The picture is of the machine that made it; yours differs. What holds on every machine:

# %%
compute, wait, communicate = (float(t) for t in times[per_rank][0])
step = compute + wait + communicate
speed_up = float(times[per_rank * world_size][0][0]) / step  # the whole batch in one process, over a share in each
assert speed_up < 1
assert (wait + communicate) / step > 0.05 or not several
print(f"ranks with {per_rank} samples each are slower than one process with all of them: {speed_up < 1}")

# %% [markdown]
# And what can be counted without a clock. A linear layer does about 6 operations for each weight and sample (2 forward,
# 4 backward). A ring of $n$ ranks sends $2(n-1)/n$ times the gradient, 4 bytes a weight:

# %%
numel = sum(p.numel() for p in net.parameters())
operations = 6 * numel * per_rank
sent = 2 * (world_size - 1) / world_size * 4 * numel
print(f"{numel} weights: {operations:,} operations and {sent:,.0f} bytes a step")

# %% [markdown]
# Half a million operations are a small part of a millisecond for one core, and most of *compute* in the upper bars is
# the fixed cost of calling them: 32 times the samples (the lower bars) take far less than 32 times as long. To hand ten
# thousand bytes to another process costs about as much again, nearly all of it fixed too: the call, the wake-up, the
# copy. So half the samples save little, and the exchange is paid for. Nor can ranks win where one process already uses
# all cores.
#
# Note what cancels: for linear layers and two ranks there are $1.5\times$ *batch* operations for each byte, however
# large the net. The remedies follow:
#
# - **more samples for each rank**, or convolutions, which use each weight many times a sample;
# - **fewer exchanges**: accumulation with `no_sync`, one exchange a window;
# - **overlap**: DDP sends a bucket of gradients while backward goes on, which needs several buckets (25 MB each by
#   default) to be worth anything;
# - **no idle waiting**: even batches, even sequence lengths, data loading that keeps up on every rank;
# - **one share of the cores each**: `OMP_NUM_THREADS`, else all ranks start as many threads as there are cores;
# - on GPUs also `bf16` gradients (a communication hook), and a faster link.
#
# ## Further
#
# ### 10 · A recorded run, and BatchNorm
#
# `dx.train` runs the reference loop on several ranks as well, with true counts and `no_sync` inside; `verify_ranks`
# compares what the ranks wrote down.

# %%
config = dx.RunConfig(seed=seed, model="mlp", batch_size=per_rank, world_size=world_size, max_steps=38, device="cpu")
one = dx.train(config.override({"world_size": 1, "batch_size": per_rank * world_size}))
run = dx.train(config)
gap = abs(one.metrics["validation_accuracy"] - run.metrics["validation_accuracy"])
print("validation accuracy, one process against ranks, within 0.02:", gap < 0.02)

# %%
if several:
    for check, verdict in dx.verify_ranks(run)["verdict"].items():
        print(f"{check:15} {verdict}")

# %% [markdown]
# *Equal* is asked of updates, gradients, parameters and rates. *Apart* is as it should be for samples. *Equal* for the
# loss means that it was reduced. *Not seen*: this net has no buffers, and nobody saved a file. Nothing draws random
# numbers here; with dropout they should be apart.
#
# And where the time of this run went: the measurement of section 9, made by every recorded run.

# %% tags=["nbval-ignore-output"]
if several:
    explained = explain_scaling(run, baseline=one)
    print(explained)
    plots.show(explained.plot())

# %%
if several:
    parts = explained.table[["compute", "data", "pauses", "exposed", "waiting"]].sum(axis=1)
    assert torch.allclose(torch.tensor(parts.values), torch.tensor(explained.table["step"].values))
    print("compute, data, pauses, exposed communication and waiting are the whole step")

# %% [markdown]
# *Hidden* communication costs nothing: backward goes on meanwhile. The prediction for more ranks is arithmetic on these
# figures, and is labelled so.
#
# What is *not* averaged: **buffers**. A BatchNorm normalises by the statistics of its rank's samples, and its running
# mean follows those.


# %%
def normalised(rank, world_size):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    data = datasets.load("digits").train
    for x, y, _ in DataLoader(data, 32, sampler=DistributedSampler(data, seed=seed)):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach(), net[2].running_mean


# %%
results = on_ranks(normalised)
(weights, mean), (other_weights, other_mean) = results[0], results[-1]
print("weights alike:", torch.equal(weights, other_weights), "  running means alike:", torch.equal(mean, other_mean))

# %% [markdown]
# DDP copies rank 0's buffers to the others at the *next forward* (`broadcast_buffers`), so they differ at any moment
# after it, and the model that is evaluated depends on the rank. Save and evaluate on rank 0, or broadcast first. And
# 2 × 32 with BatchNorm is not 1 × 64: each half is normalised by itself. `SyncBatchNorm` shares the statistics; it runs
# on GPUs only.
#
# ### 11 · A larger effective batch: does the rate change?
#
# Effective batch = per rank × ranks × accumulation. Who adds ranks and keeps the batch of each has changed an
# experiment: as many epochs now have fewer steps. Since ranks are the same as one process with their samples together,
# one process can stand for eight ranks.


# %%
def validation_losses(ranks, rate):
    net, held = build(seed), datasets.load("digits").validation
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    loader, found = datasets.loader(data, 64 * ranks, shuffle_seed=seed), []
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            found.append(cross_entropy(net(held.x), held.y).item())
    return found


# %%
settings = {"1 rank": (1, 0.05), "8 ranks, same rate": (8, 0.05), "8 ranks, rate × √8": (8, 0.05 * 8**0.5)}
settings |= {"8 ranks, rate × 8": (8, 0.4)}
found = {name: validation_losses(*setting) for name, setting in settings.items()}
alt = "validation loss over epochs: eight ranks at the same rate lag far behind, at eight times the rate a little"
plots.show(
    plots.curves({k: (range(1, 7), v) for k, v in found.items()}, alt=alt, x="epoch", y="validation loss", log_y=True)
)

# %%
end = {name: values[-1] for name, values in found.items()}
order = sorted(end, key=end.get)
print("from the lowest loss to the highest:", *order, sep="\n  ")

# %% [markdown]
# At the same rate eight ranks make an eighth of the steps, each no longer than before, and fall far behind. Eight times
# the rate brings most of it back, not all. That is the *linear scaling* of Goyal et al.; with warm-up, they
# held it up to 8,192 images on ImageNet. For Adam a square root is often used. Neither is a law: both say where to
# begin to search (05). Keep the *effective* batch where you want to change nothing: 32 on each of two ranks, for 64.
#
# ### 12 · Not DataParallel
#
# `nn.DataParallel` looks simpler: one process, one line. It is still there, and warns nobody.

# %%
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    nn.DataParallel(build(seed))
print("warnings:", len(said))

# %% [markdown]
# It copies the model to every GPU at each forward, runs them as threads of one process, which share one interpreter
# lock, and gathers all outputs on the first GPU, whose memory is full first. What a replica writes into itself is
# thrown away. It cannot leave the machine. Torch's own documentation recommends `DistributedDataParallel`, also for one
# machine.
#
# ### 13 · The same file under torchrun
#
# A launcher tells each process its place through `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`.
# `ddp_worker.py` ends with a few lines that read them. In the project's folder:
#
# ```
# GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 notebooks/ddp_worker.py
# ```
#
# Each rank prints the sum of its weights, and it is that of section 2 at seed 0. torchrun's own store **listens on all
# interfaces**, without a password, whatever `GLOO_SOCKET_IFNAME` says. On a machine that strangers can reach, keep a
# firewall before it, or use `spawn` or `dx.launch`. A function that takes its place from `dx.session()` runs unchanged
# in all three.

# %% [markdown]
# ### 14 · Going further: several machines
#
# [Going further](../GOING_FURTHER.md) has the commands: torchrun on two machines of a private network, a SLURM script,
# links for Kubernetes and Ray, and what to look at first when ranks on several machines hang.

# %% [markdown]
# ## All causes that lead here
#
# A report's `lesson` leads to this list. Each line says what happens, and what shows it.
#
# <a id="comm"></a>Causes explained here, **comm**:
#
# - `unused-params-error`: A parameter gets no gradient, and the *second* forward raises. Section 7.
# - `models-differ`: The ranks built models of other shapes. One rank raises and names the parameter, the others lose
#   their peer.
# - `rank-died`: A process ended by a signal or left without a word. Section 8; look for memory first.
# - `uneven-inputs-hang`: A rank has a batch more than the others, and waits in its backward for ever. The others have
#   finished without any error.
# - `collective-mismatch`: One rank calls a collective that the others do not, as in `if rank == 0: dist.barrier()`.
# - `sampler-wrong-rank`: A sampler was told another rank than its process has: two ranks read one share.
# - `no-distributed-sampler`: Every rank reads all samples in one order: the work is done several times over.
# - `set-epoch-missing`: Every epoch has the order of the first. Section 5.
# - `eval-padded-duplicates`: Samples that the sampler repeated are counted in a metric. Section 5.
# - `gradients-not-reduced`: The ranks step with gradients of their own, and drift apart. Nothing is wrapped, or a
#   reduction by hand is missing.
# - `forward-through-module`: `model.module(x)` goes round the wrapper. Section 7.
# - `no-sync-wrong-parity`: The last micro-batch of a window is in `no_sync`. Section 7.
# - `unfrozen-after-wrap`: DDP asks once, at the wrap, which parameters are trained. One that is unfrozen later is not
#   averaged.
# - `param-replaced-after-wrap`: A module that was exchanged after the wrap has parameters that DDP never saw.
# - `loss-params-outside-ddp`: The loss has weights (a temperature, class centres), and only the model was wrapped.
# - `clip-with-local-norm`: Each rank clips by the norm of its own part, so that equal gradients become unequal.
# - `grad-sum-not-mean`: `all_reduce` adds up. Not divided by the number of ranks, the rate is that many times larger.
# - `token-count-mean-of-means`: The ranks average over unequal counts, and their means are averaged. Section 6.
# - `local-loss-logged`: Each rank prints its own loss, and nobody the loss of the step. Section 3.
# - `lr-differs-by-rank`: A scheduler decides by a rank's own number, such as its validation loss.
# - `scheduler-times-world`: The scheduler advances once for each rank, instead of once for each update.
# - `different-init-manual-allreduce`: Gradients are averaged by hand, and the weights never were equal. DDP broadcasts
#   rank 0's; by hand that is your line.
# - `optimizer-state-differs`: Equal gradients, unequal steps: momentum, or a setting, was loaded on one rank only.
# - `bn-stats-not-synced`: Running statistics differ by rank, with `broadcast_buffers=False`. Section 10.
# - `save-from-every-rank`: All ranks write one file at once. Rank 0 writes, a barrier, then the others may read.
# - `all-gather-cuts-grad`: `all_gather` returns tensors without a graph: a contrastive loss over them has no gradient
#   from the other ranks' samples.
# - `fsdp-optimizer-before-shard`: `fully_shard` replaces the parameters, and the optimizer holds the old ones.

# %% [markdown]
# ## Exercises
#
# Ranks hold parts: a mean over *their* samples, and a count. Put them together so that the result is what one process
# would have got from all samples.
#
# ### Exercise · worked
#
# The loss of the step, from every rank's mean and count.


# %%
def global_loss(means, counts):
    total = sum(m * n for m, n in zip(means, counts, strict=True))  # back to sums
    return total / sum(counts)


# %%
lesson.check("global_loss", global_loss)

# %% [markdown]
# Means 1 and 3 over 30 and 10 samples: (30 + 30) / 40 = 1.5. The mean of the means would say 2.
#
# ### Exercise · faded
#
# The same on one rank, before `backward`: `losses` holds one loss for each of *this* rank's samples, `total` is the
# number of samples on all ranks. `DistributedDataParallel` will average over `world_size` ranks.


# %%
def scaled_loss(losses, total, world_size):
    own = ...  # this rank's part, before any division
    return own * ...  # what the average to come makes right


# %%
lesson.check("scaled_loss", scaled_loss)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What must the average of what all ranks return be? The sum of all losses over `total`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Average means: added up, and divided by `world_size`. Which factor undoes that division?
#
# </details>
#
# <details><summary>Solution: scaled_loss</summary>
#
# ```python
# def scaled_loss(losses, total, world_size):
#     own = losses.sum()
#     return own * world_size / total
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The gradient of a step with ranks *and* accumulation. `windows` has a list for each rank, and in it a pair for each of
# its micro-batches: the gradient of the *mean* loss of that micro-batch, and how many samples it had.


# %%
def global_gradient(windows): ...


# %%
lesson.check("global_gradient", global_gradient)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The gradient of a sum is the sum of the gradients: turn each mean back into a sum over its samples.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# One division at the end, by the number of samples of all micro-batches of all ranks.
#
# </details>
#
# <details><summary>Solution: global_gradient</summary>
#
# ```python
# def global_gradient(windows):
#     pairs = [pair for window in windows for pair in window]
#     return sum(g * n for g, n in pairs) / sum(n for _, n in pairs)
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# Put the lines of a worker in order.
#
# - A: `sampler.set_epoch(epoch)`
# - B: `torch.save(net.state_dict(), path) if rank == 0 else None; dist.barrier()`
# - C: `loss.backward()`
# - D: `dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)`
# - E: `dist.destroy_process_group()`
# - F: `model = DistributedDataParallel(net)`
# - G: `optimizer.step()`
# - H: `loss = cross_entropy(model(x), y)` for the first batch of the epoch

# %%
order_of_lines = ...  # a list of eight letters, ["…", "…", …]

# %%
lesson.check("line_order", order_of_lines)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which lines talk to other processes? All of them stand between joining the group and leaving it.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The sampler reads its epoch when the loader asks for an order, before the first batch.
#
# </details>
#
# <details><summary>Solution: line_order</summary>
#
# ```python
# order_of_lines = ["D", "F", "A", "H", "C", "G", "B", "E"]
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** Four ranks, 16 samples each, three micro-batches a step. You go to two ranks. Which setting leaves the
# result as it was?
#
# <details><summary>a) 16 samples, three micro-batches: a mean does not depend on the number of ranks.</summary>
#
# Not so: the mean is over half as many samples then, and an epoch has twice as many steps.
#
# </details>
#
# <details><summary>b) 32 samples, three micro-batches.</summary>
#
# Right. 4 × 16 × 3 = 2 × 32 × 3 = 192: the effective batch is the same, and so are steps and rate.
#
# </details>
#
# <details><summary>c) 16 samples, three micro-batches, and half the rate.</summary>
#
# Not so: that makes the steps shorter, and leaves them noisier and twice as many. It may work, but it is another run.
#
# </details>

# %% [markdown]
# **Quiz 2.** Rank 0: `Connection closed by peer`. Rank 2: `Timed out waiting`. Rank 1:
# `KeyError: 'label'`. Rank 3: `Connection reset by peer`. Where do you look?
#
# <details><summary>a) The network: three of four complain about it.</summary>
#
# Not so: that is how it looks from three ranks whose peer has gone.
#
# </details>
#
# <details><summary>b) Rank 0: it is the main one, and its message came first.</summary>
#
# Not so: a victim often speaks first, since it sits in the collective when the connection breaks.
#
# </details>
#
# <details><summary>c) Rank 1: the only message that is about its own work.</summary>
#
# Right. A sample without a label in its share; the sampler says which samples those are.
#
# </details>

# %% [markdown]
# **Quiz 3.** The ranks' gradients are bit-identical at every step, and so are the weights. The curve is still worse
# than that of one process with the whole batch. What is *not* a candidate?
#
# <details><summary>a) Unequal batches, averaged as a mean of means.</summary>
#
# Not so: each rank then gets the same wrong average. Bit-identical means that they agree, not that they are right.
#
# </details>
#
# <details><summary>b) A gradient that is not averaged.</summary>
#
# Right. Then the ranks would hold different gradients, since their samples differ.
#
# </details>
#
# <details><summary>c) Every rank reads the same samples.</summary>
#
# Not so: equal samples give equal gradients, which agree without any doubt, and the batch is smaller than you think.
#
# </details>

# %% [markdown]
# **Open task.** Keep the effective batch of this configuration and change how it is made: more accumulation and a
# smaller batch, or the other way round. Predict what `verify_ranks` says under *batch* and *parameters*. The run is
# kept.

# %%
change = {}  # as in {"batch_size": 16, "accumulation_steps": 2}
mine = dx.train(config.override(change))
batch = config.override(change)
effective = batch.batch_size * batch.world_size * batch.accumulation_steps
print(mine.status, "- effective batch kept:", effective == per_rank * world_size)
if batch.world_size > 1:
    print(dx.verify_ranks(mine)["verdict"][["batch", "parameters"]].to_dict())

# %%
lesson.score()

# %%
dx.result(
    gradient_by_hand=round(spawned[0]["by hand"][1].item(), 4),
    relative_error=apart,
    ranks_agree=ranks_agree,
    reads=reads,
    mean_of_means=round(mean_of_means, 3),
    true_counts=true_counts,
    named=" ".join(cause for causes in named for cause in causes),
    blamed=" ".join(f"{how} {rank}" for how, rank in blamed.items()),
    lowest=order[0],
    highest=order[-1],
    accuracy_gap=round(gap, 3),
)

# %% [markdown]
# **Sources.**
#
# - S. Li and others: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020.
#   https://arxiv.org/abs/2006.15704 (buckets, overlap, no_sync)
# - P. Goyal and others: *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017.
#   https://arxiv.org/abs/1706.02677 (the rate and the batch)
# - *Distributed communication package* and *torchrun*, PyTorch documentation.
#   https://docs.pytorch.org/docs/stable/distributed.html and https://docs.pytorch.org/docs/stable/elastic/run.html
