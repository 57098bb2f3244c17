# %% [markdown]
# # 06 · Precision and accumulation
#
# **Question.** What do AMP and gradient accumulation change, and when are they *not* equivalent?
#
# **You will**
# - compute the range and the spacing of a number format by pen, and see gradients fall below it
# - scale a loss, follow the scale through overflows and skipped steps, and say what bfloat16 loses instead
# - write the calls of a scaled step in their order, and recognise five wrong orders by what they do
# - accumulate micro-batches into the gradient of the large batch, and name four places where that fails
# - measure the memory of activations, and know what to do at out-of-memory, in order, with the price
#
# **Know before.** One step of training (03), what a learning rate does (05).
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU.
#
# data → **forward** → **loss** → **backward** → **update** → comm
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>On a bowl of curvature λ, above which learning rate does plain gradient descent diverge?</summary>
#
# Above 2/λ. A step multiplies the error by 1 - lr·λ, and beyond that rate the factor is below -1.
#
# </details>
#
# <details><summary>What does the update ratio compare, and what is its usual size?</summary>
#
# The length of the update with the length of the weights. In the first steps of a healthy run it lies somewhere
# between 1e-4 and 1e-1; near 0 the weights are frozen.
#
# </details>
#
# <details><summary>All gradients become a thousand times smaller. What does SGD do, what does Adam?</summary>
#
# SGD makes steps a thousand times smaller. Adam divides each gradient by its own recent size: its steps stay the same,
# as long as the gradient is well above `eps`.
#
# </details>

# %% tags=["parameters"]
seed = 0
precision = "fp16"
accumulation_steps = 2
steps = 120

# %%
import math
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.training import datasets

dx.RunConfig(seed=seed, max_steps=steps)  # a value that makes no sense ends the lesson here
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
if precision not in DTYPES:
    raise dx.DxdyError(f"precision: expected one of {', '.join(DTYPES)}; got {precision!r}")
if accumulation_steps not in (1, 2, 4, 8, 16):
    raise dx.DxdyError(f"accumulation_steps: expected 1, 2, 4, 8 or 16 for a batch of 64; got {accumulation_steps}")
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
lesson = Lesson("06_precision_and_accumulation")

# %% [markdown]
# The lesson has two halves that meet at the end: *how many bits* a number has (sections 1 to 5), and *how many samples*
# are in memory at a time (6 to 8). It runs on a GPU where there is one. It was built and checked without: what a GPU
# adds (speed, peak memory) is in section 10, and is not shown here.

# %% [markdown]
# # Precision
#
# ## 1 · Sixteen bits, two ways to spend them
#
# A floating-point number is a sign, an exponent and a fraction: $\pm\,1.\mathrm{fraction}\times2^{\mathrm{exponent}}$.
# The exponent's bits decide the *range*, the fraction's bits the *spacing*.
#
# | format | exponent | fraction | largest | spacing at 1 |
# |---|---|---|---|---|
# | float32 | 8 bits | 23 bits | about 3.4e38 | $2^{-23}$, 1.2e-7 |
# | float16 | 5 bits | 10 bits | 65,504 | $2^{-10}$, 0.001 |
# | bfloat16 | 8 bits | 7 bits | about 3.4e38 | $2^{-7}$, 0.008 |
#
# With $f$ bits of fraction, numbers between $2^e$ and $2^{e+1}$ lie $2^{e-f}$ apart: the spacing doubles at each power
# of two. So there is a size from which on adding 1 does nothing.

# %%
lesson.predict("256 + 1 in bfloat16", None)
# %%
lesson.predict("2048 + 1 in float16", None)
# %%
one = torch.tensor(256.0, dtype=torch.bfloat16) + 1
lesson.reveal("256 + 1 in bfloat16", one.item())
# %%
one = torch.tensor(2048.0, dtype=torch.float16) + 1
lesson.reveal("2048 + 1 in float16", one.item())

# %% [markdown]
# By pen: from $256=2^8$ on bfloat16's numbers lie $2^{8-7}=2$ apart, and 257 is half-way; ties go to the even fraction,
# which is 256. In float16 the same happens at $2^{11}$.
#
# The formula against the machine. The next number above x has the same bits plus one:


# %%
def spacing(x, dtype):
    bits = torch.tensor(x, dtype=dtype).view(torch.int16)
    return ((bits + 1).view(dtype).double() - bits.view(dtype).double()).item()


FRACTION = {torch.float16: 10, torch.bfloat16: 7}
for dtype, f in FRACTION.items():
    assert all(spacing(x, dtype) == 2.0 ** (math.floor(math.log2(x)) - f) for x in (0.001, 0.1, 1.0, 3.0, 1000.0))
print("spacing = 2^(e-f), exactly, in both formats")

# %%
alt = "spacing against size as stairs: those of the format with few digits lie higher, those of short range end early"
figure, axes = plots.new_figure(alt, width=7.5, height=3.2)
ends = {"float32": (23, -126, 127), "float16": (10, -14, 15), "bfloat16": (7, -126, 127)}
for name, (f, low, high) in ends.items():
    e = [max(low, -40), *range(max(low, -40) + 1, min(high, 30) + 2)]
    axes[0, 0].step([2.0**i for i in e], [2.0 ** (i - f) for i in e], where="post", label=name)
axes[0, 0].axhline(2.0**-24, color=plots.GREY, linestyle="--")
axes[0, 0].text(2e-11, 2.0**-23, "smallest float16 above zero", fontsize=8)
axes[0, 0].set(xscale="log", yscale="log", xlabel="size of the number", ylabel="distance to the next")
axes[0, 0].legend(frameon=False)
plots.show(figure)

# %% [markdown]
# Two ways to fail, then. float16 runs out of *range*: below $2^{-14}$ its numbers keep one distance, $2^{-24}$ or 6e-8,
# and below half of that there is only zero. bfloat16 runs out of *digits*: it has two or three.

