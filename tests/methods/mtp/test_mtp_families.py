"""MTP layers of the model classes that have them: which draft, and which are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.errors import UnsupportedModelError
from tests.helpers.head_cases import SHAPES, always
from tests.helpers.mtp import random_mtp
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import DECODER, WINDOW
from tests.helpers.zoo_wide import build, shrunk

# As in the published file: the lists go on with the MTP layers.
STEP: dict[str, Any] = {
    "head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "share_expert_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "dense"],
    "num_nextn_predict_layers": 2,
}


def step3p7() -> Any:
    config = shrunk("step3p7")
    config.text_config = tf.Step3p7TextConfig(**DECODER | STEP)
    return build(config, "image", 0.15)


def announcing(model_type: str, kind: str) -> Any:
    """A model whose configuration announces one MTP layer, in the words of its files."""
    config = shrunk(model_type)
    text = config.get_text_config()
    setattr(text, "num_mtp_layers" if hasattr(text, "num_mtp_layers") else "num_nextn_predict_layers", 1)
    return build(config, kind, 0.15)


DRAFTING: dict[str, Callable[[], Any]] = {
    "step3p7": step3p7,
    "kimi_k25": lambda: announcing("kimi_k25", "image"),
}


@pytest.mark.parametrize("family", DRAFTING)
def test_the_text_is_that_of_plain_generation(family: str) -> None:
    model = hf_specdec.enable(DRAFTING[family]())
    expected = plain(model, PROMPT, max_new_tokens=10, do_sample=False)
    for shape in SHAPES.values():
        how = always("mtp", shape)
        options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
        ours = model.generate(PROMPT, assistant_model=random_mtp(model), **options, **how)
        assert torch.equal(ours.sequences, expected)
        assert ours.spec_stats.num_draft_tokens > 0
        assert ours.spec_stats.plain_reason is None


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("kimi_linear", r"KimiLinearForCausalLM .*transformers knows.*num_mtp_layers is 0"),
        ("deepseek_v4", r"DeepseekV4ForCausalLM .*transformers knows.*num_mtp_layers is 0"),
        ("nemotron_h", r"NemotronHForCausalLM .*transformers knows.*num_mtp_layers is 0"),
        ("bailing_hybrid", r"BailingHybridForCausalLM .*transformers can build.*mtp_layer_types"),
    ],
)
def test_a_family_whose_layers_transformers_cannot_build_is_refused(family: str, reason: str) -> None:
    model = hf_specdec.enable(announcing(family, "causal"))
    with pytest.raises(UnsupportedModelError, match=reason):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")


def test_layers_with_convolutions_are_refused() -> None:
    """They could not follow the accepted path."""
    config = shrunk("inkling_mm_model").get_text_config()
    config.num_mtp_layers = 1
    model = hf_specdec.enable(tf.InklingForCausalLM(config).eval())
    with pytest.raises(UnsupportedModelError, match="full or sliding attention .*some are hybrid"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=random_mtp(model))
