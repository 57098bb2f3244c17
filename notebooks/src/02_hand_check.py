# %% [markdown]
# # 02 · Prove that a gradient is right
#
# **Question.** How do I prove that a gradient is right? $(x-3)^2$ by hand, by finite difference, by autograd.
#
# **You will**
# - compute one gradient in three ways, and say how closely they must agree
# - choose the step of a finite difference, and name what spoils it when it is too large or too small
# - run `torch.autograd.gradcheck`, and give it the dtype that it needs
# - tell the faults that torch reports from the one that only a check finds, in a function and in a whole model
# - write a minimal sample that another person can judge
#
# **Know before.** What autograd records, leaves, `.grad` (lesson 01); the
# derivative of a square and of a cube.
#
# **Minutes.** 45
#
# **Last verified.** torch 2.13.0, CPU.
#
# data → forward → loss → **backward** → update → comm
#
# Begin with *Edit → Clear Outputs of All Cells*: the stored outputs give the predictions away.

# %% [markdown]
# ## Recall
#
# <details><summary>What does autograd record while y = (x-3)² is computed?</summary>
#
# One backward function for each operation, linked to the functions its inputs came from: Pow → Sub → AccumulateGrad.
# Pow also keeps the value x-3, because its derivative needs it. The constant 3 has no node.
#
# </details>
#
# <details><summary>Which tensors get a .grad?</summary>
#
# Leaves that require a gradient: tensors that you made, and no operation did. Inner results get one only after
# `retain_grad()`.
#
# </details>
#
# <details><summary>What does backward do with a .grad that is already there?</summary>
#
# It adds to it. `zero_grad()`, or `x.grad = None`, is what clears it.
#
# </details>

# %% tags=["parameters"]
seed = 0
x0 = 5.0
lr = 0.02
steps = 60

# %%
import torch

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson

dx.RunConfig(seed=seed, lr=lr, max_steps=steps)  # refuses what makes no sense, before anything runs
lesson = Lesson("02_hand_check")

# %% [markdown]
# ## Three ways to one number
#
# A gradient is a claim about a slope. A claim is proven by a second way to the same number that shares as little as
# possible with the first. Here there are three.
#
# The function is $y=(x-3)^2$, the place is `x0`. Say the slope before you run on.

# %%
lesson.predict("dy/dx of (x-3)² at x0", None)


# %%
def parabola(x):
    return (x - 3) ** 2


pen = 2 * (x0 - 3)  # 1. by pen: the square gives 2(x-3), the inner function gives 1

# %% [markdown]
# The second way knows nothing of calculus. It evaluates the function on both sides of $x$ and takes rise over run:
#
# $$\frac{dy}{dx}\approx\frac{f(x+h)-f(x-h)}{2h}$$


# %%
def centred(f, x, h):
    return (f(x + h) - f(x - h)) / (2 * h)


x = torch.tensor(x0, dtype=torch.float64)
h = 1e-4 * max(1.0, abs(x0))  # in proportion to x; the rule below says why
finite = centred(parabola, x, h)  # 2. by finite difference: two forward passes, no graph

# %%
x = torch.tensor(x0, dtype=torch.float64, requires_grad=True)
y = parabola(x)
y.backward()  # 3. by autograd: one forward pass, one backward pass
lesson.reveal("dy/dx of (x-3)² at x0", x.grad.item())

# %% [markdown]
# Three numbers agree when their distance is within a tolerance that was named before. In float64 we ask for 1e-8,
# relative to the gradient (and absolute where the gradient is below one).

# %%
tolerance = 1e-8  # float64
scale = max(1.0, abs(pen))
assert abs(x.grad.item() - pen) <= tolerance * scale
assert abs(finite.item() - pen) <= tolerance * scale
print(f"pen {pen:.6f}   finite difference {finite.item():.6f}   autograd {x.grad.item():.6f}")

# %% [markdown]
# Each way has its own weakness. The pen slips, the finite difference rounds, and autograd differentiates *the code that
# ran*. So does the finite difference: only the pen knows the function you meant. Where all three agree, a common error
# is hard to imagine.
#
# ### The check that accuses an innocent
#
# Now a second forward and backward pass on the same `x`. Nothing is changed.

