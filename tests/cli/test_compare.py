"""`hf-specdec generate --compare`: three ways in turn, and an exit code that tells whether ours was equal."""

import dataclasses
import itertools
import json
import sys
from typing import Any

import pytest
from rich.console import Console

import hf_specdec
from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.auto.method import memory_in_use
from hf_specdec.tools.bench import model_run
from hf_specdec.tools.cli import compare, report
from hf_specdec.tools.cli.compare import ASSISTED, PLAIN, TRANSFORMERS
from tests.cli.conftest import Run
from tests.kernels.layer_cases import has_core

PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."
COMPARE = ("generate", PROMPT, "--compare", "--max-new-tokens", "16", "--rounds", "2")


def rows(run: Run, *words: str) -> dict[str, dict[str, Any]]:
    result = run(*COMPARE, *words, "--json")
    assert result.exit_code == 0, result.stderr
    return {row["name"]: row for row in json.loads(result.stdout)["rows"]}


def test_all_three_are_measured_and_ours_is_equal(run: Run) -> None:
    found = rows(run, "--dtype", "fp32")
    assert list(found) == [PLAIN, TRANSFORMERS, "auto"]
    assert all(row["equal_to_plain"] and row["tokens"] == found[PLAIN]["tokens"] for row in found.values())
    assert found[PLAIN]["ratio_to_plain"] == 1.0
    assert found[TRANSFORMERS]["ratio_to_transformers"] == 1.0
    assert found[PLAIN]["drafted"] == found[PLAIN]["accepted"] == 0
    assert all(0 <= row["accepted"] <= row["drafted"] for row in found.values())


@has_core
def test_plain_generate_has_the_kernels_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then texts of several prompts are equal in bf16 too."""
    enabled: list[Any] = []
    original = hf_specdec.enable
    monkeypatch.setattr(hf_specdec, "enable", lambda model, **kw: enabled.append(kw) or original(model, **kw))
    found = rows(run, "--dtype", "bf16", "--plain-kernels", "--max-new-tokens", "48")
    assert found["auto"]["equal_to_plain"]
    assert {"plain_kernels": True} in enabled


@pytest.mark.wide
@pytest.mark.parametrize(("method", "theirs"), [("lookahead", TRANSFORMERS), ("draft_model", ASSISTED)])
def test_every_method_has_its_counterpart(run: Run, method: str, theirs: str) -> None:
    """Transformers' assisted generation stands next to a draft model, its prompt lookup next to all else."""
    found = rows(run, "--dtype", "fp32", "--spec-method", method)
    assert list(found) == [PLAIN, theirs, method]
    assert all(row["equal_to_plain"] for row in found.values())
    assert found[theirs]["drafted"] > 0 and found[method]["drafted"] > 0
    assert found[theirs]["ratio_to_transformers"] == 1.0


@pytest.mark.wide
def test_acceptance_by_probabilities_promises_no_seed(run: Run) -> None:
    """Its samples have the target's distribution and not the seed's text, so the exit code stays 0."""
    config = "[4,['cpu'],['cpu'],True]"
    found = rows(run, "--dtype", "fp32", "--draft-model-config", config, "--do-sample", "--temperature", "2")
    assert not found["draft_model"]["equal_to_plain"]


@pytest.mark.wide
def test_a_sample_is_compared_from_one_seed(run: Run) -> None:
    assert rows(run, "--dtype", "fp32", "--do-sample", "--temperature", "0.7")["auto"]["equal_to_plain"]


