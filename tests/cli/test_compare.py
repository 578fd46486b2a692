"""`hf-specdec generate --compare`: bench's rows and table for one prompt."""

import json
import sys
from typing import Any

import pytest

from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.auto.method import memory_in_use
from hf_specdec.tools.bench import run as run_module
from hf_specdec.tools.bench.rows import ASSISTANT, LOOKUP, PLAIN, TRANSFORMERS
from tests.bench.test_run import interrupt_after, watched
from tests.cli.conftest import Run
from tests.kernels.layer_cases import has_core

PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."
COMPARE = ("generate", PROMPT, "--model", "embedded", "--compare", "--max-new-tokens", "16", "--rounds", "2")


def rows(run: Run, *words: str) -> dict[str, dict[str, Any]]:
    result = run(*COMPARE, *words, "--json")
    assert result.exit_code == 0, result.stderr
    return {row["row"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.mark.parametrize(("method", "theirs"), [("auto", LOOKUP), ("draft_model", ASSISTANT)])
def test_a_method_stands_next_to_transformers_ways_and_plain_decoding(run: Run, method: str, theirs: str) -> None:
    """Transformers' assisted generation stands next to a draft model, its prompt lookup next to all else."""
    table = rows(run, "--dtype", "fp32", "--spec-method", method)
    assert list(table) == [TRANSFORMERS, PLAIN, theirs, method]
    assert all(row["equal"] == 1.0 for row in table.values())
    assert table[TRANSFORMERS]["overall"] == table[PLAIN]["tokens/step"] == 1.0
    assert table[method]["tokens/step"] > 1.0


@has_core
def test_in_bf16_texts_are_those_of_plain_decoding_by_the_same_kernels(run: Run) -> None:
    assert rows(run, "--dtype", "bf16", "--max-new-tokens", "48")["auto"]["equal"] == 1.0


@pytest.mark.wide
def test_acceptance_by_probabilities_promises_no_seed(run: Run) -> None:
    """Its samples have the target's distribution and not the seed's text, so the exit code stays 0."""
    config = "[4,['cpu'],['cpu'],True]"
    table = rows(run, "--dtype", "fp32", "--draft-model-config", config, "--do-sample", "--temperature", "2")
    assert table["draft_model"]["equal"] < 1.0


def test_the_table_is_that_of_bench(run: Run) -> None:
    result = run(*COMPARE, "--dtype", "fp32", "--do-sample", "--temperature", "0.7")
    assert result.exit_code == 0, result.stderr
    for word in (TRANSFORMERS, PLAIN, LOOKUP, "auto", "overall", "tokens/s", "tokens/step", "equal", "do_sample True"):
        assert word in result.stdout


def test_an_interrupt_leaves_what_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4 + 4 + 1)
        result = run(*COMPARE, "--dtype", "fp32")
    assert result.exit_code == 130, result.stderr
    assert "auto" in result.stdout
    interrupt_after(monkeypatch, 3)  # before anything is timed
    assert (stopped := run(*COMPARE, "--dtype", "fp32")).exit_code == 130
    assert "tokens/s" not in stopped.stdout


def test_no_call_drafts_from_an_answer_to_its_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def before(loaded: Any, row: Any) -> None:
        memory = memory_in_use(state_of(loaded.model).method_state)
        sizes.extend([len(memory.pool)] * (row.name == "auto"))

    watched(monkeypatch, before)
    for words in ((), ("--json",)):
        assert run(*COMPARE, "--dtype", "fp32", "--spec-config", '{"num_nodes": 12}', *words).exit_code == 0
    assert sizes == [0] * 6


def test_without_pandas_its_extra_is_named_before_anything_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr(run_module, "measured_call", lambda *args, **kwargs: pytest.fail("measured"))
    result = run(*COMPARE, "--dtype", "fp32")
    assert result.exit_code == 2
    assert "hf_specdec[bench]" in result.stderr
