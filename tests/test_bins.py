"""A long record in few bins: nothing that matters is lost, and it is the same bit by bit or at once."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import made

from dxdy_nb.lesson.bins import MERGE, binned, layer_norms, layers


def test_one_bin_a_step_while_there_is_room():
    record = made(8, ["a", "b"])
    bins = binned(record, most=8)
    assert (bins.width, bins.last) == (1, 7)
    assert bins.low["loss"].tolist() == bins.high["loss"].tolist() == record.steps["loss"].tolist()
    assert binned(made(9, ["a"]), most=8).width == 2


def test_a_spike_and_a_dip_of_one_step_survive_a_hundred_thousand():
    record = made(100_000, ["a"])
    record.steps.loc[33_333, "loss"] = 77.0
    record.steps.loc[66_666, "loss"] = -3.0
    bins = binned(record)
    assert len(bins.low) <= 256
    assert bins.width == 512
    assert bins.high["loss"].max() == 77.0
    assert bins.high["loss"].idxmax() == 33_333 // 512 * 512
    assert bins.low["loss"].min() == -3.0


def test_a_value_that_is_not_finite_is_a_mark_and_no_number():
    record = made(100, ["a", "b"])
    record.steps.loc[50, "loss"] = np.nan
    record.gradients.loc[(50, "b"), ["norm", "nonfinite"]] = (np.inf, 3)
    bins = binned(record, most=10)
    assert bins.width == 16
    assert bins.spoilt["loss"].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert bins.bad["b"].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert bins.bad["a"].sum() == 0
    assert np.isfinite(bins.norms.to_numpy()).all()


def test_seconds_are_sums_and_the_rest_of_a_step_is_other():
    record = made(4, ["a"])
    record.steps[["data_time", "forward_time", "backward_time", "update_time"]] = (0.1, 0.2, 0.3, 0.1)
    record.steps["step_time"] = 1.0
    sums = binned(record, most=2).seconds.iloc[0]
    assert sums[["data", "forward", "backward", "update", "other", "steps"]].tolist() == pytest.approx(
        [0.2, 0.4, 0.6, 0.2, 0.6, 2]
    )


def test_a_parameter_without_a_gradient_stays_missing_and_is_not_zero():
    record = made(10, ["a", "b"])
    record.gradients.loc[(slice(None), "a"), "norm"] = np.nan
    record.gradients.loc[(slice(None), "b"), "norm"] = 0.0
    norms, _ = layer_norms(binned(record, most=4), most=9)
    assert norms["a"].isna().all()
    assert (norms["b"] == 0).all()


def test_rows_that_were_not_measured_are_left_out_but_not_rows_without_gradients():
    record = made(6, ["a", "b"])
    record.gradients.loc[[1, 2, 4], "norm"] = np.nan
    record.steps["full"] = [True, False, False, True, True, False]
    assert binned(record).norms.index.tolist() == [0, 3, 4, 5]


@settings(max_examples=20)
@given(st.integers(1, 90), st.lists(st.integers(1, 40), max_size=4), st.integers(2, 12))
def test_bit_by_bit_is_the_same_as_at_once(first, more, most):
    whole = made(first + sum(more), ["a", "b"])
    bins, place = binned(whole[:first], most), first
    for count in more:
        bins, place = binned(whole[place : place + count], most, before=bins), place + count
    at_once = binned(whole, most)
    assert (bins.width, bins.last) == (at_once.width, at_once.last)
    assert len(bins.low) <= most
    for name in MERGE:
        pd.testing.assert_frame_equal(getattr(bins, name), getattr(at_once, name), check_names=False)


def test_parameters_that_are_found_later_get_columns_of_their_own():
    early, late = made(10, ["a"]), made(20, ["a", "b"])[10:]
    bins = binned(late, most=4, before=binned(early, most=4))
    assert bins.norms["b"].isna().tolist() == [True, False, False]
    assert set(bins.sizes) == {"a", "b"}


def test_layers_are_modules_where_there_are_many_parameters():
    names = [f"h.{i}.{kind}.{p}" for i in range(3) for kind in ("attn", "mlp") for p in ("weight", "bias")]
    table = pd.DataFrame(columns=[*names, "head.weight"])
    assert len(layers(table, 13)) == 13
    assert list(layers(table, 12)) == ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp", "head"]
    assert list(layers(table, 6)) == ["h.0", "h.1", "h.2", "head"]
    assert list(layers(table, 1)) == ["h", "head"]


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_the_norm_of_a_layer_is_that_of_its_parameters_together(scale):
    record = made(1, ["f.weight", "f.bias", "g.weight"])
    record.gradients["norm"] = np.array([3.0, 4.0, 7.0]) * scale
    norms, sizes = layer_norms(binned(record), most=2)
    assert norms.loc[0].tolist() == pytest.approx([5 * scale, 7 * scale])
    assert sizes == {"f": 300, "g": 300}


def test_the_norm_of_a_layer_is_missing_where_one_of_its_parameters_is_not_finite():
    record = made(2, ["f.weight", "f.bias", "g.weight"])
    record.gradients.loc[(1, "f.bias"), ["norm", "nonfinite"]] = (np.nan, 1)
    norms, _ = layer_norms(binned(record), most=2)
    assert norms.isna().to_numpy().tolist() == [[False, False], [True, False]]
