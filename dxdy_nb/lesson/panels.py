"""A playground of optimizers: sliders build a ``Walk``, the walk's own function runs it, and a prediction comes first.

Where nobody can move a slider (papermill, nbval, a saved file) the same walks stand as one picture.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from dxdy_nb.errors import counted
from dxdy_nb.lesson import live, plots
from dxdy_nb.lesson.exercise import Note, Score
from dxdy_nb.training.landscapes import LANDSCAPES, Walk, heights, optimizers, outcome, zones

VIEW = 2.2  # the picture shows -VIEW to VIEW in both directions
LOW, HIGH = 1e-8, 1e4  # what the strips show
UNITS = (0.003, 30.0)  # what the strip of rates shows, in units of 2/λ
RATES = (0.05, 0.3, 0.8, 1.2)  # of the static grid, in units of 2/λ
WORDS = ("converges", "oscillates", "diverges", "stalls")
ZONES = {"steady": plots.PALETTE[2], "oscillates": plots.PALETTE[4], "diverges": plots.PALETTE[1]}
ALT = "where optimizers walk on a landscape; their height, gradient norm and update ratio over the steps"


# ---- pictures ----


@functools.lru_cache(maxsize=64)
def _bands(landscape: str, condition: float, cells: int) -> np.ndarray[Any, Any]:
    """Return a landscape as bands of equal logarithmic height: to draw contour lines would take ten times as long."""
    land = Walk(landscape=landscape, condition=condition).over()
    ticks = np.linspace(-VIEW, VIEW, cells)
    places = np.stack(np.meshgrid(ticks, ticks), -1)
    height = np.log10(heights(land, places[..., None, :] if landscape == "matrix" else places) + 1e-3)
    return np.floor(14 * (height - height.min()) / np.ptp(height))


def _trace(axes: Mapping[str, Any], walk: Walk, path: Any, colour: str) -> list[Artist]:
    """Draw a walk: its path on the map, and where there is a strip for it, what it does over the steps."""
    land = walk.over()
    seen = np.linalg.norm(path, axis=-2)[:, None] if walk.landscape == "matrix" else path.reshape(len(path), -1, 2)
    one = {"linewidth": 1.0, "marker": ".", "markersize": 3} if seen.shape[1] == 1 else {"linewidth": 0.4}
    with np.errstate(all="ignore"):
        far = np.where(np.abs(seen) < 1e3, seen, np.nan)  # a line that long is drawn, point by point, outside
        artists = [*axes["map"].plot(far[..., 0], far[..., 1], color=colour, **one)]
        artists += axes["map"].plot(*far[0, 0], "o", color=colour, markersize=6)
        norm = functools.partial(np.linalg.norm, axis=(-2, -1) if walk.landscape == "matrix" else -1)
        strips: dict[str, Any] = {
            "height": heights(land, path),
            "gradient": norm(land.gradient(path)),
            "ratio": norm(np.diff(path, axis=0)) / norm(path[:-1]),
        }
        for name, values in strips.items():
            if name in axes:
                shown = np.where(np.isfinite(values), np.clip(values, LOW, 10 * HIGH), np.nan)
                if land.noise:  # the band of all walks, and their mean
                    ends = shown.min(-1), shown.max(-1)
                    steps = np.arange(len(shown))
                    artists.append(axes[name].fill_between(steps, *ends, color=colour, alpha=0.2, linewidth=0))
                    shown = shown.mean(-1)
                artists += axes[name].plot(shown, color=colour, linewidth=1.2)
    return artists


def _map(ax: Any, walk: Walk, cells: int) -> Artist:
    bands = _bands(walk.landscape, walk.condition, cells)
    ends = (-VIEW, VIEW, -VIEW, VIEW)
    return ax.imshow(bands, extent=ends, origin="lower", cmap="Greys_r", vmin=-9, vmax=16, aspect="auto")


def _rates(ax: Any, walk: Walk) -> list[Artist]:
    """Draw the rate of a walk among the zones that are known exactly."""
    known = zones(walk)
    ends = (UNITS[0], *known, UNITS[1]) if known else UNITS
    colours = ZONES.items() if known else {"no exact zones here": plots.GREY}.items()
    artists: list[Artist] = []
    for low, high, (name, colour) in zip(ends, ends[1:], colours, strict=False):
        if high > low > 0:
            artists.append(ax.axvspan(low, high, color=colour, alpha=0.5, linewidth=0))
            wide = high / low > 3
            artists += [ax.text((low * high) ** 0.5, 0.5, name, ha="center", va="center", fontsize=8)] if wide else []
    return [*artists, ax.axvline(walk.units, color="black", linewidth=2)]


def _empty(steps: int, rates: bool) -> tuple[Figure, dict[str, Any]]:
    """Return the picture of walks without the walks: the map, three strips, and for one walk its rate below the map."""
    figure, _ = plots.new_figure(ALT, 9.0, 4.6)
    figure.clear()
    figure.set_layout_engine("none")  # places are fixed, as in `plots.empty_training`
    floor = 0.29 if rates else 0.11
    places = {"map": (0.08, floor, 0.4, 0.97 - floor), "rates": (0.08, 0.11, 0.4, 0.07)}
    places |= {name: (0.58, 0.11 + 0.3 * row, 0.4, 0.25) for row, name in enumerate(("ratio", "gradient", "height"))}
    axes = {name: figure.add_axes(place) for name, place in places.items() if rates or name != "rates"}
    plots.dress(np.array(list(axes.values())))
    for name, label in (("height", "height"), ("gradient", "gradient norm"), ("ratio", "|update| / |z|")):
        axes[name].set(yscale="log", ylim=(LOW, HIGH), xlim=(0, steps), ylabel=label)
        axes[name].minorticks_off()
        axes[name].tick_params("x", labelbottom=name == "ratio")
    axes["ratio"].set(xlabel="step", ylim=(1e-6, 1e2))
    axes["map"].set(xlim=(-VIEW, VIEW), ylim=(-VIEW, VIEW), ylabel="y")
    axes["map"].grid(visible=False)
    if rates:
        axes["rates"].set(xscale="log", xlim=UNITS, yticks=[], ylim=(0, 1), xlabel="learning rate in units of 2/λ")
        axes["rates"].grid(visible=False)
    return figure, axes


def picture(walks: Mapping[str, Walk]) -> Figure:
    """Return named walks over one landscape: their paths, and height, gradient norm and update ratio over the steps.

    Examples
    --------
    >>> figure = picture({"sgd": Walk(lr=0.15), "momentum": Walk(optimizer="momentum", lr=0.02)})
    """
    first = next(iter(walks.values()))
    figure, axes = _empty(max(walk.steps for walk in walks.values()), rates=len(walks) == 1)
    _map(axes["map"], first, 200)
    if len(walks) == 1:
        _rates(axes["rates"], first)
    for colour, walk in zip(plots.PALETTE, walks.values(), strict=False):
        _trace(axes, walk, walk.path(), colour)
    for name in ("height", "gradient", "ratio"):  # nothing moves here, so the axes may follow what is shown
        axes[name].autoscale(axis="y")
    if len(walks) > 1:
        axes["map"].legend(axes["height"].lines, walks, fontsize=8, loc="upper right")
    return figure


def grid(rows: Sequence[Sequence[Walk]]) -> Figure:
    """Return many walks as small maps, each under what it does; a row has one rate, a column one optimizer."""
    alt = "a grid of walks: a row for each learning rate, a column for each optimizer, what each does above it"
    figure, axes = plots.new_figure(alt, 1.7 * len(rows[0]), 1.75 * len(rows), len(rows), len(rows[0]))
    for place, walk in zip(axes.flat, (walk for row in rows for walk in row), strict=True):
        path = walk.path()
        _map(place, walk, 80)
        _trace({"map": place}, walk, path, plots.PALETTE[0])
        place.set(xlim=(-VIEW, VIEW), ylim=(-VIEW, VIEW), xticks=[], yticks=[])
        place.set_title(f"{walk.optimizer}: {outcome(walk, path)[0]}", fontsize=8)
    for place, row in zip(axes[:, 0], rows, strict=True):
        place.set_ylabel(f"{row[0].units:.2g} × 2/λ", fontsize=8)
    return figure


class Frame:
    """The live picture: axes, ticks and words are drawn once, and only what a walk changes is drawn again."""

    def __init__(self, steps: int) -> None:
        self.figure, self.axes = _empty(steps, rates=True)
        self.figure.canvas.draw()
        self.bare = self.figure.canvas.copy_from_bbox(self.figure.bbox)  # type: ignore[attr-defined]

    def png(self, walk: Walk, path: Any | None = None) -> bytes:
        """Return a landscape and its rates as PNG bytes, and on them a walk once it was made."""
        self.figure.canvas.restore_region(self.bare)  # type: ignore[attr-defined]
        artists = [_map(self.axes["map"], walk, 160)]
        if path is None:
            artists += _trace({"map": self.axes["map"]}, walk, walk.over().start[None], plots.PALETTE[0])
        else:
            artists += _rates(self.axes["rates"], walk) + _trace(self.axes, walk, path, plots.PALETTE[0])
        for artist in artists:
            assert artist.axes is not None  # each was made by one
            artist.axes.draw_artist(artist)
            artist.remove()
        return plots.png_as_drawn(self.figure, compress_level=1)


# ---- the panel ----


class Playground:
    """Sliders over the walks of an optimizer; each run asks for a prediction, and keeps it beside the result.

    In a live notebook a cell that ends with it shows the panel; anywhere else, a grid of walks around ``start``.

    Parameters
    ----------
    start : where the sliders stand first; its number of steps and its seed stay

    Examples
    --------
    >>> playground = Playground(Walk(landscape="bowl", lr=0.1))
    >>> panel = playground.box
    >>> playground.sliders["lr"].value = 0.25
    >>> playground.guess.value = "diverges"
    >>> playground.run()
    >>> playground.score
    question                         you said   measured
    bowl, sgd, lr 0.25 = 1.2 × 2/λ   diverges   diverges
    """

    def __init__(self, start: Walk | None = None) -> None:
        self.start = start or Walk()
        self.kept: list[tuple[str, Any, Any]] = []
        self.right = 0

    @property
    def score(self) -> Score:
        """All predictions beside what was measured."""
        return Score(tuple(self.kept))

    @property
    def walk(self) -> Walk:
        """The configuration that the sliders stand for."""
        values = {name: slider.value for name, slider in self.sliders.items()}
        return replace(self.start, **values | {"y": round(values["y"], 6)})  # on the axis means exactly on it

    @functools.cached_property
    def frame(self) -> Frame:
        """The picture, drawn once."""
        return Frame(self.start.steps)

    @functools.cached_property
    def box(self) -> Any:
        """The panel: made when it is first asked for, since a notebook that nobody watches needs no widgets."""
        import ipywidgets as widgets

        start, flow = self.start, widgets.Layout(flex_flow="row wrap", align_items="center")
        y = LANDSCAPES[start.landscape][1][1] if start.y is None else start.y
        wide = {"style": {"description_width": "6.5em"}, "layout": widgets.Layout(width="21em")}
        self.sliders = {
            "landscape": widgets.Dropdown(options=list(LANDSCAPES), value=start.landscape, **wide),
            "optimizer": widgets.Dropdown(options=optimizers(start.landscape), value=start.optimizer, **wide),
            "lr": widgets.FloatLogSlider(start.lr, min=-4, max=1, step=0.02, readout_format=".3g", **wide),
            "momentum": widgets.FloatSlider(start.momentum, min=0, max=0.99, step=0.01, **wide),
            "beta2": widgets.FloatSlider(start.beta2, min=0, max=0.999, step=0.001, readout_format=".3f", **wide),
            "condition": widgets.FloatSlider(start.condition, min=1, max=100, step=1, readout_format=".0f", **wide),
            "y": widgets.FloatSlider(y, min=-2, max=2, step=0.1, **wide),
        }
        self.guess = widgets.Combobox(options=WORDS, placeholder="word or steps", description="I expect", **wide)
        self.button = widgets.Button(description="Run", icon="play", tooltip="Run this walk and show it")
        self.units, self.note, self.table = (widgets.HTML() for _ in range(3))
        self.image = widgets.Image(format="png", layout=widgets.Layout(width="100%", max_width="900px"))
        for name, slider in self.sliders.items():
            slider.description = {"lr": "rate", "beta2": "beta 2", "y": "start at y"}.get(name, name)
            slider.observe(self._moved, "value")
        self.button.on_click(lambda _: self.run())
        self.note.value = Note(
            "open", f"Write first what you expect: {', '.join(WORDS)}, or steps to 1 %."
        )._repr_html_()
        self._moved()
        rows = ([*self.sliders.values(), self.units], [self.guess, self.button, self.note])
        return widgets.VBox([*(widgets.Box(row, layout=flow) for row in rows), self.image, self.table])

    def run(self) -> None:
        """Run the walk under the sliders, show it, and keep the prediction beside the result."""
        guess = self.guess.value.strip()
        if not guess:
            return
        walk = self.walk
        path = walk.path()
        self.image.value = self.frame.png(walk, path)
        word, steps = outcome(walk, path)
        told = word if steps is None else f"{word}, 1 % left after {counted(steps, 'step')}"
        right = _agrees(guess, word, steps)
        self.right += right
        units = f"lr {walk.lr:.3g} = {walk.units:.2g} × 2/λ"
        self.kept.append((f"{walk.landscape}, {walk.optimizer}, {units}", guess, told))
        self.note.value = Note("right" if right else "wrong", f"{guess}? It {told}.")._repr_html_()
        self.table.value = f"{self.right} of {len(self.kept)} right{self.score._repr_html_()}"
        self.guess.value = ""

    def _moved(self, change: Any = None) -> None:
        """Show where the sliders stand: what a walk from there does is shown once it was predicted."""
        landscape, optimizer = self.sliders["landscape"], self.sliders["optimizer"]
        if change is not None and change["owner"] is landscape:
            kept, optimizer.options = optimizer.value, optimizers(landscape.value)
            optimizer.value = kept if kept in optimizer.options else "sgd"
            self.sliders["y"].value = LANDSCAPES[landscape.value][1][1]
        walk = self.walk
        self.sliders["momentum"].disabled = walk.optimizer in ("sgd", "rmsprop")
        self.sliders["beta2"].disabled = walk.optimizer not in ("rmsprop", "adam", "adamw")
        self.sliders["condition"].disabled = not walk.over().quadratic
        self.units.value = f"&nbsp; rate = {walk.units:.3g} × 2/λ &nbsp; (λ = {walk.over().curvature:.4g})"
        self.image.value = self.frame.png(walk)

    def around(self) -> list[list[Walk]]:
        """Return the walks of the static grid: all optimizers of the landscape at four rates."""
        start, unit = self.start, self.start.lr / self.start.units
        return [
            [replace(start, optimizer=name, lr=rate * unit) for name in optimizers(start.landscape)] for rate in RATES
        ]

    def _ipython_display_(self) -> None:
        figure = grid(self.around())
        if not live.in_live_notebook():
            return plots.show(figure)
        from IPython.display import display

        data = plots.bundle(figure)  # below the panel, folded: a saved notebook keeps no widgets
        image = f'<img alt="{figure.get_label()}" src="data:image/png;base64,{data["image/png"]}">'
        folded = f"<details><summary>These walks as a picture, for when no panel is here</summary>{image}</details>"
        display(self.box)
        return display({"text/html": folded, "text/plain": data["text/plain"]}, raw=True)


def _agrees(guess: str, word: str, steps: int | None) -> bool:
    """Return whether a prediction holds: the word, or the number of steps within a fifth."""
    try:
        number = float(guess)
    except ValueError:
        return guess.casefold() == word
    return steps is not None and abs(number - steps) <= max(1.0, 0.2 * steps)
