# %% [markdown]
# # 00 · Start here
#
# **Question.** Does my environment work, what should I know before, and which lesson answers which symptom?
#
# **You will**
# - check ten things that every later lesson takes for granted, and read up on those you miss;
# - test your own torch, data, figures and widgets, one cell each;
# - compare one gradient by pen, by finite difference and by autograd;
# - watch a loop of five lines learn a straight line;
# - find the lesson that answers a symptom of your own training.
#
# **Know before.** Python, and what a derivative is. The self-test below finds the gaps.
#
# **Minutes.** 40
#
# **Last verified.** torch 2.13.0, CPU.
#
# **data** → **forward** → **loss** → **backward** → **update** → **comm**
#
# Every lesson shows this strip: the stages that a training step passes through, in order. The lesson's own stage is
# bold. Here it is all of them. *Comm* is what several processes tell each other; it is empty on a single one. A report
# has *reproduce* behind them, which is about the run as a whole: its seed, its checkpoints, its validation.
#
# A training run of yours is in trouble right now? Go to [Symptoms](#Symptoms) and come back later. Otherwise begin
# with *Edit → Clear Outputs of All Cells*, here and in each lesson: the stored outputs give the predictions away.

# %% [markdown]
# ## Self-test
#
# Ten questions. Answer each one aloud or on paper, then unfold it. Read the page beside each one that you missed;
# the lessons explain how gradients flow, not what a tensor is.
#
# <details><summary><b>1. Chain rule.</b> y = (3x − 1)². What is dy/dx at x = 1?</summary>
#
# 12. The outer derivative at the inner value, 2 · (3·1 − 1) = 4, times the inner derivative, 3.
# Read: [Dive into Deep Learning, Calculus](https://d2l.ai/chapter_preliminaries/calculus.html);
# [CS231n, Backpropagation, Intuitions](https://cs231n.github.io/optimization-2/).
#
# </details>
#
# <details><summary><b>2. Tensors and shapes.</b> x has shape (32, 1, 8, 8). What shape has x.flatten(1)?</summary>
#
# (32, 64). The first dimension, the samples of a batch, is kept; 1 · 8 · 8 values of each sample become one row.
# Read: [PyTorch, Tensors](https://docs.pytorch.org/tutorials/beginner/basics/tensorqs_tutorial.html).
#
# </details>
#
# <details><summary><b>3. Broadcasting.</b> a has shape (4, 1), b has shape (3,). What shape has a + b?</summary>
#
# (4, 3), and no error. Shapes are lined up from the right; a dimension of size 1, or a missing one, is repeated.
# Read: [PyTorch, Broadcasting semantics](https://docs.pytorch.org/docs/stable/notes/broadcasting.html).
#
# </details>
#
# <details><summary><b>4. Module.</b> How does a Module know that a layer belongs to it, and why do we call
# model(x) rather than model.forward(x)?</summary>
#
# A Module that is assigned to an attribute is registered, and so is a list of them in an `nn.ModuleList`. Layers in a
# plain Python list are not: `model.parameters()` does not know their weights. `model(x)` runs the hooks around
# `forward`; `model.forward(x)` skips them.
# Read: [PyTorch, Modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
#
# </details>
#
# <details><summary><b>5. Parameter and buffer.</b> BatchNorm has a weight and a running mean. Which one does the
# optimizer see, which one is in state_dict()?</summary>
#
# The weight is a parameter: the optimizer sees it. The running mean is a buffer: the layer updates it itself, in a
# forward pass in train mode. Both are in `state_dict()`, and both move with `model.to(device)`.
# Read: [PyTorch, Buffer](https://docs.pytorch.org/docs/stable/generated/torch.nn.parameter.Buffer.html).
#
# </details>
#
# <details><summary><b>6. Forward and backward.</b> What does loss.backward() compute, and where does the result
# go?</summary>
#
# The derivative of the loss with respect to each leaf tensor that asks for it (`requires_grad`), parameters among
# them. It is *added* to that tensor's `.grad`; nothing is replaced, and no weight moves.
# Read: [PyTorch, Autograd mechanics](https://docs.pytorch.org/docs/stable/notes/autograd.html).
#
# </details>
#
# <details><summary><b>7. Loss.</b> A net for ten classes has learnt nothing and all its logits are equal. What is its
# cross entropy? Does nn.CrossEntropyLoss want logits or probabilities?</summary>
#
# ln 10 ≈ 2.30. It wants logits. A softmax before it gives no warning, and another loss than you meant.
# Read: [CrossEntropyLoss](https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html);
# [CS231n, Sanity checks](https://cs231n.github.io/neural-networks-3/).
#
# </details>
#
# <details><summary><b>8. SGD step.</b> A weight is 1.0, its gradient 4.0, the learning rate 0.1. What is the weight
# after one step of plain SGD?</summary>
#
# 1.0 − 0.1 · 4.0 = 0.6. Against the gradient, since the gradient points uphill.
# Read: [PyTorch, Optimizing model
# parameters](https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html).
#
# </details>
#
# <details><summary><b>9. Train and eval.</b> Which layers act differently after model.eval()? Does it stop the
# recording of gradients?</summary>
#
# Dropout and BatchNorm, for example. No: it records as before. `torch.no_grad()` is what stops the recording; a
# validation needs both, and `model.train()` afterwards.
# Read: [PyTorch, Modules](https://docs.pytorch.org/docs/stable/notes/modules.html).
#
# </details>
#
# <details><summary><b>10. Batch.</b> The loss is a mean over the batch. Each sample is put into the batch twice. What
# happens to the gradient?</summary>
#
# Nothing: it is the mean of the samples' gradients. With a *sum* as the loss it would double.
# Read: [Dive into Deep Learning, Minibatch SGD](https://d2l.ai/chapter_optimization/minibatch-sgd.html).
#
# </details>

