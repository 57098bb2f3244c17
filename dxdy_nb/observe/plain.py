"""A batch as plain containers, which ``torch.load(weights_only=True)`` reads back, and again as what it was.

Lists, tuples, dicts, tensors, numbers and strings stay as they are; an array becomes a tensor, and anything else that
holds such things (a named tuple, a dataclass, a mapping of its own class, an object with attributes) its parts under
its class's name. To get it back, a batch of the same loader lends its classes: nothing is imported, and no code is
loaded from a file.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dxdy_nb.errors import DxdyError

MARK = "__class__"  # a dict with this key stands for something that is not plain
_ARRAY = "numpy.ndarray"


def plain(value: Any, where: str = "batch", classes: bool = True) -> Any:
    """Return a value as plain containers; the tensors in them are those of the value, no copies.

    Parameters
    ----------
    value : tensors in any nest of lists, tuples, dicts, named tuples, mappings, dataclasses, objects with attributes
    where : how an error calls the value
    classes : whether objects of other classes may be among them

    Raises
    ------
    DxdyError
        Something in it can be kept in no file, for example an open image or a sparse tensor.

    Examples
    --------
    >>> plain({"x": [1.0, "a"], "size": torch.Size([2, 3])})
    {'x': [1.0, 'a'], 'size': {'__class__': 'torch.Size', 'parts': {0: 2, 1: 3}}}
    """
    kind = type(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise DxdyError(f"{where}: a tensor of layout {value.layout} on {value.device}; only dense ones are kept.")
        return value
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return value
    if kind in (list, tuple):
        return kind(plain(item, f"{where}[{place}]", classes) for place, item in enumerate(value))
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return {MARK: _ARRAY, "parts": torch.from_numpy(np.array(value))}  # a copy: it may change unseen
        except TypeError:
            raise DxdyError(f"{where}: an array of {value.dtype}; only numbers are kept.") from None
    if kind is not dict and not classes:
        raise DxdyError(f"{where}: a {kind.__name__}; only plain containers are kept here.")
    parts = value if kind is dict else _parts(value, where)
    children = {_key(key, where): plain(item, f"{where}[{key!r}]", classes) for key, item in parts.items()}
    return children if kind is dict else {MARK: _name(value), "parts": children}


def restored(recorded: Any, fresh: Any, where: str = "batch") -> Any:
    """Return what was made plain as what it was, with the classes and devices of ``fresh``, a batch like it.

    Shapes, and the lengths of lists, may differ from those of ``fresh``.

    Raises
    ------
    DxdyError
        ``fresh`` is of another class.

    Examples
    --------
    >>> from collections import OrderedDict
    >>> restored(plain(OrderedDict(x=torch.ones(2))), OrderedDict(x=torch.zeros(3)))
    OrderedDict([('x', tensor([1., 1.]))])
    """
    if isinstance(recorded, Tensor):
        return _like(recorded, fresh) if isinstance(fresh, Tensor) else recorded
    if isinstance(recorded, (list, tuple)):
        like = fresh if isinstance(fresh, (list, tuple)) else ()
        # A list that was longer than this one: its further elements are like the last that is there.
        fitting = [like[min(place, len(like) - 1)] if like else None for place in range(len(recorded))]
        pairs = enumerate(zip(recorded, fitting, strict=True))
        return type(recorded)(restored(item, near, f"{where}[{place}]") for place, (item, near) in pairs)
    if not isinstance(recorded, dict):
        return recorded
    if recorded.get(MARK) == _ARRAY:
        array = recorded["parts"].numpy()
        return array if array.ndim else array[()]
    if MARK not in recorded:
        known = fresh if isinstance(fresh, Mapping) else {}
        return {key: restored(item, known.get(key), f"{where}[{key!r}]") for key, item in recorded.items()}
    if _name(fresh) != recorded[MARK]:
        raise DxdyError(f"{where}: was of class {recorded[MARK]}, and is of class {_name(fresh)} now.")
    parts = _parts(fresh, where)
    return _with_parts(
        fresh, {key: restored(item, parts.get(key), f"{where}[{key!r}]") for key, item in recorded["parts"].items()}
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors in plain containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return plain containers anew, with other tensors in place of the ones in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, change) for item in value)
    return value


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int, bool, float):
        raise DxdyError(f"{where}: a {type(key).__name__} as key; strings and numbers are kept.")
    return key


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any, where: str) -> dict[Any, Any]:
    """Return what an object of a class of its own consists of."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return vars(value)
    raise DxdyError(
        f"{where}: a {type(value).__name__}, which no file can keep. A batch of tensors and numbers can be."
    )


def _with_parts(fresh: Any, parts: dict[Any, Any]) -> Any:
    """Return an object like another one, made of other parts."""
    if isinstance(fresh, tuple) and hasattr(fresh, "_make"):
        return fresh._make(parts.values())
    if isinstance(fresh, (list, tuple)):
        return type(fresh)(parts.values())
    new = copy.copy(fresh)
    if isinstance(fresh, Mapping):
        for key in [key for key in fresh if key not in parts]:
            del new[key]
        for key, part in parts.items():
            new[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(new, name, part)  # a frozen dataclass too
    return new


def _like(recorded: Tensor, fresh: Tensor) -> Tensor:
    """Return a tensor where another one lies, and of its class."""
    tensor = recorded.to(fresh.device)
    if fresh.is_pinned():
        tensor = tensor.pin_memory()
    if type(fresh) is not Tensor:
        tensor = tensor.as_subclass(type(fresh))
        tensor.__dict__.update(fresh.__dict__)
    return tensor.requires_grad_(fresh.requires_grad)
