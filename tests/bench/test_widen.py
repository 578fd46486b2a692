"""Widening changes a model's size and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.methods.eagle3.network import save_head
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.widen import check_widening, read_size, widen, widen_head
from tests.bench.conftest import tiny_llama
from tests.helpers.head_models import random_dflash_head
from tests.helpers.heads import QWEN3, random_head
from tests.helpers.zoo import FAMILIES, build

IDS = torch.arange(40).unsqueeze(0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [(32, 2), (32, 5), (80, 2), (96, 4)])
def test_the_logits_stay_and_the_size_grows(size: tuple[int, int], tied: bool) -> None:
    model = tiny_llama(200, tie_word_embeddings=tied, attention_bias=not tied)
    large = widen(model, hidden_size=size[0], num_layers=size[1])
    assert (large.config.hidden_size, large.config.num_hidden_layers) == size
    assert sum(p.numel() for p in large.parameters()) >= sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(large(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-5)
    assert check_widening(model, large) < 1e-4


def test_norms_of_single_heads_stay_as_they_are() -> None:
    model = build(FAMILIES["qwen3"]).eval()
    assert check_widening(model, widen(model, hidden_size=96, num_layers=4)) < 1e-4


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model = tiny_llama(200)
    before, state = model(IDS).logits, torch.get_rng_state()
    widen(model, hidden_size=64, num_layers=3)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_added_units_do_work() -> None:
    """Weights of zero would let a machine skip what a real model of the size computes."""
    large = widen(tiny_llama(200), hidden_size=64, num_layers=3)
    for name, parameter in large.named_parameters():
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            assert (parameter != 0).float().mean() > 0.99, name


def test_a_widened_checkpoint_can_be_saved_and_loaded(tmp_path: object) -> None:
    model = tiny_llama(200)
    widen(model, hidden_size=64, num_layers=3).save_pretrained(str(tmp_path))
    assert check_widening(model, tf.AutoModelForCausalLM.from_pretrained(str(tmp_path))) < 1e-4


def test_a_difference_is_an_error() -> None:
    model = tiny_llama(200)
    large = widen(model, hidden_size=64, num_layers=3)
    with torch.no_grad():
        large.model.layers[2].mlp.down_proj.weight.fill_(1.0)
    with pytest.raises(UnsupportedModelError, match="changes its logits"):
        check_widening(model, large)


def test_models_of_another_shape_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Llama-shaped"):
        widen(build(FAMILIES["gpt2"]), hidden_size=96, num_layers=4)


@pytest.mark.parametrize("size", [(16, 2), (32, 1), (40, 2)])
def test_sizes_that_cannot_be_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="widen"):
        widen(tiny_llama(200), hidden_size=size[0], num_layers=size[1])


def test_a_size_is_read_as_hidden_x_layers() -> None:
    assert read_size("768x12") == (768, 12)
    for text in ("768", "x12", "768x", "ax1", "0x4"):
        with pytest.raises(ConfigError, match="HIDDENxLAYERS"):
            read_size(text)


def trees_of(target: Any, head: Any, method: str = "eagle3") -> list[Any]:
    """What the head drafts, step by step."""
    trees: list[Any] = []
    target.generate(
        IDS,
        max_new_tokens=12,
        do_sample=False,
        spec_method=method,
        assistant_model=head,
        spec_config={"num_branches": 3, "max_draft_len": 3, "confidence_threshold": 0.0},
        spec_observer=lambda step: trees.append(step.tree),
    )
    return trees


@pytest.mark.at_most(2)
@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"layer_class": QWEN3, "draft_vocab_size": 100}],
    ids=["llama", "norm_before_fc", "fc_norm", "qwen3, fewer tokens"],
)
@pytest.mark.parametrize("layer_ids", [(0, 1), (1, 2)], ids=["first layers", "with the last layer"])
def test_a_widened_head_drafts_the_same(flags: dict[str, Any], layer_ids: tuple[int, ...]) -> None:
    model = hf_specdec.enable(tiny_llama(200))
    head = random_head(model, layer_ids=layer_ids, **flags)
    large = hf_specdec.enable(widen(model, hidden_size=64, num_layers=4))
    wide = widen_head(head, model, large)
    assert wide.fc.weight.shape == (64, 128)
    assert sum(p.numel() for p in wide.parameters()) > 2 * sum(p.numel() for p in head.parameters())
    drafted = [trees_of(target, own) for target, own in ((model, head), (large, wide))]
    assert drafted[0] == drafted[1]
    assert any(drafted[0])


def test_a_widened_dflash_head_drafts_the_same() -> None:
    model = hf_specdec.enable(tiny_llama(200))
    head = random_dflash_head(model, kind="dflash, reduced")
    head.mask_embedding = torch.nn.Parameter(torch.randn(32) * 0.3, requires_grad=False)
    large = hf_specdec.enable(widen(model, hidden_size=64, num_layers=4))
    wide = widen_head(head, model, large)
    assert wide.fc.weight.shape == (64, 128)
    drafted = [trees_of(target, own, "dflash") for target, own in ((model, head), (large, wide))]
    assert drafted[0] == drafted[1]
    assert any(drafted[0])


@pytest.mark.parametrize("size", [(32, 4), (64, 3)], ids=["deeper", "wider"])
def test_a_loaded_model_is_widened_with_its_head(size: tuple[int, int], tokenizer: Any, tmp_path: Path) -> None:
    """Also where the head's file leaves it to the number of layers which states are read."""
    model = hf_specdec.enable(tiny_llama(len(tokenizer), num_hidden_layers=3))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    save_head(random_head(model, layer_ids=None), tmp_path / "head")
    drafted = []
    for widen_to in (None, size):
        loaded = load_model(
            str(tmp_path / "model"), dtype="fp32", assistant_models=[str(tmp_path / "head")], widen_to=widen_to
        )
        drafted.append(trees_of(loaded.model, loaded.head))
    assert drafted[0] == drafted[1]
    assert any(drafted[0])


def test_a_head_of_another_width_is_not_widened() -> None:
    model = tiny_llama(200)
    with pytest.raises(UnsupportedModelError, match="hidden size 32"):
        widen_head(random_head(build(FAMILIES["qwen3"])), model, widen(model, hidden_size=64, num_layers=2))


def test_a_widened_model_has_its_size_in_its_name_and_is_not_quantised() -> None:
    loaded = load_model(dtype="bf16", device="cpu", widen_to=(512, 7))
    assert loaded.name == "embedded, 512x7"
    assert loaded.model.dtype == loaded.head.dtype == loaded.draft_model.dtype == torch.bfloat16
    assert loaded.head.hidden_size == loaded.model.config.hidden_size == 512
    with pytest.raises(ConfigError, match="`dtype` must be fp32, bf16 or fp16 with a widened model"):
        load_model(dtype="fp8", device="cpu", widen_to=(512, 7))
