"""What ``Report.save_repro`` writes: a script, tensors, and a pickle that together show the first error again."""

import contextlib
import io
import math
import os
import pickle
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from string import Template
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.diagnosis.report import Finding
from dxdy_nb.diagnosis.subject import Subject
from dxdy_nb.errors import DxdyError

RUNS = {"loader": "for batch in loader: pass", "on_epoch_end": "on_epoch_end()"}  # by where an exception came from
STEPS = """for step, batch in enumerate(recorded):
    print(f"step {step}: loss {train_step(model, batch, optimizer, loss_fn, step)}")"""
LARGEST = 64 * 2**20  # bytes of a pickle that holds loaders and data sets too
SCRIPT = Template("""\
$said
# Run it with python: it needs torch and cloudpickle$more, and the two files beside it.
import pickle, sys, torch
from pathlib import Path
sys.path += $path  # where your own modules were found
here = Path(__file__)
kept = torch.load(here.with_suffix(".pt"), weights_only=True)
# A pickle runs code when it is opened: open only your own.
[$names] = pickle.loads(here.with_suffix(".pkl").read_bytes()).values()
$unpack
$define
# The evidence.
try:
$check
except Exception as error:
    print("the check raised", repr(error))
# The step itself, from the kept state.
model.zero_grad()
$load
$run
""")


