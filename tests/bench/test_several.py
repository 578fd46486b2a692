"""Several models in one run take turns on each prompt, and each keeps what it would have alone."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
import hf_specdec.tools.bench.model_run as model_run
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.cost import measure_cost
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import NOT_EQUAL, flagged
from hf_specdec.tools.bench.tables import facts, markdown, notes, tables
from tests.bench.conftest import PROMPTS, tiny_llama
from tests.cli.conftest import Run, run

__all__ = ["run"]

SETTINGS = BenchSettings(max_new_tokens=4, rounds=1)
ROWS = ("default",)
TIMES = {"seconds", "cpu_seconds", "draft_seconds", "first_token_seconds", "peak_memory_bytes"}
LEARNING = {"draft_model"}  # drafts by what was accepted since the round began; an interrupt makes it begin anew
CLOCKED = {"auto"}  # drafts as much as pays, by the clock
COUNTS = {
    False: set[str](),
    True: {"blocks", "drafted", "num_accepted_tokens", "num_draft_tokens", "num_drafts", "predictions", "reliability"},
}


def untimed(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without what differs from run to run."""
    records = [
        {name: value for name, value in record.items() if name not in (TIMES | COUNTS[record["row"] in CLOCKED])}
        for record in entry["records"]
    ]
    return {**{name: entry[name] for name in ("name", "dtype", "model", "rows", "left_out")}, "records": records}


def unlearned(entry: dict[str, Any]) -> dict[str, Any]:
    """The same without what depends on earlier calls: how many tokens a row that learns has drafted."""
    kept = untimed(entry)
    for record in kept["records"]:
        if record["row"] in LEARNING:
            for name in ("blocks", "drafted", "num_draft_tokens"):
                record.pop(name, None)
    return kept


@pytest.fixture(scope="module")
def models(loaded: LoadedModel) -> list[LoadedModel]:
    """One with an assistant and one of another size without."""
    model = hf_specdec.enable(tiny_llama(len(loaded.tokenizer), hidden_size=48, num_hidden_layers=1))
    assistant = tiny_llama(len(loaded.tokenizer), num_hidden_layers=1)
    helped = dataclasses.replace(loaded, assistant=assistant, assistant_name="tinier")
    return [helped, LoadedModel(model=model, tokenizer=loaded.tokenizer, name="other")]


@pytest.fixture(scope="module")
def both(models: list[LoadedModel]) -> dict[str, Any]:
    """The document of a run over one prompt; take a copy to change it."""
    return Bench(models, PROMPTS[:1], SETTINGS, rows=ROWS).run()


@pytest.fixture(scope="module")
def whole(models: list[LoadedModel]) -> dict[str, Any]:
    """The document of a run over all prompts."""
    return Bench(models, PROMPTS, SETTINGS, rows=ROWS).run()


