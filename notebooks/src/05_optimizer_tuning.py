# %% [markdown]
# # 05 · Tuning an optimizer
#
# **Question.** How do I choose initialisation, optimizer, learning rate and schedule by experiment?
#
# **You will**
# - predict from one number whether a step converges, bounces or blows up
# - choose an initialisation from the sizes of activations and gradients, layer by layer
# - say what each of seven optimizers will do on a landscape, move the sliders, and be scored
# - find a learning rate with a bracket, a few short runs and a sweep, instead of by fiddling
# - recognise three faults of the update by what they look like
#
# **Know before.** What backward leaves in `.grad` (01), the baseline with its update ratio (03).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU.
#
# data → forward → loss → backward → **update** → comm
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>What is the update ratio of lesson 03, and what does it say that the gradient does not?</summary>
#
# The length of the update over the length of the weights. It knows the learning rate and what the optimizer made of
# the gradient. A gradient of usual size with a tiny update ratio points at the rate.
#
# </details>
#
# <details><summary>What does zero_grad() leave in .grad?</summary>
#
# None. A parameter whose gradient is None is left alone by the optimizer; one whose gradient is zero may still move.
#
# </details>
#
# <details><summary>Lesson 04 took Newton's step. What does it need that SGD does not have?</summary>
#
# The curvature: the Hessian, a gradient of a gradient. SGD has one number for all directions, the learning rate. This
# lesson is about how curvature decides which numbers work.
#
# </details>

# %% tags=["parameters"]
optimizer = "sgd"
lr = 0.1
momentum = 0.0
steps = 30
seed = 0

# %%
import math
import warnings
from collections import defaultdict

import numpy as np
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.lesson import panels, plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.runs.environment import in_live_notebook
from dxdy_nb.training import datasets, loop, models, parts
from dxdy_nb.training.landscapes import OPTIMIZERS, Array, Kept, Walk, zones

torch.set_num_threads(1)
lesson = Lesson("05_optimizer_tuning")

# %% [markdown]
# The parameters cell says which optimizer this lesson runs. Not every optimizer has a `momentum`: SGD does. Adam's
# first beta does the same work under another name, and keeps its 0.9 here.

# %%
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
if optimizer not in KINDS:
    raise dx.DxdyError(f"optimizer: this lesson runs {', '.join(KINDS)}; got {optimizer!r}")
own = {"momentum": momentum} if optimizer == "sgd" else {}
# A value that makes no sense ends the lesson here, before anything runs.
config = dx.RunConfig(seed=seed, lr=lr, optimizer=optimizer, max_steps=2 * steps, model="mlp", device="cpu", **own)
if momentum and not own:
    print(f"{optimizer} has no momentum of that name: the value of the parameters cell is not used")


def make_optimizer(params, lr=lr):
    return KINDS[optimizer](params, lr=lr, **own)


# %% [markdown]
# ## 1 · One number decides
#
# The smallest loss there is: $y=(x-3)^2$. Its gradient is $2(x-3)$, its curvature 2, everywhere. One step of plain
# SGD:
#
# $$x' - 3 = x - \mathrm{lr}\cdot 2(x-3) - 3 = (1-2\,\mathrm{lr})\,(x-3)$$
#
# The distance to the minimum is *multiplied* by $1-2\,\mathrm{lr}$. Fill in the table by pen, as a list of five
# numbers, and say for each what the walk from $x=5$ will look like.
#
# | lr | 0.1 | 0.5 | 0.9 | 1.0 | 1.1 |
# |---|---|---|---|---|---|
# | factor | ? | ? | ? | ? | ? |

# %%
lesson.predict("Factors at lr = 0.1, 0.5, 0.9, 1.0, 1.1 (a list)", None)


# %%
def walk(make, count):
    x = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    optimizer, seen = make([x]), [x.item()]
    for _ in range(count):
        optimizer.zero_grad()
        loss = (x - 3) ** 2
        loss.backward()
        optimizer.step()
        seen.append(x.item())
    return seen


# %%
rates = (0.1, 0.5, 0.9, 1.0, 1.1)
factors = []
for rate in rates:
    xs = walk(lambda params, rate=rate: torch.optim.SGD(params, lr=rate), 4)
    factors.append(round((xs[1] - 3) / (xs[0] - 3), 6) + 0.0)
    print(f"lr {rate}:  " + "  ".join(f"{x:6.3f}" for x in xs))

# %%
lesson.reveal("Factors at lr = 0.1, 0.5, 0.9, 1.0, 1.1 (a list)", factors)

# %% [markdown]
# Five regimes: it creeps, arrives in one step, bounces and arrives, bounces for ever, blows up. The border is at
# factor -1: **lr = 2 / curvature**, here 1.
#
# The factor by three routes, in float64: pen, autograd, and a finite difference in place of the gradient.

# %%
x, h = torch.tensor(5.0, dtype=torch.float64, requires_grad=True), 1e-5
(gradient,) = torch.autograd.grad((x - 3) ** 2, x)
difference = ((5 + h - 3) ** 2 - (5 - h - 3) ** 2) / (2 * h)
by_pen = 1 - 2 * 0.9
for slope in (gradient.item(), difference):
    assert abs((5 - 0.9 * slope - 3) / (5 - 3) - by_pen) < 1e-9
print(f"at lr 0.9 all three say {by_pen:.1f} (float64, within 1e-9)")

# %% [markdown]
# Now the optimizer of the parameters cell, on the same loss:

