"""`engine="assisted"`: the same drafters inside transformers' own assisted decoding, with that loop's limits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, SynthIDTextWatermarkingConfig

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.errors import ConfigError
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from tests.helpers.support import PROMPT, assert_same_cache, plain, run, speculative
from tests.helpers.zoo_wide import varied

SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[5, 9, 3], ngram_len=3)
KEEP_STATE: dict[str, Callable[[], dict[str, Any]]] = {
    "guidance": lambda: {"guidance_scale": 3.0},
    "SynthID": lambda: {"watermarking_config": SYNTH_ID},
    "a user's own": lambda: {"logits_processor": LogitsProcessorList([SYNTH_ID.construct_processor(128, "cpu")])},
}
ASSISTED = {"spec_method": "prompt_lookup", "spec_config": PromptLookupConfig(engine="assisted", draft_len_per_match=4)}


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "mixtral", "bloom", "t5"])
def test_greedy_text_is_the_same(zoo: Callable[[str], Any], family: str) -> None:
    model = zoo(family)
    ours = run(model, speculative, lambda: {"max_new_tokens": 24}, **ASSISTED)
    assert ours.ids == run(model, plain, lambda: {"max_new_tokens": 24}).ids
    stats = ours.stats
    assert stats.num_tokens == 24
    assert stats.num_accepted_tokens > 0
    assert stats.num_tokens == stats.num_drafts + stats.num_accepted_tokens


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_model_that_makes_its_own_cache_decodes_plainly(has_draft_model: bool) -> None:
    """transformers' loop crops the cache that `generate` makes."""
    model = hf_specdec.enable(varied("minimax", "causal"))
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    ours = run(model, speculative, dict, **by_draft if has_draft_model else ASSISTED)
    assert ours.ids == run(model, plain, dict).ids
    assert "cache that the model makes itself" in ours.stats.plain_reason


@pytest.mark.at_most(2)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "lfm2", "t5"])
def test_the_cache_is_as_plain_generate_leaves_it(zoo: Callable[[str], Any], family: str) -> None:
    """Its windows and convolutions do not go on to keep what they drop."""
    ours, expected = (run(zoo(family), how, dict, **kwargs) for how, kwargs in ((speculative, ASSISTED), (plain, {})))
    assert ours.ids == expected.ids
    assert_same_cache(ours.output[CACHE], expected.output[CACHE])


def test_a_text_that_ends_early_ends_at_its_end(zoo: Callable[[str], Any]) -> None:
    model = zoo("llama")
    eos = run(model, plain, dict).ids[-4]
    expected = run(model, plain, lambda: {"eos_token_id": eos})
    ours = run(model, speculative, lambda: {"eos_token_id": eos}, **ASSISTED)
    assert ours.ids == expected.ids
    assert ours.stats.num_tokens == len(expected.ids) - PROMPT.shape[1]


@pytest.mark.parametrize("ids", [None, PROMPT], ids=["alone", "next to ids"])
def test_what_that_loop_cannot_do_is_said(model: Any, ids: Any) -> None:
    """The error names the engine or transformers' own limit, and the model stays usable; a default steps aside."""
    call = {"inputs_embeds": model.get_input_embeddings()(PROMPT.flip(1)).detach(), "max_new_tokens": 4}
    call |= {} if ids is None else {"input_ids": ids}
    with pytest.raises(ValueError, match="engine"):
        model.generate(**call, **ASSISTED)
    assert run(model, speculative, dict, **ASSISTED).ids == run(model, plain, dict).ids
    model.generation_config.spec_method, model.generation_config.spec_config = ASSISTED.values()
    try:
        assert model.generate(**call, do_sample=False).tolist() == plain(model, **call, do_sample=False).tolist()
    finally:
        del model.generation_config.spec_method, model.generation_config.spec_config


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_an_observer_that_nobody_would_call_is_refused(model: Any, has_draft_model: bool) -> None:
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    how = by_draft if has_draft_model else ASSISTED
    with pytest.raises(ConfigError, match='`spec_observer` must be unset with engine="assisted".*engine="loop"'):
        model.generate(PROMPT, max_new_tokens=4, spec_observer=print, **how)


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_text_that_goes_on_over_a_cache_is_decoded_plainly(model: Any, has_draft_model: bool) -> None:
    """transformers' loop reads it from its start once more, over what is cached."""
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    how = by_draft if has_draft_model else ASSISTED
    cache, options = DynamicCache(), {"max_new_tokens": 6, "do_sample": False}
    text = model.generate(PROMPT, **{CACHE: cache}, **options, **how)
    longer = torch.cat([text, PROMPT], dim=1)
    output = model.generate(longer, **{CACHE: cache}, return_dict_in_generate=True, **options, **how)
    assert output.sequences.tolist() == plain(model, longer, **options).tolist()
    assert "reads a text from its start" in output.spec_stats.plain_reason


@pytest.mark.at_most(1)
@pytest.mark.parametrize("settings", KEEP_STATE)
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_processor_that_keeps_state_leaves_it_to_plain_decoding(
    model: Any, has_draft_model: bool, settings: str
) -> None:
    """Rejected tokens would stay in what it keeps: guidance computes the text without its prompt over its own cache."""
    ours, options = KEEP_STATE[settings](), {"max_new_tokens": 24, "do_sample": False}
    expected = plain(model, PROMPT, **options, **KEEP_STATE[settings]())
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    how = by_draft if has_draft_model else ASSISTED
    output = model.generate(PROMPT, **options, **ours, return_dict_in_generate=True, **how)
    assert output.sequences.tolist() == expected.tolist()
    assert "keeps state, in which transformers' assisted" in output.spec_stats.plain_reason


def test_a_recurrent_state_leaves_it_to_plain_decoding(zoo: Callable[[str], Any]) -> None:
    """Rejected tokens would stay in it."""
    model, ids, options = zoo("qwen3_next"), PROMPT[:, :10], {"max_new_tokens": 20, "do_sample": False}
    expected = plain(model, ids, **options)
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    for how in (ASSISTED, by_draft):
        output = model.generate(ids, **options, return_dict_in_generate=True, **how)
        assert output.sequences.tolist() == expected.tolist()
        assert "leaves rejected tokens in a recurrent state" in output.spec_stats.plain_reason
