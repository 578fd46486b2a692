"""A prompt with an image: read in the prompt's forward by transformers, followed by speculation as by plain decoding.

Positions in three dimensions (Qwen2-VL and its like), blocks that see one another (PaliGemma), a recurrent decoder.
"""

from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlavaConfig, LlavaForConditionalGeneration

import hf_specdec
from hf_specdec.compat.generation import has_own_input_preparation
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo_wide import varied

pytestmark = pytest.mark.each_value_in_file
GRIDS = ("glm4v", "qwen2_vl", "qwen3_5", "qwen3_vl")  # images in patches of a grid
WHOLE = ("internvl", "paligemma")
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}


def with_image(model: Any, model_type: str, *, rows: int) -> dict[str, Any]:
    """The prompt with an image behind its fifth token; the second row has padding in front."""
    config, vision = model.config, model.config.vision_config
    generator = torch.Generator().manual_seed(0)
    if model_type in GRIDS:
        size = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        kwargs = {
            "pixel_values": torch.randn((16 * rows, size), generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        }
        start = getattr(config, "vision_start_token_id", None) or config.image_start_token_id
        image = [start, *[config.image_token_id] * 4]
    else:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        kwargs = {"pixel_values": torch.randn((rows, 3, side, side), generator=generator)}
        image = [config.image_token_id] * 256
    line = [*PROMPT[0, :5].tolist(), *image, *PROMPT[0, 5:].tolist()]
    ids = torch.tensor([[0] * (3 * row) + line[: len(line) - 3 * row] for row in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    types = (ids == config.image_token_id).long()
    name = "mm_token_type_ids" if model_type in GRIDS else "token_type_ids"
    named = {} if model_type == "internvl" else {name: types}
    return {"input_ids": ids, "attention_mask": mask, **kwargs, **named}


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("model_type", [*GRIDS, *WHOLE])
def test_an_image_in_the_prompt_changes_nothing(model_type: str, rows: int) -> None:
    model = varied(model_type, "image")
    hf_specdec.enable(model)
    inputs = with_image(model, model_type, rows=rows)
    expected = GenerationMixin.generate(model, **inputs, **SETTINGS).sequences
    blind = GenerationMixin.generate(
        model, input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **SETTINGS
    ).sequences
    assert blind.tolist() != expected.tolist(), "the image matters"
    for drafter in (OracleDrafter, RandomTreeDrafter):
        texts = iter(expected.tolist())
        output = model.generate(**inputs, **SETTINGS, spec_method=lambda: drafter(next(texts)))  # noqa: B023
        assert output.sequences.tolist() == expected.tolist()
        if rows > 1 and has_own_input_preparation(model):
            assert "for rows of one length" in output.spec_stats.plain_reason
        else:
            assert output.spec_stats.plain_reason is None
            assert output.spec_stats.num_accepted_tokens > 0


def tiny_llava() -> Any:
    """A model whose images are four tokens, 127."""
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 32, "eos_token_id": None}
    heads = {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vision_config": {**vision, "image_size": 28, "patch_size": 14}, "text_config": {**text, **heads}}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(**sizes, image_token_index=127, vision_feature_layer=-1)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return model


def test_images_share_no_batch() -> None:
    """Two prompts of the same tokens with images of their own, and a text between them."""
    model = tiny_llava()
    text_ids = PROMPT[:, :20]
    ids = torch.cat([text_ids, torch.tensor([[127] * 4]), text_ids], dim=1)
    images = [{"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)} for _ in range(2)]
    prompts = [images[0], {"input_ids": text_ids}, images[1]]
    expected = [plain(model, **prompt, max_new_tokens=6, do_sample=False)[0, -6:].tolist() for prompt in prompts]
    assert expected[0] != expected[2], "the image matters"
    results = list(hf_specdec.generate_many(model, prompts, max_batch_size=2, max_new_tokens=6, do_sample=False))
    assert [result.error for result in results] == [None] * 3
    assert {result.index: result.token_ids for result in results} == dict(enumerate(expected))


def test_images_leave_the_assisted_engine_to_plain_decoding() -> None:
    """Its first forward reads prompt and draft, and prompt lookup would draft the image's tokens."""
    model = hf_specdec.enable(tiny_llava())
    ids = torch.cat([PROMPT[:, :10], torch.tensor([[127] * 4]), PROMPT[:, 10:], PROMPT[:, :10]], dim=1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), **SETTINGS}
    assisted = {"spec_method": "prompt_lookup", "spec_config": {"engine": "assisted"}}
    output = model.generate(**inputs, **assisted)
    assert output.sequences.tolist() == plain(model, **inputs).sequences.tolist()
    assert "takes a text of token ids" in output.spec_stats.plain_reason
