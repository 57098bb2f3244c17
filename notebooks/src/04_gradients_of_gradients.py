# %% [markdown]
# # 04 · Gradients of gradients
#
# **Question.** When is `create_graph` needed, and when not? FGSM: no. Hessian, Newton, second-order MAML: yes.
#
# **You will**
# - say for any use of a gradient whether it needs `create_graph`, and prove it by comparing bits
# - attack a net with its own input gradient, and measure its accuracy against the size of the attack
# - compute a Hessian by pen, by double backward and by `torch.func`, and take a Newton step with it
# - find the fault that raises no error: a MAML step that forgot its second-order term
# - count what a recorded backward pass keeps in memory, to the byte
#
# **Know before.** Lesson 01 (what a graph records), lesson 02 (finite differences); second derivatives; a matrix times
# a vector.
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
# <details><summary>A training loss falls smoothly. Which layers have learnt?</summary>
#
# Those that a gradient reached, and no others. In lesson 03 the net whose convolutions were cut off had such a loss
# too. The table of gradients by parameter tells, the loss does not.
#
# </details>
#
# <details><summary>Two runs with one seed gave the same weights, bit for bit. What can you test with that?</summary>
#
# Any change that should not change numbers. If the bits differ, the change did more than it promised.
#
# </details>
#
# <details><summary>Why does a training step begin with zero_grad()?</summary>
#
# Because `backward` adds to `.grad`. Without it each step would use the sum of all gradients so far.
#
# </details>

# %% tags=["parameters"]
seed = 0
epsilon = 0.1
inner_lr = 0.1
steps = 200

# %%
import copy
import math
import time
import warnings

import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.training import datasets, models

dx.RunConfig(seed=seed, max_steps=steps)  # refuses what makes no sense, before anything runs
torch.set_num_threads(1)
lesson = Lesson("04_gradients_of_gradients")

# %% [markdown]
# ## 1 · A gradient is a tensor like any other
#
# Take $y=x^3$ at $x=3$. By pen the slope is $3x^2=27$, and the slope of the slope is $6x=18$. Autograd finds the first:

# %%
x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
y = x**3
(slope,) = torch.autograd.grad(y, x)
print("slope", slope.item(), "  requires_grad", slope.requires_grad, "  grad_fn", slope.grad_fn)

# %% [markdown]
# The number is right. But it came out of a backward pass that was not recorded, so it is a constant: nobody remembers
# that it was made from `x`. What happens when you differentiate it?

# %%
lesson.predict("differentiate the slope: a number, or the name of the error", None)

# %%
try:
    outcome = torch.autograd.grad(slope, x)
except RuntimeError as error:
    outcome = type(error).__name__
    print(outcome, "-", error)
lesson.reveal("differentiate the slope: a number, or the name of the error", outcome)

# %% [markdown]
# Read it: "element 0 of tensors" is the tensor to be differentiated, here `slope`. It has no `grad_fn`, so there is no
# graph to walk. The fault is not in this line. It is in the line that *made* the tensor.
#
# That line takes the cure. `create_graph=True` lets autograd record its own backward pass:

# %%
(slope,) = torch.autograd.grad(x**3, x, create_graph=True)
print("slope", slope.item(), "  requires_grad", slope.requires_grad, "  grad_fn", slope.grad_fn.name())

# %% [markdown]
# The witness is a finite difference that knows the forward pass alone: the slope of $x^3$ to the right, minus the slope
# to the left, over the step.

# %%
(second,) = torch.autograd.grad(slope, x)
h = 1e-3
numeric = ((3 + h) ** 3 - 2 * 3**3 + (3 - h) ** 3) / h**2
assert abs(second.item() - 18) < 1e-12 and abs(numeric - 18) < 1e-6
print("the slope of the slope: pen 18, autograd", second.item(), "  finite difference", round(numeric, 4))

# %% [markdown]
# ### The neighbour that is often mistaken for it
#
# `retain_graph=True` keeps the graph of the *forward* pass for another walk. It records nothing new:

# %%
y = x**3
(slope,) = torch.autograd.grad(y, x, retain_graph=True)
print("retain_graph alone: grad_fn", slope.grad_fn)

# %% [markdown]
# So one question decides about `create_graph`:
#
# > **Will anything be differentiated *through* this gradient?**
#
# A gradient that is only looked at, clipped, or added to a weight is used as a number. No. A gradient that is part of
# something whose derivative is wanted: yes.
#
# A widely copied list names four uses of `create_graph`: FGSM, Hessian, Newton's method, second-order MAML. One of the
# four does not belong there.

# %% [markdown]
# ## 2 · FGSM: no
#
# The *fast gradient sign method* changes a picture a little so that a net gets it wrong. It moves every pixel by the
# same small amount $\epsilon$, up or down, as the gradient of the loss with respect to that *pixel* says:
#
# $$x'=x+\epsilon\cdot\mathrm{sign}\left(\frac{\partial L}{\partial x}\right)$$
#
# Why the sign? To first order the loss rises by $g\cdot\delta$. If no pixel may move by more than $\epsilon$, nothing
# beats $\delta=\epsilon\cdot\mathrm{sign}(g)$.
#
# The net is the baseline of lesson 03. Its weights come with the workbook, and their sha256 is compared before they
# are loaded.

# %%
net = models.CNN()
checkpoint = datasets.verified(datasets.DATA / "digits_cnn.pt")
net.load_state_dict(torch.load(checkpoint, weights_only=True))
net = net.eval()

# %%
test = datasets.load("digits").test


@torch.no_grad()
def accuracy(x):
    return (net(x).argmax(dim=1) == test.y).double().mean().item()


print(f"{len(test)} digits that moved no weight: accuracy above 0.95 {accuracy(test.x) > 0.95}")


