"""All that a training step depends on besides its batch: read from a running loop, and put into another one.

That is parameters, buffers, states and hyperparameters of optimizers, scales of GradScalers, and the states of the
global random generators of Python, numpy and torch. What is read is plain (see ``observe.plain``): its tensors are the
loop's own until somebody copies them.
"""

import _random
import ctypes
import random
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from dxdy_nb.errors import DxdyError, counted
from dxdy_nb.observe.plain import plain, restored, tensors, with_tensors

Models = Mapping[str, nn.Module]
Optimizers = Mapping[str, Optimizer]
Scalers = Mapping[str, GradScaler]

KINDS = ("models", "optimizers", "scalers")
_MT19937_BYTES = 4 * 624 + 4  # numpy keeps its 624 words and a position side by side, and so does CPython
_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_IN_MEMORY = sys.implementation.name == "cpython" and (
    _random.Random.__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
)


def state(models: Models, optimizers: Optimizers, scalers: Scalers) -> dict[str, Any]:
    """Return the states of all objects, by kind and name.

    Raises
    ------
    DxdyError
        An optimizer keeps something that no file can hold.

    Examples
    --------
    >>> list(state({"model": nn.Linear(2, 1)}, {}, {})["models"]["model"]["parameters"])
    ['weight', 'bias']
    """
    return {
        "models": {name: _of_model(model) for name, model in models.items()},
        "optimizers": {name: _of_optimizer(optimizer, name) for name, optimizer in optimizers.items()},
        "scalers": {name: plain(scaler.state_dict(), name, classes=False) for name, scaler in scalers.items()},
    }


