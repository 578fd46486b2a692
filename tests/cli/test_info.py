"""`hf-specdec info`: what a model can do, and why."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from hf_specdec import embedded
from hf_specdec.kernels import cpu
from hf_specdec.methods.registry import METHODS
from hf_specdec.tools.cli import facts
from tests.bench.conftest import tiny_llama
from tests.cli.conftest import Run
from tests.helpers.attention import deaf_attention
from tests.helpers.tokenizers import save_foreign_draft


def document(run: Run, *words: str) -> dict[str, Any]:
    result = run("info", "--json", *words)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)  # JSON has no NaN
    return found


def test_json_holds_versions_model_capability_plan_and_methods(run: Run) -> None:
    found = document(run)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["model"]["parameters"] > 1_000_000 and found["model"]["bytes"] > 0
    assert found["model"]["attention"] == "sdpa" and found["model"]["devices"]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["layers"] == "of a few tokens in the compiled core, where it is faster"
    assert found["capability"]["tier"] == "tree" and found["capability"]["reason"]
    assert (found["plan"]["way"], found["plan"]["method"]) == ("tree", "auto")
    assert found["methods"]["prompt_lookup"] == ["ngram"]
    assert "pair" not in found


def test_text_names_tier_methods_and_precisions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "core", None)
    result = run("info", "--dtype", "fp32")
    assert result.exit_code == 0, result.stderr
    for word in ("tree", "float32", "sdpa", *METHODS, "nf4", "torch's: no compiled core is installed"):
        assert word in result.stdout


def test_a_model_that_decodes_plainly_has_no_error_in_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = facts.capability(tiny_llama(64))
    nothing = type(plain)("plain", "its forward fails", "sdpa", "float32", float("nan"))
    monkeypatch.setattr(facts, "capability", lambda model: nothing)
    found = document(run)["capability"]
    assert (found["tier"], found["error"]) == ("plain", None)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("embedded-draft", "drafts are tokens of the target"),
        ("embedded-head", "drafts are tokens of the target"),
        ("foreign", "drafts are translated between the tokenizers"),
        ("stranger", "must share the target's tokenizer"),
    ],
)
def test_a_draft_goes_together_with_the_target_or_not(run: Run, tmp_path: Path, draft: str, reason: str) -> None:
    if draft == "foreign":
        draft = save_foreign_draft(tmp_path, ["def add(a, b):\n    return a + b\n"])
    if draft == "stranger":
        tiny_llama(9000).save_pretrained(tmp_path)
        draft = str(tmp_path)
    found = document(run, "--assistant-model", draft)
    assert found["pair"]["goes together"] == ("must share" not in reason)
    assert reason in found["pair"]["reason"]
    if draft == "embedded-head":
        assert found["assistant model"]["methods"] == ["eagle3", "auto"]
        assert len(found["pair"]["hidden states"]) == 3


@pytest.mark.parametrize(("name", "tier"), [("eager", "tree"), ("xformers", "tree"), ("tests_deaf", "chain")])
def test_an_attention_is_tried_on_the_model(run: Run, name: str, tier: str) -> None:
    """The last, a stand-in, is given FlashAttention's masks and is seen as FlashAttention is."""
    AttentionInterface.register("tests_deaf", deaf_attention)
    AttentionMaskInterface.register("tests_deaf", AttentionMaskInterface()["flash_attention_2"])
    found = document(run, "--model", embedded.path("draft"), "--attn-implementation", name)
    assert (found["model"]["attention"], found["capability"]["tier"]) == (name, tier)
    assert tier == "tree" or "attention takes no mask of a tree" in found["capability"]["reason"]
