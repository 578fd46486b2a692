"""Every architecture: the same text as plain `generate`, alone and in a padded batch, or plain decoding.

Eleven run in `make test`, fifty and then all in `make test-all`; the page in the documentation says what they do.
"""

import warnings
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.generation import fresh_cache
from hf_specdec.forward.capabilities.probe import probe
from tests.capabilities.findings import PAGE, Finding, examine, examine_all, listed
from tests.helpers.zoo_wide import build, kinds_of, shrunk, varied

# One for each way of keeping a cache, counting positions and masking, and those that the probe has to find out.
QUICK = ("bigbird_pegasus ctrl falcon_mamba git moshi openai-gpt paligemma qwen2_vl rwkv whisper xglm").split()
# More of the same ways.
WIDE = (
    "afmoe bamba bart bert bloom codegen cohere2 deepseek_v2 deepseek_v32 doge exaone4_5 falcon falcon_h1 "
    "gemma3n_text glm4_moe gpt_bigcode gpt_neox gptj granitemoehybrid helium inkling_text kimi_linear led lfm3 "
    "m2m_100 mamba2 marian minimax mpt nemotron_h olmo_hybrid pegasus qwen3_5 t5 t5gemma2 umt5 unlimited_ocr zamba2"
).split()


def chosen() -> list[Any]:
    """The models to try, as parameters of a test, found by name: loading every class takes ten seconds."""
    return [
        pytest.param(name, kind, marks=() if name in QUICK else pytest.mark.wide)
        for name in sorted((*QUICK, *WIDE))
        for kind in kinds_of(name)
    ]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Models warn of what default configurations leave out."""
    warnings.simplefilter("ignore")


def check(finding: Finding) -> None:
    """Equal, some drafts accepted, and listed as it is.

    Where `generate` is the model's own, only prompt lookup can be tried, and nothing of such a text may repeat.
    """
    assert finding.equal, f"{finding.name} writes something else"
    assert finding.tier == "plain" or finding.has_own_generate or finding.num_accepted > 0
    assert finding.tier == "tree" or finding.reason
    assert listed()[finding.name] == finding.key, "run python -m tests.capabilities.findings"


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "kind"), chosen())
def test_an_architecture_writes_what_plain_generation_writes(model_type: str, kind: str) -> None:
    check(examine(model_type, kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["reformer", "xlnet"])
def test_a_model_that_keeps_states_of_a_kind_of_its_own_is_not_said_to_keep_none(model_type: str) -> None:
    result = probe(varied(model_type, "causal"))
    assert result.tier == "plain"
    assert "keeps no cache" not in result.reason


@pytest.mark.filterwarnings("ignore")
def test_a_window_of_the_cache_that_the_decoders_own_mask_lacks_is_found() -> None:
    """Qwen3-Omni's file makes masks with windows, for its vocoder alone; its default thinker has no window."""
    config = shrunk("qwen3_omni_moe_thinker")
    config.text_config.sliding_window = 16
    model = build(config, "image", 0.3)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(torch.tensor([[5, 6, 7, 8] * 6]), **settings)
    assert any(fresh_cache(model)[CACHE].is_sliding)
    hf_specdec.enable(model)
    for method in ("prompt_lookup", "plain"):
        assert torch.equal(model.generate(torch.tensor([[5, 6, 7, 8] * 6]), **settings, spec_method=method), plain)
    assert probe(model).tier == "plain"


def test_the_page_lists_no_model_that_is_wrong() -> None:
    assert len(listed()) > 200
    assert {key[3] for key in listed().values()} == {"yes"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_writes_what_plain_generation_writes() -> None:
    findings, unbuilt = examine_all()
    for finding in findings:
        check(finding)
    text = PAGE.read_text()
    assert all(f"- `{item.model_type}` ({item.kind})" in text for item in unbuilt)
