"""The document is JSON of a known shape, and the tables and figures come from it alone."""

import builtins
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.bench import naming
from hf_specdec.tools.bench import replay_rows as replay_rows_module
from hf_specdec.tools.bench.cost import measure_cost
from hf_specdec.tools.bench.document import check_document_file, write_document
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import WATCHED_ROUND
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.replay import Record
from hf_specdec.tools.bench.replay_rows import replay_rows
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.speeds import NOT_EQUAL, summarize_again
from hf_specdec.tools.bench.tables import facts, markdown, notes, read_document, tables
from tests.bench.conftest import ROWS

HEADER = {"date", "hardware", "device", "threads", "versions", "commit", "load_average"}
ENTRY = {"name", "dtype", "attention", "model", "assistant", "assistant_dtype", "peak_memory"}
ENTRY |= {"rows", "left_out", "records", "summary"}
SUMMARY = {
    "speed",
    "speed_by_prompt",
    "speed_fifth_percentile",
    "speed_least",
    "slowest_prompt",
    "speed_by_processor_time",
    "speed_against",
    "tokens_per_second",
    "num_tokens",
    "first_token_ms",
    "tokens_per_step",
    "nodes_per_step",
    "draft_share",
    "peak_memory_mib",
    "share_equal",
    "share_equal_to_plain",
    "plain_reasons",
    "errors",
}
VISIT = {"mode", "round", "prompt", "task", "turn", "row"}
WATCHED = {"blocks", "drafted", "num_draft_tokens", "first_token_seconds"}
COUNTED = {"num_tokens", "equal", "equal_to_plain", "first_difference"}


