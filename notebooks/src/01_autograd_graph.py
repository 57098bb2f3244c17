# %% [markdown]
# # 01 · The autograd graph
#
# **Question.** What does PyTorch record in the forward pass, and how does a gradient travel back?
#
# **You will**
# - read a graph by hand, node by node, from the loss to the leaves;
# - push a gradient back through it with a pen, and compare each row with autograd;
# - find the slip in a published example;
# - explain why a node waits for all its gradients;
# - tell apart five calls that are said to switch recording off.
#
# **Know before.** The chain rule, tensors, `requires_grad` (lesson 00).
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
# From lesson 00. Answer first, then unfold.
#
# <details><summary>What does loss.backward() change, and what does it leave alone?</summary>
#
# It adds a derivative to the `.grad` of each leaf that requires one. No weight moves: that is the optimizer's step.
#
# </details>
# <details><summary>A mean squared error is 4 at w = 0 and 1 at w = 1. Which sign has its slope between them, on
# average?</summary>
#
# Negative: the error falls as w grows. Gradient descent goes against the slope, so w grows.
#
# </details>
# <details><summary>A batch is put in twice, and the loss is a mean. What happens to the gradient?</summary>
#
# Nothing. A mean over the doubled batch is the same number, and so is its derivative.
#
# </details>

# %% tags=["parameters"]
seed = 0
x0 = 5.0

# %%
import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.lesson.exercise import Lesson

dx.RunConfig(seed=seed)  # refuses a seed that makes no sense, before anything runs
lesson = Lesson("01_autograd_graph")

# %% [markdown]
# ## 1 · One number, four questions
#
# Take y = (x − 3)². Autograd is asked for dy/dx at `x0`. Predict before you run: put your answer in place of `None`, a
# word in quotes.

# %%
lesson.predict("dy/dx of (x - 3)² at x0", None)

# %%
lesson.predict('x.grad before any backward: 0.0, "None" or "an error"', None)

# %%
lesson.predict("x.grad after one backward", None)

# %%
lesson.predict("x.grad after a second forward and backward", None)

# %%
x = torch.tensor(x0, requires_grad=True)
y = (x - 3) ** 2
lesson.reveal('x.grad before any backward: 0.0, "None" or "an error"', str(x.grad))

# %%
y.backward()
lesson.reveal("dy/dx of (x - 3)² at x0", x.grad.item())

# %%
lesson.reveal("x.grad after one backward", x.grad.item())

# %%
y = (x - 3) ** 2
y.backward()
lesson.reveal("x.grad after a second forward and backward", x.grad.item())

# %% [markdown]
# The last number is twice the one before. `backward` *adds* to `.grad`; it replaces nothing. That is a feature:
# gradients of several micro-batches add up. It is a fault when nobody calls `zero_grad` between two steps.
#
# Before the first call `.grad` is `None`, not zero: nothing has arrived yet.

# %% [markdown]
# ## 2 · What was recorded
#
# Build the same thing in two lines, and look at what each result carries.

# %%
x = torch.tensor(x0, requires_grad=True)
a = x - 3
y = a**2
print(y.grad_fn.name())

# %% [markdown]
# A node of the graph is a *backward* function: it knows how to turn the gradient of its output into the gradient of
# its inputs. `next_functions` says where it sends them: for each input a node, and which output of that node it was.

# %%
pow_node = y.grad_fn
sub_node = pow_node.next_functions[0][0]
print("Pow sends to:", sub_node.name())

# %%
for node, _ in sub_node.next_functions:
    print("Sub sends to:", "nothing" if node is None else node.name())

# %% [markdown]
# <details><summary>Why "nothing"?</summary>
#
# The second input of the subtraction is the constant 3. It requires no gradient, so there is nowhere to send one. A
# constant has no node; a leaf that requires a gradient has one, and its name says what it does: it accumulates.
#
# </details>
#
# A node also keeps what its rule will need. The derivative of a² is 2a, so Pow keeps a:

# %%
print("kept by Pow:", pow_node._saved_self.item(), "  and a is:", a.item())

# %% [markdown]
# Forward values are *not* in the graph, except those that a rule needs. Sub needs none, and keeps none.

# %% [markdown]
# ## 3 · Walk it, draw it
#
# Six lines walk from the loss to the leaves. (The fourth cuts `torch::autograd::` off a name.)

