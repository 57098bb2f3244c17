"""One panel of a picture, drawn from a record's bins into axes that are there."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgba

from dxdy_nb.lesson.bins import PHASES, Bins, layer_norms, layers

# Okabe and Ito's palette: told apart by readers with any common form of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
GREY = "0.8"
MOST_ROWS = 24  # of a heat map


def line(ax: Any, bins: Bins, column: str, label: str) -> None:
    """Draw a column over the steps, beyond a decade on a log axis; a vertical line marks what is not finite."""
    low, high = bins.low[column].to_numpy(dtype=float), bins.high[column].to_numpy(dtype=float)
    ax.plot(bins.high.index, high, linewidth=1.2)
    if bins.width > 1:
        ax.fill_between(bins.high.index, low, high, linewidth=0)
    ax.set(xlabel=steps_of(bins), ylabel=label)
    if np.isfinite(low).any() and np.nanmin(low) > 0 and np.nanmax(high) > 10 * np.nanmin(low):
        _scale(ax, "log")
    else:
        _scale(ax, "linear")  # within one decade a log axis would have no number on it
    spoilt = bins.spoilt.index[bins.spoilt[column] > 0]
    # A non-finite value is a place, not a gap.
    ax.vlines(spoilt, 0, 1, transform=ax.get_xaxis_transform(), color=PALETTE[1], linewidth=0.8)


def phases(ax: Any, bins: Bins) -> None:
    """Draw where the time of a step goes, stacked."""
    names = [*PHASES, "other"]
    mean = bins.seconds[names].div(bins.seconds["steps"], axis="index")
    usual = mean.sum(axis="columns").quantile(0.98) if len(mean) else 0.0
    factor, unit = (1, "seconds") if usual >= 1 else (1000, "milliseconds")
    colours = [PALETTE[4], PALETTE[0], PALETTE[2], PALETTE[3], GREY]
    # Steps and not slopes between them: the mean of a bin holds for the whole bin.
    ax.stackplot(mean.index, factor * mean.to_numpy().T, labels=names, colors=colours, step="post", linewidth=0)
    if usual > 0:
        ax.set_ylim(0, 1.4 * factor * usual)  # one slow step, often the first, would press all others flat
    ax.set(xlabel=steps_of(bins), ylabel=f"{unit} a step")


def heat_map(ax: Any, key: Any, bins: Bins, most_names: int) -> None:
    """Draw the root mean square of each layer's gradient as colours, and in ``key`` what they mean."""
    norms, sizes = layer_norms(bins, MOST_ROWS)
    if len(bins.bad):  # a place for each bin: what was not measured there is what was measured last
        places = np.arange(bins.bad.index[0], bins.bad.index[-1] + 1, bins.width)
    else:
        places = np.zeros(0, dtype=int)
    rms = root_mean_square(norms, sizes).reindex(places, method="ffill")
    spots = bins.bad.reindex(places, fill_value=0.0)
    bad = np.column_stack([spots[names].max(axis="columns") for names in layers(spots, MOST_ROWS).values()]) > 0
    values = rms.to_numpy(dtype=float).T
    values = np.log10(values, out=np.full_like(values, np.nan), where=np.isfinite(values) & (values > 0))
    ends = (rms.index[0] - 0.5, rms.index[0] + len(rms) * bins.width - 0.5) if len(rms) else (0, 1)
    extent = (*ends, len(rms.columns) - 0.5, -0.5)
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", extent=extent)
    if bad.any():
        pixels = np.where(bad.T[..., None], to_rgba(PALETTE[1]), (0.0, 0.0, 0.0, 0.0))
        ax.imshow(pixels, aspect="auto", interpolation="nearest", extent=extent)
    shown = np.unique(np.linspace(0, len(rms.columns) - 1, min(most_names, len(rms.columns))).astype(int))
    ax.set_yticks(shown, [_short(str(rms.columns[row])) for row in shown], fontsize=7 if len(shown) <= 14 else 5)
    ax.set_xlabel(steps_of(bins))
    ax.grid(visible=False)
    for row, name in enumerate(rms.columns):  # a row without a colour says why: None and zero are different findings
        known = rms[name].dropna()
        word = "zero" if len(known) else "no gradient"
        if (known > 0).any() or bad[:, row].any():
            word = ""
        ax.text(0.5, row, word, transform=ax.get_yaxis_transform(), ha="center", va="center", fontsize=7)
    low, high = image.get_clim()
    _colour_key(key, low, high, "log₁₀ RMS gradient")


def ratios(ax: Any, bins: Bins) -> None:
    """Draw |update| / |weight| where it was sampled: a line a layer, or, of many, the median and how far they spread.

    Grey is the decade around 1e-3: a rule of thumb of the CS231n notes, no threshold.
    """
    table = bins.ratios.dropna(how="all")
    table = table.where(table > 0)
    ax.axhspan(10**-3.5, 10**-2.5, color="0.9")
    if len(table.columns) <= 12:
        for name in table.columns:
            label = name if table[name].notna().any() else "_"  # a name that begins so is not listed: it never moved
            ax.plot(table.index, table[name], linewidth=1, marker=".", markersize=4, label=label)
    else:
        spread = table.quantile([0.05, 0.25, 0.5, 0.75, 0.95], axis="columns").T
        ax.fill_between(spread.index, spread[0.05], spread[0.95], color=PALETTE[0], alpha=0.2, label="90 % of tensors")
        ax.fill_between(spread.index, spread[0.25], spread[0.75], color=PALETTE[0], alpha=0.3, label="50 %")
        ax.plot(spread.index, spread[0.5], color=PALETTE[0], linewidth=1.2, label="median")
    ax.set(xlabel=steps_of(bins), ylabel="|update| / |weight|")
    _scale(ax, "log")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=6, frameon=False, ncols=2)


def root_mean_square(norms: pd.DataFrame, sizes: Mapping[str, int]) -> pd.DataFrame:
    """Return norm / √(number of elements), column by column."""
    return norms.div(np.sqrt([sizes[str(name)] for name in norms.columns]), axis="columns")


def steps_of(bins: Bins) -> str:
    """Return the name of the axis of steps."""
    return "step" if bins.width == 1 else f"step (in bins of {bins.width})"


def dash(place: int) -> str:
    """Return a line style: who cannot tell neighbouring colours apart sees dashes."""
    return ("-", "--", "-.", ":")[place % 4]


def _colour_key(ax: Any, low: float | None, high: float | None, label: str) -> None:
    """Draw which colour stands for which value; a colour bar of matplotlib's takes ten times as long."""
    low, high = (low, high) if low is not None and high is not None else (0.0, 1.0)
    margin = 0.5 * (high == low)
    ax.imshow(np.linspace(1, 0, 64)[:, None], aspect="auto", cmap="viridis", extent=(0, 1, low - margin, high + margin))
    ax.set(xticks=[], ylabel=label)
    ax.yaxis.tick_right()
    ax.yaxis.set_label_position("right")
    ax.grid(visible=False)


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _scale(ax: Any, scale: str) -> None:
    if ax.get_yscale() != scale:
        ax.set_yscale(scale)