# %%
xs = walk(make_optimizer, steps)
nearer = abs(xs[-1] - 3) < abs(xs[0] - 3)
print(f"{optimizer}, {steps} steps: nearer to the minimum than at the start, {nearer}")

# %% [markdown]
# ## 2 · The loop, and where it starts
#
# ### Exercise · order
#
# The six lines of every training loop, shuffled. The loop should not care what somebody left in `.grad` before it.
# More than one order is right.
#
# - A: `loss.backward()`
# - B: `for x, y in loader:`
# - C: `optimizer.step()`
# - D: `loss = loss_fn(model(x), y)`
# - E: `optimizer.zero_grad()`
# - F: `losses.append(loss.item())`

# %%
loop_order = ...  # a list of six letters, ["…", "…", …]
lesson.check("loop_order", loop_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One line opens the block, and stands before all others. Then the chain: a loss, its gradients, a step along them.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `backward` adds to what is in `.grad`. So what must have happened before it?
#
# </details>
#
# <details><summary>Solution: loop_order</summary>
#
# ```python
# loop_order = ["B", "E", "D", "A", "C", "F"]
# ```
#
# `E` may stand after `D`, `F` anywhere after `D`.
#
# </details>

# %% [markdown]
# ### Three starts
#
# Ten layers of 256 units with ReLU. A layer multiplies the size of its input by about $\sqrt{n/2}\cdot\sigma$, where
# $n$ is the number of inputs and $\sigma$ the standard deviation of its weights. He et al. (Kaiming) choose
# $\sigma=\sqrt{2/n}$: the factor is 1. Take half of that, and twice that.

# %%
lesson.predict("Half of Kaiming's weights: ten layers change the size by 10 to the power of", None)


# %%
def deep(scale):
    torch.manual_seed(seed)
    net = nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(256, 256, bias=False), nn.ReLU())])
    with torch.no_grad():
        for weight in net.parameters():
            nn.init.kaiming_normal_(weight, nonlinearity="relu").mul_(scale)
    return net


# %%
def sizes(scale):
    net, x = deep(scale), torch.randn(512, 256, generator=torch.Generator().manual_seed(seed))
    rms = []
    for layer in net:
        x = layer(x)
        rms += [x.square().mean().sqrt().item()] if isinstance(layer, nn.ReLU) else []
    x.square().mean().sqrt().backward()  # the size of the output as the loss
    return rms, [w.grad.square().mean().sqrt().item() for w in net.parameters()]


starts = {"half": sizes(0.5), "Kaiming": sizes(1.0), "twice": sizes(2.0)}

# %%
alt = "size of activations and of gradients by layer for three initialisations: falling, level and rising"
figure, axes = plots.new_figure(alt, 9, 3, columns=2)
for name, pair in starts.items():
    for ax, values, label in zip(axes[0], pair, ("RMS of the activations", "RMS of the gradient"), strict=True):
        ax.plot(range(1, 11), values, marker="o", markersize=3, label=name)
        ax.set(xlabel="layer", ylabel=label, yscale="log")
axes[0, 0].legend(frameon=False)
plots.show(figure)

# %%
power = round(math.log10(starts["half"][0][-1] / starts["Kaiming"][0][-1]))
lesson.reveal("Half of Kaiming's weights: ten layers change the size by 10 to the power of", power)

# %% [markdown]
# $0.5^{10}=1/1024$, about $10^{-3}$; twice the weights give $10^{3}$. The gradient of a layer carries the factors of
# all other layers, so every gradient is off by $0.5^9$, or by $2^9$. A learning rate would have to make that good
# before it does anything else. Choose the start that keeps the sizes level, *then* tune.

# %% [markdown]
# ## 3 · The playground
#
# Only now sliders. What they move is a configuration, `Walk`; what it is handed to is this function and, for each
# optimizer, one rule like the one below it. The rules are plain arithmetic, because a loop of `torch.optim` costs
# over twenty times as much. A test of this workbook holds each of them to `torch.optim`.


# %% tags=["same-as:dxdy_nb.training.landscapes.descend"]
def descend(walk: Walk) -> Array:
    land = walk.over()
    rule, path = OPTIMIZERS[walk.optimizer], [land.start]
    kept: Kept = defaultdict(float)
    noise = np.random.default_rng(walk.seed)
    with np.errstate(all="ignore"):
        for _ in range(walk.steps):
            gradient = land.gradient(path[-1])
            if land.noise:
                gradient = gradient + land.noise * noise.standard_normal(gradient.shape)
            path.append(rule(walk, path[-1], gradient, kept))
    return np.stack(path)


# %% tags=["same-as:dxdy_nb.training.landscapes.sgd"]
def sgd(walk: Walk, z: Array, g: Array, kept: Kept) -> Array:
    return z - walk.lr * g


# %%
straight = Walk(landscape="bowl", optimizer="sgd", lr=0.05, steps=20)
assert np.array_equal(descend(straight), straight.path())
print("the function above and the panel's: the same path")

# %% [markdown]
# The bowl has curvature 1 along x and *condition* along y; the larger one is λ. The rate is also shown in units of
# 2/λ, so that 1 is the border of plain SGD.
#
# The rule of the panel: **write what you expect, then run.** A word (*converges*, *oscillates*, *diverges*, *stalls*)
# or the number of steps until 1 % of the height is left. The panel keeps your score. Tab and the arrow keys work too.
#
# Things to try, rates in units of 2/λ: the bowl at 0.4, 0.6 and 1.1; momentum at 1.1; the saddle with its start at y
# = 0, then at 0.1; Adam on the ravine, which no coordinate runs along; the noisy bowl at two rates; the matrix with
# Muon.