@pytest.fixture
def document(both: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(both)


def test_models_take_turns_on_each_prompt(models: list[LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = model_run.measured_call

    def listen(loaded: LoadedModel, *args: Any, **kwargs: Any) -> Any:
        seen.append(loaded.name)
        return real(loaded, *args, **kwargs)

    monkeypatch.setattr(model_run, "measured_call", listen)
    settings = BenchSettings(max_new_tokens=4, rounds=1, modes=("greedy",))
    Bench(models, PROMPTS, settings, rows=["plain"]).run()
    num_visits = 1 + 2 * sum(len(prompt.turns) for prompt in PROMPTS)  # the warm-up is one more
    assert seen == ["tiny", "tiny", "other", "other"] * num_visits


@pytest.mark.wide
def test_each_model_has_the_records_it_would_have_alone(models: list[LoadedModel], whole: dict[str, Any]) -> None:
    alone = [Bench([loaded], PROMPTS, SETTINGS, rows=ROWS).run()["models"][0] for loaded in models]
    assert [untimed(entry) for entry in whole["models"]] == [untimed(entry) for entry in alone]
    assert json.loads(json.dumps(whole)) == whole


@pytest.mark.wide
def test_rows_are_those_that_each_model_allows(both: dict[str, Any]) -> None:
    one, other = both["models"]
    assert "transformers:assistant" in one["summary"]["greedy"] and set(one["left_out"]) == {"eagle3", "mtp", "dflash"}
    assert "transformers:assistant" not in other["summary"]["greedy"]
    assert any(line.startswith("Left out of other: transformers:assistant: ") for line in notes(both))


@pytest.mark.wide
@pytest.mark.parametrize("after", [3, 13, 40])
def test_an_interrupt_between_models_loses_nothing(
    models: list[LoadedModel], whole: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, calls = Bench(models, PROMPTS, SETTINGS, rows=ROWS), 0
    kept: list[dict[str, Any]] = []
    real = model_run.measured_call

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after + sum(len(run.rows) for run in first.runs):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model_run, "measured_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run(save=kept.append)
    assert not first.document["is_complete"]
    assert bool(kept) == any(entry["records"] for entry in first.document["models"])
    assert markdown(first.document)
    resumed = Bench(models, PROMPTS, SETTINGS, rows=ROWS, document=first.document).run()
    assert resumed["is_complete"]
    assert [unlearned(entry) for entry in resumed["models"]] == [unlearned(entry) for entry in whole["models"]]


def test_other_models_do_not_continue_a_run(models: list[LoadedModel], document: dict[str, Any]) -> None:
    for others in (models[:1], models[::-1]):
        with pytest.raises(ConfigError, match="same models"):
            Bench(others, PROMPTS[:1], SETTINGS, rows=ROWS, document=document)
    document["models"][1]["model"]["parameters"] += 1
    with pytest.raises(ConfigError, match="same model,"):
        Bench(models, PROMPTS[:1], SETTINGS, rows=ROWS, document=document)


def test_tables_name_the_model_and_the_last_sets_them_side_by_side(both: dict[str, Any]) -> None:
    found = tables(both)
    titles = [table.title for table in found if table.title]
    sampled = "sampled, temperature 0.7, seed 0"
    assert titles[:4] == ["tiny: greedy", f"tiny: {sampled}", "other: greedy", f"other: {sampled}"]
    assert titles[4:] == ["overall by model: greedy", f"overall by model: {sampled}"]
    last = found[-1]
    assert last.headings == ["", "tiny", "other"]
    by_name = {name: cells for name, *cells in last.rows}
    assert by_name[REFERENCE] == ["1.00", "1.00"]
    assert by_name["transformers:assistant"][1] == "-" and by_name["transformers:assistant"][0] != "-"
    assert all(len(row) == len(table.headings) for table in found for row in table.rows)
    lines = facts(both)
    assert "float32" in lines[0] and [line.split(" ")[0] for line in lines[1:3]] == ["tiny", "other"]


def test_different_precisions_are_said_for_each_model(document: dict[str, Any]) -> None:
    document["models"][1]["dtype"] = "bfloat16"
    lines = facts(document)
    assert "float32" not in lines[0] and "float32" in lines[1] and "bfloat16" in lines[2]


def test_a_wrong_row_is_flagged_on_the_model_where_it_is_wrong(document: dict[str, Any]) -> None:
    document["models"][1]["summary"]["greedy"]["plain"]["share_equal"] = 0.5
    assert flagged(document) == [("other", "greedy", "plain", 0.5)]
    marked = [(table.title, row[0]) for table in tables(document) for row in table.rows if NOT_EQUAL in "".join(row)]
    assert marked == [("other: greedy", "plain"), ("overall by model: greedy", "plain")]
    assert any(line.startswith(f"{NOT_EQUAL}: plain (other: greedy)") for line in notes(document))
    document["models"][1]["dtype"] = "bfloat16"
    assert not flagged(document)


@pytest.mark.wide
def test_figures_show_all_models_and_what_an_interrupt_left(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert len(plot_document(document, tmp_path)) == 4
    del document["models"][1]["summary"]["sampled"]
    assert len(plot_document(document, tmp_path)) == 4
    assert markdown(document)


def test_each_model_has_its_cost_curves(models: list[LoadedModel], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cost = measure_cost(models, context_lengths=(8, 16), num_tokens=(1, 2), rounds=1)
    assert [[curve["context_length"] for curve in table["rows"]] for table in cost["tables"]] == [[8, 16]] * 2
    found = {table.title: [row[0] for row in table.rows] for table in tables(cost)}
    assert found == {f"{name}: t(T) / t(1)": ["context of 8", "context of 16"] for name in ("tiny", "other")}
    assert len(plot_document(cost, tmp_path)) == 2


def test_models_must_be_told_apart(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="labels of their own"):
        Bench([loaded, loaded], PROMPTS, SETTINGS)
    with pytest.raises(ConfigError, match="at least one"):
        measure_cost([])


@pytest.fixture(scope="module")
def folders(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints."""
    found = []
    for layers in (1, 2):
        folder = str(tmp_path_factory.mktemp("models") / f"layers_{layers}")
        tiny_llama(len(loaded.tokenizer), num_hidden_layers=layers).save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        found.append(folder)
    return found


@pytest.mark.wide
def test_the_command_measures_every_model_at_every_size(run: Run, folders: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", "--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--no-do-sample", "--row", "plain"]
    words += [word for folder in folders for word in ("--model", folder)]
    words += ["--widen", "native", "--widen", "64x3", "--widen", "native"]
    result = run(*words, "--output", str(file), "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("widened to 64x3") == 2
    document = json.loads(result.stdout)
    labels = [label for folder in folders for label in (folder, f"{folder}, 64x3")]
    assert [entry["name"] for entry in document["models"]] == labels
    assert ["widening" in entry["model"] for entry in document["models"]] == [False, True] * 2
    assert all(len(entry["records"]) == 4 for entry in document["models"])
    more = run(*words, "--resume", str(file), "--rounds", "2", "--json")
    assert [len(entry["records"]) for entry in json.loads(more.stdout)["models"]] == [6] * 4
    shown = run("bench", "--show", str(file), "--markdown")
    assert shown.exit_code == 0 and shown.stdout.count(f"**{labels[1]}: greedy**") == 1


def test_a_wrong_row_on_any_model_ends_with_1(run: Run, folders: list[str]) -> None:
    words = ["--limit", "1", "--max-new-tokens", "4", "--rounds", "1", "--no-do-sample"]
    words += ["--model", folders[0], "--model", folders[1], "--row", "tests.bench.wrong_rows:WrongContext"]
    result = run("bench", *words)
    assert result.exit_code == 1
    assert "overall by model: greedy" in result.stdout and NOT_EQUAL in result.stdout
