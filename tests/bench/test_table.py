"""Tables, pages and figures come from records alone."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.tools.bench.page import draw_speeds, page_text, write_page
from hf_specdec.tools.bench.records import Records
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS, Row
from hf_specdec.tools.bench.table import notes, show, speed_table, speeds_by_prompt, unequal_rows
from tests.bench.conftest import ROWS


def record(row: str, prompt: str, number: int, seconds: float, **fields: Any) -> dict[str, Any]:
    times = {"seconds": seconds, "cpu_seconds": seconds / 2, "num_tokens": 10, "digest": prompt}
    return {"row": row, "prompt": prompt, "task": prompt[0], "round": number, **times, **fields}


def watched(row: str, prompt: str, num_steps: int, first: float) -> dict[str, Any]:
    return record(row, prompt, 0, 9.0, num_steps=num_steps, num_step_tokens=10, first_token_seconds=first)


RECORDS = [
    *(watched(TRANSFORMERS, prompt, 10, 0.2) for prompt in ("a1", "a2", "b1")),
    *(watched("auto", prompt, 4, 0.1) for prompt in ("a1", "a2", "b1")),
    *(record(TRANSFORMERS, prompt, number, 1.0) for prompt in ("a1", "a2", "b1") for number in (1, 2, 3)),
    *(record("auto", "a1", number, seconds) for number, seconds in ((1, 0.5), (2, 0.5), (3, 0.1))),
    *(record("auto", "a2", number, 0.25) for number in (1, 2, 3)),
    *(record("auto", "b1", number, 2.0, cpu_seconds=0.25) for number in (1, 2, 3)),
]


def test_a_speed_is_the_median_of_rounds_and_then_of_prompts() -> None:
    table = speed_table(RECORDS)
    assert list(table.columns) == ["a", "b", "overall", "least", "tokens/s", "tokens/step", "first token ms"]
    assert table.loc["auto", ["a", "b", "overall", "least"]].tolist() == [3.0, 0.5, 2.0, 0.5]
    assert table.loc[TRANSFORMERS, ["a", "b", "overall", "least"]].tolist() == [1.0] * 4
    assert table["tokens/s"]["auto"] == pytest.approx(90 / (0.5 + 0.5 + 0.1 + 0.75 + 6.0))
    assert table.loc["auto", ["tokens/step", "first token ms"]].tolist() == [2.5, 100.0]
    assert speeds_by_prompt(RECORDS)["auto"].tolist() == [2.0, 4.0, 0.5]


def test_speeds_are_of_processor_time_or_against_any_row_on_request() -> None:
    assert speed_table(RECORDS, by_cpu_time=True)["b"]["auto"] == 2.0
    assert speed_table(RECORDS, against="auto").loc[TRANSFORMERS, ["a", "b"]].tolist() == [0.375, 2.0]
    with pytest.raises(ConfigError, match="`against` must be one of"):
        speed_table(RECORDS, against="lookahead")


def test_one_task_needs_no_column() -> None:
    assert list(speed_table(RECORDS[-3:] + RECORDS[12:15]))[:2] == ["overall", "least"]


def test_texts_are_compared_with_plain_ones_of_the_same_round() -> None:
    plain = [{**record, "row": PLAIN} for record in RECORDS if record["row"] == TRANSFORMERS]
    other = [
        {**record, "digest": "x"} if record["round"] == 3 and record["prompt"] == "a1" else record for record in plain
    ]
    assert speed_table([*RECORDS, *plain])["equal"].tolist() == [1.0, 1.0, 1.0]
    table = speed_table([*RECORDS, *other])
    assert table["equal"].round(2).to_dict() == {TRANSFORMERS: 0.67, "auto": 0.67, PLAIN: 1.0}


def test_a_row_is_held_to_what_it_promises() -> None:
    """In half precision near ties may fall either way; not every row has a seed's text."""
    plain = [{**record, "row": PLAIN, "digest": "x"} for record in RECORDS if record["row"] == TRANSFORMERS]
    table, exact, drawn = speed_table([*RECORDS, *plain]), Row("auto"), Row("auto", is_seed_exact=False)
    assert unequal_rows(table, [exact, Row(PLAIN)], dtype="float32", do_sample=False) == ["auto"]
    assert unequal_rows(table, [exact], dtype="float32", do_sample=True) == ["auto"]
    assert unequal_rows(table, [drawn], dtype="float32", do_sample=False) == ["auto"]
    assert not unequal_rows(table, [drawn], dtype="float32", do_sample=True)
    assert not unequal_rows(table, [exact], dtype="bfloat16", do_sample=False)


def test_what_was_refused_or_not_drafted_is_said_below() -> None:
    refused = {"row": "theirs", "task": "a", "prompt": "a1", "round": 1, "error": "batches of one"}
    plain = [{**record, "plain_reason": "no trees"} for record in RECORDS if record["row"] == "auto"]
    assert list(speed_table([*RECORDS, refused]).index) == [TRANSFORMERS, "auto"]
    columns, *reasons = notes([*plain, refused], by_cpu_time=True)
    assert "by processor time" in columns
    assert reasons == ["auto decoded without drafts: no trees", "theirs refuses a: batches of one"]


def test_a_table_is_printed_in_parts_where_the_terminal_is_narrow() -> None:
    wide, narrow = show(speed_table(RECORDS)), show(speed_table(RECORDS), 60)
    assert len(wide.splitlines()) == 3
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split()[-1] == wide.split()[-1] == "100.00"


def test_a_page_has_header_figure_table_and_notes(measured: Records, tmp_path: Path) -> None:
    page, picture = write_page(tmp_path / "new" / "mine.md", measured.header, measured.records, by_cpu_time=True)
    text = page.read_text("utf-8")
    assert text == page_text(picture.name, measured.header, measured.records, by_cpu_time=True)
    assert text.startswith("# tiny, ")
    assert f"hf_specdec {measured.header['versions']['hf_specdec']}" in text
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", text) == ["mine.svg"]
    for row in (TRANSFORMERS, PLAIN, *ROWS):
        assert re.search(rf"^\| {re.escape(row)} +\|", text, re.M)
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert "<dc:date>" not in drawn


def test_the_figure_has_a_dot_for_each_prompt(measured: Records) -> None:
    (axes,) = draw_speeds(measured.records).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [TRANSFORMERS, PLAIN, *ROWS]
    assert [len(dots.get_offsets()) for dots in axes.collections] == [3] * 4


@pytest.mark.parametrize("module", ["pandas", "matplotlib.figure", "tabulate"])
def test_without_a_package_its_extra_is_named(
    module: str, measured: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module.partition('.')[0]}.*hf_specdec\[bench\]"):
        write_page(tmp_path / "page.md", measured.header, measured.records)
    assert not list(tmp_path.iterdir())