# %%
playground = panels.Playground(Walk(landscape="bowl", optimizer="sgd", lr=0.1))
playground

# %% [markdown]
# Where no panel can stand, a grid of the same walks does: a row a rate, a column an optimizer. Read it by columns.
# SGD passes through all regimes. Momentum bears the largest rate, at which SGD diverges, and oscillates at every rate
# shown. Nesterov bears *less* than SGD. The last three hardly ask for λ. They divide by the size of the gradient, so a
# step is about `lr` long, and at a large rate they dance around the minimum. AdamW differs from Adam by a pull towards
# zero, where this bowl has its minimum anyway.
#
# <details><summary>On the saddle at y = 0, why does no optimizer leave the axis?</summary>
#
# The gradient along y is exactly zero there, and every rule multiplies it by something. Start at 0.1 and each of them
# leaves. In a real net, noise of the minibatches and rounding do that service.
#
# </details>
#
# <details><summary>Adam on the bowl and on the ravine: what is the difference?</summary>
#
# Adam has one scale for each coordinate. On the bowl the coordinates are the directions of curvature: at a rate of 0.03
# a condition of 10 or of 100 makes little difference. The ravine is the same bowl turned by 30 degrees, and each
# coordinate sees both curvatures. At condition 50 and rate 0.03 it has nearly two hundred times as much of its height
# left after a hundred steps.
#
# </details>
#
# ### Why Muon asks for a matrix
#
# Muon replaces the velocity of a *weight matrix* by the nearest one whose singular values are all about 1: every
# direction of the matrix moves equally far. A vector has one singular value. There Muon would only be a step of fixed
# length, so the panel offers it on the matrix alone. Torch is as strict:

# %%
try:
    torch.optim.Muon([nn.Parameter(torch.zeros(3))], lr=0.1)
except ValueError as error:
    print(type(error).__name__, "-", str(error)[:90])

# %% [markdown]
# <details><summary>How to read it</summary>
#
# The size at the end names the parameter: three numbers in a row, a bias. Give the 2-D weights of hidden layers to
# Muon, and biases, embeddings and the last layer to a second optimizer, AdamW for example. Mind its default weight
# decay of 0.1, ten times AdamW's.
#
# </details>

# %% [markdown]
# ## 4 · A ravine, and what shows first
#
# A ravine of condition number 50, three optimizers, each at a rate that suits it.

# %%
ravine = {"landscape": "ravine", "condition": 50.0, "steps": 100}
walks = {
    "sgd, 0.95 × 2/λ": Walk(optimizer="sgd", lr=0.95 * 2 / 50, **ravine),
    "momentum, 0.25 × 2/λ": Walk(optimizer="momentum", lr=0.25 * 2 / 50, **ravine),
    "adam, lr 0.1": Walk(optimizer="adam", lr=0.1, **ravine),
}
plots.show(panels.picture(walks))

# %% [markdown]
# SGD is at its limit: across the ravine it bounces, along it each step is a fiftieth of what curvature there would
# allow. *That* is what a condition number costs.
#
# Now three per cent over the limit, from a start almost on the floor of the ravine. For a while everything looks
# well.

# %%
unstable = Walk(optimizer="sgd", lr=1.03 * 2 / 50, y=-1.03, landscape="ravine", condition=50.0, steps=60)
lesson.predict("Which strip turns upwards first: height, gradient or ratio?", None)

# %%
plots.show(panels.picture({"sgd, 1.03 × 2/λ": unstable}))

# %%
path, land = unstable.path(), unstable.over()
gradient_norms = np.linalg.norm(land.gradient(path), axis=-1)
update_ratios = unstable.lr * gradient_norms / np.linalg.norm(path, axis=-1)
strips = {"height": land.value(path), "gradient": gradient_norms, "ratio": update_ratios}
turns = {name: int(values.argmin()) for name, values in strips.items()}
print("the lowest step of each strip:", turns)
first = min(turns, key=turns.get)
lesson.reveal("Which strip turns upwards first: height, gradient or ratio?", first)

# %% [markdown]
# The loss is the last to know. It counts the growing direction as $\lambda z^2/2$, beside the large height that is
# still to be lost along the floor. The gradient counts it as $\lambda z$: fifty times more than the other direction.
# The ratio divides by a distance that shrinks. (In a real net the weights keep their size, and the ratio turns with
# the gradient.) So in a real run look at gradient norm and update ratio before the loss, as in lesson 03.

# %% [markdown]
# ## 5 · How much rate can it bear?
#
# On a bowl this has an exact answer, and you can find it without theory: bisect. Below the limit the distance across
# dies out, above it grows.

# %%
lesson.predict("Momentum 0.9: the largest stable rate in units of 2/λ", None)


# %%
def limit(optimizer, momentum):
    low, high = 0.01, 10.0
    for _ in range(25):
        middle = math.sqrt(low * high)
        trial = Walk(optimizer=optimizer, momentum=momentum, lr=middle * 2 / 10, steps=1000)
        grew = not abs(descend(trial)[-1, 1]) <= 1  # it began at 1; inf and nan grew too
        low, high = (low, middle) if grew else (middle, high)
    return low


