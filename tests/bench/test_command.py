"""`hf-specdec bench`: the table on stdout, an exit code that tells how it went, and nothing lost to an interrupt."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.tools.bench import run as run_module
from hf_specdec.tools.bench.records import read_records
from tests.bench.test_run import interrupt_after
from tests.cli.conftest import Run, run

__all__ = ["run"]
SHORT = ("--limit", "2", "--max-new-tokens", "4", "--rounds", "1", "--row", "auto", "--device", "cpu")
ROWS = ["transformers generate", "plain, same kernels", "auto"]


def test_the_embedded_target_is_measured_in_fp32_on_one_thread(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    result = run("bench", *SHORT, "--output", str(path))
    assert result.exit_code == 0, result.stderr
    header, records = read_records(path)
    assert (header["model"], header["dtype"], header["threads"]) == ("embedded", "float32", 1)
    assert len(records) == 3 * 2 * 2
    for word in (*ROWS, "overall", "tokens/step", "first token ms", "equal", "1 thread", "by the clock"):
        assert word in result.stdout


def test_records_are_shown_again_and_written_as_a_page(run: Run, tmp_path: Path) -> None:
    path, page = tmp_path / "new.jsonl", tmp_path / "new.md"
    measured = run("bench", *SHORT, "--output", str(path), "--by-cpu-time", "--against", "auto")
    shown = run("bench", "--show", str(path), "--by-cpu-time", "--against", "auto", "--page", str(page))
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == measured.stdout
    assert "by processor time" in shown.stdout and "over those of 'auto'" in shown.stdout
    assert page.read_text().startswith("# embedded, ")
    assert (tmp_path / "new.svg").is_file()


def test_an_interrupt_keeps_what_was_measured_and_the_same_command_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("bench", *SHORT, "--output", str(tmp_path / "new.jsonl"))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        stopped = run(*words)
    assert stopped.exit_code == 130
    assert "the same command goes on" in stopped.stderr
    assert all(row in stopped.stdout for row in ROWS)
    assert len(read_records(tmp_path / "new.jsonl")[1]) == 10
    finished = run(*words)
    assert finished.exit_code == 0, finished.stderr
    assert len(read_records(tmp_path / "new.jsonl")[1]) == 12


def test_no_call_begins_after_the_minutes_and_the_same_command_goes_on(run: Run, tmp_path: Path) -> None:
    """The minutes count from the beginning, loading included."""
    result = run("bench", *SHORT, "--output", str(tmp_path / "new.jsonl"), "--max-minutes", "0")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "the time is up: no round is timed yet; the same command goes on" in result.stderr
    assert read_records(tmp_path / "new.jsonl")[1] == []


@pytest.mark.parametrize(("dtype", "exit_code"), [("fp32", 1), ("bf16", 0)])
def test_other_texts_than_promised_end_with_1_in_fp32(
    run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str, exit_code: int
) -> None:
    real = run_module.measured_call

    def wrong(loaded: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        record = real(loaded, row, *args, **kwargs)
        return record | {"digest": "x"} if row.name == "auto" else record

    monkeypatch.setattr(run_module, "measured_call", wrong)
    result = run("bench", *SHORT, "--dtype", dtype)
    assert result.exit_code == exit_code, result.stderr
    assert ("error: auto gave other texts than plain decoding" in result.stderr) == (exit_code == 1)


def test_every_option_is_explained_on_one_screen(run: Run) -> None:
    shown = run("bench", "--help").stdout
    assert len(shown.splitlines()) <= 50
    assert "…" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--row", "promt_lookup"], "Did you mean 'prompt_lookup'"),
        (["--prompts", "no/such/file"], "must be an existing file or folder"),
        (["--dtype", "fp33"], "Did you mean"),
        (["--widen", "12"], "must be HIDDENxLAYERS"),
        (["--threads", "0"], "`threads` must be a whole number of at least 1"),
        (["--temperature", "0.7"], "must come with do_sample"),
        (["--against", "mtp"], "must be a row of this run"),
        (["--assistant-model", "no/such/model"], "no/such/model"),
        (["--output", "no/such/folder/x.jsonl"], "must lie in an existing folder"),
        (["--page", "results.html"], "must be a file whose name ends in .md"),
        (["--show", "prompts.jsonl"], "must be a file of records of hf-specdec bench"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_end_with_2_before_anything_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    monkeypatch.setattr(run_module, "measured_call", lambda *args, **kwargs: pytest.fail("measured"))
    result = run("bench", "--device", "cpu", "--limit", "1", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split()) + " ".join(result.output.split())
