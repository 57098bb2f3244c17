# %% [markdown]
# # 10 · Reproducible experiments
#
# **Question.** How do I make a result repeatable, comparable and able to fail usefully?
#
# **You will**
# - say what a seed fixes, and name five things that it does not
# - write a checkpoint by hand, leave out one part at a time, and predict what that changes
# - kill a training process, resume it, and get the same weights bit for bit
# - change one thing at a time, and tell an effect from another seed
# - read the record of a run that failed, and judge "faster" by five figures
#
# **Know before.** A baseline (03), accumulation and AMP (06), several ranks (08).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU. Nothing here was run on GPUs.
#
# **data** → **forward** → **loss** → **backward** → **update** → **comm**
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>P parameters in fp32 with Adam: how many bytes does each rank hold under DDP, and of what?</summary>
#
# 16 P: weights, gradients and two moments, 4 bytes each. Every rank holds all of it.
#
# </details>
#
# <details><summary>What do ZeRO's optimizer and FSDP2 shard?</summary>
#
# ZeRO-1 shards the optimizer's state: 8 P + 8 P/n. FSDP2 shards weights, gradients and state: 16 P/n, and gathers the
# weights of a layer while it computes.
#
# </details>
#
# <details><summary>A sharded checkpoint was written by two ranks. Can three read it?</summary>
#
# Yes, with `torch.distributed.checkpoint`: the files say which part of which tensor they hold, and each rank reads what
# it needs.
#
# </details>

# %% tags=["parameters"]
seed = 0
steps = 40

# %%
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.training import datasets

# %%
dx.RunConfig(seed=seed, max_steps=steps)  # refuses what makes no sense, before anything runs
if not 30 <= steps <= 300:
    raise dx.DxdyError(f"steps: this lesson needs 30 to 300, got {steps}")
if seed > 2**32 - 3:
    raise dx.DxdyError(f"seed: expected at most {2**32 - 3}, since two runs take the seeds after it; got {seed}")
torch.set_num_threads(1)
lesson = Lesson("10_reproducible_experiments")
temporary = tempfile.TemporaryDirectory()  # the runs of this lesson; gone when the kernel ends
runs = Path(temporary.name)


def new(name):  # a place for a run: what stood there when you ran the cell before is removed
    shutil.rmtree(runs / name, ignore_errors=True)
    return runs / name


# %% [markdown]
# ## 1 · What a seed fixes, and what it does not
#
# A seed is the start of a *sequence*. Whoever draws from it moves everybody who draws later. `shuffle=True` draws the
# order of the data from torch's global generator.


# %%
def first_batch(draws):
    torch.manual_seed(seed)
    torch.rand(draws)  # a line that somebody has added above
    return next(iter(DataLoader(range(100), batch_size=5, shuffle=True))).tolist()


# %%
lesson.predict("The same seed, one number drawn before: is it the same first batch, yes or no", None)

# %%
assert first_batch(0) == first_batch(0)
same = "yes" if first_batch(0) == first_batch(1) else "no"
lesson.reveal("The same seed, one number drawn before: is it the same first batch, yes or no", same)

# %% [markdown]
# One more dropout layer, one more plot of random samples, and the data come in another order. So a comparison of two
# models compares two orders as well. The remedy: give each use a generator of its own, seeded by what it may depend on.


# %%
def order_of(epoch):
    return torch.randperm(1199, generator=torch.Generator().manual_seed(1000 * seed + epoch))


# %%
before = order_of(3)
torch.rand(7)
print("epoch 3 has its order, whatever was drawn between:", torch.equal(before, order_of(3)))

# %% [markdown]
# ### Workers
#
# A worker of a `DataLoader` is a process with a generator of its own. Let each of four "samples" be three random
# numbers, as an augmentation would draw them.


# %%
def augmented(workers):
    torch.manual_seed(seed)
    loader = DataLoader([3] * 4, batch_size=1, collate_fn=torch.rand, num_workers=workers)
    return torch.stack(list(loader))


# %%
none, one, two = (augmented(workers) for workers in (0, 1, 2))
print("two workers, twice:", torch.equal(two, augmented(2)))
print("none and one:", torch.equal(none, one), "  one and two:", torch.equal(one, two))

# %% [markdown]
# Repeatable, until somebody changes `num_workers` to make it faster. An augmentation that draws from
# f(seed, epoch, index of the sample) does not care who computes it.
#
# ### The order of addition

# %%
lesson.predict("(1e8 + 1) - 1e8 in float32", None)

# %%
large, one = torch.tensor(1e8), torch.tensor(1.0)
print("(1e8 - 1e8) + 1 =", ((large - large) + one).item())
lesson.reveal("(1e8 + 1) - 1e8 in float32", ((large + one) - large).item())

