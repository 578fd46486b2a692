"""The batch benchmark times what it says, and notices other tokens."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import AutoSpecConfig
from hf_specdec.bench import batches
from hf_specdec.methods.auto.method import memory_in_use
from hf_specdec.methods.method import MethodState

METHODS = ("prompt_lookup", "draft_model=[2]", "auto+draft_model")


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(batches.main)
    result = CliRunner().invoke(app, ["--limit", "4", "--max-new-tokens", "8", "--json", *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_size_and_method_has_its_row() -> None:
    document = run("--batch-size", "1", "--batch-size", "2", *[word for name in METHODS for word in ("--row", name)])
    rows = {(row["batch_size"], row["row"]): row for row in document["rows"] if not row.get("many")}
    assert rows.keys() == {(size, name) for size in (1, 2) for name in METHODS}
    for (size, _), row in rows.items():
        assert row["batches"] == row["equal"] == 4 // size
        assert row["ratio"]["median"] > 0
        assert row["tokens_per_step"] >= 1
    many = [row for row in document["rows"] if row.get("many")]
    assert [row["equal"] for row in many] == [4, 4, 4]


def test_no_method_drafts_from_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round a method's memory knows the batches before, and never the one that it is timed on."""
    known: list[tuple[int, int]] = []
    real = batches.remembering

    @contextmanager
    def watched(model: Any, memory: MethodState) -> Iterator[None]:
        before = len(memory_in_use(memory, AutoSpecConfig()).pool) if "auto" in memory.by_name else 0
        with real(model, memory):
            yield
        known.append((before, len(memory_in_use(memory, AutoSpecConfig()).pool)))

    monkeypatch.setattr(batches, "remembering", watched)
    run("--batch-size", "2", "--row", "auto")
    plain, auto = known[0::2][:4], known[1::2][:4]
    assert plain == [(0, 0)] * 4
    assert [before for before, _ in auto] == [0, 0, auto[0][1], auto[1][1]]
    assert known[-1][0] == 0  # generate_many begins with nothing too


def test_a_prompt_that_failed_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose text ends too early; the others are."""
    real = hf_specdec.generate_many

    def failing(*args: Any, **kwargs: Any) -> Iterator[hf_specdec.ManyResult]:
        for result in real(*args, **kwargs):
            if result.index == 1:
                yield dataclasses.replace(result, token_ids=[], error=RuntimeError("no room"))
            else:
                yield dataclasses.replace(result, token_ids=result.token_ids[: 3 if result.index == 2 else None])

    monkeypatch.setattr(hf_specdec, "generate_many", failing)
    (many,) = [row for row in run("--batch-size", "2", "--row", "prompt_lookup")["rows"] if row.get("many")]
    assert (many["equal"], many["failed"]) == (2, 1)


def test_a_wrong_setting_is_an_error() -> None:
    app = typer.Typer()
    app.command()(batches.main)
    result = CliRunner().invoke(app, ["--prompts", "missing.jsonl"])
    assert result.exit_code == 2
    assert "missing.jsonl" in result.output
