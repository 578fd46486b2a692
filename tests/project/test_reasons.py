"""Every reason why a call decodes plainly is explained where a reader looks for it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_specdec"
RULES = PACKAGE / "call" / "rules.py"
OF_MANY = {"alone", "one_by_one"}  # which say why prompts do not share a batch
OTHERS = {  # by name in the file
    PACKAGE / "engine" / "static_shapes.py": {"reason_against_buffers", "HIDDEN_LENGTH"},
}
WILDCARD = "..."


def text_of(node: ast.AST) -> str | None:
    """A string, with `...` for what it is filled with."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or WILDCARD for part in node.values)
    return None


def reasons() -> list[str]:
    """Texts that the rules return, and their constants."""
    result = []
    for file, names in {RULES: None, **OTHERS}.items():
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                result += [text_of(node.value)] if names is None or target.id in names else []
            if isinstance(node, ast.FunctionDef) and node.name not in OF_MANY and (not names or node.name in names):
                returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
                either = [
                    value for item in returned for value in ([item.body] if isinstance(item, ast.IfExp) else [item])
                ]
                result += [text_of(value) for value in either]
    return [text for text in result if text]


def patterns() -> list[str]:
    """The patterns of the guide's table."""
    text = (ROOT / "docs/guides/troubleshooting.md").read_text("utf-8")
    table = text.partition("| `plain_reason` |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def matches(pattern: str, reason: str) -> bool:
    """Whether a reason is one that the pattern stands for; both may have holes."""
    parts = [re.escape(part.strip()) for part in pattern.split(WILDCARD)]
    return re.fullmatch(".*".join(parts), reason) is not None


@pytest.mark.parametrize("reason", reasons())
def test_a_reason_is_in_the_table_of_the_guide(reason: str) -> None:
    assert any(matches(pattern, reason) for pattern in patterns())


def test_reasons_are_found() -> None:
    assert len(reasons()) > 20
