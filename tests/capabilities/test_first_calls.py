"""A model's first calls, which probe it: plain generation's texts, whatever the probe finds."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import HrmTextConfig, HrmTextForCausalLM

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.capabilities.reference import sentence
from tests.helpers.support import DRAFTS, MASK, PADDED, PROMPT, plain, results_of, see_all, steer
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
ALONE: dict[str, Any] = CALL | {"input_ids": PROMPT}
BATCH: dict[str, Any] = CALL | {"input_ids": PADDED, "attention_mask": MASK}
PROMPTS = [[7, 9, 11, 7], [5, 6, 7, 8, 5, 6, 7], [40, 41, 40, 41, 40]]


def test_the_log_has_the_error_of_a_forward_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="hf_specdec"):
        assert sentence(KeyError("mask")) == "its forward does not allow for it (KeyError)"
    assert "KeyError: 'mask'" in caplog.text


def test_layers_of_the_cache_that_a_model_leaves_empty_stay_so() -> None:
    """HrmText whose configuration counts more layers than its cycles use."""
    torch.manual_seed(0)
    config = HrmTextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_layers_per_stack=1,
        num_hidden_layers=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = hf_specdec.enable(HrmTextForCausalLM(config).eval())
    output = model.generate(**ALONE, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(model, **ALONE))
    assert [layer.is_initialized for layer in output[CACHE].layers] == [True] * 8 + [False] * 4


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_probe_serves_all_calls_of_one_sequence(fresh: Any, probes: list[str], draft: str) -> None:
    expected = plain(fresh, **ALONE)
    arguments = DRAFTS[draft](expected[0].tolist())
    for _ in range(2):
        output = fresh.generate(**ALONE, **arguments, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
        assert (output.spec_stats.tier, output.spec_stats.plain_reason) == ("tree", None)
    assert probes == ["probe"]


def test_rows_are_probed_at_the_first_batch(fresh: Any, probes: list[str]) -> None:
    for call in (ALONE, BATCH, ALONE, BATCH):
        output = fresh.generate(**call, spec_method="prompt_lookup", return_dict_in_generate=True)
        assert output.sequences.tolist() == plain(fresh, **call).tolist()
        assert output.spec_stats.num_accepted_tokens > 0
    assert probes == ["probe", "probe_rows"]


@pytest.mark.at_most(2)
@pytest.mark.parametrize("change", [steer, see_all])
@pytest.mark.parametrize("call", [ALONE, BATCH], ids=["alone", "batch"])
def test_a_model_that_fails_its_probe_gives_plains_text(
    fresh: Any, change: Callable[[Any], None], call: dict[str, Any]
) -> None:
    change(fresh)
    expected = plain(fresh, **call)
    draft = DRAFTS["oracle"](expected[0].tolist()) if call is ALONE else {"spec_method": "prompt_lookup"}
    output = fresh.generate(**call, **draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.plain_reason
    assert output.spec_stats.num_accepted_tokens == 0


@pytest.mark.parametrize("change", [steer, see_all])
def test_many_prompts_of_a_model_that_fails_its_probe_get_plains_samples(
    fresh: Any, change: Callable[[Any], None]
) -> None:
    change(fresh)
    options = CALL | {"do_sample": True}
    for result in results_of(fresh, PROMPTS, spec_method="prompt_lookup", seed=3, **options):
        torch.manual_seed(result.seed)
        prompt = PROMPTS[result.index]
        assert result.token_ids == plain(fresh, torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_a_right_tree_passes_and_a_wrong_one_does_not(dtype: torch.dtype) -> None:
    right, wrong = (hf_specdec.enable(build(FAMILIES["llama"]).to(dtype)) for _ in range(2))
    see_all(wrong)
    for call in (ALONE, BATCH):
        output = right.generate(**call, spec_method="prompt_lookup", return_dict_in_generate=True)
        assert (output.spec_stats.tier, output.spec_stats.plain_reason) == ("tree", None)
    assert hf_specdec.capability(wrong).tier == "plain"


def test_samples_follow_their_seed(fresh: Any) -> None:
    torch.manual_seed(5)
    expected = plain(fresh, **ALONE | {"do_sample": True})
    torch.manual_seed(5)
    assert fresh.generate(**ALONE | {"do_sample": True}, spec_method="auto").tolist() == expected.tolist()


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_first_call_in_train_mode_drops_out_what_plain_generation_does(family: str) -> None:
    """Finding out that several tokens at once are not what they are one by one takes none of the call's numbers."""
    model = build(FAMILIES[family]).train()
    for module in model.modules():
        if family == "llama" and isinstance(module, type(model.model.layers[0].self_attn)):
            module.attention_dropout = 0.2
    torch.manual_seed(3)
    expected = plain(model, **ALONE)
    torch.manual_seed(3)
    ours = hf_specdec.enable(model).generate(**ALONE, spec_method="auto", return_dict_in_generate=True)
    assert ours.sequences.tolist() == expected.tolist()
    assert "eval()" in ours.spec_stats.plain_reason


def test_a_draft_in_train_mode_is_refused_with_the_remedy() -> None:
    model = hf_specdec.enable(build(FAMILIES["gpt2"]))
    draft = build(FAMILIES["gpt2"]).train()
    with pytest.raises(hf_specdec.UnsupportedModelError, match="train mode; call its eval"):
        model.generate(**ALONE, spec_method="draft_model", assistant_model=draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_hidden_tokens_may_be_infinite(dtype: torch.dtype) -> None:
    """A vocabulary that is masked: those logits are as infinite after a tree as after single tokens."""
    model = build(FAMILIES["llama"]).to(dtype)
    bias = torch.zeros(VOCAB_SIZE, dtype=dtype).index_fill(0, torch.arange(0, VOCAB_SIZE, 2), -torch.inf)
    model.lm_head.bias = torch.nn.Parameter(bias)
    hf_specdec.enable(model)
    expected = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    for method in ("prompt_lookup", "auto", "lookahead"):
        output = model.generate(
            PROMPT, max_new_tokens=12, do_sample=False, spec_method=method, return_dict_in_generate=True
        )
        assert output.sequences.tolist() == expected.tolist()
        assert output.spec_stats.plain_reason is None
