"""Decoders that attend to states or images of the caller's: plain generate's tokens, and its caches for a next turn."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BlipTextConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MllamaConfig,
    MllamaForConditionalGeneration,
    WhisperConfig,
    WhisperForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

import hf_specdec
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import (
    PROMPT,
    assert_same_cache,
    assert_same_run,
    both,
    plain,
    speculative,
)

Draft = Callable[[list[int]], dict[str, Any]]
IMAGE = 7  # the token in whose place Mllama's image is named
NUM_STATES = 5


def blip() -> Any:
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "encoder_hidden_size": 32, "max_position_embeddings": 128}
    return BlipTextLMHeadModel(BlipTextConfig(vocab_size=128, bos_token_id=1, is_decoder=True, **heads, **sizes))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, add_cross_attention=True))


def mllama() -> Any:
    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "pad_token_id": 0}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    vision = {"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"intermediate_size": 16, "image_size": 8, "patch_size": 4, "vision_output_dim": 32}
    vision |= {"max_num_tiles": 1, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    return MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE))


def whisper() -> Any:
    names = [f"{part}_{what}" for part in ("encoder", "decoder") for what in ("layers", "attention_heads")]
    sizes = {"vocab_size": 128, "d_model": 32, "pad_token_id": 0, **dict.fromkeys(names, 2)}
    return WhisperForCausalLM(WhisperConfig(**sizes))


REASON = dict.fromkeys(("blip", "gpt2"), "its decoder attends to encoder_hidden_states besides its text")
REASON["whisper"] = "its decoder attends to encoder_outputs besides its text"
MODELS: dict[str, Callable[[], Any]] = {"blip": blip, "gpt2": gpt2, "mllama": mllama, "whisper": whisper}


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, built: dict[str, Any]) -> Any:
    """The family's, with weights large enough for texts that do not stand still."""
    family = request.getfixturevalue("family")
    if family not in built:
        torch.manual_seed(3)
        made = MODELS[family]().eval()
        for weight in made.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.4 if family in ("gpt2", "whisper") else 0.2)
            elif not weight.any():
                torch.nn.init.constant_(weight, 1.0)  # gates, by which Mllama leaves an untrained image out
        made.generation_config.eos_token_id = None
        made.generation_config.pad_token_id = 0
        built[family] = hf_specdec.enable(made)
    return built[family]


def seen(model: Any, batch: int = 1, *, padded: bool = False) -> dict[str, Any]:
    """Prompts and what is seen besides them, other images or states for each row."""
    ids = torch.cat([PROMPT.roll(row, 1) for row in range(batch)])
    mask = torch.ones_like(ids)
    if padded:
        mask[1:, :3] = 0
    generator = torch.Generator().manual_seed(5)
    if model.config.model_type != "mllama":
        states = torch.randn(batch, NUM_STATES, 32, generator=generator)
        temporary = {"encoder_hidden_states": states}
        if model.config.model_type == "whisper":
            temporary = {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
        return {"input_ids": ids, "attention_mask": mask, **temporary}
    ids[:, 4] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(batch, 1, 1, 3, 8, 8, generator=generator),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, ids.shape[1], 1, 1, dtype=torch.long),
    }


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_every_draft_gives_plains_tokens_and_cache(model: Any, family: str, draft: Draft, do_sample: bool) -> None:
    reference, ours = both(model, lambda: {**seen(model), "do_sample": do_sample}, draft)
    assert_same_run(ours, reference)
    assert type(ours.output[CACHE]) is type(reference.output[CACHE])
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])
    assert ours.stats.plain_reason == (None if family == "mllama" else REASON[family])


@pytest.mark.parametrize("family", MODELS)
def test_what_is_seen_counts(model: Any, family: str) -> None:
    """Else no test here would see a model that leaves it out."""
    inputs = seen(model)
    text = plain(model, **inputs, max_new_tokens=16)
    others = seen(model, 2)  # of the second row's
    names = inputs.keys() - {"input_ids", "attention_mask"}
    other = {
        name: others[name][1:] if isinstance(inputs[name], torch.Tensor) else (others[name][0][1:],) for name in names
    }
    assert not plain(model, **inputs | other, max_new_tokens=16).equal(text)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("family", MODELS)
def test_each_row_of_a_batch_sees_its_own(model: Any, family: str, method: str, padded: bool) -> None:
    """Rows end at different places, and the others go on."""
    how = {**seen(model, 3, padded=padded), "max_new_tokens": 16}
    text = plain(model, **how)[:, PROMPT.shape[1] :]
    how["eos_token_id"] = [int(text[0, 4]), int(text[1, 8])]
    expected = plain(model, **how)
    assert speculative(model, **how, spec_method=method).tolist() == expected.tolist()


@pytest.mark.parametrize("family", MODELS)
def test_a_text_goes_on_over_the_cache_of_either(model: Any, family: str) -> None:
    """Two turns, plain and with drafts in any order; the second one's image or states are those of the first.

    Mllama sees less of the image in a forward of several tokens where the second turn has no cross_attention_mask.
    """
    inputs = seen(model)
    second = {name: value for name, value in inputs.items() if name.startswith("encoder")}
    texts = []
    for ways in ((None, None), ("prompt_lookup", "prompt_lookup"), (None, "auto"), ("lookahead", None)):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        how = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
        first = model.generate(**inputs, **how, **{CACHE: cache}, spec_method=ways[0])
        ids = torch.cat([first.sequences, torch.tensor([[30, 31]])], dim=1)
        kept = first[CACHE]
        texts.append(model.generate(ids, **second, **how, **{CACHE: kept}, spec_method=ways[1]).sequences.tolist())
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize("family", ["mllama"])
def test_draft_models_draft_beside_images(model: Any, family: str) -> None:
    how = {**seen(model), "max_new_tokens": 16}
    expected = plain(model, **how).tolist()
    assistant = copy.deepcopy(hf_specdec.disable(copy.deepcopy(model)))
    assert speculative(model, **how, spec_method="draft_model", assistant_model=assistant).tolist() == expected
