"""A record, or numbers, as a matplotlib Figure: pure functions, no pyplot, no global state.

Every figure carries its alternative text as its label: the text that stands where a picture cannot be shown, and
that a notebook check compares. It holds no digits, so another machine's last digits cannot fail a lesson.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from dxdy_nb.lesson import draw
from dxdy_nb.lesson.bins import Bins, Record, binned, layer_norms, layers
from dxdy_nb.lesson.draw import GREY, MOST_ROWS, PALETTE, dash

if TYPE_CHECKING:
    import pandas as pd

    from dxdy_nb.training.ablation import Ablation
    from dxdy_nb.training.memory import Memory
    from dxdy_nb.training.tuning import Bracket, Search

# What a panel can hold, beside rows of a heat map: boxes one above the other, lines that can be told apart.
MOST_BOXES, MOST_LINES = 24, 7


def new_figure(
    alt: str, width: float = 8.0, height: float = 3.0, rows: int = 1, columns: int = 1
) -> tuple[Figure, Any]:
    """Return an empty figure (inches) and its axes, as an array of shape (rows, columns).

    Examples
    --------
    >>> figure, axes = new_figure("an empty figure", columns=2)
    >>> axes.shape, figure.get_label()
    ((1, 2), 'an empty figure')
    """
    figure = Figure(figsize=(width, height), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    figure.set_label(alt)
    return figure, dress(figure.subplots(rows, columns, squeeze=False))


def dress(axes: Any) -> Any:
    """Give axes what all pictures of the workbook share."""
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_prop_cycle(color=PALETTE)
        ax.grid(alpha=0.25)
    return axes


def png(figure: Figure, compress_level: int = 6) -> bytes:
    """Return a figure as PNG bytes, the same for the same figure; level 1 is fast and large."""
    figure.canvas.draw()  # savefig would draw it twice
    return png_as_drawn(figure, compress_level)


def png_as_drawn(figure: Figure, compress_level: int = 6) -> bytes:
    """Return as PNG bytes what a figure's canvas holds, without drawing it."""
    width, height = figure.canvas.get_width_height()
    pixels = Image.frombuffer("RGBA", (width, height), figure.canvas.buffer_rgba(), "raw", "RGBA", 0, 1)  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    pixels.convert("RGB").save(buffer, "PNG", compress_level=compress_level)
    return buffer.getvalue()


def bundle(figure: Figure) -> dict[str, str]:
    """Return a figure as what a notebook stores: a PNG, and its alternative text."""
    return {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": str(figure.get_label())}


def show(figure: Figure) -> None:
    """Display a figure in the notebook, its alternative text beside it."""
    from IPython.display import display

    display(bundle(figure), raw=True, metadata={"image/png": {"alt": figure.get_label()}})


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    alt: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    title: str = "",
) -> Figure:
    """Return one panel with a line for each ``name: (xs, ys)``; ``x`` and ``y`` label the axes with their units.

    Examples
    --------
    >>> figure = curves({"loss": ([0, 1], [2.3, 1.1])}, alt="the loss falls", x="step", y="loss")
    >>> figure.get_label()
    'the loss falls'
    """
    figure, axes = new_figure(alt, width=7.0, height=3.2)
    ax = axes[0, 0]
    for name, (xs, ys) in series.items():
        ax.plot(xs, ys, label=name, marker="o" if len(xs) < 40 else None, markersize=3)
    ax.set(xlabel=x, ylabel=y, title=title)
    if x in ("step", "epoch"):
        ax.xaxis.get_major_locator().set_params(integer=True)  # there is no step 2.5
    if log_x:
        ax.set_xscale("log", nonpositive="mask")
    if log_y:
        ax.set_yscale("log", nonpositive="mask")  # an exact zero is left out, not drawn as a fall to the bottom
    if len(series) > 1:
        ax.legend(frameon=False)
    return figure


