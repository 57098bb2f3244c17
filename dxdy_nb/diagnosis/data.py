"""Whether what the model is shown, and told, is what was meant."""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from dxdy_nb.autograd.copies import random_states
from dxdy_nb.diagnosis.observation import leading, main_call
from dxdy_nb.diagnosis.probes import LONG, Experiment, NotRepeatable, OutOfTime, finite, lower_by
from dxdy_nb.diagnosis.report import Finding, found
from dxdy_nb.diagnosis.sameness import bits_of
from dxdy_nb.diagnosis.subject import batches_of, preserved
from dxdy_nb.nested import mapped, tensors_in

SMALL = 16 * 2**20  # bytes of a tensor that is compared whole
APART = 5.0  # deviations, or times the deviation, of the training set
SIGMAS = 8.0  # what an alignment must stand out by, among five that are tried


def nonfinite(experiment: Experiment) -> Iterator[Finding]:
    """A batch holds NaN or infinity, and its loss is not finite either."""
    for number, (batch, x, y) in enumerate(experiment.epoch):
        for named in _not_finite(x, y):
            try:
                step = experiment.trial(batch)
            except NotRepeatable:
                yield from _heard(experiment)
                return
            if step.error is None and math.isfinite(step.value) and not _spoils(step):
                continue
            yield _spoilt(f"batch {number}", *named, step.value)
            return


def _heard(experiment: Experiment) -> Iterator[Finding]:
    """Likewise in a loop whose step cannot be run again: the first that lost loss and gradient had such a batch."""
    first = [s for s in experiment.seen.steps if not math.isfinite(s.value) and _spoils(s)][:1]
    for step in first:
        for _, x, y in experiment.read([step.batch]):
            for named in _not_finite(x, y)[:1]:
                yield _spoilt(f"step {step.index}", *named, step.value)


def _not_finite(x: Tensor | None, y: Tensor | None) -> list[tuple[Tensor, str, str]]:
    parts = ((x, "an input", "nan-in-inputs"), (y, "a target", "nan-in-targets"))
    return [(t, a, b) for t, a, b in parts if t is not None and t.is_floating_point() and not t.isfinite().all()]


def _spoilt(place: str, part: Tensor, name: str, cause: str, loss: float) -> Finding:
    bad = (~torch.isfinite(part)).flatten(1).any(1) if part.dim() > 1 else ~torch.isfinite(part)
    rows = bad.nonzero().flatten().tolist()
    return found(
        cause,
        f"{place}, samples {', '.join(map(str, rows[:5]))}" + (" …" * (len(rows) > 5)),
        f"{len(rows)} of {len(part)} samples have {name} that is not finite; the loss of the batch is {loss:.4g}",
    )


def _spoils(step: Any) -> bool:
    return any(s.nonfinite for update in step.updates for s in update.parameters.values())


def blank(experiment: Experiment) -> Iterator[Finding]:
    """Every sample is the same."""
    inputs = [x for _, x, _ in experiment.epoch if x is not None and x.dim() > 1 and x.numel()]
    if sum(map(len, inputs)) < 16 or not inputs[0].is_floating_point():
        return
    rest = [[t for t in tensors_in(batch) if t is x or t is not y] for batch, x, y in experiment.epoch]
    if all(len(r) == len(rest[0]) and all(_repeats(a, b) for a, b in zip(r, rest[0], strict=True)) for r in rest):
        yield found(
            "blank-inputs", "loader", f"all {sum(map(len, inputs))} inputs of the epoch are equal, element by element"
        )


def _repeats(t: Tensor, other: Tensor) -> bool:
    """Return whether every sample of a tensor is another's first one."""
    return t.dim() > 0 and t.shape[1:] == other.shape[1:] and bool((t == other[:1]).all())