@pytest.mark.wide
def test_a_sampled_comparison_keeps_the_models_own_temperature(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --temperature no call gets one, as without --compare."""
    seen: list[Any] = []
    real = model_run.measured_call

    def watched(loaded: Any, row: Any, inputs: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(options.get("temperature"))
        return real(loaded, row, inputs, options, *args, **kwargs)

    monkeypatch.setattr(model_run, "measured_call", watched)
    run(*COMPARE, "--dtype", "fp32", "--rounds", "1", "--do-sample")
    assert set(seen) == {None}


@pytest.mark.wide
def test_without_a_prompt_several_are_compared(run: Run) -> None:
    result = run("generate", "--compare", "--max-new-tokens", "4", "--rounds", "1", "--dtype", "fp32", "--json")
    assert json.loads(result.stdout)["num_prompts"] == 3


@pytest.mark.wide
def test_the_table_has_a_row_for_each(run: Run) -> None:
    result = run(*COMPARE, "--dtype", "fp32")
    assert result.exit_code == 0, result.stderr
    for word in (PLAIN, TRANSFORMERS, "auto", "tokens/s", "drafted", "accepted", "equal to", "1 of 1"):
        assert word in result.stdout


@pytest.mark.at_most(1)
@pytest.mark.parametrize(("dtype", "exit_code"), [("fp32", 1), ("bf16", 0)])
def test_the_exit_code_tells_unequal_tokens_in_fp32(
    run: Run, monkeypatch: pytest.MonkeyPatch, dtype: str, exit_code: int
) -> None:
    """In half precision a near-tie may flip, so the table says so and the exit code does not."""
    real = model_run.measured_call

    def wrong(loaded: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = real(loaded, row, *args, **kwargs)
        return dataclasses.replace(outcome, token_ids=[0, *outcome.token_ids[1:]]) if row.name == "auto" else outcome

    monkeypatch.setattr(model_run, "measured_call", wrong)
    result = run(*COMPARE, "--dtype", dtype, "--rounds", "1", "--max-new-tokens", "8")
    assert result.exit_code == exit_code
    assert "0 of 1" in result.stdout
    assert ("in bfloat16 a near-tie may fall the other way" in result.stderr) == (dtype == "bf16")


def test_a_model_that_transformers_refuses_leaves_its_row_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_run.measured_call

    def refusing(loaded: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        if row.name == TRANSFORMERS:
            raise ValueError("assisted generation is not supported")
        return real(loaded, row, *args, **kwargs)

    monkeypatch.setattr(model_run, "measured_call", refusing)
    result = run(*COMPARE, "--dtype", "fp32", "--rounds", "1", "--json")
    assert [row["name"] for row in json.loads(result.stdout)["rows"]] == [PLAIN, "auto"]
    assert "is left out: assisted generation is not supported" in result.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_an_interrupt_leaves_the_rounds_that_are_complete(
    run: Run, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Ctrl-C in the third of four timed rounds, between two rows of the prompt."""
    interrupt_after(monkeypatch, calls=3 * 4 + 1)  # of three ways: a warm-up call, and a round that is watched
    result = run(*COMPARE, "--dtype", "fp32", "--rounds", "4", *(("--json",) if as_json else ()))
    assert result.exit_code == 130, result.stderr
    assert "interrupted: what has been measured follows" in result.stderr
    if as_json:
        found = json.loads(result.stdout)
        assert (found["rounds"], found["is_complete"]) == (2, False)
        assert {row["tokens"] for row in found["rows"]} == {16}
        assert all(row["tokens_per_second"] > 0 and row["equal_to_plain"] for row in found["rows"])
    else:
        assert "rounds 2" in result.stdout and "1 of 1" in result.stdout


@pytest.mark.parametrize("calls", [1, 3 + 3 + 1])
def test_an_interrupt_before_a_round_is_complete_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    interrupt_after(monkeypatch, calls=calls)
    result = run(*COMPARE, "--dtype", "fp32")
    assert result.exit_code == 130
    assert "tokens/s" not in result.stdout and result.stderr.endswith("interrupted\n")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, *, calls: int) -> None:
    """Ctrl-C in the call of `generate` after so many."""
    real, counted = model_run.measured_call, itertools.count()

    def measured_call(*args: Any, **kwargs: Any) -> Any:
        if next(counted) == calls:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(model_run, "measured_call", measured_call)


@pytest.mark.wide
def test_no_round_drafts_from_the_answers_of_another(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round begins with what the memory file held, and none with what another round added to it."""
    known: list[int] = []
    real = model_run.measured_call

    def watched(loaded: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        memory = state_of(loaded.model).method_state
        if row.name == "auto":
            known.append(len(memory_in_use(memory, hf_specdec.AutoSpecConfig()).pool))
        return real(loaded, row, *args, **kwargs)

    monkeypatch.setattr(model_run, "measured_call", watched)
    rows(run, "--dtype", "fp32", "--spec-config", '{"num_nodes": 12}')
    warm_up, *rounds = known
    assert rounds == [warm_up] * 3  # the watched one and two that are timed


@pytest.mark.parametrize("width", [64, 80, 120])
def test_the_table_is_readable_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every word and every value is in one piece, and no line is wider than the terminal."""
    names = (PLAIN, TRANSFORMERS, "auto")
    keys = ("tokens", "seconds", "tokens_per_second", "ratio_to_plain", "ratio_to_transformers", "drafted", "accepted")
    values = dict(zip(keys, (96, 0.08, 1234.5, 1.0, 0.98, 123, 45), strict=True))
    values |= {"mean_acceptance_length": 2.34, "prompts_equal_to_plain": 2}
    rows = [{"name": name, **values} for name in names]
    monkeypatch.setattr(report, "stdout_console", lambda: Console(file=sys.stdout, width=width))
    report.print_table(compare.comparison_table(rows, 3), "dtype float32")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    words = ("plain", "transformers", "1234.5", "0.98", "123", "2.34", "2 of 3", "tokens/s", "drafted", "accepted")
    assert [word for word in words if word not in shown] == []
