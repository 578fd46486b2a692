"""Batches are measured like single prompts, `generate_many` against plain batches, and other tokens are noticed."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import hf_specdec
from hf_specdec import AutoSpecConfig
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.method import memory_in_use
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench import model_run
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.many import measure_many
from hf_specdec.tools.bench.plan import WATCHED_ROUND, BenchSettings
from hf_specdec.tools.bench.prompts import Prompt, batched
from hf_specdec.tools.bench.rows import REFERENCE
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.tables import tables

PROMPTS = [
    Prompt(str(number), "code", (text,))
    for number, text in enumerate(("a = 1\nb = 2\na = 1\nb =", "import os\n", "def f(x):\n    return", "x = [1, 1, 1,"))
]
GREEDY = BenchSettings(max_new_tokens=8, rounds=1, modes=("greedy",))


@pytest.fixture(scope="module")
def entry(loaded: LoadedModel) -> dict[str, Any]:
    rows = ["transformers:prompt_lookup", "plain", "prompt_lookup"]
    document = Bench([loaded], batched(PROMPTS, [1, 2]), GREEDY, rows=rows).run()
    found: dict[str, Any] = document["models"][0]
    return found


@pytest.mark.wide
def test_each_size_is_a_task_of_its_own(entry: dict[str, Any]) -> None:
    summary = entry["summary"]["greedy"]
    refusing = summary.pop("transformers:prompt_lookup")
    assert list(summary) == [REFERENCE, "plain", "prompt_lookup"]
    (error,) = refusing["errors"]
    assert "batch_size = 1" in error and refusing["errors"][error] == ["2 rows"]
    assert refusing["speed"].keys() == {"code", "overall"}
    for row in summary.values():
        assert {task: found["count"] for task, found in row["speed"].items()} == {"code": 4, "2 rows": 2, "overall": 6}
        assert row["share_equal"] == 1.0
    assert summary["prompt_lookup"]["nodes_per_step"]["2 rows"] > 0 == summary["plain"]["nodes_per_step"]["2 rows"]
    assert summary["plain"]["tokens_per_step"]["2 rows"] == 1.0


def test_a_batch_counts_the_tokens_of_all_its_rows(entry: dict[str, Any]) -> None:
    counts = {(record["task"], record["num_tokens"]) for record in entry["records"] if "error" not in record}
    assert counts == {("code", 8), ("2 rows", 16)}


def test_padding_after_a_row_is_no_token(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows end at their first token."""
    first = loaded.model.generate(**loaded.tokenizer(PROMPTS[0].turns[0], return_tensors="pt"), max_new_tokens=1)
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", int(first[0, -1]))
    monkeypatch.setattr(loaded.model.generation_config, "pad_token_id", int(first[0, -1]))
    (entry,) = Bench([loaded], batched(PROMPTS[:2], [2]), GREEDY, rows=["plain"]).run()["models"]
    assert entry["records"]
    assert all(record["equal"] and record["num_tokens"] < 16 for record in entry["records"])


def test_a_batch_that_parts_from_plain_is_unequal(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row of one batch of two."""
    own = loaded.model.generate

    def wrong(**kwargs: Any) -> Any:
        output = own(**kwargs)
        if kwargs.get("spec_method") == "prompt_lookup" and not kwargs["return_dict_in_generate"]:
            output[1, -1] += 1
        return output

    monkeypatch.setitem(loaded.model.__dict__, "generate", wrong)
    (entry,) = Bench([loaded], batched(PROMPTS, [2]), GREEDY, rows=["plain", "prompt_lookup"]).run()["models"]
    assert entry["summary"]["greedy"]["plain"]["share_equal"] == 1.0
    assert entry["summary"]["greedy"]["prompt_lookup"]["share_equal"] == 0.0


def test_a_size_above_the_number_of_prompts_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be at most 4, the number of prompts"):
        batched(PROMPTS, [8])


def test_no_batch_is_drafted_from_its_own_answers(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round a row's memory knows the batches before, and never the one that it is timed on."""
    known: dict[int, list[tuple[int, int]]] = {WATCHED_ROUND: [], 0: []}
    real = model_run.ModelRun._call

    def watched(self: Any, visit: Any, row: Any, inputs: Any) -> Any:
        def size() -> int:
            memory = self._method_states[row.name]
            return len(memory_in_use(memory, AutoSpecConfig()).pool) if "auto" in memory.by_name else 0

        before, found = size(), real(self, visit, row, inputs)
        if row.name == "auto":
            known[visit.round].append((before, size()))
        return found

    monkeypatch.setattr(model_run.ModelRun, "_call", watched)
    Bench([loaded], batched(PROMPTS, [2]), GREEDY, rows=["auto"]).run()
    for (before, after), (second, _) in known.values():
        assert before == 0 < after == second


def test_generate_many_is_measured_for_each_method_and_size(loaded: LoadedModel) -> None:
    methods = ["prompt_lookup", "auto"]
    document = measure_many(loaded, PROMPTS, methods, batch_sizes=(1, 2), max_new_tokens=8)
    rows = document["tables"][0]["rows"]
    found = [(row["row"], row["batch_size"], row["num_equal"], row["num_failed"]) for row in rows]
    assert found == [(name, size, 4, 0) for size in (1, 2) for name in methods]
    assert all(row["ratio"] > 0 for row in document["tables"][0]["rows"])
    (table,) = tables(document)
    assert [row[4] for row in table.rows] == ["4 of 4"] * 4


def test_transformers_rows_are_no_rows_of_generate_many(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="must be a method or a Drafter here"):
        measure_many(loaded, PROMPTS, ["transformers:prompt_lookup"])


def test_generate_many_begins_with_nothing_in_memory(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    @contextmanager
    def watched(model: Any, memory: MethodState) -> Iterator[None]:
        seen.append(bool(memory.by_name))
        yield

    monkeypatch.setattr("hf_specdec.tools.bench.many.using_method_state", watched)
    measure_many(loaded, PROMPTS[:2], ["auto", "prompt_lookup"], batch_sizes=(2,), max_new_tokens=4)
    assert seen == [False, False]


def test_a_prompt_that_failed_is_not_equal(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose text ends too early; the others are."""
    real = hf_specdec.generate_many

    def failing(*args: Any, **kwargs: Any) -> Iterator[hf_specdec.ManyResult]:
        for result in real(*args, **kwargs):
            if result.index == 1:
                yield dataclasses.replace(result, token_ids=[], error=RuntimeError("no room"))
            else:
                yield dataclasses.replace(result, token_ids=result.token_ids[: 3 if result.index == 2 else None])

    monkeypatch.setattr(hf_specdec, "generate_many", failing)
    document = measure_many(loaded, PROMPTS, ["prompt_lookup"], batch_sizes=(2,), max_new_tokens=8)
    (row,) = document["tables"][0]["rows"]
    assert (row["num_equal"], row["num_failed"]) == (2, 1)