def interleaved(experiment: Experiment) -> Iterator[Finding]:
    """Images are smoother when a view from HWC to CHW is undone: the channels are interleaved."""
    x = experiment.input
    if x is None or x.dim() != 4 or x.size(1) != 3 or min(x.shape[2:]) < 4 or not x.is_floating_point():
        return
    n, c, h, w = x.shape
    undone = x.reshape(n, h, w, c).permute(0, 3, 1, 2)
    here, there = (float((v[..., 1:] - v[..., :-1]).abs().mean()) for v in (x, undone))
    if here > 0 and there < 0.5 * here:
        yield found(
            "hwc-viewed-as-chw",
            "input",
            f"neighbouring pixels differ by {here:.3g}; after undoing a view from HWC by {there:.3g}",
        )


def same_batch(experiment: Experiment) -> Iterator[Finding]:
    """The loader gives one batch again and again."""
    batches = [tensors for batch, _, _ in experiment.epoch if (tensors := tensors_in(batch))]
    keys = [step.key for step in experiment.seen.steps]
    if isinstance(experiment.subject.loader, DataLoader) and len(keys) >= 4 and len(set(keys)) == 1 < len(batches):
        yield found("same-batch-forever", "loader", f"all {len(keys)} steps had the same batch, bit for bit")
    if len(batches) < 3:
        return
    equal = sum(_equal(a, b) for a, b in itertools.pairwise(batches))
    if equal >= 2 and equal == len(batches) - 1:
        loader = experiment.subject.loader
        meant = isinstance(loader, (list, tuple)) and all(batch is loader[0] for batch in loader)
        yield found(
            "same-batch-forever",
            "loader",
            f"all {len(batches)} batches of the epoch are bit for bit the same"
            + ("; the list holds one batch many times, so this is meant" if meant else ""),
            severity="hint" if meant else "error",
        )


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bits_of(a) == bits_of(b)  # NaN is equal to itself


def _labels(experiment: Experiment) -> list[Tensor]:
    """Return the class labels of each batch of the epoch, where there is one integer a sample."""
    found = [y for _, _, y in experiment.epoch if y is not None and y.dim() == 1 and not y.is_floating_point()]
    return found if len(found) == len(experiment.epoch) else []


def sorted_classes(experiment: Experiment) -> Iterator[Finding]:
    """Each batch holds one class."""
    labels = [y for y in _labels(experiment) if len(y) >= 8]
    if len(labels) < 3:
        return
    overall = len(torch.cat(labels).unique())
    mean = sum(len(y.unique()) for y in labels) / len(labels)
    if overall >= 3 and mean <= 1.5:
        yield found("no-shuffle-sorted", "loader", f"{mean:.1f} classes a batch on average, {overall} in all")


def worker_randomness(experiment: Experiment) -> Iterator[Finding]:
    """A sample that is random is the same in every worker: each has a copy of one generator."""
    loader = experiment.subject.loader
    dataset = experiment.subject.dataset if experiment.subject.dataset is not None else getattr(loader, "dataset", None)
    workers = getattr(loader, "num_workers", 0)
    if dataset is None or not hasattr(dataset, "__getitem__") or not _owns_generator(dataset):
        return
    if workers < 2 and experiment.subject.dataset is None:
        return
    if experiment.left() < 8:
        raise OutOfTime
    count = max(2, workers, 3 if workers == 0 else 0)
    with preserved(experiment.subject):
        probe = DataLoader(
            Subset(dataset, [0] * count),
            batch_size=1,
            num_workers=count,
            multiprocessing_context=getattr(loader, "multiprocessing_context", None) or "fork",
            worker_init_fn=getattr(loader, "worker_init_fn", None),
        )
        draws = [tensors_in(sample) for sample in probe]
        again = tensors_in(dataset[0]), tensors_in(dataset[0])
    if len(draws) == count and all(_equal(draws[0], d) for d in draws[1:]) and not _equal(*again):
        yield found(
            "same-worker-rng",
            "dataset",
            f"sample 0, drawn in {count} workers, is the same in all, though it differs from call to call",
        )


