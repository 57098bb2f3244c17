"""The site: built offline from the same notebooks and docstrings, every link leads somewhere, no error in a browser."""

import html.parser
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1440, "height": 900}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("myst_nb") is None, reason="make site installs Sphinx"),
]


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", ".", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_link_leads_somewhere(site):
    # The theme's templates lie among its static files, and are no pages.
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 20
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.exists() and (not parts.fragment or target not in pages or parts.fragment == "#")
            if not there and not (target in pages and unquote(parts.fragment) in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == [], "\n".join(broken)


def test_nothing_is_fetched_from_elsewhere(site):
    elsewhere = ('src="http', 'rel="stylesheet" href="http')
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not any(mark in text for mark in elsewhere), path


@pytest.mark.browser
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_show_without_an_error_and_no_wider_than_the_screen(site, browser, size):
    page = browser.new_page(viewport=size)
    told = []
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    lessons = [f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    for name in ["docs/index", "docs/reference", "README", "GLOSSARY", *sorted(lessons)]:
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_load_state("networkidle")
        assert told == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
    page.goto((site / "notebooks/02_hand_check.html").as_uri())
    page.locator("mjx-container").nth(10).wait_for()  # formulas are set, not shown as text
    page.close()