# %% tags=["parameters"]
seed = 0
lr = 0.1
steps = 30
pause = 0.05  # seconds between two steps, so that there is something to watch

# %%
import importlib.util
import subprocess
import sys
import time

import torch
from torch import nn

import dxdy_nb as dx
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.exercise import Lesson
from dxdy_nb.training import datasets

lesson = Lesson("00_start_here")

# %% [markdown]
# ## Three of the ten again, checked
#
# With other numbers. Put your answer in place of `...` and run the cell. The check says which property is wrong, never
# the answer: try a wrong one too. Help comes in steps below each cell.

# %%
slope = ...  # as question 1: dy/dx of (3x - 1)², now at x = 2
lesson.check("chain_rule", slope)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Call the inside u = 3x − 1, so that y = u². What is dy/du? What is du/dx?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Take dy/du where x = 2, so at u = 5, and multiply the two.
#
# </details>
# <details><summary>Solution: chain_rule</summary>
#
# ```python
# slope = 2 * (3 * 2 - 1) * 3
# ```
#
# </details>

# %%
shape = ...  # as question 3, a tuple: the shape of (5, 1, 3) + (4, 1)
lesson.check("broadcast", shape)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the shapes below each other, lined up at the right. What stands above the 4?
#
# </details>
# <details><summary>Hint 2</summary>
#
# In each column the larger size wins where the other one is 1 or missing.
#
# </details>
# <details><summary>Solution: broadcast</summary>
#
# ```python
# shape = tuple((torch.zeros(5, 1, 3) + torch.zeros(4, 1)).shape)
# ```
#
# </details>

# %%
stepped = ...  # as question 8: weight 2.0, gradient -3.0, learning rate 0.1
lesson.check("sgd_step", stepped)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A negative gradient: the loss falls when the weight grows. Which way should the weight go?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The change is the learning rate times the gradient.
#
# </details>
# <details><summary>Solution: sgd_step</summary>
#
# ```python
# stepped = 2.0 - 0.1 * -3.0
# ```
#
# </details>

# %% [markdown]
# ## How a lesson works
#
# **dxdy** is the name of this workbook. It is no algorithm, and no library to be found elsewhere; a name that contains
# "dxdy" need not be a derivative. In the cells `dx` is the package behind the workbook. In other people's code `dx`
# often means the gradient of the loss with respect to x. That is dL/dx, not dx/dy, and here it is called so.
#
# **Predict, run, explain.** Before each surprise a cell asks for your prediction. Write it in place of `None`, a word
# in quotes (`"yes"`), and run on: it will stand beside what was measured. A number within 5 % counts as right. A wrong
# prediction that you can explain afterwards teaches more than a right one.
#
# **Run All never stops at you.** A prediction left open and an exercise not tried are noted, and the lesson goes on.
# Cells share their variables, so run them in order.
#
# **Start again** with *Kernel → Restart Kernel and Run All Cells*. To get the lesson back as it was, type
# `git restore notebooks/00_start_here.ipynb` in the project's folder. That discards your answers: copy the file first.
#
# **Other numbers.** The cell with `seed = 0` above holds the lesson's parameters. Edit it and run all. The text was
# written for the numbers that stand there now. Or leave the notebook alone and type `dxdy run 03 -p lr=0.1` in a
# terminal (`.venv/bin/dxdy` where the shell does not know `dxdy`): papermill executes a copy with that number, and the
# run is kept in a folder of its own under `runs/`.
#
# **How the lessons are tested.** nbval executes each stored notebook again and compares the printed text, except where
# a cell describes the machine. papermill runs each lesson with other parameters, and bounds are kept on the results
# that a lesson names.
#
# Try it: the training set has 1,199 digits. A loader hands them out in batches of 64.

