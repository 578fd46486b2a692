"""Phi-4-multimodal puts sound where tokens of it stand, in every step: drafts may hold such a token by chance."""

from typing import Any

import pytest
import torch
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

import hf_specdec
from tests.helpers.support import DRAFTS, both, plain

SOUND, IMAGE = 101, 100


def made(**settings: Any) -> Any:
    """A tiny model of random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    tower = {"crop_size": 8, "image_size": 8, "patch_size": 4, "num_hidden_layers": 2, "image_token_id": IMAGE}
    audio = {"num_blocks": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "input_size": 16}
    audio |= {"nemo_conv_channels": 8, "audio_token_id": SOUND}
    config = Phi4MultimodalConfig(
        vocab_size=128,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        vision_config={**sizes, **tower},
        audio_config={**sizes, **audio},
        **sizes,
        **{"original_max_position_embeddings": 256} | settings,
    )
    torch.manual_seed(0)
    model = Phi4MultimodalForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.generation_config.eos_token_id = None
    return hf_specdec.enable(model)


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


def heard(seed: int = 0) -> dict[str, Any]:
    """A prompt that names three frames of sound twice in the words of a lookup, and that sound."""
    ids = torch.tensor([[5, 6, SOUND, SOUND, SOUND, 7, 8, 9, 10, 11, 12, 5, 6]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "audio_input_features": torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(seed)),
        "audio_embed_sizes": torch.tensor([3]),
        "audio_attention_mask": torch.ones(1, 24, dtype=torch.bool),
    }


def of_sound(text: list[int]) -> dict[str, Any]:
    """Drafts what follows in the prompt: the sound's own tokens."""
    return {"spec_method": "prompt_lookup", "spec_config": {"max_matching_ngram_size": 2, "max_draft_len": 4}}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ["prompt_lookup", "random_trees", "oracle", "auto"])
def test_a_draft_that_holds_tokens_of_sound_is_verified(model: Any, name: str, do_sample: bool) -> None:
    draft = of_sound if name == "prompt_lookup" else DRAFTS[name]
    reference, ours = both(model, lambda: {**heard(), "do_sample": do_sample}, draft)
    assert ours.ids == reference.ids
    assert ours.stats.tier == "tree"


def test_a_text_whose_cache_is_computed_anew_is_left_to_plain_generation() -> None:
    """Where long frequencies begin, the prompt with its sound is read again; plain generation does not get over it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 10000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 20, **factors}
    model = made(rope_parameters={**rope, "partial_rotary_factor": 1.0}, original_max_position_embeddings=20)
    expected = plain(model, **heard(), max_new_tokens=24)
    output = model.generate(
        **heard(), max_new_tokens=24, do_sample=False, spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    assert "may compute the cache anew" in output.spec_stats.plain_reason


def test_the_sound_counts(model: Any) -> None:
    assert not plain(model, **heard(), max_new_tokens=16).equal(plain(model, **heard(1), max_new_tokens=16))