# %%
lesson.predict("x.grad after a second forward and backward pass", None)

# %%
y = parabola(x)
y.backward()
lesson.reveal("x.grad after a second forward and backward pass", x.grad.item())

# %% [markdown]
# `backward` adds to `.grad`. A check that forgets this compares the slope with a *sum* of slopes, and reports a factor
# of two where nothing is wrong. Clear `.grad` before each check, or use `torch.autograd.grad`, which returns the
# gradient and leaves `.grad` alone.

# %%
(gradient,) = torch.autograd.grad(parabola(x), x)
assert gradient.item() == pen
print(f"autograd.grad returns {gradient.item():.1f}; x.grad still holds {x.grad.item():.1f}")

# %% [markdown]
# ## One side, or both
#
# Why two evaluations around $x$, when $f(x)$ is there already and $\frac{f(x+h)-f(x)}{h}$ needs only one more?


# %%
def one_sided(f, x, h):
    return (f(x + h) - f(x)) / h


# %%
lesson.predict("error of the one-sided difference of (x-3)² with h = 0.1", None)

# %%
x = torch.tensor(x0, dtype=torch.float64)
error = abs(one_sided(parabola, x, 0.1).item() - pen)
lesson.reveal("error of the one-sided difference of (x-3)² with h = 0.1", round(error, 6))

# %% [markdown]
# By pen: with $d=x-3$ the one-sided difference is $\frac{(d+h)^2-d^2}{h}=2d+h$. Its error is exactly $h$, wherever $x$
# is. The centred one is $\frac{(d+h)^2-(d-h)^2}{2h}=2d$: no error at all.
#
# In the picture the dotted secant is parallel to the tangent, the dashed one has too large a slope.

# %%
near = torch.linspace(x0 - 2.2, x0 + 2.2, 50, dtype=torch.float64)
alt = "a parabola and its tangent: the centred secant is parallel to it, the one-sided is not"
figure, axes = plots.new_figure(alt, width=7.0, height=3.6)
ax = axes[0, 0]
ax.plot(near, parabola(near), label="(x-3)²")
ax.plot(near, parabola(x) + pen * (near - x0), label="tangent")
ax.plot([x0, x0 + 2], [parabola(x), parabola(x + 2)], "--o", label="one-sided secant, h = 2")
ax.plot([x0 - 2, x0 + 2], [parabola(x - 2), parabola(x + 2)], ":o", label="centred secant, h = 2")
ax.set(xlabel="x", ylabel="y")
ax.legend(frameon=False)
plots.show(figure)

# %% [markdown]
# The parabola flatters the centred difference, because its third derivative is zero. The cube $(x-3)^3$ is less kind:
#
# $$\frac{(d+h)^3-(d-h)^3}{2h}=3d^2+h^2$$
#
# That is the general rule: the one-sided error falls like $h$, the centred error like $h^2$ (here $\frac{h^2}{6}f'''$
# with $f'''=6$). This part of the error is called **truncation**: it is the part of Taylor's series that was cut off.


# %%
def cube(x):
    return (x - 3) ** 3


cube_slope = 3 * (x0 - 3) ** 2  # by pen

# %%
for h in (1.0, 0.1, 0.01):
    centred_error = abs(centred(cube, x, h).item() - cube_slope)
    one_sided_error = abs(one_sided(cube, x, h).item() - cube_slope)
    print(f"h = {h:<5} one-sided error {one_sided_error:.3g}   centred error {centred_error:.3g}")

# %% [markdown]
# ## The step has a best size
#
# Ten times smaller, a hundred times more exact: so is the smallest step the best? Before you run it: at which power of
# ten, between 1 and 1e-12, is the error smallest in float64?

# %%
lesson.predict("best h for the cube in float64, as a power of ten (for 1e-3 write -3)", None)


# %%
def sweep(f, exact, h, dtype):
    """Error of the centred difference at x0, computed in dtype, for every step in h."""
    x = torch.tensor(x0, dtype=dtype)
    return (centred(f, x, h.to(dtype)).double() - exact).abs()


# %%
h = torch.tensor([10.0**-k for k in range(13)], dtype=torch.float64)
error64 = sweep(cube, cube_slope, h, torch.float64)
error32 = sweep(cube, cube_slope, h, torch.float32)
for row in zip(h, error64, error32, strict=True):
    print("h = {:.0e}   error in float64 {:.0e}   in float32 {:.0e}".format(*map(float, row)))

