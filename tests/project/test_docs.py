"""README and docs are true: their Python runs, their commands parse, their links lead somewhere."""

import dataclasses
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import hf_specdec
from hf_specdec.methods.registry import METHODS, resolve
from hf_specdec.tools.bench import read_records
from hf_specdec.tools.bench.page import page_text
from hf_specdec.tools.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
BLOCK = re.compile(
    r"(?P<marker><!-- not run: [^\n]+ -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)[^)]*\)")
# Pages whose blocks take long; make test-all runs them.
LONG = {
    "docs/concepts/how-it-works.md",
    "docs/guides/auto.md",
    "docs/guides/benchmark.md",
    "docs/guides/coming-from.md",
    "docs/guides/draft-model.md",
    "docs/guides/json-and-grammars.md",
    "docs/guides/many-prompts.md",
    "docs/guides/other-libraries.md",
    "docs/guides/placement.md",
    "docs/guides/precision.md",
    "docs/guides/shapes-and-kernels.md",
    "docs/guides/train.md",
    "docs/guides/troubleshooting.md",
    "docs/reference/api.md",
    "docs/reference/bench.md",
}
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line number and code of each block of a language that is not marked as not run."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("code")), match["code"])
        for match in BLOCK.finditer(text)
        if match["language"] == language and not match["marker"]
    ]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=pytest.mark.wide if name in LONG else ())
        for page in PAGES
        for name in [str(page.relative_to(ROOT))]
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_blocks_that_are_not_run_define_their_names_too(tmp_path: Path) -> None:
    """A reader who types a page from its beginning meets no undefined name."""
    for number, page in enumerate(PAGES):
        output = [match["code"] for match in BLOCK.finditer(page.read_text("utf-8")) if match["language"] == "python"]
        (tmp_path / f"{number}_{page.stem.replace('-', '_')}.py").write_text("\n".join(output), "utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@every_page
def test_commands_parse(page: Path) -> None:
    """Commands and options of `hf-specdec` on a page exist, and so do the keys that they set for a method."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for _, code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            if "hf-specdec " in line:
                words = shlex.split(line, comments=True)
                name, *arguments = words[words.index("hf-specdec") + 1 :]
                wanted = group.commands[name].make_context(name, arguments).params
                resolve(wanted.get("spec_method") or "auto").config_class.parse(wanted.get("spec_config"))


def test_troubleshooting_names_reasons_of_the_code() -> None:
    """Each piece of a reason, between its `...`, stands in the package."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| `plain_reason` | What to do |\n|---|---|\n")[2].partition("\n\n")[0]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_specdec").rglob("*.py"))
    reasons = [reason for row in table.splitlines() for reason in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(reasons) > 5
    for piece in (piece.strip(" :") for reason in reasons for piece in reason.split("...")):
        assert piece in source, piece


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


DOCS = ROOT / "docs"


def test_the_configuration_page_is_current() -> None:
    """`make docs` would change nothing."""
    render = runpy.run_path(str(DOCS / "generate_reference.py"))["render"]
    assert (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8") == render()


def test_every_field_of_every_method_has_its_row() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    for method in METHODS.values():
        for field in dataclasses.fields(method.config_class):
            assert f"| `{field.name}` |" in page


CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_it_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])


def test_the_newest_release_is_the_package_s_version() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", CHANGELOG, re.MULTILINE)
    assert not released or released[0] == VERSION


def test_kinds_of_change_are_the_known_ones() -> None:
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= KINDS


def test_an_entry_is_one_sentence() -> None:
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.+(?:\n  .+)*)", CHANGELOG, re.MULTILINE)]
    assert entries
    for entry in entries:
        assert entry.endswith("."), entry
        assert not re.search(r"[.!?] [A-Z]", entry), entry


RESULTS = ROOT / "docs" / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))
RESULT_PAGES = sorted(path for path in RESULTS.glob("*.md") if path.stem != "index")


def test_there_are_records() -> None:
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_page_says_what_its_records_say(file: Path) -> None:
    page = file.with_suffix(".md").read_text("utf-8")
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert (RESULTS / picture).is_file()
    header, records = read_records(file)
    text = page_text(picture, header, records, by_cpu_time=header["threads"] == 1)
    assert page == runpy.run_path(str(ROOT / "docs" / "draw_results.py"))["titled"](file.stem, text)


@pytest.mark.parametrize("page", RESULT_PAGES, ids=[page.stem for page in RESULT_PAGES])
def test_no_page_is_older_than_the_release(page: Path) -> None:
    assert f"hf_specdec {hf_specdec.__version__}" in page.read_text("utf-8")


def test_table_and_picture_of_readme_show_the_figures_of_their_records() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_results.py"))
    _, records = read_records(RESULTS / f"{script['SHOWN']}.jsonl")
    picture = script["PICTURE"].read_text("utf-8")
    for speed in script["speeds_of"](records).to_numpy().flatten():
        assert f">{speed:.2f}<" in picture
    assert script["table_of"](records) in (ROOT / "README.md").read_text("utf-8")


PACKAGE = ROOT / "hf_specdec"
MODULES = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def architecture() -> str:
    return (DOCS / "concepts" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_has_the_layers_of_pyproject() -> None:
    """`python docs/draw_layers.py` would change nothing."""
    script = runpy.run_path(str(DOCS / "draw_layers.py"))
    picture = script["PICTURE"].read_text(encoding="utf-8")
    assert picture == script["render"]()
    shown = [name.rstrip("/") for name in re.findall(r"<text [^>]*>([^<]+)</text>", picture)]
    assert sorted(shown) == sorted(MODULES - {"__init__"})


def test_the_table_has_every_module() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", architecture().partition("## The way of a call")[0], re.MULTILINE)
    named = {name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert MODULES - {"__init__", "__main__"} <= named <= MODULES


def test_the_files_that_the_page_names_are_there() -> None:
    """Paths with their folder; and all runners of draft networks."""
    text = architecture()
    named = set(re.findall(r"\b(?:api|(?:\w+/)+\w+)\.py\b", text))
    assert len(named) > 10
    assert not {name for name in named if not any((root / name).exists() for root in (PACKAGE, ROOT))}
    files = (PACKAGE / "forward" / "networks").glob("*_runner.py")
    assert set(re.findall(r"`(\w+_runner)`", text)) == {path.stem for path in files}
