"""What a diagnosis took things to be, so that a wrong reading can be corrected."""

import torch

from dxdy_nb.diagnosis.probes import Experiment
from dxdy_nb.errors import counted
from dxdy_nb.nested import tensors_in


def saw(experiment: Experiment) -> dict[str, str]:
    """Return what was read from the set-up, by name."""
    subject, seen = experiment.subject, experiment.seen
    parameters = subject.parameters
    total = sum(p.numel() for p in parameters.values())
    trainable = sum(p.numel() for p in parameters.values() if p.requires_grad)
    owned = sum(p.numel() for p in parameters.values() if id(p) in subject.owned)
    found = {
        "model": f"{type(subject.model).__name__}, {counted(total, 'parameter')}, "
        f"{trainable:,} trainable, {owned:,} owned by an optimizer"
    }
    if experiment.call is not None:
        found["input"] = ", ".join(map(_tensor, tensors_in((experiment.call.args, experiment.call.kwargs))[:4]))
        found["output"] = ", ".join(map(_tensor, tensors_in(experiment.call.output)[:4]))
    if experiment.target is not None:
        found["target"] = _tensor(experiment.target)
    if subject.loss_fn is not None:
        found["loss"] = getattr(subject.loss_fn, "__name__", type(subject.loss_fn).__name__)
    optimizers = [f"{type(o).__name__} lr={o.param_groups[0].get('lr')}" for o in subject.all_optimizers]
    found["optimizer"] = ", ".join(optimizers) or "none"
    epochs = counted(len({step.epoch for step in seen.steps}), "epoch")
    found["steps"] = f"{len(seen.steps)} watched in {epochs}, {counted(len(seen.updates), 'update')}"
    found["versions"] = f"torch {torch.__version__}, seed {torch.initial_seed()}"
    return found


def _tensor(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {'nested' if t.is_nested else list(t.shape)} on {t.device}"
