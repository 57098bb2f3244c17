# %% [markdown]
# # 11 · Preflight
#
# **Question.** Is *my own* model ready for a long run?
#
# **You will**
# - put a training set-up into one function, from which every process can build it anew
# - walk six points in their order on the digits model, each by hand in a few lines of torch
# - predict what each of six broken set-ups shows and hides, see at which point it stops, and mend it
# - read what holds memory during a step, and choose among five ways to need less
# - run all six points on your own model, and send the page to a colleague
#
# **Know before.** The hand check (02), the baseline (03), the order of the stages (07), ranks (08), checkpoints (10).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU.
#
# **data** → **forward** → **loss** → **backward** → **update** → **comm**
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>A run with momentum is killed and continued from its weights alone. What is different?</summary>
#
# The momentum buffers begin at zero again, so the first steps go another way. Weights are only a part of a run's state:
# optimizer, schedule, scaler, random generators and the place in the data belong to it.
#
# </details>
#
# <details><summary>Two runs differ in one setting and by 0.4 % in accuracy. What do you need to know first?</summary>
#
# How far apart two runs are that differ in nothing but their seed. A difference inside that spread says nothing.
#
# </details>
#
# <details><summary>What does a seed not fix?</summary>
#
# The version of torch, the number of threads and of ranks, the kind of processor, and operations that add in an order
# of their own on a GPU. Each may change the last bits, and training magnifies them.
#
# </details>

# %% tags=["parameters"]
seed = 0
target = ""  # "package.module:make" for your own model; empty: the digits

# %%
import importlib
import io
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.runs.lessons import NOTEBOOKS
from dxdy_nb.training import datasets, memory, models

# %%
dx.RunConfig(seed=seed)  # refuses what makes no sense, before anything runs
sys.path += [os.getcwd(), str(NOTEBOOKS)]
module, _, function = target.partition(":")
try:
    yours = getattr(importlib.import_module(module), function) if target else None
except (ImportError, AttributeError, ValueError) as error:
    raise dx.DxdyError(f"target: expected a function, like my_setup:make, got {target!r} ({error})") from None
torch.set_num_threads(1)
lesson = Lesson("11_preflight")

# %% [markdown]
# ## 1 · One function that builds it all
#
# A long run is prepared in three places at once: in a notebook, on several ranks, and again after a crash. What they
# share is a function without arguments. It returns a dictionary: the model, the loss, a loader, an optimizer.
# Everything random in it is seeded *in* it.


# %%
def make():
    torch.manual_seed(seed)
    data = datasets.load("digits")
    model = models.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(data.validation.x, data.validation.y), batch_size=128)
    loss_fn = nn.CrossEntropyLoss()
    return {"model": model, "loss_fn": loss_fn, "loader": loader, "val_loader": held_out, "optimizer": optimizer}


# %% [markdown]
# Six points, in this order. Each is a gate: a number measured behind a closed gate means nothing. A gradient norm says
# little about a model whose inputs are wrong, and a fast run on eight ranks says nothing if they read one sample eight
# times.
#
# | | point | the question |
# |---|---|---|
# | 1 | inputs, outputs, device, types | Does the right thing go in, and the right thing come out? |
# | 2 | gradients | Is one number the one on paper, and are all the others right? |
# | 3 | training on one device | Does it fall and stay finite, and is a baseline kept? |
# | 4 | rate, batch, gradient norm | Is what steers the run written down at each step? |
# | 5 | several ranks | Is each sample read once, and do all make the same updates? |
# | 6 | checkpoint and validation | Does it go on as if nothing had happened, and is its score a number? |
#
# Below, each point is first done by hand on the digits. Then a set-up is broken in one place: say what one sees of it
# before `dx.preflight` stops there.


# %%
def stops_at(page):
    print(page.points[0].name if page.failed is None else f"{page.failed.number} · {page.failed.name}")
    return page.failed.number if page.failed else 0


stops = []

# %% [markdown]
# ## 2 · Point 1: what goes in and what comes out
#
# Four lines, and you read them aloud: shapes, types, device, range.

# %%
given = make()
model, loss_fn, optimizer = given["model"], given["loss_fn"], given["optimizer"]
x, y = next(iter(given["loader"]))
out = model(x)
for name, t in {"input": x, "target": y, "output": out}.items():
    print(f"{name:7} {t.dtype!s:14} {tuple(t.shape)!s:15} {t.device}  from {t.min():.1f} to {t.max():.1f}")