# %% [markdown]
# Near 1e8 the neighbours of a float32 are 8 apart, so the 1 is rounded away. A sum hangs on its *order*, and no seed
# decides that. These do:
#
# | what | why | what helps |
# |---|---|---|
# | threads | a sum may be split into as many parts | fix and record their number |
# | another CPU, GPU or build | other vector widths, other kernels | record it; compare within a tolerance |
# | `cudnn.benchmark` | the fastest of several kernels *today* | switch it off |
# | atomic additions on a GPU | they add in the order in which threads arrive | deterministic kernels (below) |
# | ranks | each sums its own part | the same number of ranks |
#
# ### Ask for determinism
#
# `torch.use_deterministic_algorithms(True)` does two things. Where there is a deterministic kernel, torch takes it.
# Where there is none, it raises. That happens on a CPU too: `put_` with an index twice does not promise who wins.

# %%
torch.use_deterministic_algorithms(True)
try:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(", but")[0])
torch.use_deterministic_algorithms(False)

# %% [markdown]
# Read it: the error names the *operation*, and the traceback the line. The message goes on with the ways out, of which
# `warn_only=True` is one. Write the line otherwise, if you can: `x[index] = values` has a deterministic kernel. The
# flags that matter on a GPU stand under *Further*.
#
# ## 2 · What a checkpoint must hold
#
# ### One step by pen
#
# A run is interrupted after its first step, and resumed. Somebody has saved the weight and forgotten the momentum. SGD
# on $f(w)=(w-3)^2$ from $w=5$, rate 0.1, momentum 0.9: $v \leftarrow 0.9\,v + f'(w)$, then $w \leftarrow w - 0.1\,v$.
#
# | | $f'(w)$ | $v$ | $w$ after |
# |---|---|---|---|
# | first step | 4 | 4 | 4.6 |
# | second step | 3.2 | 0.9 · 4 + 3.2 = 6.8 | 3.92 |
# | second step, $v$ forgotten | 3.2 | ? | ? |

# %%
lesson.predict("How far off is w after the second step, if v was forgotten?", None)

# %% [markdown]
# Three routes to the answer: by pen, with slopes by finite difference in a loop of our own, and with torch in float64.


# %%
def two_steps(slope, forget):
    w, v = 5.0, 0.0
    for step in range(2):
        v = (0.0 if forget and step == 1 else 0.9 * v) + slope(w)
        w -= 0.1 * v
    return w


def slope(w, h=1e-5):
    return ((w + h - 3) ** 2 - (w - h - 3) ** 2) / (2 * h)  # centred finite difference


# %%
def by_torch(forget):
    w = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for step in range(2):
        if forget and step == 1:
            optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)  # a new one: no buffer
        optimizer.zero_grad()
        loss = (w - 3) ** 2
        loss.backward()
        optimizer.step()
    return w.item()


# %%
pen = 0.1 * 0.9 * 4  # rate · momentum · v
numeric = two_steps(slope, True) - two_steps(slope, False)
autograd = by_torch(True) - by_torch(False)
assert abs(autograd - pen) < 1e-12 and abs(numeric - pen) < 1e-8  # float64
print(f"pen {pen:.4f}, finite difference {numeric:.4f}, torch {autograd:.4f}")
lesson.reveal("How far off is w after the second step, if v was forgotten?", autograd)

# %% [markdown]
# No error, no warning, a plausible weight. A resumed run is proven by its *bits*, not by its curve.
#
# ### A checkpoint, written out
#
# The rest of a run hangs on more than its weights. Here is one with everything that has a state: dropout, momentum, a
# schedule, a scaler, and an order of its own in each epoch.


# %%
def make():
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)  # doubles its scale after every ten good steps
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}


# %%
data = datasets.load("digits").train
batches = 19  # of 64: the last one has 47 of the 1,199 digits


def training(parts, start, stop):
    model, optimizer, schedule, scaler = parts.values()
    for step in range(start, stop):
        epoch, batch = divmod(step, batches)
        ids = order_of(epoch)[64 * batch : 64 * (batch + 1)]
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x[ids]), data.y[ids])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        yield step


# %% [markdown]
# Six things go into the file. The step says where in the data the run was: what was *consumed*, and not what workers
# had fetched ahead. Only tensors and plain values are in it, so that `weights_only=True` can load it: a pickle of
# objects runs code when it is opened.


# %%
def state_of(parts, step):
    states = {name: part.state_dict() for name, part in parts.items()}
    return {**states, "random": torch.get_rng_state(), "step": step}


def fingerprint(model):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()


# %% [markdown]
# The run without a pause, watched. After three fifths of its steps it leaves a checkpoint: of 40 that is step 24,
# within the second epoch.

