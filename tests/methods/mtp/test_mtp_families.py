"""MTP layers of the model classes that have them: which draft, and which are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.errors import CheckpointError, UnsupportedModelError
from tests.helpers.heads import SHAPES, always
from tests.helpers.mtp import build_target, random_mtp_head
from tests.helpers.mtp_layouts import announcing
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo_wide import shrunk


def test_a_composite_model_drafts_with_layers_of_its_decoders_type() -> None:
    model = hf_specdec.enable(announcing("kimi_k25", "image"))
    expected = plain(model, PROMPT, max_new_tokens=10, do_sample=False)
    for shape in SHAPES.values():
        how = always("mtp", shape)
        options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
        ours = model.generate(PROMPT, assistant_model=random_mtp_head(model), **options, **how)
        assert torch.equal(ours.sequences, expected)
        assert ours.spec_stats.num_draft_tokens > 0
        assert ours.spec_stats.plain_reason is None


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("kimi_linear", r"KimiLinearForCausalLM must be a model with MTP layers that can be read here"),
        ("nemotron_h", r"NemotronHForCausalLM must be a model with MTP layers that can be read here"),
        ("deepseek_v4", r"DeepseekV4ForCausalLM .*its own read the residual streams before they are joined.*another"),
        ("qwen4_exp", r"Qwen4ExpForCausalLM .*read the residual streams"),
        ("deepseek_v32", r"DeepseekV32ForCausalLM .*its own choose keys by an index.*another spec_method"),
    ],
)
def test_a_family_whose_layers_are_not_known_is_refused(family: str, reason: str) -> None:
    model = hf_specdec.enable(announcing(family, "causal"))
    with pytest.raises(UnsupportedModelError, match=reason):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")


def test_a_configuration_that_announces_no_layers_is_refused() -> None:
    model = hf_specdec.enable(announcing("glm4_moe", "causal", 0))
    with pytest.raises(UnsupportedModelError, match="announces 0"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")


def test_a_checkpoint_without_layers_is_refused_where_no_configuration_counts_them(tmp_path: Path) -> None:
    model = hf_specdec.enable(announcing("qwen3_next", "causal", None))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"MTP layers of Qwen3Next.*it has no MTP layers"):
        hf_specdec.AutoDraftHead.from_pretrained(str(tmp_path), target=model)


def test_layers_that_may_slide_are_refused_where_no_configuration_tells() -> None:
    model = build_target("mellum, sliding")
    model.config.mtp_layer_types = None
    with pytest.raises(UnsupportedModelError, match=r"transformers can build.*mtp_layer_types"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")


def test_layers_with_convolutions_are_refused() -> None:
    """They could not follow the accepted path."""
    config = shrunk("inkling_mm_model").get_text_config()
    config.num_mtp_layers = 1
    model = hf_specdec.enable(tf.InklingForCausalLM(config).eval())
    with pytest.raises(UnsupportedModelError, match="full or sliding attention .*some are hybrid"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=random_mtp_head(model))
