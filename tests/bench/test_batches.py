"""The batch benchmark times what it says, and notices other tokens."""

import json
from typing import Any

import typer
from typer.testing import CliRunner

from hf_specdec.bench import batches


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(batches.main)
    result = CliRunner().invoke(app, ["--limit", "4", "--max-new-tokens", "8", "--json", *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_size_and_method_has_its_row() -> None:
    document = run("--batch-size", "1", "--batch-size", "2", "--row", "prompt_lookup", "--row", "draft_model=[2]")
    rows = {(row["batch_size"], row["row"]): row for row in document["rows"] if not row.get("many")}
    assert rows.keys() == {(size, name) for size in (1, 2) for name in ("prompt_lookup", "draft_model=[2]")}
    for (size, _), row in rows.items():
        assert row["batches"] == row["equal"] == 4 // size
        assert row["ratio"]["median"] > 0
        assert row["tokens_per_step"] >= 1
    many = [row for row in document["rows"] if row.get("many")]
    assert [row["equal"] for row in many] == [4, 4]


def test_a_wrong_setting_is_an_error() -> None:
    app = typer.Typer()
    app.command()(batches.main)
    result = CliRunner().invoke(app, ["--prompts", "missing.jsonl"])
    assert result.exit_code == 2
    assert "missing.jsonl" in result.output