# %%
parts, pause, path = make(), 3 * steps // 5, runs / "by_hand.pt"


def watched(start):
    for step in training(parts, start, steps):
        if step + 1 == pause:
            torch.save(state_of(parts, pause), path)
        yield step


# %%
with dx.watch(parts["model"], parts["optimizer"]) as w:
    last = await dx.live(w).run(watched(0))
    for _ in watched(last + 1):  # the rest, if you pressed Stop
        pass
whole = fingerprint(parts["model"])

# %% [markdown]
# Its norms go up and down from step to step, and nobody would see a missing state in such a curve. Now resume, with
# everything or without one part, and compare the bits.


# %%
def resume(without=""):
    parts, state = make(), torch.load(path, weights_only=True)
    for name, part in parts.items():
        if name != without:
            part.load_state_dict(state[name])
    if without != "random":
        torch.set_rng_state(state["random"])
    start = 0 if without == "step" else state["step"]  # without it, the data begin anew
    with dx.watch(parts["model"], parts["optimizer"]) as seen:
        for _ in training(parts, start, start + steps - pause):
            pass
    return fingerprint(parts["model"]), seen.steps["grad_norm"]


# %%
lesson.predict("One of the six is left out, each in turn: how many of the six give other weights?", None)

# %%
names = ("", "model", "optimizer", "schedule", "random", "step", "scaler")
resumed = {name: resume(without=name) for name in names}
for name, (weights, _) in resumed.items():
    print(f"{f'without {name}' if name else 'with everything':18} {'equal' if weights == whole else 'not equal'}")
assert resumed[""][0] == whole

# %%
matters = [name for name in names[1:] if resumed[name][0] != whole]
lesson.reveal("One of the six is left out, each in turn: how many of the six give other weights?", len(matters))

# %% [markdown]
# <details><summary>Why does the scaler not matter, and why is it saved all the same?</summary>
#
# Its scale is a power of two. To multiply by one and to divide by it again is exact, so the scale of a new scaler and
# the larger one in the file give the same gradient. It matters at the first overflow: the two overflow at different
# steps, and leave those out. So equal weights after a few steps do not test a scaler. Compare its state:
#
# </details>

# %%
fresh, kept = make()["scaler"].get_scale(), torch.load(path, weights_only=True)["scaler"]["scale"]
print(f"a new scaler's scale: {fresh:.0f}, the one in the file: {kept:.0f}")

# %% [markdown]
# The gradient norms of these runs, on top of each other. The thick line is the run without a pause.

# %%
alt = "gradient norms: the resumed run lies on the whole one, the run without momentum leaves it at once"
figure, axes = plots.new_figure(alt, width=7, height=3.2)
ax = axes[0, 0]
ax.plot(w.steps["grad_norm"].to_numpy(), color="0.8", linewidth=6, label="never stopped")
for name, style in (("", "-"), ("optimizer", "--")):
    norms = resumed[name][1].to_numpy()
    ax.plot(range(pause, steps), norms, style, label=f"without {name}" if name else "resumed with everything")
ax.axvline(pause, color="0.5", linestyle=":")
ax.set(xlabel="step (dotted: the pause)", ylabel="gradient norm")
ax.legend(frameon=False)
plots.show(figure)

# %% [markdown]
# The first norm after the pause is the same in both: the weights are the same, and so are data and dropout. The *step*
# that follows is another one, as it was by pen.

# %%
norms = {name: resumed[name][1].to_numpy() for name in ("", "optimizer")}
assert (norms[""] == w.steps["grad_norm"].to_numpy()[pause:]).all()
print("without the optimizer, first norms equal:", norms["optimizer"][0] == norms[""][0])
print("all equal:", (norms["optimizer"] == norms[""]).all())

# %% [markdown]
# One trap is left: to make an iterator of a `DataLoader` draws a number.

# %%
torch.manual_seed(seed)
state = torch.get_rng_state()
iterator = iter(DataLoader(range(4)))
print("the generator's state is as it was:", torch.equal(state, torch.get_rng_state()))

# %% [markdown]
# So the state goes back *after* `iter(loader)`.
#
# ## 3 · Kill it
#
# `dx.train` keeps all this in its checkpoints, with the states of Python's and numpy's generators. First a run that is
# left alone. It saves after every seven steps, which changes none of them.

# %%
config = dx.RunConfig(seed=seed, model="mlp", max_steps=steps, checkpoint_every=7, device="cpu")
left_alone = dx.train(config, out=new("left-alone"))
left_alone.status

# %% [markdown]
# Then the same in a process of its own. It stops at a step of our choice and tells us, so that we know when to strike.