# %%
lesson.predict("How many batches of 64 make one epoch?", None)

# %%
digits = datasets.load("digits")
loader = datasets.loader(digits.train, batch_size=64)
lesson.reveal("How many batches of 64 make one epoch?", len(loader))

# %% [markdown]
# <details><summary>Why?</summary>
#
# 1199 / 64 is a little under 19. The last batch holds what is left, 1199 − 18 · 64 = 47 samples. Whoever averages
# losses over batches counts those 47 as if they were 64.
#
# </details>

# %% [markdown]
# ## Does my environment work?
#
# One check a cell. A check that fails ends Run All, because nothing after it could be trusted; its message says what to
# do next. First what differs from machine to machine, as `dxdy env` says it in a terminal; it changes nothing. What is
# not *ok* there comes with the next command. No GPU is needed here.

# %% tags=["nbval-ignore-output"]
fit = subprocess.run([sys.executable, "-m", "dxdy_nb.cli", "env"], capture_output=True, text=True)
print(fit.stdout)

# %%
assert torch.__version__.startswith("2.13."), (
    f"This workbook is checked with torch 2.13, this is {torch.__version__}. "
    "Next: in the project's folder run  pip install -e . -c constraints.txt  and restart the kernel."
)
print("torch 2.13: yes")

# %%
assert torch.get_default_dtype() == torch.float32, (
    f"The default dtype is {torch.get_default_dtype()}, something in this process changed it. "
    "Next: Kernel → Restart Kernel, then run from the top."
)
print("default dtype float32: yes")

# %% [markdown]
# Does autograd work? The derivative of (x − 3)² is 2(x − 3), so 4 at x = 5. Both numbers are exact in float32.

# %%
x5 = torch.tensor(5.0, requires_grad=True)
((x5 - 3) ** 2).backward()
assert x5.grad.item() == 4.0, "Autograd is wrong here. Next: restart the kernel; if it stays, reinstall torch."
print("dy/dx at 5 =", x5.grad.item())

# %% [markdown]
# Is the data there and undamaged? `datasets.load` above compared the file's sha256 with the one in `data/SHA256SUMS`.
# A missing or damaged file ends in an error that names the command that restores it. Where the digits come from, and
# what they cannot tell, is on their [data card](../data/DATA_CARD.md).

# %%
sizes = len(digits.train), len(digits.validation), len(digits.test)
assert sizes == (1199, 299, 299), "The data has another size. Next: git checkout -- data, then restart the kernel."
print("training, validation, test:", *sizes)
print("one batch:", tuple(next(iter(loader)).x.shape))

# %% [markdown]
# Can figures be drawn? You should see ten digits in a row, 8 × 8 pixels each. If you see only a line of text, this
# front end shows no PNG: open the notebook in JupyterLab.

# %%
alt = "ten handwritten digits in a row, one of each class"
figure, axes = plots.new_figure(alt, width=8.0, height=1.2, columns=10)
for label, ax in enumerate(axes[0]):
    first = (digits.train.y == label).nonzero()[0, 0]
    ax.imshow(digits.train.x[first, 0], cmap="gray_r")
    ax.set_axis_off()
plots.show(figure)

# %% [markdown]
# Are widgets there? Live figures, the Stop button and later the sliders need them.

# %%
assert importlib.util.find_spec("ipywidgets"), (
    "ipywidgets is missing in this kernel's environment. "
    "Next: in the project's folder run  pip install -e . -c constraints.txt  and reload the browser page."
)
print("ipywidgets: importable")

# %% [markdown]
# <details><summary>Does my browser draw widgets too?</summary>
#
# Run this in a new cell:
#
# ```python
# import ipywidgets
#
# ipywidgets.IntSlider(description="move me")
# ```
#
# You should get a slider. A line such as `IntSlider(value=0, …)` instead means that the front end does not know
# ipywidgets: start JupyterLab from the same environment as the kernel, and reload the page.
#
# </details>

# %% [markdown]
# ## One gradient, three ways
#
# Five points on the line y = 2x + 1. A model that knows nothing yet, prediction = w·x + b with w = 0 and b = 0. Its
# loss is the mean squared error, and here it is mean(y²) = 9.
#
# By pen. Let r = w·x + b − y be the residuals. Then
#
# $$L = \tfrac15 \sum r^2, \qquad \frac{\partial L}{\partial w} = \tfrac25 \sum r\,x, \qquad
# \frac{\partial L}{\partial b} = \tfrac25 \sum r .$$
#
# The points are x = −2, −1, 0, 1, 2 and y = −3, −1, 1, 3, 5. At w = b = 0 each residual is −y.

# %%
x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).unsqueeze(1)  # (5, 1): five samples with one feature
y = 2 * x + 1  # (5, 1)

# %%
lesson.predict("dL/dw at w = 0, b = 0", None)

