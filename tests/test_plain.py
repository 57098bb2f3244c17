"""Any batch becomes plain, and becomes again what it was."""

import collections
import dataclasses
import enum
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dxdy_nb import DxdyError
from dxdy_nb.observe.plain import plain, restored, tensors, with_tensors


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    size: tuple


class Own:
    def __init__(self, x, name="a"):
        self.x, self.name = x, name

    def __eq__(self, other):
        return type(other) is Own and self.name == other.name and torch.equal(self.x, other.x)


class Encoding(collections.UserDict):
    """What tokenizers give: a mapping that is no dict, with more in it than its items."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class Image(torch.Tensor):
    pass


class Colour(enum.Enum):
    RED = 1


def t(*numbers):
    return torch.tensor(numbers)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(plain(value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


BATCHES = {
    "tensors": ([t(1, 2), t(3.0)], [t(0), t(0.0)]),
    "shorter before": ([t(1), t(2), t(3)], [t(9)]),
    "longer before": ((t(1),), (t(7), t(8), t(9))),
    "numbers": ({"id": 3, "text": "ö", "raw": b"\0x", "none": None, "flags": [True, 1.5, 2j]}, {}),
    "a named tuple": (Pair(t(1), t(2)), Pair(t(5, 5), t(6))),
    "a longer list of named tuples": ([Pair(t(1), t(2)), Pair(t(3), t(4))], [Pair(t(5, 5), t(6))]),
    "a dataclass": (Sample(t(1), (2, 3)), Sample(t(0), (0,))),
    "attributes": (Own(t(1), "b"), Own(t(2), "c")),
    "an ordered dict": (collections.OrderedDict(b=t(1), a=t(2)), collections.OrderedDict(b=t(0), a=t(0))),
    "another key": (collections.UserDict(a=t(1)), collections.UserDict(b=t(0), c=t(0))),
    "a size": (torch.Size([2, 3]), torch.Size([1])),
    "keys that are numbers": ({1: t(1), 2.5: t(2)}, {}),
    "nested": ({"a": [(t(1), {"b": Pair(t(2), [t(3)])})]}, {"a": [(t(0), {"b": Pair(t(0), [t(0)])})]}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_comes_back_from_a_file(name):
    batch, fresh = BATCHES[name]
    assert equal(restored(through_a_file(batch), fresh), batch)


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, collections.abc.Mapping):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return all(map(equal, vars(a).values(), vars(b).values())) if dataclasses.is_dataclass(a) else a == b


def test_what_a_tokenizer_gives_comes_back():
    batch = Encoding({"input_ids": t(1, 2), "attention_mask": t(1, 1)}, encodings=open)
    back = restored(through_a_file(batch), Encoding({"input_ids": t(0), "attention_mask": t(0)}))
    assert isinstance(back, Encoding)
    assert torch.equal(back["input_ids"], t(1, 2))


def test_a_packed_sequence_comes_back():
    batch = pack_sequence([t(1.0, 2.0, 3.0), t(4.0)])
    back = restored(through_a_file(batch), pack_sequence([t(0.0)]))
    assert torch.equal(back.data, batch.data)
    assert torch.equal(back.batch_sizes, batch.batch_sizes)


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3)[:, ::-1], np.array([1, 2], np.uint16), np.float64(2.5)])
def test_arrays_come_back_as_arrays(array):
    back = restored(through_a_file([array]), [array])[0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_an_array_is_copied_because_nothing_tells_when_it_changes():
    array = np.zeros(3)
    kept = plain(array)
    array[:] = 1
    np.testing.assert_array_equal(restored(kept, None), np.zeros(3))


def test_a_tensor_gets_the_class_and_the_marks_of_the_fresh_one():
    fresh = torch.zeros(2).as_subclass(Image).requires_grad_()
    fresh.format = "XYXY"
    back = restored(t(1.0, 2.0, 3.0), fresh)
    assert (type(back), back.format, back.requires_grad, back.tolist()) == (Image, "XYXY", True, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"image": [open]}, r"batch\['image'\]\[0\]: a builtin_function"),
        ([Path("x")], r"batch\[0\].*: a "),
        ([Colour.RED], r"batch\[0\]"),
        ([np.array(["a"])], r"batch\[0\]: an array of <U1"),
        ({t(1): 1}, "batch: a Tensor as key"),
        ([torch.eye(2).to_sparse()], r"batch\[0\]: a tensor of layout torch.sparse_coo"),
        ([torch.empty(2, device="meta")], r"batch\[0\]: a tensor .* on meta"),
        (torch.nn.Linear(1, 1), "batch: a Linear"),
        (int, "batch: a type"),
    ],
    ids=str,
)
def test_what_no_file_can_keep_is_named(value, where):
    with pytest.raises(DxdyError, match=f"^{where}"):
        plain(value)


def test_where_classes_are_refused_they_are_named():
    with pytest.raises(DxdyError, match=r"^state: a Pair; only plain"):
        plain(Pair(t(1), t(2)), "state", classes=False)


def test_another_class_is_named():
    with pytest.raises(DxdyError, match=r"^batch\[1\]: was of class .*Pair, and is of class .*Own now"):
        restored(plain([t(1), Pair(t(1), t(2))]), [t(1), Own(t(1))])


def test_tensors_are_walked_in_order():
    value = {"a": [t(1), (t(2), 5)], "b": {"c": t(3)}}
    assert [int(x) for x in tensors(value)] == [1, 2, 3]
    assert [int(x) for x in tensors(with_tensors(value, lambda x: x * 10))] == [10, 20, 30]
