"""Every reason why a call decodes plainly is explained where a reader looks for it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "hf_specdec" / "engine"
FUNCTIONS = {
    "plain_reasons.py": {"plain_reason", "_reason_against_assisted", "_reason_against_cache", "_reason_against_states"},
    "length_rules.py": {"reason_against_length"},
    "static_shapes.py": {"reason_against_static", "_reason_against_buffers"},
    "batch_rules.py": {"batch_fallback_reason", "_reason_against"},
}
CONSTANTS = {"OWN_LOOP", "HIDDEN_LENGTH"}
WILDCARD = "..."


def text_of(node: ast.AST) -> str | None:
    """A string, with `...` for what it is filled with."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or WILDCARD for part in node.values)
    return None


def reasons() -> list[str]:
    """What these functions return, and the constants that they return by name."""
    found = []
    for name, functions in FUNCTIONS.items():
        seen = set()
        for node in ast.parse((ENGINE / name).read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                found += [text_of(node.value)] if target.id in CONSTANTS else []
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                seen.add(node.name)
                returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
                either = [value for one in returned for value in ([one.body] if isinstance(one, ast.IfExp) else [one])]
                found += [text for value in either if (text := text_of(value))]
        assert seen == functions
    return [text for text in found if text]


def known() -> list[str]:
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
    assert any(matches(pattern, reason) for pattern in known())


def test_reasons_are_found() -> None:
    assert len(reasons()) > 20