# %% [markdown]
# Now by finite difference: move w a little to both sides, see how much the loss changes, divide. In float64, since the
# difference of two nearly equal numbers loses digits.


# %%
def loss_at(w, b):
    return (w * x.double() + b - y.double()).square().mean()


h = 1e-4
slope_w = (loss_at(h, 0.0) - loss_at(-h, 0.0)) / (2 * h)
slope_b = (loss_at(0.0, h) - loss_at(0.0, -h)) / (2 * h)

# %% [markdown]
# And by autograd:

# %%
w = torch.zeros((), dtype=torch.float64, requires_grad=True)
b = torch.zeros((), dtype=torch.float64, requires_grad=True)
loss_at(w, b).backward()
lesson.reveal("dL/dw at w = 0, b = 0", w.grad.item())

# %%
pen_w, pen_b = -8.0, -2.0  # -2/5 · (6 + 1 + 0 + 3 + 10)  and  -2/5 · 5
rows = {"w": (pen_w, slope_w, w.grad), "b": (pen_b, slope_b, b.grad)}
for name, (pen, finite, auto) in rows.items():
    assert abs(finite - pen) < 1e-8 and abs(auto - pen) < 1e-8  # float64
    print(f"dL/d{name}   pen {pen:.4f}   finite difference {finite:.4f}   autograd {auto:.4f}")

# %% [markdown]
# Three ways agree within 1e-8. The last two share the forward pass and nothing else, the pen shares no code at all.
# That is what this workbook calls a checked gradient. [Lesson 02](02_hand_check.ipynb) is about the cases in which they
# do not agree.
#
# The number is a slope. Along w, with b held at 0, the loss is a bowl, and −8 is how steeply it falls at w = 0. The
# minus sign says: a larger w makes the loss smaller.

# %%
wide, near = torch.linspace(-1, 4, 60).double(), torch.linspace(-1, 1, 60).double()
bowl = [loss_at(value, 0.0).item() for value in wide]
tangent = 9 + w.grad.item() * near
alt = "a bowl: the loss over w, and its falling tangent at w equal to zero"
series = {"loss at b = 0": (wide, bowl), "slope dL/dw at w = 0": (near, tangent)}
plots.show(plots.curves(series, alt=alt, x="w", y="mean squared error"))

# %% [markdown]
# ## The smallest training run
#
# A training step has five lines. Read them against the strip: *data* is `x, y`; then forward, loss, backward, update.
# `zero_grad` comes first because `backward` only ever adds to `.grad`.
#
# `dx.watch` looks on and changes nothing. `dx.live` draws what it saw while the loop runs; in a stored notebook or
# without a reader one picture stays. The loop is an ordinary generator: all we ask of it is one `yield` a step. `await`
# lets the page redraw between two steps.
#
# Both w and b have their target: 2 and 1. Both feel the same learning rate.

# %%
lesson.predict("Which ends nearer to its target, w or b?", None)

# %%
torch.manual_seed(seed)
model = nn.Linear(1, 1)  # one weight, one bias
optimizer = torch.optim.SGD(model.parameters(), lr=lr)


def loop():
    for _ in range(steps):
        optimizer.zero_grad()
        prediction = model(x)  # (5, 1)
        loss = nn.functional.mse_loss(prediction, y)
        loss.backward()
        optimizer.step()
        time.sleep(pause)
        yield


with dx.watch(model, optimizer) as watched:
    await dx.live(watched).run(loop())

# %%
fitted_w, fitted_b = model.weight.item(), model.bias.item()
print(f"w {fitted_w:.2f}   b {fitted_b:.2f}")
nearer = "w" if abs(fitted_w - 2) < abs(fitted_b - 1) else "b"
lesson.reveal("Which ends nearer to its target, w or b?", nearer)

# %% [markdown]
# <details><summary>Why?</summary>
#
# For these five points L = 2(w − 2)² + (b − 1)². A step with learning rate 0.1 multiplies the error of w by
# 1 − 0.1 · 4 = 0.6 and that of b by 1 − 0.1 · 2 = 0.8. After thirty steps 0.6³⁰ is about 2e-7 and 0.8³⁰ about 1e-3.
# One learning rate, two speeds: how steep the loss is in a direction decides how fast it is walked down.
#
# </details>

# %% [markdown]
# Read the picture. The loss is on a logarithmic axis, so a straight piece means "the same factor each step". At a rate
# of 0.1 it falls steeply while w still has a part in it, and less steeply once only b is left. Lower left shows the
# same by parameter: the gradient of `weight` fades first. Lower right shows how far a step moves a tensor, relative to
# its size, at every tenth step; its grey band is a rule of thumb, no limit.
#
# What was seen is a table, one row a step:

# %%
watched.steps[["loss", "lr", "grad_norm", "effective_batch"]].head(3).round(2)

