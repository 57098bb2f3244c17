"""A figure that follows a run while somebody watches, and one picture left behind in any case."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from dxdy_nb.errors import DxdyError
from dxdy_nb.lesson import plots
from dxdy_nb.lesson.bins import Bins, Record, binned
from dxdy_nb.runs.environment import in_live_notebook

T = TypeVar("T")
SHARE = 0.05  # of training time may go into the view
EARLY = 4  # pictures that a run may have whatever its length, the last one among them
FIRST = 1.0  # seconds of training before the first of them
PUMP_EVERY = 0.03  # seconds of training between two looks at the front end's messages
TURNS = 8  # of the event loop a look: a message takes several
clock = time.perf_counter


def live(record: Record, *controls: Any) -> "LiveView":
    """Return a view of a watched loop (or of a run); ``await view.run(steps)`` in a cell drives the loop and draws.

    Parameters
    ----------
    record : what ``dx.watch`` gives, or a run
    controls : widgets of your own, shown above the picture; the loop reads ``slider.value`` at each step

    Raises
    ------
    DxdyError
        A control that is no widget.

    Notes
    -----
    Sliders and the Stop button act between two steps, because the cell awaits: with ipykernel 7.4 in JupyterLab 4.6
    this is tested in a browser. What is known not to work there: a cell that trains without ``await`` (a press
    arrives when the cell has ended), and ``jupyter_ui_poll`` (likewise). ipykernel 7.1 to 7.3 hand presses to another
    thread, and to an awaiting cell none at all when JupyterLab's setting "comms over subshells" is off. A loop in a
    thread of its own hears every press, but torch is up to twenty times slower there until
    ``torch.set_num_threads(1)`` was called inside that thread.

    Examples
    --------
    >>> slider = ipywidgets.FloatLogSlider(0.1, min=-4, max=0, description="lr")  # doctest: +SKIP
    >>> def steps():  # doctest: +SKIP
    ...     for x, y in loader:
    ...         optimizer.param_groups[0]["lr"] = slider.value
    ...         train_step(x, y)
    ...         yield
    >>> with dx.watch() as w:  # doctest: +SKIP
    ...     await live(w, slider).run(steps())
    """
    for control in controls:
        if not hasattr(control, "model_id"):
            raise DxdyError(
                f"live: expected widgets as controls, got {type(control).__name__}. Give ipywidgets, for example "
                "ipywidgets.FloatSlider(0.1, description='lr'), and read their .value in the loop."
            )
    return LiveView(record, controls)


def due(trained: float, spent: float, cost: float, drawn_at: float) -> bool:
    """Return whether a picture that takes ``cost`` seconds is due after ``trained`` seconds of training.

    All that the view has ``spent`` since the first step, this picture and the last one of the run have to stay
    within 5 % of training time. A run too short for that is shown too: in four pictures at most, each when training
    has lasted twice as long as at the one before (``drawn_at``). They are made up for: no other follows before all
    of them are within the 5 %.

    Examples
    --------
    >>> due(trained=10.0, spent=0.3, cost=0.1, drawn_at=8.0), due(trained=9.9, spent=0.3, cost=0.1, drawn_at=8.0)
    (True, False)
    >>> due(trained=2.0, spent=0.2, cost=0.1, drawn_at=1.0), due(trained=1.9, spent=0.2, cost=0.1, drawn_at=1.0)
    (True, False)
    """
    at_the_end = spent + 2 * cost
    return at_the_end <= SHARE * trained or (trained >= 2 * drawn_at and at_the_end <= EARLY * cost)


class LiveView:
    """Draws a record while a generator of steps runs.

    In a live notebook: a picture that is redrawn within its share of the time, and a Stop button. Without a reader
    (papermill, nbval, a script): the steps run to the end, and one picture is left.
    """

    def __init__(self, record: Record, controls: tuple[Any, ...] = ()) -> None:
        self.record = record
        self.controls = controls
        self.stopped = False

    async def run(self, steps: Iterable[T]) -> T | None:
        """Run a generator that yields once a step, to its end or until Stop; return what it yielded last.

        However it ends, a plain picture of the record stays in the notebook.
        """
        if not (hasattr(steps, "__iter__") or hasattr(steps, "__getitem__")):
            raise DxdyError(f"live: expected steps to go through, got {type(steps).__name__}. Call it: run(steps()).")
        if getattr(self.record, "active", True) is False:
            raise DxdyError("live: the watch is not running. Await it inside the block: with dx.watch(...) as w: ...")
        self.stopped = False
        with contextlib.ExitStack() as closing:
            if isinstance(steps, Iterator) and hasattr(steps, "close"):
                closing.callback(steps.close)
            if in_live_notebook():
                return await self._follow(steps, closing)
            closing.callback(self._leave_picture)
            last: T | None = None
            for last in steps:  # noqa: B007 - it is returned
                pass
            return last

    async def _follow(self, steps: Iterable[T], closing: contextlib.ExitStack) -> T | None:
        last: T | None = None
        began = clock()
        panel = closing.enter_context(_panel(self))
        closing.enter_context(_messages_while_running())
        pumped = resumed = clock()
        trained, spent, drawn_at = 0.0, 0.0, FIRST / 2
        cost = resumed - began  # of the empty picture, until there is a better guess
        for last in steps:  # noqa: B007 - it is returned
            now = clock()
            trained += now - resumed
            if due(trained, spent, cost, drawn_at):
                panel.draw()
                cost, drawn_at = clock() - now, trained
            if now - pumped >= PUMP_EVERY:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                pumped = clock()
            if self.stopped:
                break
            resumed = clock()
            spent += resumed - now
        return last

    def _leave_picture(self) -> None:
        if len(self.record.steps):
            plots.show(plots.training(self.record))


class _Panel:
    """The widget that stands in the cell while it runs."""

    def __init__(self, view: LiveView) -> None:
        import ipywidgets

        self.record = view.record
        self.bins: Bins | None = None
        self.figure = plots.empty_training()
        self.image = ipywidgets.Image(format="png", value=plots.png(self.figure, compress_level=1))
        self.stop = ipywidgets.Button(description="Stop", icon="stop", tooltip="End the run after this step")
        self.stop.on_click(lambda _: setattr(view, "stopped", True))
        self.box = ipywidgets.VBox([*view.controls, self.stop, self.image])

    def read(self) -> Bins | None:
        """Read what is new in the record: to read all of a long run would take longer than to draw it."""
        record = self.record
        if self.bins is not None and hasattr(record, "since"):
            new = record.since(self.bins.last + 1)
            self.bins = binned(new, before=self.bins) if len(new.steps) else self.bins
        elif len(record.steps):
            self.bins = binned(record)
        return self.bins

    def draw(self) -> None:
        bins = self.read()
        if bins is not None:
            self.image.value = plots.png(plots.training(bins, self.figure), compress_level=1)

    def leave_picture(self, handle: Any) -> None:
        """Put a plain picture in the panel's place: a saved notebook keeps no widgets."""
        bins = self.read()
        if bins is not None:
            handle.update(plots.bundle(plots.training(bins, self.figure)), raw=True)
        for widget in (self.box, self.stop, self.image):
            widget.close()


