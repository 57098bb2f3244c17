"""The statistics of gradients are those of torch in float64, whatever kind of tensor a gradient is."""

import math
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dxdy_nb.observe.statistics import BLOCK, COLUMNS, Statistics, total_norm, update_ratios

SIZES = [1, 2, 7, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 5]
MAX = torch.finfo(torch.float32).max


def describe(*tensors):
    return Statistics().describe(tensors)


def norm_of(values):
    """Return the norm of float64 values whose squares may leave float64."""
    scale = values.abs().max().item() if values.numel() else 0.0
    if not math.isfinite(scale) or scale == 0:
        return torch.linalg.vector_norm(values).item()
    return scale * torch.linalg.vector_norm(values / scale).item()


def assert_row(row, tensor):
    """Compare a row with what torch says of the same values as a dense float64 tensor."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values = values.detach().to_dense().double().flatten()
    mean, high, low, norm, nonzero, nonfinite = row.tolist()
    size = np.float64(values.abs().mean().item())
    np.testing.assert_allclose(mean, values.mean().item(), rtol=0, atol=1e-6 * size if np.isfinite(size) else 0)
    np.testing.assert_array_equal(high, values.max().item())
    np.testing.assert_array_equal(low, values.min().item())
    np.testing.assert_allclose(norm, norm_of(values), rtol=1e-5)
    assert nonzero == values.count_nonzero().item() / values.numel()
    assert nonfinite == (~values.isfinite()).sum().item()


def embedding_gradient():
    layer = torch.nn.Embedding(50, 8, sparse=True)
    layer(torch.tensor([3, 3, 9])).square().sum().backward()
    return layer.weight.grad


def with_value(value, size, place):
    tensor = torch.randn(size)
    tensor[place] = value
    return tensor


KINDS = {
    "a number": lambda: torch.tensor(-2.5),
    "zeros": lambda: torch.zeros(100),
    "zeros, large": lambda: torch.zeros(BLOCK + 1),
    "one value among zeros": lambda: with_value(3.0, 1000, 500) * (torch.arange(1000) == 500),
    "mean far above the spread": lambda: 1e4 + torch.randn(BLOCK),
    "mean far below the spread": lambda: torch.randn(4 * BLOCK) - 1e-4,
    "a parameter": lambda: torch.nn.Parameter(torch.randn(5, 3)),
    "half": lambda: torch.randn(1000).half(),
    "half, out of range": lambda: (1e5 * torch.randn(1000)).half(),
    "bfloat16": lambda: torch.randn(BLOCK + 3).bfloat16(),
    "float64": lambda: torch.randn(1000, dtype=torch.float64),
    "float64, large": lambda: torch.randn(BLOCK + 9, dtype=torch.float64),
    "float64, tiny": lambda: 1e-200 * torch.randn(100, dtype=torch.float64),
    "float64, huge": lambda: 1e200 * torch.randn(100, dtype=torch.float64),
    "float64, largest": lambda: torch.full((10,), torch.finfo(torch.float64).max, dtype=torch.float64),
    "transposed": lambda: torch.randn(40, 30).T,
    "strided": lambda: torch.randn(100, 6)[::3, 1::2],
    "expanded": lambda: torch.randn(10, 1).expand(10, 7),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, large": lambda: torch.randn(3, 64, 20, 20).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "complex": lambda: torch.randn(30, dtype=torch.complex64),
    "complex128": lambda: torch.randn(30, dtype=torch.complex128),
    "conjugate": lambda: torch.randn(30, dtype=torch.complex64).conj(),
    "sparse": embedding_gradient,
    "sparse, negative": lambda: -torch.eye(20).to_sparse(),
    "sparse, full": lambda: torch.randn(5, 4).to_sparse(),
    "sparse, nothing": lambda: torch.zeros(5, 4).to_sparse(),
    "sparse, nan": lambda: with_value(math.nan, 50, 7).reshape(5, 10).to_sparse(),
    "sparse, summed": lambda: torch.sparse_coo_tensor(
        [[1, 1, 2]], torch.tensor([2.0, -2.0, 5.0]), (9,), check_invariants=True
    ),
    "sparse, half": lambda: torch.eye(9).half().to_sparse(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_described_as_its_values(kind):
    tensor = KINDS[kind]()
    assert_row(describe(tensor)[0], tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1, 1e-12, 1e-20, 3e-22, 1e-25, 1e-42, 1e17, 1e25, MAX / 8])
def test_every_size_and_magnitude_keeps_its_digits(size, scale):
    tensor = torch.randn(size) * scale
    assert_row(describe(tensor)[0], tensor)


@pytest.mark.parametrize("size", [9, BLOCK + 9])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1, slice(3, 6)])
def test_what_is_not_finite_is_counted_wherever_it_stands(size, value, place):
    tensor = with_value(value, size, place)
    assert_row(describe(tensor)[0], tensor)


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [-math.inf, MAX, MAX], [math.nan, MAX, MAX]])
def test_infinities_do_not_hide_what_overflows(values):
    assert_row(describe(torch.tensor(values))[0], torch.tensor(values))


def test_a_missing_tensor_is_nan_and_an_empty_one_has_only_a_norm():
    missing, empty = describe(None, torch.zeros(0, 3))
    assert np.isnan(missing).all()
    assert dict(zip(COLUMNS, empty.tolist(), strict=True)) == pytest.approx(
        {"mean": math.nan, "max": math.nan, "min": math.nan, "norm": 0, "nonzero": math.nan, "nonfinite": 0},
        nan_ok=True,
    )


def test_many_tensors_at_once_are_described_as_each_alone():
    tensors = [None, *(make() for make in KINDS.values()), torch.zeros(0), None, torch.randn(5)]
    together = describe(*tensors)
    np.testing.assert_array_equal(together, np.concatenate([describe(tensor) for tensor in tensors]))


def test_what_was_described_before_leaves_no_trace():
    statistics = Statistics()
    first = [torch.randn(5), torch.randn(3), torch.randn(BLOCK + 1)]
    kept = statistics.describe(first)
    before = kept.copy()
    for tensors in ([torch.randn(5), None, torch.randn(7)], [torch.randn(2)], [None], [], first):
        np.testing.assert_array_equal(statistics.describe(tensors), describe(*tensors).reshape(-1, len(COLUMNS)))
    np.testing.assert_array_equal(kept, before)


def test_what_is_described_is_not_touched():
    tensors = [torch.randn(9), torch.randn(BLOCK + 1), torch.randn(9).bfloat16(), 1e30 * torch.randn(9)]
    before = [tensor.clone() for tensor in tensors]
    describe(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(arrays.arrays(np.float32, st.integers(1, 50), elements=FLOATS), min_size=1, max_size=4))
def test_any_values_at_all_are_described_as_torch_describes_them(values):
    tensors = [torch.from_numpy(array) for array in values]
    for row, tensor in zip(describe(*tensors), tensors, strict=True):
        assert_row(row, tensor)


def test_another_thread_may_describe_at_the_same_time(monkeypatch):
    statistics, join, others = Statistics(), np.concatenate, []
    thread = Thread(target=lambda: others.append(statistics.describe([torch.ones(3)])))

    def interrupted(*args, **kwargs):
        if not thread.ident:
            thread.start()
            thread.join()
        return join(*args, **kwargs)

    monkeypatch.setattr(np, "concatenate", interrupted)
    row = statistics.describe([torch.ones(3)])[0]
    assert row.tolist() == others[0][0].tolist() == describe(torch.ones(3))[0].tolist()


@given(
    st.lists(
        arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2**40), 2**40, width=32)),
        min_size=1,
        max_size=5,
    )
)
def test_the_total_norm_is_that_of_torch(values):
    tensors = [torch.from_numpy(array) for array in values]
    expected = torch.nn.utils.get_total_norm([tensor.double() for tensor in tensors]).item()
    assert total_norm(describe(*tensors)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("odd", [[math.nan], [math.inf], [math.inf, math.nan], [-math.inf, 1.0]])
def test_the_total_norm_is_as_little_finite_as_that_of_torch(odd):
    tensors = [torch.tensor([3.0]), *(torch.tensor([value]) for value in odd)]
    expected = torch.nn.utils.get_total_norm(tensors).item()
    assert total_norm(describe(*tensors)) == pytest.approx(expected, nan_ok=True)


def test_missing_tensors_do_not_count_in_the_total_norm():
    assert total_norm(describe(torch.tensor([3.0]), None, torch.tensor([-4.0]))) == 5
    assert math.isnan(total_norm(describe(None, None)))


def test_a_total_norm_whose_squares_overflow_is_still_a_number():
    assert total_norm(describe(torch.tensor([3e30]), torch.tensor([4e30]))) == pytest.approx(5e30)


def test_an_update_ratio_is_the_change_over_what_was_there():
    before = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.ones(4, dtype=torch.bfloat16), torch.ones(2, 2).double()]
    after = [
        torch.tensor([3.0, 4.5]),
        torch.ones(2),
        torch.full((4,), 1.5, dtype=torch.bfloat16),
        torch.ones(2, 2).double(),
    ]
    assert update_ratios(before, after).tolist() == pytest.approx([0.1, math.nan, 0.5, 0.0], nan_ok=True)
