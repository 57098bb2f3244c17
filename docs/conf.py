"""How the site is built: the lessons and the package's reference, from the very notebooks and docstrings, offline.

Run from the repository's root, which is the source folder: ``make site``.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "dxdy"
author = "the developers of dxdy"
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/[0-9][0-9]_*.ipynb", "*.md", "data/*.md", "benchmarks/*.md"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]

nb_execution_mode = "off"  # the stored outputs are the ones that the tests compare
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]  # a widget's live form; its static form is shown

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = False

html_theme = "sphinx_book_theme"
html_title = "dxdy"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "article_header_end": ["theme-switcher", "toggle-secondary-sidebar"],
    "navbar_persistent": [],
}


def mend_links(app, name, source):
    """Let a notebook's links work here too: anchors are lower case, and lessons that HTML names are pages."""
    text = re.sub(r'(\]\(|href=\\?")#[\w-]+', lambda link: link[0].lower(), source[0])
    source[0] = re.sub(r'(href=\\?"\d\d_\w+)\.ipynb', r"\1.html", text)


def setup(app):
    app.connect("source-read", mend_links)
