"""The workbook in JupyterLab: who may come in, and a live view in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil
import pytest
import sockets
from playwright.sync_api import Browser, Locator, Page

from dxdy_nb.runs import lessons

WAIT = 120_000  # milliseconds: the machine may be busy
LIVE = """
import json, os, time, ipywidgets, torch, dxdy_nb as dx
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
slider = ipywidgets.IntSlider(0, 0, 9, description="hundredths")
used, ends = [], []
def note():
    with open("notes.new", "w") as file:
        json.dump({"used": used, "ends": ends[-1000:]}, file)
    os.replace("notes.new", "notes.json")
def steps():
    try:
        for step in range(20000):
            if used[-1:] != [slider.value]:
                used.append(slider.value)
                note()
            optimizer.param_groups[0]["lr"] = 0.01 * used[-1]
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 8)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
            ends.append(time.time())
            yield step
    finally:
        note()
with dx.watch(model, optimizer) as w:
    last = await dx.live(w, slider).run(steps())
"""
STEPS = """
import torch, dxdy_nb as dx
w = torch.tensor(3.0, requires_grad=True)
loss = (w * 2 + 1) ** 2
dx.graph(loss).steps().slider()
"""


class Lab(NamedTuple):
    address: str
    token: str
    root: Path
    process: psutil.Process

    def status(self, path: str, token: str | None = None, host: str | None = None) -> tuple[int, str]:
        """Return the status of a request and where it led."""
        header = {"Authorization": f"token {token}"} if token else {}
        header |= {"Host": host} if host else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.address + path, headers=header)) as answer:
                return answer.status, answer.url
        except urllib.error.HTTPError as error:
            return error.code, error.url


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A copy of the workbook, served by `dxdy lab --no-browser` to a person who starts it the first time."""
    root = tmp_path_factory.mktemp("workbook")
    notebooks = root / "notebooks"
    shutil.copytree(lessons.NOTEBOOKS, notebooks, ignore=shutil.ignore_patterns("runs", "src", ".ipynb_checkpoints"))
    metadata = nbformat.read(notebooks / "00_start_here.ipynb", as_version=4).metadata
    for name, cells in (("live", [LIVE, "print(last)"]), ("steps", [STEPS])):
        new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata)
        nbformat.write(new, notebooks / f"{name}.ipynb")
    program = "import pathlib, sys; from dxdy_nb.runs import lessons; from dxdy_nb.cli import main; "
    program += f"lessons.NOTEBOOKS = pathlib.Path({str(notebooks)!r}); "
    program += "sys.exit(main(['lab', '--no-browser', '--port', '18888']))"
    log = root / "lab.log"
    homes = {
        name: str(root / name) for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **homes},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield wait_for(process, log, root)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait_for(process: subprocess.Popen, log: Path, root: Path) -> Lab:
    deadline = time.monotonic() + WAIT / 1000
    while time.monotonic() < deadline and process.poll() is None:
        printed = re.search(
            r"(http://127\.0\.0\.1:\d+)/lab/tree/notebooks/00_start_here.ipynb\?token=(\w+)", log.read_text()
        )
        if printed:
            return Lab(printed[1], printed[2], root, psutil.Process(process.pid))
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not come up:\n{log.read_text()}")


def open_notebook(browser: Browser, lab: Lab, name: str, kernel: bool = True) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(WAIT)
    if not kernel:
        page.route("**/api/sessions*", lambda route: route.abort())
    page.goto(f"{lab.address}/lab/workspaces/{name[:2]}/tree/notebooks/{name}?reset&token={lab.token}")
    page.locator(".jp-NotebookPanel .jp-Notebook").wait_for()
    if kernel:  # cells that run before it is there would ask for one
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    return page