def _owns_generator(dataset: Any) -> bool:
    import random

    import numpy as np

    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    return any(isinstance(value, kinds) for value in vars(dataset).values()) if hasattr(dataset, "__dict__") else False


def validation(experiment: Experiment) -> Iterator[Finding]:
    """The validation set is random from pass to pass, or holds training samples."""
    loader = experiment.subject.val_loader
    if loader is None:
        return
    first = experiment.held
    with preserved(experiment.subject):
        torch.manual_seed(1 + torch.initial_seed() % 2**31)
        second = list(experiment.read(loader))
    if len(first) == len(second) and first:
        targets = [(a[2], b[2]) for a, b in zip(first, second, strict=True) if a[2] is not None and b[2] is not None]
        ordered = targets and all(_same(a, b) for a, b in targets)
        inputs = [(a[1], b[1]) for a, b in zip(first, second, strict=True) if a[1] is not None and b[1] is not None]
        if ordered and inputs and not all(_same(a, b) for a, b in inputs):
            restores = all(x.shape == y.shape for (x, _), (y, _) in zip(inputs, targets, strict=False))
            yield found(
                "augment-on-val",
                "val_loader",
                "two passes give the same targets in the same order, and different inputs"
                + ("; targets have the shape of inputs: to undo what is done to them may be the task" * restores),
                severity="hint" if restores else "error",
            )
    train, held = _hashes(experiment.epoch), _hashes(first)
    shared = sum(h in train for h in held)
    counts = collections.Counter(train)
    chance = sum(n for n in counts.values() if n > 1) / max(
        1, len(train)
    )  # equal samples are as frequent among themselves
    if len(train) > 8 and len(held) > 8 and shared > (0.02 + 2 * chance) * len(held):
        whole = set(train) == set(held)
        yield found(
            "validates-on-training-set" if whole else "train-val-overlap",
            "val_loader",
            f"{shared} of {len(held)} validation samples are in the training set, element by element"
            + ("; the two sets are the same" if whole else ""),
            severity="hint" if whole else "error",
        )


def _hashes(batches: list[Any]) -> list[int]:
    rows = []
    for _, x, _ in batches:
        if x is not None and x.dim() > 1 and x.layout is torch.strided and x[0].numel() > 1:
            flat = x.detach().cpu().contiguous().flatten(1)
            rows += [hash(row.view(torch.uint8).numpy().tobytes()) for row in flat]
    return rows


def stored_data_changes(experiment: Experiment) -> Iterator[Finding]:
    """Reading an epoch changes what the data set holds."""
    loader = experiment.subject.loader
    dataset = experiment.subject.dataset if experiment.subject.dataset is not None else getattr(loader, "dataset", None)
    if not hasattr(dataset, "__dict__") or getattr(loader, "num_workers", None):
        return
    held = [t for t in tensors_in(dict(vars(dataset))) if t.numel() * t.element_size() <= SMALL]
    changed, firsts = 0, [t.clone() for t in held]
    with preserved(experiment.subject):
        for _ in range(2):  # what is filled at the first pass, as a cache is, stays the same at the second
            before = [bits_of(t) for t in held]
            for _ in zip(range(64), batches_of(loader), strict=False):
                if experiment.left() < 0:
                    raise OutOfTime
            changed = sum(bits_of(t) != bits for t, bits in zip(held, before, strict=True))
        told = bool(changed) and _tells(dataset, held, firsts)
    if told:
        yield found(
            "augments-in-place",
            "dataset",
            f"each pass changes {changed} of the {len(held)} tensors that the data set holds",
        )


