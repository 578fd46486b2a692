"""`return_dict_in_generate`: the same class with the same contents, and `.spec_stats` besides them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers import zoo, zoo_wide
from tests.helpers.heads import random_head
from tests.helpers.support import MASK, PADDED, PROMPT, assert_same_run, assert_same_tensors, both, plain
from tests.promise.conftest import Draft

WANTED = ["output_scores", "output_logits", "output_hidden_states"]


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "t5"])
@pytest.mark.parametrize("wanted", [*WANTED, "all"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_what_is_asked_for_is_given_for_each_emitted_token(
    zoo: Callable[[str], Any], draft: Draft, family: str, wanted: str, do_sample: bool
) -> None:
    request = dict.fromkeys(WANTED if wanted == "all" else [wanted], True)
    processed = {"do_sample": do_sample, "top_k": 30, "repetition_penalty": 1.5}
    reference, ours = both(zoo(family), lambda: request | processed, draft)
    assert_same_run(ours, reference)
    for field in ("scores", "logits", "hidden_states", "decoder_hidden_states", "encoder_hidden_states"):
        assert_same_tensors(getattr(ours.output, field, None), getattr(reference.output, field, None), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "t5", "recurrent_gemma"])
def test_the_output_is_of_plain_decodings_class(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    reference, ours = both(zoo(family), dict, draft)
    assert isinstance(ours.output, type(reference.output))
    assert list(ours.output.keys())[: len(reference.output.keys())] == list(reference.output.keys())
    assert ours.output.spec_stats.num_tokens == 16
    assert ours.output["sequences"] is ours.output.sequences


def test_without_the_dictionary_the_output_is_the_tensor(model: Any, draft: Draft) -> None:
    reference, ours = both(model, lambda: {"return_dict_in_generate": None}, draft)
    assert type(ours.output) is torch.Tensor
    assert torch.equal(ours.output, reference.output)
    assert ours.output.dtype == torch.long


@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_a_call_without_a_cache_is_plain_generates(model: Any, method: str) -> None:
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    reference, ours = both(model, lambda: call | {"output_scores": True}, lambda _: {"spec_method": method})
    assert_same_run(ours, reference)
    assert_same_tensors(ours.output.scores, reference.output.scores)
    assert ours.output.get(CACHE) is reference.output.get(CACHE) is None
    assert "use_cache=False" in ours.stats.plain_reason


def test_what_is_shown_keeps_no_whole_steps_in_memory(model: Any, draft: Draft) -> None:
    _, ours = both(model, lambda: {"output_scores": True, "output_logits": True}, draft)
    shown = [*ours.output.scores, *ours.output.logits]
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in shown)


@pytest.mark.parametrize("model_type", ["gemma3n_text", "deepseek_v4"])
def test_several_streams_of_hidden_states_are_given_for_each_token(draft: Draft, model_type: str) -> None:
    """Gemma 3n's are `(streams, batch, length, hidden_size)`, DeepSeek-V4's `(batch, length, streams, hidden_size)`."""
    model = hf_specdec.enable(zoo_wide.build(zoo_wide.shrunk(model_type), "causal", 0.15))
    reference, ours = both(model, lambda: {"output_hidden_states": True, "max_new_tokens": 5}, draft)
    assert_same_run(ours, reference)
    assert reference.output.hidden_states[0][0].ndim == 4
    assert_same_tensors(ours.output.hidden_states, reference.output.hidden_states, atol=1e-3)


def test_a_draft_head_for_several_streams_of_hidden_states_is_refused() -> None:
    model = hf_specdec.enable(zoo_wide.build(zoo_wide.shrunk("deepseek_v4"), "causal", 0.15))
    with pytest.raises(hf_specdec.UnsupportedModelError, match="several streams.*without a draft head"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="eagle3", assistant_model=random_head(model))


FIELDS = ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions", "hidden_states", "scores")
CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "output_attentions": True, "output_scores": True}


@pytest.mark.parametrize("family", ["llama", "gemma3", "bart"])
@pytest.mark.parametrize("ids", [PROMPT, PADDED], ids=["row", "batch"])
def test_every_token_has_the_weights_of_its_text(family: str, ids: torch.Tensor) -> None:
    model = hf_specdec.enable(zoo.build(zoo.FAMILIES[family]))
    model.set_attn_implementation("eager")
    call = CALL | {"return_dict_in_generate": True, "output_hidden_states": True}
    call["attention_mask"] = MASK if len(ids) > 1 else torch.ones_like(ids)
    expected = plain(model, ids, **call)
    ours = model.generate(ids, **call, spec_method="auto")
    assert "output_attentions" in ours.spec_stats.plain_reason
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for name in FIELDS:
        assert_same_tensors(getattr(ours, name, None), getattr(expected, name, None))