def run_all(page: Page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


@pytest.mark.browser
def test_only_who_has_the_token_comes_in(lab: Lab) -> None:
    assert lab.status("/api/contents")[0] == 403
    assert lab.status("/api/contents", token="wrong")[0] == 403
    assert lab.status("/api/contents", token=lab.token)[0] == 200
    status, led_to = lab.status("/lab")
    assert status == 200
    assert "/login" in led_to


@pytest.mark.browser
def test_it_answers_to_the_name_of_this_machine_alone(lab: Lab) -> None:
    port = lab.address.rpartition(":")[2]
    assert lab.status("/api/contents", lab.token, host=f"localhost:{port}")[0] == 200
    assert lab.status("/api/contents", lab.token, host=f"evil.example:{port}")[0] == 403


@pytest.mark.browser
def test_it_and_its_kernels_listen_on_loopback_alone(lab: Lab) -> None:
    header = {"Authorization": f"token {lab.token}", "Content-Type": "application/json"}
    body = json.dumps({"name": "python3"}).encode()
    with urllib.request.urlopen(urllib.request.Request(lab.address + "/api/kernels", body, header)) as answer:
        kernel = json.load(answer)["id"]
    try:
        deadline = time.monotonic() + WAIT / 1000
        seen: set[tuple[str, str]] = set()
        while not any("ipykernel" in command for _, command in seen):
            seen = sockets.listening(lab.process)
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        gone = urllib.request.Request(f"{lab.address}/api/kernels/{kernel}", headers=header, method="DELETE")
        urllib.request.urlopen(gone).close()
    assert any("jupyterlab" in command for _, command in seen)
    assert not [address for address, _ in seen if sockets.is_open(address)]


@pytest.mark.browser
def test_a_lesson_is_not_trusted_and_shows_its_pictures(lab: Lab, browser: Browser) -> None:
    name = "01_autograd_graph.ipynb"
    header = {"Authorization": f"token {lab.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{lab.address}/api/contents/notebooks/{name}", headers=header)
    ) as answer:
        cells = json.load(answer)["content"]["cells"]
    assert not any(cell["metadata"]["trusted"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"])
    page = open_notebook(browser, lab, name)
    page.locator(".jp-WindowedPanel-outer").first.hover()

    def shown(kind: str) -> bool:
        page.mouse.wheel(0, 600)
        pictures = page.locator(f".jp-OutputArea img[src^='data:image/{kind}']")
        return any(picture.evaluate("picture => picture.naturalWidth") > 100 for picture in pictures.all())

    for kind in ("svg+xml", "png"):
        until(page, lambda kind=kind: shown(kind), f"a picture of kind {kind} must be seen")
        page.mouse.wheel(0, -1_000_000)
    page.close()


def until(page: Page, found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT / 1000
    while not found():
        assert time.monotonic() < deadline, what
        page.wait_for_timeout(50)


@pytest.mark.browser
def test_a_live_view_moves_hears_its_slider_stops_and_leaves_a_picture(lab: Lab, browser: Browser) -> None:
    notebooks = lab.root / "notebooks"
    page = open_notebook(browser, lab, "live.ipynb")
    assert page.get_by_text("Would you like to get notified").count() == 0, "no question before the first lesson"
    run_all(page)
    picture = page.locator(".jp-OutputArea img").first
    picture.wait_for()
    seen = set()
    until(page, lambda: len(seen.add(picture.get_attribute("src")) or seen) >= 3, "the picture must move while it runs")

    def notes() -> dict:
        return json.loads((notebooks / "notes.json").read_text())

    handle = page.locator(".jp-OutputArea .widget-slider .noUi-handle").first
    for value in range(1, 6):
        handle.press("ArrowRight")
        until(page, lambda value=value: notes()["used"][-1] == value, f"the loop must use the slider's value {value}")
    assert notes()["used"] == [0, 1, 2, 3, 4, 5]

    page.evaluate("() => { document.addEventListener('click', () => { window.clicked = Date.now() / 1000 }, true) }")
    page.get_by_role("button", name="Stop").last.click()
    page.locator(".jp-OutputArea-output pre").last.wait_for()
    assert int(page.locator(".jp-OutputArea-output pre").last.inner_text()) < 19999
    # A step takes at least 10 ms, so a hundred are a second; on a busy machine both become longer together.
    clicked = page.evaluate("() => window.clicked")
    assert sum(end > clicked for end in notes()["ends"]) <= 100

    page.keyboard.press("Control+s")
    stored = notebooks / "live.ipynb"
    until(page, lambda: "image/png" in stored.read_text(), "the picture must be saved")
    outputs = json.loads(stored.read_text())["cells"][0]["outputs"]
    assert [list(output["data"]) for output in outputs] == [["image/png", "text/plain"]]
    page.close()
    page = open_notebook(browser, lab, "live.ipynb", kernel=False)
    width = page.locator(".jp-OutputArea img[src^='data:image/png']").evaluate("picture => picture.naturalWidth")
    assert width == 810
    page.close()


@pytest.mark.browser
def test_the_slider_over_the_steps_of_a_graph_turns_the_page(lab: Lab, browser: Browser) -> None:
    page = open_notebook(browser, lab, "steps.ipynb")
    run_all(page)
    picture = page.locator(".jp-OutputArea img").first
    picture.wait_for()
    handle = page.locator(".jp-OutputArea .widget-slider .noUi-handle").first
    words = page.locator(".jp-OutputArea .widget-html-content").first
    seen = [(picture.get_attribute("src"), words.inner_text())]
    for _ in range(3):
        handle.press("ArrowRight")
        until(page, lambda: picture.get_attribute("src") != seen[-1][0], "the picture must change with the slider")
        seen.append((picture.get_attribute("src"), words.inner_text()))
    assert len({text for _, text in seen}) == 4
    assert picture.evaluate("picture => picture.naturalWidth") > 100
    page.close()


def drag(page: Page, handle: Locator, pixels: int) -> None:
    """Move a slider's handle to the right with the mouse."""
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + pixels, y, steps=5)
    page.mouse.up()


def rewrite(page: Page, words: str, code: str) -> None:
    """Put other code into the first cell that holds these words, as a reader does: by click and keyboard."""
    page.locator(".jp-CodeCell", has_text=words).first.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(code)


@pytest.mark.browser
@pytest.mark.slow
def test_the_playground_of_lesson_05_is_moved_asked_and_answered(lab: Lab, browser: Browser) -> None:
    page = open_notebook(browser, lab, "05_optimizer_tuning.ipynb")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    run_all(page)
    stop = page.get_by_role("button", name="Stop")  # of the run in section 8; the toolbar's has another name
    stop.last.wait_for()
    page.get_by_label("schedule", exact=True).select_option("constant")
    stop.last.click()
    stop.last.wait_for(state="detached")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()

    panel = page.locator(".jp-OutputArea-output").filter(has=page.get_by_placeholder("word or steps")).last
    guess, picture = panel.get_by_placeholder("word or steps"), panel.locator("img")
    words = panel.locator(".widget-html-content")
    button = panel.locator("button").first
    guess.scroll_into_view_if_needed()

    def shown() -> str:
        return panel.text_content() or ""

    def changed(act: Callable[[], object], what: str) -> None:
        before = picture.get_attribute("src")
        act()
        until(page, lambda: picture.get_attribute("src") != before, what)

    assert "rate = 0.5 × 2/λ" in shown()
    button.click()
    page.wait_for_timeout(1000)
    assert "1 of 1 right" not in shown() and words.count() >= 2, "nothing is shown before it was predicted"

    handles = panel.locator(".noUi-handle")
    drag(page, handles.first, 15)  # the rate
    until(page, lambda: "rate = 0.5 × 2/λ" not in shown(), "the rate follows the mouse")
    for _ in range(40):
        handles.first.press("ArrowRight")
    readout = panel.locator(".widget-readout").first

    def arrived() -> bool:  # in units of 2/λ the rate is five times itself here; a front end hands on moves one by one
        told, units = float(readout.inner_text()), float(re.search(r"rate = (\S+) ×", shown())[1])
        return told > 0.5 and abs(units / (5 * told) - 1) < 0.01

    until(page, arrived, "the rate follows the arrow keys")
    guess.fill("diverges")
    changed(button.click, "the walk is drawn")
    until(page, lambda: "1 of 1 right" in shown() and "diverges? It diverges." in shown(), "the prediction is kept")
    assert guess.input_value() == "", "the next move asks for the next prediction"

    panel.get_by_label("landscape", exact=True).select_option("matrix")
    until(page, lambda: panel.get_by_label("optimizer", exact=True).locator("option").count() == 7, "Muon is offered")
    guess.fill("7")
    guess.press("Tab")
    changed(lambda: button.press("Enter"), "the keyboard runs a walk too")
    until(page, lambda: "of 2 right" in shown(), "both predictions are kept")

    wide = picture.bounding_box()
    page.set_viewport_size({"width": 800, "height": 1000})
    until(page, lambda: picture.bounding_box()["width"] < wide["width"], "the picture follows the width of the page")
    page.keyboard.press("Control+s")
    stored = lab.root / "notebooks" / "05_optimizer_tuning.ipynb"
    until(page, lambda: "These walks as a picture" in stored.read_text(), "a file without a kernel has a picture")
    assert not problems
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_the_precision_lesson_takes_a_prediction_other_parameters_and_a_stop(lab: Lab, browser: Browser) -> None:
    page = open_notebook(browser, lab, "06_precision_and_accumulation.ipynb")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    rewrite(page, "accumulation_steps = 2", 'seed = 0\nprecision = "bf16"\naccumulation_steps = 4\nsteps = 8000')
    rewrite(page, "256 + 1 in bfloat16", 'lesson.predict("256 + 1 in bfloat16", 257)')
    run_all(page)
    page.locator(".jp-WindowedPanel-outer").first.hover()

    def scrolled() -> bool:
        page.mouse.wheel(0, 600)
        return page.locator(".jp-OutputArea").get_by_role("button", name="Stop").count() > 0

    until(page, scrolled, "the live view must come")
    page.locator(".jp-OutputArea").get_by_role("button", name="Stop").click()
    stored = lab.root / "notebooks" / "06_precision_and_accumulation.ipynb"

    def texts() -> str:
        page.wait_for_timeout(2000)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        cells = [cell for cell in json.loads(stored.read_text())["cells"] if cell["cell_type"] == "code"]
        return "" if not cells[-1]["execution_count"] else json.dumps([cell["outputs"] for cell in cells])

    until(page, lambda: bool(texts()), "the lesson must run to its end after the stop")
    told = texts()
    assert "you said 257, measured 256" in told
    assert "ended early: nothing to compare" in told
    assert '"output_type": "error"' not in told
    assert not problems
    page.close()


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("name", lessons.names())
def test_a_lesson_runs_from_top_to_bottom_in_jupyterlab(lab: Lab, browser: Browser, name: str) -> None:
    page = open_notebook(browser, lab, f"{name}.ipynb")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    run_all(page)
    page.get_by_text("Python 3 (ipykernel) | Busy").wait_for()
    stored = lab.root / "notebooks" / f"{name}.ipynb"
    deadline = time.monotonic() + 5 * WAIT / 1000
    cells: list[dict] = [{"execution_count": None}]
    while not all(cell["execution_count"] for cell in cells) and time.monotonic() < deadline:
        page.wait_for_timeout(2000)
        page.keyboard.press("Control+s")  # the kernel is idle for a moment between two cells: the file tells more
        page.wait_for_timeout(1000)
        cells = [cell for cell in json.loads(stored.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not problems
    assert all(cell["execution_count"] for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    page.close()
