"""transformers' arguments of assisted generation next to a method are refused, with what takes their place."""

from typing import Any

import pytest
from transformers import GenerationConfig

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.support import PROMPT, plain, speculative
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
LEFT = "or pass spec_method=None"
REFUSED: dict[str, tuple[str, Any, str]] = {
    "prompt_lookup_num_tokens": ("auto", 10, 'spec_config={"max_draft_len": ...}'),
    "max_matching_ngram_size": ("lookahead", 2, "spec_config of spec_method"),
    "num_assistant_tokens": ("draft_model", 5, 'spec_config={"draft_len": ...}'),
    "assistant_confidence_threshold": ("auto", 0.5, '{"confidence_threshold": ...}'),
    "assistant_early_exit": ("draft_model", 1, "num_hidden_layers"),
    "num_assistant_tokens_schedule": ("draft_model", "constant", "confidence_threshold"),
    "assistant_lookbehind": ("draft_model", 10, "word boundary"),
    "target_lookbehind": ("draft_model", 10, "word boundary"),
    "assistant_ensemble_weight": ("draft_model", 0.5, "other texts"),
    "use_mtp": ("auto", True, 'Use spec_method="mtp"'),
    "speculation_type": ("draft_model", "dflash", 'Use spec_method="dflash"'),
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
    method, value, remedy = REFUSED[name]
    call: dict[str, Any] = {"spec_method": method}
    if method == "draft_model":
        call["assistant_model"] = build(FAMILIES["llama"])
    with pytest.raises(ConfigError, match=f'`{name}` must be unset with spec_method="{method}", but is ') as error:
        model.generate(PROMPT, **CALL, **call, **{name: value})
    assert remedy in error.value.remedy
    assert LEFT in error.value.remedy
    with pytest.raises(ConfigError, match=f"`{name}` must be unset"):
        list(hf_specdec.generate_many(model, [PROMPT], **CALL, **call, **{name: value}))
    with pytest.raises(ConfigError, match=f'`{name}` must be unset with spec_method="{method}", but is ') as by_decode:
        decode(model, PROMPT, **CALL, **call, **{name: value})
    assert str(by_decode.value) == str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_generation_configuration_is_told_to_be_overridden(model: Any, name: str) -> None:
    """What does nothing by itself in transformers is left aside."""
    method, value, _ = REFUSED[name]
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