@contextlib.contextmanager
def _panel(view: LiveView) -> Iterator[_Panel]:
    """Show the panel, and leave a picture at the end."""
    from IPython.display import display

    panel = _Panel(view)
    handle = display(panel.box, display_id=True)
    try:
        yield panel
    finally:
        panel.leave_picture(handle)


@contextlib.contextmanager
def _messages_while_running() -> Iterator[None]:
    """Let each press of a button arrive while an async cell runs.

    ipykernel 7.4 hands widget messages to a running async cell without reporting idle for them, and ipywidgets holds
    back a widget's next change until it hears idle; so the missing report is sent. This uses the kernel's private
    names: where they are not as expected nothing is done, and only the first press of each widget arrives in time.
    """
    import IPython

    kernel = getattr(IPython.get_ipython(), "kernel", None)
    handlers = getattr(kernel, "shell_handlers", {})
    original, lock = handlers.get("comm_msg"), getattr(kernel, "_main_asyncio_lock", None)
    dispatch, publish = getattr(kernel, "dispatch_shell", None), getattr(kernel, "_publish_status", None)
    known = dispatch is not None and "concurrent" in inspect.signature(dispatch).parameters
    if original is None or lock is None or publish is None or not known:
        yield
        return

    def comm_msg(stream: Any, ident: Any, message: Any) -> Any:
        try:
            return original(stream, ident, message)
        finally:
            if threading.current_thread() is threading.main_thread() and lock.locked():
                publish("idle", "shell", parent=message)

    handlers["comm_msg"] = comm_msg
    try:
        yield
    finally:
        handlers["comm_msg"] = original