# %% [markdown]
# ## 2 · Underflow, and a loss that is multiplied
#
# A small net, 256 digits, the forward pass in float16 by `autocast`. The gradients of the weights are float32, since
# the weights are; but on the way each gradient passes through float16 activations.
#
# A net this small does not underflow by itself: the loss is multiplied by 1e-5 to bring its gradients where those of
# large nets, long sequences and averaged losses lie. That factor is the demonstration's, and nothing else is.

# %%
data = datasets.load("digits")
x, y = data.train.x[:256].flatten(1).to(device), data.train.y[:256].to(device)
x = (x - x.mean()) / x.std()
loss_fn = nn.functional.cross_entropy


def mlp(*extra, depth=2):
    torch.manual_seed(seed)
    body = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), *extra, nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(64, 10)).to(device)


# %%
def gradient(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def half_gradient(scale):
    net = mlp()
    with torch.autocast(device, torch.float16):
        loss = 1e-5 * loss_fn(net(x), y)
    (scale * loss).backward()
    return gradient(net)


# %%
net = mlp()
(1e-5 * loss_fn(net(x), y)).backward()
full = gradient(net)
print("in float32:", int((full == 0).sum()), "of", full.numel(), "gradients are exactly zero")
lesson.predict("Share of gradients that are exactly zero with float16 activations (0 to 1)", None)

# %%
lost = (half_gradient(1) == 0).double().mean().item()
kept_share = (half_gradient(65536) == 0).double().mean().item()
assert lost > 0.9 and kept_share < 0.01
print(f"with a scale of 65536: below 1 %, {kept_share < 0.01}")
lesson.reveal("Share of gradients that are exactly zero with float16 activations (0 to 1)", round(lost, 2))

# %% [markdown]
# Nine in ten are gone, and what is left was rounded to a multiple of 6e-8. Multiply the loss by $2^{16}$ before
# `backward`, and by the chain rule every gradient is $2^{16}$ times as large on the way; divide afterwards, in float32.
# A power of two only moves the exponent, so the scaling itself rounds nothing.

# %%
alt = "histogram of gradient sizes: unscaled they lie left of what half precision holds, scaled well to its right"
figure, axes = plots.new_figure(alt, width=7.5, height=2.6)
bins = [i / 2 for i in range(-80, 31)]
for name, size in (("unscaled", full), ("times 65536", full * 65536)):
    axes[0, 0].hist(size.abs().log2().cpu().numpy(), bins=bins, alpha=0.7, label=name)
axes[0, 0].axvspan(-24, math.log2(65504), color=plots.GREY, alpha=0.5, label="what float16 holds")
axes[0, 0].set(xlabel="log2 of a gradient's size", ylabel="gradients", xlim=(-40, 17))
axes[0, 0].legend(frameon=False, loc="upper left", fontsize=8)
plots.show(figure)

# %% [markdown]
# Much of the blue lies in the grey, and was lost all the same. What passes through float16 are the gradients of the
# *activations*, one for each sample. A weight's gradient sums over 256 of them: each is far smaller, and falls first.

# %%
error = (half_gradient(65536) / 65536 - full).norm() / full.norm()
assert error < 0.01
print("scaled and divided again: within 1 % of the float32 gradient")

# %% [markdown]
# ### By pen, by finite difference, by autograd
#
# One weight, $L=c\,(wx)^2$ with $c=2^{-30}$, $w=3$, $x=2$. By pen $dL/dw=2cwx^2=24\cdot2^{-30}$, which is
# $1.5\cdot2^{-26}$: below half of $2^{-24}$. In float64 all three routes agree. In float16 it is zero, and with the
# loss times $2^{16}$ it is exact.

# %%
w = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
pen, c, h = 24 * 2.0**-30, 2.0**-30, 1e-3
(c * (w * 2) ** 2).backward()
difference = (c * ((3 + h) * 2) ** 2 - c * ((3 - h) * 2) ** 2) / (2 * h)
assert abs(w.grad.item() - pen) < 1e-12 * pen and abs(difference - pen) < 1e-9 * pen

# %%
small = torch.tensor(pen).half()
scaled = torch.tensor(65536 * pen).half()
print("in float16:", small.item(), "  scaled, then divided in float64:", scaled.double().item() / 65536 == pen)

# %% [markdown]
# ## 3 · Overflow, and steps that are skipped
#
# Nobody knows the right scale in advance. `GradScaler` starts at 65,536. When a gradient overflows it leaves the step
# out and halves the scale; after 2,000 good steps in a row it doubles it. So a few skipped steps at the start are its
# normal way to work. (It works on a CPU too. `GradScaler("cuda")` without a GPU switches itself off with only a
# warning; hence the `assert`.)
#
# A weight whose gradient is 300. float16 ends at 65,504. How many steps are skipped?

# %%
lesson.predict("Steps that are skipped before the first update", None)

# %%
weight = nn.Parameter(torch.zeros((), device=device))
optimizer = torch.optim.SGD([weight], lr=0.001)
scaler = torch.amp.GradScaler(device)
assert scaler.is_enabled()
scales = []
while weight == 0:
    optimizer.zero_grad()
    loss = weight.half() * 300
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
skipped = len(scales) - 1
print("scale after each step:", [int(scale) for scale in scales])
lesson.reveal("Steps that are skipped before the first update", skipped)

# %% [markdown]
# By pen: $300\cdot2^k\le65504$ asks for $k\le7$. From $2^{16}$ down to $2^7$ are nine halvings, each a skipped step.
#
# A skipped step is no step: a schedule that counts steps should not move on either. And a scale that keeps falling,
# below 1, is no overflow: then the gradients are NaN or infinite at any scale, and the fault lies to the left of the
# update.

# %% [markdown]
# ## 4 · bfloat16: updates that do not move
#
# bfloat16 has float32's range and needs no scaler. What it lacks is digits. Take a weight of 1 and a hundred updates of
# -0.001:

# %%
lesson.predict("1, after a hundred updates of -0.001, in bfloat16", None)

# %%
ends = {}
for name, dtype in DTYPES.items():
    number = torch.tensor(1.0, dtype=dtype)
    for _ in range(100):
        number -= 0.001
    ends[name] = number.item()
print({name: f"{end:.2f}" for name, end in ends.items()})
lesson.reveal("1, after a hundred updates of -0.001, in bfloat16", ends["bf16"])

# %% [markdown]
# Just below 1 bfloat16's numbers lie $2^{-8}=0.004$ apart. An update below half of that is rounded away, and the next
# one too. *A weight moves only if `lr·g` is above half its spacing*, about 1/500 of its size. Usual updates are a
# thousandth (03).
#
# That is why **the parameters stay float32 under autocast**, and only the arithmetic of large layers is done in sixteen
# bits. A net that *is* bfloat16 stands still in most places:

# %%
net = mlp().bfloat16()
before = [p.detach().clone() for p in net.parameters()]
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loss_fn(net(x.bfloat16()), y).backward()
optimizer.step()
same = [p == b for p, b in zip(net.parameters(), before, strict=True)]
stuck = torch.cat([s.flatten() for s in same]).double().mean().item()
assert stuck > 0.9
print("over 90 % of the weights did not move:", stuck > 0.9)

# %% [markdown]
# `dx.diagnose` names it (its batches must have the net's dtype, as in any such training):

# %%
batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)]
halves = [(a.bfloat16(), b) for a, b in batches]
report = dx.diagnose(model=net, loss_fn=loss_fn, loader=halves, optimizer=optimizer)
[finding.cause for finding in report.errors]

