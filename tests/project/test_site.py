"""The site builds without a warning, offline, and its reference names everything that the package offers."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import hf_specdec
import hf_specdec.tools.bench
import hf_specdec.tools.train
from hf_specdec.methods.registry import METHODS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"(?<! -->\n)^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # that the tests run


@pytest.mark.wide
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path / "html"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "html" / "search.html").exists()
    for page in (tmp_path / "html").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, f"{page.name} loads {loaded} from a network"
    redirects = json.loads((DOCS / "redirects.json").read_text(encoding="utf-8"))
    for former in (name for name in redirects if "#" not in name):
        assert "This page has moved." in (tmp_path / "html" / f"{former}.html").read_text(encoding="utf-8")
    for new in redirects.values():
        page, _, place = new.partition("#")
        assert not place or f'id="{place}"' in (tmp_path / "html" / f"{page}.html").read_text(encoding="utf-8"), new
    assert dead_links(tmp_path / "html") == []
    reference = (tmp_path / "html" / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("AutoModelForCausalLM.from_pretrained", "AutoDraftHead.from_pretrained", "SpecMemory.load"):
        assert f'id="hf_specdec.{name}"' in reference, name


def dead_links(site: Path) -> list[str]:
    """Links of built pages to files of the site that are not there, or to places that these do not have."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    result = []
    for page, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            path, _, place = unquote(link).partition("#")
            if urlsplit(link).scheme:
                continue
            target = (page.parent / path).resolve() if path else page
            is_there = target.exists() and (not place or target not in pages or f'id="{place}"' in pages[target])
            if not is_there:
                result.append(f"{page.relative_to(site)}: {link}")
    return result


def test_former_pages_lead_to_pages_that_are_there() -> None:
    redirects = json.loads((DOCS / "redirects.json").read_text(encoding="utf-8"))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert redirects
    assert {name.partition("#")[0] for name in redirects} <= set(redirects)
    assert not set(redirects) & pages
    assert {new.partition("#")[0] for new in redirects.values()} <= pages


MODULES = (hf_specdec, hf_specdec.tools.bench, hf_specdec.tools.train)
PUBLIC = [(module, name) for module in MODULES for name in module.__all__ if not name.startswith("__")]
every_name = pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[f"{m.__name__}.{name}" for m, name in PUBLIC])


@every_name
def test_every_public_name_is_in_the_reference(module: ModuleType, name: str) -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf":: {module.__name__}\.{name}\b", reference)


@every_name
def test_every_public_name_has_an_example(module: ModuleType, name: str) -> None:
    assert (module.__name__, name) in shown_names()


@every_name
def test_no_property_begins_with_a_type(module: ModuleType, name: str) -> None:
    """Sphinx takes what stands before a colon in a property's first line for its type."""
    for attribute, value in vars(getattr(module, name)).items():
        if isinstance(value, property) and not attribute.startswith("_"):
            assert ": " not in re.sub(r"`[^`]*`", "", (value.__doc__ or "").partition("\n")[0]), attribute


def test_every_argument_of_training_and_measuring_is_explained() -> None:
    training = hf_specdec.tools.train
    for function in (
        training.train_head,
        hf_specdec.tools.bench.load_model,
    ):
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"^ +{argument} \(`", function.__doc__ or "", re.MULTILINE), argument


def test_a_method_of_something_else_is_no_example() -> None:
    """`tokenizer.decode` does not show `hf_specdec.decode`."""
    of_package = "import hf_specdec\nfrom hf_specdec.tools.bench import widen as wider\nhf_specdec.decode"
    of_others = "import hf_specdec\nfrom other import enable\ntokenizer.decode(ids)\nhf_specdec.embedded.path('target')"
    assert names_in(of_package) == {("hf_specdec", "decode"), ("hf_specdec.tools.bench", "widen")}
    assert names_in(of_others) == {("hf_specdec", "embedded")}


def names_in(code: str) -> set[tuple[str, str]]:
    """Module and name of what a block uses of the package: imported from a module, or an attribute of one."""
    names = {module.__name__ for module in MODULES}
    result = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            result |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
            result.add((ast.unparse(node.value), node.attr))
    return result


@functools.cache
def shown_names() -> set[tuple[str, str]]:
    """What the Python blocks of README, of all pages and of the tutorials show."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    code = [block for page in pages for block in CODE.findall(page.read_text(encoding="utf-8"))]
    for notebook in (DOCS / "tutorials").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return set().union(*map(names_in, code))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_in_the_table_of_the_guide(method: str) -> None:
    guide = (DOCS / "guides" / "auto.md").read_text(encoding="utf-8")
    table = guide.partition("| `spec_method` |")[2].partition("\n\n")[0]
    assert f'"{method}"' in table
