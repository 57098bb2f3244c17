"""What a checkpoint still tells: its weights, and the states of optimizer, scheduler and loss scaler beside them."""

import math
import pickle
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dxdy_nb.diagnosis.report import Finding, Report, Severity, found, listed
from dxdy_nb.errors import DxdyError, counted

KINDS = {  # what tells a state by its keys
    "optimizer": {"state", "param_groups"},
    "scaler": {"scale", "_growth_tracker"},
    "scheduler": {"last_epoch", "_last_lr"},
}
STATISTICS = ("running_mean", "running_var")
Names = Mapping[Any, str]  # of an optimizer's parameters
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.|model\.)+")


@dataclass(frozen=True)
class Part:
    """A state within a checkpoint: ``place`` is how to get at it, like ``['model']``, in ``where``'s file."""

    kind: str
    place: str
    state: Mapping[str, Any]
    file: Path

    @property
    def code(self) -> str:
        """The line of plain torch that reads it."""
        if self.file.suffix == ".safetensors":
            return f"__import__('safetensors.torch').torch.load_file({str(self.file)!r})"
        return f"torch.load({str(self.file)!r}, map_location='cpu', weights_only=True){self.place}"

    def found(self, cause: str, evidence: str, error: bool = False, **values: object) -> Finding:
        """Return a finding about it."""
        where = f"{self.file.name}{self.place}"
        severity: Severity = "error" if error else "hint"
        return found(cause, where, evidence, severity=severity, state=self.code, trial=None, **values)


def report(path: Path, later: Path | None = None) -> Report:
    """Return what one checkpoint tells, or two of one model, the earlier one first."""
    last = _parts(path if later is None else later)
    weights = max((p for p in last if p.kind == "weights"), key=lambda p: len(p.state), default=None)
    optimizer = next((p for p in last if p.kind == "optimizer"), None)
    names = _named(optimizer, weights)
    findings = [f for one in (path, later) if one is not None for f in _damaged(one)]
    unknown = ["what the gradients, the batches and the loss were: a checkpoint holds none of them (dxdy watch does)"]
    for part in last:
        try:
            findings += RULES[part.kind](part, names)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            unknown.append(f"the {part.kind} {part.place}: not of the usual form ({type(error).__name__}: {error})")
    if weights and optimizer:
        findings += _not_owned(optimizer, weights)
    if not optimizer:
        unknown += ["what the optimizer did: its state was not saved"]
    if later is None:
        unknown += ["which weights still move: give an earlier checkpoint too, dxdy inspect EARLIER LATER"]
    elif weights is not None:
        findings += _frozen(path, weights, names)
    return Report(tuple(findings), dict(_saw(last)), tuple(unknown))


def _load(path: Path) -> Any:
    """Return what is in a file, without running any code that is in it."""
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            raise DxdyError(f"inspect: {path} needs a library to be read: pip install safetensors.") from None
        try:
            return load_file(path)
        except SafetensorError as error:
            raise DxdyError(f"inspect: {path} is damaged, or no safetensors file: {error}.") from None
    zipped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        globals_in = torch.serialization.get_unsafe_globals_in_checkpoint
        classes = globals_in(path) if zipped else re.findall(r"GLOBAL (\S+)", str(error))
        if not classes:
            raise DxdyError(f"inspect: {path} is no checkpoint that torch.load can read safely.") from None
        raise DxdyError(
            f"inspect: {path} holds more than tensors ({listed(sorted(classes))}), and reading that could run any code "
            "in it. Where you trust it: load it with weights_only=False, and save model.state_dict() and plain numbers "
            "(float(x) for numpy's) instead."
        ) from None
    except Exception as error:  # what torch raises for rubbish is of many kinds
        with path.open("rb") as file:
            if file.read(2) == b"PK" and not zipped:
                raise DxdyError(f"inspect: {path} is cut off: its end is missing.") from None
        said = str(error).split(". ")[0].splitlines()[0] if isinstance(error, RuntimeError) else "no start of one"
        raise DxdyError(f"inspect: {path} is no checkpoint that torch.load can read: {said[:120]}.") from None


def _parts(path: Path) -> list[Part]:
    def walk(value: Any, place: str) -> Iterator[Part]:
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if not isinstance(value, Mapping):
            return
        kind = next((kind for kind, keys in KINDS.items() if keys <= set(value)), None)
        if kind is not None and (kind != "optimizer" or _is_usual(value["state"], value["param_groups"])):
            yield Part(kind, place, value, path)
            return
        tensors = {str(key): t for key, t in value.items() if isinstance(t, Tensor)}
        if any(t.dim() for t in tensors.values()):  # scores and counters alone are no weights
            yield Part("weights", place, tensors, path)
        for key, item in value.items():
            yield from walk(item, f"{place}[{key!r}]")

    read = _load(path)
    try:
        parts = list(walk([read] if isinstance(read, Tensor) else read, ""))
    except RecursionError:
        raise DxdyError(f"inspect: {path} is nested without end.") from None
    if not parts:
        raise DxdyError(f"inspect: {path} holds no tensor and no state of an optimizer: {type(read).__name__}.")
    return parts


