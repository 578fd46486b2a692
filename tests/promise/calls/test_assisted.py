"""`engine="assisted"`: the same drafters inside transformers' own assisted decoding, with that loop's limits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, SynthIDTextWatermarkingConfig

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.errors import ConfigError
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from tests.helpers.support import PROMPT, assert_same_cache, plain, run, speculative
from tests.helpers.zoo import FAMILIES, build
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


def test_a_model_that_makes_its_own_cache_decodes_plainly() -> None:
    """transformers' loop crops the cache that `generate` makes."""
    model = hf_specdec.enable(varied("minimax", "causal"))
    ours = run(model, speculative, dict, **ASSISTED)
    assert ours.ids == run(model, plain, dict).ids
    assert "an own cache of keys and values" in ours.stats.plain_reason


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


def test_embeddings_are_decoded_plainly(model: Any) -> None:
    call = {"inputs_embeds": model.get_input_embeddings()(PROMPT.flip(1)).detach(), "max_new_tokens": 4}
    assert model.generate(**call, do_sample=False, **ASSISTED).tolist() == plain(model, **call).tolist()


def test_a_draft_model_is_refused_with_what_to_do(model: Any) -> None:
    by_draft = {"spec_method": "draft_model", "assistant_model": model, "spec_config": {"engine": "assisted"}}
    with pytest.raises(ConfigError, match='`engine` must be "loop" with an assistant_model.*spec_method=None'):
        model.generate(PROMPT, max_new_tokens=4, **by_draft)


def test_an_observer_that_nobody_would_call_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match='`spec_observer` must be unset with engine="assisted".*engine="loop"'):
        model.generate(PROMPT, max_new_tokens=4, spec_observer=print, **ASSISTED)


def test_a_text_that_goes_on_over_a_cache_is_decoded_plainly(model: Any) -> None:
    """transformers' loop reads it from its start once more, over what is cached."""
    cache, options = DynamicCache(), {"max_new_tokens": 6, "do_sample": False}
    text = model.generate(PROMPT, **{CACHE: cache}, **options, **ASSISTED)
    longer = torch.cat([text, PROMPT], dim=1)
    output = model.generate(longer, **{CACHE: cache}, return_dict_in_generate=True, **options, **ASSISTED)
    assert output.sequences.tolist() == plain(model, longer, **options).tolist()
    assert "a text of token ids that begins" in output.spec_stats.plain_reason


@pytest.mark.parametrize("settings", KEEP_STATE)
def test_a_processor_that_keeps_state_leaves_it_to_plain_decoding(model: Any, settings: str) -> None:
    """Rejected tokens would stay in what it keeps: guidance computes the text without its prompt over its own cache."""
    ours, options = KEEP_STATE[settings](), {"max_new_tokens": 24, "do_sample": False}
    expected = plain(model, PROMPT, **options, **KEEP_STATE[settings]())
    output = model.generate(PROMPT, **options, **ours, return_dict_in_generate=True, **ASSISTED)
    assert output.sequences.tolist() == expected.tolist()
    assert "may keep state, in which transformers' assisted" in output.spec_stats.plain_reason


def test_a_recurrent_state_leaves_it_to_plain_decoding(zoo: Callable[[str], Any]) -> None:
    """Rejected tokens would stay in it."""
    model, ids, options = zoo("qwen3_next"), PROMPT[:, :10], {"max_new_tokens": 20, "do_sample": False}
    output = model.generate(ids, **options, return_dict_in_generate=True, **ASSISTED)
    assert output.sequences.tolist() == plain(model, ids, **options).tolist()
    assert "own cache of keys and values" in output.spec_stats.plain_reason


CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
LEFT = "or pass spec_method=None"
REFUSED: dict[str, tuple[str, Any]] = {
    "prompt_lookup_num_tokens": ("auto", 10),
    "max_matching_ngram_size": ("lookahead", 2),
    "num_assistant_tokens": ("draft_model", 5),
    "assistant_confidence_threshold": ("auto", 0.5),
    "assistant_early_exit": ("draft_model", 1),
    "num_assistant_tokens_schedule": ("draft_model", "constant"),
    "assistant_lookbehind": ("draft_model", 10),
    "target_lookbehind": ("draft_model", 10),
    "assistant_ensemble_weight": ("draft_model", 0.5),
    "use_mtp": ("auto", True),
    "speculation_type": ("draft_model", "dflash"),
}
QUIET_BY_CONFIGURATION = REFUSED.keys() - {
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
}