# %%
PROGRAM = """
import sys
import dxdy_nb as dx
from torch.optim.optimizer import register_optimizer_step_post_hook

taken = []
def tell(*_):
    taken.append(1)
    if len(taken) == int(sys.argv[3]):
        print(f"{len(taken)} steps taken", flush=True)
        sys.stdin.read()  # waits here

register_optimizer_step_post_hook(tell)
dx.train(dx.RunConfig.load(sys.argv[1]), out=sys.argv[2])
"""

# %%
config.save(runs / "config.yaml")
command = [sys.executable, "-c", PROGRAM, str(runs / "config.yaml"), str(new("killed")), str(pause)]
quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as child:
    print(child.stdout.readline().strip())
    child.kill()  # SIGKILL, as kill -9 sends it and as the kernel does where memory runs out
print("the process was ended by signal", -child.returncode)

# %% [markdown]
# Nothing in the process could answer: no `except`, no `finally`. What is left is what stood on the disk. Its record
# still says *running*; whoever reads it looks for the process, and finds none.

# %%
killed = dx.Run.load(runs / "killed")
saved = sorted(file.stem for file in (killed.folder / "checkpoints").glob("*.pt"))
print(killed.status, "- last checkpoint:", saved[-1])
copy = shutil.copytree(killed.folder, new("copy"))  # for later

# %% [markdown]
# Between the last checkpoint and the end lie steps that are lost. They are made again.

# %%
lesson.predict("Killed and resumed, never killed: are the final weights equal bit for bit, yes or no", None)

# %%
back = dx.train(config, out=runs / "killed", resume=True)
equal = fingerprint(back.model) == fingerprint(left_alone.model)
same = "yes" if equal else "no"
lesson.reveal("Killed and resumed, never killed: are the final weights equal bit for bit, yes or no", same)

# %%
both = dx.compare(back, left_alone)
assert both.equal
print(both.verdict)

# %% [markdown]
# Not the end alone: every loss, every gradient and every weight's digest. A checkpoint cannot be half written either:
# it is written under another name, forced to the disk (`fsync`), and renamed, which happens as a whole or not at all.
#
# ### Damaged
#
# A disk, a copy, a network: one byte of a file is another one. Take the copy of the killed run, and turn one byte of a
# weight in its last checkpoint.

# %%
shutil.copytree(copy, new("damaged"))
victim = sorted((runs / "damaged" / "checkpoints").glob("*.pt"))[-1]
content = bytearray(victim.read_bytes())
weight = torch.load(victim, weights_only=True)["model"]["fc1.weight"]
content[content.find(weight.numpy().tobytes())] ^= 0xFF  # the first byte of the first weight
written = victim.write_bytes(content)

# %%
lesson.predict("torch.load of the damaged file: the name of its error, or none", None)

# %%
try:
    torch.load(victim, weights_only=True)
    told = "none"
except Exception as error:
    told = type(error).__name__
lesson.reveal("torch.load of the damaged file: the name of its error, or none", told)

# %% [markdown]
# Hence the small file beside each checkpoint, with its sha256. `resume=True` compares, names the file that is damaged,
# and goes on from the one before it.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    repaired = dx.train(config, out=runs / "damaged", resume=True)
for text in (str(one.message) for one in caught):
    if "damaged" in text:
        print(text.split("/")[-1].split(" Its")[0], text.split(". ")[-1])  # without its path and its digests
print("the same weights after all:", fingerprint(repaired.model) == fingerprint(left_alone.model))

# %% [markdown]
# More steps are made again, and the end is the same. Another configuration is not taken in silence:

# %%
try:
    dx.train(config.override({"lr": 0.1}), out=runs / "damaged", resume=True)
except dx.DxdyError as error:
    print(error)

# %% [markdown]
# ## 4 · One change at a time
#
# A baseline, and changes to it: each alone, each with three seeds. Three are meant to leave the result as it is. One is
# a slip of the keyboard, a rate a thousand times too large. And one run is bound to fail: a weight decay of 1000.

# %%
baseline = config.override({"checkpoint_every": None})
changes = {
    "baseline": {},
    "accumulation": {"batch_size": 32, "accumulation_steps": 2},
    "bf16": {"precision": "bf16"},
    "two-ranks": {"batch_size": 32, "world_size": 2},
    "rate": {"lr": 50.0},
    "decay": {"weight_decay": 1000.0},
}

# %%
lesson.predict("A rate a thousand times too large: does the run end as completed or as diverged", None)

# %%
lesson.predict("How many of accumulation, bf16, two ranks move the loss by more than another seed does?", None)

# %%
done, ablation = {}, new("ablation")
ablation.mkdir()
for number in (seed, seed + 1, seed + 2):  # a busy minute of the machine hits all changes alike
    for name, change in changes.items():
        changed = baseline.override({**change, "seed": number})
        done[name, number] = dx.train(changed, out=ablation / f"{name}.{number}")


