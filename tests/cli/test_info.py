"""`hf-specdec info`: what a model can do, and why."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels import cpu
from hf_specdec.methods.registry import METHODS
from tests.bench.conftest import tiny_llama
from tests.cli.conftest import Run
from tests.helpers.attention import deaf_attention


def test_json_holds_versions_model_capability_and_methods(run: Run) -> None:
    result = run("info", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["hf_specdec"] == metadata.version("hf_specdec")
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["model"]["parameters"] > 1_000_000
    assert found["model"]["devices"]
    assert found["model"]["attention"] == "sdpa"
    assert found["machine"]["threads"] == torch.get_num_threads()
    where = "of a few tokens in the compiled core, where it is faster"
    assert {found["machine"][name] for name in ("linear layers", "norms", "attention")} == {where}
    assert found["capability"]["tier"] == "tree"
    assert found["capability"]["reason"]
    assert (found["plan"]["way"], found["plan"]["method"], found["plan"]["loop"]) == ("tree", "auto", "own")
    assert found["methods"]["prompt_lookup"] == ["ngram"]


def test_text_says_why_the_linear_layers_are_torchs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "core", None)
    assert "torch's: no compiled core is installed" in run("info").stdout


def test_a_model_that_decodes_plainly_has_no_error_in_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was compared; JSON has no NaN."""
    plain = hf_specdec.Capability("plain", "its forward fails", "sdpa", "float32", float("nan"))
    monkeypatch.setattr(hf_specdec, "capability", lambda model: plain)
    found = json.loads(run("info", "--json").stdout, parse_constant=pytest.fail)
    assert (found["capability"]["tier"], found["capability"]["error"]) == ("plain", None)


def test_text_names_tier_and_methods(run: Run) -> None:
    result = run("info", "--dtype", "fp32")
    assert result.exit_code == 0, result.stderr
    for word in ("tree", "float32", "sdpa", *METHODS):
        assert word in result.stdout


@pytest.mark.wide
def test_json_holds_the_bytes_of_a_precision(run: Run) -> None:
    model = json.loads(run("info", "--dtype", "fp8", "--json").stdout)["model"]
    assert model["dtype"] == "fp8"
    assert model["bytes"] < 0.61 * 2 * model["parameters"]


def test_the_embedded_pair_goes_together(run: Run) -> None:
    pair = json.loads(run("info", "--json").stdout)["pair"]
    assert pair["goes together"]
    assert pair["vocabularies"] == [4096, 4096]
    assert pair["tiers"] == ["tree", "tree"]


def test_a_draft_of_another_vocabulary_is_named(run: Run, tmp_path: Path) -> None:
    tiny_llama(9000).save_pretrained(tmp_path / "stranger")
    found = json.loads(run("info", "--draft-model", str(tmp_path / "stranger"), "--json").stdout)
    assert not found["pair"]["goes together"]
    assert "must share the target's tokenizer" in found["pair"]["reason"]
    assert found["draft model"]["architecture"] == "LlamaForCausalLM"


def test_a_target_of_the_user_s_own_has_no_pair_without_a_draft(run: Run) -> None:
    assert "pair" not in json.loads(run("info", "--model", embedded.path("draft"), "--json").stdout)


def test_a_missing_model_is_an_error(run: Run) -> None:
    result = run("info", "--model", "./no/such/folder")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_an_attention_is_tried_on_the_model(run: Run) -> None:
    for name in ("eager", "xformers"):
        result = run("info", "--model", embedded.path("draft"), "--attn-implementation", name, "--json")
        found = json.loads(result.stdout)
        assert (found["model"]["attention"], found["capability"]["tier"]) == (name, "tree")


def test_attention_that_takes_no_mask_of_a_tree_is_said(run: Run) -> None:
    """A stand-in that is given FlashAttention's masks is seen as FlashAttention is."""
    AttentionInterface.register("tests_deaf", deaf_attention)
    AttentionMaskInterface.register("tests_deaf", AttentionMaskInterface()["flash_attention_2"])
    result = run("info", "--model", embedded.path("draft"), "--attn-implementation", "tests_deaf", "--json")
    found = json.loads(result.stdout)["capability"]
    assert found["tier"] == "chain"
    assert "'tests_deaf' attention takes no mask of a tree" in found["reason"]


def test_an_attention_that_is_not_installed_is_an_error_with_its_remedy(run: Run) -> None:
    result = run("info", "--attn-implementation", "flash_attention_2")
    assert result.exit_code == 2
    assert "must be installed" in result.stderr and "FlashAttention2" in result.stderr
