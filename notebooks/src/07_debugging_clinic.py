# %% [markdown]
# # 07 · The debugging clinic
#
# **Question.** Which stage is at fault: data, forward, loss, backward, update?
#
# **You will**
# - probe the five stages by hand, in their order, with a few lines of torch each
# - trace a NaN to the first value that was not finite, in time and in stage
# - tell four runs apart whose loss does not move
# - name the stage of ten unlabelled runs from plots and evidence, and be scored
# - read a report, and say when one of torch's own tools is the better one
#
# **Know before.** The graph (01), the hand check (02), the baseline with its update ratio (03), how a rate is chosen
# (05).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU.
#
# **data** → **forward** → **loss** → **backward** → **update** → comm
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>A step with a GradScaler also clips. In which order do the five calls stand, and why?</summary>
#
# `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`, clip, `scaler.step(optimizer)`, `scaler.update()`.
# Before `unscale_` the gradients are still multiplied by the scale, 65,536 at first, and a clip there acts on that.
#
# </details>
#
# <details><summary>k micro-batches, each loss divided by k: when is that the gradient of the large batch?</summary>
#
# When the micro-batches are equal in size and each loss is a mean. In general: sum the losses, and divide by the total
# count of what was averaged. With BatchNorm or dropout it never is.
#
# </details>
#
# <details><summary>Why does bfloat16 need no loss scaling, and what does it lose instead?</summary>
#
# It has the range of float32, so small gradients do not underflow. It has few digits: 256 + 1 is 256. A weight stands
# still once its update is below half the spacing of its neighbours.
#
# </details>

# %% tags=["parameters"]
seed = 0
runs = 10

# %%
import math
import string
import sys
import warnings

import pandas as pd
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.runs.environment import in_live_notebook
from dxdy_nb.runs.lessons import NOTEBOOKS

sys.path.append(str(NOTEBOOKS))  # the clinic's runs lie beside the notebooks
import clinic_runs as clinic

if not 1 <= runs <= len(clinic.PATIENTS):
    raise dx.DxdyError(f"runs: expected 1 to {len(clinic.PATIENTS)}, got {runs}")
dx.RunConfig(seed=seed)  # refuses what makes no sense, before anything runs
torch.set_num_threads(1)
lesson = Lesson("07_debugging_clinic")

# %% [markdown]
# ## 1 · Why there is an order
#
# A healthy set-up: digits, a net of three linear layers, cross-entropy, SGD. Now one pixel of one picture is damaged,
# and one usual step is made.

# %%
run = clinic.classifier(seed)
model, loss_fn, optimizer = run["model"], run["loss_fn"], run["optimizer"]
x, y = next(iter(run["loader"]))
x[5, 0, 3, 3] = float("nan")

# %%
lesson.predict("How many of the 6,570 weights are NaN after that step?", None)

# %%
optimizer.zero_grad()
out = model(x)  # (64, 10)
loss = loss_fn(out, y)
loss.backward()
optimizer.step()

# %%
weights = list(model.parameters())
places = {"data": [x], "forward": [out], "loss": [loss], "backward": [p.grad for p in weights], "update": weights}
for stage, tensors in places.items():
    bad = sum(int((~t.isfinite()).sum()) for t in tensors)
    print(f"{stage:8}  {bad:5,} of {sum(t.numel() for t in tensors):5,} values are not finite")
lesson.reveal("How many of the 6,570 weights are NaN after that step?", bad)

# %% [markdown]
# All of them: each gradient is a sum over the batch, and one NaN among the summands is enough. Somebody who looks at
# the weights sees a wreck. Somebody who looks at the loss suspects the loss. Only the first line of the five is the
# fault; the other four are its echo.
#
# Hence the order of this workbook, **data → forward → loss → backward → update**, and its rule: *ask from left to
# right, and stop at the first stage that breaks.*

# %% [markdown]
# ## 2 · Five probes by hand
#
# Each probe is a short function. It takes a set-up (a dictionary: model, loss, loader, optimizer, step) and returns
# what it saw. First, a healthy run to compare with.


# %%
def steps(run, epochs=3):
    model, loss_fn, optimizer = run["model"], run["loss_fn"], run["optimizer"]
    for _ in range(epochs):
        for x, y in run["loader"]:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            yield


# %%
run = clinic.classifier(seed)
with dx.watch(run["model"], run["optimizer"]) as w:
    await dx.live(w).run(steps(run))

# %% [markdown]
# Loss from ln 10 = 2.3 downwards; every parameter has a gradient; updates of about a thousandth to a hundredth of the
# weights. That is what nothing looks like.
#
# ### Data: read an epoch
#
# Are all values finite? Are the labels the numbers that the loss can take? Is there variety: several classes in a
# batch, another batch at each step?


# %%
def read_epoch(run):
    xs, ys = zip(*run["loader"], strict=True)
    x, y = torch.cat(xs), torch.cat(ys)
    classes = not y.is_floating_point()  # numbers that name a class, not amounts
    return {
        "values not finite": int((~x.isfinite()).sum()),
        "labels": f"{y.min()} to {y.max()}" if classes else "amounts",
        "labels a batch": round(sum(len(b.unique()) for b in ys) / len(ys)) if classes else "-",
        "repeated batches": len(xs) - len({b.numpy().tobytes() for b in xs}),
    }


read_epoch(clinic.classifier(seed))

# %% [markdown]
# Labels 0 to 9, and ten outputs. What if a file counts its classes from 1?

# %%
lesson.predict("A label 10 for ten outputs, on a CPU: the name of the error", None)

# %%
try:
    nn.functional.cross_entropy(torch.zeros(2, 10), torch.tensor([1, 10]))
except IndexError as error:
    print(type(error).__name__, "-", error)
    name = type(error).__name__
lesson.reveal("A label 10 for ten outputs, on a CPU: the name of the error", name)

# %% [markdown]
# <details><summary>How to read it</summary>
#
# "Target" is torch's word for the label, and the bounds are those of the class axis: 0 to 9. On a CPU the message names
# the label. On a GPU the same fault is a *device-side assert*: it is reported later than it happens, often at an
# innocent line, and no further CUDA call works in that process. Section 7 says what to do then.
#
# </details>
#
# ### Forward: the mode, twice, and alone
#
# Four questions about the model, without any loss. In which mode does it train? In evaluation mode, do two calls agree?
# Does the answer for a picture stay the same when the *other* pictures of the batch are replaced? And is there a ReLU
# layer whose units are off for every picture?


