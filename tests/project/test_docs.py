"""README and docs are true: their Python runs, their commands parse, their links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from hf_specdec.methods.registry import resolve
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