# %%
waiting, names = [y.grad_fn], []
while waiting:
    node = waiting.pop(0)
    names.append(node.name().split("::")[-1])
    waiting += [following for following, _ in node.next_functions if following is not None]
print(" → ".join(names))

# %% [markdown]
# The package does the same walk, runs one backward pass, and writes the gradient that arrives at each node. It leaves
# `.grad` as it is. A line is a node: its number, its name, the shape of its output (`[]` is a single number), the size
# of the gradient that arrives, and the lines it sends to.

# %%
print(dx.graph(y))
print("x.grad is still", x.grad)

# %% [markdown]
# The picture shows the same, with the values. Its colours compare a gradient with those near the loss: *vanishing* is
# far smaller, *exploding* far larger.

# %%
dx.graph(y)

# %% [markdown]
# ## 4 · Push the gradient by hand
#
# The backward pass needs one rule: **outgoing = local derivative × incoming**. It begins at the loss with dy/dy = 1.
#
# | node | incoming | local derivative | outgoing |
# |---|---|---|---|
# | Pow | 1 | 2a | 2a |
# | Sub | 2a | 1 | 2a |
# | x | 2a | | `x.grad` += 2a |
#
# Compare each row with autograd. `torch.autograd.grad` returns the gradient that arrives at any tensor you name.

# %%
x = torch.tensor(x0, dtype=torch.float64, requires_grad=True)
a = x - 3
y = a**2
arrives = torch.autograd.grad(y, (y, a, x))

# %%
by_pen = (1.0, 2 * (x0 - 3), 2 * (x0 - 3) * 1)
for name, pen, autograd in zip(("Pow", "Sub", "x"), by_pen, arrives, strict=True):
    assert abs(autograd.item() - pen) <= 1e-12 * max(1.0, abs(pen))
    print(f"arrives at {name:3}  pen {pen:g}   autograd {autograd.item():g}")

# %% [markdown]
# The third way shares nothing with the two: a centred finite difference, in float64. Lesson 02 is about it.

# %%
h = 1e-5 * max(1.0, abs(x0))
by_difference = ((x0 + h - 3) ** 2 - (x0 - h - 3) ** 2) / (2 * h)
assert abs(by_difference - by_pen[-1]) <= 1e-7 * max(1.0, abs(by_pen[-1]))
print("pen and autograd agree within 1e-12, the finite difference within 1e-7 (float64)")

# %% [markdown]
# ## 5 · Trust no printed number
#
# A widely copied article computes `loss = (w*x + b)**2` at x = 2, w = 3, b = 1 and prints the gradients 36, 24 and 12
# for x, w and b. Do it by hand first.

# %%
lesson.predict("dL/dx", None)

# %%
lesson.predict("dL/dw", None)

# %%
lesson.predict("dL/db", None)

# %%
x = torch.tensor(2.0, requires_grad=True)
w = torch.tensor(3.0, requires_grad=True)
b = torch.tensor(1.0, requires_grad=True)
loss = (w * x + b) ** 2
loss.backward(retain_graph=True)  # keeps what the nodes hold: they are looked at below
lesson.reveal("dL/dx", x.grad.item())

# %%
lesson.reveal("dL/dw", w.grad.item())

# %%
lesson.reveal("dL/db", b.grad.item())

# %% [markdown]
# Here is the pass one node at a time. Each step shows its rule, where `g` is what comes in, and what goes out.

# %%
print(dx.graph(loss).steps())

# %% [markdown]
# The same as pictures: a slider where you can move one, else to be unfolded.

# %%
dx.graph(loss).steps().slider()

# %% [markdown]
# Now find the slip. Pow's rule is 2 · y, and y = w·x + b is what it took from the forward pass. Which y gives the
# article's numbers?

# %%
lesson.predict("the y that the article used", None)

# %%
y = 12 / 2  # it prints 12 for b, which is what Pow sends
assert (2 * y * w.item(), 2 * y * x.item()) == (36, 24)  # and all else follows from it
lesson.reveal("the y that the article used", y)

# %% [markdown]
# <details><summary>Where does it come from?</summary>
#
# It is w·x, the product alone, before b was added. From there on every line of the article is consistent, and wrong.
#
# </details>

# %% [markdown]
# ## 6 · A node waits
#
# In `a * b + a` the leaf `a` is used twice.

# %%
lesson.predict("How many accumulating nodes has a*b + a?", None)