def loss(record: Record | Bins) -> Figure:
    """Return the loss over the steps; a vertical line marks a step whose loss is not finite.

    Of a long record each bin shows its smallest and its largest value, so that a spike of one step stays visible.

    Examples
    --------
    >>> loss(w)  # doctest: +SKIP
    """
    figure, axes = new_figure("the loss over the steps", 7.0, 3.2)
    draw.line(axes[0, 0], binned(record), "loss", "loss")
    return _finished(figure)


def gradient_norms(record: Record | Bins) -> Figure:
    """Return the gradient norm of each layer over the steps, before clipping.

    Lines are parameters while a palette tells them apart, else modules; of a long record each bin shows its largest
    value. Grey is the norm of all gradients together.

    Examples
    --------
    >>> gradient_norms(w)  # doctest: +SKIP
    """
    figure, axes = new_figure("the gradient norm of each layer over the steps", 7.0, 3.6)
    bins, ax = binned(record), axes[0, 0]
    norms, _ = layer_norms(bins, MOST_LINES)
    ax.plot(bins.high.index, bins.high["grad_norm"], color=GREY, linewidth=4, label="all together")
    for place, name in enumerate(norms.columns):
        ax.plot(norms.index, norms[name].where(norms[name] > 0), label=name, linewidth=1.2, linestyle=dash(place))
    ax.set(xlabel=draw.steps_of(bins), ylabel="gradient norm", yscale="log")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _finished(figure)


def heat_map(record: Record | Bins) -> Figure:
    """Return layer × step: the root mean square of each layer's gradient, on a logarithmic scale.

    Rows are parameters, or modules where there are many. White is no gradient, which is not the same as zero; orange
    is a gradient with values that are not finite.

    Examples
    --------
    >>> heat_map(w)  # doctest: +SKIP
    """
    bins = binned(record)
    rows = min(len(layers(bins.norms, MOST_ROWS)), 2 * MOST_ROWS)
    figure, axes = new_figure("gradient size by layer over the steps", 8.0, 1.2 + 0.2 * rows, columns=2)
    sizes, key = axes[0]
    sizes.get_gridspec().set_width_ratios((40, 1))
    if rows:
        draw.heat_map(sizes, key, bins, 2 * MOST_ROWS)
    return _finished(figure)


def update_ratios(record: Record) -> Figure:
    """Return the distribution of |update| / |weight| over the sampled steps, a box for each layer.

    A box spans the middle half of the steps, its whiskers 90 %, dots are the others. Grey is the decade around
    1e-3: a rule of thumb of the CS231n notes, no threshold.

    Examples
    --------
    >>> update_ratios(w)  # doctest: +SKIP
    """
    table = record.gradients["update_ratio"].unstack("parameter", sort=False)
    found = layers(table, MOST_BOXES)
    figure, axes = new_figure("the distribution of update ratios by layer", 7.0, 1.2 + 0.22 * len(found))
    ax = axes[0, 0]
    values = [table[names].to_numpy(dtype=float).ravel() for names in found.values()]
    values = [of_layer[np.isfinite(of_layer) & (of_layer > 0)] for of_layer in values]
    ax.axvspan(10**-3.5, 10**-2.5, color="0.9")
    style = {"medianprops": {"color": PALETTE[1]}, "flierprops": {"marker": ".", "markersize": 3}, "widths": 0.6}
    if found:
        ax.boxplot(values, orientation="horizontal", whis=(5, 95), tick_labels=list(found), **style)
    ax.set(xlabel="|update| / |weight|", xscale="log")
    ax.tick_params("y", labelsize=8)
    ax.invert_yaxis()  # the first layer stands on top, as in the heat map
    return _finished(figure)