# %% [markdown]
# ## An error, read
#
# `nn.functional.mse_loss` takes the mean: one number. Suppose we forget the mean and call `backward` on five squared
# errors at once.

# %%
lesson.predict("Which type of error does backward raise on five losses?", None)

# %%
squares = (model(x) - y).square()  # (5, 1)
try:
    squares.backward()
    raised = "none"
except RuntimeError as error:
    raised = type(error).__name__
    print(raised, "-", str(error).splitlines()[0][:70])
lesson.reveal("Which type of error does backward raise on five losses?", raised)

# %% [markdown]
# How to read it, in three steps that serve for most torch errors.
#
# 1. **The last line first.** It says what torch wanted: a scalar, one number. "Implicitly created" is the 1 that every
#    backward pass starts from, dL/dL. For five outputs there is no such natural start.
# 2. **The last line of *your* code in the traceback.** Here it is `squares.backward()`. The stage is *backward*, but
#    the fault lies before it, in the *loss*.
# 3. **The shapes that go into that line.** `squares.shape` is (5, 1), a loss has the shape ().
#
# A wrong shape on the way in reads like this:

# %%
try:
    nn.Linear(2, 1)(x)
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).splitlines()[0][:70])

# %% [markdown]
# `mat1` is the input, (5, 1); `mat2` is the layer's weight, transposed, (2, 1). The two inner numbers must be equal:
# the layer expects two features, the data has one. The stage is *forward*, the fault is in the layer or in the *data*.

# %% [markdown]
# ## Lessons
#
# <table>
# <tr><th>#</th><th>notebook</th><th>the question it answers</th><th></th></tr>
# <tr><td>00</td><td><a href="00_start_here.ipynb">00_start_here</a></td>
# <td>Does my environment work, what should I know before, and which lesson answers which symptom?</td>
# <td>core</td></tr>
# <tr><td>01</td><td><a href="01_autograd_graph.ipynb">01_autograd_graph</a></td>
# <td>What does PyTorch record in the forward pass, and how does a gradient travel back?</td><td>core</td></tr>
# <tr><td>02</td><td><a href="02_hand_check.ipynb">02_hand_check</a></td>
# <td>How do I prove that a gradient is right? By hand, by finite difference, by autograd</td><td>core</td></tr>
# <tr><td>03</td><td><a href="03_baseline_run.ipynb">03_baseline_run</a></td>
# <td>What is a trustworthy baseline? One device, fp32, real data, every step logged</td><td>core</td></tr>
# <tr><td>04</td><td><a href="04_gradients_of_gradients.ipynb">04_gradients_of_gradients</a></td>
# <td>When is <code>create_graph</code> needed, and when not?</td><td>further</td></tr>
# <tr><td>05</td><td><a href="05_optimizer_tuning.ipynb">05_optimizer_tuning</a></td>
# <td>How do I choose initialisation, optimizer, learning rate and schedule by experiment?</td><td>core</td></tr>
# <tr><td>06</td><td><a href="06_precision_and_accumulation.ipynb">06_precision_and_accumulation</a></td>
# <td>What do AMP and gradient accumulation change, and when are they <i>not</i> equivalent?</td><td>core</td></tr>
# <tr><td>07</td><td><a href="07_debugging_clinic.ipynb">07_debugging_clinic</a></td>
# <td>Which stage is at fault: data, forward, loss, backward, update?</td><td>core</td></tr>
# <tr><td>08</td><td><a href="08_data_parallel.ipynb">08_data_parallel</a></td>
# <td>How do I go to several processes without changing the result, and what is at fault in <i>comm</i>?</td>
# <td>core</td></tr>
# <tr><td>09</td><td><a href="09_sharding.ipynb">09_sharding</a></td>
# <td>What if the model does not fit on one device?</td><td>further</td></tr>
# <tr><td>10</td><td><a href="10_reproducible_experiments.ipynb">10_reproducible_experiments</a></td>
# <td>How do I make a result repeatable, comparable and able to fail usefully?</td><td>core</td></tr>
# <tr><td>11</td><td><a href="11_preflight.ipynb">11_preflight</a></td>
# <td>Is <i>my own</i> model ready for a long run?</td><td>core</td></tr>
# </table>
#
# **You are learning.** In order: 00 → 01 → 02 → 03 → 05 → 06 → 07 → 08 → 10 → 11; 04 and 09 when you need them.
#
# **You are an engineer with a run in trouble.** The table below, its probe, then the lesson that it names. If the
# gradient itself is under suspicion, 02; if you have no run to compare with, 03. Then 07.
#
# **You are a team.** 00 for everybody, so that all environments are the same; 03 as the run that every change is
# compared with. Then 10, and 11 before anything expensive.

