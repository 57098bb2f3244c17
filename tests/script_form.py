"""A case as the script that somebody would have written: a plain loop with what ``diagnose`` is told by keywords.

python tests/script_form.py CASE [--right]     trains on a case of tests/cases, or on its healthy twin
"""

import argparse
import copy
import io
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

EPOCHS, STEPS = 3, 24  # how long a script trains


def train(make: Callable[[], dict[str, Any]]) -> None:
    """Train as the set-up says; where it can be saved, in two parts, the second with new objects."""
    setup = make()
    if "epoch" in setup:  # its own loop, interrupted once
        setup["epoch"](stop_at=5)
        setup["epoch"]()
    elif "save" in setup:
        inside = hasattr(setup["loader"], "state_dict")  # then the run may stop in the middle of an epoch
        run(setup, 2, 2 if inside else STEPS // 2)
        torch.save(setup["save"](), file := io.BytesIO())
        file.seek(0)
        setup = {**setup, **setup["resume"](torch.load(file, weights_only=False))}
        run(setup, 2, STEPS // 2)
    else:
        run(setup, EPOCHS, STEPS)
    best = setup.get("best_state") or setup.get("best")
    if best is not None:
        setup["model"].load_state_dict(best)
        evaluate(setup, setup["model"])


def run(setup: dict[str, Any], epochs: int, steps: int) -> None:
    """Train for some epochs, or fewer steps, and validate after each."""
    step = 0
    for _ in range(epochs):
        for batch in islice(setup["loader"], steps - step):
            train_step(setup, batch, step)
            step += 1
        if setup.get("on_epoch_end"):
            setup["on_epoch_end"]()
        if setup.get("validate"):
            setup["validate"]()
        if setup.get("val_loader") is not None:
            evaluate(setup, setup["model"])
        average = setup.get("ema_model", setup.get("ema"))
        if isinstance(average, dict):  # of the model inside a wrapper that renames
            weights, average = average, copy.deepcopy(getattr(setup["model"], "_orig_mod", setup["model"]))
            average.load_state_dict(weights, strict=False)
        if average is not None:
            evaluate(setup, average)
        if step >= steps:
            return


def train_step(setup: dict[str, Any], batch: Any, step: int) -> None:
    """Train on one batch."""
    optimizers = setup.get("optimizers") or [setup["optimizer"]]
    if "step" in setup:
        setup["step"](batch)
    elif setup.get("train_step"):
        setup["train_step"](setup["model"], batch, setup.get("optimizer"), setup.get("loss_fn"), step)
    else:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(setup, setup["model"], batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def loss_of(setup: dict[str, Any], model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch in the usual forms."""
    if hasattr(batch, "keys"):
        output = model(**batch)
        return setup["loss_fn"](output, batch["labels"]) if setup.get("loss_fn") else output["loss"]
    if torch.is_tensor(batch):
        return setup["loss_fn"](model(batch), batch) if setup.get("loss_fn") else model(batch)
    *inputs, target = batch
    output = model(*inputs)
    return setup["loss_fn"](output, target) if setup.get("loss_fn") else output


def evaluate(setup: dict[str, Any], model: torch.nn.Module) -> None:
    """Evaluate a model on the validation data, or where there are none on the training data."""
    mode = model.training
    model.eval()
    held_out = setup.get("val_loader")
    with torch.no_grad():
        for batch in held_out if held_out is not None else islice(setup["loader"], 2):
            if "step" not in setup and setup.get("loss_fn"):
                loss_of(setup, model, batch)
            else:
                model(batch[0])
    model.train(mode)


if __name__ == "__main__":
    from cases import CASES, HEALTHY

    cli = argparse.ArgumentParser()
    cli.add_argument("case", choices=[*CASES, *HEALTHY])
    cli.add_argument("--right", action="store_true")
    given = cli.parse_args()
    name = given.case
    train(lambda: CASES[name].build(not given.right) if name in CASES else HEALTHY[name].build())