# %% [markdown]
# ## 5 · Who decides the dtype, and in which order to call
#
# ### Autocast's choices, operation by operation
#
# Under `autocast` each operation has its own rule. Ask it:

# %% tags=["nbval-ignore-output"]
a, b = torch.randn(8, 8, device=device), torch.randint(8, (8,), device=device)
operations = {
    "linear": lambda: nn.functional.linear(a, a),
    "matmul": lambda: a @ a,
    "a + a": lambda: a + a,
    "relu(linear)": lambda: nn.functional.linear(a, a).relu(),
    "softmax(linear)": lambda: nn.functional.linear(a, a).softmax(1),
    "layer_norm(linear)": lambda: nn.functional.layer_norm(nn.functional.linear(a, a), (8,)),
    "exp(linear)": lambda: nn.functional.linear(a, a).exp(),
    "sum(linear)": lambda: nn.functional.linear(a, a).sum(),
    "cross_entropy(linear)": lambda: loss_fn(nn.functional.linear(a, a), b),
    "mse_loss(linear)": lambda: nn.functional.mse_loss(nn.functional.linear(a, a), a),
}
with torch.autocast(device, torch.float16):
    for name, operation in operations.items():
        print(f"{name:22}  {operation().dtype}")

# %% [markdown]
# On a CPU (the stored output): matrix products become float16; these losses are computed in float32; everything else
# follows its input, so *softmax, layer_norm, exp and sum stay in float16*. On CUDA torch's documentation lists those
# four among the operations that run in float32. The table is the device's: read the one of yours. (That is why this
# cell's output is not compared when the workbook is tested.)
#
# What never changes is the parameter:

# %%
net = mlp()
with torch.autocast(device, torch.float16):
    out = net(x)
loss = loss_fn(out, y)
loss.backward()
assert {(p.dtype, p.grad.dtype) for p in net.parameters()} == {(torch.float32, torch.float32)}
print("output", out.dtype, "  loss", loss_fn(out.float(), y).dtype, "  parameters and gradients: all float32")

# %% [markdown]
# ### The right order
#
# One update, from as many micro-batches as there are. Six calls that belong together, and each has one right place:


# %%
def right(net, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()  # once for each micro-batch: the scaled gradients add up
    scaler.unscale_(optimizer)  # once: from here on the gradients are the real ones
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)  # leaves the step out if a gradient is not finite
    scaler.update()  # halves the scale then, or doubles it after many good steps


# %% [markdown]
# autocast covers forward and loss; backward runs outside of it, and uses the dtypes that the forward pass chose.
#
# ### Five wrong orders
#
# Each is one line in another place, or one line less.


