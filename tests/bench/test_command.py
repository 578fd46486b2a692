"""`hf-specdec bench`: data on stdout, an exit code that tells how it went, and nothing lost to an interrupt."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import hf_specdec.tools.bench.document as document_module
import hf_specdec.tools.bench.model_run as run_module
from hf_specdec import embedded
from hf_specdec.common import files
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.tables import read_document
from hf_specdec.tools.cli.bench_file import DocumentFile
from tests.cli.conftest import Run, run

__all__ = ["run"]

MODEL = ("--model", embedded.path("target"))
BENCH = ("bench", "--limit", "2", "--max-new-tokens", "4", "--rounds", "1", "--row", "plain", "--no-do-sample")


def bench(run: Run, *words: str, exit_code: int = 0) -> dict[str, Any]:
    result = run(*BENCH, *words, "--json")
    assert result.exit_code == exit_code, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two prompts of a line, for what any prompts show."""
    file = tmp_path_factory.mktemp("prompts") / "short.jsonl"
    prompts = [{"id": text, "task": "text", "turns": [text]} for text in ("import os\n", "def add(a, b):\n")]
    file.write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    return "--prompts", str(file)


def entry_of(document: dict[str, Any]) -> dict[str, Any]:
    (entry,) = document["models"]
    return dict(entry)


def test_the_embedded_target_is_measured_in_fp32_on_one_thread(run: Run) -> None:
    document = bench(run)
    entry = entry_of(document)
    assert entry["name"] == entry["model"]["name"] == "embedded target"
    assert entry["dtype"] == "float32"
    assert document["header"]["threads"] == 1 or document["header"]["device"] != "cpu"
    assert entry["summary"]["greedy"]["plain"]["share_equal"] == 1.0


@pytest.mark.wide
def test_weights_on_disk_are_measured_where_they_are_brought(run: Run, tmp_path: Path, short: tuple[str, str]) -> None:
    spread = {"model.layers.1": "disk"} | {f"model.layers.{i}": "cpu" for i in (0, 2, 3, 4, 5)}
    parts = spread | dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    words = ("--device-map", json.dumps(parts), "--offload-folder", str(tmp_path), "--row", "eagle3")
    document = bench(run, *words, *short)
    entry = entry_of(document)
    assert (document["header"]["device"], entry["model"]["devices"]) == ("cpu", ["cpu", "disk"])
    assert entry["summary"]["greedy"]["eagle3"]["share_equal"] == 1.0


@pytest.mark.wide
def test_the_attention_is_the_user_s_choice_widened_or_not(run: Run) -> None:
    sizes = ("--widen", "native", "--widen", "512x7")
    document = bench(run, *sizes, "--attn-implementation", "eager")
    assert [entry["attention"] for entry in document["models"]] == ["eager", "eager"]
    result = run(*BENCH, "--attn-implementation", "flash_attention_2")
    assert result.exit_code == 2
    assert "`--attn-implementation` must be an attention that is here" in result.stderr


@pytest.mark.wide
def test_without_a_choice_both_modes_and_every_row_are_measured(run: Run) -> None:
    result = run("bench", "--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.stderr
    entry = entry_of(json.loads(result.stdout))
    assert list(entry["summary"]) == ["greedy", "sampled"]
    assert {"generate", "transformers:prompt_lookup", "transformers:assistant", "plain", "prompt_lookup"} <= set(
        entry["summary"]["greedy"]
    )


@pytest.mark.wide
def test_the_table_and_markdown_show_the_rows(run: Run) -> None:
    for words in ((), ("--markdown",)):
        result = run(*BENCH, *words)
        assert result.exit_code == 0, result.stderr
        for word in ("generate", "plain", "overall", "tokens/s", "embedded target", "equal"):
            assert word in result.stdout


def test_long_names_cut_no_figures(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"prompt_ids": [1, 2, 3], "answer_ids": [4, 1, 2, 3, 4]}) + "\n", encoding="utf-8")
    row = "prompt_lookup:num_branches=8,max_nodes=64,max_matching_ngram_size=4,max_draft_len=12,pool=request"
    result = run("bench", "--replay", str(file), "--row", row)
    assert result.exit_code == 0, result.stderr
    assert row in result.stdout and "…" not in result.stdout


def test_a_wrong_row_is_flagged_and_ends_with_1(run: Run, short: tuple[str, str]) -> None:
    wrong = "tests.bench.wrong_rows:WrongContext"
    assert entry_of(bench(run, *short, "--row", wrong, exit_code=1))["summary"]["greedy"][wrong]["share_equal"] < 1
    result = run(*BENCH, *short, "--row", wrong)
    assert result.exit_code == 1
    assert "NOT EQUAL" in result.stdout and "NOT EQUAL" in result.stderr


