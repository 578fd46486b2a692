"""Modes without a speculative form are refused with what to do instead, and leave the model as it was."""

from typing import Any

import pytest
from transformers import GenerationConfig

from hf_specdec.compat.caches import CACHE
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

MODES: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "force_words_ids": {"force_words_ids": [[5]]},
    "constraints": {"constraints": ["anything"]},
    "token_healing": {"token_healing": True},
    "use_mtp": {"use_mtp": True},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "cache_implementation": {"cache_implementation": "paged"},
}


@pytest.mark.at_most(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", ["argument", "generation_config", "model"])
def test_the_mode_is_named_and_the_remedy_given(model: Any, mode: str, by: str) -> None:
    """Wherever the setting comes from; afterwards the model goes on."""
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False).tolist()
    kwargs: dict[str, Any] = {"max_new_tokens": 8, "spec_method": "prompt_lookup"}
    before = model.generation_config
    if by == "argument":
        kwargs |= MODES[mode]
    elif by == "generation_config":
        kwargs["generation_config"] = GenerationConfig(**MODES[mode], pad_token_id=0)
    else:
        model.generation_config = GenerationConfig(**MODES[mode], pad_token_id=0)
    try:
        with pytest.raises(ValueError, match=f"`{mode}`") as error:
            model.generate(PROMPT, **kwargs)
    finally:
        model.generation_config = before
    assert "spec_method" in str(error.value)
    for method in (None, "prompt_lookup"):
        output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method=method)
        assert output.tolist() == expected


def test_an_assistant_model_beside_a_method_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match='`assistant_model`.*Use spec_method="draft_model" or "auto"'):
        model.generate(PROMPT, max_new_tokens=4, assistant_model=build(FAMILIES["llama"]), spec_method="prompt_lookup")


def test_another_custom_method_beside_ours_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="`custom_generate`"):
        model.generate(
            PROMPT, max_new_tokens=4, custom_generate=lambda *args, **kwargs: None, spec_method="prompt_lookup"
        )


def test_without_a_method_every_mode_of_transformers_works(model: Any) -> None:
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False, **MODES["num_beams"]).tolist()
    assert model.generate(PROMPT, max_new_tokens=8, do_sample=False, **MODES["num_beams"]).tolist() == expected


def test_gradients_are_not_recorded(model: Any) -> None:
    output = model.generate(
        PROMPT, max_new_tokens=4, return_dict_in_generate=True, output_logits=True, spec_method="prompt_lookup"
    )
    assert not output.logits[-1].requires_grad
    assert not output[CACHE].layers[0].keys.requires_grad


def test_a_model_in_training_mode_still_generates(model: Any) -> None:
    """The zoo has no dropout in its Llama, so the result is the same."""
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False).tolist()
    model.train()
    try:
        output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup")
        assert model.training
    finally:
        model.eval()
    assert output.tolist() == expected
