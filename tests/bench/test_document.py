"""The document is JSON of a known shape, and the tables and figures come from it alone."""

import builtins
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.bench.captions import NOT_EQUAL, facts, notes
from hf_specdec.bench.cost import measure_cost
from hf_specdec.bench.document import read_document, write_document
from hf_specdec.bench.plots import plot_document
from hf_specdec.bench.replay import Record
from hf_specdec.bench.replay_rows import replay_rows
from hf_specdec.bench.rows import REFERENCE
from hf_specdec.bench.subject import Subject
from hf_specdec.bench.tables import markdown, tables
from hf_specdec.errors import ConfigError, MissingExtraError
from tests.bench.conftest import ROWS

HEADER = {"date", "hardware", "device", "threads", "versions", "commit", "load_average"}
ENTRY = {"name", "dtype", "attention", "model", "assistant", "assistant_dtype", "peak_memory"}
ENTRY |= {"rows", "left_out", "probes", "records", "summary"}
SUMMARY = {
    "speed",
    "speed_by_processor_time",
    "speed_against",
    "tokens_per_second",
    "num_tokens",
    "first_token_seconds",
    "mean_acceptance_length",
    "acceptance_by_position",
    "drafted_per_step",
    "draft_share",
    "peak_memory_bytes",
    "share_equal",
    "plain_reasons",
}
VISIT = {"mode", "round", "prompt", "task", "turn", "row"}
COUNTED = {"num_tokens", "equal", "first_difference"}


@pytest.fixture(scope="module")
def cost(subject: Subject) -> dict[str, Any]:
    return measure_cost([subject], context_lengths=(16, 32), num_tokens=(1, 2, 8), rounds=2)


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    text = [5, 6, 7, 8, 9] * 8
    return replay_rows([Record(text[:10], text)])


def test_the_document_has_the_shape_it_promises(measured: dict[str, Any], entry: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    assert (measured["format"], measured["kind"]) == (2, "speeds")
    assert measured["header"].keys() == HEADER
    assert entry.keys() == ENTRY
    assert [row["name"] for row in entry["rows"]] == [REFERENCE, *ROWS]
    assert entry["summary"].keys() == {"greedy", "sampled"}
    for mode in entry["summary"].values():
        assert all(row.keys() == SUMMARY for row in mode.values())
        assert all(row["speed"].keys() == {"repeat", "fresh", "overall"} for row in mode.values())
    for record in entry["records"]:
        own = {"token_ids"} if record["row"] == REFERENCE else set()
        assert record.keys() == VISIT | COUNTED | own | {"seconds", "cpu_seconds", "draft_seconds", "plain_reason"}
    for probe in entry["probes"]:
        assert {"blocks", "drafted", "first_token_seconds", "peak_memory_bytes"} <= probe.keys()


def test_writing_and_reading_give_the_same(measured: dict[str, Any], tmp_path: Path) -> None:
    write_document(measured, tmp_path / "bench.json")
    assert read_document(tmp_path / "bench.json") == measured
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{", '{"kind": "speeds", "format": 1}'])
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
    document["subjects"][0]["summary"]["greedy"]["plain"]["share_equal"] = 0.5
    assert [row[-1] for row in tables(document)[0].rows] == ["-", "1.00", f"0.50 {NOT_EQUAL}", "1.00"]
    assert any(line.startswith(f"{NOT_EQUAL}: plain (greedy)") and "50%" in line for line in notes(document))


def test_what_is_missing_is_said(document: dict[str, Any]) -> None:
    document["is_complete"] = False
    document["subjects"][0]["left_out"]["transformers:assistant"] = "no assistant"
    text = "\n".join(notes(document))
    assert "Incomplete" in text and "Left out: transformers:assistant: no assistant" in text


def test_the_cost_curve_begins_at_one(cost: dict[str, Any]) -> None:
    assert json.loads(json.dumps(cost)) == cost
    (entry,) = cost["subjects"]
    assert [curve["context_length"] for curve in entry["curves"]] == [16, 32]
    for curve in entry["curves"]:
        assert [point["num_tokens"] for point in curve["points"]] == [1, 2, 8]
        assert curve["points"][0]["ratio"]["median"] == 1.0
        assert all(point["seconds"] > 0 for point in curve["points"])
    assert "T = 8" in markdown(cost)


def test_a_context_that_does_not_fit_is_an_error(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="context_lengths"):
        measure_cost([subject], context_lengths=(500,), rounds=2)
    with pytest.raises(ConfigError, match="begin with 1"):
        measure_cost([subject], num_tokens=(2, 4), rounds=2)


def test_a_replay_has_a_curve_over_the_nodes(replayed: dict[str, Any]) -> None:
    assert json.loads(json.dumps(replayed)) == replayed
    trees = replayed["drafters"]["prompt_lookup, 8 branches"]
    assert [point["num_nodes"] for point in trees] == [8, 16, 32, 64]
    assert replayed["drafters"]["prompt_lookup, chain"][0]["tokens_per_step"] > 2
    assert "transformers prompt lookup" in markdown(replayed)


def test_a_replay_takes_rows_by_name() -> None:
    records = [Record([5, 6, 5, 6], [5, 6, 5, 6])]
    names = ["prompt_lookup=[4]", "hf_specdec.drafters.plain:PlainDrafter"]
    drafters = replay_rows(records, names)["drafters"]
    assert list(drafters)[1:] == names
    assert drafters[names[1]][0]["tokens_per_step"] == 1.0
    with pytest.raises(ConfigError, match="must be a Drafter"):
        replay_rows(records, ["tests.bench.wrong_rows:HonestCandidates"])
    with pytest.raises(ConfigError, match="at least one"):
        replay_rows([])


FIGURES = {
    "measured": {"speed_by_task", "acceptance_by_position"},
    "cost": {"cost_curve"},
    "replayed": {"tokens_per_step"},
}


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
    for mode in document["subjects"][0]["summary"].values():
        for row in mode.values():
            nothing = dict.fromkeys(row["speed_against"])
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