# %%
def group(name):
    return [done[name, number] for number in (seed, seed + 1, seed + 2)]


def losses(name):
    return [run.metrics["validation_loss"] for run in group(name)]


# %% [markdown]
# With one seed, a change and the baseline see the same samples in the same order and start from the same weights. So
# subtract seed by seed, and compare with what a seed does to the baseline.

# %%
spread = statistics.stdev(losses("baseline"))
larger = {}
for name in ("accumulation", "bf16", "two-ranks", "rate"):
    differences = [a - b for a, b in zip(losses(name), losses("baseline"), strict=True)]
    larger[name] = abs(statistics.fmean(differences)) > spread
    print(f"{name:13} moves the validation loss by more than a seed does: {larger[name]}")

# %%
moved = sum(larger[name] for name in ("accumulation", "bf16", "two-ranks"))
lesson.reveal("How many of accumulation, bf16, two ranks move the loss by more than another seed does?", moved)

# %% [markdown]
# *No difference* means: none that three seeds could show. With more seeds a smaller one may appear. `dx.ablate` does
# this with a t test on the differences, a small budget first and the survivors in full, each run in a process of its
# own:
#
# ```python
# found = dx.ablate(baseline, {"bf16": {"precision": "bf16"}, "two ranks": {"batch_size": 32, "world_size": 2}})
# found.table, found.plot()
# ```
#
# ### What is the one difference?
#
# `dx.compare` names it, and the first step at which two runs are not bit-equal. Momentum 0.8 in place of 0.9: the first
# step has no momentum yet.

# %%
lesson.predict("Momentum 0.8 and 0.9: the first step (counted from 0) whose loss differs", None)

# %%
other = dx.train(baseline.override({"momentum": 0.8}), out=new(f"ablation/momentum.{seed}"))
pair = dx.compare(done["baseline", seed], other)
pair.config

# %%
first = pair.divergence.step
print("first difference in the", pair.divergence.column, "of step", first)
lesson.reveal("Momentum 0.8 and 0.9: the first step (counted from 0) whose loss differs", first)

# %% [markdown]
# <details><summary>Why 2?</summary>
#
# Step 0: v is the gradient, whatever the momentum. Step 1 begins with the same weights, so its loss and its gradients
# are the same, and its *update* is the first that differs. Step 2 begins with other weights.
#
# </details>
#
# For accumulation, bf16 and two ranks it is step 0: they add in another order, or round elsewhere. *Not bit-equal* and
# *no difference* are both true of them.

# %%
for name in ("accumulation", "bf16", "two-ranks"):
    apart = dx.compare(done["baseline", seed], done[name, seed])
    print(f"{name:13} differs in {', '.join(apart.config.index):32} first at step {apart.divergence.step}")

# %% [markdown]
# ## 5 · A run that failed
#
# A folder of runs is a table. Failed ones stay in it: they are results. (Times are those of the machine that made it.)

# %% tags=["nbval-ignore-output"]
table = dx.compare(ablation)
table[["status", "reason", "step_time", "validation_accuracy"]].round(4)

# %%
lesson.reveal(
    "A rate a thousand times too large: does the run end as completed or as diverged", done["rate", seed].status
)

# %% [markdown]
# It came to its end with about the accuracy of chance. A **status** says how a run ended, and nothing about what it is
# worth. *Bad result* is a verdict against the baseline, and needs one.
#
# The run with the decay is another matter:

# %%
failed = done["decay", seed]
print(failed.status, "- the reason names step and samples:", "at step" in failed.reason, "sample ids" in failed.reason)
print(
    "steps on record:", 0 < len(failed.steps) < steps, "  test accuracy on record:", "test_accuracy" in failed.metrics
)

# %% [markdown]
# So the step can be made again. The record holds every step before it, and shows whether the run broke at once or was
# on its way there:

# %%
series = {name: (run.steps.index, run.steps["loss"]) for name, run in (("decay", failed), ("baseline", left_alone))}
alt = "loss over the steps: the baseline falls, the run with the decay rises by many powers of ten and ends"
plots.show(plots.curves(series, alt=alt, x="step", y="loss", log_y=True))

# %% [markdown]
# It rises at every step. By pen: the gradient of a weight $w$ gets $1000\,w$ added, and the rate is 0.05. So the first
# step makes about $w - 0.05 \cdot 1000\,w = -49\,w$ of it, and through three layers the logits grow by $49^3$, about
# $10^5$. It is no bad sample: every weight grows. A single spike after a calm curve would have pointed at the batch.