def decode(model: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """The call of a model that is not enabled."""
    return plain(model, *args, **kwargs, custom_generate=hf_specdec.decode, spec_assistant_model=assistant_model)


ROUTES = [speculative, decode]


@pytest.mark.parametrize("route", ROUTES)
def test_a_missing_head_is_named(model: Any, route: Any) -> None:
    with pytest.raises(ConfigError, match="AutoDraftHead") as error:
        route(model, PROMPT, **CALL, spec_method="eagle3")
    assert error.value.field == ("assistant_model" if route is speculative else "spec_assistant_model")


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_method_does_not_take_is_refused(model: Any, name: str) -> None:
    """By `custom_generate` too."""
    method, value = REFUSED[name]
    call: dict[str, Any] = {"spec_method": method}
    if method == "draft_model":
        call["assistant_model"] = build(FAMILIES["llama"])
    with pytest.raises(ConfigError, match=f'`{name}` must be unset with spec_method="{method}", but is ') as error:
        model.generate(PROMPT, **CALL, **call, **{name: value})
    assert LEFT in error.value.remedy
    with pytest.raises(ConfigError, match=f"`{name}` must be unset"):
        list(hf_specdec.generate_many(model, [PROMPT], **CALL, **call, **{name: value}))
    with pytest.raises(ConfigError, match=f'`{name}` must be unset with spec_method="{method}", but is ') as by_decode:
        decode(model, PROMPT, **CALL, **call, **{name: value})
    assert str(by_decode.value) == str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_generation_configuration_is_told_to_be_overridden(model: Any, name: str) -> None:
    """What does nothing by itself in transformers is left aside."""
    method, value = REFUSED[name]
    config = GenerationConfig(**{name: value}, pad_token_id=0)
    call: dict[str, Any] = {**CALL, "generation_config": config, "spec_method": method}
    if method == "draft_model":
        call["assistant_model"] = build(FAMILIES["llama"])
    if name not in QUIET_BY_CONFIGURATION:
        with pytest.raises(ConfigError, match=f"pass {name}=None, as a generation configuration sets it"):
            model.generate(PROMPT, **call)
        call[name] = None
    assert model.generate(PROMPT, **call).tolist() == plain(model, PROMPT, **CALL).tolist()


@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_a_tokenizer_of_no_draft_is_refused(model: Any, method: str) -> None:
    with pytest.raises(ConfigError, match="`assistant_tokenizer` must come with an assistant_model"):
        model.generate(PROMPT, **CALL, spec_method=method, assistant_tokenizer=object())


@pytest.mark.parametrize(
    ("method", "name"), [("prompt_lookup", "prompt_lookup_num_tokens"), ("draft_model", "num_assistant_tokens")]
)
def test_a_wrong_value_is_named_as_it_was_given(model: Any, method: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be a whole number of at least 1 and .*, but is 0"):
        model.generate(PROMPT, **CALL, spec_method=method, spec_config={name: 0})


@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_none_as_text_is_transformers_own_loop(model: Any, where: str) -> None:
    """For files and command lines, which have texts alone; a call's configuration switches a default off by it."""
    ours = GenerationConfig(**CALL, pad_token_id=0)
    ours.spec_method = "none"
    model.generation_config.spec_method = "prompt_lookup"
    inputs: dict[str, Any] = {"spec_method": "none", **CALL} if where == "argument" else {"generation_config": ours}
    try:
        output = model.generate(PROMPT, **inputs, return_dict_in_generate=True)
        (result,) = hf_specdec.generate_many(model, [PROMPT], **inputs)
    finally:
        del model.generation_config.spec_method
    assert not hasattr(output, "spec_stats")
    assert output.sequences.tolist() == plain(model, PROMPT, **CALL).tolist()
    assert (result.stats.method, result.token_ids) == ("plain", output.sequences[0, PROMPT.shape[1] :].tolist())
