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
from dxdy_nb.runs.environment import in_live_notebook

T = TypeVar("T")
SHARE = 0.1  # of the time may go into drawing
FIRST_WAIT = 0.3  # seconds between drawings at least: nobody follows more than three pictures a second
PUMP_EVERY = 0.03  # seconds of training between two looks at the front end's messages


def live(record: plots.Record) -> "LiveView":
    """Return a view of a watched loop (or of a run); ``await view.run(steps)`` in a cell drives the loop and draws.

    Examples
    --------
    >>> view = live(w)  # doctest: +SKIP
    >>> await view.run(steps())  # doctest: +SKIP
    """
    return LiveView(record)


class LiveView:
    """Draws a record while a generator of steps runs.

    In a live notebook: a picture that is redrawn within its share of the time, and a Stop button. Without a reader
    (papermill, nbval, a script): the steps run to the end, and one picture is left.
    """

    def __init__(self, record: plots.Record) -> None:
        self.record = record
        self.stopped = False

    async def run(self, steps: Iterable[T]) -> T | None:
        """Run a generator that yields once a step, to its end or until Stop; return what it yielded last.

        However it ends, a plain picture of the record stays in the notebook.
        """
        if not (hasattr(steps, "__iter__") or hasattr(steps, "__getitem__")):
            raise DxdyError(f"live: expected steps to go through, got {type(steps).__name__}. Call it: run(steps()).")
        if getattr(self.record, "active", True) is False:
            raise DxdyError("live: the watch is not running. Await it inside the block: with dx.watch(...) as w: ...")
        last: T | None = None
        with contextlib.ExitStack() as closing:
            if isinstance(steps, Iterator) and hasattr(steps, "close"):
                closing.callback(steps.close)
            if not in_live_notebook():
                closing.callback(self._leave_picture)
                for last in steps:  # noqa: B007 - it is returned
                    pass
                return last
            panel = closing.enter_context(_panel(self))
            closing.enter_context(_messages_while_running())
            drawn = pumped = time.monotonic()
            cost = 0.0
            for last in steps:  # noqa: B007 - it is returned
                now = time.monotonic()
                if now - drawn >= max(FIRST_WAIT, cost / SHARE):
                    panel.draw(self.record)
                    drawn = time.monotonic()
                    cost = drawn - now
                if now - pumped >= PUMP_EVERY:
                    for _ in range(4):  # one message takes several turns of the event loop
                        await asyncio.sleep(0.001)
                    pumped = time.monotonic()
                if self.stopped:
                    break
        return last

    def _leave_picture(self) -> None:
        if len(self.record.steps):
            plots.show(plots.training(self.record))


class _Panel:
    """The widget that stands in the cell while it runs."""

    def __init__(self, view: LiveView) -> None:
        import ipywidgets

        self.figure, _ = plots.new_figure("the run begins", 9.0, 5.4)
        self.image = ipywidgets.Image(format="png", value=plots.png(self.figure))
        self.stop = ipywidgets.Button(description="Stop", icon="stop", tooltip="End the run after this step")
        self.stop.on_click(lambda _: setattr(view, "stopped", True))
        self.box = ipywidgets.VBox([self.stop, self.image])

    def draw(self, record: plots.Record) -> None:
        if len(record.steps):
            self.image.value = plots.png(plots.training(record, self.figure), compress_level=1)


@contextlib.contextmanager
def _panel(view: LiveView) -> Iterator[_Panel]:
    """Show the panel, and put a plain picture in its place at the end: a saved notebook keeps no widgets."""
    from IPython.display import display

    panel = _Panel(view)
    handle = display(panel.box, display_id=True)
    try:
        yield panel
    finally:
        if len(view.record.steps):
            handle.update(plots.bundle(plots.training(view.record)), raw=True)
        for widget in (panel.box, panel.stop, panel.image):
            widget.close()


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
