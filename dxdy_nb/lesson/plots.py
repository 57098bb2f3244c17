"""A record, or numbers, as a matplotlib Figure: pure functions, no pyplot, no global state.

Every figure carries its alternative text as its label: the text that stands where a picture cannot be shown, and
that a notebook check compares. It holds no digits, so another machine's last digits cannot fail a lesson.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    import pandas as pd

# Okabe and Ito's palette: told apart by readers with any common form of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


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
    return figure, _dress(figure.subplots(rows, columns, squeeze=False))


def _dress(axes: Any) -> Any:
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_prop_cycle(color=PALETTE)
        ax.grid(alpha=0.25)
    return axes


def png(figure: Figure, compress_level: int = 6) -> bytes:
    """Return a figure as PNG bytes, the same for the same figure; level 1 is fast and large."""
    buffer = io.BytesIO()
    metadata = {"Software": None}  # the version would change the bytes
    figure.savefig(buffer, format="png", metadata=metadata, pil_kwargs={"compress_level": compress_level})
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
    if log_x:
        ax.set_xscale("log", nonpositive="mask")
    if log_y:
        ax.set_yscale("log", nonpositive="mask")  # an exact zero is left out, not drawn as a fall to the bottom
    if len(series) > 1:
        ax.legend(frameon=False)
    return figure


class Record(Protocol):
    """What a figure of training reads: a watched loop and a run both have it."""

    @property
    def steps(self) -> "pd.DataFrame":
        """One row a step."""

    @property
    def gradients(self) -> "pd.DataFrame":
        """One row a step and parameter."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of elements of each parameter."""


def training(record: Record, figure: Figure | None = None) -> Figure:
    """Return loss, gradient norm, every parameter's gradient size and update ratios over the steps of a record.

    Parameters
    ----------
    record : a watched loop or a run
    figure : draw into this one instead of a new one; what it showed before is removed
    """
    alt = "loss, gradient norm, gradient size by parameter and update ratio over the steps"
    figure, axes = _panels(figure, alt)
    steps, gradients = record.steps, record.gradients
    _line(axes[0, 0], steps.index, steps["loss"], "loss")
    _line(axes[0, 1], steps.index, steps["grad_norm"], "gradient norm")
    if len(gradients):
        _heat_map(figure, axes[1, 0], root_mean_square(gradients["norm"], record.sizes))
        _update_ratios(axes[1, 1], gradients["update_ratio"])
    for ax in figure.axes:
        ax.minorticks_off()  # on log axes they cost more than everything else, and nobody reads them
    return figure


def root_mean_square(norms: "pd.Series[float]", sizes: Mapping[str, int]) -> "pd.DataFrame":
    """Return norm / √(number of elements), a column for each parameter, a row for each step.

    A norm grows with a tensor's size; the root mean square does not, so it compares tensors of any size.
    """
    table = norms.unstack("parameter", sort=False)
    return table.div(np.sqrt([sizes[str(name)] for name in table.columns]), axis="columns")


def _panels(figure: Figure | None, alt: str) -> tuple[Figure, Any]:
    if figure is None:
        return new_figure(alt, 9.0, 5.4, 2, 2)
    figure.clear()
    figure.set_layout_engine("none")  # to find the best layout costs as much as to draw: a live view does without
    room = {"left": 0.1, "right": 0.98, "bottom": 0.09, "top": 0.97, "wspace": 0.42, "hspace": 0.3}
    return figure, _dress(figure.subplots(2, 2, gridspec_kw=room))


def _line(ax: Any, x: Any, y: Any, label: str) -> None:
    values = np.asarray(y, dtype=float)
    finite = np.isfinite(values)
    ax.plot(x, values, linewidth=1.2)
    ax.set(xlabel="step", ylabel=label)
    if finite.any() and values[finite].min() > 0 and values[finite].max() > 10 * values[finite].min():
        ax.set_yscale("log")  # within one decade a log axis would have no number on it
    for step in np.asarray(x)[~finite]:
        ax.axvline(step, color=PALETTE[1], linewidth=0.8)  # a non-finite value is a place, not a gap


def _heat_map(figure: Figure, ax: Any, rms: "pd.DataFrame") -> None:
    values = rms.to_numpy(dtype=float).T
    values = np.log10(values, out=np.full_like(values, np.nan), where=np.isfinite(values) & (values > 0))
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    ax.set_yticks(range(len(rms.columns)), list(rms.columns), fontsize=7)
    places = np.unique(np.linspace(0, len(rms.index) - 1, 5).astype(int))
    ax.set_xticks(places, list(rms.index[places]))
    ax.set_xlabel("step")
    ax.grid(visible=False)
    for row, name in enumerate(rms.columns):  # a row without a colour says why: None and zero are different findings
        word = "no gradient" if rms[name].isna().all() else "zero" if (rms[name] == 0).all() else ""
        ax.text(0.5, row, word, transform=ax.get_yaxis_transform(), ha="center", va="center", fontsize=7)
    figure.colorbar(image, ax=ax, label="log₁₀ RMS gradient")


def _update_ratios(ax: Any, ratios: "pd.Series[float]") -> None:
    """Draw |update| / |weight| where it was sampled.

    Grey is the decade around 1e-3: a rule of thumb of the CS231n notes, no threshold.
    """
    table = ratios.unstack("parameter", sort=False).dropna(how="all")
    ax.axhspan(10**-3.5, 10**-2.5, color="0.9")
    for name in table.columns:
        values = table[name].to_numpy(dtype=float)
        label = name if (values > 0).any() else "_"  # matplotlib lists no name that begins so: this one never moved
        ax.plot(table.index, np.where(values > 0, values, np.nan), linewidth=1, marker=".", label=label)
    ax.set(xlabel="step", ylabel="|update| / |weight|", yscale="log")
    if len(table.columns) <= 12 and ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=6, frameon=False, ncols=2)