# %%
def clips_first(net, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # ← before unscale_
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


# %%
def bypasses(net, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    optimizer.step()  # ← not scaler.step(optimizer), and no update


# %%
def unscales_each(net, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # ← for each micro-batch
        scaler.update()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


# %%
def clears_late(net, optimizer, scaler, micro_batches):
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.zero_grad()  # ← between backward and step
    scaler.step(optimizer)
    scaler.update()


# %%
def never_updates(net, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.autocast(device, torch.float16):
            loss = loss_fn(net(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.step(optimizer)  # ← no scaler.update()


# %% [markdown]
# What does each do to one update? The same start, the same four micro-batches, and the length of the step in units of
# the right one.


# %%
def movement(order):
    net = mlp()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler(device)
    order(net, optimizer, scaler, batches[:4])
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(net.parameters(), before, strict=True)]).double()


reference = movement(right)
lesson.predict("clips_first: is its step larger or smaller than the right one? (larger, smaller, equal)", None)

# %%
wrong = {order.__name__: order for order in (clips_first, bypasses, unscales_each, clears_late, never_updates)}
moves = {name: movement(order) for name, order in wrong.items()}
sizes = {name: (move.norm() / reference.norm()).item() for name, move in moves.items()}
away = ((moves["unscales_each"] - reference).norm() / reference.norm()).item()
answer = "smaller" if sizes["clips_first"] < 0.5 else "larger"
lesson.reveal("clips_first: is its step larger or smaller than the right one? (larger, smaller, equal)", answer)

# %%
assert sizes["clips_first"] < 1e-3 and 6e4 < sizes["bypasses"] < 7e4 and away > 0.5
assert sizes["clears_late"] == 0 and abs(sizes["never_updates"] - 1) < 0.01
for name, size in sizes.items():
    print(f"{name:14} step × {size:.1g}")

# %% [markdown]
# - `clips_first` clips a norm that is 65,536 times too large to 1, and divides what is left by 65,536. The step is
#   tens of thousands of times too small, and **silent**: the loss just falls slowly.
# - `bypasses` steps along gradients 65,536 times too large: the loss jumps at the first step.
# - `unscales_each` divides the sum so far once more at each micro-batch. In effect only the last micro-batch is left:
#   a step in another direction (off by more than half), of plausible size, and **silent**. Without its `update()` torch
#   raises.
# - `clears_late` moves nothing at all, and is **silent**. (With
#   `zero_grad(set_to_none=False)` weight decay, or a momentum that has a history, even moves the weights.)
# - `never_updates` makes one right step. What does it do at the second?

# %%
net = mlp()
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler(device)
try:
    for _ in range(2):
        never_updates(net, optimizer, scaler, batches[:4])
except RuntimeError as error:
    print(type(error).__name__, "-", str(error)[:80])

# %% [markdown]
# <details><summary>How to read it</summary>
#
# The scaler keeps a note for each optimizer: ready, unscaled, stepped. Only `update()` sets it back to ready. A second
# `unscale_` or `step` without an `update` in between finds the wrong note, and says so. The message names the call that
# came *too early*; the line to write stands before it: `scaler.update()`.
#
# </details>
#
# Three of five say nothing. `dx.diagnose` watches the events: which call came when, on which gradients.


# %%
def diagnosed(order):
    net = mlp()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler(device)

    def train_step(model, batch, optimizer, loss_fn, step):
        order(model, optimizer, scaler, list(zip(*(part.chunk(2) for part in batch), strict=True)))

    return dx.diagnose(
        model=net, loss_fn=loss_fn, loader=batches, optimizer=optimizer, scaler=scaler, train_step=train_step
    ).errors


# %%
found = {name: diagnosed(order) for name, order in wrong.items()}
for name, errors in found.items():
    print(f"{name:14} {errors[0].cause}")
assert not diagnosed(right)

# %% [markdown]
# And without a scaler? Autocast in float16, on a loss as small as that of section 2:


# %%
def small_loss(out, y):
    return 1e-5 * loss_fn(out.float(), y)


def unscaled_step(model, batch, optimizer, loss_fn, step):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        out = model(batch[0])
    loss = loss_fn(out, batch[1])
    loss.backward()
    optimizer.step()
    return loss


# %%
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
report = dx.diagnose(model=net, loss_fn=small_loss, loader=batches, optimizer=optimizer, train_step=unscaled_step)
unscaled = [finding.cause for finding in report.errors]
assert "fp16-underflow-no-scaler" in unscaled
print(*unscaled)

# %% [markdown]
# <a id="precision"></a>Causes explained here:
#
# - `fp16-underflow-no-scaler` (section 2): float16 activations without a scaler; small gradients become zero.
# - `bf16-params-stuck` (section 4): the weights themselves are bfloat16, and most updates are rounded away.
# - `clip-before-unscale`, `scaler-bypassed`, `unscale-each-micro-batch`, `scaler-update-missing` (section 5).
# - `scaler-order`: torch refuses the order of the calls itself: `unscale_` twice, `update` before `step`, a backward of
#   a loss that was never scaled.
# - `fp16-adam-eps`: the weights are float16 and so are Adam's moments; `eps=1e-8` is 0 in float16, and the step divides
#   by zero.
# - `update-not-finite`: finite gradients, and weights that are not finite after the step: a rate that is too large, or
#   an optimizer's state that overflowed.
# - `update-on-a-copy`: the update was written into a copy (`p.contiguous()` may be one), and the parameter stayed.
# - `weights-not-finite`, `optimizer-state-not-finite`, `scaler-out-of-range`: what `dxdy inspect last.pt` finds in a
#   checkpoint when the run is over. A scale below 1 was halved more than sixteen times: no scale helped.

# %% [markdown]
# # Accumulation and memory
#
# ## 6 · The gradient of a batch that does not fit
#
# Gradients *add* in `.grad`. Usually that is a trap (00). Here it is the tool: k small batches, one backward each, one
# step. With mean losses over equal parts, each divided by k, the sum is the mean over everything.


# %%
def accumulated(net, micro_batches):
    net.zero_grad()
    for x, y in micro_batches:
        loss = loss_fn(net(x), y) / len(micro_batches)
        loss.backward()
    return gradient(net)


# %%
def parts(sizes, dtype=torch.float32):
    return list(zip(x.to(dtype).split(sizes), y.split(sizes), strict=True))


def relative_error(net, micro_batches, dtype=torch.float32):
    whole = accumulated(net, parts([256], dtype)).clone()
    return ((accumulated(net, micro_batches) - whole).norm() / whole.norm()).item()


# %%
lesson.predict("float32: relative error of 4 x 64 against 256, as a power of ten (like 1e-3)", None)

# %%
exact = relative_error(mlp().double(), parts([64] * 4, torch.float64), torch.float64)
single = relative_error(mlp(), parts([64] * 4))
assert exact < 1e-12 and single < 1e-5
lesson.reveal(
    "float32: relative error of 4 x 64 against 256, as a power of ten (like 1e-3)", 10.0 ** round(math.log10(single))
)

# %% [markdown]
# The last digit of float32, because the sums run in another order; in float64 it is below 1e-12. *The same gradient*:
# so any difference in a result is not the accumulation's, unless one of the following four is at work.
#
# ## 7 · Four places where it is not the same
#
# ### BatchNorm
#
# It normalises by the mean and the variance of the samples that are in memory *together*. 64 samples have another mean
# than 256. No division repairs that, and the running averages are updated four times in place of once.

# %%
lesson.predict("BatchNorm, 4 x 64 against 256: relative error of the gradient in percent", None)

# %%
normed = mlp(nn.BatchNorm1d(64))
batchnorm = relative_error(normed, parts([64] * 4))
assert batchnorm > 0.02
lesson.reveal("BatchNorm, 4 x 64 against 256: relative error of the gradient in percent", round(100 * batchnorm))

# %% [markdown]
# LayerNorm and GroupNorm look at one sample at a time, and are the same:

# %%
layered = relative_error(mlp(nn.LayerNorm(64)).double(), parts([64] * 4, torch.float64), torch.float64)
assert layered < 1e-12
print("LayerNorm, float64: below 1e-12")

# %% [markdown]
# ### Dropout
#
# Random masks. Even from the same seed, a net with two dropout layers draws them in another order: layer by layer for
# 256 samples, or layer by layer for 64, four times. Neither gradient is wrong. They are two draws.


# %%
def dropout_error():
    net = mlp(nn.Dropout(0.3))
    torch.manual_seed(seed)
    whole = accumulated(net, parts([256])).clone()
    torch.manual_seed(seed)
    return ((accumulated(net, parts([64] * 4)) - whole).norm() / whole.norm()).item()


dropout = dropout_error()
assert dropout > 0.1
print("dropout, the same seed: differs by more than 10 %,", dropout > 0.1)

# %% [markdown]
# ### Unequal micro-batches
#
# 256 = 200 + 40 + 16. The mean over 16 samples now counts as much as the mean over 200.

# %%
lesson.predict("200 + 40 + 16, each mean divided by 3: relative error in percent", None)

# %%
unequal = relative_error(mlp().double(), parts([200, 40, 16], torch.float64), torch.float64)
lesson.reveal("200 + 40 + 16, each mean divided by 3: relative error in percent", round(100 * unequal))

# %% [markdown]
# This one can be repaired: *sum* over the micro-batch, divide by the count of the **whole** batch. `reduction="sum"`
# and one division is right for any split; `reduction="mean"` and a division by k only for equal parts.


# %%
def summed(net, micro_batches, total):
    net.zero_grad()
    for x, y in micro_batches:
        loss = loss_fn(net(x), y, reduction="sum") / total
        loss.backward()
    return gradient(net)


# %%
wide = mlp().double()
whole = accumulated(wide, parts([256], torch.float64)).clone()
repaired = (summed(wide, parts([200, 40, 16], torch.float64), 256) - whole).norm() / whole.norm()
assert unequal > 0.1 and repaired < 1e-12
print("summed, divided by 256: below 1e-12 (float64)")

# %% [markdown]
# ### Padded sequences
#
# The same trap, better hidden. A language model's loss is a mean over *tokens*, and padding (-100) does not count. So
# micro-batches with the same number of sentences hold different numbers of tokens.

# %%
torch.manual_seed(seed)
tokens, words = 64, 50
inputs, targets = torch.randint(words, (32, tokens)), torch.randint(words, (32, tokens))
for row, length in enumerate(torch.randint(4, tokens, (32,))):
    targets[row, length:] = -100
counts = [int((part != -100).sum()) for part in targets.split(1)]
print("tokens that count, in the first sentences:", counts[:4] if seed == 0 else "of other lengths with each seed")


# %%
def language_gradient(micro, repaired):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, words)).double()
    shown = 0.0
    for a, b in zip(inputs.split(micro), targets.split(micro), strict=True):
        total = loss_fn(net(a).flatten(0, 1), b.flatten(), reduction="sum")  # over the tokens that count
        mean = total / (b != -100).sum() * micro / len(inputs)
        loss = total / sum(counts) if repaired else mean
        loss.backward()
        shown += loss.item()
    return gradient(net), shown


# %%
(whole, loss_whole), (mean, loss_mean) = language_gradient(32, False), language_gradient(1, False)
padded = ((mean - whole).norm() / whole.norm()).item()
off = abs(loss_mean - loss_whole) / loss_whole
assert padded > 0.3 and off < 0.005
print("gradient off by more than 30 %:", padded > 0.3, "  reported loss off by less than 0.5 %:", off < 0.005)

# %%
fixed = (language_gradient(1, True)[0] - whole).norm() / whole.norm()
assert fixed < 1e-12
print("summed over tokens, divided by all tokens of the step: below 1e-12 (float64)")

# %% [markdown]
# The reported loss hardly moves, because a mean of means of nearly equal losses is nearly their mean. The gradient is
# another one. Trainers in wide use had this fault until 2024: nobody looks at gradients while the loss looks right.

# %%
alt = "relative error of the gradient in four places, as bars: none is near the exact case, which is not to be seen"
figure, axes = plots.new_figure(alt, width=7.5, height=2.4)
names = ["equal parts", "BatchNorm", "dropout", "unequal parts", "padded tokens"]
axes[0, 0].barh(names, [exact, batchnorm, dropout, unequal, padded], color=plots.PALETTE[0])
axes[0, 0].invert_yaxis()
axes[0, 0].set(xlabel="relative error of the gradient, accumulated against the large batch")
plots.show(figure)

# %% [markdown]
# ### What a loop gets wrong
#
# Three faults of a loop that accumulates over four micro-batches, and what `dx.diagnose(accumulation_steps=4)` says.


# %%
def loop_fault(divide=True, clear_each=False, batches_each_epoch=8):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train_step(model, batch, optimizer, loss_fn, step):
        if clear_each:
            optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        (loss / 4 if divide else loss).backward()
        if step % batches_each_epoch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    given = {"model": net, "loss_fn": loss_fn, "loader": batches[:batches_each_epoch], "optimizer": optimizer}
    return dx.diagnose(**given, train_step=train_step, accumulation_steps=4)


# %%
loops = {
    "not divided": loop_fault(divide=False),
    "cleared at each micro-batch": loop_fault(clear_each=True),
    "6 batches an epoch": loop_fault(batches_each_epoch=6),
}
for name, report in loops.items():
    print(f"{name:28} {' '.join(f'{finding.severity} {finding.cause}' for finding in report.findings)}")

# %% [markdown]
# The first is a hint, not an error: a sum may be meant, with a rate that was chosen for it.
#
# <a id="accumulation"></a>Causes explained here:
#
# - `accum-not-divided`: the gradient is k times that of the mean. SGD then steps as with k times the rate; Adam hardly
#   notices, but a clip does.
# - `accumulation-cleared`: `zero_grad` before each micro-batch: only the last one is used.
# - `accum-tail-dropped`: the epoch does not divide into windows, and what is left over is added to the next epoch's
#   first window. Step there too, and divide by the micro-batches that there are: two, divided by four, are half.
# - `reentrant-checkpoint-no-grad`: section 8.

# %% [markdown]
# ## 8 · What fills the memory
#
# Weights, gradients and the optimizer's state depend on the model. By pen, for float32 weights and Adam: 4 bytes a
# weight, 4 its gradient, 4 + 4 the two moments: 16 bytes a parameter, and *autocast changes none of them*. What grows
# with the batch is what the forward pass *saves for backward*.
#
# By pen, for our net with two hidden layers and B samples: the first layer saves its input (64 numbers a sample), each
# tanh its output (64 and 64), the loss the log-probabilities (10), the labels (8 bytes each) and one count (4 bytes).

# %%
lesson.predict("Bytes saved for backward, 256 samples", None)


# %%
def saved(net, forward):
    """Return the bytes that a forward pass saves for backward, its parameters left out."""
    own = {p.data_ptr() for p in net.parameters()}
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    loss.backward()
    return sum(size for place, size in sizes.items() if place not in own)


# %%
net = mlp()
measured = saved(net, lambda: loss_fn(net(x), y))
pen = 4 * 256 * (64 + 64 + 64 + 10) + 8 * 256 + 4
assert measured == pen
lesson.reveal("Bytes saved for backward, 256 samples", measured)

# %% [markdown]
# Now four ways to save less, on a net with eight hidden layers: half the precision, a quarter of the batch, and
# *checkpointing*, which saves only the input of each segment, and runs the segment's forward again during backward.

# %%
deep = mlp(depth=8)


def half():
    with torch.autocast(device, torch.bfloat16):
        return loss_fn(deep(x), y)


def recomputed():
    middle = checkpoint(deep[:8], x, use_reentrant=False)
    return loss_fn(deep[16](checkpoint(deep[8:16], middle, use_reentrant=False)), y)


# %%
need = {
    "float32": saved(deep, lambda: loss_fn(deep(x), y)),
    "autocast": saved(deep, half),
    "micro-batch of 64": saved(deep, lambda: loss_fn(deep(x[:64]), y[:64])),
    "checkpointing, 2 segments": saved(deep, recomputed),
}
alt = "bytes saved for backward as bars: full precision needs most, then autocast, checkpointing, a smaller batch"
figure, axes = plots.new_figure(alt, width=7.5, height=2.2)
axes[0, 0].barh(list(need), [size / 1024 for size in need.values()], color=plots.PALETTE[0])
axes[0, 0].invert_yaxis()
axes[0, 0].set(xlabel="KiB saved for backward by the forward pass, parameters left out")
plots.show(figure)

# %%
share = {name: size / need["float32"] for name, size in need.items()}
assert 0.5 < share["autocast"] < 0.7 and share["micro-batch of 64"] < 0.26
assert share["checkpointing, 2 segments"] < 0.4
print({name: f"{part:.2f}" for name, part in share.items()})

# %% [markdown]
# - *autocast* does not reach one half: the loss stays float32, and a sixteen-bit copy of each weight is saved as well.
# - *a quarter of the batch* is a quarter, nearly exactly. Its price is time: four small passes in place of one large.
# - *checkpointing* keeps two segments' inputs. While backward runs, one segment at a time is there in full as well. Its
#   price is one more forward pass, about a third of a step, if a backward costs twice a forward. Count it:

# %%
passes = []
hook = deep[0].register_forward_hook(lambda *_: passes.append(1))
recomputed().backward()
hook.remove()
print("forward passes through the first layer:", len(passes))

# %% [markdown]
# One trap. The old kind, `use_reentrant=True`, needs an input that requires a gradient. Data do not:

# %%
deep.zero_grad()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    middle = checkpoint(deep[:8], x, use_reentrant=True)
    loss = loss_fn(deep[8:](middle), y)
    loss.backward()
print(str(said[-1].message)[:67])
print("parameters without a gradient:", sum(p.grad is None for p in deep.parameters()))

# %% [markdown]
# Four layers without a gradient, and only a warning: `reentrant-checkpoint-no-grad`. Pass `use_reentrant=False`.
#
# ## 9 · Out of memory: what to do, in this order
#
# | | do | price |
# |---|---|---|
# | 1 | look for a leak: a list of losses without `.item()`, validation without `no_grad` | none |
# | 2 | a smaller batch, accumulated to the same one | time; the four places of section 7 |
# | 3 | autocast in bfloat16 (float16 with a scaler) | digits; sections 2 to 5 |
# | 4 | checkpointing | one more forward pass, about a third of a step |
# | 5 | an optimizer with less state: SGD with momentum has one moment, Adam two | another tuning (05) |
# | 6 | shard weights, gradients and state over devices | communication (09) |
#
# What does not help: `torch.cuda.empty_cache()` gives back blocks that nobody uses, and `del` of a name frees nothing
# that the graph still saves. Backward frees it, or dropping the loss.
#
# ## 10 · Your run
#
# Both halves together, in the precision and with the micro-batches of the parameters cell. One update is `right` of
# section 5, for any of the three precisions: a scaler that is switched off hands everything through.


# %%
def update(net, optimizer, scaler, x, y, dtype, k):
    optimizer.zero_grad()
    for a, b in zip(x.chunk(k), y.chunk(k), strict=True):
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            loss = loss_fn(net(a), b, reduction="sum") / len(y)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


# %%
def standardised(part):
    pixels = data.train.x
    return ((part.x - pixels.mean()) / pixels.std()).flatten(1).to(device), part.y.to(device)


train_x, train_y = standardised(data.train)


def loop(net, optimizer, scaler, dtype, k):
    torch.manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(train_y), (64,)).to(device)
        update(net, optimizer, scaler, train_x[rows], train_y[rows], dtype, k)
        yield


# %%
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
assert scaler.is_enabled() == (precision == "fp16")
with dx.watch(net, optimizer) as w:
    await dx.live(w).run(loop(net, optimizer, scaler, DTYPES[precision], accumulation_steps))

# %% [markdown]
# (Each micro-batch has a share of the loss; the picture shows their sum, which starts near ln 10.)
#
# The same seed in plain float32, one batch of 64 at a time. How far apart do the two runs end?


# %%
def accuracy(net):
    x, y = standardised(data.validation)
    with torch.no_grad():
        return (net(x).argmax(1) == y).double().mean().item()


plain = mlp()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
for _ in loop(plain, optimizer, torch.amp.GradScaler(device, enabled=False), torch.float32, 1):
    pass
mine, usual = accuracy(net), accuracy(plain)

# %%
judged = steps >= 100 and len(w.steps) == steps  # neither short nor ended by the Stop button
assert not judged or abs(mine - usual) < 0.05
print("validation accuracy within 0.05 of float32's" if judged else "ended early: nothing to compare")

# %% [markdown]
# The weights differ: each rounding leads to another one. What a run is judged by does not, here. On your own model that
# is a thing to test, not to believe: the same seeds, both precisions, and the spread between seeds (03) as the measure.
#
# ### On a GPU
#
# Speed, Tensor Cores and peak memory are a GPU's. On a CPU sixteen bits may be slower than thirty-two, and this lesson
# claims nothing about it.


# %% tags=["nbval-ignore-output"]
def on_gpu(dtype):
    big = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    wide = torch.randn(4096, 4096, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for step in range(8):
        if step == 3:  # the first ones choose algorithms and fill caches
            torch.cuda.reset_peak_memory_stats()
            start.record()
        big.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = big(wide).square().mean()
        loss.backward()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 5, torch.cuda.max_memory_allocated() / 2**20


if device == "cuda":
    for name, dtype in DTYPES.items():
        print("{}: {:.1f} ms a step, {:.0f} MiB at the peak".format(name, *on_gpu(dtype)))
else:
    print("No GPU here: speed, Tensor Cores and real peak memory are not shown.")

# %% [markdown]
# ## Exercises
#
# One problem, three times: the gradient of a large batch from micro-batches. The model is linear, `x @ w`.
#
# ### Exercise · worked
#
# Equal parts, squared error. Each mean counts the same, so each is divided by the number of parts.


# %%
def equal_parts(w, batches):
    w = w.detach().clone().requires_grad_()
    for x, y in batches:
        loss = (x @ w - y).square().mean() / len(batches)
        loss.backward()  # adds to w.grad
    return w.grad


# %%
torch.manual_seed(seed)
w0, xs, ys = torch.randn(5).double(), torch.randn(12, 5).double(), torch.randn(12).double()
once = equal_parts(w0, [(xs, ys)])
thrice = equal_parts(w0, list(zip(xs.split(4), ys.split(4), strict=True)))
assert torch.allclose(once, thrice, rtol=1e-12, atol=1e-12)
lesson.check("equal_parts", equal_parts)

# %% [markdown]
# ### Exercise · faded
#
# Parts of any size. Two lines are missing.


# %%
def any_parts(w, batches):
    w = w.detach().clone().requires_grad_()
    total = ...  # what the mean of the large batch divides by
    for x, y in batches:
        share = ... / total  # which part of the large batch is this?
        loss = share * (x @ w - y).square().mean()
        loss.backward()
    return w.grad


lesson.check("any_parts", any_parts)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the mean over the large batch as a weighted sum of the parts' means. What do the weights add up to?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The denominator must be known before the first backward: count over all parts first. How long is a part?
#
# </details>
#
# <details><summary>Solution: any_parts</summary>
#
# ```python
# def any_parts(w, batches):
#     w = w.detach().clone().requires_grad_()
#     total = sum(len(y) for _, y in batches)
#     for x, y in batches:
#         share = len(y) / total
#         loss = share * (x @ w - y).square().mean()
#         loss.backward()
#     return w.grad
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# Now cross-entropy, and labels of -100 that do not count. `w` is a matrix, `x @ w` are the logits. Return the gradient
# of the mean over all labels that count; a part may hold none. (`torch.nn.functional.cross_entropy` leaves -100 out.)


# %%
def counted_parts(w, batches):
    return ...


lesson.check("counted_parts", counted_parts)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Another denominator: not the labels that are there, but those that count.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The mean of a part without a label that counts is 0/0. The sum of nothing is 0, and harmless.
#
# </details>
#
# <details><summary>Solution: counted_parts</summary>
#
# ```python
# def counted_parts(w, batches):
#     w = w.detach().clone().requires_grad_()
#     total = sum((y != -100).sum() for _, y in batches)
#     for x, y in batches:
#         loss = torch.nn.functional.cross_entropy(x @ w, y, reduction="sum") / total
#         loss.backward()
#     return w.grad
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# One scaled step with a clip, one micro-batch. Put the seven lines in order; more than one order is right.
#
# - A: `scaler.update()`
# - B: `nn.utils.clip_grad_norm_(model.parameters(), 1.0)`
# - C: `with torch.autocast("cuda", torch.float16): loss = loss_fn(model(x), y)`
# - D: `scaler.step(optimizer)`
# - E: `optimizer.zero_grad()`
# - F: `scaler.unscale_(optimizer)`
# - G: `scaler.scale(loss).backward()`

# %%
line_order = ...  # a list of seven letters, ["…", "…", …]
lesson.check("line_order", line_order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow the factor 65,536: where does it enter the gradients, and where does it leave them?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A clip compares with 1.0, which is meant for real gradients. The scaler learns from a step, then changes the scale.
#
# </details>
#
# <details><summary>Solution: line_order</summary>
#
# ```python
# line_order = ["E", "C", "G", "F", "B", "D", "A"]
# ```
#
# `E` may stand anywhere before `G`.
#
# </details>

# %% [markdown]
# ## Further
#
# ### Rounding that is right on average
#
# A weight that stands still is the fault of rounding to the *nearest*. Round up with the probability of the distance
# instead, and a hundred small updates arrive on average. (Half the spacing is added at random, then the bits are cut.)

# %%
torch.manual_seed(seed)
many = torch.ones(2000, dtype=torch.bfloat16)
for _ in range(100):
    bits = (many.float() - 0.001).view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32)
    many = ((bits + noise) & -65536).view(torch.float32).bfloat16()
assert abs(many.float().mean() - 0.9) < 0.005
print("2000 weights, mean after a hundred updates:", f"{many.float().mean():.2f}")

# %% [markdown]
# ### Adam's `eps` in float16
#
# Weights in float16 make moments in float16, and the `eps` that guards the division is no longer there:

# %%
print("1e-8 in float16:", torch.tensor(1e-8).half().item(), "  0/(√0 + 0):", (torch.zeros(()) / 0).item())

# %% [markdown]
# An element whose gradient is zero divides zero by zero: `fp16-adam-eps`. Keep the weights in float32.

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** The loss of a float16 run falls, but much more slowly than in float32. The norms that `clip_grad_norm_`
# returns are about 20,000. Where do you look?
#
# <details><summary>a) At the learning rate: the gradients explode.</summary>
#
# Not so: exploding gradients of that size would throw the loss up, and the float32 run is fine at the same rate.
#
# </details>
#
# <details><summary>b) Whether the clip stands before `unscale_`.</summary>
#
# Right. 20,000 / 65,536 is 0.3, a usual norm. The clip took the scale for a gradient.
#
# </details>
#
# <details><summary>c) At the scale: it should be smaller.</summary>
#
# Not so: the scaler would have halved it, had anything overflowed; and at another scale the clip would still be wrong.
#
# </details>

# %% [markdown]
# **Quiz 2.** You accumulate 4 × 64 in place of 256, float32, equal parts, mean losses divided by 4. The validation
# accuracy drops by three points. What can be the reason?
#
# <details><summary>a) The sums of float32 are rounded in another order.</summary>
#
# Not so: that is a relative error of 1e-7, and no three points.
#
# </details>
#
# <details><summary>b) The net has BatchNorm, and now normalises over 64.</summary>
#
# Right. It is one of the four places; the running averages differ too.
#
# </details>
#
# <details><summary>c) The rate must be divided by 4 as well.</summary>
#
# Not so: the losses are divided already, so the gradient is that of the mean over 256. The rate stays.
#
# </details>

# %% [markdown]
# **Quiz 3.** A model in bfloat16 (weights too) learns for a while and then stops, far from the float32 result. Which
# change addresses the cause?
#
# <details><summary>a) A GradScaler.</summary>
#
# Not so: bfloat16 has float32's range, and its gradients do not underflow. Nothing was lost there.
#
# </details>
#
# <details><summary>b) Float32 weights, and bfloat16 by autocast.</summary>
#
# Right. As the rate falls, the updates fall below half the spacing of the weights. Float32 weights keep them.
#
# </details>
#
# <details><summary>c) A smaller learning rate.</summary>
#
# Not so: smaller updates are rounded away even more often.
#
# </details>

# %% [markdown]
# **Open task.** The run of section 10 in another precision, or with other micro-batches: change the parameters cell,
# predict which numbers of `dx.result` below change, and run the lesson from the command line, so
# that the run is recorded: `dxdy run 06 -p precision=bf16 -p accumulation_steps=4`.

# %%
lesson.score()

# %%
dx.result(
    zero_share_unscaled=round(lost, 3),
    zero_share_scaled=round(kept_share, 3),
    skipped_steps=skipped,
    bf16_weight=ends["bf16"],
    stuck_share=round(stuck, 3),
    wrong_orders=" ".join(errors[0].cause for errors in found.values()),
    equal_error=exact,
    batchnorm_error=round(batchnorm, 3),
    dropout_error=round(dropout, 3),
    unequal_error=round(unequal, 3),
    padded_error=round(padded, 3),
    saved_bytes=measured,
    accuracy=round(mine, 3),
    fp32_accuracy=round(usual, 3),
)

# %% [markdown]
# **Sources.**
#
# - P. Micikevicius and others: *Mixed Precision Training*, 2017. https://arxiv.org/abs/1710.03740 (loss scaling)
# - T. Chen, B. Xu, C. Zhang, C. Guestrin: *Training Deep Nets with Sublinear Memory Cost*, 2016.
#   https://arxiv.org/abs/1604.06174 (checkpointing)
# - PyTorch: *Automatic Mixed Precision package*. https://docs.pytorch.org/docs/stable/amp.html (operations and
#   their dtypes)