# %% [markdown]
# ## Symptoms
#
# The probes are plain torch. They ask for `model`, `optimizer`, `loss_fn` and a batch `x, y` of your own, just after
# `loss.backward()` and before `optimizer.step()` where nothing else is said. They leave your weights alone. A forward
# pass more does move BatchNorm's running statistics and the random numbers of dropout, so probe on a copy of the run.
#
# <table>
# <tr><th>symptom</th><th>stage</th><th>look at this first</th><th>lesson</th></tr>
# <tr><td>My loss is NaN or infinite</td><td>data, forward, loss</td><td><pre>
# torch.isfinite(x).all(), torch.isfinite(model(x)).all()
# torch.isfinite(loss_fn(model(x), y))
# </pre>The first <code>False</code>, in this order, names the stage. If the weights themselves are not finite any
# more, look at the step before.</td>
# <td><a href="03_baseline_run.ipynb">03</a>,
# <a href="07_debugging_clinic.ipynb">07</a></td></tr>
# <tr><td>It does not move</td><td>update</td><td><pre>
# held = {id(p) for g in optimizer.param_groups for p in g["params"]}
# [n for n, p in model.named_parameters() if id(p) not in held]
# </pre>A name here is a weight that the optimizer does not hold. No name? Then the learning rate, then the next
# two rows.</td>
# <td><a href="05_optimizer_tuning.ipynb">05</a>, <a href="07_debugging_clinic.ipynb">07</a></td></tr>
# <tr><td>Gradients are None</td><td>forward, backward</td><td><pre>
# loss.requires_grad
# [n for n, p in model.named_parameters() if p.grad is None]
# </pre>Between these parameters and the loss the graph is cut, or they were not used. Look for <code>.item()</code>,
# <code>.detach()</code>, <code>.numpy()</code>, <code>torch.tensor(…)</code>.</td>
# <td><a href="01_autograd_graph.ipynb">01</a></td></tr>
# <tr><td>Gradients are zero</td><td>forward, backward</td><td><pre>
# grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
# {n: (g != 0).float().mean().item() for n, g in grads.items()}
# </pre>The share that is not zero. 0 in a layer and all before it: that layer lets nothing through, a dead ReLU for
# example.</td>
# <td><a href="01_autograd_graph.ipynb">01</a>,
# <a href="07_debugging_clinic.ipynb">07</a></td></tr>
# <tr><td>I do not trust a gradient</td><td>backward</td><td><pre>
# u = torch.randn(3, dtype=torch.float64, requires_grad=True)
# torch.autograd.gradcheck(my_function, (u,))
# </pre>In float64 only; the lesson shows why.</td>
# <td><a href="02_hand_check.ipynb">02</a></td></tr>
# <tr><td>The loss jumps, or grows</td><td>update</td><td><pre>
# grads = [p.grad for p in model.parameters() if p.grad is not None]
# torch.nn.utils.get_total_norm(grads)
# </pre>Log it at each step, beside the learning rate. Does the norm rise before the loss does?</td>
# <td><a href="03_baseline_run.ipynb">03</a>, <a href="05_optimizer_tuning.ipynb">05</a></td></tr>
# <tr><td>The loss falls, then stays; all predictions look alike</td><td>loss</td><td><pre>
# prediction.shape, y.shape
# prediction.std(dim=0)
# </pre>Two shapes that differ may be broadcast in silence.</td>
# <td>this one, <a href="#Further">Further</a></td></tr>
# <tr><td>Validation is better than training</td><td>forward, data</td><td><pre>
# model.eval()
# with torch.no_grad(): print(loss_fn(model(x), y))
# </pre>On <i>training</i> samples; then back to <code>model.train()</code>. Gap gone: it was dropout, or a training
# loss averaged over an epoch in which the model still got better. Gap still there: is validation easier, smaller, or
# not augmented?</td>
# <td><a href="03_baseline_run.ipynb">03</a></td></tr>
# <tr><td>Accumulation or mixed precision changes the result</td><td>loss, update</td><td><pre>
# [len(y) for x, y in micro_batches]
# scaler.is_enabled(), scaler.get_scale()
# </pre>Mean losses of unequal micro-batches do not add up to the mean of the large batch.</td>
# <td><a href="06_precision_and_accumulation.ipynb">06</a></td></tr>
# <tr><td>Resume gives another curve</td><td>reproduce</td><td><pre>
# {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}
# torch.get_rng_state().sum()
# </pre>Once when saving and once after loading. What differs was not kept. Then the position in the data.</td>
# <td><a href="10_reproducible_experiments.ipynb">10</a></td></tr>
# <tr><td>Ranks drift apart</td><td>comm</td><td><pre>
# total = sum(p.detach().double().sum().item() for p in model.parameters())
# print(torch.distributed.get_rank(), total)
# </pre>On each rank after the same step. Two numbers prove a drift; one number does not exclude it.</td>
# <td><a href="08_data_parallel.ipynb#comm">08</a></td></tr>
# <tr><td>The model does not fit</td><td>any</td><td><pre>
# size = sum(p.numel() * p.element_size() for p in model.parameters())
# print(size / 2**20, "MiB of weights")
# </pre>Times two with gradients, times four with Adam's two moments. The rest is what the graph saves.</td>
# <td><a href="06_precision_and_accumulation.ipynb">06</a>,
# <a href="09_sharding.ipynb">09</a></td></tr>
# </table>
#
# On a healthy step the probes are dull. Here is ours:

