"""Figures of a record: what stands on which axis, and what a reader could mistake is told apart."""

import io

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.image import AxesImage
from PIL import Image
from records import made

from dxdy_nb.lesson import plots
from dxdy_nb.lesson.bins import binned

NAMES = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
BLOCKS = [f"h.{i}.{kind}.{p}" for i in range(9) for kind in ("attn", "mlp") for p in ("weight", "bias")]
ALL = (plots.loss, plots.gradient_norms, plots.heat_map, plots.update_ratios, plots.phases, plots.training)


@pytest.fixture
def broken():
    """A record in which something of everything went wrong."""
    record = made(60, NAMES)
    record.steps.loc[40, ["loss", "grad_norm"]] = (np.nan, np.inf)
    record.gradients.loc[(40, "fc.weight"), ["norm", "nonfinite"]] = (np.nan, 7)
    record.gradients.loc[(slice(None), "conv.weight"), ["norm", "update_ratio"]] = np.nan
    record.gradients.loc[(slice(None), "conv.bias"), ["norm", "update_ratio"]] = 0.0
    return record


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize("count, names", [(0, NAMES), (1, NAMES), (60, NAMES), (3000, BLOCKS), (5, [])])
def test_every_record_can_be_drawn(draw, count, names):
    figure = draw(made(count, names))
    assert not any(letter.isdigit() for letter in figure.get_label())
    pixels = np.asarray(Image.open(io.BytesIO(plots.png(figure))))
    assert pixels.shape[1] <= 820  # the width of a notebook's output
    assert pixels.min() < 128 < pixels.max()


@pytest.mark.parametrize("draw", ALL)
def test_a_record_in_which_things_went_wrong_can_be_drawn(draw, broken):
    assert len(plots.png(draw(broken))) > 1000


@pytest.mark.parametrize("draw", ALL)
def test_axes_have_names_and_units(draw, broken):
    axes = [ax for ax in draw(broken).axes if ax.get_xlabel() or ax.get_ylabel()]
    named = {ax.get_xlabel() for ax in axes} | {ax.get_ylabel() for ax in axes}
    assert named <= {
        *("", "step", "loss", "gradient norm", "milliseconds a step"),
        *("|update| / |weight|", "log₁₀ RMS gradient"),
    }
    assert len(named) >= 2


def test_the_heat_map_shows_the_root_mean_square_of_each_layer():
    record = made(3, ["a", "b"])  # norms (1, 2, 3) and a tenth; 100 and 200 elements
    shown = plots.heat_map(record).axes[0].images[0].get_array()
    expected = np.log10(np.array([[1, 2, 3], [0.1, 0.2, 0.3]]) / np.sqrt([[100], [200]]))
    assert np.asarray(shown) == pytest.approx(expected)


def test_the_heat_map_tells_missing_zero_and_not_finite_apart(broken):
    ax = plots.heat_map(broken).axes[0]
    assert [text.get_text() for text in ax.texts] == ["no gradient", "zero", "", ""]
    marks = np.asarray(ax.images[1].get_array())[..., 3] > 0
    assert list(zip(*np.nonzero(marks), strict=True)) == [(2, 40)]


def test_steps_that_were_not_measured_show_what_was_measured_last():
    record = made(6, ["a"])
    record.gradients.loc[[1, 2, 4], "norm"] = np.nan
    record.steps["full"] = [True, False, False, True, False, True]
    shown = plots.heat_map(record).axes[0].images[0].get_array()
    assert (10 ** np.asarray(shown)[0] * 10).tolist() == pytest.approx([1, 1, 1, 4, 4, 1])


def test_many_parameters_are_shown_by_module():
    labels = [label.get_text() for label in plots.heat_map(made(20, BLOCKS)).axes[0].get_yticklabels()]
    assert labels == [f"h.{i}.{kind}" for i in range(9) for kind in ("attn", "mlp")]
    lines = plots.gradient_norms(made(20, BLOCKS)).axes[0].lines
    assert [line.get_label() for line in lines] == ["all together", "h"]


def test_a_gradient_norm_of_each_layer_is_a_line_on_a_logarithmic_axis():
    record = made(20, ["a", "b"])
    ax = plots.gradient_norms(record).axes[0]
    assert ax.get_yscale() == "log"
    assert ax.lines[0].get_ydata().tolist() == record.steps["grad_norm"].tolist()
    assert ax.lines[2].get_ydata().tolist() == record.gradients["norm"].unstack()["b"].tolist()


def test_update_ratios_are_distributions_of_what_was_sampled():
    record = made(50, ["a", "b"])
    record.gradients.loc[([0, 10, 20, 30, 40], "b"), "update_ratio"] = [1e-4, 2e-4, 4e-4, 8e-4, 1e-2]
    ax = plots.update_ratios(record).axes[0]
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_color() == plots.PALETTE[1]]
    assert medians == pytest.approx([1e-3, 4e-4])


def test_phases_are_stacked_to_the_length_of_a_step():
    ax = plots.phases(made(30, ["a"])).axes[0]
    layers = [found for found in ax.collections if isinstance(found, PolyCollection)]
    tops = [layer.get_paths()[0].vertices[:, 1].max() for layer in layers]
    assert [layer.get_label() for layer in layers] == ["data", "forward", "backward", "update", "other"]
    assert tops == pytest.approx([2.0, 5.0, 9.0, 9.5, 10.0])  # milliseconds
    slow = made(30, ["a"])
    slow.steps["step_time"] = 3.0
    assert plots.phases(slow).axes[0].get_ylabel() == "seconds a step"


def test_a_slow_first_step_does_not_press_the_others_flat():
    record = made(200, ["a"])
    record.steps.loc[0, ["step_time", "forward_time"]] = 5.0
    assert plots.phases(record).axes[0].get_ylim()[1] == pytest.approx(14.0)


def test_a_loss_that_is_not_finite_is_marked_at_its_step(broken):
    marks = plots.loss(broken).axes[0].collections[0].get_segments()
    assert [segment[0][0] for segment in marks] == [40]


def test_a_loss_over_decades_has_a_logarithmic_axis_and_one_below_zero_has_not():
    assert plots.loss(made(300, ["a"])).axes[0].get_yscale() == "log"
    record = made(300, ["a"])
    record.steps.loc[5, "loss"] = -1.0
    assert plots.loss(record).axes[0].get_yscale() == "linear"


def test_a_spike_of_one_step_is_seen_in_a_long_record():
    record = made(100_000, ["a"])
    record.steps.loc[77_777, "loss"] = 50.0
    assert max(plots.loss(record).axes[0].lines[0].get_ydata()) == 50.0


def test_a_picture_drawn_over_another_is_the_same_as_a_new_one(broken):
    used = plots.training(binned(made(3000, BLOCKS)))
    again = plots.png(plots.training(broken, used))
    assert again == plots.png(plots.training(broken))
    assert sum(isinstance(artist, AxesImage) for ax in used.axes for artist in ax.get_children()) == 3


def test_the_picture_of_training_has_the_five_panels_and_its_words():
    figure = plots.training(made(60, NAMES))
    assert figure.get_label() == "loss, gradient norm, gradient size by parameter and update ratio over the steps"
    assert [ax.get_ylabel() for ax in figure.axes] == [
        *("loss", "gradient norm", "milliseconds a step"),
        *("", "log₁₀ RMS gradient", "|update| / |weight|"),
    ]