# %%
lesson.reveal(
    "best h for the cube in float64, as a power of ten (for 1e-3 write -3)",
    round(h[error64.argmin()].log10().item()),
)

# %% [markdown]
# The error falls like $h^2$ only down to a point; then it rises again. With both axes logarithmic it is a V.

# %%
fine = torch.logspace(0, -12, 49, dtype=torch.float64)
curves = {
    "cube, float64": sweep(cube, cube_slope, fine, torch.float64),
    "cube, float32": sweep(cube, cube_slope, fine, torch.float32),
    "parabola, float64": sweep(parabola, pen, fine, torch.float64),
}

# %%
alt = "error against step: a V for the cube in both dtypes, only the round-off branch for the parabola"
series = {name: (fine, error) for name, error in curves.items()}
figure = plots.curves(series, alt=alt, x="h", y="|error|", log_x=True, log_y=True)
ax = figure.axes[0]
ax.autoscale(False)
ax.plot(fine, fine**2, "k--", linewidth=0.8, label="truncation: h²")
for dtype, label in ((torch.float64, "round-off: eps·|y|/h"), (torch.float32, None)):
    ax.plot(fine, torch.finfo(dtype).eps * cube(x).abs() / fine, "k:", linewidth=0.8, label=label)
ax.legend(frameon=False, fontsize=7)
plots.show(figure)

# %% [markdown]
# Read it from right to left.
#
# - **Right branch: truncation.** The error is $h^2$, in either dtype. The parabola has no such branch.
# - **Left branch: round-off.** Each value of $f$ is rounded by about $\mathrm{eps}\cdot|y|$; $x\pm h$ is rounded too.
#   The difference inherits this, and the division by $2h$ magnifies it to about $\mathrm{eps}\cdot|y|/h$. The branch is
#   ragged, because rounding is. A point far below it is luck: two errors happened to cancel.
# - **Far left, float32.** Below the spacing of the numbers $x+h$ *is* $x$. The difference is zero, and the error is the
#   whole gradient.
#
# The sum $h^2+\mathrm{eps}\cdot|y|/h$ is smallest where $h^3=\mathrm{eps}\cdot|y|/2$. Hence the rule
# $h\approx\mathrm{eps}^{1/3}$, scaled by the size of $x$, with which the rounding of $x\pm h$ grows. The best error is
# of the order $\mathrm{eps}^{2/3}$. Luck and parabolas apart, no step makes a centred difference more exact than that.


# %%
def rule(dtype):
    return torch.finfo(dtype).eps ** (1 / 3) * max(1.0, abs(x0))


# %%
errors = {}
for dtype, limit in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
    h = torch.tensor(rule(dtype), dtype=torch.float64)
    errors[dtype] = sweep(cube, cube_slope, h, dtype).item() / max(1.0, cube_slope)
    assert errors[dtype] < limit
    print(f"{dtype}: h by the rule {h.item():.0e}, relative error below {limit:.0e}")

# %% [markdown]
# ## Torch's own check, and its dtype
#
# `torch.autograd.gradcheck` holds a centred difference for each input against backward. Its default step is 1e-6, and
# it accepts a distance up to `1e-5 + 1e-3·|gradient|`. In float64 it accepts our parabola.

# %%
x = torch.tensor(x0, dtype=torch.float64, requires_grad=True)
print("float64:", torch.autograd.gradcheck(parabola, (x,)))

# %% [markdown]
# The same function, the same point, float32. The gradient there is exactly right too.

# %%
lesson.predict("gradcheck in float32: passes or fails", None)

# %%
import warnings