# %%
def look_forward(run):
    model, (x, _), off = run["model"], next(iter(run["loader"])), [0.0]
    mode = "train" if model.training else "eval"
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda m, i, o: off.append((o == 0).all(0).float().mean().item()))
    model.eval()
    with torch.no_grad():
        once, again = model(x), model(x)
        torch.manual_seed(0)  # whatever is random is the same in the next two
        usual = model(x)
        torch.manual_seed(0)
        others = model(torch.cat([x[:1], x[1:].flip(3)]))
    return {
        "outputs not finite": int((~once.isfinite()).sum()),
        "trains in mode": mode,
        "eval: twice the same": torch.equal(once, again),
        "eval: same with others": torch.allclose(usual[0], others[0], atol=1e-5),
        "units always off": f"{max(off):.0%}",
    }


look_forward(clinic.classifier(seed))

# %% [markdown]
# A break: dropout as a function, which nobody tells the mode.


# %%
class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.2)  # training=self.training is missing


broken = clinic.classifier(seed)
broken["model"].insert(3, Dropped())
look_forward(broken)["eval: twice the same"]

# %% [markdown]
# Its training curve shows nothing: in training dropout is meant. Only the second call in evaluation mode tells.
#
# ### Loss: right answer, wrong answer, first answer
#
# A loss is a judge. Show it a perfect answer and a wrong one before you let it judge a model: the perfect one must cost
# nothing (or nearly), and less than the wrong one. Then its first verdict on the untrained model: about ln C for C
# classes, since a net that knows nothing gives each about 1/C.
#
# What a perfect answer *is* depends on what the model returns. Rows that sum to 1 are probabilities; anything else,
# here, is logits.


# %%
def look_loss(run):
    model, loss_fn, (x, y) = run["model"], run["loss_fn"], next(iter(run["loader"]))
    out = model(x)
    right = y.reshape(-1, 1)
    if not y.is_floating_point():
        probabilities = torch.allclose(out.sum(1), torch.ones(len(out)), atol=1e-4)
        right = (1.0 if probabilities else 20.0) * nn.functional.one_hot(y, 10)
    return {
        "loss at a right answer": f"{loss_fn(right, y):.1f}",
        "loss at others' answers": f"{loss_fn(right.roll(1, 0), y):.1f}",
        "first loss": f"{loss_fn(out, y):.1f}",
    }


look_loss(clinic.classifier(seed))

# %% [markdown]
# A break that gives no warning and still trains: the model ends in a softmax, and `CrossEntropyLoss` takes another one.
# The best it can say is 1 for the right class and 0 for the nine others.

# %%
lesson.predict("The lowest loss that this model can reach", None)

# %%
best = nn.functional.one_hot(torch.tensor([3]), 10).double()
floor = nn.functional.cross_entropy(best, torch.tensor([3])).item()
assert abs(floor - math.log(1 + 9 / math.e)) < 1e-12
lesson.reveal("The lowest loss that this model can reach", round(floor, 4))

# %% [markdown]
# By pen: the second softmax makes $e/(e+9)$ of the 1, and $-\ln\frac{e}{e+9}=\ln(1+9/e)=1.4612$. No training gets
# below.
#
# Nor does it get there quickly. How much of the gradient at the right logit is left, when all ten logits are 0? Without
# the extra softmax it is *softmax minus one-hot*: $0.1-1=-0.9$. The extra one multiplies by its Jacobian,
# $\mathrm{diag}(p)-pp^T$, which at $p=1/10$ is $0.1$ on vectors that sum to zero: $-0.09$. Pen, finite difference and
# autograd, in float64:


# %%
def twice(z):
    return nn.functional.cross_entropy(z.softmax(0)[None], torch.tensor([3]))


z = torch.zeros(10, dtype=torch.float64, requires_grad=True)
(gradient,) = torch.autograd.grad(twice(z), z)
h = 1e-5 * torch.eye(10, dtype=torch.float64)[3]
difference = (twice(z + h) - twice(z - h)) / 2e-5
assert abs(gradient[3] + 0.09) < 1e-12
assert abs(difference - gradient[3]) < 1e-9
print(f"autograd {gradient[3]:.4f}, finite difference {difference:.4f}, pen {-0.09:.4f}")

# %% [markdown]
# A tenth of the signal, and a floor at 1.46: this is how a run becomes "a bit slow" for weeks.
#
# ### Backward: who has a gradient, and is it this batch's?
#
# Take three real steps. At the third, ask autograd for the gradient of this batch alone, before the step; then look at
# what the step left in `.grad`. None, zero, not finite? And is what the optimizer used equal to what this batch gave?
# (Measured on the first weight: 1 is right; 0 means thrown away; 2 means something old is in it.)


# %%
def look_backward(run):
    model, loss_fn, weights = run["model"], run["loss_fn"], list(run["model"].parameters())
    for step, batch in zip(range(3), run["loader"], strict=False):
        torch.manual_seed(step)  # dropout draws the same in both passes
        own = torch.autograd.grad(loss_fn(model(batch[0]), batch[1]), weights)
        torch.manual_seed(step)
        run["train_step"](model, batch, run["optimizer"], loss_fn, step)
    used = [p.grad for p in weights]
    there = [g for g in used if g is not None]
    rms = [g.square().mean().sqrt() for g in own if g.dim() > 1]
    return {
        "without a gradient": len(used) - len(there),
        "gradient zero": sum(not g.any() for g in there),
        "gradient not finite": sum(not g.isfinite().all() for g in there),
        "used / own": f"{used[0].norm() / own[0].norm():.1f}" if used[0] is not None else "0.0",
        "RMS, first / last layer": f"{rms[0] / rms[-1]:.0e}",
    }


look_backward(clinic.classifier(seed))

# %% [markdown]
# A break: the step forgets to clear.


# %%
def never_clears(model, batch, optimizer, loss_fn, step):
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


look_backward(clinic.classifier(seed) | {"train_step": never_clears})["used / own"]

# %% [markdown]
# More than one batch is in there.
#
# ### Update: who moved, by how much, and downhill?
#
# Copy the weights, step, subtract. Then the same batch again, seven times: its loss must fall.