# %%
optimizer.zero_grad()
prediction = model(x)
loss = nn.functional.mse_loss(prediction, y)
loss.backward()
print("finite data, prediction, loss:", *(t.isfinite().all().item() for t in (x, prediction, loss)))
print("parameters without a gradient:", [n for n, p in model.named_parameters() if p.grad is None])
print("prediction and target:", tuple(prediction.shape), tuple(y.shape))

# %% [markdown]
# ## Further
#
# ### A break without an error
#
# The two errors above were loud. This one is silent. The target comes as five plain numbers, shape (5,), the
# prediction has shape (5, 1), and the loss is written by hand.

# %%
flat = y.squeeze(1)  # (5,)
torch.manual_seed(seed)
broken = nn.Linear(1, 1)
optimizer = torch.optim.SGD(broken.parameters(), lr=lr)
for _ in range(steps):
    optimizer.zero_grad()
    loss = (broken(x) - flat).square().mean()
    loss.backward()
    optimizer.step()

# %% [markdown]
# No error, no warning, and at a rate of 0.1 the loss did fall. What was learnt?

# %%
print("shape of the difference:", tuple((broken(x) - flat).shape))
w_size, b_end = abs(broken.weight.item()), broken.bias.item()
print(f"loss {loss.item():.1f}   |w| {w_size:.1f}   b {b_end:.1f}")
points, models = x.squeeze(1), {"shapes agree": model, "broadcast": broken}
with torch.no_grad():
    series = {name: (points, each(x).squeeze(1)) for name, each in models.items()}
alt = "a rising line where the shapes agree, a flat one where they were broadcast"
plots.show(plots.curves(series, alt=alt, x="x", y="prediction"))

# %% [markdown]
# (5, 1) minus (5,) is (5, 5): each prediction was compared with *all five* targets. The best answer to that is their
# mean for every x: w = 0 and b = 1. What is left of the loss then is the variance of the targets, 8.
#
# `nn.functional.mse_loss` would have warned here, and only warned. A line such as `assert prediction.shape == y.shape`
# in front of a loss costs nothing.

# %% [markdown]
# ## Exercises
#
# ### Exercise · order
#
# Some earlier check has left numbers in `.grad`. Put the five lines of a training step in order.
#
# | | |
# |---|---|
# | P | `optimizer.step()` |
# | Q | `loss = nn.functional.mse_loss(prediction, y)` |
# | R | `optimizer.zero_grad()` |
# | S | `prediction = model(x)` |
# | T | `loss.backward()` |

# %%
order = ...  # a list of five letters, ["…", "…", …]
lesson.check("order", order)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Ask of each line what it reads, and which line writes that.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `backward` writes `.grad` by adding to it; `step` reads `.grad`.
#
# </details>
# <details><summary>Solution: order</summary>
#
# ```python
# order = ["R", "S", "Q", "T", "P"]
# ```
#
# `R` may also stand anywhere before `T`.
#
# </details>

# %% [markdown]
# ### Exercise · worked
#
# One step of SGD without an optimizer, for the model prediction = w·x that has no bias. Each line is a stage.


# %%
def weight_step(w, x, y, lr):
    w = w.clone().requires_grad_()  # a leaf of our own: the caller's tensor stays as it is
    loss = (w * x - y).square().mean()  # forward and loss
    loss.backward()  # fills w.grad
    return (w - lr * w.grad).detach()  # update, against the gradient


print("w after one step:", round(weight_step(torch.tensor(0.0), x, y, 0.1).item(), 4))

# %% [markdown]
# From 0 by −0.1 · (−8) to 0.8.
#
# ### Exercise · faded
#
# The same step for a line with both w and b. Two lines are missing.


# %%
def line_step(w, b, x, y, lr):
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    loss = ...  # the mean squared error of the line w * x + b
    loss.backward()
    new_w, new_b = ...  # both, after one step of SGD
    return torch.stack([new_w, new_b]).detach()