# %%
def input_gradient(x, y, create_graph):
    x = x.clone().requires_grad_()  # a leaf of its own; the data stay as they are
    loss = nn.functional.cross_entropy(net(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=create_graph)
    return gradient  # (B, 1, 8, 8): one number a pixel


# %% [markdown]
# `autograd.grad` with the *input* in second place: that is all FGSM needs of autograd. The weights' `.grad` stays
# empty.

# %%
lesson.predict("does FGSM need create_graph: yes or no", None)

# %%
plain = input_gradient(test.x, test.y, create_graph=False)
recorded = input_gradient(test.x, test.y, create_graph=True)

# %%
same = torch.equal(plain, recorded)
print("pixels:", plain.numel(), "  equal, bit for bit:", same)
assert all(p.grad is None for p in net.parameters())
lesson.reveal("does FGSM need create_graph: yes or no", "no" if same else "yes")

# %% [markdown]
# `torch.equal` has no tolerance. The arithmetic is the same; `create_graph` only takes notes of it. FGSM throws the
# notes away: it reads the signs, and is done. Nothing could be differentiated through them anyway: `sign` is flat.
#
# Now the attack. A pixel is a number from 0 to 1 and one count of ink is 1/16. For comparison: the same amount of
# change in every pixel, with signs thrown by a coin.


# %%
def moved(signs, size):
    return (test.x + size * signs).clamp(0, 1)  # still a picture


coin = torch.randint(0, 2, test.x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1

# %%
lesson.predict("accuracy under random signs of size epsilon", None)

# %%
lesson.predict("accuracy under FGSM of size epsilon", None)

# %%
random_accuracy = accuracy(moved(coin, epsilon))
lesson.reveal("accuracy under random signs of size epsilon", round(random_accuracy, 2))

# %%
fgsm_accuracy = accuracy(moved(plain.sign(), epsilon))
lesson.reveal("accuracy under FGSM of size epsilon", round(fgsm_accuracy, 2))

# %% [markdown]
# The net hardly minds noise. It minds this one direction among all the others. Here are digits that it had right,
# each above its attacked twin. The title is what the net says.

# %%
attacked = moved(plain.sign(), epsilon)
with torch.no_grad():
    before, after = net(test.x).argmax(1), net(attacked).argmax(1)
chosen = ((before == test.y) & (after != test.y)).int().argsort(descending=True, stable=True)[:8]

# %%
alt = "digits above, the same digits attacked below: a reader sees the same digit, the net says another one"
figure, axes = plots.new_figure(alt, width=8, height=2.5, rows=2, columns=8)
for column, i in enumerate(chosen.tolist()):
    for ax, picture, said in zip(axes[:, column], (test.x, attacked), (before, after), strict=True):
        ax.imshow(picture[i, 0], cmap="gray_r", vmin=0, vmax=1)
        ax.set(title=f"{said[i].item()}", xticks=[], yticks=[])
plots.show(figure)

# %%
sizes = [k / 40 for k in range(21)]
curves = {
    "FGSM": (sizes, [accuracy(moved(plain.sign(), size)) for size in sizes]),
    "random signs": (sizes, [accuracy(moved(coin, size)) for size in sizes]),
    "a guess": (sizes, [0.1] * len(sizes)),
}
alt = "accuracy against the size of the change: FGSM falls below a guess early, random signs fall late and slowly"
plots.show(plots.curves(curves, alt=alt, x="epsilon (one count of ink is 0.0625)", y="test accuracy"))

# %%
at = sizes.index(0.2)
assert curves["FGSM"][1][at] < 0.4 and curves["random signs"][1][at] > 0.8
assert curves["FGSM"][1][-1] < 0.05
print("at 0.2: FGSM leaves less than 0.4, random signs leave more than 0.8; at 0.5 FGSM leaves less than 0.05")

# %% [markdown]
# FGSM ends *below* a guess: it was told the right answers, and avoids them.

# %% [markdown]
# ## 3 · The Hessian: yes
#
# Now a use that does differentiate a gradient. The bowl has two parameters:
#
# $$f(a,b)=(2a+b)^2+a^2$$
#
# By pen, first the gradient, then the derivative of each of its entries:
#
# $$\nabla f=\begin{pmatrix}10a+4b\\4a+2b\end{pmatrix}\qquad H=\begin{pmatrix}10&4\\4&2\end{pmatrix}$$


# %%
def bowl(w):
    a, b = w
    return (2 * a + b) ** 2 + a**2


pen = torch.tensor([[10.0, 4.0], [4.0, 2.0]], dtype=torch.float64)

# %% [markdown]
# Autograd differentiates one number at a time, and the gradient has two. Row $i$ of the Hessian is the gradient of
# entry $i$ of the gradient:

# %%
w = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
(gradient,) = torch.autograd.grad(bowl(w), w, create_graph=True)
rows = [torch.autograd.grad(entry, w, retain_graph=True)[0] for entry in gradient]
double_backward = torch.stack(rows)  # (2, 2)
print(double_backward)

# %% [markdown]
# Two flags, two reasons. `create_graph` makes the graph of the gradient. `retain_graph` keeps it, because every row
# walks it once. Without the second flag row 0 comes out and row 1 does not:

# %%
(gradient,) = torch.autograd.grad(bowl(w), w, create_graph=True)
torch.autograd.grad(gradient[0], w)
try:
    torch.autograd.grad(gradient[1], w)
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(". ")[0])

# %% [markdown]
# "A second time" names the walk. It is the error of lessons 01 and 02, one level up: the graph that was freed here is
# the one of the backward pass.
#
# `torch.func` takes another way. It has no `create_graph`, because it differentiates *functions*: `jacrev(f)` is the
# function that returns the gradient, and a function can be differentiated again.

# %%
point = w.detach()
by_func = torch.func.hessian(bowl)(point)
by_composition = torch.func.jacfwd(torch.func.jacrev(bowl))(point)  # what hessian is made of

# %% [markdown]
# A fourth way shares nothing with these: finite differences of finite differences of the bowl itself. The bowl has no
# third derivative, so no step is too large for it.

# %%
h = 0.01
steps_aside = h * torch.eye(2, dtype=torch.float64)


def second_difference(i, j):
    ahead, behind = bowl(point + i + j) - bowl(point + i - j), bowl(point - i + j) - bowl(point - i - j)
    return (ahead - behind) / (4 * h**2)


numeric = torch.stack([torch.stack([second_difference(i, j) for j in steps_aside]) for i in steps_aside])

# %%
ways = {"double backward": double_backward, "hessian": by_func, "jacfwd(jacrev)": by_composition}
ways["finite difference"] = numeric
errors = {name: (way - pen).abs().max().item() for name, way in ways.items()}
for name, error in errors.items():
    assert error < 1e-8, name
    print(f"{name:17} agrees with the pen within 1e-8 (float64)")

# %% [markdown]
# The check of lesson 02 has an order, too. With `order=2` it takes the gradient as given, and holds the derivative of
# gradient · v, for a random v, against finite differences.

# %%
print("the bowl, second order:", dx.check_gradients(bowl, point, order=2).verdict)

# %% [markdown]
# ### Why not `backward(create_graph=True)`?
#
# It exists, and it works. Torch itself advises against it:

# %%
torch.set_warn_always(True)  # else torch says it once a process, and this cell could not be run again
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    bowl(w).backward(create_graph=True)
torch.set_warn_always(False)
w.grad = None  # puts things right again
kind, sentences = caught[0].category.__name__, str(caught[0].message).split(". ")
print(f"{kind} - {sentences[0]}.\n{sentences[1]}.")

# %% [markdown]
# Now `w.grad` has a graph, the graph ends in `w`, and `w` owns `w.grad`. Each holds the next one: a circle. *Further*
# looks whether it ever goes away. `autograd.grad` returns the gradient instead of hanging it on the parameter, so there
# is no circle.

# %% [markdown]
# ## 4 · One Newton step against ten gradient steps
#
# What is a Hessian good for? A gradient step follows the slope. A Newton step asks where the slope will be zero, as
# far as the curvature tells:
#
# $$w_{\text{new}}=w-H^{-1}\,\nabla f(w)$$
#
# The gradient steps get the rate with the best guarantee on this bowl, 2 over the sum of the two eigenvalues. That sum
# is the trace, 10 + 2, so the rate is 1/6. What share of the distance to the minimum is left after ten steps?

# %%
lesson.predict("share of the distance left after ten gradient steps", None)

# %%
trail = [point]
for _ in range(10):
    w = trail[-1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(bowl(w), w)  # used as a number: no create_graph
    trail.append((w - gradient / 6).detach())
left = trail[-1].norm() / point.norm()  # the minimum is at (0, 0)
lesson.reveal("share of the distance left after ten gradient steps", left.item())

# %%
w = point.clone().requires_grad_()
(gradient,) = torch.autograd.grad(bowl(w), w, create_graph=True)  # differentiated below
rows = [torch.autograd.grad(entry, w, retain_graph=True)[0] for entry in gradient]
newton = (w - torch.linalg.solve(torch.stack(rows), gradient)).detach()

# %%
print("one Newton step ends within 1e-12 of the minimum:", newton.norm().item() < 1e-12)

# %%
side = torch.linspace(-3, 3, 120, dtype=torch.float64)
a, b = torch.meshgrid(side, side, indexing="xy")
alt = "contours of a narrow bowl: ten gradient steps zigzag from wall to wall, one Newton step goes to the minimum"
figure, axes = plots.new_figure(alt, width=5.6, height=4.6)
ax = axes[0, 0]
ax.contour(a, b, bowl((a, b)), levels=[0.05, 0.3, 1, 3, 7, 14, 25, 45, 80], cmap="Greys_r", linewidths=0.8)
ax.plot(*torch.stack(trail).T, marker="o", markersize=4, label="ten gradient steps")
ax.plot(*torch.stack([point, newton]).T, marker="s", markersize=5, label="one Newton step")
ax.set(xlabel="a", ylabel="b", xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
ax.legend(frameon=True, loc="upper right")
plots.show(figure)

# %% [markdown]
# By pen: one gradient step multiplies $w$ by $I-\frac{H}{6}=\frac{2}{3}\begin{pmatrix}-1&-1\\-1&1\end{pmatrix}$, and
# two steps by its square, which is $\frac{8}{9}I$. So ten steps leave $\left(\frac{8}{9}\right)^5=0.555$ of the way,
# from wherever they start. And on a bowl Newton's step is exact, because a bowl has the same curvature everywhere.

# %%
assert abs(left.item() - (8 / 9) ** 5) < 1e-12
assert newton.norm() < 1e-12

# %% [markdown]
# ## 5 · MAML: yes, and no error if you forget it
#
# MAML (*model-agnostic meta-learning*) looks for weights from which **one** gradient step on a few samples of a new
# task is enough. So there is a gradient step inside the loss:
#
# 1. **inner step**, on the task's *support* samples: $\theta'=\theta-\alpha\,\nabla L_{\text{support}}(\theta)$
# 2. **outer loss**, on its *query* samples: $L_{\text{query}}(\theta')$, and that is differentiated with respect to
#    $\theta$
#
# The derivative passes through the inner gradient. First with one weight, so that the pen can follow: $\theta=1$,
# support loss $(\theta-3)^2$, query loss $(\theta'-3.5)^2$.


# %%
def outer(theta, create_graph):
    inner = (theta - 3) ** 2
    (gradient,) = torch.autograd.grad(inner, theta, create_graph=create_graph)
    adapted = theta - inner_lr * gradient  # the inner step, written out: an optimizer's step would cut the graph
    return (adapted - 3.5) ** 2


def outer_gradient(create_graph):
    theta = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = outer(theta, create_graph)
    loss.backward()
    return theta.grad.item()


# %% [markdown]
# By the chain rule the outer gradient is $2(\theta'-3.5)$ times $\frac{d\theta'}{d\theta}=1-2\alpha$. Work it out for
# the `inner_lr` above. Then say what `create_graph=False` gives. Remember the error of section 1.

# %%
lesson.predict("outer gradient with create_graph=True", None)

# %%
lesson.predict("outer gradient with create_graph=False (a number, or the name of the error)", None)

# %%
second_order = outer_gradient(create_graph=True)
lesson.reveal("outer gradient with create_graph=True", second_order)

# %%
try:
    first_order = outer_gradient(create_graph=False)
except RuntimeError as error:
    first_order = type(error).__name__
lesson.reveal("outer gradient with create_graph=False (a number, or the name of the error)", first_order)

# %% [markdown]
# No error. $\theta'=\theta-\alpha g$ still contains $\theta$ itself, so there *is* a graph, and backward walks it. Only
# $g$ is a constant in it. The factor $1-2\alpha$ has become 1, in silence.
#
# The finite difference of the outer loss knows nothing of graphs. It is the judge:


# %%
def value(theta):
    return outer(torch.tensor(theta, dtype=torch.float64, requires_grad=True), create_graph=False).item()


adapted = 1 + 4 * inner_lr  # by pen: the support gradient at 1 is -4
pen_gradient = 2 * (adapted - 3.5) * (1 - 2 * inner_lr)
numeric = (value(1 + 1e-4) - value(1 - 1e-4)) / 2e-4

# %%
scale = max(1.0, abs(pen_gradient))
assert abs(second_order - pen_gradient) < 1e-12 * scale
assert abs(numeric - pen_gradient) < 1e-6 * scale
assert abs(first_order - 2 * (adapted - 3.5)) < 1e-12 * max(1.0, abs(first_order))
print("pen, finite difference and create_graph=True agree; create_graph=False lacks the factor 1 - 2·inner_lr")

# %% [markdown]
# A check that knows the forward pass alone gives this fault a name. `torch.func.grad` needs no flag, and `.detach()`
# makes of its result what `create_graph=False` does: a constant.


# %%
def outer_by_func(theta, constant):
    gradient = torch.func.grad(lambda t: (t - 3) ** 2)(theta)
    gradient = gradient.detach() if constant else gradient
    return (theta - inner_lr * gradient - 3.5) ** 2


start = torch.tensor(1.0, dtype=torch.float64)
for constant in (False, True):
    check = dx.check_gradients(lambda theta, constant=constant: outer_by_func(theta, constant), start)
    print(f"inner gradient a constant: {constant!s:5}   verdict {check.verdict}")

# %% [markdown]
# *Detached*: the derivative is that of a function in which a part was held still.
#
# What `create_graph=False` computes has a name, *first-order MAML*, and its users: it saves memory and time. It is a
# fine choice and a bad accident.
#
# ### A net and a sine
#
# A task is a sine curve with an amplitude and a phase of its own: ten samples to adapt to, ten others to be judged by.


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1, 20)
        self.fc2 = nn.Linear(20, 1)

    def forward(self, x):  # (B, 1)
        return self.fc2(torch.tanh(self.fc1(x)))  # (B, 1)


def fresh(seed):
    torch.manual_seed(seed)
    return Net().double()


# %%
def sine_task(generator, phase=None):
    a, drawn, *x = torch.rand(22, generator=generator, dtype=torch.float64)
    phase = drawn if phase is None else phase
    x = 6 * torch.stack(x).unsqueeze(1) - 3  # (20, 1), from -3 to 3
    y = (0.5 + 1.5 * a) * torch.sin(x + math.pi * phase)  # amplitude 0.5 to 2, phase 0 to pi
    return (x[:10], y[:10]), (x[10:], y[10:])  # support, query


# %% [markdown]
# The inner step makes new weights and leaves the model's own alone. `functional_call` runs the model with them:


# %%
def adapt(model, support, create_graph, rate=inner_lr):
    x, y = support
    weights = dict(model.named_parameters())
    inner_loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(inner_loss, weights.values(), create_graph=create_graph)
    return {name: w - rate * g for (name, w), g in zip(weights.items(), gradients, strict=True)}


# %%
def outer_loss(model, task, create_graph, rate=inner_lr):
    support, (x, y) = task
    adapted = adapt(model, support, create_graph, rate)
    return nn.functional.mse_loss(torch.func.functional_call(model, adapted, (x,)), y)


# %%
def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def meta_gradient(model, task, create_graph, rate=inner_lr):
    loss = outer_loss(model, task, create_graph, rate)
    return flat(torch.autograd.grad(loss, list(model.parameters())))  # (61,)


# %% [markdown]
# One MAML step on one task, both ways. How alike are the directions? The cosine is 1 for the same direction, 0 for a
# right angle, -1 for the opposite one.

# %%
lesson.predict("cosine between the gradients with and without second order", None)

# %%
model = fresh(seed)
task = sine_task(torch.Generator().manual_seed(seed))

# %%
second = meta_gradient(model, task, create_graph=True)
first = meta_gradient(model, task, create_graph=False)
cosine = nn.functional.cosine_similarity(second, first, dim=0).item()
lesson.reveal("cosine between the gradients with and without second order", round(cosine, 3))

# %% [markdown]
# Who is right? A random direction through all 61 weights, and the finite difference along it:

# %%
torch.manual_seed(seed)
direction = torch.randn(61, dtype=torch.float64)


def nudged(size):
    other = copy.deepcopy(model)
    weights = nn.utils.parameters_to_vector(other.parameters()) + size * direction
    nn.utils.vector_to_parameters(weights, other.parameters())
    return outer_loss(other, task, create_graph=False).item()  # the value of the loss is the same either way


# %%
numeric = (nudged(1e-5) - nudged(-1e-5)) / 2e-5
assert abs(numeric - second @ direction) < 1e-6 * second.norm() * direction.norm()
difference = ((second - first).norm() / second.norm()).item()
print(f"the finite difference confirms the second-order gradient; the other one is off by {difference:.1%}")

# %% [markdown]
# With many weights the lost factor $1-2\alpha$ is the matrix $I-\alpha H$, where $H$ is the Hessian of the support
# loss. (*Further* multiplies with it, and turns the one gradient into the other.) So the harm depends on the inner
# rate. Where it is tiny, so is the difference.

# %%
rates = [10 ** (k / 4) for k in range(-16, 1)]
pairs = [[meta_gradient(model, task, flag, rate) for flag in (True, False)] for rate in rates]
off = [((second - first).norm() / second.norm()).item() for second, first in pairs]
line = [off[0] * rate / rates[0] for rate in rates]

# %%
curves = {"measured": (rates, off), "proportional to the rate": (rates[:13], line[:13])}
alt = "how far the first-order gradient is off: in proportion to the inner rate, until it is off by its own size"
plots.show(plots.curves(curves, alt=alt, x="inner learning rate", y="relative difference", log_x=True, log_y=True))

# %%
assert 9 < off[4] / off[0] < 11
print("from 0.0001 to 0.001 the difference grows tenfold, within a tenth")
print(f"at 0.01 the first-order gradient is off by {off[8]:.0%}")

# %% [markdown]
# ### Meta-training, watched
#
# Now the whole loop, over the mean of four tasks a step. One flag stands in it, at the *inner* gradient. The outer
# `loss.backward()` needs none: its result is used as a number.

# %%
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
tasks = torch.Generator().manual_seed(seed)


def meta_training():
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [outer_loss(model, sine_task(tasks), create_graph=True) for _ in range(4)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


# %%
with dx.watch(model, optimizer) as w:
    await dx.live(w).run(meta_training())

# %% [markdown]
# The loss in the first panel is the one *after* the inner step. It falls, and stays noisy: each step meets four other
# tasks. The batch is 80 samples, 20 for each task. Only the outer gradient is in the record, since the inner ones never
# touch `.grad`.
#
# What has been learnt is not a sine, but a place to start from. One start, three new tasks, one inner step for each:


# %%
def after_one_step(start, support, x):
    adapted = adapt(start, support, create_graph=False)
    return torch.func.functional_call(start, adapted, (x,)).detach()


# %%
grid = torch.linspace(-3, 3, 100, dtype=torch.float64).unsqueeze(1)
new = torch.Generator().manual_seed(seed + 1000)
alt = "three sines of different phase: one step bends the one meta-trained start towards each, fresh weights less so"
figure, axes = plots.new_figure(alt, width=9.0, height=3.2, columns=3)
for ax, phase, title in zip(axes[0], (0.0, 0.5, 1.0), ("0", "π/2", "π"), strict=True):
    support, query = sine_task(new, phase)
    ax.plot(grid, model(grid).detach(), "--", label="meta-trained, before")
    ax.plot(grid, after_one_step(model, support, grid), label="meta-trained, one step")
    ax.plot(grid, after_one_step(fresh(seed), support, grid), ":", label="fresh, one step")
    ax.plot(*support, "o", color="black", markersize=4, label="support samples")
    ax.plot(*query, "x", color="0.4", label="query samples")
    ax.set(xlabel="x", title=f"phase {title}")
axes[0, 0].set(ylabel="y")
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
plots.show(figure)

# %% [markdown]
# The dashed curve is the same in all three panels. Where it ends up after one step depends on ten samples.


# %%
def over_fresh_tasks(model, rate):
    generator = torch.Generator().manual_seed(seed + 2000)
    losses = [outer_loss(model, sine_task(generator), create_graph=False, rate=rate) for _ in range(100)]
    return torch.stack(losses).mean().item()


before, after, untrained = (over_fresh_tasks(*c) for c in ((model, 0.0), (model, inner_lr), (fresh(seed), inner_lr)))
print("a hundred new tasks: one step brings the loss below 60 %:", after < 0.6 * before)
print("and below half of what it brings to fresh weights:", after < 0.5 * untrained)

# %% [markdown]
# ## 6 · What it costs
#
# A recorded backward pass must keep what its own derivative needs. How much is that? Every tensor that a graph saves
# passes through a pair of hooks, if one asks. This counts the bytes behind them, each storage once:


# %%
def saved_bytes(make):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# %%
lesson.predict("saved bytes of the FGSM gradient, with create_graph over without", None)

# %%
fgsm = [saved_bytes(lambda flag=flag: input_gradient(test.x, test.y, flag)) for flag in (False, True)]
lesson.reveal("saved bytes of the FGSM gradient, with create_graph over without", round(fgsm[1] / fgsm[0], 3))

# %%
maml = [saved_bytes(lambda flag=flag: outer_loss(fresh(seed), task, flag)) for flag in (False, True)]
for name, (without, with_graph) in {"FGSM, 299 digits": fgsm, "MAML step, one task": maml}.items():
    print(f"{name:20} without {without:>9,} bytes   with create_graph {with_graph:>9,} bytes")

# %% [markdown]
# For FGSM the second number buys nothing. That is the practical side of the correction: an attack that sets
# `create_graph` fits on your device with fewer pictures in a batch.
#
# <details><summary>Where do the bytes of the forward pass come from?</summary>
#
# For one digit, in float32 (4 bytes): the picture 64, first ReLU 16·64, second ReLU 32·64, pooled 32·16, third ReLU 64,
# log-probabilities 10; that is 3,722 numbers or 14,888 bytes. The pooling also keeps where each maximum was, 32·16
# indices of 8 bytes, and the loss keeps the label, 8 bytes. Together 18,992 bytes a digit, 5,678,608 for 299. The four
# weight matrices are 152,640 bytes, and the loss keeps one float more, 4 bytes: 5,831,252.
#
# </details>
#
# A Hessian's gradient is recorded once, whatever its size. But every row is a walk of its own. For the 61 weights of
# the sine net:


# %%
weights = list(model.parameters())


def support_loss():
    x, y = task[0]
    return nn.functional.mse_loss(model(x), y)


def one_gradient():
    return torch.autograd.grad(support_loss(), weights)


def full_hessian():
    gradient = flat(torch.autograd.grad(support_loss(), weights, create_graph=True))
    rows = [torch.autograd.grad(entry, weights, retain_graph=True, materialize_grads=True) for entry in gradient]
    return torch.stack([flat(row) for row in rows])  # (61, 61)


# %%
def median_times(*functions, repeats=9):
    """Return the median CPU time of each function; they take turns, so that a busy machine is busy for all."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, mine in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            mine.append(time.process_time() - start)
    return [sorted(mine)[repeats // 2] for mine in times]


# %%
gradient_time, hessian_time = median_times(one_gradient, full_hessian)
assert hessian_time > 5 * gradient_time
print("a Hessian of 61 rows takes more than 5 times as long as a gradient")

# %%
steps_of_maml = [lambda flag=flag: meta_gradient(model, task, flag) for flag in (False, True)]
first_time, second_time = median_times(*steps_of_maml, repeats=31)
assert second_time < 5 * first_time
print("a second-order MAML step takes less than 5 times as long as a first-order one")

# %% [markdown]
# Second-order MAML is no Hessian: backward multiplies with it once and never writes it down. That is one more walk,
# not 61. (How many times more each of these takes depends on the machine; the inequalities leave room for that.)
#
# The answer to this lesson's question, as a table:
#
# | use | what becomes of the gradient | `create_graph` |
# |---|---|---|
# | a training step, logging, clipping | used as numbers | no |
# | FGSM | its sign is added to the input | no |
# | first-order MAML | a constant in the inner step | no, on purpose |
# | second-order MAML | part of the weights that the outer loss depends on | yes; forgotten: silent |
# | Hessian, Newton | differentiated, row by row | yes; forgotten: an error |
# | Hessian and its relatives by `torch.func` | differentiated as a function | no such flag |

# %% [markdown]
# ## Exercises
#
# One problem in growing dimension: curvature, and the step that uses it.
#
# ### Exercise · worked
#
# The second derivative of a function of one number. Say its value for $x^3$ at 3 aloud, then run it.


# %%
def second_derivative(f, x):
    x = x.detach().clone().requires_grad_()  # a leaf of our own
    (slope,) = torch.autograd.grad(f(x), x, create_graph=True)  # differentiated in the next line: recorded
    (curvature,) = torch.autograd.grad(slope, x)  # returned as a number: not recorded
    return curvature


lesson.check("second_derivative", second_derivative)

# %% [markdown]
# ### Exercise · faded
#
# The Hessian of a function of a vector: `w` has shape `(n,)`, the result `(n, n)`. Two lines are missing.


# %%
def hessian(f, w):
    w = w.detach().clone().requires_grad_()
    gradient = ...  # the gradient of f at w, shape (n,), fit to be differentiated
    rows = [... for entry in gradient]  # what is row i of the Hessian?
    return torch.stack(rows)


lesson.check("hessian", hessian)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Section 3 does it for the bowl. Count the walks: which graph is walked how often?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# The first line needs one flag, so that there is a graph; the second needs the other flag, so that it survives the
# first row.
#
# </details>
#
# <details><summary>Solution: hessian</summary>
#
# ```python
# def hessian(f, w):
#     w = w.detach().clone().requires_grad_()
#     gradient = torch.autograd.grad(f(w), w, create_graph=True)[0]
#     rows = [torch.autograd.grad(entry, w, retain_graph=True)[0] for entry in gradient]
#     return torch.stack(rows)
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# One Newton step: from `w`, shape `(n,)`, to the new `w`. All lines are yours. `torch.linalg.solve(A, b)` returns the
# $z$ with $Az=b$, and is the better way to write $A^{-1}b$.


# %%
def newton_step(f, w):
    return ...


lesson.check("newton_step", newton_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You have the Hessian already. What else stands in the formula of section 4, and with which sign?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# One gradient serves twice: as the right-hand side, and as that whose rows are differentiated. The result is a new
# place, so it is returned without a graph: `.detach()`.
#
# </details>
#
# <details><summary>Solution: newton_step</summary>
#
# ```python
# def newton_step(f, w):
#     w = w.detach().clone().requires_grad_()
#     (gradient,) = torch.autograd.grad(f(w), w, create_graph=True)
#     rows = [torch.autograd.grad(entry, w, retain_graph=True)[0] for entry in gradient]
#     return (w - torch.linalg.solve(torch.stack(rows), gradient)).detach()
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# One step of second-order MAML. Put the lines in order, as a list of letters. More than one order is right.
#
# | | |
# |---|---|
# | A | `optimizer.step()` |
# | B | `gradients = torch.autograd.grad(inner_loss, weights, create_graph=True)` |
# | C | `loss = loss_fn(functional_call(model, adapted, (x_query,)), y_query)` |
# | D | `optimizer.zero_grad()` |
# | E | `inner_loss = loss_fn(model(x_support), y_support)` |
# | F | `adapted = {name: w - inner_lr * g ...}` |
# | G | `loss.backward()` |

# %%
order = [...]
lesson.check("order", order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two losses, two gradients, two updates. Sort the lines into inner and outer first.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `autograd.grad` neither reads nor writes `.grad`. So which single line must find `.grad` empty?
#
# </details>
#
# <details><summary>Solution: order</summary>
#
# ```python
# order = ["D", "E", "B", "F", "C", "G", "A"]
# ```
#
# D may stand anywhere before G.
#
# </details>

# %% [markdown]
# ## Further
#
# May be skipped.
#
# ### Curvature without a matrix
#
# The net of section 2 has 38,282 parameters. Its Hessian has their square as entries: 11.7 GB in float64. A product
# $Hv$ has 38,282, and costs one walk more than the gradient. Here $v$ is a random direction, and the judge is the
# finite difference of the gradient along it.

# %%
wide = copy.deepcopy(net).double()
count = sum(p.numel() for p in wide.parameters())
print(f"{count:,} parameters, {8 * count**2 / 1e9:.1f} GB for the matrix")


# %%
def gradient_of(net, create_graph=False):
    loss = nn.functional.cross_entropy(net(test.x.double()), test.y)
    return torch.autograd.grad(loss, list(net.parameters()), create_graph=create_graph)


# %%
torch.manual_seed(seed)
v = [torch.randn_like(p) for p in wide.parameters()]
gradient = gradient_of(wide, create_graph=True)
product = flat(torch.autograd.grad(gradient, list(wide.parameters()), grad_outputs=v))


# %%
def gradient_beside(size):
    other = copy.deepcopy(wide)
    with torch.no_grad():
        for p, direction in zip(other.parameters(), v, strict=True):
            p.add_(direction, alpha=size)
    return flat(gradient_of(other))


h = 1e-9  # so small that hardly a ReLU changes sides in between
numeric = (gradient_beside(h) - gradient_beside(-h)) / (2 * h)
assert (numeric - product).norm() < 1e-3 * product.norm()
print("the product agrees with the finite difference of the gradient within 1e-3 (float64)")

# %% [markdown]
# The same product explains first-order MAML. Its lost factor $I-\alpha H$ can be put back without a matrix:
# `grad_outputs=v` gives $Hv$, the gradient of $\nabla L\cdot v$.

# %%
second, first = (meta_gradient(model, task, flag) for flag in (True, False))
support_gradient = torch.autograd.grad(support_loss(), weights, create_graph=True)
hessian_times_first = torch.autograd.grad(flat(support_gradient), weights, grad_outputs=first)

# %%
repaired = first - inner_lr * flat(hessian_times_first)  # (I - inner_lr · H) first
assert (repaired - second).norm() < 1e-10 * second.norm()
print("first order, times I - inner_lr · H, is second order")

# %% [markdown]
# `torch.func.hessian` writes the whole matrix, but takes all rows at once (`vmap`). For 61 weights that is faster than
# our loop:


# %%
def loss_of(weights):
    x, y = task[0]
    return nn.functional.mse_loss(torch.func.functional_call(model, weights, (x,)), y)


named = {name: p.detach() for name, p in model.named_parameters()}
loop_time, func_time = median_times(full_hessian, lambda: torch.func.hessian(loss_of)(named), repeats=5)
assert func_time < loop_time
print("61 rows at once take less time than 61 rows one by one")

# %% [markdown]
# ### A gradient that hangs on its own weight
#
# After `backward(create_graph=True)` a parameter, its `.grad` and the graph hold each other. Is this a leak that the
# garbage collector repairs? Drop every name of such a parameter, collect, and look whether it lives.


# %%
import gc
import weakref


def dropped(use_backward):
    weight = torch.ones(2, requires_grad=True)
    loss = (weight**3).sum()
    if use_backward:
        loss.backward(create_graph=True)
    else:
        torch.autograd.grad(loss, weight, create_graph=True)
    return weakref.ref(weight)  # watches the weight without keeping it alive


# %%
lesson.predict("after backward(create_graph=True): is the dropped parameter still alive, yes or no", None)

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # we have read it
    after_backward, after_grad = dropped(use_backward=True), dropped(use_backward=False)
gc.collect()
print("after autograd.grad: alive", after_grad() is not None)
lesson.reveal(
    "after backward(create_graph=True): is the dropped parameter still alive, yes or no",
    "yes" if after_backward() is not None else "no",
)

# %% [markdown]
# The circle runs through C++, where Python's collector cannot look. `zero_grad()` would break it, since it sets `.grad`
# to None; a model that is dropped with its gradients in place stays in memory for good.

# %% [markdown]
# ### Your own backward, differentiated
#
# A backward that you write is differentiated too, once somebody asks for a second order. This one computes the right
# slope of the cube, from a value that it has detached. The check may say *right*, *wrong* or *detached*.


# %%
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, incoming):
        (a,) = ctx.saved_tensors
        return 3 * a.detach() ** 2 * incoming


# %%
lesson.predict("verdicts on Cube: first order, second order (in quotes, with a comma)", None)

# %%
orders = [dx.check_gradients(lambda a: Cube.apply(a), point[0], order=order).verdict for order in (1, 2)]
lesson.reveal("verdicts on Cube: first order, second order (in quotes, with a comma)", ", ".join(orders))

# %% [markdown]
# A training loop would never notice. A Hessian, a gradient penalty or MAML through this function would be wrong, and
# silent.

# %% [markdown]
# ### Newton goes to where the slope is zero
#
# That need not be a minimum. On $\cos x$ near its top the curvature is negative:

# %%
x = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
(slope,) = torch.autograd.grad(torch.cos(x), x, create_graph=True)
(curvature,) = torch.autograd.grad(slope, x)
print(f"cos x at 0.4: curvature {curvature.item():.2f}; Newton goes to {(x - slope / curvature).item():.3f}, the top")

# %% [markdown]
# Gradient steps would have left the top. Where the loss of a net curves downwards, Newton's step climbs. That and the
# size of the matrix speak against Newton's step, as it stands, for training a net.
#
# ### Does the forgotten factor matter?
#
# The same meta-training, the same tasks, with `create_graph=False`. The inner rate decides.

# %%
other = fresh(seed)
plain_optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
tasks = torch.Generator().manual_seed(seed)
for _ in range(steps):
    plain_optimizer.zero_grad()
    loss = torch.stack([outer_loss(other, sine_task(tasks), create_graph=False) for _ in range(4)]).mean()
    loss.backward()
    plain_optimizer.step()

# %%
first_before, first_after = over_fresh_tasks(other, 0.0), over_fresh_tasks(other, inner_lr)
print("after one inner step first order is worse, by less than a half:", after < first_after < 1.5 * after)
print("before it, by more than a half:", first_before > 1.5 * before)

# %% [markdown]
# First order learns to adapt as well, a little worse. Before the step it is far worse: its gradient is taken at the
# adapted weights, and knows nothing of where the inner step came from. At a small inner rate little is lost (the figure
# of section 5).

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** Which of these needs `create_graph=True`?
#
# <details><summary>a) Clipping: the norm of all gradients is computed, and each is multiplied by a factor.</summary>
#
# Not so: the gradients are scaled and then used by the step. Nobody differentiates the norm.
#
# </details>
#
# <details><summary>b) A gradient penalty: the squared norm of the input gradient is added to the loss.</summary>
#
# Right. The loss now contains a gradient, and `loss.backward()` has to differentiate it.
#
# </details>
#
# <details><summary>c) A stronger attack: FGSM with a small epsilon, repeated ten times.</summary>
#
# Not so: each round takes a fresh gradient and adds its sign to the pixels. Detach the picture, and go on.
#
# </details>
#
# **Quiz 2.** A MAML loop runs and learns. Then you notice that its inner gradient was taken without `create_graph`.
# What was its outer gradient?
#
# <details><summary>a) Zero</summary>
#
# Not so: the adapted weights are the weights minus a constant, so the derivative passes straight through.
#
# </details>
#
# <details><summary>b) The right one: the flag changes memory, not numbers</summary>
#
# Not so: the *inner* gradient has the same bits. The outer one differs, since it passes through the inner one.
#
# </details>
#
# <details><summary>c) The query gradient at the adapted weights, without the factor I - inner_lr·H</summary>
#
# Right. That is first-order MAML. Only a finite difference of the outer loss, or a second look at the code, shows it.
#
# </details>
#
# **Quiz 3.** You compute a Hessian row by row, and row 1 raises "Trying to backward through the graph a second time".
# Row 0 came out right. What is missing?
#
# <details><summary>a) `create_graph=True` at the gradient</summary>
#
# Not so: without it row 0 would have failed, with "does not require grad and does not have a grad_fn".
#
# </details>
#
# <details><summary>b) `retain_graph=True` at the rows</summary>
#
# Right. Row 0 freed the graph of the gradient, and row 1 needs the same graph.
#
# </details>
#
# <details><summary>c) `w.grad = None` between the rows</summary>
#
# Not so: `autograd.grad` returns each row and never touches `.grad`. The graph is what is gone.
#
# </details>
#
# **Open task.** First order hurts more, the larger the inner step. The lesson takes the rate as a parameter:
#
# ```
# dxdy run 04_gradients_of_gradients -p inner_lr=0.01
# ```
#
# Before you run it, write down the outer gradient of section 5 with and without `create_graph`, and whether
# `maml_difference` will be above or below one half. Then find the rate at which the two gradients of the net are at a
# right angle. The runs are recorded under `runs/`, each with its notebook and its results.

# %%
lesson.score()

# %%
dx.result(
    clean_accuracy=round(accuracy(test.x), 4),
    fgsm_accuracy=round(fgsm_accuracy, 4),
    random_accuracy=round(random_accuracy, 4),
    fgsm_needs_create_graph="no" if same else "yes",
    hessian_error=float(f"{max(errors.values()):.0e}"),
    newton_distance=round(newton.norm().item(), 9),
    ten_step_distance=round(trail[-1].norm().item(), 6),
    second_order_gradient=round(second_order, 9),
    first_order_gradient=round(first_order, 9),
    maml_difference=round(difference, 4),
    maml_cosine=round(cosine, 4),
    fgsm_bytes_ratio=round(fgsm[1] / fgsm[0], 4),
    loss_after_one_step=round(after, 3),
)

# %% [markdown]
# **Sources.**
#
# - *Explaining and Harnessing Adversarial Examples.* I. J. Goodfellow, J. Shlens, C. Szegedy, 2015.
#   https://arxiv.org/abs/1412.6572 (FGSM)
# - *Fast Exact Multiplication by the Hessian.* B. A. Pearlmutter, 1994. https://doi.org/10.1162/neco.1994.6.1.147
# - *Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks.* C. Finn, P. Abbeel, S. Levine, 2017.
#   https://arxiv.org/abs/1703.03400 (second and first order)