# %%
def look_update(run):
    model, loss_fn, optimizer = run["model"], run["loss_fn"], run["optimizer"]
    batch, losses, weights = next(iter(run["loader"])), [], list(run["model"].parameters())
    before = [p.detach().clone() for p in weights]
    for step in range(8):
        torch.manual_seed(0)  # the same dropout in each
        losses.append(run["train_step"](model, batch, optimizer, loss_fn, step).item())
        if step == 0:
            moves = [p.detach() - b for p, b in zip(weights, before, strict=True)]
    ratios = [float(m.norm() / b.norm()) for m, b in zip(moves, before, strict=True) if b.dim() > 1]
    return {
        "did not move": sum(not m.any() for m in moves),
        "largest update ratio": f"{max(ratios):.0e}",
        "same batch falls": losses[-1] < losses[0] - 1e-4,
    }


look_update(clinic.classifier(seed))

# %% [markdown]
# A break: the head was replaced after the optimizer had been built. It gets gradients; the optimizer moves the old one,
# which belongs to no model any more.

# %%
broken = clinic.classifier(seed)
broken["model"][5] = nn.Linear(32, 10)
look_update(broken)["did not move"]

# %% [markdown]
# Two: the weight and the bias of the new head. And the loss falls all the same, because the other layers learn around
# it. But for the label, which torch refuses, each of these breaks leaves a plausible curve. Five probes find them, in
# eighty lines of torch.

# %% [markdown]
# ## 3 · Triage: the loss is NaN
#
# Ask two things, in this order: *when* was the first value that is not finite, and *where* in the step did it stand?


# %%
def first_bad(run):
    model, loss_fn, optimizer = run["model"], run["loss_fn"], run["optimizer"]
    for step, (x, y) in enumerate(run["loader"]):
        optimizer.zero_grad()
        out = model(x)
        loss = loss_fn(out, y)
        loss.backward()
        places = {"data": [x], "forward": [out], "loss": [loss], "backward": [p.grad for p in model.parameters()]}
        optimizer.step()
        places["update"] = list(model.parameters())
        for place, tensors in places.items():
            if not all(t.isfinite().all() for t in tensors):
                return step, place
    return None


# %% [markdown]
# Five runs that end in NaN. What is wrong with each stands beside it:

# %%
ill = {
    "a picture holds a NaN": clinic.one_bad_sample,
    "0 / 0 at a pixel that is always blank": clinic.blank_pixels,
    "the logarithm of a share of 0": clinic.shares,
    "the root of a variance of 0": clinic.root_at_zero,
    "a learning rate of 2": clinic.rate_too_large,
}

# %% [markdown]
# Four of them say themselves where they stand. Predict the last one.

# %%
lesson.predict("A learning rate of 2: the first value that is not finite stands in", None)

# %%
found = {name: first_bad(make(seed)) for name, make in ill.items()}
for name, (step, place) in found.items():
    print(f"{name:38} first in {place:8}", "at once" if step == 0 else "later")
lesson.reveal("A learning rate of 2: the first value that is not finite stands in", found["a learning rate of 2"][1])

# %% [markdown]
# The rate is a fault of the *update*, and its first infinity is in the *loss* (with some seeds in *forward*): the
# square of a large but finite output is too large for float32. The place alone accuses an innocent. The time before it
# does not. Here is the largest output of two of the runs, step by step, up to the last finite one.


# %%
def largest_outputs(run):
    sizes = []
    for x, y in run["loader"]:
        sizes.append(run["model"](x).detach().abs().max().item())
        run["train_step"](run["model"], (x, y), run["optimizer"], run["loss_fn"], 0)
    return [size for size in sizes if math.isfinite(size)]


two = ("a picture holds a NaN", "a learning rate of 2")
series = {name: largest_outputs(ill[name](seed)) for name in two}
alt = "largest output over the steps: one run stays at an ordinary size until it ends, one climbs through powers of ten"
curves = {name: (range(len(sizes)), sizes) for name, sizes in series.items()}
plots.show(plots.curves(curves, alt=alt, x="step", y="largest |output|", log_y=True))

# %% [markdown]
# **A jump** from ordinary values to NaN belongs to the stage where it stands. **A climb** over several steps belongs to
# the update: a rate too large, a missing clip (or, in half precision, a loss scale: lesson 06). The fault lies
# before the NaN, in the steps that made it.
#
# A bad sample is named by its ids, an operation by its line. For backward torch has the tool: `detect_anomaly` runs
# each backward function, looks for NaN in what it returns, and tells the forward line that made it. The loss of the
# fourth run takes the root of a variance, $\sqrt{\mathrm{var}}$, at var = 0.

# %%
lesson.predict("detect_anomaly accuses SqrtBackward0 or VarBackward0", None)