x = torch.tensor(x0, dtype=torch.float32, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        verdict = "passes" if torch.autograd.gradcheck(parabola, (x,)) else "fails"
    except RuntimeError as error:
        verdict = "fails"
        print(type(error).__name__, "-", " ".join(str(error).split()))

# %%
print(caught[0].category.__name__, "-", str(caught[0].message).split(". ")[0])
lesson.reveal("gradcheck in float32: passes or fails", verdict)

# %% [markdown]
# At 5 it says 3.8147 against 4. Your V explains it: the step 1e-6 lies on the left branch of float32, where the
# step itself does not fit between two numbers. Look at the step that was really taken:

# %%
x = torch.tensor(5.0)
taken = ((x + 1e-6) - x).item()
print(f"asked for 1.0000e-06, got {taken:.4e}; times the slope: {4.0 * taken / 1e-6:.4f}")

# %% [markdown]
# Near 5 the spacing of float32 is 4.77e-7, so 1e-6 becomes two spacings, 4.6 % short. The slope comes out 4.6 % short.
# The gradient was right and the *check* was wrong.
#
# **Check in float64**, with `.double()` on the model and on the inputs, whatever the training uses. Loosening the
# tolerance until float32 passes would let real faults through.

# %% [markdown]
# ## Three breaks
#
# Three ways to damage a backward pass, all on the same function.
#
# **Break 1: backward twice through one graph.**

# %%
x = torch.tensor(x0, dtype=torch.float32, requires_grad=True)
y = parabola(x)
y.backward()
try:
    y.backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(". ")[0])

# %% [markdown]
# Read it: "a second time" names the call, "saved tensors … freed" names the reason. The first pass has freed the value
# x-3 that Pow needs. A fresh forward pass is nearly always the cure; `retain_graph=True` is for the case where one
# graph is meant to serve two passes.
#
# **Break 2: edit in place what backward needs.** $a=x-3$ is multiplied by ten *after* $y=a^2$ was computed.

# %%
x = torch.tensor(x0, dtype=torch.float32, requires_grad=True)
a = x - 3
y = a**2
a.mul_(10)
try:
    y.backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(". Hint")[0])

# %% [markdown]
# Read it: the kind and shape of the tensor (`torch.FloatTensor []`, a scalar); the operation whose output it is now
# (`Mul`, our edit); and two versions. Every in-place edit raises a tensor's version by one. Pow had saved version 0 and
# finds version 1, so it refuses.
#
# **Break 3: the same edit through `.data`.**

# %%
lesson.predict("x.grad after the edit through .data (a number or an error's name)", None)


# %%
def edited(x):
    a = x - 3
    y = a**2
    a.data.mul_(10)  # what Pow saved is changed, and nobody is told
    return y


# %%
x = torch.tensor(x0, dtype=torch.float32, requires_grad=True)
edited(x).backward()
edited_gradient = x.grad.item()
lesson.reveal("x.grad after the edit through .data (a number or an error's name)", edited_gradient)

# %% [markdown]
# No error, no warning, and ten times the gradient. `.data` bypasses the version counter, so there is nothing to
# compare. The forward value is right, the loss is right. Only a second way to the number finds it:

# %%
x = torch.tensor(x0, dtype=torch.float64, requires_grad=True)
try:
    print("gradcheck:", torch.autograd.gradcheck(edited, (x,)))
except RuntimeError as error:
    print(type(error).__name__, "-", " ".join(str(error).split()))

# %% [markdown]
# The finite difference calls the forward pass alone, so the damage to backward cannot touch it. That is what makes it a
# witness. Out of place, as `a = a * 10`, the same edit harms nothing: Pow keeps the tensor it saved.
#
# ## Watch a wrong gradient train
#
# Would training have shown it? One model, two parameters, both at `x0`: `right` goes through the parabola, `wrong`
# through the edited one. Gradient descent moves both.

# %%
lesson.predict("does the loss fall with the wrong gradient: yes or no", None)


# %%
class Pair(torch.nn.Module):
    def __init__(self, start):
        super().__init__()
        self.right = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        self.wrong = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self):
        return parabola(self.right) + edited(self.wrong)


# %%
model = Pair(x0)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
accused = set()


def training():
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        for name, p in model.named_parameters():
            numeric = centred(parabola, p.detach(), rule(p.dtype))  # the check, at every step
            if abs(numeric - p.grad) > 1e-6 * max(1.0, abs(numeric)):
                accused.add(name)
        optimizer.step()
        yield loss.item()


# %%
with dx.watch(model, optimizer) as w:
    await dx.live(w).run(training())

# %%
falls = parabola(model.wrong).item() < parabola(x0)
print("accused by the finite difference:", sorted(accused))
lesson.reveal("does the loss fall with the wrong gradient: yes or no", "yes" if falls else "no")