def _is_usual(state: Any, groups: Any) -> bool:
    entries = state.values() if isinstance(state, Mapping) else [None]
    held = isinstance(groups, list) and all(isinstance(g, Mapping) and "params" in g for g in groups)
    return held and all(isinstance(entry, Mapping) for entry in entries)


def _damaged(path: Path) -> Iterator[Finding]:
    """A record does not have the checksum that it was written with. torch.load does not look."""
    broken = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None
    if broken and not broken.endswith("data.pkl"):  # the first record of all: then it was saved without checksums
        yield found("checkpoint-damaged", path.name, f"{broken} is not what was written", path=repr(str(path)))


def _saw(parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    for part in parts:
        state, name = part.state, f"{part.kind} {part.place}".strip()
        if part.kind == "weights":
            kinds = Counter(str(t.dtype).removeprefix("torch.") for t in state.values())
            words = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            yield (
                name,
                f"{counted(len(state), 'tensor')}, {counted(sum(t.numel() for t in state.values()), 'value')}: {words}",
            )
        elif part.kind == "optimizer":
            for number, group in enumerate(state["param_groups"]):
                settings = [f"{k} {group[k]}" for k in ("lr", "betas", "momentum", "weight_decay") if k in group]
                yield f"{name} group {number}", f"{counted(len(group['params']), 'parameter')}, {', '.join(settings)}"
            steps = sorted({int(s) for s in _steps(part).values()})
            with_state = sum(map(_has_tensor, state["state"].values()))
            yield name, f"{counted(with_state, 'parameter')} with state, steps {listed(steps) or 'not counted'}"
        else:
            plain = {k: v for k, v in state.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
            yield name, ", ".join(f"{k.strip('_')} {v:g}" for k, v in plain.items())


def _has_tensor(entry: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in entry.values())


def _steps(optimizer: Part) -> dict[Any, float]:
    entries = optimizer.state["state"].items()
    return {key: float(entry["step"]) for key, entry in entries if isinstance(entry.get("step"), (Tensor, int, float))}


def _parameters(weights: Part) -> list[str]:
    """Return the names of what can be a parameter, tied ones once."""
    dense = [(n, t) for n, t in reversed(list(weights.state.items())) if _is_dense(t) and t.is_floating_point()]
    ties = {(t.data_ptr(), t.shape): name for name, t in dense}
    return [n for n in weights.state if n in set(ties.values()) and not n.endswith(STATISTICS)]


def _named(optimizer: Part | None, weights: Part | None) -> dict[Any, str]:
    """Return the names of an optimizer's parameters, by its keys for them, where the file lets them be known."""
    if optimizer is None:
        return {}
    groups, state = optimizer.state["param_groups"], optimizer.state["state"]
    keys = [key for group in groups for key in group["params"]]
    given = [name for group in groups for name in group.get("param_names", [])]
    if weights is not None and not given and len(groups) == 1 and len(keys) == len(_parameters(weights)):
        given = _parameters(weights)
        for key, name in zip(keys, given, strict=True):
            shapes = {t.shape for t in state.get(key, {}).values() if isinstance(t, Tensor) and t.dim()}
            if shapes and weights.state[name].shape not in shapes:
                given = []  # it was built in another order
                break
    return {key: f"parameter {key}" for key in keys} | dict(zip(keys, given, strict=False))


def _is_dense(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta and t.numel() > 0


def _extremes(t: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value, NaN if one is: one read of memory, and no copy of a large tensor."""
    values = torch.view_as_real(t) if t.is_complex() else t if t.itemsize > 1 else t.float()
    low, high = values.aminmax()
    return float(low), float(high)


def _weights(part: Part, names: Names) -> Iterator[Finding]:
    state = {n: t for n, t in part.state.items() if (t.is_floating_point() or t.is_complex()) and _is_dense(t)}
    ends = {name: _extremes(t) for name, t in tqdm(state.items(), disable=None, leave=False)}
    bad = {n: state[n].isfinite() for n, pair in ends.items() if not np.isfinite(pair).all()}
    bad = {n: ok for n, ok in bad.items() if ends[n] != (-math.inf, 0.0) or state[n][ok].any()}  # an attention mask
    if bad:
        seen = (
            f"{n}: {int((~ok).sum()):,} of {ok.numel():,} values, the first at {(~ok).nonzero()[0].tolist()}"
            for n, ok in bad.items()
        )
        yield part.found("weights-not-finite", listed(seen), error=True)
    same = [n for n, (low, high) in ends.items() if low == high and state[n].numel() > 1 and not n.endswith(STATISTICS)]
    if same:
        words = listed(f"{n} {list(state[n].shape)} is {ends[n][0]:g}" for n in same)
        yield part.found("constant-weights", f"{words} everywhere")
    yield from _dead_units(
        part, {n: t for n, t in state.items() if n.endswith("weight") and t.dim() > 1 and n not in same}
    )
    yield from _batch_norm(part, ends)


def _dead_units(part: Part, matrices: Mapping[str, Tensor]) -> Iterator[Finding]:
    words, names = [], list(matrices)
    for place, name in enumerate(names):
        rows = ~matrices[name].flatten(1).bool().any(1)
        if not rows.any():
            continue
        follower = next((n for n in names[place + 1 : place + 2] if matrices[n].shape[1] == len(rows)), "")
        out = rows & ~matrices[follower].transpose(0, 1).flatten(1).bool().any(1) if follower else rows & False
        also = f"; {int(out.sum())} of them are not read by {follower} either: they can never learn" * bool(out.any())
        words.append(f"{name}: {int(rows.sum())} of {len(rows)} rows are zero{also}")
    if words:
        yield part.found("dead-units", listed(words))


def _batch_norm(part: Part, ends: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    words = [f"{n} is 0" for n, t in part.state.items() if n.endswith("num_batches_tracked") and not int(t)]
    for name, (low, high) in ends.items():
        if name.endswith("running_var") and (low < 1e-8 or 1e8 < high < math.inf):
            words.append(f"{name} goes from {low:.2g} to {high:.2g}")
    if words:
        yield part.found("bn-statistics-odd", listed(words))


def _optimizer(part: Part, names: Names) -> Iterator[Finding]:
    state, groups = part.state["state"], part.state["param_groups"]
    keys, steps = [key for group in groups for key in group["params"]], _steps(part)
    held = [key for key in keys if _has_tensor(state.get(key, {}))]
    if held and len(held) < len(keys):
        missing = listed(names.get(key, key) for key in keys if key not in held)
        yield part.found("never-stepped", f"no state for {missing}; {len(held)} of {len(keys)} parameters have one")
    if len(counts := Counter(steps.values())) > 1:
        usual = counts.most_common(1)[0][0]
        odd = listed(f"{names.get(key, key)} {step:g}" for key, step in steps.items() if step != usual)
        yield part.found("never-stepped", f"most parameters made {usual:g} steps, but {odd}")
    ends = {
        (key, name): _extremes(t)
        for key, entry in tqdm(state.items(), disable=None, leave=False)
        for name, t in entry.items()
        if _is_dense(t) and t.dim() and t.is_floating_point()
    }
    bad = [f"{name} of {names.get(key, key)}" for (key, name), pair in ends.items() if not np.isfinite(pair).all()]
    if bad:
        yield part.found("optimizer-state-not-finite", listed(bad), error=True)
    still = [names.get(key, key) for (key, name), pair in ends.items() if name == "exp_avg_sq" and pair == (0.0, 0.0)]
    if still:
        yield part.found("never-stepped", f"exp_avg_sq is zero for {listed(still)}: each gradient was exactly 0")
    stopped = [str(number) for number, group in enumerate(groups) if not float(group.get("lr", 1.0))]
    if stopped:
        yield part.found("lr-is-zero", f"lr is 0 in group {listed(stopped)}")


def _not_owned(optimizer: Part, weights: Part) -> Iterator[Finding]:
    owned, there = sum(len(g["params"]) for g in optimizer.state["param_groups"]), len(_parameters(weights))
    if owned < there:
        words = f"it owns {counted(owned, 'parameter')}, and {there} tensors are saved: "
        words += "some are buffers, or frozen, or forgotten"
        yield optimizer.found("not-in-optimizer", words)


def _scheduler(part: Part, names: Names) -> Iterator[Finding]:
    last, length = part.state["last_epoch"], part.state.get("T_max", math.inf)
    if last > length:
        yield part.found("cosine-past-tmax", f"last_epoch {last}, T_max {length}: the rate has been rising again")


def _scaler(part: Part, names: Names) -> Iterator[Finding]:
    scale = float(part.state["scale"])
    if not 1.0 <= scale <= 2.0**40:
        words = "gradients are not finite at any scale" if scale < 1 else "no gradient ever overflows: are they fp16?"
        yield part.found("scaler-out-of-range", f"scale {scale:g}: {words}", error=not 0 < scale < math.inf)


RULES: dict[str, Callable[[Part, Names], Iterator[Finding]]] = {
    "weights": _weights,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "scaler": _scaler,
}


def _frozen(path: Path, later: Part, names: Names) -> Iterator[Finding]:
    """Tensors of two checkpoints are the same, bit for bit."""
    parts = [part for part in _parts(path) if part.kind == "weights"]
    earlier = max(parts, key=lambda p: (p.place == later.place, len(p.state)), default=Part("weights", "", {}, path))
    before = {WRAPPERS.sub("", name): t for name, t in earlier.state.items()}
    pairs = {n: (before[key], later.state[n]) for n in _parameters(later) if (key := WRAPPERS.sub("", n)) in before}
    if not pairs:
        raise DxdyError(
            f"inspect: {path.name} and {later.file.name} have no dense real tensor of one name: nothing to compare."
        )
    same = [n for n, pair in pairs.items() if _same_bits(*pair)]
    if same:
        owned = [n for n in same if n in names.values()]
        whose = f"; in the optimizer: {listed(owned) or 'none of them'}" if owned or names else ""
        words = f"{len(same)} of {len(pairs)} are as in {path.name}: {listed(same)}{whose}"
        yield later.found("weights-frozen", words, earlier=earlier.code)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)
