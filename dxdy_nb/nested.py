"""Tensors in nested tuples, lists, dictionaries and dataclasses: what batches and models' outputs are made of."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a nested structure with a function applied to each tensor; what holds no tensor stays what it is."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        items = {key: mapped(item, function) for key, item in value.items()}
        if type(value) is dict:
            return items
        try:
            return type(value)(**items) if hasattr(type(value), "to_tuple") else type(value)(items)
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for part in dataclasses.fields(value):
            object.__setattr__(made, part.name, mapped(getattr(value, part.name), function))  # it may be frozen
        return made
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    mapped(value, note)
    return found


def detached(value: Any) -> Any:
    """Return a nested structure with its tensors cut from the graph."""
    return mapped(value, lambda t: t.detach())