# %% [markdown]
# At lr = 0.02 the loss falls, and `wrong` arrives first: a gradient ten times too large acts like ten times the
# learning rate. (From lr = 0.1 on, `wrong` never arrives.) Its row in the heat map starts brighter and goes dark
# sooner. No panel says that a gradient is wrong. **A falling loss proves nothing about a gradient.** The finite
# difference accuses `wrong`, and never `right`.
#
# Each step also multiplies the distance of `right` to 3 by $1-2\,\mathrm{lr}$, because its gradient is $2(x-3)$. That
# is a hand check of the whole run:

# %%
by_pen = 3 + (x0 - 3) * (1 - 2 * lr) ** len(w.steps)  # fewer than `steps` where Stop was pressed
assert abs(model.right.item() - by_pen) <= 1e-9 * max(1.0, abs(by_pen), abs(x0))
print("the end point of the run is the one computed by pen")

# %% [markdown]
# ## The whole check in one line
#
# Copies in float64, both sides, more than one step, a tolerance: you have done by hand what `dx.check_gradients` does.
# It takes a function and its inputs, or a model with its loss and a batch, and answers with a verdict:
#
# - **right**, or **wrong**;
# - **kink**: two slopes meet here, and none is wrong;
# - **precision**: the function itself computes in float32, and no more can be said;
# - **nondeterministic**: the same inputs give different values;
# - **detached**: the gradient treats as constant a part that does depend on the input.

# %%
checks = {f.__name__: dx.check_gradients(f, torch.tensor(x0)) for f in (cube, edited)}
for name, check in checks.items():
    print(f"{name:7} {check.verdict:6} relative error {check.rows[0].error:.1f}")

# %%
series = {f"{name}: {check.verdict}": check.rows[0].curve for name, check in checks.items()}
alt = "relative error against step: it dips for a right gradient, and stays on a plateau for a wrong one"
plots.show(plots.curves(series, alt=alt, x="step / size of x", y="relative error", log_x=True, log_y=True))

# %% [markdown]
# For the right gradient there is a step at which the error nearly vanishes: your V again. The wrong one is wrong at
# every step, a plateau. At 5 it stands at 0.9, for (40 − 4)/40.
#
# Now a whole model, of four parameter tensors. It multiplies a hidden value by 1.01, through `.data`, *after* its last
# use. The output is right. Which gradients are not?


# %%
class Leaky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, x):  # (B, 3)
        h = torch.tanh(self.hidden(x))  # (B, 4)
        y = self.out(h)  # (B, 1)
        h.data.mul_(1.01)
        return y


# %%
lesson.predict("how many of the four gradients are wrong", None)

# %%
torch.manual_seed(seed)
batch = torch.randn(8, 3), torch.randn(8, 1)  # (B, 3), (B, 1)
check = dx.check_gradients(model=Leaky(), loss_fn=torch.nn.functional.mse_loss, batch=batch)
for name, verdict in check.table["verdict"].items():
    print(f"{name:14} {verdict}")

# %%
lesson.reveal("how many of the four gradients are wrong", int((check.table["verdict"] == "wrong").sum()))

# %% [markdown]
# The rule of tanh had kept its *output*, and `out` its *input*: both are `h`. So the gradient of `out.weight` is off,
# and all that passes through tanh. The bias of `out` needs neither. No loss curve would show a fault of one per cent.

# %% [markdown]
# ## The minimal sample
#
# A gradient that looks wrong is best shown to somebody in a sample so small that every question is answered by running
# it. Three short cells are enough. The first names what is installed; its output belongs in every report.

# %% tags=["nbval-ignore-output"]
import platform

device = torch.get_default_device()
print("python", platform.python_version(), "| torch", torch.__version__, "| device", device)


# %%
def sample(seed):
    torch.manual_seed(seed)  # randomness: all of it hangs on this line
    x, y = torch.randn(4, 2), torch.randn(4)  # data: (B, D) and (B,)
    weight = torch.zeros(2, requires_grad=True)  # parameter, a leaf: (D,)
    prediction = x @ weight  # (B,)
    losses = (prediction - y) ** 2  # (B,), one a sample
    return weight, prediction, losses, losses.mean()  # (), an aggregate of B losses


