"""A prompt with an image: read in the prompt's forward by transformers, followed by speculation as by plain decoding.

Positions in three dimensions (Qwen2-VL and its like), blocks that see one another (PaliGemma), a recurrent decoder.
"""

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import hf_specdec
from tests.helpers.drafters import OracleDrafter, RandomTreeDrafter
from tests.helpers.support import PROMPT
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
        assert output.spec_stats.plain_reason is None
        assert output.spec_stats.num_accepted_tokens > 0
