"""Whether gradients are unscaled and clipped between their backward and their step, in this order and not too far."""

import math
from collections.abc import Iterator
from statistics import median

from torch.nn.utils import clip_grad

from dxdy_nb.diagnosis.probes import FEW, SHORT, Experiment
from dxdy_nb.diagnosis.report import Finding, found
from dxdy_nb.errors import counted


def scaled_gradients(experiment: Experiment) -> Iterator[Finding]:
    """Gradients were clipped, or used, while still multiplied by the loss scale."""
    clipped = [clip for step in experiment.seen.steps for clip in step.clips if clip[2]]
    bypassed = [u for u in experiment.seen.updates if u.scaled]
    if clipped:
        yield found(
            "clip-before-unscale",
            "the training step",
            f"clipped to {clipped[0][1]:.3g} at a norm of {clipped[0][0]:.3g}, which still held the loss scale",
        )
    if bypassed:
        yield found(
            "scaler-bypassed",
            "the training step",
            "optimizer.step() used gradients of scaler.scale(loss), not unscaled, in "
            f"{counted(len(bypassed), 'update')}",
        )


def unscaled_in_between(experiment: Experiment) -> Iterator[Finding]:
    """Gradients lost their scale, and the next micro-batch's, still scaled, were added to them."""
    mixed = sum(event == "mixed" for event in experiment.seen.events)
    if mixed >= FEW:
        yield found(
            "unscale-each-micro-batch",
            "the training step",
            f"{mixed} times a scaled loss was added to gradients that scaler.unscale_ had divided by the scale already",
        )


def clip_out_of_order(experiment: Experiment) -> Iterator[Finding]:
    """Clipping came when there was nothing to clip: after the step, or before the backward."""
    events = [e for e in experiment.seen.events if e in ("backward", "clip", "step", "zero_grad")]
    before = [events[place - 1] if place else "" for place, event in enumerate(events) if event == "clip"]
    useless = sum(event in ("step", "zero_grad", "") for event in before)
    if useless >= FEW and useless == len(before) and "backward" in events:
        yield found(
            "clip-out-of-order",
            "the training step",
            f"all {useless} clippings follow {before[-1] or 'nothing'}, none a backward: no gradient was clipped "
            "before it was used",
        )


def clips_nothing(experiment: Experiment) -> Iterator[Finding]:
    """Clipping found no gradient at all, and the optimizer did."""
    steps = [s for s in experiment.seen.steps if s.clips and s.updates]
    steps = [s for s in steps if s.events.index("clip") < s.events.index("step") and not any(c[0] for c in s.clips)]
    handed = [max((row.norm for row in s.updates[0].parameters.values() if row.norm > 0), default=0.0) for s in steps]
    if len(steps) >= FEW and min(handed) > 0:
        yield found(
            "clips-nothing",
            "the training step",
            f"in {len(steps)} steps the norm before clipping was 0, and the optimizer was handed gradients with norms "
            f"from {min(handed):.3g} on: they are not those that were clipped",
        )


def clip_too_tight(experiment: Experiment) -> Iterator[Finding]:
    """Clipping takes nearly all of every gradient, and without it the loss falls much more."""
    clips = [clip for step in experiment.seen.steps for clip in step.clips if not clip[2]]
    shares = [bound / norm for norm, bound, _ in clips if norm > 0 and math.isfinite(norm)]
    if len(shares) < FEW or median(shares) > 1e-3:
        return
    with_clip = experiment.again(SHORT, fixed=True)
    original = clip_grad._clip_grads_with_norm_
    clip_grad._clip_grads_with_norm_ = lambda *args, **kwargs: None
    try:
        without = experiment.again(SHORT, fixed=True)
    finally:
        clip_grad._clip_grads_with_norm_ = original
    gains = with_clip[0] - with_clip[-1], without[0] - without[-1]
    if math.isfinite(gains[1]) and gains[1] > 10 * max(gains[0], 0.0):
        yield found(
            "clip-too-tight",
            f"max_norm={clips[0][1]:g}",
            f"clipping leaves {median(shares):.1e} of the gradient; in {SHORT} steps on a fixed batch the loss falls "
            f"by {gains[0]:.3g}, without clipping by {gains[1]:.3g}",
            norm=f"{median((norm for norm, _, _ in clips)):.3g}",
        )