def phases(record: Record | Bins) -> Figure:
    """Return where the time of a step goes, stacked: data, forward, backward, update, and what is left of it.

    Of a long record each bin shows its mean.

    Examples
    --------
    >>> phases(w)  # doctest: +SKIP
    """
    figure, axes = new_figure("the time of each phase over the steps", 7.0, 3.2)
    draw.phases(axes[0, 0], binned(record))
    figure.legend(loc="outside right upper", frameon=False, reverse=True)
    return _finished(figure)


def training(record: Record | Bins, figure: Figure | None = None) -> Figure:
    """Return loss, gradient norm, phase times, gradient size by layer and update ratios over the steps of a record.

    Parameters
    ----------
    record : a watched loop or a run
    figure : one that this function or ``empty_training`` returned, to draw into; what it showed is removed
    """
    bins = binned(record)
    figure = _emptied(figure) if figure else empty_training()
    lines, norms, times, sizes, key, ratios = figure.axes
    draw.line(lines, bins, "loss", "loss")
    draw.line(norms, bins, "grad_norm", "gradient norm")
    draw.phases(times, bins)
    times.legend(fontsize=6, frameon=False, loc="upper right", ncols=2, reverse=True)
    if len(bins.norms.columns):
        draw.heat_map(sizes, key, bins, MOST_ROWS)
        draw.ratios(ratios, bins)
    return _finished(figure)


def root_mean_square(norms: "pd.Series[float]", sizes: Mapping[str, int]) -> "pd.DataFrame":
    """Return norm / √(number of elements), a column for each parameter, a row for each step.

    A norm grows with a tensor's size; the root mean square does not, so it compares tensors of any size.
    """
    table = norms.unstack("parameter", sort=False)
    return draw.root_mean_square(table, sizes)


def empty_training() -> Figure:
    """Return a picture of training before its first step: three panels above, two and a colour key below.

    Their places are fixed: to find the best layout costs as much as to draw.
    """
    alt = "loss, gradient norm, gradient size by parameter and update ratio over the steps"
    figure, _ = new_figure(alt, 9.0, 5.4)
    figure.clear()
    figure.set_layout_engine("none")
    above = [(left, 0.59, 0.245, 0.38) for left in (0.075, 0.41, 0.74)]
    below = [(0.145, 0.09, 0.29, 0.39), (0.445, 0.09, 0.012, 0.39), (0.625, 0.09, 0.36, 0.39)]
    dress(np.array([figure.add_axes(place) for place in (*above, *below)]))
    return figure


def _emptied(figure: Figure) -> Figure:
    """Return a figure without what its axes show: to make axes and ticks anew would take half the time."""
    for ax in figure.axes:
        for artist in (*ax.lines, *ax.patches, *ax.collections, *ax.images, *ax.texts, ax.get_legend()):
            if artist is not None:
                artist.remove()
        ax.relim()
        ax.autoscale()
        ax.set_prop_cycle(color=PALETTE)
    return figure


def lr_range(bracket: "Bracket") -> Figure:
    """Return the smoothed loss of a range test over the learning rate: the bracket in grey, the rules as lines.

    Examples
    --------
    >>> lr_range(dx.lr_range_test(model=model, loss_fn=loss_fn, loader=loader, optimizer=optimizer))  # doctest: +SKIP
    """
    series = {"smoothed loss": (bracket.rates, bracket.losses)}
    alt = "the loss over a rising learning rate, and the bracket to search in"
    figure = curves(series, alt=alt, x="learning rate", y="loss", log_x=True)
    ax = figure.axes[0]
    ax.axvspan(*bracket, color="0.9", zorder=0, label="bracket")
    for place, (rule, rate) in enumerate(bracket.rules.items(), start=1):
        ax.axvline(rate, color=PALETTE[place], linestyle=dash(place), linewidth=1.2, label=rule)
    low, top = min(bracket.losses), bracket.losses[0]
    ax.set_ylim(low - 0.1 * (top - low), top + 0.5 * (top - low))  # what blows up would press all else flat
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)  # on grey one would not see the grey patch
    return _finished(figure)