def test_the_document_has_the_shape_it_promises(measured: dict[str, Any], entry: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    assert (measured["format"], measured["kind"]) == (3, "speeds")
    assert measured["header"].keys() == HEADER
    assert entry.keys() == ENTRY
    assert [row["name"] for row in entry["rows"]] == [REFERENCE, *ROWS]
    assert entry["summary"].keys() == {"greedy", "sampled"}
    for mode in entry["summary"].values():
        assert all(row.keys() == SUMMARY for row in mode.values())
        assert all(row["speed"].keys() == {"repeat", "fresh", "overall"} for row in mode.values())
    for record in entry["records"]:
        own = {"token_ids"} if record["row"] == REFERENCE else set()
        seen = WATCHED if record["round"] == WATCHED_ROUND else set()
        told = record.keys() & {"draft_seconds", "plain_reason", "peak_memory_bytes"}
        assert record.keys() == VISIT | COUNTED | own | seen | told | {"seconds", "cpu_seconds"}
        assert None not in [value for name, value in record.items() if name != "first_difference"]


def test_writing_and_reading_give_the_same(measured: dict[str, Any], tmp_path: Path) -> None:
    write_document(measured, tmp_path / "bench.json")
    assert read_document(tmp_path / "bench.json") == measured
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("kind", ["measured", "cost", "replayed"])
def test_json_lines_hold_the_same_document(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A line for each visit of a model, so that a difference of two files is read line by line."""
    file, document = tmp_path / "bench.jsonl", request.getfixturevalue(kind)
    write_document(document, file)
    assert read_document(file) == document
    assert [path.name for path in tmp_path.iterdir()] == ["bench.jsonl"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(line["records"]) for line in lines[1:-1]] == ([4] * 24 if kind == "measured" else [])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"document": {"models": []}}\n{"model": 0}\n', '{"document"'])
def test_other_lines_are_no_journal(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="hf-specdec bench"):
        read_document(tmp_path / "x.jsonl")


def test_a_table_compares_with_any_row(document: dict[str, Any]) -> None:
    for probe in document["models"][0]["records"]:
        if (probe["row"], probe["task"], probe["round"]) == ("prompt_lookup", "repeat", WATCHED_ROUND):
            probe.update(blocks=[1, 3, 2], drafted=[0, 4, 5])
    summarize_again(document, ["plain", REFERENCE])
    found = {table.headings[0]: table for table in reversed(tables(document))}  # the greedy ones
    assert found["overall"].headings[1:] == [f"over {name}" for name in (REFERENCE, ROWS[0], "plain")]
    cells = {row[0]: row[1:] for row in found["overall"].rows}
    assert cells["plain"][2] == "-" and all("[" in cell for cell in cells["prompt_lookup"])
    steps = {row[0]: row[1:] for row in found["tokens a step (drafted)"].rows}
    assert steps[REFERENCE] == ["1.00 (0.0)"] * 3
    assert steps["prompt_lookup"][:2] == ["2.50 (4.5)", "1.00 (0.0)"]
    with pytest.raises(ConfigError, match="Did you mean 'plain'"):
        summarize_again(document, ["plan"])


def test_speeds_are_of_processor_time_where_that_is_asked_for(document: dict[str, Any]) -> None:
    for record in document["models"][0]["records"]:
        record.update(seconds=1.0, cpu_seconds=0.5 if record["row"] == "plain" else 2.0, num_tokens=8)
    summarize_again(document)
    assert document["models"][0]["summary"]["greedy"]["plain"]["speed"]["overall"]["median"] == 1.0
    summarize_again(document, by_cpu_time=True)
    summary = document["models"][0]["summary"]["greedy"]["plain"]
    assert summary["speed"]["overall"]["median"] == summary["speed_least"] == 4.0
    assert summary["tokens_per_second"] == 16.0
    titles = [table.title for table in tables(document) if table.title]
    assert titles[0] == "greedy, by processor time"
    assert not any("by CPU time" in table.headings for table in tables(document))
    assert notes(document)[0].startswith("Tasks and overall: tokens a second of processor time over")


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{", '{"kind": "speeds", "format": 2}'])
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="hf-specdec bench"):
        read_document(tmp_path / "x.json")


def test_tables_hold_every_row_and_task(measured: dict[str, Any]) -> None:
    text = markdown(measured)
    for word in (
        *ROWS,
        "repeat",
        "fresh",
        "overall",
        "tokens a step",
        "first token",
        "peak memory",
        "greedy",
        "sampled",
    ):
        assert word in text
    assert NOT_EQUAL not in text
    assert all(len(row) == len(table.headings) for table in tables(measured) for row in table.rows)
    assert "over transformers:prompt_lookup" in text
    assert any("float32" in line and "1 thread" in line for line in facts(measured))


def test_an_unequal_row_is_said_in_the_table_and_below_it(document: dict[str, Any]) -> None:
    document["models"][0]["summary"]["greedy"]["plain"]["share_equal"] = 0.5
    first = tables(document)[0]
    assert first.headings[-2:] == ["equal", "equal to plain"]
    assert [row[-2] for row in first.rows] == ["-", "1.00", f"0.50 {NOT_EQUAL}", "1.00"]
    assert [row[-1] for row in first.rows] == ["1.00", "1.00", "-", "1.00"]
    assert any(line.startswith(f"{NOT_EQUAL}: plain (greedy)") and "50%" in line for line in notes(document))


def test_half_precision_says_why_texts_may_differ(document: dict[str, Any]) -> None:
    assert not any("round otherwise" in line for line in notes(document))
    document["models"][0]["dtype"] = "bfloat16"
    assert [line for line in notes(document) if line.startswith("In bfloat16 ") and "round otherwise" in line]


def test_what_is_missing_is_said(document: dict[str, Any]) -> None:
    document["is_complete"] = False
    document["models"][0]["left_out"]["transformers:assistant"] = "no assistant"
    text = "\n".join(notes(document))
    assert "Incomplete" in text and "Left out: transformers:assistant: no assistant" in text


def test_the_cost_curve_begins_at_one(cost: dict[str, Any]) -> None:
    assert json.loads(json.dumps(cost)) == cost
    (table,) = cost["tables"]
    assert [curve["context_length"] for curve in table["rows"]] == [16, 32]
    for curve in table["rows"]:
        assert [point["num_tokens"] for point in curve["points"]] == [1, 2, 8]
        assert curve["points"][0]["ratio"]["median"] == 1.0
        assert all(point["seconds"] > 0 for point in curve["points"])
    assert "T = 8" in markdown(cost)


def test_a_context_that_does_not_fit_is_an_error(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="context_lengths"):
        measure_cost([loaded], context_lengths=(500,), rounds=2)
    with pytest.raises(ConfigError, match="begin with 1"):
        measure_cost([loaded], num_tokens=(2, 4), rounds=2)


def drafters(document: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Results by a row's name and its number of nodes."""
    (table,) = document["tables"]
    return {
        row["name"]: {int(name[1:]): point for name, point in row.items() if name != "name"} for row in table["rows"]
    }


def test_a_replay_has_a_curve_over_the_nodes(replayed: dict[str, Any]) -> None:
    assert json.loads(json.dumps(replayed)) == replayed
    rows = drafters(replayed)
    assert list(rows["prompt_lookup, 8 branches"]) == [8, 16, 32, 64]
    assert rows["prompt_lookup, chain"][10]["tokens_per_step"] > 2
    assert "transformers prompt lookup" in markdown(replayed)


def test_a_replay_takes_rows_by_name() -> None:
    records = [Record([5, 6, 5, 6], [5, 6, 5, 6])]
    names = ["prompt_lookup=[4]", "hf_specdec.methods.plain.drafter:PlainDrafter"]
    rows = drafters(replay_rows(records, names))
    assert list(rows)[1:] == names
    assert rows[names[1]][8]["tokens_per_step"] == 1.0
    with pytest.raises(ConfigError, match="must be a Drafter"):
        replay_rows(records, ["tests.bench.wrong_rows:HonestCandidates"])
    with pytest.raises(ConfigError, match="at least one"):
        replay_rows([])


def test_a_method_that_remembers_is_replayed_with_and_without() -> None:
    """Two answers that are alike: the second is drafted from the first, unless every answer stands alone."""
    records = [Record([1, 2], [3, 4, 5, 6, 7, 8]), Record([9, 2], [3, 4, 5, 6, 7, 8])]
    names = ["prompt_lookup:pool=shared", "prompt_lookup"]
    rows = drafters(replay_rows(records, names))
    assert list(rows)[1:] == [names[0], f"{names[0]}, each answer alone", names[1]]
    shared, alone, without = (rows[name][max(rows[name])]["num_steps"] for name in list(rows)[1:])
    assert shared < alone == without == 10


def test_methods_are_replayed_over_the_number_of_nodes() -> None:
    records = [Record([5, 6, 5, 6], [5, 6, 5, 6])]
    rows = drafters(replay_rows(records, ["lookahead"]))
    assert list(rows["lookahead"]) == [8, 16, 28]
    assert any(line.startswith("lookahead learns from logits") for line in notes(replay_rows(records, ["lookahead"])))
    with pytest.raises(ConfigError, match="from the text alone"):
        replay_rows(records, ["draft_model"])


def test_a_new_method_is_replayed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    added = dataclasses.replace(METHODS["prompt_lookup"], name="brand_new")
    for module in (naming, replay_rows_module):
        monkeypatch.setattr(module, "METHODS", {**METHODS, "brand_new": added})
    monkeypatch.setattr(replay_rows_module, "resolve", {**METHODS, "brand_new": added}.__getitem__)
    assert "brand_new" in drafters(replay_rows([Record([5, 6, 5, 6], [5, 6, 5, 6])]))


FIGURES = {
    "measured": {"speed_by_prompt"},
    "cost": {"cost_curve"},
    "replayed": {"tokens_per_step"},
}


@pytest.mark.at_most(1)
@pytest.mark.parametrize("kind", FIGURES)
def test_figures_are_drawn_as_png_and_svg(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("matplotlib")
    files = plot_document(request.getfixturevalue(kind), tmp_path / "figures")
    assert {file.name for file in files} == {f"{name}.{suffix}" for name in FIGURES[kind] for suffix in ("png", "svg")}
    for file in files:
        begin = b"\x89PNG" if file.suffix == ".png" else b"<?xml"
        assert file.read_bytes().startswith(begin)


def test_a_partial_document_can_be_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    """Interrupted in its first round, a run has acceptance and no speeds."""
    pytest.importorskip("matplotlib")
    for mode in document["models"][0]["summary"].values():
        for row in mode.values():
            nothing: dict[str, Any] = {base: {} for base in row["speed_against"]}
            row.update(speed={}, speed_by_processor_time=None, speed_against=nothing, tokens_per_second=None)
    assert plot_document(document, tmp_path)
    assert markdown(document)


def test_without_matplotlib_the_extra_is_named(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"hf_specdec\[bench\]"):
        plot_document(measured, tmp_path)
    assert not builtins.list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["notes.md", "notes.json", "notes.jsonl"])
def test_a_file_that_is_no_document_is_no_output(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}\n')
    with pytest.raises(ConfigError, match="must be a document of hf-specdec bench"):
        check_document_file("output", tmp_path / name)
    assert (tmp_path / name).read_text() == '{"mine": 1}\n'
