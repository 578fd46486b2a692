"""MTP layers of the model classes that have them: which draft, and which are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.errors import UnsupportedModelError
from tests.helpers.head_cases import SHAPES, always
from tests.helpers.mtp import build_target, random_mtp, save_numbered
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
    ],
)
def test_a_family_whose_layers_transformers_cannot_build_is_refused(family: str, reason: str) -> None:
    model = hf_specdec.enable(announcing(family, "causal"))
    with pytest.raises(UnsupportedModelError, match=reason):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")


def test_layers_whose_types_no_configuration_tells_are_read_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bailing's hybrid: full attention and experts; the configuration stays as it is."""
    model = announcing("bailing_hybrid", "causal")
    text, number = model.config, model.config.num_hidden_layers
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{number}\..*"])
    types = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
    for name, value in types.items():
        setattr(text, name, value)
    mtp = random_mtp(model)
    for name in types:
        delattr(text, name)
    save_numbered(model, mtp, tmp_path)
    target = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, precision="fp32")
    expected = plain(target, PROMPT, max_new_tokens=10, do_sample=False)
    trees: list[list[Any]] = [[], []]
    for assistant, told in zip((None, mtp), trees, strict=True):
        ours = target.generate(
            PROMPT,
            max_new_tokens=10,
            do_sample=False,
            assistant_model=assistant,
            spec_observer=lambda step, told=told: told.append(step.tree.tokens),
            **always("mtp", SHAPES["chain"]),
        )
        assert torch.equal(ours, expected)
    assert trees[0] == trees[1] != []
    assert any(len(tokens) > 1 for tokens in trees[0])
    assert not any(hasattr(target.config, name) for name in types)


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
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=random_mtp(model))