# %%
names = ("sgd", "momentum", "nesterov")
limits = {name: limit(name, 0.9) for name in names}
for name in names:
    oscillates, diverges = zones(Walk(optimizer=name, momentum=0.9))
    assert math.isclose(limits[name], diverges, rel_tol=2e-3)
    print(f"{name:8}  measured {limits[name]:.2f}, theory {diverges:.2f}; oscillates from {oscillates:.4f} on")
lesson.reveal("Momentum 0.9: the largest stable rate in units of 2/λ", round(limits["momentum"], 2))

# %% [markdown]
# The theory, with $p=\mathrm{lr}\cdot\lambda$. Each direction of a bowl follows a recurrence of two terms; it is
# stable while the roots of its polynomial lie within the unit circle.
#
# | | polynomial | stable below, in units of 2/λ |
# |---|---|---|
# | SGD | $r-(1-p)$ | $1$ |
# | momentum β | $r^2-(1+\beta-p)\,r+\beta$ | $1+\beta$ |
# | Nesterov β | $r^2-(1+\beta)(1-p)\,r+\beta(1-p)$ | $(1+\beta)/(1+2\beta)$ |
#
# Momentum bears 1.9 times the rate, *and* each gradient acts 1/(1-β) = 10 times in the end. Who switches it on
# usually divides the rate by ten for a start. A real net has no λ that stays; *Further* looks at one.

# %% [markdown]
# ## 6 · A bracket, then short runs
#
# The digits, and a net of three linear layers. Which rate? A **range test** trains for a hundred steps with a rate
# that grows at each step. Then it puts the model back, bit for bit.

# %%
loss_fn = nn.functional.cross_entropy
data = datasets.load("digits")
batches = datasets.loader(data.train, config.batch_size, shuffle_seed=seed)


def fresh():
    torch.manual_seed(seed)
    net = models.build("mlp", data.train.x[0], data.classes)
    models.initialise(net, "kaiming")
    return net


# %%
net = fresh()
bracket = dx.lr_range_test(model=net, loss_fn=loss_fn, loader=batches, optimizer=make_optimizer(net.parameters()))
low, high = bracket or (1e-4, 1.0)
if bracket:
    plots.show(bracket.plot())

# %% [markdown]
# On the left nothing moves. Then the loss falls a little: each rate acts for one step only. On the right it blows up.
# Three known rules read one rate off such a curve: where it is steepest, a tenth of where it is lowest, and two
# thirds down its longest valley.

# %%
lesson.predict("Do the three rules agree within a factor of two? (yes or no)", None)

# %%
said = bracket.rules if bracket else {"no bracket": low}
agree = "yes" if max(said.values()) <= 2 * min(said.values()) else "no"
lesson.reveal("Do the three rules agree within a factor of two? (yes or no)", agree)

# %% [markdown]
# So take the test for what it is: a **bracket** to search in. It is short, its steps are taken from a start that is
# never visited again, and it says nothing of a schedule. The answer comes from a few short runs on a logarithmic
# grid, with the same seed and the same validation, and some more around the best, until both neighbours are worse.

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a best rate at the edge is told below, in our own words
    search = dx.lr_search(config)
plots.show(search.plot())

# %%
best = search.best or low
tried = search.table.index
print("the best is neither the smallest nor the largest that was tried:", tried.min() < best < tried.max())

# %% [markdown]
# ## 7 · A sweep instead of fiddling
#
# One seed is one draw. A sweep fixes a grid *before* it looks: rates a factor of three apart, each with several
# seeds. In the words of the tuning playbook: the rate is the *scientific* parameter, the seed a *nuisance* parameter,
# everything else is *fixed*.

# %%
grid = [best * 3.0**power for power in (-2, -1, 0, 1, 2)]
sweep = {rate: [dx.train(config.override({"lr": rate, "seed": s})) for s in (seed, seed + 1)] for rate in grid}


# %%
def ended(run):  # a run that blew up has no loss worth a place on the axis
    loss = run.metrics.get("validation_loss", math.inf)
    return loss if run.status == "completed" and loss < math.log(10) else math.inf


alt = "validation loss over the learning rate, a dot for each seed, red crosses where a run failed"
figure, axes = plots.new_figure(alt, 7, 3)
ax = axes[0, 0]
for rate, found in sweep.items():
    for run in found:
        failed = not math.isfinite(ended(run))
        ax.plot(
            rate,
            math.log(10) if failed else ended(run),
            "x" if failed else "o",
            color="red" if failed else plots.PALETTE[0],
        )
ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="validation loss")
ax.axhline(math.log(10), color="0.7", linestyle=":")
plots.show(figure)

# %%
mean = {rate: sum(map(ended, found)) / len(found) for rate, found in sweep.items()}
winner = min(mean, key=mean.get)
on_record = sum(len(found) for found in sweep.values())
print("runs on record, failed ones too:", on_record)
print("the best is at the edge of the grid:", winner in (min(mean), max(mean)))

# %% [markdown]
# Four habits make this worth more than fiddling:
#
# - *Failed runs stay*, as red crosses. Where the cliff stands is the most useful thing in the picture.
# - *Is the best at the edge?* Then the best is unknown: widen the grid.
# - *Compare a difference with the spread of the seeds* before you believe it.
# - Take the rate a little to the left of the cliff, not on it: another seed moves the cliff.

# %% [markdown]
# ## 8 · Schedules
#
# A schedule multiplies the rate by a factor at each step. Here they are, over 100 steps.

