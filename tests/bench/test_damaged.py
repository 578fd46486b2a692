"""A document that is damaged is an error that says what is missing or wrong."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.tables import read_document

DAMAGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {  # a place, what is put there, and what is said of it
    "no header": (("header",), None, "'header' is missing"),
    "no threads": (("header", "threads"), None, "'threads' is missing"),
    "no prompts": (("prompts",), None, "'prompts' is missing"),
    "models": (("models",), "x" * 99, ""),
    "no rows": (("models", 0, "rows"), None, "'rows' is missing"),
    "record": (("models", 0, "records", 3), 5, ""),
    "no seconds": (("models", 0, "records", -1, "seconds"), None, "'seconds' is missing"),
    "seconds": (("models", 0, "records", -1, "seconds"), "1", ""),
    "visit": (("models", 0, "records", -1, "prompt"), "none", ""),
}


def damaged(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with something else at a place, or without it."""
    copied: dict[str, Any] = json.loads(json.dumps(document))
    part = functools.reduce(lambda part, name: part[name], place[:-1], copied)
    part[place[-1]] = value
    if value is None:
        del part[place[-1]]
    return copied


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_document_is_an_error(measured: dict[str, Any], tmp_path: Path, damage: str) -> None:
    place, value, what = DAMAGES[damage]
    (tmp_path / "x.json").write_text(json.dumps(damaged(measured, place, value)), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"`resume` must be a document.* whole.*{re.escape(what)}.*Measure again"):
        read_document(tmp_path / "x.json", "resume")


@pytest.mark.parametrize("kind", ["cost", "replayed"])
@pytest.mark.parametrize("place", [("tables",), ("tables", 0, "columns"), ("tables", 0, "rows"), ("notes",)], ids=str)
def test_a_table_without_its_parts_is_an_error(
    kind: str, place: tuple[Any, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    document = damaged(request.getfixturevalue(kind), place, None)
    (tmp_path / "x.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match="Measure again"):
        read_document(tmp_path / "x.json")


@pytest.mark.parametrize("lines", [["{"], ['{"model": 7, "records": []}'], ["5"]])
def test_a_damaged_line_is_an_error(measured: dict[str, Any], tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps({"document": measured}), *lines]))
    with pytest.raises(ConfigError, match="must be a document of hf-specdec bench"):
        read_document(tmp_path / "x.jsonl")
