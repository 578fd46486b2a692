"""A model's first call tries it on its own text: no forward more, and not a token that was not verified before."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, HrmTextConfig, HrmTextForCausalLM

import hf_specdec
from hf_specdec.capabilities.reference import sentence
from hf_specdec.capabilities.trial import NUM_REFERENCES, SHORTEST_CALL
from hf_specdec.compat import CACHE
from tests.helpers.batches import MASK, PADDED
from tests.helpers.hooks import see_all, steer
from tests.helpers.support import DRAFTS, PROMPT, assert_same_cache, plain
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": SHORTEST_CALL + 4, "do_sample": False, "eos_token_id": None}
ALONE: dict[str, Any] = CALL | {"input_ids": PROMPT}
BATCH: dict[str, Any] = CALL | {"input_ids": PADDED, "attention_mask": MASK}


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
def test_a_first_call_needs_no_probe_and_gives_plains_text(fresh: Any, probes: list[str], draft: str) -> None:
    expected = plain(fresh, **ALONE)
    arguments = DRAFTS[draft](expected[0].tolist())
    output = fresh.generate(**ALONE, **arguments, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert (output.spec_stats.tier, output.spec_stats.plain_reason) == ("tree", None)
    assert fresh.generate(PROMPT, max_new_tokens=4, do_sample=False, **arguments).tolist() == [
        expected[0, : PROMPT.shape[1] + 4].tolist()
    ]
    assert not probes


def test_a_trial_is_two_wider_steps_of_the_call(fresh: Any) -> None:
    """Right drafts at every step: what is saved shows that they are verified after the trial."""
    expected = plain(fresh, **ALONE)
    widths: list[int] = []
    fresh.register_forward_pre_hook(lambda *a: widths.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    output = fresh.generate(**ALONE, **DRAFTS["oracle"](expected[0].tolist()), return_dict_in_generate=True)
    assert len(widths) == 1 + output.spec_stats.num_forwards
    assert widths[1 : 3 + NUM_REFERENCES] == [1] * NUM_REFERENCES + [NUM_REFERENCES + 4, NUM_REFERENCES]
    assert output.spec_stats.num_accepted_tokens > SHORTEST_CALL // 2


def test_rows_of_a_batch_are_tried_together(fresh: Any, probes: list[str]) -> None:
    expected = plain(fresh, **BATCH).tolist()
    output = fresh.generate(**BATCH, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.plain_reason is None and output.spec_stats.num_accepted_tokens > 0
    assert fresh.generate(**BATCH, spec_method="auto").tolist() == expected
    assert fresh.generate(**ALONE, spec_method="auto").tolist() == plain(fresh, **ALONE).tolist()
    assert not probes


def test_a_batch_is_tried_after_a_sequence_was(fresh: Any, probes: list[str]) -> None:
    for call in (ALONE, BATCH):
        assert fresh.generate(**call, spec_method="prompt_lookup").tolist() == plain(fresh, **call).tolist()
    assert not probes


@pytest.mark.at_most(2)
@pytest.mark.parametrize("change", [steer, see_all])
@pytest.mark.parametrize("call", [ALONE, BATCH], ids=["alone", "batch"])
def test_a_model_that_fails_is_probed_and_gives_plains_text(
    fresh: Any, probes: list[str], change: Callable[[Any], None], call: dict[str, Any]
) -> None:
    change(fresh)
    expected = plain(fresh, **call)
    draft = DRAFTS["oracle"](expected[0].tolist()) if call is ALONE else {"spec_method": "prompt_lookup"}
    output = fresh.generate(**call, **draft, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.plain_reason
    assert output.spec_stats.num_accepted_tokens == 0
    assert probes == ["probe"]


@pytest.mark.parametrize("width", [NUM_REFERENCES + 4, NUM_REFERENCES])
def test_a_trial_that_is_interrupted_by_a_fault_leaves_it_to_the_probe(
    fresh: Any, probes: list[str], width: int
) -> None:
    """The fault of a moment: the probe finds that trees work, and the same call goes on with them."""
    expected = plain(fresh, **ALONE)
    faults = [MemoryError()]

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if faults and kwargs["input_ids"].shape[1] == width:
            raise faults.pop()

    fresh.register_forward_pre_hook(fail, with_kwargs=True)
    output = fresh.generate(**ALONE, **DRAFTS["oracle"](expected[0].tolist()), return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert not faults and probes == ["probe"]
    assert output.spec_stats.num_accepted_tokens > SHORTEST_CALL // 2


@pytest.mark.at_most(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_the_tolerance_follows_what_rounding_does(probes: list[str], dtype: torch.dtype) -> None:
    """A tree that is right passes, one that is wrong does not."""
    right, wrong = (hf_specdec.enable(build(FAMILIES["llama"]).to(dtype)) for _ in range(2))
    see_all(wrong)
    widths: list[int] = []
    right.register_forward_pre_hook(lambda *a: widths.append(a[2]["input_ids"].shape[1]), with_kwargs=True)
    right.generate(**ALONE, spec_method="prompt_lookup")
    assert widths[1 + NUM_REFERENCES :][:3] == [NUM_REFERENCES, NUM_REFERENCES + 5, NUM_REFERENCES + 1]
    for call in (ALONE, BATCH):
        output = right.generate(**call, spec_method="prompt_lookup", return_dict_in_generate=True)
        assert output.spec_stats.tier == "tree"
    assert not probes
    wrong.generate(**ALONE, spec_method="prompt_lookup")
    assert probes == ["probe"]


def test_short_calls_are_probed(fresh: Any, probes: list[str]) -> None:
    fresh.generate(PROMPT, max_new_tokens=SHORTEST_CALL - 1, do_sample=False, spec_method="auto")
    assert probes == ["probe"]


@pytest.mark.parametrize("family", ["mistral", "bloom", "bart"])
def test_what_a_few_tokens_do_not_show_is_probed(probes: list[str], family: str) -> None:
    """Windows, positions that the model counts by itself, and encoders."""
    model = hf_specdec.enable(build(FAMILIES[family]))
    model.generate(**ALONE, spec_method="prompt_lookup")
    assert probes[0] == "probe"


@pytest.mark.parametrize("count", [2, *range(NUM_REFERENCES, NUM_REFERENCES + 5), SHORTEST_CALL])
def test_a_cache_of_the_callers_holds_plains_text(fresh: Any, count: int) -> None:
    """Texts that end before the trial, in its steps, and later."""
    text = plain(fresh, **ALONE)[0].tolist()
    eos = text[PROMPT.shape[1] + count - 1]
    ends = ALONE | {"eos_token_id": eos, "pad_token_id": 0}
    caches = [DynamicCache(), DynamicCache()]
    expected = plain(fresh, **ends, **{CACHE: caches[0]})
    output = fresh.generate(**ends, **{CACHE: caches[1]}, **DRAFTS["oracle"](expected[0].tolist()))
    assert output.tolist() == expected.tolist()
    assert_same_cache(caches[1], caches[0])


class Failing:
    """A processor that fails while a certain token is chosen."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise ValueError("no more")
        return scores