# %%
schedules = ("constant", "linear", "cosine", "step", "one_cycle")
series = {}
for name in schedules:
    shape = config.override({"schedule": name})
    series[name] = (range(100), [parts.lr_factor(shape, step, 100) for step in range(100)])
alt = "factor on the learning rate over the steps, a line for each schedule"
plots.show(plots.curves(series, alt=alt, x="step", y="factor on the rate"))

# %% [markdown]
# What does a schedule do to the *size of the updates*? Watch it. While the run goes on, choose another schedule: the
# rate jumps to where that schedule would be, and the update ratio follows at once. *Stop* ends the run.

# %%
total, controls = 10 * steps, []
if in_live_notebook():  # somebody can move a widget, and needs a while for it
    import ipywidgets

    total *= 6
    controls = [ipywidgets.Dropdown(options=schedules, value="cosine", description="schedule")]


def scheduled(net, opt):
    for step in range(total):
        x, y, _ = epoch[step % len(epoch)]
        shape = config.override({"schedule": controls[0].value if controls else "cosine"})
        opt.param_groups[0]["lr"] = best * parts.lr_factor(shape, step, total)
        loop.train_step(net, x, y, loss_fn, opt)
        yield


# %%
net, epoch = fresh(), list(batches)
opt = make_optimizer(net.parameters())
with dx.watch(net, opt) as w:
    await dx.live(w, *controls).run(scheduled(net, opt))

# %% [markdown]
# The same, one run for each schedule, nobody moving anything:


# %%
def recorded(schedule):
    run = dx.train(config.override({"lr": best, "schedule": schedule, "max_steps": 3 * steps}))
    ratio = run.gradients["update_ratio"].xs("fc2.weight", level="parameter").dropna()
    return run, ratio


by_schedule = {name: recorded(name) for name in schedules}

# %%
series = {name: (ratio.index, ratio) for name, (_, ratio) in by_schedule.items()}
alt = "update ratio of one weight over the steps for each schedule: it follows the schedule"
plots.show(plots.curves(series, alt=alt, x="step", y="|update| / |weight|, fc2.weight", log_y=True))

# %%
constant, decayed = (by_schedule[name][1].iloc[-1] for name in ("constant", "linear"))
assert decayed < constant
print("at the end the linear schedule's updates are smaller than the constant one's:", decayed < constant)

# %% [markdown]
# Large steps early, to get somewhere; small ones at the end, to stay there. In the playground you saw why: with
# noise, a constant rate ends in a cloud whose size grows with the rate. A schedule that falls lets the cloud shrink.
# **Warm-up** is for the other end: at the start curvature is changing fast, and Adam's averages rest on few
# gradients.

# %% [markdown]
# ## 9 · Three faults of the update
#
# ### Forgotten zero_grad
#
# The line `optimizer.zero_grad()` is gone. On $(x-3)^2$ at lr 0.1:


# %%
def never_cleared(count):
    x = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    optimizer, seen = torch.optim.SGD([x], lr=0.1), [x.item()]
    for _ in range(count):
        ((x - 3) ** 2).backward()
        optimizer.step()
        seen.append(x.item())
    return seen


forgot = never_cleared(30)
print("forgotten:   ", "  ".join(f"{x:.3f}" for x in forgot[:9]))

# %%
lesson.predict("Without zero_grad, plain SGD is momentum with beta =", None)

# %%
tries = {beta: walk(lambda p, beta=beta: torch.optim.SGD(p, lr=0.1, momentum=beta), 30) for beta in (0.5, 0.9, 1.0)}
same = next(beta for beta, xs in tries.items() if np.allclose(xs, forgot, rtol=0, atol=1e-12))
print("momentum 1.0:", "  ".join(f"{x:.3f}" for x in tries[same][:9]))
lesson.reveal("Without zero_grad, plain SGD is momentum with beta =", same)

# %% [markdown]
# `.grad` itself has become the velocity, and it never fades: β = 1. So it swings around the minimum for ever. At
# first it looks *better* than the right loop: after three steps it stands at 2.984, where section 1 had 4.024. That
# is why this fault lives long.
#
# ### Scheduler before optimizer

# %%
weight = nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
opt = torch.optim.SGD([weight], lr=1.0)
halves = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    halves.step()
    opt.step()
print(str(told[0].message)[:82])
print("the first step used", opt.param_groups[0]["lr"], "and not 1.0")

# %% [markdown]
# Torch warns once, and only of this order. The first rate of the schedule is never used, and everything after it
# comes one step early. In a long run nobody sees it. First `optimizer.step()`, then the schedule.
#
# ### Ten times the rate


# %%
def losses_at(factor):
    net = fresh()
    opt = torch.optim.SGD(net.parameters(), lr=0.3 * factor)
    return net, [loop.train_step(net, *epoch[i % len(epoch)][:2], loss_fn, opt) for i in range(60)]


(_, usual), (broken, tenfold) = losses_at(1), losses_at(10)
series = {"lr 0.3": (range(60), usual), "lr 3": (range(60), tenfold)}
plots.show(plots.curves(series, alt="two losses: one falls, one jumps up and stays", x="step", y="loss", log_y=True))

# %%
late = sum(tenfold[-10:]) / 10
print("ten times the rate: above 2 to the end,", late > 2, "  the usual rate: below 1,", usual[-1] < 1)
hidden = broken.fc2(broken.fc1(data.train.x.flatten(1)).relu()).relu()
print("units of the second layer that are zero for every image: most,", bool((hidden == 0).all(0).float().mean() > 0.5))