def _tells(dataset: Any, held: list[Tensor], firsts: list[Tensor]) -> bool:
    """Return whether samples are others when the data set holds its first tensors again; a mere counter is not told."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return True

    def samples() -> list[int]:
        with random_states():
            return [bits_of(t) for i in range(min(len(dataset), 8)) for t in tensors_in(dataset[i])]

    now = samples()
    for t, first in zip(held, firsts, strict=True):
        t.copy_(first)
    return samples() != now


def another_scale(experiment: Experiment) -> Iterator[Finding]:
    """Validation inputs are on another scale than training inputs."""
    if experiment.subject.val_loader is None:
        return
    train = [x.flatten(1) for _, x, _ in experiment.epoch if x is not None and x.is_floating_point() and x.dim() > 1]
    held = [x.flatten(1) for _, x, _ in experiment.held if x is not None and x.is_floating_point() and x.dim() > 1]
    if sum(map(len, train)) < 16 or sum(map(len, held)) < 16 or train[0].size(1) != held[0].size(1):
        return
    a, b = torch.cat(train).double(), torch.cat(held).double()
    # Of a feature that is mostly one number, few rows tell neither mean nor deviation.
    dense = torch.stack([(t != t.median(0).values).double().mean(0) > 0.5 for t in (a, b)]).all(0)
    a, b = (t[:, dense] if dense.any() else t.reshape(-1, 1) for t in (a, b))
    shift = (b.mean(0) - a.mean(0)).abs() / (a.std(0) + 1e-12)
    stretch = (b.std(0) + 1e-12).log() - (a.std(0) + 1e-12).log()
    if float(shift.median()) > APART or float(stretch.abs().median()) > math.log(APART):
        yield found(
            "val-not-scaled",
            "val_loader",
            f"of the median feature mean and deviation are {float(a.mean(0).median()):.3g} ± "
            f"{float(a.std(0).median()):.3g} "
            f"in training, {float(b.mean(0).median()):.3g} ± {float(b.std(0).median()):.3g} in validation",
        )


def batch_by_batch(experiment: Experiment) -> Iterator[Finding]:
    """Each batch is standardised by its own mean and deviation: a sample's input depends on its company."""
    steps = [(step.key, main_call(step)) for step in experiment.seen.steps]
    seen = {key: given[0] for key, call in steps if call and (given := tensors_in((call.args, call.kwargs)))}
    inputs = [x.flatten(1).double() for x in seen.values() if x.is_floating_point() and x.dim() > 1 and len(x) >= 8]
    sampler = getattr(experiment.subject.loader, "sampler", None)
    if len(inputs) < 3 or experiment.subject.batch_coupled or not isinstance(sampler, torch.utils.data.RandomSampler):
        return
    few = all(2 * len(x) <= len(sampler.data_source) for x in inputs)  # not the whole, standardised once
    if few and all(_standard(x) for x in inputs):
        yield found(
            "standardised-per-batch",
            "the input",
            f"in each of {len(inputs)} batches, drawn at random, every feature has the mean 0 and the deviation 1 "
            "of its own: samples are scaled by those they happen to come with",
        )


def _standard(x: Tensor) -> bool:
    spread = x.std(0)
    own = spread > 0
    unit = ((spread - 1).abs() < 1e-3) | ((x.std(0, correction=0) - 1).abs() < 1e-3)
    return bool(own.any()) and bool(unit[own].all()) and bool((x.mean(0).abs() < 1e-4).all())


def missing_column(experiment: Experiment) -> Iterator[Finding]:
    """A feature that is another in each training sample is one number in all of validation."""
    train, held = (
        [x for _, x, _ in batches if x is not None and x.is_floating_point() and x.dim() == 2]
        for batches in (experiment.epoch, experiment.held)
    )
    if not train or not held or len({x.size(1) for x in (*train, *held)}) > 1:
        return
    a, b = torch.cat(train), torch.cat(held)
    columns = (b == b[0]).all(0).nonzero().flatten().tolist() if min(len(a), len(b)) >= 32 else []
    lost = [c for c in columns if len(a[:, c].unique()) > 0.9 * len(a) and len(columns) < a.size(1)]
    if lost:
        yield found(
            "val-column-constant",
            f"feature {lost[0]}",
            f"it has {len(a[:, lost[0]].unique())} values in {len(a)} training samples, and is "
            f"{float(b[0, lost[0]]):.4g} in all {len(b)} of validation",
            column=lost[0],
        )


