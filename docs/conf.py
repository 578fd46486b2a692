"""Sphinx configuration of the site: `make docs` builds it into docs/_build/html, with warnings as errors."""

import json
import re
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "hf_specdec"
author = "The hf_specdec authors"
copyright = author
release = version = installed_version("hf_specdec")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
templates_path = ["_templates"]

# Markdown pages: tables, links to headings, and notebooks as they were saved (the tests run them).
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_render_markdown_format = "gfm"  # outputs that are Markdown may hold tables
suppress_warnings = ["myst.xref_missing_download"]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"  # fields of a class stand among its attributes
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
default_role = "code"  # docstrings are written in Markdown, where one backtick marks code

html_theme = "furo"
html_title = "hf_specdec"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"source_edit_link": "", "top_of_page_buttons": []}
copybutton_prompt_text = r"^\$ "

# Former pages, and headings of them that have another name now (page#heading), and where their text is.
REDIRECTS: dict[str, str] = json.loads((Path(__file__).parent / "redirects.json").read_text(encoding="utf-8"))
exclude_patterns = ["_build"]
REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<script>
const moved = {places}
location.replace(location.hash ? moved[location.hash] || "{page}" + location.hash : "{target}")
</script>
<a href="{target}">This page has moved.</a>
"""

FENCE = re.compile(r"^( *)```(\w*) *$")


def markdown_fences(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn Markdown's fenced code blocks and links of docstrings into reStructuredText."""
    converted: list[str] = []
    indent: str | None = None
    for line in lines:
        fence = FENCE.match(line)
        if fence and indent is None:
            indent = fence[1]
            converted += ["", f"{indent}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            indent = None
            converted.append("")
        else:
            converted.append(line if indent is None else f"    {line}")
    lines[:] = converted


def links_outside(app: Any, name: str, source: list[str]) -> None:
    """Make links to Markdown files outside of docs downloads; MyST takes them for missing pages otherwise."""
    source[0] = source[0].replace("](../../hf_specdec/", "](path:../../hf_specdec/")


def url_from(former: str, name: str) -> str:
    """Relative URL of what a former page, or one of its headings, has become; empty for another page's."""
    if name.partition("#")[0] != former:
        return ""
    page, _, place = REDIRECTS[name].partition("#")
    return f"{'../' * former.count('/')}{page}.html" + (f"#{place}" if place else "")


def write_redirects(app: Any, exception: Exception | None) -> None:
    """Write an HTML page for each former page that leads to the new one and keeps the place within it."""
    if exception or app.builder.format != "html":
        return
    for former in (name for name in REDIRECTS if "#" not in name):
        file = Path(app.outdir) / f"{former}.html"
        places = {
            name.removeprefix(former): url for name in REDIRECTS if (url := url_from(former, name)) and "#" in name
        }
        target = url_from(former, former)
        page = target.partition("#")[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(REDIRECT.format(page=page, target=target, places=json.dumps(places)), encoding="utf-8")


def setup(app: Any) -> None:
    """Register the conversions of docstrings and of links, and the redirects."""
    app.connect("autodoc-process-docstring", markdown_fences, priority=400)
    app.connect("source-read", links_outside)
    app.connect("build-finished", write_redirects)