def lr_search(search: "Search") -> Figure:
    """Return the validation loss of short runs over their learning rates: a ring is the best, red crosses diverged.

    Examples
    --------
    >>> lr_search(dx.lr_search(dx.RunConfig()))  # doctest: +SKIP
    """
    figure, axes = new_figure("validation loss of short runs over their learning rates, diverged ones as red crosses")
    ax, table = axes[0, 0], search.table
    known = table["validation_loss"][np.isfinite(table["validation_loss"])]
    lost = table.index.difference(known.index)
    if len(known):
        ax.plot(known.index, known, marker="o", markersize=4, label="completed")
    else:
        ax.set_yticks([])
    if search.best is not None:
        style = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "linestyle": "", "color": PALETTE[2]}
        ax.plot([search.best], [known[search.best]], label="best", **style)
    if len(lost):
        top = ax.get_xaxis_transform()  # a loss that is no number has no height
        ax.plot(lost, [0.95] * len(lost), "x", color="red", markersize=9, transform=top, label="diverged")
    if search.bracket is not None:
        ax.axvspan(*search.bracket, color="0.9", zorder=0, label="bracket of the range test")
    ax.set(xlabel="learning rate", ylabel="validation loss", xscale="log")
    if known.max() > 10 * known.min() > 0:  # within one decade a log axis would have no number on it
        ax.set_yscale("log")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _finished(figure)


def ablation(found: "Ablation") -> Figure:
    """Return the difference that each change made: a dot a seed, and a bar over the 95 % interval of their mean.

    Examples
    --------
    >>> ablation(dx.ablate(dx.RunConfig(), {"precision": "bf16"}))  # doctest: +SKIP
    """
    colours = {"better": PALETTE[2], "worse": PALETTE[1], "no difference": PALETTE[0], "not judged": "0.5"}
    alt = f"the difference of each change to the baseline in {found.metric.replace('_', ' ')}, a dot a seed"
    figure, axes = new_figure(alt, height=1.2 + 0.45 * len(found.effects))
    ax = axes[0, 0]
    ax.axvline(0, color="black", linewidth=1)
    for row, one in enumerate(found.effects):
        seen = [value for value in one.differences.values() if np.isfinite(value)]
        ax.plot(seen, [row] * len(seen), "o", markersize=5, alpha=0.6, color=colours[one.verdict])
        if np.isfinite(one.margin):
            ax.errorbar(one.mean, row, xerr=one.margin, capsize=4, linewidth=2, color=colours[one.verdict])
    words = [f"{one.change}: {one.verdict}{f' ({one.steps} steps)' if one.steps else ''}" for one in found.effects]
    ax.set_yticks(range(len(words)), words)
    ax.set_ylim(len(words) - 0.5, -0.5)
    ax.set(xlabel=f"{found.metric.replace('_', ' ')} less the baseline's, by seed")
    return _finished(figure)


def comparison(first: "pd.DataFrame", second: "pd.DataFrame", apart: int | None) -> Figure:
    """Return two runs' tables of steps side by side: loss, how far the losses are apart, and the time of a step.

    A grey line is the first step that differs.

    Examples
    --------
    >>> comparison(run_a.steps, run_b.steps, 0)  # doctest: +SKIP
    """
    figure, axes = new_figure("two runs: their losses, the distance between these, and the time of a step", columns=3)
    losses, distance, times = axes[0]
    for place, (name, steps) in enumerate((("A", first), ("B", second))):
        losses.plot(steps.index, steps["loss"], label=name, linestyle=dash(place))
        usual = 1000 * steps["step_time"].iloc[1:]  # the first step warms up, and would press the others flat
        times.plot(usual.index, usual, label=name, linewidth=0.8, linestyle=dash(place))
    gap = (first["loss"] - second["loss"]).dropna().abs()
    if (gap > 0).any():
        distance.plot(gap.index, gap.where(gap > 0), marker="." if len(gap) < 40 else None)
        distance.set_yscale("log")
    else:
        distance.text(0.5, 0.5, "no difference", transform=distance.transAxes, ha="center")
    for ax, label in ((losses, "loss"), (distance, "|loss of A − loss of B|"), (times, "milliseconds a step")):
        ax.set(xlabel="step", ylabel=label)
    for ax in (losses, distance) if apart is not None else ():
        ax.axvline(apart, color=GREY, linewidth=4, zorder=0)
    losses.legend(frameon=False)
    return _finished(figure)