def test_an_interrupt_keeps_what_was_measured_and_resume_goes_on(
    run: Run, short: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    calls = 0
    real = run_module.measured_call

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "measured_call", interrupted)
        partial = bench(run, *short, "--output", str(file), exit_code=130)
    assert not partial["is_complete"] and len(entry_of(partial)["records"]) == 6
    assert json.loads(file.read_text()) == partial
    whole = bench(run, *short, "--resume", str(file))
    assert whole["is_complete"] and len(entry_of(whole)["records"]) == 8
    assert entry_of(whole)["records"][:6] == entry_of(partial)["records"]
    assert json.loads(file.read_text()) == whole


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", ["bench.json", "bench.jsonl"])
def test_a_run_that_measures_nothing_leaves_an_earlier_document_alone(
    run: Run, short: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    bench(run, *short, "--output", str(tmp_path / name))
    before = (tmp_path / name).read_bytes()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "measured_call", interrupted)
    assert run(*BENCH, *short, "--output", str(tmp_path / name)).exit_code != 0
    assert (tmp_path / name).read_bytes() == before


def full(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_written_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk that is full by the time that there is something to write."""
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"prompt_ids": [1, 2, 3], "answer_ids": [4, 1, 2, 3, 4]}) + "\n", encoding="utf-8")
    monkeypatch.setattr(document_module, "replacing", full)
    words = ("--replay", str(answers), "--row", "prompt_lookup", "--output", str(tmp_path / "bench.json"))
    result = run("bench", *words, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["kind"] == "replay"
    assert "`--output` must be a file that can be written" in result.stderr
    assert "No space left on device. The tables above hold what was measured" in result.stderr


@pytest.mark.wide
@pytest.mark.parametrize("name", ["bench.json", "bench.jsonl"])
def test_a_run_goes_on_while_its_file_cannot_be_written(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    file = DocumentFile(tmp_path / name, "output")
    with monkeypatch.context() as patch:
        patch.setattr(document_module, "replacing", full)
        file.save(document)
        file.close(document)
        with pytest.raises(ConfigError, match="`output` must be a file that can be written"):
            file.check()
    file.close(document)
    file.check()
    assert read_document(tmp_path / name) == document


@pytest.mark.parametrize("option", ["--output", "--resume", "--plot", "--page"])
def test_a_place_that_takes_no_files_is_refused_before_anything_is_measured(
    run: Run, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    place = str(tmp_path / "results" if option == "--plot" else tmp_path / "bench.md")
    result = run(*BENCH, option, place)
    assert result.exit_code == 2
    assert f"`{option}` must be where files can be written, but is {place!r}." in result.stderr
    assert "hint: No space left on device. Choose another folder." in result.stderr


@pytest.mark.wide
def test_a_journal_is_continued_like_a_document(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    calls = 0
    real = run_module.measured_call

    def killed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise RuntimeError("no time to say how it ended")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "measured_call", killed)
        assert run(*BENCH, "--output", str(file)).exit_code != 0
    assert len(entry_of(read_document(file))["records"]) == 6
    whole = bench(run, "--resume", str(file))
    assert whole["is_complete"] and len(entry_of(whole)["records"]) == 8
    assert read_document(file) == whole


@pytest.mark.wide
def test_random_tokens_and_any_row_to_compare_with(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ("--random-tokens", "2x16", "--limit", "1", "--output", str(file))
    document = bench(run, *words, "--against", "plain")
    assert [prompt["task"] for prompt in document["prompts"]][1:] == ["random tokens"] * 2
    row = entry_of(document)["summary"]["greedy"]["generate"]
    assert row["speed_against"]["plain"]["random tokens"]["count"] == 2
    shown = run("bench", "--show", str(file), "--against", "generate", "--markdown")
    assert "over generate" in shown.stdout and "over plain" not in shown.stdout


@pytest.mark.wide
def test_a_document_is_shown_and_drawn_without_measuring(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.json"
    document = bench(run, "--output", str(file))
    result = run("bench", "--show", str(file), "--json", "--plot", str(tmp_path / "figures"))
    assert json.loads(result.stdout) == document
    assert len(list((tmp_path / "figures").iterdir())) == 4


def test_a_document_that_is_shown_is_written_in_the_form_of_its_name(
    run: Run, measured: dict[str, Any], cost: dict[str, Any], tmp_path: Path
) -> None:
    for name, document in (("speeds.json", measured), ("cost.json", cost)):
        (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")
    lines = tmp_path / "speeds.jsonl"
    show = ("bench", "--json", "--show")
    shown = run(*show, str(tmp_path / "speeds.json"), "--against", "plain", "--output", str(lines))
    assert shown.exit_code == 0 and json.loads(shown.stdout) == read_document(lines)
    assert read_document(lines)["against"] == ["plain"]
    assert run(*show, str(tmp_path / "cost.json"), "--output", str(tmp_path / "cost.jsonl")).exit_code == 0
    assert read_document(tmp_path / "cost.jsonl") == cost


def test_prompts_come_from_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("import os\n", encoding="utf-8")
    assert bench(run, "--prompts", str(tmp_path / "p.txt"))["prompts"] == [{"id": "p.txt", "task": "text"}]


@pytest.mark.wide
def test_widening_says_how_far_the_logits_moved(run: Run) -> None:
    result = run(*BENCH, "--widen", "320x7", "--dtype", "bf16", "--json")
    assert result.exit_code == 0, result.stderr
    assert "largest difference of the logits" in result.stderr
    entry = entry_of(json.loads(result.stdout))
    assert entry["model"]["widening"]["largest_logit_difference"] < 1e-3
    assert entry["dtype"] == "bfloat16"


@pytest.mark.wide
def test_batches_are_tasks_of_a_run(run: Run) -> None:
    summary = entry_of(bench(run, "--batch-size", "2"))["summary"]["greedy"]
    assert summary["plain"]["speed"].keys() == {"2 rows", "overall"}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--row", "promt_lookup"), "prompt_lookup"),
        (("--prompts", "missing.jsonl"), "existing file"),
        (("--widen", "wide"), "HIDDENxLAYERS"),
        (("--dtype", "fp99"), "must be one of"),
        (("--device", "nowhere"), "device"),
        (("--device-map", "cpu", "--device", "cpu"), "`--device` must be left out next to a device map"),
        (("--device-map", "cpu", "--widen", "320x7"), "`--widen` must be left out next to a device map"),
        (("--max-memory", '{"cpu": "1GB"}'), "must come with --device-map"),
        (
            ("--row", "prompt_lookup=[10"),
            "error: `--row` must be a list or dict in the notation of Python or JSON, but",
        ),
        (("--row", "prompt_lookup:foo=3"), "error: `--row key` must be one of 'device_list', 'draft_len_per_match',"),
        (("--row", "prompt_lookup=[0]"), "error: `--row max_draft_len` must be a whole number of at least 1"),
        (("--row", "auto={'costs': 'none.json'}"), "error: `--row costs` must be a file that can be read, but is"),
        (("--row", "auto+head", *MODEL), "error: `--row auto+head` must have a draft head, but is None."),
        (("--lookahead-config", "[0,1,1]"), "error: `--lookahead-config window_size` must be a whole number"),
        (("--head", embedded.path("draft")), "error: `--head` must be a draft head, or a checkpoint of LlamaForC"),
        (("--attn-implementation", "spda"), "'sdpa', 'xformers', but is 'spda'.\nhint: Did you mean 'sdpa'?"),
        (
            ("--resume", "missing.json"),
            "error: `--resume` must be a document of hf-specdec bench, but is 'missing.json'.\n"
            "hint: There is no such file. Check the spelling.\n",
        ),
        (
            ("--resume", "held.md"),
            "error: `--resume` must be a document of hf-specdec bench, but is 'held.md'.\nhint: Ch",
        ),
        (("--plot", "held.md"), "figures in a folder, but is 'held.md'."),
        (("--page", "held.md.md"), "figures in a folder, but is 'held.md.md'.\nhint: 'held.md' is a file."),
        (("--page", "."), "ends in .md"),
        (("--page", "results"), "ends in .md"),
        (("--output", "missing/bench.json"), "existing folder"),
        (("--against", "plan"), "Did you mean 'plain'"),
        (("--random-tokens", "8"), "COUNTxLENGTH"),
        (("--random-tokens", "0x64"), "at least 1"),
        (("--batch-size", "9"), "must be at most 2, the number of prompts"),
    ],
)
def test_mistakes_end_with_2_and_a_reason(
    run: Run, words: tuple[str, ...], match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.md").touch()
    result = run(*BENCH, *words)
    assert result.exit_code == 2, result.output
    assert match in result.stderr