@pytest.mark.parametrize("at", [1, *range(NUM_REFERENCES, NUM_REFERENCES + 5)])
def test_a_cache_of_the_callers_holds_what_was_read_before_an_error(fresh: Any, at: int) -> None:
    """Also where the trial has read the last token over a cache of its own."""
    caches = [DynamicCache(), DynamicCache()]
    for cache, how in zip(caches, ({}, DRAFTS["prompt_lookup"]([])), strict=True):
        arguments = ALONE | {CACHE: cache, "logits_processor": [Failing(at)]} | how
        with pytest.raises(ValueError, match="no more"):
            fresh.generate(**arguments) if how else plain(fresh, **arguments)
    assert_same_cache(caches[1], caches[0])


def test_samples_follow_their_seed(fresh: Any) -> None:
    torch.manual_seed(5)
    expected = plain(fresh, **ALONE | {"do_sample": True})
    torch.manual_seed(5)
    assert fresh.generate(**ALONE | {"do_sample": True}, spec_method="auto").tolist() == expected.tolist()


@pytest.mark.at_most(2)
@pytest.mark.parametrize("num_tokens", [8, SHORTEST_CALL + 4])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_first_call_in_train_mode_drops_out_what_plain_generation_does(family: str, num_tokens: int) -> None:
    """Finding out that several tokens at once are not what they are one by one takes none of the call's numbers."""
    model = build(FAMILIES[family]).train()
    for module in model.modules():
        if family == "llama" and isinstance(module, type(model.model.layers[0].self_attn)):
            module.attention_dropout = 0.2
    call: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    torch.manual_seed(3)
    expected = plain(model, PROMPT, **call)
    torch.manual_seed(3)
    ours = hf_specdec.enable(model).generate(PROMPT, **call, spec_method="auto", return_dict_in_generate=True)
    assert ours.sequences.tolist() == expected.tolist()
    assert "eval()" in ours.spec_stats.plain_reason


def test_a_draft_in_train_mode_is_refused_with_the_remedy() -> None:
    model = hf_specdec.enable(build(FAMILIES["gpt2"]))
    draft = build(FAMILIES["gpt2"]).train()
    with pytest.raises(hf_specdec.UnsupportedModelError, match="train mode; call its eval"):
        model.generate(**ALONE, spec_method="draft_model", assistant_model=draft)