# %% [markdown]
# The first broken set-up reads its labels from a table, where every number is a float.


# %%
def float_labels():
    given = make()
    x, y = given["loader"].dataset.tensors
    return given | {"loader": DataLoader(TensorDataset(x, y.float()), batch_size=64, shuffle=True)}


# %%
lesson.predict("float_labels: the name of the error that torch raises, or none", None)

# %%
page = dx.preflight(float_labels)
stops.append(stops_at(page))
print("fix:", page.failed.fix)

# %% [markdown]
# The words behind it are torch's own:

# %%
try:
    loss_fn(out, y.float())
    raised = "none"
except RuntimeError as error:
    raised = type(error).__name__
    print(raised, "-", str(error).splitlines()[0])
lesson.reveal("float_labels: the name of the error that torch raises, or none", raised)

# %% [markdown]
# Read it from the end: the loss *got Float*, and a class index is *expected* to be *Long* (or a byte). The message
# names the target, not the model. Five points stay closed: nothing behind this gate was run.
#
# ## 3 · Point 2: one gradient on paper
#
# The bias of the last layer is the one weight whose gradient needs no chain rule. With cross-entropy it is the mean of
# *softmax minus one-hot*. On paper: three logits 0, ln 2, ln 3. Their softmax is 1/6, 2/6, 3/6. The right class is the
# first, so the gradient is −5/6, 2/6, 3/6.

# %%
lesson.predict("The first entry of that gradient", None)

# %%
logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().requires_grad_()
label = torch.tensor(0)
(autograd,) = torch.autograd.grad(nn.functional.cross_entropy(logits, label), logits)
pen = torch.tensor([-5 / 6, 2 / 6, 3 / 6], dtype=torch.float64)
lesson.reveal("The first entry of that gradient", autograd[0].item())

# %% [markdown]
# A third witness, the finite difference, and all three side by side in float64:


# %%
def value(k, step):
    return nn.functional.cross_entropy(logits.detach() + step * torch.eye(3, dtype=torch.float64)[k], label)


difference = torch.stack([(value(k, 1e-5) - value(k, -1e-5)) / 2e-5 for k in range(3)])
assert (autograd - pen).abs().max() < 1e-12 and (difference - pen).abs().max() < 1e-9
for row in zip(pen, difference, autograd, strict=True):
    print("pen {:8.4f}   finite difference {:8.4f}   autograd {:8.4f}".format(*row))

# %% [markdown]
# The same on the real model: the formula needs the outputs and the labels, and nothing else.

# %%
optimizer.zero_grad()
out = model(x)
loss = loss_fn(out, y)
loss.backward()
by_hand = (out.softmax(1) - nn.functional.one_hot(y, 10)).mean(0)
hand_error = (model.fc2.bias.grad - by_hand).abs().max().item()
assert hand_error < 1e-6
print("by hand and by autograd agree to 1e-6:", hand_error < 1e-6)

# %% [markdown]
# One number is no proof of the others. `dx.check_gradients` compares *all* of them with finite differences
# (lesson 02).

# %%
print(dx.check_gradients(model=model, loss_fn=loss_fn, batch=(x, y)).verdict)

# %% [markdown]
# Broken in one line: somebody once wanted the bias to learn faster, and left a hook behind.


# %%
def hooked():
    given = make()
    given["model"].fc2.bias.register_hook(lambda gradient: 2 * gradient)
    return given


# %%
lesson.predict("hooked: the verdict of dx.check_gradients, right or wrong", None)

# %%
page = dx.preflight(hooked)
stops.append(stops_at(page))
print("fix:", page.failed.fix)

# %%
checked = dx.check_gradients(model=hooked()["model"], loss_fn=loss_fn, batch=(x, y))
lesson.reveal("hooked: the verdict of dx.check_gradients, right or wrong", checked.verdict)

# %% [markdown]
# The loss of this set-up falls, and no shape is wrong. Finite differences work on copies, which leave hooks behind, so
# they do not see it either. The number on paper does: autograd's is twice as large.
#
# ## 4 · Point 3: a short training, recorded
#
# The loop in the open, watched live. Its record is the **baseline**: what every later run is compared with.


# %%
def steps(given, epochs=5):
    model, loss_fn, optimizer = given["model"], given["loss_fn"], given["optimizer"]
    for _ in range(epochs):
        for x, y in given["loader"]:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            yield


# %%
given = make()
with dx.watch(given["model"], given["optimizer"]) as w:
    await dx.live(w).run(steps(given))