# %%
a = torch.tensor(2.0, requires_grad=True)
b = torch.tensor(3.0, requires_grad=True)
g = dx.graph(a * b + a)
lesson.reveal("How many accumulating nodes has a*b + a?", len(g.leaves))

# %%
print(g)

# %%
for edge in g.edges:
    if g.nodes[edge.target].leaf == "a":
        print(f"{g.nodes[edge.source].operation} sends {edge.gradient.item():.0f} to a")

# %% [markdown]
# One node for each leaf, however often it is used. Two edges lead to `a`, with 1 and 3, and the node adds them up:
# d(ab + a)/da = b + 1 = 4. The picture draws the leaf once for each use, and says so by `×2`.

# %%
g

# %% [markdown]
# So a node may run only when *all* its gradients have arrived. That is why the backward pass goes in reverse
# **topological** order: no node before all of its consumers. Reverse order of the lines of code is one such order.

# %% [markdown]
# ## 7 · Leaves, inner nodes, hooks
#
# `.grad` is kept for leaves. An inner result gives its gradient up, unless it is asked to keep it.

# %%
x = torch.tensor(x0, requires_grad=True)
a = x - 3
a.retain_grad()
(a**2).backward()
print("leaf:", x.is_leaf, a.is_leaf, "  the same gradient at both:", torch.equal(a.grad, x.grad))

# %% [markdown]
# Two kinds of hooks look at a leaf, at different moments. A tensor hook sees what *arrives*. A post-accumulate hook
# sees `.grad` *after* the addition. Run two backward passes under both.

# %%
x = torch.tensor(5.0, requires_grad=True)
arrived, accumulated = [], []
x.register_hook(lambda grad: arrived.append(grad.item()))
x.register_post_accumulate_grad_hook(lambda leaf: accumulated.append(leaf.grad.item()))
for _ in range(2):
    ((x - 3) ** 2).backward()
print("arrived:", arrived, "  in .grad:", accumulated)

# %% [markdown]
# ## 8 · Three faults
#
# **A second backward** through one graph. What the first one needed was freed.

# %%
x = torch.tensor(5.0, requires_grad=True)
y = (x - 3) ** 2
y.backward()
try:
    y.backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(".")[0])

# %% [markdown]
# The usual cause is no second call, but a tensor that lives on from the step before: a hidden state, a cached output.
# Detach it where the step ends.
#
# **An edit in place** of a tensor that a rule has kept. Every tensor counts its edits; backward compares.

# %%
x = torch.tensor(2.0, requires_grad=True)
y = x.exp()
z = y * 1
y.mul_(10)
try:
    z.backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(":")[0])

# %% [markdown]
# **The same edit through `.data`**, which hides it from the counter. No error. Predict the gradient of exp at 2,
# which is e² ≈ 7.389.

# %%
lesson.predict("x.grad after the edit through .data", None)

# %%
x = torch.tensor(2.0, requires_grad=True)
y = x.exp()
assert abs(y.item() - 7.389) < 1e-3
y.data.mul_(10)
y.backward()
lesson.reveal("x.grad after the edit through .data", round(x.grad.item(), 2))

# %% [markdown]
# Ten times too large, and silent: the rule of exp uses its kept *output*, and the output was changed behind its back.
# With `.detach()` in place of `.data` the counter sees the edit:

# %%
y = x.exp()
y.detach().mul_(10)
try:
    y.backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(":")[0])

# %% [markdown]
# A weight is edited under `torch.no_grad()`. So nothing is left that `.data` is good for.

# %% [markdown]
# ## 9 · Switching recording off
#
# | | graph recorded? | tensors kept for backward? | dropout, BatchNorm |
# |---|---|---|---|
# | `torch.no_grad()` | no | no | as before |
# | `torch.inference_mode()` | no, and results can never enter one | no | as before |
# | `x.detach()` | cut at this tensor | before it: yes | as before |
# | `p.requires_grad_(False)` | where another leaf needs it | what that one needs | as before |
# | `model.eval()` | ? | ? | dropout off, BatchNorm by its running statistics |

# %%
lesson.predict("After model.eval(), does the output require a gradient? (yes or no)", None)

# %% [markdown]
# Look at it. Every tensor that a rule keeps can be seen on its way, by a pair of hooks: count them.


# %%
def look(forward):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = forward(torch.ones(1, 4))
    return f"recorded {output.requires_grad!s:5}  tensors kept {len(kept)}"


# %%
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
print("all on           ", look(model))
with torch.no_grad():
    print("no_grad          ", look(model))