def other_names(experiment: Experiment) -> Iterator[Finding]:
    """A model that has learnt is wrong in validation, and right when labels, or channels, change places."""
    held = [(batch, x, y) for batch, x, y in experiment.held if x is not None and y is not None]
    out = experiment.output
    if not held or not _labels(experiment) or out is None or out.dim() != 2 or experiment.left() < 8:
        return
    total = sum(y.numel() for _, _, y in held)
    if total < 32 or any(y.dim() != 1 or int(y.min()) < 0 or int(y.max()) >= out.size(1) for _, _, y in held):
        return

    def table(pairs: Any, order: Any = None) -> Tensor:
        """Return how often each class was said where each was asked for, as shares."""
        counts = torch.zeros(out.size(1), out.size(1))
        for batch, x, y in pairs:
            said = leading(experiment.forward(x if order is None else x[:, order], batch=batch))
            if said is not None:
                counts.index_put_((said.argmax(1).cpu(), y.cpu()), torch.ones(len(y)), accumulate=True)
        return counts / counts.sum()

    with experiment.after(2 * LONG):
        learnt = float(table(row for row in experiment.epoch if row[1] is not None and row[2] is not None).trace())
        straight = table(held) if learnt > 0.9 else torch.eye(1)
        orders: list[Any] = []
        if float(straight.trace()) < 0.7 and held[0][1].dim() == 4 and held[0][1].size(1) == 3:
            orders = [list(order) for order in itertools.permutations(range(3))]
        channels = [("channels", float(table(held, order).trace()), order) for order in orders]
    classes = straight.argmax(1).tolist()
    one_to_one = len(set(classes)) == len(classes)
    for what, score, order in [*channels, *[("classes", float(straight.amax(1).sum()), classes)] * one_to_one]:
        if score > max(0.9, float(straight.trace()) + 0.3):
            yield found(
                "val-permuted",
                "val_loader",
                f"after {2 * LONG} steps {learnt:.0%} of the training samples are recognised and "
                f"{float(straight.trace()):.0%} of {total} in validation; {score:.0%} when its {what} are {order}",
            )
            return


def imbalance(experiment: Experiment) -> Iterator[Finding]:
    """One class is so frequent that the model says nothing else, and the loss does not mind."""
    labels = _labels(experiment)
    if not labels or experiment.input is None:
        return
    counts = torch.bincount(torch.cat(labels).clamp(min=0))
    if len(counts[counts > 0]) < 2 or float(counts.max()) < 0.85 * float(counts.sum()):
        return
    out = experiment.output
    if out is None or out.dim() != 2 or out.size(1) < len(counts):
        return
    rare = [int(c) for c in (counts > 0).nonzero() if c != counts.argmax()]
    with experiment.after(60), torch.no_grad():
        hits = total = 0
        for batch, x, y in experiment.epoch:
            predicted = leading(experiment.forward(x, batch=batch))
            if predicted is None or y is None or len(predicted) != len(y):
                return
            own = torch.isin(y, torch.tensor(rare))
            hits += int((predicted.argmax(1)[own] == y[own]).sum())
            total += int(own.sum())
    if total and hits < 0.05 * total:
        yield found(
            "class-imbalance",
            "targets",
            f"{float(counts.max() / counts.sum()):.0%} of the labels are one class; after 60 steps {hits} of {total} "
            "samples of the others are recognised",
        )