def put(kind: str, name: str, thing: Any, recorded: Mapping[str, Any]) -> None:
    """Put a recorded state into a model, an optimizer or a GradScaler.

    Parameters
    ----------
    kind : one of ``KINDS``
    name : how an error calls it
    recorded : the part of ``state(...)`` that is about it

    Raises
    ------
    DxdyError
        Its parameters, buffers or groups are others than the recorded ones.
    """
    with torch.no_grad():
        _INTO[kind](name, thing, recorded)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the learning rate and all else that each group of parameters has, as numbers and tensors of their own."""
    return [
        {name: v.clone() if isinstance(v, Tensor) else v for name, v in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def put_hyperparameters(optimizer: Optimizer, recorded: list[dict[str, Any]]) -> None:
    """Set what ``hyperparameters`` returned."""
    for group, values in zip(optimizer.param_groups, recorded, strict=False):
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # a captured or compiled step reads this very tensor
            else:
                group[name] = value


class RandomStates:
    """Reads the states of the global random generators, in about 5 µs: one reader a loop, since it remembers."""

    def __init__(self) -> None:
        self._numpy, self._python = _Words(), _Words()

    def read(self) -> dict[str, Any]:
        """Return the states of Python, numpy, torch, and CUDA where it is in use."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy's stubs forgot it
        numpys = isinstance(generator, np.random.MT19937)  # else somebody has set another one
        states = {
            "python": self._python.read(id(_PYTHON) + object.__basicsize__ if _IN_MEMORY else None, _read_python),
            "numpy": self._numpy.read(generator.ctypes.state_address if numpys else None, _read_numpy),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        return states


class _Words:
    """The state of a Mersenne Twister, read anew (10 to 50 µs) only where its words differ from those read last."""

    def __init__(self) -> None:
        self._state: Any = None
        self._words = b""

    def read(self, address: int | None, read: Callable[[], tuple[Any, bytes, bool]]) -> Any:
        """Return the state; ``read`` reads it, with its words, and whether a second normal number lies ready."""
        words = b"" if address is None else ctypes.string_at(address, _MT19937_BYTES)
        if words != self._words or not words:
            self._state, known, ready = read()
            # A number that lies ready is used up without a change of the words: then look each time.
            self._words = words if known == words and not ready else b""
        return self._state


def _read_numpy() -> tuple[Any, bytes, bool]:
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    words = inner["key"].tobytes() + int(inner["pos"]).to_bytes(4, sys.byteorder) if "pos" in inner else b""
    return state, words, bool(state["has_gauss"])


def _read_python() -> tuple[Any, bytes, bool]:
    state = random.getstate()
    _, (*words, position), normal = state
    return state, position.to_bytes(4, sys.byteorder) + array("I", words).tobytes(), normal is not None


def put_random(states: Mapping[str, Any]) -> None:
    """Set the states that ``RandomStates.read`` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, one in zip(range(torch.cuda.device_count()), states.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(one, device)


def _of_model(model: nn.Module) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    return {
        "parameters": {name: _local(p) for name, p in parameters.items()},
        "buffers": {name: _local(b) for name, b in model.named_buffers()},
        "trainable": [p.requires_grad for p in parameters.values()],
        "training": [module.training for module in model.modules()],
    }


def _into_model(name: str, model: nn.Module, recorded: Mapping[str, Any]) -> None:
    for kind, found in (("parameter", dict(model.named_parameters())), ("buffer", dict(model.named_buffers()))):
        wanted = recorded[f"{kind}s"]
        for one in [*wanted, *[one for one in found if one not in wanted]]:
            was, now = (tuple(t[one].shape) if one in t else "not there" for t in (wanted, found))
            if was != now:
                raise _other(f"{kind} {one!r} of {name!r} was {was}, and is {now} now")
        for one, tensor in wanted.items():
            _local(found[one]).copy_(tensor)
    modules = list(model.modules())
    if len(modules) != len(recorded["training"]):
        raise _other(f"{name!r} had {counted(len(recorded['training']), 'module')}, and has {len(modules)} now")
    for parameter, trainable in zip(model.parameters(), recorded["trainable"], strict=True):
        parameter.requires_grad_(trainable)
    for module, training in zip(modules, recorded["training"], strict=True):
        module.training = training


def _of_optimizer(optimizer: Optimizer, name: str) -> dict[str, Any]:
    """Return states in the order of the parameters; a state's device is kept, for a step may be counted on the CPU."""
    kept = [[optimizer.state.get(p) for p in group["params"]] for group in optimizer.param_groups]
    states = with_tensors(plain(kept, f"the state of {name!r}", classes=False), _local)
    return {
        "state": states,
        "devices": [str(t.device) for t in tensors(states)],
        "groups": plain(hyperparameters(optimizer), f"the groups of {name!r}", classes=False),
    }


def _into_optimizer(name: str, optimizer: Optimizer, recorded: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    wanted = [len(group) for group in recorded["state"]]
    if sizes != wanted:
        raise _other(f"the groups of {name!r} had {wanted} parameters, and have {sizes} now")
    devices = iter(recorded["devices"])
    states = restored(with_tensors(recorded["state"], lambda tensor: tensor.to(next(devices), copy=True)), None)
    for group, kept in zip(optimizer.param_groups, states, strict=True):
        for parameter, value in zip(group["params"], kept, strict=True):
            optimizer.state.pop(parameter, None)
            if value is not None:
                optimizer.state[parameter] = value
    put_hyperparameters(optimizer, restored(recorded["groups"], None))


def _into_scaler(name: str, scaler: GradScaler, recorded: Mapping[str, Any]) -> None:
    if bool(recorded) != scaler.is_enabled():
        raise _other(f"{name!r} was {'on' if recorded else 'off'}, and is not now")
    scaler.load_state_dict(dict(recorded))


_INTO: dict[str, Callable[[str, Any, Mapping[str, Any]], None]] = {
    "models": _into_model,
    "optimizers": _into_optimizer,
    "scalers": _into_scaler,
}


def _local(tensor: Tensor) -> Tensor:
    """Return the plain tensor behind a parameter; of one that is sharded over ranks, this rank's part."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def _other(what: str) -> DxdyError:
    return DxdyError(f"replay: {what}. Is it the same script, with the same arguments?")