# %%
losses = w.steps["loss"]
assert losses.notna().all() and losses[-10:].mean() < losses[:10].mean() / 4
print("every loss is finite, and the last ten are below a quarter of the first ten")

# %% [markdown]
# Broken: a rate for another model, another batch and another loss.


# %%
def too_fast():
    given = make()
    return given | {"optimizer": torch.optim.SGD(given["model"].parameters(), lr=50.0, momentum=0.9)}


# %%
def first_loss(given):
    x, y = next(iter(given["loader"]))
    return given["loss_fn"](given["model"](x), y).item()


# %%
lesson.predict("The first loss of too_fast, over the first loss of make", None)

# %%
page = dx.preflight(too_fast)
stops.append(stops_at(page))
print("the rate is named:", any(finding.cause == "lr-too-large" for finding in page.failed.findings))
lesson.reveal("The first loss of too_fast, over the first loss of make", first_loss(too_fast()) / first_loss(make()))

# %% [markdown]
# Its inputs are right, and so are its gradients: nothing in the first step is wrong but its length. The rate is accused
# by a counterfactual. The same steps were run again with smaller rates, and there the loss fell.
#
# ## 5 · Point 4: is it written down?
#
# When a run of three days goes wrong on the second night, three columns tell most of the story. They must be there
# *before*, at every step.

# %%
columns = w.steps[["lr", "effective_batch", "grad_norm"]]
print("steps:", len(columns), "  unknown values:", int(columns.isna().sum().sum()))
print("rates:", columns["lr"].unique().tolist(), "  samples an update:", columns["effective_batch"].unique().tolist())

# %% [markdown]
# 47 is the last batch of an epoch: 1,199 = 18 · 64 + 47.
#
# Broken: the plan says that four batches are accumulated to one update. The loop does not know of the plan.


# %%
def forgets_to_accumulate():
    return make() | {"accumulation_steps": 4}


# %%
lesson.predict("forgets_to_accumulate: does it train well enough to pass point 3, yes or no", None)

# %%
page = dx.preflight(forgets_to_accumulate)
stops.append(stops_at(page))
print(page.failed.evidence.split(":")[0])
trains = "yes" if page.points[2].state == "passed" else "no"
lesson.reveal("forgets_to_accumulate: does it train well enough to pass point 3, yes or no", trains)

# %% [markdown]
# It trains, and well. But it is another experiment than the one in the plan: a rate chosen for 256 samples works on 64.
#
# ## 6 · Point 5: the same on several ranks
#
# 1,199 samples on two ranks. The sampler needs no process to be looked at.

# %%
data = make()["loader"].dataset
lesson.predict("How many samples do both ranks read in one epoch", None)

# %%
shares = [list(DistributedSampler(data, num_replicas=2, rank=rank, seed=seed)) for rank in range(2)]
both = len(set(shares[0]) & set(shares[1]))
print("reads:", [len(share) for share in shares], "  samples:", len(data))
lesson.reveal("How many samples do both ranks read in one epoch", both)

# %% [markdown]
# One: 1,199 is odd, and ranks must have equal shares, so one sample is dealt twice. That much is padding, and allowed.
#
# `dx.preflight` builds the set-up in two processes, wraps the model in `DistributedDataParallel`, takes a few steps,
# and compares: samples, updates, gradients and weights, bit by bit. Broken: a sampler of one's own that forgot to ask
# who it is.


# %%
def always_rank_zero():
    given = make()
    data, world_size = given["loader"].dataset, int(os.environ.get("WORLD_SIZE", 1))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=0, seed=seed)
    return given | {"loader": DataLoader(data, batch_size=64, sampler=sampler)}


# %%
lesson.predict("Of the 1,199 samples, how many do two ranks of always_rank_zero read", None)

# %%
page = dx.preflight(always_rank_zero)
stops.append(stops_at(page))
print("fix:", page.failed.fix)
lesson.reveal("Of the 1,199 samples, how many do two ranks of always_rank_zero read", len(set(shares[0])))

# %% [markdown]
# On one device this sampler is right, so four points pass. On two ranks half of the data is never seen, and no
# error is ever raised: the ranks agree perfectly, because they do the same work.
#
# ## 7 · Point 6: it goes on as if nothing had happened
#
# By hand: five steps, a checkpoint, five more. Then a new model, the checkpoint, and the same five.