# %%
growth = failed.steps["loss"].iloc[:4]
assert growth.is_monotonic_increasing and growth.iloc[1] > 1000 * growth.iloc[0]
print("the second loss is more than a thousand times the first, and it goes on so")

# %% [markdown]
# ## 6 · Is faster better?
#
# Five figures, side by side, all from the table of runs. Failure rate: the share of runs that did not complete. Spread:
# the standard deviation over the seeds. *none*: there was nothing to measure.

# %%
rows = table.assign(change=[name.rpartition(".")[0] for name in table.index], failed=table.status != "completed")
by = rows.groupby("change")
figures = {
    "step time, ms": 1000 * by.step_time.min(),
    "1000 samples a second": by.samples_per_second.max() / 1000,
    "validation, ms": 1000 * by.validation_time.min(),
    "failure rate": by.failed.mean(),
    "spread of accuracy, %": 100 * by.validation_accuracy.std(),
}

# %%
alt = "five bar charts over the changes: step time, throughput, validation time, failure rate, spread over seeds"
figure, axes = plots.new_figure(alt, width=12, height=2.6, columns=5)
for ax, (name, values) in zip(axes.flat, figures.items(), strict=True):
    ax.barh(list(changes), values[list(changes)])
    for place in torch.tensor(values[list(changes)].to_numpy()).isnan().nonzero():
        ax.text(0, place.item(), " none", va="center")
    ax.set(xlabel=name, yticks=range(len(changes)), yticklabels=changes if ax is axes.flat[0] else [])
    ax.set_ylim(len(changes) - 0.5, -0.5)  # the same rows in every panel, from the top
plots.show(figure)

# %% [markdown]
# The best of three seeds is drawn for the times, because whatever else the machine did can only have added to them.
# *Baseline* and *rate* do the same arithmetic: where their times differ, you see the noise of this machine, and a
# change must exceed it. What holds on other machines too:

# %%
times, failures = figures["step time, ms"], figures["failure rate"]
slower = bool(times["baseline"] < times["two-ranks"])
assert slower
print("on a net this small two ranks take longer for a step than one process:", slower)
print("failure rates:", failures[list(changes)].to_dict())

# %% [markdown]
# - **Two ranks** have a slower step and the baseline's result. They pay off where computing outweighs the exchange.
# - **Rate** does the same arithmetic as the baseline, so it takes the same time but for what else the machine did. It
#   never fails, and its seeds lie close together: chance is steady. By these five figures alone nobody would throw it
#   out; the accuracy has to stand beside them.
# - **Decay** always fails, before its sixth step. It has no validation and no spread, and *none* is not zero.
# - **Spread** over three seeds is a rough number. A change that drives the seeds apart costs more runs before anything
#   can be learnt from it.
#
# So a faster setting is *better* if the result stays within the seeds' spread, and it fails no more often than before.
# Judge by the time to a result that you can use.
#
# ## Further
#
# ### Hashes
#
# Python hashes text with a secret that is new in each process, unless `PYTHONHASHSEED` fixes it. The order of a set
# hangs on it; so do the classes, if they are numbered by `enumerate(set(labels))`.


# %%
def order_of_a_set(hash_seed):
    code = "print(list({'cat', 'dog', 'fox', 'hen', 'owl', 'pig'}))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stdout


# %%
print("one hash seed, twice:", order_of_a_set("1") == order_of_a_set("1"))
print("two hash seeds:", order_of_a_set("1") == order_of_a_set("2"))

# %% [markdown]
# `torch.manual_seed` does not reach it, and nothing inside the process can: sort the set.
#
# ### Flags
#
# | flag | what it does | price |
# |---|---|---|
# | `torch.use_deterministic_algorithms(True)` | deterministic kernels, or an error | slower on GPUs, filled memory |
# | `CUBLAS_WORKSPACE_CONFIG=:4096:8` | fixed buffers; set before CUDA starts | 24 MiB, or speed with `:16:8` |
# | `torch.backends.cudnn.benchmark = False` | no race between kernels (the default) | the fastest kernel, perhaps |
# | `torch.set_num_threads(n)` | one way to split a sum | nothing, if it is your number anyway |
#
# The two in the middle change nothing on a CPU. All of them together promise the same bits on the *same* machine and
# build, and no more. *Filled memory*: under the first flag torch fills what nobody has filled, so that a forgotten
# initialisation is seen at once. It costs a pass over the memory.

# %%
torch.use_deterministic_algorithms(True)
unfilled = torch.empty(3)
torch.use_deterministic_algorithms(False)
print("torch.empty, under the flag: all NaN,", unfilled.isnan().all().item())

# %% [markdown]
# ### What a run keeps
#
# Besides its steps and its end: the commit and what was not committed, versions, threads, flags, and digests of data
# and weights. Two runs whose code differs are told apart by it:

