"""`output_attentions`: the weights of each token are those of plain generation's forward of that token alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import hf_specdec
from hf_specdec.compat import CACHE
from tests.helpers import zoo, zoo_wide
from tests.helpers.support import MASK, METHODS, PADDED, PROMPT, assert_same_tensors, method_of, noisy_copy, plain

FIELDS = ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions", "hidden_states", "scores")
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_attentions": True}
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def eager() -> Callable[[str], Any]:
    """A family's model with eager attention, which gives weights."""
    known: dict[str, Any] = {}

    def family(name: str) -> Any:
        if name not in known:
            known[name] = hf_specdec.enable(zoo.build(zoo.FAMILIES[name]))
            known[name].set_attn_implementation("eager")
        return known[name]

    return family


def assert_same_weights(
    model: Any, ids: torch.Tensor, method: dict[str, Any], make: Callable[[], dict[str, Any]] = dict, **kwargs: Any
) -> Any:
    """Tokens and everything shown of them are plain generation's, decoded with drafts; returns our stats.

    Args:
        make: arguments made anew for each of the two calls.
    """
    asked = ASKED | OPTIONS | kwargs
    torch.manual_seed(0)
    expected = plain(model, ids, **asked | make())
    torch.manual_seed(0)
    ours = model.generate(ids, **asked | make(), **method)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for name in FIELDS:
        assert_same_tensors(getattr(ours, name, None), getattr(expected, name, None), atol=1e-3)
    assert ours.spec_stats.plain_reason is None
    return ours.spec_stats


@pytest.mark.at_most(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [name for name in zoo.FAMILIES if name not in zoo.FALLBACK])
def test_every_token_has_the_weights_of_its_text(eager: Callable[[str], Any], family: str, method: str) -> None:
    """Left out: columns of other branches, of longer rows, and of what a window has passed."""
    if method == "lookahead" and zoo.FAMILIES[family].tier == "chain":
        return
    model = eager(family)
    drafts = method_of(method, noisy_copy(model))
    stats = assert_same_weights(model, PROMPT, drafts)
    assert stats.num_accepted_tokens or method != "draft_model"
    assert_same_weights(model, PADDED, drafts, attention_mask=MASK, output_hidden_states=True)


def _earlier_turn(model: Any) -> dict[str, Any]:
    """A cache that holds the beginning of the prompt, its windows cut."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT[:, :24], **{CACHE: cache})
    return {CACHE: cache}


SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sampled": lambda _: {"do_sample": True, "top_k": 30, "output_scores": True},
    "an earlier turn is cached": _earlier_turn,
    "prompts read in chunks": lambda _: {"prefill_chunk_size": 7},
    "a long text": lambda _: {"max_new_tokens": 40, "output_hidden_states": True},
    "one new token": lambda _: {"max_new_tokens": 1},
}


@pytest.mark.at_most(5)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_every_setting_shows_the_same_weights(eager: Callable[[str], Any], family: str, setting: str) -> None:
    model = eager(family)
    drafts = method_of("draft_model", noisy_copy(model))
    assert_same_weights(model, PROMPT, drafts, lambda: SETTINGS[setting](model))


def test_rows_that_end_early_have_the_weights_of_their_padding(eager: Callable[[str], Any]) -> None:
    model = eager("gemma3")
    new = plain(model, PADDED, attention_mask=MASK, **OPTIONS)[:, PADDED.shape[1] :].tolist()
    drafts = method_of("draft_model", noisy_copy(model))
    assert_same_weights(model, PADDED, drafts, attention_mask=MASK, eos_token_id=[new[0][2], new[1][6]])


def test_early_exit_computes_the_weights_of_all_layers(eager: Callable[[str], Any]) -> None:
    method = {"spec_method": "draft_model", "spec_config": {"exit_layer": 1}}
    assert_same_weights(eager("llama"), PROMPT, method)


def test_layers_that_share_keys_have_the_window_of_their_type() -> None:
    """Gemma 3n's last layers have no cache of their own."""
    model = hf_specdec.enable(zoo_wide.build(zoo_wide.shrunk("gemma3n_text"), "causal", 0.15))
    model.set_attn_implementation("eager")
    assert_same_weights(model, PROMPT, METHODS["auto"])


def test_attention_that_gives_no_weights_shows_none(zoo: Callable[[str], Any]) -> None:
    model = zoo("gemma3")
    assert_same_weights(model, PROMPT, METHODS["auto"])
    assert plain(model, PROMPT, **ASKED | OPTIONS).attentions[1] == ()


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "a static cache": ({"cache_implementation": "static"}, "static cache"),
    "transformers' loop": ({"spec_config": {"engine": "assisted"}}, "assisted decoding"),
}


@pytest.mark.parametrize("setting", REASONS)
@pytest.mark.parametrize("by_default", [False, True])
def test_weights_of_other_columns_are_of_plain_decoding(
    eager: Callable[[str], Any], setting: str, by_default: bool
) -> None:
    model, (call, reason) = eager("llama"), REASONS[setting]
    how: dict[str, Any] = {"spec_method": "prompt_lookup"} | {n: v for n, v in call.items() if n == "spec_config"}
    call = {name: value for name, value in call.items() if name != "spec_config"} | OPTIONS | ASKED
    expected = plain(model, PROMPT, **call)
    if by_default:
        how = {"generation_config": GenerationConfig(**how, pad_token_id=0)}
    ours = model.generate(PROMPT, **call, **how)
    assert reason in ours.spec_stats.plain_reason
    assert_same_tensors(ours.attentions, expected.attentions)


def test_a_model_whose_weights_have_other_columns_is_decoded_plainly(
    eager: Callable[[str], Any],
) -> None:
    """As of attention over compressed keys: its layers' weights have a column for two tokens."""
    model = hf_specdec.enable(noisy_copy(eager("llama")))

    def halved(module: Any, args: Any, output: Any) -> Any:
        return (output[0], None if output[1] is None else output[1][..., ::2], *output[2:])

    hooks = [layer.self_attn.register_forward_hook(halved) for layer in model.model.layers]
    try:
        expected = plain(model, PROMPT, **ASKED | OPTIONS)
        ours = model.generate(PROMPT, **ASKED | OPTIONS, spec_method="prompt_lookup")
    finally:
        for hook in hooks:
            hook.remove()
    assert "output_attentions" in ours.spec_stats.plain_reason
    assert_same_tensors(ours.attentions, expected.attentions)
