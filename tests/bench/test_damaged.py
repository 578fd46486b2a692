"""A document that is damaged is an error that names line and field; one that cannot be written stays as it was."""

import functools
import json
import re
import resource
import types
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench import journal as journal_module
from hf_specdec.tools.bench.document import read_document
from hf_specdec.tools.bench.journal import Journal, read_lines
from hf_specdec.tools.bench.shapes import check_document, path_text

DAMAGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {  # a place, what is put there, and what is said of it
    "no header": (("header",), None, "`header` is missing"),
    "no threads": (("header", "threads"), None, "`header.threads` is missing"),
    "versions": (("header", "versions", "torch"), 2.1, "`header.versions.torch` must be text, but is 2.1"),
    "no prompts": (("prompts",), None, "`prompts` is missing"),
    "no model": (("models",), [], "`models` must hold something, but is empty"),
    "models": (("models",), "x" * 99, "`models` must be a list, but is 'xxx"),
    "parameters": (("models", 0, "model", "parameters"), True, "`models[0].model.parameters` must be a whole number"),
    "huge": (("models", 0, "model", "parameters"), 10**400, "`models[0].model.parameters` must be at most"),
    "no rows": (("models", 0, "rows"), None, "`models[0].rows` is missing"),
    "left out": (("models", 0, "left_out", "plain"), 3, "`models[0].left_out.plain` must be text, but is 3"),
    "mode": (("models", 0, "records", 0, "mode"), "slow", "`models[0].records[0].mode` must be one of greedy, sampled"),
    "record": (("models", 0, "records", 3), 5, "`models[0].records[3]` must be an object, but is 5"),
    "no seconds": (("models", 0, "records", 9, "seconds"), None, "`models[0].records[9].seconds` is missing"),
    "seconds": (("models", 0, "records", 9, "seconds"), "1", "`models[0].records[9].seconds` must be a number"),
    "kind": (("kind",), "other", "`kind` must be one of cost, drafting,"),
    "kind of numbers": (("kind",), 3, "`kind` must be one of cost, drafting,"),
    "visit": (("models", 0, "records", -1, "prompt"), "none", "Its records do not go together"),
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
def test_a_damaged_document_is_an_error_that_names_the_field(
    measured: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    place, value, what = DAMAGES[damage]
    (tmp_path / "x.json").write_text(json.dumps(damaged(measured, place, value)), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"`resume` must be a whole document.*{re.escape(what)}.*Measure again"):
        read_document(tmp_path / "x.json", "resume")


@pytest.mark.parametrize(
    ("place", "line"),
    [(("settings",), 1), (("models", 0, "records", 0, "seconds"), 2), (("models", 0, "records", 9, "seconds"), 4)],
)
def test_a_damaged_line_is_named(document: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], line: int) -> None:
    """Lines of four records each."""
    document, file = damaged(document, place, None), tmp_path / "x.jsonl"
    (entry,), journal = document["models"], Journal(file)
    records = entry["records"]
    for end in (4, 8, 12):
        entry["records"] = records[:end]
        journal.save(document)
    with pytest.raises(ConfigError, match=rf"In line {line}, `.*{place[-1]}` is missing"):
        read_document(file)
    lines = file.read_text().split("\n")
    for wrong, what in (("{", "line 3 is no JSON"), ('{"model": 7, "records": []}', "line 3 is none of a journal")):
        file.write_text("\n".join([*lines[:2], wrong, *lines[3:]]))
        with pytest.raises(ConfigError, match=what):
            read_document(file)


def test_damaged_documents_of_every_kind_are_errors(cost: dict[str, Any], replayed: dict[str, Any]) -> None:
    for document, place in (
        (cost, ("models", 0, "curves", 1, "points", 2, "ratio", "low")),
        (replayed, ("drafters", "prompt_lookup, chain", 0, "num_nodes")),
    ):
        check_document(document)
        for value in (None, "x", [], {}):
            with pytest.raises(ValueError, match=re.escape(path_text(place))):
                check_document(damaged(document, place, value))


def test_an_interrupt_while_lines_are_written_leaves_the_lines_before(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (entry,), journal = document["models"], Journal(tmp_path / "x.jsonl")
    journal.save({**document, "models": [{**entry, "records": entry["records"][:4]}] * 2})
    before = journal.path.read_bytes()

    def interrupted(line: dict[str, Any]) -> str:
        if line.get("model") == 1:
            raise KeyboardInterrupt
        return json.dumps(line)

    models = [entry, entry]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(journal_module, "json", types.SimpleNamespace(dumps=interrupted))
        journal.save({**document, "models": models})
    assert journal.path.read_bytes() == before
    journal.save({**document, "models": models})
    assert [own["records"] for own in read_lines(journal.path.read_text())["models"]] == [entry["records"]] * 2


def test_a_line_that_cannot_be_written_leaves_the_lines_before(document: dict[str, Any], tmp_path: Path) -> None:
    """As on a full disk: the process may write 200 bytes more than there are, and later all."""
    (entry,), journal = document["models"], Journal(tmp_path / "x.jsonl")
    records = entry["records"]
    entry["records"] = records[:4]
    journal.save(document)
    before = journal.path.read_bytes()
    entry["records"] = records[:12]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 200, hard))
    try:
        with pytest.raises(OSError):
            journal.save(document)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.path.read_bytes() == before
    journal.save(document)
    assert read_document(journal.path)["models"][0]["records"] == records[:12]