# %%
run = clinic.root_at_zero(seed)
x, y = next(iter(run["loader"]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        with torch.autograd.detect_anomaly():
            run["loss_fn"](run["model"](x), y).backward()
    except RuntimeError as error:
        print(type(error).__name__, "-", error)
        accused = str(error).split("'")[1]
lesson.reveal("detect_anomaly accuses SqrtBackward0 or VarBackward0", accused)

# %%
forward_lines = str(caught[-1].message).splitlines()
print(next(line.strip() for line in forward_lines if "sqrt" in line))

# %% [markdown]
# The slope of a root at 0 is *infinite*, and anomaly mode looks for NaN only. The variance's rule then multiplies: zero
# times infinity is NaN. So the function that is named is the first with a *NaN*; look at the ones before it in the
# same line for the infinity. The cure is to keep the root away from 0: `(var + 1e-6).sqrt()`.
#
# The price: it keeps a Python traceback for every node and looks at every gradient. A step of this net takes about five
# times as long under it. Switch it on for one batch, never for a run.

# %% [markdown]
# ## 4 · Triage: the loss does not move
#
# Four runs, one curve: ln 10, and no way down.


# %%
def unowned(seed):
    run = clinic.classifier(seed)
    run["optimizer"] = clinic.sgd(clinic.classifier(seed)["model"])  # of another model that looks the same
    return run


flat = {
    "a layer that is off": clinic.dead_units,
    "another model's optimizer": unowned,
    "a rate of 2e-8": clinic.rate_too_small,
    "a neighbour's labels": clinic.neighbours_labels,
}


# %%
def losses_of(run, batches):
    step = run["train_step"]
    return [step(run["model"], b, run["optimizer"], run["loss_fn"], 0).item() for b in batches]


alt = "four flat losses near the logarithm of ten, one on top of the other"
series = {}
for name, make in flat.items():
    run = make(seed)
    losses = losses_of(run, [batch for _ in range(3) for batch in run["loader"]])
    series[name] = (range(len(losses)), losses)
figure = plots.curves(series, alt=alt, x="step", y="loss")
figure.axes[0].set_ylim(2.0, 2.6)
plots.show(figure)

# %% [markdown]
# The curve cannot tell them apart. One more probe can, together with those of section 2: give the run *one* batch,
# again and again, and see whether it learns that by heart.

# %%
lesson.predict("Which of the four learns one batch by heart?", None)

# %%
heart = {}
for name, make in flat.items():
    run = make(seed)
    heart[name] = losses_of(run, [next(iter(run["loader"]))] * 200)[-1] < 0.1
lesson.reveal("Which of the four learns one batch by heart?", ", ".join(name for name, by in heart.items() if by))

# %%
evidence = {
    name: {**look_backward(make(seed)), **look_update(make(seed)), "one batch by heart": heart[name]}
    for name, make in flat.items()
}
pd.DataFrame(evidence).loc[["gradient zero", "did not move", "largest update ratio", "one batch by heart"]]

# %% [markdown]
# Read each column from the top and stop at the first oddity.
#
# 1. *Gradients of zero*: nothing arrives. Something on the way is off, saturated or cut: look at **forward**.
# 2. *Gradients arrive, and nothing at all moves*: the optimizer holds other tensors, or they are frozen: **update**,
#    ownership.
# 3. *Moves of a billionth*, and none where even that is below the spacing of float32: **update**, the rate (or a clip,
#    or a schedule that has reached zero).
# 4. *All moves by a usual amount, and one batch is learnt by heart*: the machine works, and there is nothing to learn.
#    Labels without signal: **data**.

# %% [markdown]
# ## 5 · Then ask the report
#
# `dx.diagnose` does such probes for you, and some that are tedious by hand. It runs real steps on your own objects,
# tries changes, and puts everything back.

# %% tags=["nbval-ignore-output"]
report = dx.diagnose(**clinic.softmax_twice(seed))
report

# %% [markdown]
# (The cell above is not compared by the checks of this workbook: it prints versions.)
#
# - **The strip** marks the first stage with an error. An *error* is proven: an exact rule broke, or a change was tried
#   and made the difference. A *hint* deserves a look and proves nothing.
# - **seen** is the evidence, **fix** the change in a line, **check** plain torch that shows the evidence without this
#   package. Use it: a report is an argument, not an authority.
# - **what was seen** says what inputs, outputs and loss were taken for; *not checked* what could not be judged.
#
# Here is its check, run by hand on the broken set-up:

# %%
finding = report.errors[0]
print(report.stage, "·", finding.cause)
print(finding.check)

# %%
run = clinic.softmax_twice(seed)
model, (x, y) = run["model"], next(iter(run["loader"]))
print("rows sum to one:", torch.allclose(model(x).sum(1), torch.ones(len(x))))

# %% [markdown]
# Two limits. The report sees only what happens in the steps that it runs: a fault of step 10,000 is not among them. And
# it finds faults, not good ideas: a set-up without an error may still learn little.

# %% [markdown]
# ## 6 · Ten patients
#
# Ten set-ups, drawn by the seed. Each has one fault or none. Look first at the curves: the loss in the upper row, below
# it the RMS gradient of each weight (dark: first layer; a vertical line: not finite).

# %%
warnings.filterwarnings("ignore", message="Using a target size")  # a fault that torch would announce among the ten
drawn = clinic.draw(seed, runs)
ward = dict(zip(string.ascii_uppercase, drawn, strict=False))


def watched(run):
    with dx.watch(run["model"], run["optimizer"]) as record:
        for _ in range(3):
            for batch in run["loader"]:
                run["train_step"](run["model"], batch, run["optimizer"], run["loss_fn"], 0)
    return record


treated = {letter: patient.make(seed) for letter, patient in ward.items()}
records = {letter: watched(run) for letter, run in treated.items()}


# %%
def draw_patient(upper, lower, name, record):
    losses = record.steps["loss"]
    upper.plot(losses.index, losses)
    upper.set_title(name, fontsize=10)
    for step in losses.index[~losses.map(math.isfinite)]:
        upper.axvline(step, color=plots.PALETTE[1], linewidth=0.8)
    rms = plots.root_mean_square(record.gradients["norm"], record.sizes).filter(like="weight")
    for place, column in enumerate(rms):
        lower.plot(rms.index, rms[column].where(rms[column] > 0), color=f"{0.8 * place / len(rms.columns):.2f}")
    if (rms > 0).any(axis=None):
        lower.set_yscale("log")
    finite = losses[losses.map(math.isfinite)]
    if finite.abs().max() > 100:
        upper.set_yscale("symlog", linthresh=10)
        upper.set_ylim(finite.min(), finite.max())
        upper.set_yticks(upper.get_yticks()[::8])
    for ax in (upper, lower):
        ax.tick_params(labelsize=6)
        ax.minorticks_off()


# %%
across = 5
rows = 2 * math.ceil(len(ward) / across)
alt = "for each patient the loss, and below it the size of the gradient of each weight, over the steps"
figure, axes = plots.new_figure(alt, 11, 2 * rows, rows, across)
for ax in axes.flat:
    ax.set_axis_off()
for row in range(0, rows, 2):
    axes[row, 0].set_ylabel("loss")
    axes[row + 1, 0].set_ylabel("RMS gradient")
for place, (name, record) in enumerate(records.items()):
    row, column = 2 * (place // across), place % across
    for ax in axes[row : row + 2, column]:
        ax.set_axis_on()
    draw_patient(axes[row, column], axes[row + 1, column], name, record)
plots.show(figure)

# %% [markdown]
# Then the evidence: your own five probes on each, and at the end whether the loss on digits kept apart has fallen by a
# fifth after three epochs. Read each column from the top, and stop at the first oddity. (A NaN is not equal to itself,
# so it is neither *twice the same* nor *same with others*; and `used / own` is nan where both are zero.)


# %%
def held_out(run):
    with torch.no_grad():
        losses = [run["loss_fn"](run["model"].eval()(x), y) for x, y in run["val_loader"]]
    return float(sum(losses) / len(losses))


def chart(patient, trained):
    probes = (read_epoch, look_forward, look_loss, look_backward, look_update)
    seen = {
        (stage, name): value
        for stage, probe in zip(clinic.STAGES, probes, strict=False)
        for name, value in probe(patient.make(seed)).items()
    }
    return seen | {("", "held-out loss falls"): held_out(trained) < 0.8 * held_out(patient.make(seed))}


charts = pd.DataFrame({letter: chart(patient, treated[letter]) for letter, patient in ward.items()})
charts

# %% [markdown]
# Now name the stage of each: `data`, `forward`, `loss`, `backward`, `update` or `healthy`. Two more hints before you
# write. A row can be odd because an earlier one is. And one kind of fault leaves all rows in order but the last (if it
# was drawn).

# %%
said = {"A": None, "B": None, "C": None, "D": None, "E": None, "F": None, "G": None, "H": None, "I": None, "J": None}

# %% [markdown]
# Ask the report about all of them; then see how you did, patient by patient. An answer you did not give stays folded.

# %%
reports = {letter: dx.diagnose(**patient.make(seed)) for letter, patient in ward.items()}
stages = {letter: report.stage or "healthy" for letter, report in reports.items()}
right = sum(stages[letter] == patient.stage for letter, patient in ward.items())
causes = {letter: {finding.cause for finding in report.errors} for letter, report in reports.items()}
missed = sum(patient.stage != "healthy" and patient.cause not in causes[letter] for letter, patient in ward.items())

# %%
for letter, patient in ward.items():
    display(clinic.verdict(lesson, letter, said.get(letter), patient))

# %%
mine = sum(said.get(letter) == patient.stage for letter, patient in ward.items())
print(f"your answers: {mine} of {len(ward)} stages   the report: {right} of {len(ward)}")

# %% [markdown]
# `reports["A"]` shows the whole report of a patient. Where you and it disagree, run its *check*.
#
# In a live notebook this cell gives you a drop-down with more patients: for each the five panels and the chart. Answer
# with the second drop-down, and set it back before you take the next. Anywhere else the cell shows one patient.


# %%
def visit(patient, stage="not named yet"):
    next_one = clinic.draw(seed, len(clinic.PATIENTS))[patient - 1]
    run = next_one.make(seed)
    plots.show(plots.training(watched(run)))
    display(pd.Series(chart(next_one, run)).to_frame(patient))
    if stage in clinic.STAGES:
        display(clinic.verdict(lesson, f"number {patient}", stage, next_one), dx.diagnose(**next_one.make(seed)))


more = list(range(min(runs, len(clinic.PATIENTS) - 1) + 1, len(clinic.PATIENTS) + 1))
if in_live_notebook():
    import ipywidgets

    ipywidgets.interact(visit, patient=more, stage=["not named yet", *clinic.STAGES])
else:
    visit(more[0])

# %% [markdown]
# ## 7 · When torch's own tool is the better one
#
# A report names the stage. Torch's tools name the line. First the stage, then the line.
#
# - **A NaN made in backward**: `torch.autograd.detect_anomaly()`, for one batch. Price: about five times the time here.
# - **"device-side assert triggered"** (CUDA): nearly always an index out of range, a label or a token. Run the same
#   batch on the CPU: the message of section 2 names it. The process that saw the assert is lost; start a new one.
# - **A CUDA error at a line that looks innocent**: set `CUDA_LAUNCH_BLOCKING=1` before Python starts. CUDA calls return
#   before the work is done, so a traceback shows where the program *was* when the error arrived. With it every call
#   waits, and the traceback is right. Price: all overlap of CPU and GPU.
# - **Out of memory, or memory that grows** (CUDA): `torch.cuda.memory._record_memory_history()` first, at the end
#   `torch.cuda.memory._dump_snapshot("snapshot.pickle")`; pytorch.org/memory_viz draws each allocation with its stack.
#   What was allocated before recording began has none.
# - **A slow step**: `torch.profiler.profile()` over a few steps gives the time of each operation, CPU and GPU.
#   Recording slows the steps down, so leave the first ones out and compare shares, not seconds.
# - **A wrong gradient**: `torch.autograd.gradcheck` in float64, on a few inputs (lesson 02).
#
# (The lines on CUDA follow torch's documentation: this lesson runs on the CPU.)

# %% [markdown]
# ## Exercises
#
# One problem, three times: from the values of one step, name the first stage that breaks.
#
# ### Exercise · worked
#
# The run with the root of a variance, once more, line by line. Stage by stage, from the left:

# %%
run = clinic.root_at_zero(seed)
x, y = next(iter(run["loader"]))
out = run["model"](x)
loss = run["loss_fn"](out, y)
loss.backward()
grads = [p.grad for p in run["model"].parameters()]

# %%
assert x.isfinite().all()  # data: in order
assert out.isfinite().all()  # forward: in order
assert loss.isfinite()  # loss: in order
assert not all(g.isfinite().all() for g in grads)  # backward: here it is
print("backward")

# %% [markdown]
# ### Exercise · faded
#
# The same as a function, for any step: `"data"`, `"forward"`, `"loss"`, `"backward"` or `"none"`. Two lines are
# missing.


# %%
def first_nonfinite(x, out, loss, grads):
    places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
    bad = [place for place, tensors in places.items() if ...]  # a value that is not finite, in any of its tensors
    return ... if bad else "none"  # which one?


lesson.check("first_nonfinite", first_nonfinite)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A tensor is bad when *any* of its values is, a place when *any* of its tensors is.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `t.isfinite()` is False for NaN and for both infinities. `any(... for t in tensors)` asks about each tensor in turn.
# The list keeps the order of the stages.
#
# </details>
#
# <details><summary>Solution: first_nonfinite</summary>
#
# ```python
# def first_nonfinite(x, out, loss, grads):
#     places = {"data": [x], "forward": [out], "loss": [loss], "backward": grads}
#     bad = [place for place, tensors in places.items() if any(not t.isfinite().all() for t in tensors)]
#     return bad[0] if bad else "none"
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The whole triage of one step. `grads` and `moves` (after minus before) hold an entry for each parameter. Return the
# first of these that holds:
#
# 1. `"data"`: a value of `x` is not finite, or a label of `y` is not one of 0 to `classes - 1`
# 2. `"forward"`: a value of `out` is not finite
# 3. `"loss"`: `loss` is not finite
# 4. `"backward"`: a gradient is None, or zero everywhere, or has a value that is not finite
# 5. `"update"`: a parameter did not move at all, or by something that is not finite
# 6. `"none"`


# %%
def first_stage(x, y, classes, out, loss, grads, moves):
    return ...


lesson.check("first_stage", first_stage)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One `if` a stage, each with a `return`, in the order of the list. Labels have two ends.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# Ask `g is None` before anything else about `g`. `t.any()` is True where some value is not zero (NaN counts).
#
# </details>
#
# <details><summary>Solution: first_stage</summary>
#
# ```python
# def first_stage(x, y, classes, out, loss, grads, moves):
#     if not x.isfinite().all() or y.min() < 0 or y.max() >= classes:
#         return "data"
#     if not out.isfinite().all():
#         return "forward"
#     if not loss.isfinite():
#         return "loss"
#     if any(g is None or not g.any() or not g.isfinite().all() for g in grads):
#         return "backward"
#     if any(not m.any() or not m.isfinite().all() for m in moves):
#         return "update"
#     return "none"
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# One step with a look at each stage. Put the lines in order; more than one order is right.
#
# - A: `loss.backward()`
# - B: `before = [p.detach().clone() for p in model.parameters()]`
# - C: `assert x.isfinite().all() and 0 <= y.min() and y.max() < 10`
# - D: `optimizer.step()`
# - E: `still = [n for (n, p), b in zip(model.named_parameters(), before) if torch.equal(p, b)]`
# - F: `loss = loss_fn(model(x), y)`
# - G: `missing = [n for n, p in model.named_parameters() if p.grad is None]`
# - H: `optimizer.zero_grad()`

# %%
look_order = ...  # a list of eight letters, ["…", "…", …]
lesson.check("look_order", look_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Place the four lines of a usual step first. Then ask of each look what it needs to be there already.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The label is checked before something can raise because of it. A copy of the weights is worth nothing after the step.
#
# </details>
#
# <details><summary>Solution: look_order</summary>
#
# ```python
# look_order = ["C", "H", "F", "A", "G", "B", "D", "E"]
# ```
#
# `H` may stand anywhere before `A`, `G` anywhere after `A`, `B` anywhere before `D`.
#
# </details>

# %% [markdown]
# ## Further
#
# ### Try the fix before you change your code
#
# Most fixes can be tried: made, run for some steps, judged by the rule that found the fault, and undone. The run with
# the rate of 2e-8:

# %%
report = dx.diagnose(**clinic.rate_too_small(seed))
trial = report.errors[0].try_fix()
print(report.errors[0].cause, "- confirmed:", trial.confirmed)

# %% [markdown]
# ### A fault that the order alone does not settle
#
# Two causes can leave the same evidence. Then change *one* thing on a copy and run both: a **counterfactual**. Is the
# rate of the fifth ill run really too large, or is its model wrong? The same seed, the same data, the rate a hundred
# times smaller:


# %%
def end_of(make, factor):
    run = make(seed)
    run["optimizer"].param_groups[0]["lr"] *= factor
    return losses_of(run, [b for _ in range(3) for b in run["loader"]])[-1]


as_it_is, smaller = end_of(clinic.rate_too_large, 1.0), end_of(clinic.rate_too_large, 0.01)
print("as it is, finite:", math.isfinite(as_it_is), "  a hundredth of the rate, finite:", math.isfinite(smaller))

# %% [markdown]
# One change, another outcome: the rate it was. This is what a report does where it says *error* and no rule is exact.
#
# ### All causes that lead here
#
# A report's `lesson` leads to one of these lists. Each line says what happens, and what shows it.

# %% [markdown]
# <a id="data"></a>Causes explained here, **data**:
#
# - `label-out-of-range`: A label is not one of 0 to C-1: counted from 1, or a placeholder such as -1. On a CPU torch
#   names it; see section 2.
# - `label-dtype-float`: Class numbers came as floats, as CSV readers make them. Cross-entropy takes floats for
#   *probabilities* of all classes, and raises where the shape does not fit.
# - `mask-0-255-bce`: A mask read from an image holds 0 and 255. Binary cross-entropy is made for 0 to 1; with 255 it
#   rewards endless logits.
# - `nan-in-inputs`: A few samples hold NaN or infinity. Read an epoch before the first step, and name them by id.
# - `nan-in-targets`: The same in the targets. Multiplying by a mask of zeros does not help: NaN times 0 is NaN.
# - `blank-inputs`: All samples are equal: a reader that fails quietly and returns zeros. Subtract the first sample from
#   the others.
# - `hwc-viewed-as-chw`: `view` where `permute` was meant: the channels are cut from neighbouring pixels. A picture is
#   smooth; this one is not.
# - `unnormalised-inputs`: Inputs of 0 to 255. The first layer saturates or demands a tiny rate. Standardise with
#   numbers from the training set.
# - `target-scale`: Regression targets in the hundreds, outputs near 0: most of the training goes into one bias.
# - `val-not-scaled`: Training inputs were standardised, validation inputs were not, or by other numbers. The model is
#   fine and its score is not.
# - `labels-shifted-by-one`: Each sample has its neighbour's label: a header row, a cursor that is off by one. Section 4
#   shows how it looks.
# - `labels-misaligned`: Two lists in different orders. The labels are right, and belong to other samples: no signal,
#   learnt only by heart.
# - `same-batch-forever`: `next(iter(loader))` in the loop makes a new iterator each time. Compare the batches of an
#   epoch.
# - `no-shuffle-sorted`: Sorted by class and not shuffled: each batch pulls towards one class. Count the classes of a
#   batch.
# - `same-worker-rng`: Each worker starts with a copy of one generator, so that "random" crops repeat across workers.
#   Draw one sample in several.
# - `augments-in-place`: `__getitem__` changes the stored tensor, so that each epoch sees a sample that is one
#   augmentation further away.
# - `augment-on-val`: Validation is augmented too. Two passes over it differ, and so do its scores.
# - `validates-on-training-set`: The two loaders hold the same samples. Validation then measures memory.
# - `train-val-overlap`: A part of the validation samples is in the training set: split before you duplicate, window or
#   augment.
# - `class-imbalance`: One class is so frequent that naming it always is nearly right, and the loss agrees. Look at each
#   class by itself.
# - `last-batch-of-one-bn`: N modulo batch size is 1, and BatchNorm has no variance over one sample: it raises at the
#   end of an epoch.
# - `device-mismatch`: Model and batch are on different devices. Torch raises, and names both.
# - `standardised-per-batch`: Each batch is scaled by its own mean and deviation, so a sample depends on its company.
#   Take them once, of the training set.
# - `val-column-constant`: A feature that varies in training is one number in validation: it is not known there, as the
#   target among the features.
# - `val-permuted`: Validation has other class numbers, or other channels (BGR): right on training samples, wrong there,
#   and right once they change places.

# %% [markdown]
# <a id="forward"></a>Causes explained here, **forward**:
#
# - `view-not-permute`: Axes were cut anew where they should have changed places; the samples of a batch mix. Replace
#   the others: the answer must stay.
# - `softmax-over-batch`: A softmax over axis 0 lets the samples compete. Alone, a sample gets 1.
# - `causal-leak`: A position sees the token that it has to predict. Change later tokens: earlier outputs must stay.
# - `left-in-eval`: The model is not in training mode when it trains: no dropout, and BatchNorm by running statistics.
# - `eval-mode-stuck`: The same from the first validation on: `model.eval()` there, and no `model.train()` after it.
# - `functional-dropout-eval`: `F.dropout` without `training=self.training` drops in evaluation too. Two calls differ.
# - `dropout-keep-prob`: p is what is *dropped*. p=0.9 for "keep 90 %" leaves a tenth.
# - `dropout-on-output`: The last layer drops parts of the answer, and the loss punishes what the model never said.
# - `bn-momentum-frozen`: BatchNorm's momentum here is the weight of the *new* batch. 0.99, carried over from elsewhere,
#   keeps nearly nothing; 0 never learns.
# - `frozen-bn-drifts`: requires_grad=False freezes weights, not running statistics. Those follow the new data until
#   `eval()`.
# - `norm-of-one`: A LayerNorm over one element returns its bias, whatever comes in.
# - `softmax-of-one`: A softmax over an axis of length one is 1, and its gradient is 0.
# - `missing-activation`: Linear after linear is linear. f(a) + f(b) = 2 f((a+b)/2) says so.
# - `final-relu`: The output cannot be negative, and targets are. Where all outputs are cut off, there is no gradient
#   either.
# - `dead-relu`: Units that are off for every sample: too large a step, or a bias far below zero. No gradient passes
#   them.
# - `symmetric-init`: Equal weights get equal gradients and stay equal: the layer has one unit, many times.
# - `zeros-multiplied`: Two factors start at zero. Each one's gradient is multiplied by the other, so neither leaves.
# - `exploding-init`: Activations grow from layer to layer before any training: weights not scaled by fan-in.
# - `nonfinite-activation`: Finite in, not finite out: a division, logarithm or root at its edge, or a softmax over a
#   row that is masked as a whole.
# - `repeated-layer-shared`: `[layer] * 3` is one layer listed three times, with one set of weights.
# - `unregistered-list`: Layers in a plain list are invisible to `parameters()`, to the optimizer, to `.to()`. Use
#   ModuleList.
# - `whole-forward-no-grad`: The training forward ran under `no_grad`: backward finds nothing. Print
#   `loss.requires_grad`.
# - `zero-gradient`: An operation whose slope is zero stands on the way: the gradient arrives, as 0.
# - `argmax-in-forward`: argmax returns a number without a slope, so that nothing before it gets a gradient.
# - `round-kills-gradient`: round and sign are flat nearly everywhere: gradient 0. A straight-through estimator passes
#   it on.
# - `data-inplace-wrong-grad`: An edit through `.data` changes what backward has kept. No error, another gradient
#   (lesson 01 shows it on a scalar).
# - `squeeze-batch-dim`: `squeeze()` also removes a batch of one. Name the dimension.
# - `targets-out-of-reach`: The last operation is bounded, as tanh is by 1, and many targets lie beyond.
# - `shrinks-with-batch`: Something is divided by a sum or a norm over the batch. Give each sample twice: the answers
#   shrink.
# - `ids-share-a-row`: The embedding has fewer rows than there are ids, and a clamp hides it: many words are one.
# - `reads-padding-only`: The padding mask is the wrong way round. Change the real tokens: the answer stays.
# - `last-step-read`: `out[:, -1]` of a recurrent layer is padding where sequences are padded, and one step's view for
#   the backward direction. Take the final states.
# - `exception`: The step raised something that no rule knows. The last line outside torch is where to look.

# %% [markdown]
# <a id="loss"></a>Causes explained here, **loss**:
#
# - `softmax-then-ce`: A softmax before one: a floor at ln(1 + (C-1)/e), a tenth of the signal. Section 2 computes both.
# - `sigmoid-then-bcelogits`: The same for two classes: `BCEWithLogitsLoss` takes the sigmoid itself.
# - `bce-on-logits`: The other way round: `BCELoss` is made for probabilities, and raises outside 0 to 1.
# - `nll-on-logits`: `nll_loss` takes minus the entry it is given. On logits it has no floor.
# - `kl-input-not-log`: `kl_div` expects the *logarithm* of the model's probabilities first.
# - `kldiv-swapped`: And the target second; exchanged, it is another divergence.
# - `log-softmax-over-batch`: log_softmax over axis 0: the loss compares samples, not classes.
# - `wrong-sign`: Going down takes the output away from the target. A right answer must cost less than a wrong one.
# - `mse-broadcast`: (N, 1) minus (N,) is N by N. Shuffling the targets does not change the loss.
# - `mse-on-class-index`: Squared error on class numbers claims that class 9 is far from class 1, and near 8.
# - `ce-single-logit`: Cross-entropy over one class is 0, always.
# - `class-weights-swapped`: The frequent class is weighted up, the rare one down: the order of the weights is that of
#   the indices.
# - `pos-weight-negative`: A pos_weight below zero rewards errors on positives. It is a ratio of counts.
# - `dice-counts-eps-twice`: The smoothing term enters at the wrong place, and a perfect answer costs less than nothing.
# - `labels-shifted-twice`: Next-token labels are shifted in the data and in the loss: position t is asked for t+2.
# - `labels-not-shifted`: They are shifted nowhere: position t is asked for what it sees.
# - `trains-on-padding`: Padding counts as a token to be predicted. It is easy, so that the mean looks good.
# - `accum-mean-of-means`: Each micro-batch is averaged over its own tokens: short ones weigh more (lesson 06).
# - `all-ignored`: All labels of a batch are ignore_index: a mean of nothing, 0/0.
# - `log-of-zero`: The logarithm of a probability that is exactly 0. Use a loss that works on logits.
# - `loss-rewrapped`: `torch.tensor(loss.item(), requires_grad=True)` is a new leaf: backward ends where it begins.
# - `not-for-this-loss`: A loss of torch is given what it is not defined for: 0 and 1 where it wants 1 and -1, a label
#   that is CTC's blank, a negative count.
# - `class-axis-by-view`: `view` brought the classes to axis 1 and left the memory as it was. `permute` moves them.
# - `averaged-twice`: A mean divided by the number of samples once more: gradients are as many times too small.
# - `perfect-is-not-best`: The loss gives 0 to the targets themselves and less to something else: dice on logits,
#   corners taken for centres. Print `loss_fn(y, y)`.

# %% [markdown]
# <a id="backward"></a>Causes explained here, **backward**:
#
# - `backward-missing`: No backward, so every `.grad` is None, and the optimizer does nothing, without a word.
# - `zero-grad-after-backward`: Cleared between backward and step: what was computed is thrown away.
# - `nan-gradient`: A finite loss and a gradient that is not. Section 3 finds the line.
# - `frozen-all-but-norm`: More was frozen than meant, the last layer too. Print the names that are trainable.
# - `freeze-by-module-attribute`: `module.requires_grad = False` only sets an attribute. `requires_grad_(False)`, with
#   the underscore, freezes.
# - `hook-added-each-step`: A hook registered in the loop runs once more at each step: what it does to the gradient
#   piles up.
# - `graph-kept-by-logging`: `total += loss` keeps the graph of every step alive: memory grows. Add `loss.item()`.
# - `checkpoint-computes-another`: A checkpoint computes its forward again in backward, here with other random numbers:
#   the gradient belongs to neither.
# - `collapse-to-constant`: Two branches are pulled towards each other and nothing is held fixed: one vector for all is
#   the best answer. Detach the target.

# %% [markdown]
# <a id="update"></a>Causes explained here, **update**:
#
# - `step-missing`: Gradients arrive and `optimizer.step()` is never called.
# - `manual-update-rebinds`: `p = p - lr * p.grad` makes a new tensor under the old name; the model keeps its own.
# - `weights-changed-outside`: Between two steps somebody wrote into the weights: a restored copy, an initialisation in
#   the loop.
# - `weights-changed-every-step`: The same at every step. Right for weight clipping and weight normalisation, odd for
#   anything else.
# - `tied-weights-broken`: Two tensors began equal and are not one: tied by copying, or untied by a later assignment.
# - `clips-nothing`: The norm before clipping is 0 at each step: `model.parameters()` was an iterator, and is used up.
# - `two-optimizers-one-weight`: Two optimizers own a weight and move it by one gradient: twice the step.
# - `group-setting-ignored`: Torch's optimizers read `lr` of a group, and no `lr_scale` beside it.
# - `copied-onto-itself`: The target network is loaded from itself, and never changes.
# - `ema-pushed-away`: The sign of the gap is wrong: the average runs away from the weights that it should follow.

# %% [markdown]
# <a id="reproduce"></a>Causes explained here, **reproduce**:
#
# - `eval-updates-bn`: Validation in training mode: BatchNorm's statistics learn from validation data.
# - `resume-differs`: Weights are the same after resuming, and something else is not: the scaler, the average,
#   statistics in a plain attribute that `state_dict` does not know.

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** The loss is NaN from step 212 on. The largest output at steps 207 to 211: 3, 40, 2e4, 5e9, 8e20. Which
# stage do you open first?
#
# <details><summary>a) Loss: that is where the NaN stands.</summary>
#
# Not so: it stands there because the square of a large finite number is too large. The steps before made the number.
#
# </details>
#
# <details><summary>b) Update: the outputs climb over several steps.</summary>
#
# Right. A climb is made by the steps. Look at the rate, the schedule and the clip at step 207.
#
# </details>
#
# <details><summary>c) Data: a sample in batch 212 is damaged.</summary>
#
# Not so: a damaged sample jumps. It cannot make the outputs of five batches before it grow.
#
# </details>

# %% [markdown]
# **Quiz 2.** The loss stays at ln C. Every gradient is there, every weight moves by a thousandth a step, and one batch
# is learnt by heart. What is left?
#
# <details><summary>a) The learning rate is too small.</summary>
#
# Not so: weights that move by a thousandth a step, and a batch that is learnt, rule that out.
#
# </details>
#
# <details><summary>b) A layer is frozen.</summary>
#
# Not so: it would not move, and that was looked at.
#
# </details>
#
# <details><summary>c) The labels say nothing about their inputs.</summary>
#
# Right. The machine can learn what it is shown often enough, and nothing carries over from one sample to the next.
#
# </details>

# %% [markdown]
# **Quiz 3.** A report names an error in *loss* and one in *backward*. What do you do?
#
# <details><summary>a) Mend both, then run again.</summary>
#
# Not so: two changes at once, and you will not know which of them mattered. The second error may be an echo.
#
# </details>
#
# <details><summary>b) Run the check of the first, mend it, ask again.</summary>
#
# Right. The earlier stage first, one change at a time, and the evidence before the change.
#
# </details>
#
# <details><summary>c) Begin at backward: gradients are what training is about.</summary>
#
# Not so: backward derives whatever loss it is given. A wrong loss makes odd gradients that are all correct.
#
# </details>

# %% [markdown]
# **Open task.** Make a patient. Change one field of the configuration so that the run ends in NaN, or does not move
# (`dx.RunConfig` has `lr`, `max_grad_norm`, `loss`, `init`, `optimizer` and more). Say before the run which stage the
# record will show, and how. The run is kept, whatever becomes of it.

# %%
change = {}  # your field and its value, as in {"lr": 0.1}
mine = dx.train(dx.RunConfig(seed=seed, max_steps=38, device="cpu").override(change))
ratios = mine.gradients["update_ratio"].dropna().groupby("parameter", sort=False).max()
print(f"{mine.status}; every weight moved: {bool((ratios > 0).all())}")

# %%
lesson.score()

# %%
dx.result(
    patients=len(ward),
    report_right=right,
    causes_missed=missed,
    nan_places=" ".join(place for _, place in found.values()),
    softmax_floor=round(floor, 4),
    by_heart=", ".join(name for name, by in heart.items() if by),
    accused=accused,
)

# %% [markdown]
# **Sources.**
#
# - A. Karpathy: *A Recipe for Training Neural Networks*, 2019. https://karpathy.github.io/2019/04/25/recipe/
#   (the first loss, one batch by heart)
# - *Automatic differentiation package: anomaly detection*, PyTorch documentation.
#   https://docs.pytorch.org/docs/stable/autograd.html
# - *CUDA semantics: asynchronous execution*, PyTorch notes. https://docs.pytorch.org/docs/stable/notes/cuda.html
# - *Understanding CUDA memory usage*, PyTorch documentation.
#   https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