# %%
def train(given, batches):
    model, loss_fn, optimizer = given["model"], given["loss_fn"], given["optimizer"]
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# %%
given = make()
batches = list(given["loader"])[:10]
train(given, batches[:5])
state = {"model": given["model"].state_dict(), "optimizer": given["optimizer"].state_dict()}
torch.save(state, file := io.BytesIO())
straight_on = train(given, batches[5:])


# %%
def resume(parts):
    again = make()
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    for part in parts:
        again[part].load_state_dict(kept[part])
    return train(again, batches[5:])


# %%
lesson.predict("Weights and optimizer are loaded: bit for bit the same at the end, yes or no", None)
# %%
lesson.predict("And with the weights alone, yes or no", None)

# %%
same = torch.equal(resume(["model", "optimizer"]), straight_on)
lesson.reveal("Weights and optimizer are loaded: bit for bit the same at the end, yes or no", "yes" if same else "no")

# %%
alone = torch.equal(resume(["model"]), straight_on)
lesson.reveal("And with the weights alone, yes or no", "yes" if alone else "no")

# %% [markdown]
# `weights_only=True` matters for another reason: a pickle runs code when it is opened, and a checkpoint may come from
# somebody else. It loads tensors, numbers, texts, lists and dictionaries, and refuses the rest.
#
# The preflight does this in *another process*, with the loader's place and the random generators, and then evaluates
# twice. Broken: a model with a counter in a plain attribute.


# %%
class Counting(models.CNN):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (1 + 0.5**self.calls)


def forgets_its_counter():
    given = make()
    counting = Counting()
    return given | {"model": counting, "optimizer": torch.optim.SGD(counting.parameters(), lr=0.05, momentum=0.9)}


# %%
lesson.predict("forgets_its_counter: all tensors are loaded as saved. Does it go on the same, yes or no", None)

# %%
page = dx.preflight(forgets_its_counter)
stops.append(stops_at(page))
print("fix:", page.failed.fix)
goes_on = "no" if page.failed else "yes"
lesson.reveal("forgets_its_counter: all tensors are loaded as saved. Does it go on the same, yes or no", goes_on)

# %% [markdown]
# Every tensor was loaded as it was saved. What the step *also* uses was in no `state_dict`. Mend it with a buffer:
# `self.register_buffer("calls", torch.zeros((), dtype=torch.long))`.

# %%
assert stops == [1, 2, 3, 4, 5, 6]
print("six set-ups, six gates:", *stops)

# %% [markdown]
# ## 8 · Your own model
#
# Write a `make` in a file of your own, and name it in the parameters: `target = "package.module:make"`. `my_setup.py`,
# beside this notebook, is one to begin with: `target = "my_setup:make"`. Without a target the digits fly. On the
# command line: `dxdy preflight package.module:make --out page.html`.

# %%
page = dx.preflight(yours or make)

# %%
for point in page.points:
    print(f"{point.number}  {point.name:34} {point.state}")

# %% [markdown]
# `print(page)` adds the evidence to each line, and `page.save("page.html")` writes one file that needs no network and
# names no folder of your machine: it can be sent. The run's folder keeps it, together with the baseline.
# `ok` means that nothing failed. A point that reads *not checked* says why, and is your own to look at.
#
# ## 9 · What holds memory
#
# A run that passes on a small batch may still die of its memory. Five things hold it. A net of nine layers, a batch of
# 512, and Adam:

# %%
torch.manual_seed(seed)
hidden = [part for _ in range(7) for part in (nn.Linear(128, 128), nn.ReLU())]
deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), *hidden, nn.Linear(128, 10))
adam = torch.optim.Adam(deep.parameters())
big = data.tensors[0][:512], data.tensors[1][:512]


def step(batch=big, backward=True):
    adam.zero_grad()
    loss = nn.functional.cross_entropy(deep(batch[0]), batch[1])
    if backward:
        loss.backward()
        adam.step()


# %% [markdown]
# On paper first, in float32, four bytes a number. Weights: $w = 64·128 + 128 + 7·(128·128 + 128) + 128·10 + 10$.
# Gradients: as many. Adam keeps two numbers a weight. Each of the eight ReLUs keeps its output for the backward pass,
# 512 · 128 numbers.

# %%
lesson.predict("Which part is the largest at the peak: weights, gradients, optimizer or activations", None)