# %%
environment = (left_alone.folder / "environment.json").read_text()
for what in ("commit", "torch", "threads", "deterministic"):
    print(f"{what:14} on record: {what in environment}")

# %% [markdown]
# In a terminal, `dxdy runs` lists what stands in `runs/`, `dxdy runs show` one of them, and `dxdy runs compare` two.
# `dxdy sweep` runs a grid, several runs at once, goes on where it was killed, and counts the runs that failed.

# %% [markdown]
# ## All causes that lead here
#
# A report's `lesson` leads to this list. Each line says what happens, and what shows it.
#
# <a id="reproduce"></a>Causes explained here, **reproduce**:
#
# - `unseeded-run`: Two runs of one script begin with other weights, or read samples in another order. Section 1.
# - `seed-set-every-epoch`: The seed is set at the top of each epoch, and every epoch has the order and the masks of the
#   first.
# - `resume-no-optimizer-state`: Momentum, or Adam's moments, begin at zero again. Section 2.
# - `resume-no-scheduler`: The schedule begins anew: a warm-up in the middle of a run. Section 2.
# - `resume-replays-order`: The generators, or the loader's place, were not kept: samples of the epoch are read twice,
#   others not at all. Section 2.
# - `resume-param-order-swapped`: The optimizer got the parameters in another order than before, and each moment belongs
#   to another weight. Where the shapes fit, torch says nothing.
# - `strict-false-loads-nothing`: No name fits, as after a wrapper's `module.`, and `strict=False` is content with that.
# - `checkpoint-omits-frozen`: Only what is trained was saved; what was frozen comes back at random.
# - `best-state-aliased`: `best = model.state_dict()` holds the very tensors that training goes on changing.
# - `checkpoint-damaged`: A byte is another one than was written. Section 3: torch loads it without a word.
# - `loss-steps-up`: The loss jumps to another level and stays. A resume without a state looks like this.
# - `resumed-earlier`: The table of losses goes back some steps: what lies between was run twice.
#
# <a id="loss"></a>Causes explained here, **loss**:
#
# - `loss-not-finite`: A table of losses ends in NaN. It does not say why: the record does. Section 5.

# %% [markdown]
# ## Exercises
#
# A resumed run must read the samples that it would have read. `order_of` of section 1 gives an epoch its order, with
# the key `1000 * seed + epoch`.
#
# ### Exercise · worked
#
# So many steps lie behind, an epoch has so many batches: how many whole epochs, and how many batches of the next?


# %%
def place(step, batches):
    return divmod(step, batches)  # (epoch, batches consumed in it)


# %%
lesson.check("place", place)

# %% [markdown]
# 24 steps, 19 batches an epoch: one whole epoch, and 5 batches of the second.
#
# ### Exercise · faded
#
# The ids of an epoch that are still to be read, when `consumed` of its `n` samples have been.


# %%
def rest_of_epoch(seed, epoch, n, consumed):
    key = int(...)  # what the order of this epoch hangs on
    order = torch.randperm(n, generator=torch.Generator().manual_seed(key))
    return order[...]  # what is left of it


# %%
lesson.check("rest_of_epoch", rest_of_epoch)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Each epoch has an order of its own, and no two seeds share one (of fewer than 1,000 epochs). Section 1 has a key with
# both properties.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The first unread sample stands at the index that counts those before it.
#
# </details>
#
# <details><summary>Solution: rest_of_epoch</summary>
#
# ```python
# def rest_of_epoch(seed, epoch, n, consumed):
#     key = 1000 * seed + epoch
#     order = torch.randperm(n, generator=torch.Generator().manual_seed(key))
#     return order[consumed:]
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# A list with the ids of every batch to come, a tensor for each of the steps from `step` to `total` (without `total`).
# The last batch of an epoch may be smaller.


# %%
def rest_of_run(seed, step, total, n, batch_size): ...


# %%
lesson.check("rest_of_run", rest_of_run)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many batches has an epoch of 10 samples in fours? Three: round up.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# For each step: its place, the order of that epoch, and the slice of that batch.
#
# </details>
#
# <details><summary>Solution: rest_of_run</summary>
#
# ```python
# import math
#
# def rest_of_run(seed, step, total, n, batch_size):
#     rest = []
#     for now in range(step, total):
#         epoch, batch = divmod(now, math.ceil(n / batch_size))
#         order = torch.randperm(n, generator=torch.Generator().manual_seed(1000 * seed + epoch))
#         rest.append(order[batch * batch_size : (batch + 1) * batch_size])
#     return rest
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# Put the lines of a resume in order.
#
# - A: `for batch in batches:`, and the first step
# - B: `state = torch.load(path, weights_only=True)`
# - C: `torch.set_rng_state(state["random"])`
# - D: `optimizer.load_state_dict(state["optimizer"])`
# - E: `assert sha256_of(path) == written_beside(path)`
# - F: `model = build()`
# - G: `batches = iter(loader)`
# - H: `optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)`