with torch.inference_mode():
    print("inference_mode   ", look(model))
print("detach           ", look(lambda x: model[2](model[1](model[0](x)).detach())))
print("first layer fixed", look(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), *model[1:])))

# %%
model.eval()
print("eval             ", look(model))
answer = "yes" if model(torch.ones(1, 4)).requires_grad else "no"
lesson.reveal("After model.eval(), does the output require a gradient? (yes or no)", answer)

# %% [markdown]
# `eval()` records the whole graph. The one tensor less is the mask of dropout. Put yes and yes in place of the question
# marks: validation needs `eval()` *and* `no_grad()`.
#
# `inference_mode` goes further than `no_grad`. What it made can never be kept for a backward pass:

# %%
with torch.inference_mode():
    made = model(torch.ones(1, 4))
try:
    (made * torch.ones(1, requires_grad=True)).sum().backward()
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(".")[0])

# %% [markdown]
# `loss.backward()` adds into `.grad` of every leaf that asks for it. `torch.autograd.grad(loss, tensors)` returns the
# gradients it is asked for, and touches no `.grad`. A training loop wants the first, a look at a gradient the second.
#
# Where does a graph end by accident? Record the forward pass, and the package names the line.


# %%
class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return self.head(hidden.detach())


# %%
torch.manual_seed(seed)
model = Cut()
with dx.record(model) as seen:
    loss = model(torch.ones(2, 4)).square().mean()
for cut in dx.graph(loss, record=seen).cuts:
    print(f"{cut.where}: {cut.operation} keeps gradients from {', '.join(cut.parameters)}")

# %% [markdown]
# The number is the line in the cell with the class. In a script it stands after the name of the file.
#
# ## 10 · Watch gradients while it learns
#
# Would the loss have told? Train the cut net, and then one with the line mended.

# %%
lesson.predict("Does the loss of the cut net fall? (yes or no)", None)

# %%
inputs = torch.randn(32, 4)  # (B, D)
targets = inputs.sum(dim=1, keepdim=True)  # (B, 1)


def training(model, optimizer):
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.item()


# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dx.watch(model, optimizer) as w:
    losses = list(training(model, optimizer))
lesson.reveal("Does the loss of the cut net fall? (yes or no)", "yes" if losses[-1] < losses[0] else "no")

# %%
missing = w.gradients["norm"].isna().groupby("parameter", sort=False).all()
print("without a gradient at every step:", ", ".join(missing.index[missing]))

# %% [markdown]
# It falls: the head learns alone, on what an encoder of random weights gives it. The loss does not tell. The gradients
# do.


# %%
class Mended(Cut):
    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


torch.manual_seed(seed)
model = Mended()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dx.watch(model, optimizer) as w:
    await dx.live(w).run(training(model, optimizer))

# %% [markdown]
# Look at the lower left: a row for each parameter, a colour for each step. A row that got nothing would be empty. None
# is. Lesson 03 reads the other panels.

# %%
print("every parameter got a gradient at every step:", bool(w.gradients["norm"].notna().all()))

# %% [markdown]
# ## Exercises
#
# ### Exercise · worked
#
# The derivative of (x − 3)², written as a function. Pow contributes 2(x − 3), Sub contributes 1.


# %%
def slope(x):
    return 2 * (x - 3) * 1


lesson.check("slope", slope)

# %% [markdown]
# ### Exercise · faded
#
# Push the gradient through `(w*x + b)**2`. Two lines are missing: what Pow received, and what
# arrives at w.


# %%
def push(w, x, b):
    y = ...  # what Pow received in the forward pass
    grad_y = 2 * y  # what Pow sends to Add
    grad_w = ...  # what Mul sends to w
    return grad_y, grad_w


lesson.check("push", push)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Pow squares its input. What is that input, written with w, x and b?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Add sends on what it receives. At a product, the gradient of one factor is the incoming one times the *other* factor.
#
# </details>
# <details><summary>Solution: push</summary>
#
# ```python
# def push(w, x, b):
#     y = w * x + b
#     grad_y = 2 * y
#     grad_w = grad_y * x
#     return grad_y, grad_w
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The same for `(a*b + a)**2`: return the gradients of `a` and of `b`. All lines are yours, and autograd is left out.


# %%
def sweep(a, b):
    return ...