def save(experiment: Experiment, finding: Finding, path: Path) -> None:
    """Write ``path``, and beside it a .pt file (batches, weights, optimizer state) and a .pkl file (the objects).

    The objects are kept as they are now, so write it before training goes on; a model that was moved to another type or
    device meanwhile is kept in those that the batches were made for.

    Raises
    ------
    DxdyError
        The name is no script's, the place cannot be written, or model, loss, optimizer or step cannot be pickled.
    """
    if path.suffix != ".py":
        raise DxdyError(f"save_repro: expected a script's name, like broken.py; got {str(path)!r}.")
    subject = experiment.subject
    with _as_diagnosed(experiment):
        batches = _batches(experiment)
        parts = {"recorded": batches, "model": subject.model.state_dict(), "rng": torch.get_rng_state()}
        if subject.optimizer is not None:
            parts["optimizer"] = subject.optimizer.state_dict()
        plain = {name: part for name, part in parts.items() if _is_plain(part)}
        objects, pickled = _pickled(subject, batches, {} if "recorded" in plain else {"recorded": batches})
        load = [f'{name}.load_state_dict(kept["{name}"])' for name in ("model", "optimizer") if name in plain]
        step_of = getattr(subject.train_step, "__module__", "")
    text = SCRIPT.substitute(
        said=textwrap.indent(str(replace(finding, check="")), "# ", lambda line: True),
        more=" and dxdy_nb (the step is one that it heard)" * str(step_of).startswith("dxdy_nb."),
        path=repr(_own_path()),
        names=", ".join(objects),
        unpack="\n".join(['recorded = kept["recorded"]'] * ("recorded" in plain) + _unpack(batches)),
        define="" if "train_step" in objects else _usual_step(subject, batches),
        check=textwrap.indent(finding.check, "    "),
        load="\n".join([*load, 'torch.set_rng_state(kept["rng"])']),
        run=RUNS.get(experiment.seen.error_place, STEPS),
    )
    try:
        path.write_text(text)
        path.with_suffix(".pkl").write_bytes(pickled)
        torch.save(plain, path.with_suffix(".pt"))
    except OSError as error:
        raise DxdyError(f"{path}: cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _as_diagnosed(experiment: Experiment) -> Iterator[None]:
    """Inside the block parameters and buffers have the types, and are on the devices, that they had when diagnosed."""
    now: dict[str, Tensor] = {**experiment.subject.parameters, **dict(experiment.subject.model.named_buffers())}
    then = [(t, experiment.kinds[name]) for name, t in now.items() if name in experiment.kinds]
    moved = [(t, t.data, t.grad, kind) for t, kind in then if (t.dtype, t.device) != kind]
    try:
        for t, data, _, (dtype, device) in moved:
            t.grad, t.data = None, data.to(device, dtype)
        yield
    finally:
        for t, data, grad, _ in moved:
            t.data, t.grad = data, grad


def _batches(experiment: Experiment) -> list[Any]:
    """Return the batch that shows the error on its own, else all batches up to it."""
    steps = experiment.seen.steps
    wrong = next((s for s in steps if s.error or any(not math.isfinite(b.value) for b in s.backwards)), None)
    if wrong is None or wrong is steps[0]:
        return experiment.batches[:1]
    experiment.deadline = time.monotonic() + 60
    alone = experiment.trial(wrong.batch)
    same = type(alone.error) is type(wrong.error) and (wrong.error or not math.isfinite(alone.value))
    upto = [wrong] if same else steps[: steps.index(wrong) + 1]
    return [step.batch for step in upto if step.batch is not None]


def _is_plain(part: Any) -> bool:
    """Return whether torch.load gives a thing back without running code."""
    try:
        torch.save(part, buffer := io.BytesIO())
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return True


class _Pickler(cloudpickle.Pickler):
    """Keeps the value of a tensor that has a graph, which a pickle would turn into a parameter without one."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a thing is pickled."""
        if torch.is_tensor(value) and value.grad_fn is not None:
            return value.detach().__reduce_ex__(2)
        return super().reducer_override(value)


def _pickled(subject: Subject, batches: list[Any], more: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the objects by name, and their pickle: all of them, or where that cannot be, what a step needs."""
    given = {f.name: getattr(subject, f.name) for f in fields(Subject) if getattr(subject, f.name) is not f.default}
    given["optimizers"] = subject.all_optimizers
    step = {name: given.get(name) for name in ("model", "loss_fn", "optimizer", "optimizers")}
    step |= {"loader": batches} | {name: given[name] for name in ("train_step",) if name in given} | more
    for objects in (step | given, step):
        try:
            _Pickler(buffer := io.BytesIO()).dump(objects)
            pickle.loads(pickled := buffer.getvalue())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if len(pickled) <= LARGEST or objects is step:
            return objects, pickled
    raise DxdyError(f"save_repro: model, loss, optimizer or train_step cannot be pickled: {reason}")


def _own_path() -> list[str]:
    """Return the folders that modules are found in, without Python's own and the installed packages'."""
    known = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    return [p for p in dict.fromkeys(map(os.path.abspath, sys.path)) if os.path.isdir(p) and not p.startswith(known)]


def _unpack(batches: list[Any]) -> list[str]:
    """Return lines that give batch, x and y their values."""
    batch = batches[-1] if batches else ()
    pair = ["x = y = batch"]
    if isinstance(batch, (tuple, list)) or hasattr(batch, "keys"):
        pair = [f"x, *_, y = batch{'.values()' * hasattr(batch, 'keys')}"] * (len(batch) > 1)
    return ["batch = recorded[-1]", *pair] if batches else []


def _usual_step(subject: Subject, batches: list[Any]) -> str:
    """Return the source of the step that ``diagnose`` takes where none is given."""
    batch, own = (batches or [None])[-1], subject.loss_fn is None
    if hasattr(batch, "keys"):
        compared = 'batch.get("labels", batch.get("label", batch.get("target")))'
        loss = 'model(**batch)["loss"]' if own else f"loss_fn(model(**batch), {compared})"
    elif torch.is_tensor(batch):
        loss = "model(batch)" if own else "loss_fn(model(batch), batch)"
    else:
        loss = "model(*batch[:-1])" if own else "loss_fn(model(*batch[:-1]), batch[-1])"
    clear, update = (f"for one in optimizers: one.{name}()" for name in ("zero_grad", "step"))
    lines = [clear, f"loss = {loss}", "loss.backward()", update, "return loss"]
    return "\n\ndef train_step(model, batch, optimizer, loss_fn, step):\n    " + "\n    ".join(lines) + "\n\n"