# %% [markdown]
# It jumps up, comes back to about ln 10 and stays: the first steps have thrown the ReLUs to where they are off.
# Lowering the rate *now* changes nothing. Start anew.

# %% [markdown]
# ## Exercises
#
# One problem, three times: be the optimizer. You get a starting weight and the gradients of some steps, and return
# the weight after the last of them. The answer is compared with `torch.optim`, fed the same gradients.
#
# ### Exercise · worked
#
# Plain SGD.


# %%
def plain(w, gradients, lr):
    for g in gradients:
        w = w - lr * g  # a new tensor: the caller's weight stays as it was
    return w


# %%
gradients = list(torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
opt = torch.optim.SGD([weight], lr=0.1)
for g in gradients:
    weight.grad = g
    opt.step()
assert torch.allclose(plain(torch.ones(3, dtype=torch.float64), gradients, 0.1), weight, rtol=0, atol=1e-12)
print("twenty steps: the same within 1e-12 (float64)")

# %% [markdown]
# ### Exercise · faded
#
# SGD with momentum, as torch does it. Two lines are not complete.


# %%
def momentum_sgd(w, gradients, lr, beta):
    v = torch.zeros_like(w)
    for g in gradients:
        v = ... * v + g  # the old velocity fades, the gradient joins it
        w = w - ... * v
    return w


lesson.check("momentum_sgd", momentum_sgd)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With beta = 0 both lines together must be the worked example.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Torch adds the gradient in full: there is no factor (1 - beta) in front of it. That factor stands in Adam.
#
# </details>
#
# <details><summary>Solution: momentum_sgd</summary>
#
# ```python
# def momentum_sgd(w, gradients, lr, beta):
#     v = torch.zeros_like(w)
#     for g in gradients:
#         v = beta * v + g
#         w = w - lr * v
#     return w
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# Adam, without weight decay, with `eps = 1e-8`. Two averages, of the gradient and of its square; both start at zero,
# and both are corrected for that by $1-\beta^t$ at step $t = 1, 2, …$. Torch adds `eps` to the root of the
# *corrected* second average.


# %%
def adam(w, gradients, lr, beta1, beta2):
    return ...


lesson.check("adam", adam)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Five lines in the loop: two averages, two corrected averages, one step. `enumerate(gradients, start=1)` counts.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# At the first step the corrected averages are g and g²: the step is about `lr`, with the sign of g, whatever its
# size.
#
# </details>
#
# <details><summary>Solution: adam</summary>
#
# ```python
# def adam(w, gradients, lr, beta1, beta2):
#     m, s = torch.zeros_like(w), torch.zeros_like(w)
#     for t, g in enumerate(gradients, start=1):
#         m = beta1 * m + (1 - beta1) * g
#         s = beta2 * s + (1 - beta2) * g**2
#         mean, square = m / (1 - beta1**t), s / (1 - beta2**t)
#         w = w - lr * mean / (square.sqrt() + 1e-8)
#     return w
# ```
#
# </details>

# %% [markdown]
# ## Further
#
# ### The edge of stability
#
# Is 2/λ a border for a real net? A net of 32 tanh units, *full-batch* gradient descent on half the squared distance,
# lr = 0.2. λ is the top of the Hessian's spectrum, measured every 75 steps.

# %%
x512 = data.train.x[:512].flatten(1)
y512 = nn.functional.one_hot(data.train.y[:512], 10).float()


def small():
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def half_square(out, target):
    return 0.5 * (out - target).square().sum(1).mean()


# %%
net, edge, verdicts = small(), [], []
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(601):
    if step % 75 == 0:
        curve = dx.sharpness(model=net, loss_fn=half_square, batch=(x512, y512))
        edge.append(0.2 * curve.largest / 2)
        verdicts.append(curve.verdict)
    loop.train_step(net, x512, y512, half_square, opt)

# %%
series = {"lr · λ / 2": (range(0, 601, 75), edge)}
plots.show(
    plots.curves(
        series, alt="rate times curvature over two, over the steps: it comes to rest near one", x="step", y="lr · λ / 2"
    )
)
assert all(0.8 < ratio < 1.3 for ratio in edge[2:])
print("from step 150 on between 0.8 and 1.3; at the start:", verdicts[0])

# %% [markdown]
# It *sits at the edge*, a little above 1: curvature grows until the step bounces, and the bounce keeps it from growing
# further (Cohen et al., 2021). That the start lies near 1 as well is chance: at half the rate it begins near 0.5, and
# is still climbing at step 600. So lr · λ above 2 is no alarm. At the start the measurement refuses: what is not
# trained yet has another λ soon.
#
# And a healthy run with Adam on minibatches? Adam's own border is 38/λ, with λ taken after each direction has been
# divided by Adam's scale for it.


# %%
def adam_ratio(net, opt, step, x, y):
    weights = list(net.parameters())
    sizes = [(opt.state[p]["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8 for p in weights]
    scale = torch.cat([size.rsqrt().flatten() for size in sizes])
    gradient = torch.autograd.grad(loss_fn(net(x), y), weights, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    v = torch.ones_like(flat)
    for _ in range(30):  # power iteration
        hv = torch.autograd.grad(flat, weights, scale * v / v.norm(), retain_graph=True)
        v = scale * torch.cat([h.flatten() for h in hv])
    return opt.param_groups[0]["lr"] * float(v.norm()) / 38


# %%
net, ratios = small(), []
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for step in range(1, 191):
    x, y, _ = epoch[step % len(epoch)]
    loop.train_step(net, x.flatten(1), y, loss_fn, opt)
    if step % 38 == 0:
        ratios.append(adam_ratio(net, opt, step, x512, data.train.y[:512]))
print("every measurement below a tenth of Adam's border:", max(ratios) < 0.1)

# %% [markdown]
# Far below. Curvature *explains* what you saw in the playground, and it is never an alarm by itself. The test of a
# rate is another run: the same seed, a third of the rate.
#
# ### What Adam hides

# %%
lesson.predict("Adam, lr 0.1: length of the first step when the gradient is 1000", None)

# %%
moved = {}
for size in (0.001, 1.0, 1000.0):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.tensor([size], dtype=torch.float64)
    torch.optim.Adam([weight], lr=0.1).step()
    moved[size] = abs(weight.item())
print({size: round(length, 4) for size, length in moved.items()})
lesson.reveal("Adam, lr 0.1: length of the first step when the gradient is 1000", round(moved[1000.0], 6))

# %% [markdown]
# Always `lr`. Adam's rate is a *length*; SGD's is a length over a gradient. So a rate cannot be carried from one to
# the other: in short runs on the digits we found Adam best near 0.03, SGD near 0.5.
#
# A gradient that is zero is not one that is missing:

# %%
for gradient in (None, torch.zeros(1)):
    weight = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([weight], lr=0.1, weight_decay=0.1)
    weight.grad = gradient
    opt.step()
    print("no gradient:  " if gradient is None else "gradient zero:", "moved" if weight.item() != 1 else "stayed")

# %% [markdown]
# ### All causes that lead here
#
# A report's `lesson` leads to one of these lists. Each line says what happens, and what shows it.

# %% [markdown]
# <a id="initialisation"></a>Causes explained here, **initialisation** (section 2):
#
# - `vanishing-gradients`: Each layer shrinks what passes it, forwards and backwards, and little is left of the
#   gradient. Compare its RMS layer by layer, and with the size of the weights.
# - `exploding-gradients`: Each layer enlarges it. The norm at the first step is huge before any rate had a say.

# %% [markdown]
# <a id="rate"></a>Causes explained here, **rate** (sections 1, 4 to 7):
#
# - `lr-too-large`: Above 2/λ a step lands higher up the other side. The same seed at a smaller rate falls.
# - `lr-too-small`: Every weight moves, by next to nothing: an update ratio far below a thousandth.
# - `negative-lr`: A schedule went below zero: uphill, without an error.
# - `gradient-ascent`: The sign of the step is the wrong one, `+=` or `maximize=True`: the same batch rises.
# - `clip-too-tight`: Nearly every step is clipped, so the clip is the learning rate. Look at the norm before clipping.
# - `clip-out-of-order`: Clipped after the step, or before backward: the optimizer saw the gradient unclipped.

# %% [markdown]
# <a id="schedule"></a>Causes explained here, **schedule** (sections 8 and 9):
#
# - `scheduler-before-optimizer`: The first rate is never used; section 9 shows torch's warning.
# - `scheduler-per-batch`: A schedule counted in epochs is stepped at each batch: its decay is over within an epoch.
# - `scheduler-of-another-optimizer`: It moves the rate of an optimizer that does not train.
# - `cosine-past-tmax`: After T_max steps the cosine rises again.
# - `lambda-returns-lr`: LambdaLR wants a *factor*. A function that returns the rate gives rate squared.
# - `warmup-zero-division`: step / warmup_steps with no warm-up steps: the rate is NaN, or the run ends.

# %% [markdown]
# <a id="optimizer"></a>Causes explained here, **optimizer** (sections 3 and 9, and above):
#
# - `not-in-optimizer`: A parameter with a gradient that no group holds: it never moves.
# - `optimizer-stale-head`: A layer replaced after the optimizer was built: the optimizer moves the old one.
# - `optimizer-recreated-each-step`: Built inside the loop, it forgets velocity and averages: each step is its first.
# - `frozen-still-decays`: Frozen by zeros: weight decay and momentum go on. Use None, or `requires_grad_(False)`.
# - `betas-swapped`: (0.999, 0.9): a slow mean of the gradient over a fast mean of its square.
# - `weight-decay-crushing`: lr times decay is so large that the weights shrink faster than they learn.
# - `weight-decay-on-norm`: Decay pulls the scales of normalisation layers, and biases, to zero. Group by `p.ndim`.
# - `ema-name-mismatch`: The averaged copy is matched by names that a wrapper has changed: some are never updated.
# - `ema-buffers-stale`: The averaged copy has new weights and the old running statistics of BatchNorm.

# %% [markdown]
# <a id="afterwards"></a>Causes explained here, **afterwards**: what a file that is left still tells. `dxdy inspect`
# reads a checkpoint, or a table with a loss in it.
#
# - `loss-spike`: One step up and back at once: a bad batch. Print its samples.
# - `loss-spike-decays`: Up at once, down slowly: the weights were thrown off, and learn again. The rate, or a state
#   that was lost.
# - `loss-rises`: It grows by a factor a step: a rate above the limit of section 5.
# - `loss-flat`: It stands at the value of a guess, ln C, from the beginning: nothing is learnt.
# - `loss-periodic`: It repeats itself every so many rows. If that is an epoch: samples learnt by heart, a mean that
#   starts anew, or no shuffling.
# - `lr-is-zero`: The rate of a group had come to zero: the schedule was over before the run was.
# - `never-stepped`: A parameter for which the optimizer holds no state, or fewer steps than for the others.
# - `weights-frozen`: Bit for bit the same in two checkpoints of one run.
# - `constant-weights`: A tensor of one value all over: as it was initialised, or switched off.
# - `dead-units`: Rows of zeros: padding, pruning, or units that no gradient held against weight decay.
# - `bn-statistics-odd`: Running statistics of no batch at all, or of a variance that is tiny or huge.

# %% [markdown]
# ## Exit ticket
#
# Three runs of the same net, the same data, three rates. Loss on the left, gradient norm on the right.


# %%
def curve(rate):
    net = fresh()
    opt = torch.optim.SGD(net.parameters(), lr=rate)
    with dx.watch(net, opt) as seen:
        for i in range(60):
            loop.train_step(net, *epoch[i % len(epoch)][:2], loss_fn, opt)
    return seen.steps


alt = "loss and gradient norm of three unlabelled runs over the steps"
figure, axes = plots.new_figure(alt, 9, 3, columns=2)
for place, (name, style) in enumerate((("A", "-"), ("B", "--"), ("C", "-."))):
    seen = curve(0.3 * 10.0 ** ((place + 1) % 3 - 1))  # too small, right, too large: in which order?
    for ax, column in zip(axes[0], ("loss", "grad_norm"), strict=True):
        ax.plot(seen.index, seen[column], style, label=name)
        ax.set(xlabel="step", ylabel=column.replace("_", " "), yscale="log")
axes[0, 0].set_ylim(0.1, 100)
axes[0, 0].legend(frameon=False)
plots.show(figure)

# %% [markdown]
# **Quiz 1.** Which rate is which?
#
# <details><summary>a) A too large, B about right, C too small.</summary>
#
# Not so: B ends where a net ends that says nothing, near ln 10. A rate that is about right does not.
#
# </details>
#
# <details><summary>b) A about right, B too large, C too small.</summary>
#
# Right. B jumps by powers of ten in its first steps and stays near ln 10. C goes the way of A, in slow motion.
#
# </details>
#
# <details><summary>c) A about right, B too small, C too large.</summary>
#
# Not so: a rate that is too small gives a smooth, slow curve. B's first steps are anything but that.
#
# </details>

# %% [markdown]
# **Quiz 2.** A sweep over 0.001, 0.01 and 0.1 is best at 0.1. What next?
#
# <details><summary>a) Take 0.1.</summary>
#
# Not so: the best at the edge of a grid says only that the grid ended too early.
#
# </details>
#
# <details><summary>b) Refine between 0.03 and 0.1.</summary>
#
# Not so: nobody has looked to the right of 0.1, and there the loss may still fall.
#
# </details>
#
# <details><summary>c) Add 0.3 and 1, until a rate is worse.</summary>
#
# Right. Only when both neighbours are worse has the best been bracketed, and you have seen the cliff.
#
# </details>

# %% [markdown]
# **Quiz 3.** A run with SGD at 0.1 is to get momentum 0.9. With which rate do you begin?
#
# <details><summary>a) 0.19, since momentum bears 1.9 times as much.</summary>
#
# Not so: that is the border of stability. It would also be nineteen times the effective step of before.
#
# </details>
#
# <details><summary>b) 0.01, and a few short runs around it.</summary>
#
# Right. Each gradient acts 1/(1-0.9) = ten times in the end, so a tenth is the same effective step. Then measure.
#
# </details>
#
# <details><summary>c) 0.1: momentum does not change the rate.</summary>
#
# Not so: along a steady gradient the velocity grows to ten times the gradient.
#
# </details>

# %% [markdown]
# **Open task.** Break a run by its rate, its schedule or its start, and say in one sentence why it fails. Predict its
# status first: *completed* or *diverged*? The run stays on record, whatever becomes of it.

# %%
change = {}  # your field and its value, as in {"lr": 30.0, "optimizer": "sgd"}
mine = dx.train(config.override({"max_steps": 20, **change}))
print("steps on record:", len(mine.steps) > 0, "  status told:", mine.status in ("completed", "diverged"))

# %%
lesson.score()

# %%
playground.score

# %%
dx.result(
    limit_sgd=round(limits["sgd"], 3),
    limit_momentum=round(limits["momentum"], 3),
    limit_nesterov=round(limits["nesterov"], 3),
    first_strip=first,
    activation_power=power,
    bracket=bracket is not None,
    best_over_low=round(best / low, 2),
    best_loss=round(min(mean.values()), 3),
    sweep_runs=on_record,
    at_edge=winner in (min(mean), max(mean)),
    forgotten_beta=same,
    edge=round(edge[-1], 2),
    adam_share=round(max(ratios), 3),
    walk_nearer=nearer,
)

# %% [markdown]
# **Sources.**
#
# - G. Goh: *Why Momentum Really Works*, Distill 2017. https://distill.pub/2017/momentum/ (the bowl, exactly)
# - D. Kingma, J. Ba: *Adam: A Method for Stochastic Optimization*, 2014. https://arxiv.org/abs/1412.6980
# - L. Smith: *Cyclical Learning Rates for Training Neural Networks*, 2015. https://arxiv.org/abs/1506.01186 (the range
#   test)
# - J. Cohen and others: *Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability*, 2021.
#   https://arxiv.org/abs/2103.00065
# - V. Godbole and others: *Deep Learning Tuning Playbook*, 2023. https://github.com/google-research/tuning_playbook