lesson.check("sweep", sweep)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin as in `push`: what did Pow receive, and what does it send to Add?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Add sends the same to both of its inputs. Which two gradients meet at `a`?
#
# </details>
# <details><summary>Solution: sweep</summary>
#
# ```python
# def sweep(a, b):
#     y = a * b + a
#     grad_y = 2 * y
#     grad_a = grad_y * b + grad_y
#     grad_b = grad_y * a
#     return grad_a, grad_b
# ```
#
# </details>

# %% [markdown]
# ### Exercise · order
#
# Put the reverse sweep of `loss = a * b + a` in order.
#
# - A: the two gradients of `a` are added into `a.grad`
# - B: Mul sends `b` times its gradient to `a`
# - C: the gradient of the loss by itself is 1
# - D: `optimizer.step()` moves `a`
# - E: Add sends its gradient to Mul, and to `a`

# %%
order = ...  # a list of the five letters
lesson.check("order", order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin at the loss. Which node made it?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The leaf `a` is used by Add and by Mul. What has to happen before its gradient is complete?
#
# </details>
# <details><summary>Solution: order</summary>
#
# ```python
# order = ["C", "E", "B", "A", "D"]
# ```
#
# </details>

# %% [markdown]
# ### Exercise · walk
#
# Write `walk(root)`: the names of all nodes from a `grad_fn` on, as `node.name()` gives them, level by level, each
# node once.

# %%
walk = ...  # def walk(root): ...
lesson.check("walk", walk)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep a list of nodes that wait. Take the first, note its name, append what it sends to.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Leave out `None`, and remember in a set which nodes were appended already.
#
# </details>
# <details><summary>Solution: walk</summary>
#
# ```python
# def walk(root):
#     names, waiting, seen = [], [root], {root}
#     while waiting:
#         node = waiting.pop(0)
#         names.append(node.name())
#         for following, _ in node.next_functions:
#             if following is not None and following not in seen:
#                 seen.add(following)
#                 waiting.append(following)
#     return names
# ```
#
# </details>

# %% [markdown]
# ## Further
#
# May be skipped.
#
# <a id="causes"></a>Causes explained here: `graph-used-twice` and `inplace-residual` (section 8), `detach-cut`
# (section 9), `not-scalar` (below).
#
# ### Vector outputs
#
# A gradient needs one number to descend from.

# %%
x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
try:
    (x**2).backward()
except RuntimeError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# `backward(v)` takes a vector of the *output's* shape and computes vᵀJ: row vector times Jacobian, nothing more.
# `torch.func.jacrev` computes the whole Jacobian.

# %%
v = torch.tensor([1.0, 0.0, 2.0])
(x**2).backward(v)
jacobian = torch.func.jacrev(lambda x: x**2)(x.detach())
assert torch.allclose(x.grad, v @ jacobian)
print("vᵀJ:", x.grad.tolist())

# %% [markdown]
# ### Control flow
#
# The graph is built anew in each forward pass, so an `if` leaves no trace of the branch that was not taken.


# %%
def branch(x):
    return x.exp() if x > 0 else x**3


for value in (1.0, -1.0):
    print(value, "→", branch(torch.tensor(value, requires_grad=True)).grad_fn.name())


# %% [markdown]
# A loop and a recursion are recorded as what they did. Afterwards nobody can tell which of the two it was.


# %%
def by_recursion(x, n):
    return x if n == 1 else x * by_recursion(x, n - 1)


def by_loop(x, n):
    y = x
    for _ in range(n - 1):
        y = x * y
    return y


# %%
x = torch.tensor(2.0, requires_grad=True)
recursion, loop, longer = dx.graph(by_recursion(x, 4)), dx.graph(by_loop(x, 4)), dx.graph(by_loop(x, 6))
print(loop)
print("recursion and loop alike:", str(recursion) == str(loop), "  six factors alike:", str(longer) == str(loop))

# %% [markdown]
# `torch.export` wants *one* graph for all inputs. A Python `if` on a value cannot be in it. (`torch.cond` can: it takes
# both branches along.)


# %%
import contextlib
import io
import logging


class Branch(nn.Module):
    def forward(self, x):
        return x.exp() if x.sum() > 0 else x**3


quiet = io.StringIO()  # torch also prints and logs the half-made graph
logging.disable(logging.WARNING)
try:
    with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        torch.export.export(Branch(), (torch.ones(2),))
except RuntimeError as error:
    print(type(error).__name__, "- data-dependent:", "data-dependent" in str(error))
logging.disable(logging.NOTSET)

# %% [markdown]
# ### Kinks
#
# Where a function has no derivative, torch picks one.

# %%
for name, function in {"relu": torch.relu, "abs": torch.abs, "sqrt": torch.sqrt}.items():
    at = torch.tensor(0.0, requires_grad=True)
    function(at).backward()
    print(f"{name:4} at 0: {at.grad.item()}")

# %% [markdown]
# The largest of two equal numbers is a kink, too. `amax` lets them share, `max(dim)` takes one.

# %%
tie = torch.tensor([1.0, 1.0], requires_grad=True)
print("amax    ", torch.autograd.grad(tie.amax(), tie)[0].tolist())
print("max(dim)", torch.autograd.grad(tie.max(dim=0).values, tie)[0].tolist())

# %% [markdown]
# `torch.where` chooses between *values*. Backward still goes through the branch that was not taken, with a gradient of
# zero. The slope of the root is infinite at 0 and NaN below, and zero times either is NaN. Guard the input, not the
# output.

# %%
for value in (0.0, -1.0):
    at = torch.tensor(value, requires_grad=True)
    torch.where(at > 0, at.sqrt(), 0.0).backward()
    safe = torch.tensor(value, requires_grad=True)
    torch.where(safe > 0, torch.where(safe > 0, safe, 1.0).sqrt(), 0.0).backward()
    print(f"at {value:4}   guarded output: {at.grad.item()}   guarded input: {safe.grad.item()}")

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** `x.grad` is 4 after a backward pass. You run forward and backward once more. What is it now?
#
# <details><summary>a) 4</summary>
#
# Not so: that would be replacing. `backward` adds to what is there.
#
# </details>
# <details><summary>b) 8</summary>
#
# Right. The second gradient of 4 is added to the first one, as no `zero_grad` came between.
#
# </details>
# <details><summary>c) 0, since each backward clears the old gradient first</summary>
#
# Not so: nothing clears it but you. That is what `zero_grad` is for.
#
# </details>
#
# **Quiz 2.** Why does the backward pass go in reverse topological order?
#
# <details><summary>a) So that memory is freed as early as possible</summary>
#
# Not so: memory is freed on the way, but a wrong order would give wrong gradients, not only more memory.
#
# </details>
# <details><summary>b) Because the forward pass is run again, backwards</summary>
#
# Not so: the forward is not run again. Nodes use what they kept of it.
#
# </details>
# <details><summary>c) So that every gradient of a node has arrived before the node runs</summary>
#
# Right. A value that is used twice receives two gradients, and only their sum may go on.
#
# </details>
#
# **Quiz 3.** Validation runs under `model.eval()` alone. What is wasted?
#
# <details><summary>a) Nothing, eval() switches autograd off</summary>
#
# Not so: it switches dropout and BatchNorm. The graph is recorded as before.
#
# </details>
# <details><summary>b) Memory and time for a graph that nobody walks</summary>
#
# Right. Every operation records its node and keeps what backward would need. Add `torch.no_grad()`.
#
# </details>
# <details><summary>c) The weights, since they are updated</summary>
#
# Not so: without a backward pass and an optimizer step no weight moves.
#
# </details>
#
# **Open task.** Take a model of your own, record one forward pass with `dx.record(model)`, and look at
# `dx.graph(loss, record=seen)`. Is a parameter without a gradient among the cuts? Then run this lesson with another
# `x0` by `dxdy run 01_autograd_graph -p x0=-1`; the run is kept under `runs/`.

# %%
lesson.score()

# %%
point = torch.tensor(x0, requires_grad=True)
((point - 3) ** 2).backward()
dx.result(slope=point.grad.item(), leaves=len(g.leaves), edges_to_a=sum(g.nodes[e.target].leaf == "a" for e in g.edges))

# %% [markdown]
# **Sources.**
#
# - A. G. Baydin, B. A. Pearlmutter, A. A. Radul, J. M. Siskind: Automatic Differentiation in Machine Learning: a
#   Survey. JMLR 2018. [jmlr.org](https://www.jmlr.org/papers/v18/17-468.html)
# - PyTorch: Autograd mechanics. [docs.pytorch.org](https://docs.pytorch.org/docs/stable/notes/autograd.html)
# - A. Paszke et al.: Automatic differentiation in PyTorch. NIPS Autodiff Workshop 2017.
#   [openreview.net](https://openreview.net/forum?id=BJJsrmfCZ)