# %%
weight, prediction, losses, loss = sample(seed)
print("weight.grad before backward:", weight.grad)
loss.backward()
meaning = {
    "weight": (weight, "parameter"),
    "prediction": (prediction, "prediction, one a sample"),
    "losses": (losses, "loss, one a sample"),
    "loss": (loss, "aggregate: mean over the batch"),
    "weight.grad": (weight.grad, "gradient of the aggregate"),
}
for name, (tensor, means) in meaning.items():
    print(f"{name:<12} shape {tuple(tensor.shape)!s:<5} {tensor.dtype}   {means}")

# %% [markdown]
# The last column, what a tensor *means*, is the one that no shape and no dtype can tell. Take the sum instead of the
# mean as the aggregate. By what factor does the gradient change?

# %%
lesson.predict("gradient of losses.sum() over gradient of losses.mean()", None)

# %%
of_sum, _, losses, _ = sample(seed)
losses.sum().backward()
factor = of_sum.grad.norm() / weight.grad.norm()
lesson.reveal("gradient of losses.sum() over gradient of losses.mean()", round(factor.item(), 3))

# %% [markdown]
# The factor is the batch size. A gradient "32 times too small" is first of all a question about the aggregate.
#
# Last, randomness: whoever runs the sample with your seed must get your gradient.

# %%
same, other = sample(seed), sample(seed + 1)
same[-1].backward()
other[-1].backward()
assert torch.equal(same[0].grad, weight.grad) and not torch.equal(other[0].grad, weight.grad)
print("same seed: the same gradient; another seed: another one")

# %% [markdown]
# The list, to carry with you. Each line is a question that would otherwise be asked back.
#
# 1. **Names and versions.** Python, torch, device, dtype.
# 2. **Shapes.** Of every tensor between data and loss, as a comment beside its line.
# 3. **What the output means.** A prediction, a loss for each sample, an aggregate (sum or mean, over what), a gradient
#    (of what, with respect to what)?
# 4. **Gradient state.** `.grad` before backward (`None`, zero or left over), leaf or not, `requires_grad`.
# 5. **Randomness.** The seed, and whether a second run gives the same numbers.
# 6. **Expected and seen.** The number by pen or by finite difference beside the one by autograd, and the tolerance.

# %% [markdown]
# ## Further
#
# May be skipped.
#
# <a id="causes"></a>Causes explained here: `zero-grad-missing` and `backward-twice` (*the check that accuses an
# innocent*), `wrong-custom-backward` (*three breaks*, and below).
#
# ### Your own backward
#
# Built-in operations are seldom wrong. A backward that you write yourself is wrong until it is checked. Here the
# derivative of the square is `factor·a`; 2 is right.


# %%
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, factor):
        ctx.save_for_backward(a)
        ctx.factor = factor
        return a**2

    @staticmethod
    def backward(ctx, incoming):
        (a,) = ctx.saved_tensors
        return ctx.factor * a * incoming, None  # one gradient for each input of forward


# %%
def passes(factor, rtol):
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    return check(lambda a: Square.apply(a, factor), (a,), rtol=rtol, raise_exception=False)


for factor in (2.0, 1.0, 2.0004):
    usual, strict = passes(factor, 1e-3), passes(factor, 1e-6)
    verdict = dx.check_gradients(lambda a, factor=factor: Square.apply(a, factor), torch.tensor(2.0)).verdict
    print(f"factor {factor:.4f}: passes with rtol=1e-3 {usual}, with rtol=1e-6 {strict}; check_gradients {verdict}")

# %% [markdown]
# The default `rtol` of 1e-3 lets an error of two parts in ten thousand pass. In float64 you can ask for more;
# `dx.check_gradients` derives its tolerance from the function itself.
#
# ### Kinks
#
# At 0 relu has a slope of 0 on the left and 1 on the right. Torch takes 0, the centred difference takes the mean.

# %%
z = torch.zeros((), dtype=torch.float64, requires_grad=True)
torch.relu(z).backward()
numeric = centred(torch.relu, z.detach(), 1e-4)
print(f"autograd {z.grad.item():.1f}   finite difference {numeric.item():.1f}")
print("verdict:", dx.check_gradients(torch.relu, z.detach()).verdict)