# %%
step()  # the first step makes Adam's state
seen = memory.measure(step, deep, [adam], big)
w = 64 * 128 + 128 + 7 * (128 * 128 + 128) + 128 * 10 + 10
pen = {"weights": 4 * w, "gradients": 4 * w, "optimizer": 8 * w, "activations": 4 * 8 * 512 * 128}
for part, size in pen.items():
    print(f"{part:12} pen {size:9,}   measured {seen.most[part]:9,} bytes")
known = {part: seen.at_peak[part] for part in pen}
largest = max(known, key=known.get)
lesson.reveal("Which part is the largest at the peak: weights, gradients, optimizer or activations", largest)

# %%
assert seen.most["weights"] == seen.most["gradients"] == 4 * w
assert seen.most["optimizer"] - 8 * w == 4 * len(adam.state)  # and a step counter for each tensor
assert seen.most["activations"] - 4 * 8 * 512 * 128 == 4 * (512 * 10 + 1)  # and what the loss keeps
plots.show(plots.memory(seen))

# %% [markdown]
# Left to right is one step; the dotted line is its peak, near the turn. Activations pile up in the forward pass and go
# in the backward pass, while gradients come. The parts never stand at their own maximum all at once, so the peak is
# less than the sum of those.
#
# <details><summary>Where is the rest?</summary>
#
# *Other* is the batch itself, results on their way, and the gradients of activations, which live for an operation or
# two.
#
# </details>
#
# ### Out of memory: five ways
#
# The first three change the step, the fourth what stands around it, the fifth the number of devices. The share is that
# of the usual step's peak.

# %%
table = memory.savings(step, deep, [adam], big)
for saving in table:
    print(f"{saving.advice:24} {saving.after / saving.before:4.0%} of the peak   price: {saving.price}")

# %% [markdown]
# 1. **Accumulate**: four passes over a quarter of the batch. Activations shrink to a quarter, the rest stays.
# 2. **Lower precision**: activations in bf16 (lesson 06). Watch the loss.
# 3. **Checkpoint activations**: keep the ends of a few stretches, and compute the rest again in the backward pass. One
#    more forward.
# 4. **Free** what nobody needs: evaluate without a graph (measured here), log a loss as a number. It costs nothing, and
#    often it was the reason. A run that dies in its validation, or ever later, asks for this one first.
# 5. **Shard** weights, gradients and optimizer over ranks (lesson 09). Computed here, not run: it needs ranks.
#
# `dx.preflight(make, memory=True)` tries them on your model.

# %%
assert all(saving.after < saving.before for saving in table)
assert table[0].after < table[0].before * 0.75

# %% [markdown]
# ## Further
#
# Checkpointing trades time for memory, and the exchange rate can be chosen: √n stretches of n layers keep about 2√n
# activations for one more forward pass (Chen et al., 2016).

# %%
with memory.checkpointed(deep):
    less = memory.measure(step, deep, [adam], big)
assert less.most["activations"] < 0.7 * seen.most["activations"] and less.peak < seen.peak
plots.show(plots.memory(less))

# %% [markdown]
# The grey hills in the backward pass are stretches that are computed again: they count as *other*. The last stretch is
# kept as usual, since it would be needed at once.

# %% [markdown]
# ## Exercises
#
# ### Exercise · worked
#
# Point 5 by hand. `shares` has a list of sample numbers for each rank. How many reads are the second (or later) of a
# sample?


# %%
def read_again(shares):
    reads = [sample for share in shares for sample in share]
    return len(reads) - len(set(reads))


# %%
lesson.check("read_again", read_again)

# %% [markdown]
# ### Exercise · faded
#
# The padding that is allowed: ranks have equal shares, and together they read each of `size` samples at least once.
# How many reads are too many, at the least?


# %%
def padding(size, ranks):
    share = ...  # samples that each rank reads
    return share * ...  # all reads, without the first of each sample


# %%
lesson.check("padding", padding)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# 7 samples on 3 ranks: could each rank read 2? Is 3 the least?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The share is `size / ranks`, rounded up. Without floats: minus the floor of minus.
#
# </details>
#
# <details><summary>Solution: padding</summary>
#
# ```python
# import math
#
# def padding(size, ranks):
#     share = math.ceil(size / ranks)
#     return share * ranks - size
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The gate. Return the first of these words that holds: `"uneven"` where ranks read different numbers of samples,
# `"missing"` where one of the samples 0 … size − 1 is read by nobody, `"twice"` where more reads are repeated than the
# padding allows, and `"none"`.


# %%
def gate(shares, size): ...


