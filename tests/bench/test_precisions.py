"""The precision benchmark: a row for each precision, whose figures are those of what is loaded."""

import json
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_specdec import embedded
from hf_specdec.bench import precisions
from hf_specdec.bench.precisions import compare_tokens, step_seconds
from hf_specdec.bench.subject import Subject, load_subject


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(precisions.main)
    return CliRunner().invoke(app, ["--limit", "2", "--max-new-tokens", "6", "--rounds", "2", "--json", *words])


def test_each_precision_has_its_row() -> None:
    """fp32, which logits are set against, and bf16, which bytes and seconds are, are always among them."""
    result = run("--model", embedded.path("draft"), "--precision", "fp8")
    assert result.exit_code == 0, result.output
    rows = {row["precision"]: row for row in json.loads(result.stdout)["rows"]}
    assert list(rows) == ["fp32", "bf16", "fp8"]
    assert rows["fp8"]["weights_bytes"] < rows["bf16"]["weights_bytes"] < rows["fp32"]["weights_bytes"]
    assert rows["bf16"]["over_bf16_1"] == rows["bf16"]["by_cpu_time_8"] == rows["bf16"]["weights_over_bf16"] == 1
    assert rows["fp32"]["mean_kl"] == 0 < rows["fp8"]["mean_kl"]
    assert rows["fp32"]["tokens"] == [{"method": "prompt_lookup", "equal": 2, "prompts": 2, "match_rate": 1.0}]
    assert rows["fp8"]["facts"]["dtype"] == "fp8"


def test_a_widened_model_is_quantised_at_its_size() -> None:
    subject = load_subject(None, dtype="fp8", device="cpu", widen_to=(512, 7))
    assert subject.model.model.layers[6].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    assert subject.label == "embedded target, 512x7"
    text = subject.tokenizer("def read(path):\n", return_tensors="pt").input_ids
    with torch.no_grad():
        assert subject.model(text).logits.isfinite().all()


def test_a_method_that_parts_from_plain_is_counted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of two, from the third token on."""
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    equal = compare_tokens(subject, prompts, "prompt_lookup", 8)
    assert (equal["equal"], equal["match_rate"]) == (2, 1.0)
    own = subject.model.generate

    def wrong(**kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = own(**kwargs).clone()
        if kwargs["input_ids"][0, 0] == 5:
            output[0, 4 + 2] += 1
        return output

    monkeypatch.setitem(subject.model.__dict__, "generate", wrong)
    found = compare_tokens(subject, prompts, "prompt_lookup", 8)
    assert (found["equal"], found["match_rate"]) == (1, 10 / 16)


def test_steps_leave_the_context_as_it_was(subject: Subject) -> None:
    taken = step_seconds({"a": subject.model, "b": subject.model}, torch.arange(40)[None], 4, rounds=3)
    assert taken.keys() == {"a", "b"}
    assert all(clock > 0 and processor > 0 for clock, processor in taken.values())


def test_a_wrong_setting_is_an_error() -> None:
    result = run("--prompts", "missing.jsonl")
    assert result.exit_code == 2
    assert "missing.jsonl" in result.output