def alignment(experiment: Experiment) -> Iterator[Finding]:
    """Labels say nothing about their own inputs, and much about their neighbours'."""
    labels = _labels(experiment)
    inputs = [x for _, x, _ in experiment.epoch if x is not None]
    if not labels or len(inputs) != len(labels) or not inputs[0].is_floating_point() or inputs[0].dim() < 2:
        return
    if any(x.shape[1:] != inputs[0].shape[1:] for x in inputs):
        return
    dataset = experiment.subject.dataset
    if dataset is not None and hasattr(dataset, "__len__") and len(dataset) <= 20_000:
        with random_states():
            rows = [tensors_in(dataset[i]) for i in range(len(dataset))]
        if all(len(r) >= 2 for r in rows):
            inputs, labels = [torch.stack([r[0] for r in rows])], [torch.stack([r[-1] for r in rows]).flatten()]
    x, y = torch.cat([v.flatten(1) for v in inputs]).double(), torch.cat(labels)
    x = torch.nan_to_num(x)
    classes = y.unique()
    if len(x) < 128 or not 2 <= len(classes) <= 50 or x.size(1) > 512 or len(y) != len(x):
        return
    base = float(max((y == c).double().mean() for c in classes))
    sigma = math.sqrt(base * (1 - base) / (len(x) / 2))
    scores = {offset: _linear_accuracy(x, y.roll(offset), classes) for offset in (0, -2, -1, 1, 2)}
    best = max(scores, key=scores.__getitem__)
    apart = scores[0] < base + 4 * sigma and scores[best] > base + SIGMAS * sigma
    if best and apart and not _series(x):
        yield found(
            "labels-shifted-by-one",
            "dataset",
            f"held-out accuracy of a linear fit: {scores[0]:.2f} with the labels as they are, {scores[best]:.2f} with "
            f"labels moved by {best} (most frequent class {base:.2f})",
            best=best,
        )
    elif max(*scores.values(), near := _neighbours(x, y)) < base + max(0.05, 3 * sigma) and not _learns(experiment, y):
        yield found(
            "labels-misaligned",
            "dataset",
            f"on other samples a linear fit is right in {scores[0]:.0%}, a vote of the nearest others in {near:.0%}, "
            f"the most frequent class in {base:.0%}: no relation, or one that neither can see",
            severity="hint",
        )


def _linear_accuracy(x: Tensor, y: Tensor, classes: Tensor) -> float:
    """Return the held-out accuracy of a ridge regression on one-hot labels; even rows fit, odd rows test."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    hot = (y[:, None] == classes).double()
    fit, test = slice(0, None, 2), slice(1, None, 2)
    ridge = torch.eye(x.size(1), dtype=x.dtype) * 1e-2 * len(x)
    weights = torch.linalg.solve(x[fit].T @ x[fit] + ridge, x[fit].T @ hot[fit])
    return float(((x[test] @ weights).argmax(1) == hot[test].argmax(1)).double().mean())


def _series(x: Tensor) -> bool:
    """Return whether rows go on from one another, as windows over a series do: the next one holds a column again."""
    z = ((x - x.mean(0)) / (x.std(0) + 1e-9)).clamp(-3, 3)
    return float((z[:-1].T @ z[1:]).abs().max()) > 0.8 * len(z)


def _neighbours(x: Tensor, y: Tensor) -> float:
    """Return in what share the most frequent label of the nearest others, 15 of at most 2000, is a sample's own."""
    x, y = ((x - x.mean(0)) / (x.std(0) + 1e-9))[:2000].float(), y[:2000]
    near = torch.cdist(x, x).fill_diagonal_(math.inf).topk(15, largest=False).indices
    return float((y[near].mode(1).values == y).double().mean())


def _learns(experiment: Experiment, y: Tensor) -> bool:
    """Return whether the loss on fresh samples falls clearly below what the labels' frequencies alone allow."""
    shares = torch.bincount(y - y.min()).double() / len(y)
    entropy = float(-(shares[shares > 0] * shares[shares > 0].log()).sum())
    losses = finite(experiment.seen.losses)[: len(experiment.epoch)]
    return len(losses) >= 4 and sum(losses[-2:]) / 2 < 0.9 * entropy


