"""Everything that belongs to a set-up, as text that can be compared: a reader of its own, not the package's."""

import collections
import hashlib
import random

import numpy as np
import torch
from torch import nn

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def state_of(given):
    """Return the content of diagnose's keywords, of what their functions hold, and of the random generators.

    Parameters and buffers, gradients, modes, optimizers, schedulers, scalers, lists and queues are followed; each
    object is read once. An object's identity is part of its state: a gradient must be the same tensor again.
    """
    found, seen, alive = {}, set(), []

    def read(path, value):
        if isinstance(value, PLAIN) or type(value).__module__.startswith("torch._dynamo"):
            found[path] = repr(value) if isinstance(value, PLAIN) else ""
            return
        if isinstance(value, tuple):
            for place, item in enumerate(value):
                read(f"{path}[{place}]", item)
            return
        found[path] = f"{type(value).__name__} at {id(value)}"
        if id(value) in seen:
            return
        seen.add(id(value))
        alive.append(value)
        if isinstance(value, torch.Tensor):
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            bits = dense.cpu().contiguous().flatten().view(torch.uint8).numpy() if dense.numel() else np.zeros(0)
            found[f"{path}.bits"] = hashlib.sha256(bits.tobytes()).hexdigest() + repr((value.shape, value.dtype))
            found[f"{path}.asks"] = repr((value.requires_grad, value.stride() if value.layout == torch.strided else 0))
            if value.is_leaf:
                read(f"{path}.grad", value.grad)
        elif isinstance(value, torch.Generator):
            found[f"{path}.state"] = hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest()
        elif isinstance(value, np.ndarray):
            found[f"{path}.bits"] = hashlib.sha256(value.tobytes()).hexdigest()
        elif isinstance(value, dict):
            for place, (key, item) in enumerate(value.items()):
                name = key if isinstance(key, str) else f"#{place}"
                read(f"{path}[{name}]", item)
        elif isinstance(value, (list, collections.deque)):
            found[f"{path}.length"] = str(len(value))
            for place, item in enumerate(value):
                read(f"{path}[{place}]", item)
        elif callable(value) and hasattr(value, "__code__"):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                read(f"{path}.{name}", cell.cell_contents)
        elif hasattr(value, "__self__"):
            read(f"{path}.self", value.__self__)
        elif hasattr(value, "__dict__") and type(value).__module__ != "builtins":
            read(f"{path}.__dict__", vars(value))
            if isinstance(value, nn.Module):
                found[f"{path}.mode"] = str(value.training)

    for name, value in given.items():
        read(name, value)
    python, arrays = random.getstate(), np.random.get_state()
    found["generators"] = repr((torch.get_rng_state().tolist(), arrays[1].tolist(), arrays[2:], python))
    return found