# %%
lesson.check("gate", gate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three questions in a row, each with its own `return`. The order is that of the words.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The set of all reads tells what is missing; its size against the number of reads tells what is repeated.
#
# </details>
#
# <details><summary>Solution: gate</summary>
#
# ```python
# import math
#
# def gate(shares, size):
#     reads = [sample for share in shares for sample in share]
#     if len({len(share) for share in shares}) > 1:
#         return "uneven"
#     if set(range(size)) - set(reads):
#         return "missing"
#     allowed = math.ceil(size / len(shares)) * len(shares) - size
#     return "twice" if len(reads) - len(set(reads)) > allowed else "none"
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# Put the questions before a long run in order.
#
# - A: do two ranks read one sample?
# - B: does the loss fall and stay finite on one device?
# - C: are inputs and outputs what they should be?
# - D: does the run go on from its checkpoint, bit for bit?
# - E: is one gradient the number on paper?
# - F: are rate, batch and gradient norm in the record of that training?

# %%
six_points = ...

# %%
lesson.check("six_points", six_points)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What would each answer be worth if the one before it were "no"?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# One device comes before several, and a record needs something that was run.
#
# </details>
#
# <details><summary>Solution: six_points</summary>
#
# ```python
# six_points = ["C", "E", "B", "F", "A", "D"]
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** Point 3 fails. Points 4 to 6 read *not reached*. Why are they not run anyway?
#
# <details><summary>a) To save time.</summary>
#
# Not so: it does, but the reason is another. What would their result be worth?
#
# </details>
#
# <details><summary>b) What they say of a training that does not work would be misread.</summary>
#
# Right. Ranks agree on a diverging run as well, and a checkpoint of it resumes. Green lights there say nothing.
#
# </details>
#
# <details><summary>c) They need the weights of point 3.</summary>
#
# Not so: each builds the set-up anew, from its beginning.
#
# </details>

# %% [markdown]
# **Quiz 2.** The finite differences agree for all tensors, and the case on paper is off by a factor of two. Where do
# you look?
#
# <details><summary>a) In the backward of a custom function.</summary>
#
# Not so: finite differences would disagree there. They call the same forward, and compare it with autograd.
#
# </details>
#
# <details><summary>b) At hooks on parameters.</summary>
#
# Right. The comparison runs on copies, which leave hooks behind. The number on paper was read from the real model.
#
# </details>
#
# <details><summary>c) At the learning rate.</summary>
#
# Not so: neither of the two takes a step.
#
# </details>

# %% [markdown]
# **Quiz 3.** Adam, a model of 1 GB in float32, a batch that needs 6 GB of activations, a card of 8 GB. What do you try
# first?
#
# <details><summary>a) Shard the optimizer over two ranks.</summary>
#
# Not so: that spares 1 GB and needs a second card, and a network between them.
#
# </details>
#
# <details><summary>b) Accumulate: four micro-batches.</summary>
#
# Right. Weights, gradients and Adam's state are 4 GB and stay; 6 GB of activations become 1.5.
#
# </details>
#
# <details><summary>c) Checkpoint the activations.</summary>
#
# Not so: it would fit as well, but it computes the forward pass twice. Accumulation computes nothing twice.
#
# </details>

# %% [markdown]
# **Open task.** Change one thing in `make`, say before the run at which point it will stop, and read the page. The run
# is recorded, whatever becomes of it. (Bare objects, as here, are quicker: points 5 and 6 are then not checked.)

# %%
changed = make()  # | {"loss_fn": nn.MSELoss()}
last = dx.preflight(changed)
print([point.state for point in last.points])

# %%
lesson.score()

# %%
dx.result(
    stops=" ".join(map(str, stops)),
    ready=page.ok,
    states=", ".join(point.state for point in page.points),
    hand_error=hand_error,
    read_by_both=both,
    resumed=same,
    resumed_without_optimizer=alone,
    largest_part=largest,
    activations=seen.most["activations"],
    accumulated=round(table[0].after / table[0].before, 2),
)

# %% [markdown]
# **Sources.**
#
# - T. Chen, B. Xu, C. Zhang, C. Guestrin: *Training Deep Nets with Sublinear Memory Cost*, 2016.
#   https://arxiv.org/abs/1604.06174
# - *torch.utils.checkpoint*, PyTorch documentation. https://docs.pytorch.org/docs/stable/checkpoint.html
# - *Serialization semantics*, PyTorch notes (what `weights_only` loads).
#   https://docs.pytorch.org/docs/stable/notes/serialization.html
