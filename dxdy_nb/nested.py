"""Tensors in nested tuples, lists, dictionaries and dataclasses: what batches and models' outputs are made of."""

import copy
import dataclasses
import operator
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
        parts = [mapped(item, function) for item in value]
        if type(value) not in (tuple, list) and all(map(operator.is_, parts, value)):
            return value
        try:
            return type(value)(parts)
        except TypeError:  # a class of somebody's own, made of other things
            return parts
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for part in dataclasses.fields(value):
            object.__setattr__(made, part.name, mapped(getattr(value, part.name), function))  # it may be frozen
        return made
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    if torch.is_tensor(value):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):  # some outputs are both
        value = [getattr(value, part.name) for part in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for part in parts for t in tensors_in(part)]


def detached(value: Any) -> Any:
    """Return a nested structure with its tensors cut from the graph."""
    return mapped(value, lambda t: t.detach())