# %% [markdown]
# Neither is wrong: there is no slope to be right about. The sign of a kink is that the two one-sided differences do not
# approach each other as `h` shrinks. Check beside the kink, not on it.
#
# ### Many parameters at once
#
# A centred difference costs two forward passes for each number, so a million parameters need two million. One random
# direction $v$ needs two in all: the slope along $v$ must be $\mathrm{grad}\cdot v$. An error at right angles to $v$
# goes unseen, so take a second direction too.

# %%
torch.manual_seed(seed)
layer = torch.nn.Linear(100, 50).double()
inputs = torch.randn(8, 100, dtype=torch.float64)  # (B, D)
v = torch.randn(50, 100, dtype=torch.float64)  # a direction in the space of the weights


def loss_along(t):
    weight = layer.weight + t * v
    return torch.nn.functional.linear(inputs, weight, layer.bias).tanh().sum()


# %%
with torch.no_grad():
    numeric = centred(loss_along, 0.0, 1e-5)
(grad_weight,) = torch.autograd.grad(loss_along(0.0), layer.weight)
exact = (grad_weight * v).sum()
assert abs(numeric - exact) <= 1e-6 * grad_weight.norm() * v.norm()
print(f"{layer.weight.numel()} weights, two forward passes: the slopes agree")

# %% [markdown]
# ## Exercises
#
# One problem, four times: a numeric gradient, and its comparison with autograd.
#
# ### Exercise · worked
#
# The centred difference of $(x-3)^2$, one thought a line. Read it, say the value at $x=5$, $h=0.1$ aloud, run it.


# %%
def slope(x, h):
    ahead = (x + h - 3) ** 2  # the value on the one side
    behind = (x - h - 3) ** 2  # the value on the other
    return (ahead - behind) / (2 * h)  # rise over run: the two are 2h apart


print("at x = 5, h = 0.1:", round(slope(5.0, 0.1), 6))
lesson.check("slope", slope)

# %% [markdown]
# ### Exercise · faded
#
# The relative error between a centred difference and autograd, for any function of a scalar. Two lines are missing.


# %%
def relative_error(f, x, h):
    x = x.detach().clone().requires_grad_()
    f(x).backward()
    exact = x.grad
    with torch.no_grad():
        numeric = ...  # the centred difference of f at x
    larger = ...  # the larger of the two magnitudes
    return float((numeric - exact).abs() / larger)


lesson.check("relative_error", relative_error)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The first line stands in `centred` above. For the second, think of a slope that points down.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `torch.maximum(a, b)` gives the larger of two tensors, `.abs()` the magnitude of one.
#
# </details>
#
# <details><summary>Solution: relative_error</summary>
#
# ```python
# def relative_error(f, x, h):
#     x = x.detach().clone().requires_grad_()
#     f(x).backward()
#     exact = x.grad
#     with torch.no_grad():
#         numeric = (f(x + h) - f(x - h)) / (2 * h)
#     larger = torch.maximum(numeric.abs(), exact.abs())
#     return float((numeric - exact).abs() / larger)
# ```
#
# Where both gradients are zero this divides zero by zero. A tool for daily use puts a floor under the denominator.
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# One training step that checks its gradient before it uses it. Put the lines in order, as a list of letters. More than
# one order is right.
#
# | | |
# |---|---|
# | A | `optimizer.zero_grad()` |
# | B | `loss = f(x)` |
# | C | `loss.backward()` |
# | D | `numeric = centred(f, x.detach(), h)` |
# | E | `assert abs(numeric - x.grad) < tolerance` |
# | F | `optimizer.step()` |

