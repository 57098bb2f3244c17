"""The statistics of gradients are those of torch in float64, whatever kind of tensor a gradient is."""

import math
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.distributed.tensor import DTensor, Shard

from dxdy_nb.errors import DxdyError
from dxdy_nb.observe import accelerator, statistics
from dxdy_nb.observe.statistics import BLOCK, COLUMNS, ROW, SMALL, Budget, Statistics, total_norm, update_ratios

SIZES = [1, 2, 7, 1000, ROW, SMALL, SMALL + 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]
MAX = torch.finfo(torch.float32).max


def describe(*tensors):
    return Statistics().measure(tensors).rows


def describe_elsewhere(*tensors):
    """Describe tensors as if they lay on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_is_here", lambda tensor: False)
        return describe(None, *tensors)[1:]  # one is missing, so none is read at once


WAYS = pytest.mark.parametrize("way", [describe, describe_elsewhere])


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
    "minus zeros": lambda: -torch.zeros(100).index_fill(0, torch.tensor([3]), 1.0),
    "always the same": lambda: torch.full((BLOCK + 9,), 0.1),
    "one end to the other": lambda: torch.linspace(-1, 3, 2 * BLOCK),
    "all negative": lambda: -1 - torch.rand(5000),
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
    "numbers that are whole": lambda: torch.arange(-3, 9),
}


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_described_as_its_values(kind, way):
    tensor = KINDS[kind]()
    assert_row(way(tensor)[0], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_glance_sees_the_same_norm_to_the_last_bit_and_nothing_else(kind):
    tensor = KINDS[kind]()
    alone, among = Statistics().glance([tensor]).rows, Statistics().glance([tensor] * 9).rows
    expected = [[math.nan, math.nan, math.nan, row[3], math.nan, row[5]] for row in describe(*[tensor] * 9)]
    np.testing.assert_array_equal(alone, expected[:1])
    np.testing.assert_array_equal(among, expected)


@WAYS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1, 1e-12, 1e-20, 3e-22, 1e-25, 1e-42, 1e17, 1e25, MAX / 8])
def test_every_size_and_magnitude_keeps_its_digits(size, scale, way):
    tensor = torch.randn(size) * scale
    assert_row(way(tensor)[0], tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0, 1, 1e-20, 1e-25, 1e25, math.nan])
def test_a_glance_is_as_right_as_a_look(size, scale):
    tensor = torch.randn(size) * scale
    np.testing.assert_array_equal(Statistics().glance([tensor]).rows[:, [3, 5]], describe(tensor)[:, [3, 5]])


def test_only_what_is_out_of_range_is_read_again(monkeypatch):
    monkeypatch.setattr(statistics, "_exactly", None)
    tensors = [torch.randn(9), torch.zeros(9), torch.zeros(BLOCK + 1), torch.randn(BLOCK + 1), torch.zeros(0)]
    for many in (tensors, 8 * tensors):
        assert not describe(*many)[:, 5].any()
        assert not Statistics().glance(many).rows[:, 5].any()


def test_no_dot_product_is_long_enough_for_threads(monkeypatch):
    dot, rows, lengths = np.dot, np.vecdot, []
    monkeypatch.setattr(np, "dot", lambda a, b: lengths.append(a.size) or dot(a, b))
    monkeypatch.setattr(np, "vecdot", lambda a, b: lengths.append(a.shape[-1]) or rows(a, b))
    tensors = [torch.randn(n) for n in SIZES]
    describe(*tensors)
    describe(*(2 * [torch.randn(SMALL)] * 8))
    Statistics().glance(tensors)
    update_ratios(tensors, tensors)
    assert 0 < max(lengths) <= 10_000


@pytest.mark.parametrize("size", [9, BLOCK + 9])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1, slice(3, 6)])
@WAYS
def test_what_is_not_finite_is_counted_wherever_it_stands(size, value, place, way):
    tensor = with_value(value, size, place)
    assert_row(way(tensor)[0], tensor)


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [-math.inf, MAX, MAX], [math.nan, MAX, MAX]])
@WAYS
def test_infinities_do_not_hide_what_overflows(values, way):
    assert_row(way(torch.tensor(values))[0], torch.tensor(values))


@WAYS
def test_a_missing_tensor_is_nan_and_an_empty_one_has_only_a_norm(way):
    missing, empty = way(None, torch.zeros(0, 3))
    assert np.isnan(missing).all()
    assert dict(zip(COLUMNS, empty.tolist(), strict=True)) == pytest.approx(
        {"mean": math.nan, "max": math.nan, "min": math.nan, "norm": 0, "nonzero": math.nan, "nonfinite": 0},
        nan_ok=True,
    )


@WAYS
def test_many_tensors_at_once_are_each_described_as_their_values(way):
    tensors = [make() for make in KINDS.values()]
    rows = way(*[t for tensor in tensors for t in (tensor, None)], torch.zeros(0))
    for row, tensor in zip(rows[::2], tensors, strict=False):
        assert_row(row, tensor)
    assert np.isnan(rows[1::2]).all()


def test_small_tensors_that_fill_more_than_one_block_keep_their_places():
    tensors = [i * torch.ones(SMALL - i) for i in range(1, 30)]
    assert describe(*tensors)[:, 1].tolist() == list(range(1, 30))
    for row, tensor in zip(describe(*tensors), tensors, strict=True):
        assert_row(row, tensor)


def test_tensors_elsewhere_are_joined_in_groups_and_cut(monkeypatch):
    monkeypatch.setattr(accelerator, "GROUP", 3 * accelerator.ROW)
    sizes = [1, 2, accelerator.ROW, accelerator.ROW + 1, 7 * accelerator.ROW, 10 * accelerator.ROW + 3, 5]
    tensors = [-1 - torch.rand(n) for n in sizes]
    for row, tensor in zip(describe_elsewhere(*tensors), tensors, strict=True):
        assert_row(row, tensor)


class Late:
    """An event that has not happened yet."""

    def __init__(self):
        self.waited = False

    def query(self):
        return self.waited

    def synchronize(self):
        self.waited = True


def test_what_is_on_its_way_is_waited_for_only_by_reading_it(monkeypatch):
    late = Late()
    reduce = accelerator.reduce
    monkeypatch.setattr(statistics, "_is_here", lambda tensor: False)
    monkeypatch.setattr(
        accelerator, "reduce", lambda tensors: [replace(part, happened=late) for part in reduce(tensors)]
    )
    measured = Statistics().measure([None, torch.tensor([3.0, -4.0])])
    assert not measured.ready
    assert not late.waited
    assert measured.rows[1].tolist() == [-0.5, 3, -4, 5, 1, 0]
    assert late.waited
    assert measured.ready


def test_a_sharded_tensor_is_described_by_the_part_that_is_here():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        local = torch.randn(6, 5)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=(12, 5), stride=(5, 1))
        np.testing.assert_array_equal(describe(sharded), describe(local))
        assert_row(describe_elsewhere(sharded)[0], local)
    finally:
        torch.distributed.destroy_process_group()


def test_what_was_described_before_leaves_no_trace():
    kept_memory = Statistics()
    first = [torch.randn(5), torch.randn(3), torch.randn(BLOCK + 1)]
    kept = kept_memory.measure(first).rows
    before = kept.copy()
    for tensors in ([torch.randn(5), None, torch.randn(7)], [torch.randn(2)], [None], [], first):
        np.testing.assert_array_equal(kept_memory.measure(tensors).rows, describe(*tensors).reshape(-1, len(COLUMNS)))
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
    kept, join, others = Statistics(), np.concatenate, []
    ours, theirs = [torch.ones(3)] * 9, [-torch.ones(7)] * 10
    thread = Thread(target=lambda: others.append(kept.measure(theirs).rows))

    def interrupted(*args, **kwargs):
        joined = join(*args, **kwargs)
        if not thread.ident:
            thread.start()
            thread.join()
        return joined

    monkeypatch.setattr(np, "concatenate", interrupted)
    np.testing.assert_array_equal(kept.measure(ours).rows, describe(*ours))
    np.testing.assert_array_equal(others[0], describe(*theirs))


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


def test_an_update_ratio_pairs_the_same_elements_however_they_lie():
    before = torch.arange(1.0, 25).reshape(2, 3, 2, 2)
    after = (2 * before).to(memory_format=torch.channels_last)
    strided = torch.arange(1.0, 61).reshape(6, 10).T[::2]
    assert update_ratios([before, strided], [after, strided.clone() * 3]).tolist() == pytest.approx([1, 2])


def run(budget, costs):
    """Return the steps measured in full, given (full row, glance, step) in seconds for each step."""
    taken = []
    for step, (full_row, glance, whole) in enumerate(costs):
        full = budget.full(step)
        budget.spent(full_row if full else glance, whole, full)
        taken += [step] if full else []
    return taken


def test_no_budget_measures_every_step():
    assert run(Budget(None), [(5.0, 1.0, 1.0)] * 9) == list(range(9))


def test_what_the_budget_allows_is_always_full():
    assert run(Budget(0.25), [(0.25, 0.1, 1.0)] * 9) == list(range(9))


def test_what_is_dearer_is_sampled_at_the_rate_the_share_allows():
    # A full row costs 1 and an eighth of each step is allowed: every eighth. With glances of 1/16: 7/8 owed, 1/16 paid.
    assert run(Budget(0.125), [(1.0, 0.0, 1.0)] * 30) == [0, 1, 2, 3, 11, 19, 27]
    assert run(Budget(0.125), [(1.0, 0.0625, 1.0)] * 40) == [0, 1, 2, 3, 18, 33]


def test_the_first_steps_are_full_and_free():
    assert run(Budget(0.125), [(1e6, 0.0, 1.0)] * 3 + [(0.125, 0.0, 1.0)] * 3) == list(range(6))


def test_a_step_too_dear_for_any_budget_is_full_at_long_intervals():
    assert run(Budget(0.01), [(1.0, 0.5, 1.0)] * 310) == [0, 1, 2, 3, 104, 205, 306]


def test_cheap_steps_are_not_saved_up():
    costs = [(0.0, 0.0, 1.0)] * 1000 + [(1.0, 0.0, 1.0)] * 20
    assert run(Budget(0.125), costs)[1000:] == [1000, 1008, 1016]


def test_a_full_row_that_nobody_asked_for_is_paid_for():
    budget = Budget(0.125)
    run(budget, [(0.125, 0.0, 1.0)] * 5)
    for step, monitor in ((5, 0.25), (6, 0.5)):  # both full: step 6 for an anomaly
        budget.full(step)
        budget.spent(monitor, 1.0, True)
    owed = (0.25 - 0.125) + (0.5 - 0.125)
    waits = 0
    while not budget.full(7 + waits):
        budget.spent(0.0, 1.0, False)
        waits += 1
    assert waits == owed / 0.125


COSTS = st.tuples(st.floats(0, 2), st.floats(0, 0.3), st.floats(0.1, 3))


@given(st.floats(0.01, 1), st.lists(COSTS, min_size=1, max_size=80))
def test_over_any_stretch_of_steps_the_bound_holds(share, costs):
    budget, log = Budget(share), []
    for step, (full_row, glance, whole) in enumerate(costs):
        full = budget.full(step)
        budget.spent(full_row if full else glance, whole, full)
        log.append((full, full_row if full else glance, whole))
    log = log[Budget.FIRST :]
    for start in range(len(log)):
        stretch = log[start:]
        spent = sum(monitor for _, monitor, _ in stretch)
        dear = sum(max(0.0, monitor - share * whole) for full, monitor, whole in stretch if not full)
        row = max((monitor for full, monitor, _ in stretch if full), default=0.0)
        assert spent <= share * sum(whole for *_, whole in stretch) + row + dear + 1e-9


@pytest.mark.parametrize("share", [0, -0.1, 1.5, math.nan, math.inf, "3 %"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(DxdyError, match=r"budget: expected .* got .*0\.03 allows 3 %"):
        Budget(share)