# %%
order_of_lines = ...  # a list of eight letters, ["…", "…", …]

# %%
lesson.check("resume_order", order_of_lines)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which lines draw a random number? The state of the generator goes back after all of them.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A damaged file can be loaded without an error. So what is the very first thing to do with it?
#
# </details>
#
# <details><summary>Solution: resume_order</summary>
#
# ```python
# order_of_lines = ["E", "B", "F", "H", "D", "G", "C", "A"]
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** A colleague adds a dropout layer and compares with the old run, both with seed 0 and `shuffle=True`. The
# new one is better by 0.4 %. What may have changed besides the layer?
#
# <details><summary>a) Nothing: the seed is the same.</summary>
#
# Not so: the seed starts one sequence, and the layer draws from it too. Whoever draws later gets other numbers.
#
# </details>
#
# <details><summary>b) The order of the data.</summary>
#
# Right. From the second epoch on the loader draws its order after the dropout has drawn its masks. And one seed cannot
# tell 0.4 % from luck.
#
# </details>
#
# <details><summary>c) The split into training and validation.</summary>
#
# Not so: that is made before the first dropout mask is drawn, if it is drawn at all. It is worth a digest in the
# record, though.
#
# </details>

# %% [markdown]
# **Quiz 2.** A resumed run has the losses of the one that never stopped, to all digits shown, for ten steps. Its
# checkpoint has weights, optimizer, schedule, step and generator states. What may still be missing?
#
# <details><summary>a) The scaler's state.</summary>
#
# Right. A power of two leaves no trace until a gradient overflows, or the scale would have grown.
#
# </details>
#
# <details><summary>b) The momentum buffer.</summary>
#
# Not so: it is in the optimizer's state, and without it the second loss after the pause is another one.
#
# </details>
#
# <details><summary>c) The number of the epoch.</summary>
#
# Not so: the step tells it, as long as an epoch has the same number of batches.
#
# </details>

# %% [markdown]
# **Quiz 3.** A sweep of 20 runs: the best setting has the shortest step and the best accuracy, with one seed. 4 of its
# 5 runs ended as *diverged* and were deleted. What do you report?
#
# <details><summary>a) The setting: the runs that diverged have no result.</summary>
#
# Not so: that they diverged is the result. Four of five is a rate of failure.
#
# </details>
#
# <details><summary>b) The second best, since failures count as an accuracy of zero.</summary>
#
# Not so: an average with zeros mixes two questions. Report the rate of failure and the result beside each other.
#
# </details>
#
# <details><summary>c) Accuracy over seeds with its spread, and the rate of failure beside it.</summary>
#
# Right. And next time a failed run keeps its record: its reason says what to try first.
#
# </details>

# %% [markdown]
# **Open task.** Choose one change to the baseline. Write down first by how much it will move the validation loss, and
# at which step the two runs will go apart. Then compare. The run is kept in `runs/`, and `dxdy runs` shows it.

# %%
change = {}  # as in {"weight_decay": 0.001}
mine = dx.train(baseline.override(change))
against = dx.compare(done["baseline", seed], mine)
print("what differs:", ", ".join(against.config.index) or "nothing", "- bit-equal:", against.equal)

# %%
lesson.score()

# %%
dx.result(
    momentum_error=round(autograd, 4),
    parts_that_matter=" ".join(matters),
    resumed_equal=equal,
    load_error=told,
    damaged_equal=fingerprint(repaired.model) == fingerprint(left_alone.model),
    larger_than_spread=" ".join(name for name in larger if larger[name]),
    first_difference=first,
    statuses=" ".join(f"{name} {done[name, seed].status}" for name in ("baseline", "rate", "decay")),
    failure_rate=failures["decay"],
    accuracy=done["baseline", seed].metrics["validation_accuracy"],
    accuracy_rate=done["rate", seed].metrics["validation_accuracy"],
)

# %% [markdown]
# **Sources.**
#
# - *Reproducibility*, PyTorch documentation. https://docs.pytorch.org/docs/stable/notes/randomness.html
# - X. Bouthillier and others: *Accounting for Variance in Machine Learning Benchmarks*, 2021.
#   https://arxiv.org/abs/2103.03098 (seeds, and pairs)
# - J. Pineau and others: *Improving Reproducibility in Machine Learning Research*, 2020.
#   https://arxiv.org/abs/2003.12206 (what to report)