# %%
order = ...  # a list of six letters, ["…", "…", …]
lesson.check("order", order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Ask of each line what must be there before it: a loss, a gradient, the old `x`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `backward` adds to `.grad`, and `step` moves `x`. What must have happened before each of the two?
#
# </details>
#
# <details><summary>Solution: order</summary>
#
# ```python
# order = ["A", "B", "C", "D", "E", "F"]
# ```
#
# `A` may stand anywhere before `C`, and `D` anywhere before `E`.
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The numeric gradient of a function of a vector: `x` has shape `(n,)`, `f(x)` is a scalar, the result has the shape of
# `x`. Use centred differences with step `h`, and nothing of autograd.


# %%
def numeric_gradient(f, x, h):
    return ...


lesson.check("numeric_gradient", numeric_gradient)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The gradient has one entry for each entry of `x`: the slope when that one moves and all others stay.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# A step vector that is `h` at one place and zero elsewhere leaves `x` itself untouched. `torch.zeros_like(x)` keeps the
# dtype.
#
# </details>
#
# <details><summary>Solution: numeric_gradient</summary>
#
# ```python
# def numeric_gradient(f, x, h):
#     gradient = torch.zeros_like(x)
#     for i in range(len(x)):
#         step = torch.zeros_like(x)
#         step[i] = h
#         gradient[i] = (f(x + step) - f(x - step)) / (2 * h)
#     return gradient
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** A centred difference of the cube at 5, in float64 with `h = 1e-12`, is 1e-3 away from autograd. What is
# the likeliest reason?
#
# <details><summary>a) The step is too large: truncation</summary>
#
# Not so: truncation is h² here, which is 1e-24.
#
# </details>
#
# <details><summary>b) The step is too small: round-off</summary>
#
# Right. eps·|y|/h is about 2e-3 for y = 8. With h near 1e-5 the distance is below 1e-9.
#
# </details>
#
# <details><summary>c) Autograd is wrong</summary>
#
# Not so: backward has no step, and its rounding is of the order of eps. Look at a larger h before you accuse it.
#
# </details>

# %% [markdown]
# **Quiz 2.** `gradcheck` fails on your float32 model, numerical 3.8147 against analytical 4.0. What next?
#
# <details><summary>a) Raise rtol until it passes</summary>
#
# Not so: with 5 % allowed, a gradient that is really 4 % wrong passes as well.
#
# </details>
#
# <details><summary>b) Make eps smaller</summary>
#
# Not so: 1e-6 is on the round-off branch of float32 already. A smaller step makes the error larger.
#
# </details>
#
# <details><summary>c) Convert model and inputs to float64 and check again</summary>
#
# Right. The step 1e-6 suits float64. If it fails there too, suspect the gradient (or a kink at that very point).
#
# </details>

# %% [markdown]
# **Quiz 3.** Training runs without an error, the loss falls, and one gradient is ten times too large. What finds it?
#
# <details><summary>a) <code>torch.autograd.set_detect_anomaly(True)</code></summary>
#
# Not so: it looks for NaN in backward, and points to the forward line of an error. Ten times too large is neither.
#
# </details>
#
# <details><summary>b) A centred difference of the loss, in float64</summary>
#
# Right. It uses the forward pass alone, so a fault of backward cannot hide in it.
#
# </details>
#
# <details><summary>c) The version counter</summary>
#
# Not so: it compares versions, and an edit through `.data` leaves them equal. It sees edits, not values.
#
# </details>

# %% [markdown]
# **Open task.** Go far out. The lesson takes the place as a parameter:
#
# ```
# dxdy run 02_hand_check -p x0=1000.0
# ```
#
# Before you run it, write down two powers of ten: the best step for the cube there, in float64 and in float32. (The V
# ends at h = 1. Is that far enough?) The run is recorded under `runs/`, with its notebook and its results. Compare its
# V with this one, and say in one sentence which of the two branches has moved, and why.

# %%
lesson.score()

# %%
dx.result(
    gradient=gradient.item(),
    error_float64=float(f"{errors[torch.float64]:.1e}"),
    error_float32=float(f"{errors[torch.float32]:.1e}"),
    edited_gradient=edited_gradient,
    accused=", ".join(sorted(accused)),
)

# %% [markdown]
# **Sources.**
#
# - *Automatic Differentiation in Machine Learning: a Survey.* A. G. Baydin, B. A. Pearlmutter, A. A. Radul, J. M.
#   Siskind, 2018. https://jmlr.org/papers/v18/17-468.html
# - *What Every Computer Scientist Should Know About Floating-Point Arithmetic.* D. Goldberg, 1991.
#   https://doi.org/10.1145/103162.103163
# - *Gradcheck mechanics.* PyTorch notes. https://docs.pytorch.org/docs/stable/notes/gradcheck.html