def scale(experiment: Experiment) -> Iterator[Finding]:
    """Inputs or targets are far from unit scale, and training on standardised ones goes much better."""
    x, y, out = experiment.input, experiment.target, experiment.output
    seen = experiment.seen
    if x is None or len(seen.steps) < 3 or seen.steps[-1].error is not None:
        return
    inputs = [v.flatten() for _, v, _ in experiment.epoch if v is not None and v.is_floating_point()]
    whole = torch.cat(inputs) if inputs else torch.ones(1)
    rms = _rms(whole)
    rows = [v.flatten(1).norm(dim=1) for _, v, _ in experiment.epoch if v is not None and v.dim() > 1 and inputs]
    lengths = torch.cat(rows) if rows else whole
    normalised = float(lengths.std()) < 0.01 * float(lengths.mean())  # rows of one length are meant
    if not 0.02 < rms < 10 and not normalised and math.isfinite(rms) and whole.std() > 0 and experiment.places[0] >= 0:
        yield from _better(experiment, experiment.places[0], float(whole.mean()), float(whole.std()), rms)
    if y is not None and out is not None and y.is_floating_point() and y.shape == out.shape:
        wanted, given = _rms(y), _rms(out)
        perfect = experiment.loss_of(y.to(out))
        if perfect is not None and not abs(float(perfect)) < 1e-4 * abs(seen.losses[0]):
            return  # the output is not what the target is: its logarithm, say
        losses = experiment.again(LONG)
        begin = finite(losses)[:1]
        falls = begin and len(finite(losses)) == LONG and lower_by(0.5, min(losses[-4:]), begin[0])
        if wanted > 100 * (given + 1) and not falls:
            yield found(
                "target-scale",
                "targets",
                f"targets have a root mean square of {wanted:.3g}, outputs of {given:.3g}; in {LONG} steps the loss "
                "does not halve",
            )


def _rms(t: Tensor) -> float:
    return float(t.detach().double().square().mean().sqrt()) if t.numel() else 1.0


def _better(experiment: Experiment, place: int, mean: float, std: float, rms: float) -> Iterator[Finding]:
    def standardised(batch: Any) -> Any:
        wanted = tensors_in(batch)[place]
        return mapped(batch, lambda t: (t - mean) / std if t is wanted else t)

    raw, other = experiment.again(LONG), experiment.again(LONG, batch=standardised)
    if len(finite(other)) < LONG:
        return
    raw_end = min(raw[-4:]) if len(finite(raw)) == LONG else math.inf
    if lower_by(0.5, min(other[-4:]), raw_end):
        yield found(
            "unnormalised-inputs",
            "input",
            f"inputs have a root mean square of {rms:.3g}; after {LONG} steps the loss is {raw_end:.4g}, with "
            f"standardised inputs {min(other[-4:]):.4g}",
            mean=f"{mean:.4g}",
            std=f"{std:.4g}",
        )


def lonely_batch(experiment: Experiment) -> Iterator[Finding]:
    """The last batch has one sample, and BatchNorm cannot train on it."""
    loader = experiment.subject.loader
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.drop_last:
        return
    norms = [m for m in experiment.subject.model.modules() if isinstance(m, nn.BatchNorm1d) and m.training]
    try:
        number = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return
    if (
        norms
        and loader.batch_size > 1
        and number % loader.batch_size == 1
        and isinstance(loader.sampler, (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler))
    ):
        raised = any("more than 1 value per channel" in str(s.error) for s in experiment.seen.steps if s.error)
        if not raised and experiment.batches:
            one = experiment.trial(mapped(experiment.batches[0], lambda t: t[:1] if t.dim() else t))
            raised = "more than 1 value per channel" in str(one.error)
        if raised:
            yield found(
                "last-batch-of-one-bn",
                "loader",
                f"{number} samples in batches of {loader.batch_size} leave one alone, and BatchNorm1d needs two",
            )


RULES = (
    nonfinite,
    blank,
    interleaved,
    same_batch,
    sorted_classes,
    worker_randomness,
    validation,
    another_scale,
    batch_by_batch,
    missing_column,
    other_names,
    stored_data_changes,
    lonely_batch,
    alignment,
    imbalance,
    scale,
)