def scaling(table: "pd.DataFrame", predicted: "pd.DataFrame") -> Figure:
    """Return where a step's time goes on each rank, stacked, and the speed-up that more ranks are predicted to have.

    Examples
    --------
    >>> scaling(explained.table, explained.predicted)  # doctest: +SKIP
    """
    alt = "a bar for each rank: compute, data, pauses, communication, waiting; and a predicted speed-up below the ideal"
    figure, (axes,) = new_figure(alt, 8.0, 2.0 + 0.3 * len(table), columns=2)
    bars, curve = axes
    shown, left = 1e3 * table, np.zeros(len(table))
    for place, name in enumerate(("compute", "data", "pauses", "exposed", "waiting")):
        colour = GREY if name == "waiting" else PALETTE[place]
        bars.barh(range(len(table)), shown[name], left=left, height=0.6, color=colour, label=name)
        left = left + shown[name].to_numpy()
    hidden = np.minimum(shown["hidden"], shown["compute"])  # it runs while the rank computes
    under = {
        "left": shown["compute"] - hidden,
        "height": 0.6,
        "color": PALETTE[0],
        "edgecolor": "white",
        "hatch": "///",
    }
    bars.barh(range(len(table)), hidden, label="hidden", linewidth=0, **under)
    bars.set(yticks=range(len(table)), yticklabels=[f"rank {r}" for r in table.index], xlabel="milliseconds a step")
    bars.invert_yaxis()
    curve.plot(predicted.index, predicted.index, color=GREY, linestyle="--", label="ideal")
    curve.plot(predicted.index, predicted["speedup"], marker="o", label="predicted")
    curve.plot(len(table), predicted["speedup"][len(table)], "s", color="black", label="measured")
    curve.set(xlabel="ranks", ylabel="times as fast as one", xscale="log", yscale="log")
    curve.set(xticks=predicted.index, xticklabels=predicted.index, yticks=predicted.index, yticklabels=predicted.index)
    bars.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")
    curve.legend(frameon=False, fontsize="small")
    return _finished(figure)


def memory(record: "Memory") -> Figure:
    """Return what holds memory over the operations of one step, stacked by part; a line marks the peak.

    Examples
    --------
    >>> memory(measure(step, model, [optimizer], batch))  # doctest: +SKIP
    """
    figure, axes = new_figure("what holds memory over one training step, by part", 8.0, 3.4)
    ax, factor = axes[0, 0], 2**20 if record.peak >= 2**20 else 2**10
    rows = [np.asarray(sizes) / factor for sizes in record.timeline.values()]
    colours = [*(PALETTE[place] for place in range(4)), GREY]
    ax.stackplot(range(len(rows[0])), rows, labels=list(record.timeline), colors=colours, step="post", linewidth=0)
    totals = record.totals
    ax.axvline(totals.index(record.peak), color="black", linewidth=0.8, linestyle=":")
    ax.set(xlabel="operation of the step", ylabel="MiB" if factor == 2**20 else "KiB")
    ax.margins(x=0)
    figure.legend(loc="outside right upper", frameon=False, reverse=True)
    return _finished(figure)


def _finished(figure: Figure) -> Figure:
    for ax in figure.axes:
        ax.minorticks_off()  # on log axes they cost more than everything else, and nobody reads them
    return figure
