"""`hf-specdec bench` for what is measured instead of speeds: documents, interrupts, and what is refused."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench import cost, many, replay_rows, steps
from hf_specdec.tools.bench.document import write_document
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.tables import markdown, notes, read_document
from hf_specdec.tools.cli import bench_models
from tests.cli.conftest import Run, run

__all__ = ["run"]

ANSWER = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 1, 2, 3, 4]}
KINDS: dict[str, tuple[str, ...]] = {
    "cost": ("--cost", "--rounds", "1", "--context-length", "16", "--context-length", "24"),
    "many": ("--many", "--limit", "2", "--max-new-tokens", "4", "--batch-size", "1", "--batch-size", "2"),
    "steps": ("--steps", "--limit", "2", "--context-length", "64", "--context-length", "96"),
    "replay": ("--replay", "answers.jsonl", "--row", "prompt_lookup", "--row", "lookahead"),
}
PARTS: dict[str, tuple[Any, str]] = {
    "cost": (cost, "_points"),
    "many": (many, "_measured"),
    "steps": (steps, "_row"),
    "replay": (replay_rows, "_results"),
}  # what measures one entry of a document


@pytest.fixture
def tiny(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model for every command, and recorded answers in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text(json.dumps(ANSWER) + "\n", encoding="utf-8")
    monkeypatch.setattr(bench_models, "load_model", lambda *args, **kwargs: loaded)


def interrupting(real: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, interrupted at the call after so many."""
    calls: Iterator[int] = iter(range(after))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return call


def entries(document: dict[str, Any]) -> int:
    """How many rows of its last table a document has."""
    rows = document["tables"][-1]["rows"]
    return len(rows) - (document["kind"] == "replay")  # transformers' rule is one more


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_keeps_what_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In the document that is printed and in the file; its tables say that it is incomplete."""
    module, name = PARTS[kind]
    monkeypatch.setattr(module, name, interrupting(getattr(module, name), 1))
    result = run("bench", *KINDS[kind], "--output", "bench.json", "--json")
    assert result.exit_code == 130
    assert "interrupted: what has been measured follows\n" in result.stderr
    document = json.loads(result.stdout)
    assert (document["kind"], document["is_complete"], entries(document)) == (kind, False, 1)
    assert read_document("bench.json") == document
    shown = run("bench", "--show", "bench.json")
    assert shown.exit_code == 130 and "Incomplete: the run was interrupted." in shown.stdout


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "steps"])
def test_an_interrupt_before_anything_was_measured_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module, name = PARTS[kind]
    monkeypatch.setattr(module, name, interrupting(getattr(module, name), 0))
    result = run("bench", *KINDS[kind], "--output", "bench.json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted\n"
    assert not Path("bench.json").exists()


@pytest.mark.parametrize(("after", "curves"), [(1, [1]), (2, [2]), (3, [2, 1])])
def test_a_model_without_a_curve_is_left_out_of_what_is_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, after: int, curves: list[int]
) -> None:
    models = [loaded, dataclasses.replace(loaded, name="other")]
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(cost, "_points", interrupting(cost._points, after))
    with pytest.raises(KeyboardInterrupt):
        cost.measure_cost(models, context_lengths=(8, 16), num_tokens=(1, 2), rounds=1, save=kept.append)
    assert [len(table["rows"]) for table in kept[-1]["tables"]] == curves
    assert len(kept[-1]["models"]) == len(curves)
    assert len(kept) == after and markdown(kept[-1])


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", ["cost", "many", "steps", "replay"])
def test_a_whole_measurement_is_complete(run: Run, kind: str) -> None:
    result = run("bench", *KINDS[kind], "--output", "bench.json", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["is_complete"] and read_document("bench.json") == document
    assert not any(line.startswith("Incomplete") for line in notes(document))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("kind", ["many", "steps"])
def test_figures_of_what_has_none_are_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delattr(bench_models, "load_model")
    result = run("bench", *KINDS[kind], "--plot", "figures", "--page", "page.md")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: `--plot` must be left out with a document of kind {kind}, but is 'figures'." in result.stderr
    assert "hint: There are figures of speeds, replay, cost; --page writes the tables" in result.stderr
    assert not Path("figures").exists()


@pytest.mark.usefixtures("tiny")
def test_figures_of_a_document_without_any_are_refused_before_a_folder_is_made(run: Run, loaded: LoadedModel) -> None:
    document = many.measure_many(loaded, [], [])
    write_document(document, "many.json")
    result = run("bench", "--show", "many.json", "--plot", "figures")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: `--plot` must be left out with a document of kind many, but is 'figures'." in result.stderr
    with pytest.raises(ConfigError, match="`document` must be of kind speeds, replay, cost, but is 'many'"):
        plot_document(document, "figures")
    assert not Path("figures").exists()


def test_the_cost_curve_of_this_machine(run: Run) -> None:
    result = run("bench", "--cost", "--rounds", "1", "--context-length", "32", "--json")
    assert result.exit_code == 0, result.stderr
    ((curve,),) = (table["rows"] for table in json.loads(result.stdout)["tables"])
    assert [point["num_tokens"] for point in curve["points"]] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.wide
def test_generate_many_and_precisions_and_steps_have_documents(run: Run, tmp_path: Path) -> None:
    def document(*words: str) -> dict[str, Any]:
        result = run("bench", "--limit", "2", *words, "--json")
        assert result.exit_code == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    file = tmp_path / "bench.json"
    found = document("--many", "--batch-size", "2", "--row", "plain", "--max-new-tokens", "4", "--output", str(file))
    assert [row["num_equal"] for row in found["tables"][0]["rows"]] == [2] and read_document(file) == found
    greedy = ("--row", "plain", "--max-new-tokens", "4", "--rounds", "1", "--no-do-sample")
    entries = document("--dtype", "fp32", "--dtype", "fp8", *greedy)["models"]
    assert [(entry["name"], entry["dtype"]) for entry in entries] == [
        ("embedded target, fp32", "float32"),
        ("embedded target, fp8", "fp8"),
    ]
    assert entries[0]["model"]["bytes"] > 2 * entries[1]["model"]["bytes"]
    lengths, auto, _ = document("--steps", "--context-length", "64")["tables"]
    assert [row["context_length"] for row in lengths["rows"]] == [64]
    assert [row["num_nodes"] for row in auto["rows"]] == [8, 16, 32, 64]
    shown = run("bench", "--show", str(file))
    assert "over plain batches" in shown.stdout and "2 of 2" in shown.stdout


@pytest.mark.usefixtures("tiny")
def test_recorded_answers_are_replayed(run: Run) -> None:
    result = run("bench", "--replay", "answers.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    assert "prompt_lookup, chain" in [row["name"] for row in json.loads(result.stdout)["tables"][0]["rows"]]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--cost", "--resume", "x.json"), "must be left out with --cost"),
        (("--cost", "--context-length", "4000"), "positions"),
        (("--cost", "--many"), "must be left out with --cost"),
        (("--many", "--dtype", "fp32", "--dtype", "bf16"), "must be given once"),
        (("--many", "--widen", "native", "--widen", "320x7"), "must be given once"),
    ],
)
def test_mistakes_end_with_2_and_a_reason(run: Run, words: tuple[str, ...], match: str) -> None:
    result = run("bench", *words)
    assert result.exit_code == 2, result.output
    assert match in result.stderr