lesson.check("line_step", line_step)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The first missing line is the worked one with `+ b` inside the square.
#
# </details>
# <details><summary>Hint 2</summary>
#
# After `loss.backward()` there are `w.grad` and `b.grad`. Each tensor moves against its own one, `lr` times its size.
#
# </details>
# <details><summary>Solution: line_step</summary>
#
# ```python
# def line_step(w, b, x, y, lr):
#     w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
#     loss = (w * x + b - y).square().mean()
#     loss.backward()
#     new_w, new_b = w - lr * w.grad, b - lr * b.grad
#     return torch.stack([new_w, new_b]).detach()
# ```
#
# </details>

# %% [markdown]
# ### Exercise · own
#
# The whole fit. `x` and `y` have the shape (n,). Start from w = 0 and b = 0, take `steps` steps, return both in one
# tensor of shape (2,). With or without `torch.optim`, as you like.


# %%
def fit(x, y, lr, steps):
    return ...


lesson.check("fit", fit)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One tensor `wb = torch.zeros(2, requires_grad=True)` holds both; the line is `wb[0] * x + wb[1]`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.optim.SGD([wb], lr=lr)` takes a list of tensors. Then the five lines of the exercise on order, in a loop.
#
# </details>
# <details><summary>Solution: fit</summary>
#
# ```python
# def fit(x, y, lr, steps):
#     wb = torch.zeros(2, requires_grad=True)
#     optimizer = torch.optim.SGD([wb], lr=lr)
#     for _ in range(steps):
#         optimizer.zero_grad()
#         loss = (wb[0] * x + wb[1] - y).square().mean()
#         loss.backward()
#         optimizer.step()
#     return wb.detach()
# ```
#
# </details>

# %% [markdown]
# ## Exit ticket
#
# **Quiz 1.** You call `loss.backward()` in two steps of a loop and never clear anything. What is in `.grad` now?
#
# <details><summary>a) the gradient of the second loss</summary>
#
# Not so: nothing replaces what stands in `.grad`. That is why a step begins with `zero_grad()`.
#
# </details>
# <details><summary>b) the mean of both gradients</summary>
#
# Not so: nothing divides. Whoever accumulates on purpose has to divide the loss.
#
# </details>
# <details><summary>c) the sum of both gradients</summary>
#
# Right. `backward` adds to `.grad`, always.
#
# </details>
# <details><summary>d) nothing: the second call raises</summary>
#
# Not so: each step built a graph of its own. A second call on the *same* graph is what raises.
#
# </details>

# %% [markdown]
# **Quiz 2.** The loss is NaN at step 40. What do you do first?
#
# <details><summary>a) Lower the learning rate until it goes away</summary>
#
# Not so: that may hide a NaN in the data or a division by zero until a later step, and tells you nothing about where
# it came from.
#
# </details>
# <details><summary>b) Clip the gradients</summary>
#
# Not so: `clip_grad_norm_` divides by the norm of all gradients together. One NaN makes that norm NaN, and then all
# gradients.
#
# </details>
# <details><summary>c) Ask data, prediction and loss of that step, in this order, whether they are finite</summary>
#
# Right. The first that is not names the stage; everything after it is a consequence.
#
# </details>

# %% [markdown]
# **Quiz 3.** A finite difference in float32 with h = 1e-6 says −7.63 where autograd says −8. What follows?
#
# <details><summary>a) Nothing yet: take the difference again in float64</summary>
#
# Right. At a loss of 9 neighbouring float32 numbers are 1e-6 apart. The loss changes by 16e-6 between the two points,
# so the rounding alone can make several percent.
#
# </details>
# <details><summary>b) Autograd is wrong by five percent</summary>
#
# Not so: the less exact of the two is the difference. In float64 it says −8.0000 with the same h.
#
# </details>
# <details><summary>c) h is too large: take 1e-7</summary>
#
# Not so: in float32 the two losses are then the same number, and the difference is 0.
#
# </details>

# %% [markdown]
# **Open task.** How large may the learning rate be? Write down what you expect of w for `lr` = 0.25, 0.5 and 0.6, then
# run the lesson with each, for example `dxdy run 00_start_here -p lr=0.5`. Each run is kept under `runs/` with the
# results below, also the one that goes wrong. Explain one of the three with the factor 1 − 4·lr.

# %%
lesson.score()

# %%
final = nn.functional.mse_loss(model(x), y).item()
dx.result(w=round(fitted_w, 2), b=round(fitted_b, 2), loss=round(final, 4), slope_w=round(slope_w.item(), 4))

# %% [markdown]
# **Sources.** D. E. Rumelhart, G. E. Hinton and R. J. Williams, *Learning representations by back-propagating errors*,
# Nature 323, 1986, <https://doi.org/10.1038/323533a0>. A. Paszke and others, *PyTorch: An Imperative Style,
# High-Performance Deep Learning Library*, 2019, <https://arxiv.org/abs/1912.01703>. E. Alpaydin and C. Kaynak,
# *Optical Recognition of Handwritten Digits*, 1998, <https://doi.org/10.24432/C50P49>.
