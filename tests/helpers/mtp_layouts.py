"""Checkpoints with MTP layers as each family publishes them, made of tiny random models.

The blocks of the MTP layers are layers of a second model of the same configuration: its own file gives their names,
and its modules compute what the layers must compute.

    layout = LAYOUTS["qwen3_5"]
    pair = layout.save(folder)
    logits = reference_logits(layout, pair, text)
"""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hf_specdec
from tests.helpers.zoo_wide import build, shrunk

__all__ = ["LAYOUTS", "Layout", "Saved", "announcing", "reference_logits"]
ONE_NECK = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "proj": "mtp.fc",
    "norm": "mtp.norm",
}
NECK = {name: f"{{layer}}.{published}" for name, published in (("enorm",) * 2, ("hnorm",) * 2, ("proj", "eh_proj"))}
SHARED_HEAD, FINAL = {"norm": "{layer}.shared_head.norm"}, {"norm": "{layer}.final_layernorm"}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A target, the model whose layers its MTP layers are, and the weights besides them by name and MTP layer."""

    target: Any
    donor: Any
    parts: list[dict[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a family publishes MTP layers.

    Attributes:
        make: makes the target.
        blocks: the model's layers that are of the type of one MTP layer's blocks.
        outer: names of what is besides the blocks; `{layer}` is the prefix of the MTP layer.
        layer: that prefix; `{number}` counts after the model's layers, `{place}` from 0.
        block: prefix of a block's weights; `{block}` counts the blocks of all MTP layers.
        renamed: names inside a block that differ from the model's.
        gemma_norm: whether norms multiply by one and the weight.
        slides: whether the layers have a window.
        num_layers: MTP layers.
    """

    make: Callable[[], Any]
    blocks: tuple[int, ...]
    outer: dict[str, str]
    layer: str = "model.layers.{number}"
    block: str = "{layer}"
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    gemma_norm: bool = False
    slides: bool = False
    num_layers: int = 1

    def save(self, folder: Path) -> Saved:
        """The target's checkpoint with its MTP layers."""
        target = hf_specdec.enable(self.make())
        donor = copy.deepcopy(target)
        text = target.config.get_text_config()
        random = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in donor.parameters():
                weight.add_(torch.randn(weight.shape, generator=random), alpha=0.1)
        donor.save_pretrained(folder / "donor")
        inputs, weights, parts = load_file(folder / "donor" / "model.safetensors"), {}, []
        sizes = {"proj": (text.hidden_size, 2 * text.hidden_size)}
        for place in range(self.num_layers):
            layer = self.layer.format(number=text.num_hidden_layers + place, place=place)
            mine = {}
            for name, published in self.outer.items():
                size = sizes.get(name, (text.hidden_size,))
                mine[name] = 0.15 * torch.randn(size, generator=random) + (len(size) == 1)
                weights[published.format(layer=layer) + ".weight"] = mine[name]
            parts.append(mine)
            for block, number in enumerate(self.blocks):
                prefix = self.block.format(layer=layer, place=place, block=place * len(self.blocks) + block)
                for name, weight in inputs.items():
                    result = re.search(rf"(?:^|\.)layers\.{number}\.(.+)", name)
                    if result and "vis" not in name:
                        inner = result[1]
                        for ours, published in self.renamed.items():
                            inner = inner.replace(ours, published)
                        weights[f"{prefix}.{inner}"] = weight.clone()
        target.save_pretrained(folder)
        save_file(load_file(folder / "model.safetensors") | weights, folder / "model.safetensors", {"format": "pt"})
        return Saved(target, donor, parts)


def _normed(states: torch.Tensor, weight: torch.Tensor, layout: Layout, eps: float) -> torch.Tensor:
    scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * (weight + 1 if layout.gemma_norm else weight)


def reference_logits(layout: Layout, saved: Saved, text: torch.Tensor) -> list[torch.Tensor]:
    """`(1, length - 1 - s, vocab_size)` of MTP layer s over a text `(1, length)`, computed by the formula."""
    target, decoder = saved.target, saved.donor.get_decoder()
    config = target.config.get_text_config()
    eps = config.rms_norm_eps
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states[-1]
        embedded = target.get_input_embeddings()(text)
        logits = []
        for place, parts in enumerate(saved.parts):
            states = states[:, :-1]
            positions = torch.arange(place + 1, text.shape[1])[None]
            pair = (
                _normed(embedded[:, place + 1 :], parts["enorm"], layout, eps),
                _normed(states, parts["hnorm"], layout, eps),
            )
            hidden = torch.cat(pair, dim=-1) @ parts["proj"].T
            ahead = positions[..., None] - positions[:, None]
            seen = ((ahead >= 0) & (ahead < config.sliding_window if layout.slides else True))[:, None]
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
            rotary = getattr(decoder, "rotary_emb", None)
            kind = (
                {"layer_type": "sliding_attention"}
                if "sliding_attention" in (getattr(config, "rope_parameters", None) or {})
                else {}
            )
            angles = None if rotary is None else rotary(hidden, position_ids=positions, **kind)
            seen_by = {"attention_mask": mask, "position_embeddings": angles, "position_ids": positions}
            for number in layout.blocks:
                layer = decoder.layers[number]
                hidden = layer(hidden, **seen_by)
            states = _normed(hidden, parts["norm"], layout, eps)
            logits.append(target.lm_head(states))
    return logits


def announcing(model_type: str, kind: str, count: int | None = 1, **changes: Any) -> Any:
    """A model whose configuration announces MTP layers, in the words of its files; `None` announces nothing."""
    config = shrunk(model_type)
    text = config.get_text_config()
    for name, value in changes.items():
        setattr(text, name, value)
    if count is not None and "mtp_num_hidden_layers" not in changes:
        setattr(text, "num_mtp_layers" if hasattr(text, "num_mtp_layers") else "num_nextn_predict_layers", count)
    return build(config, kind, 0.15)


def _of(model_type: str, kind: str = "causal", count: int | None = 1, **changes: Any) -> Callable[[], Any]:
    return lambda: announcing(model_type, kind, count, **changes)


LAYOUTS: dict[str, Layout] = {
    "bailing_hybrid": Layout(_of("bailing_hybrid"), (2,), NECK | FINAL),
    "deepseek_v3": Layout(_of("deepseek_v3"), (1,), NECK | SHARED_HEAD),
    "exaone4_5": Layout(_of("exaone4_5", "image"), (0,), ONE_NECK, block="mtp.layers.{place}", slides=True),
    "exaone_moe": Layout(_of("exaone_moe"), (0,), ONE_NECK, block="mtp.layers.{place}", slides=True),
    "glm4_moe": Layout(_of("glm4_moe", first_k_dense_replace=1), (1,), NECK | SHARED_HEAD),
    "glm4_moe_lite": Layout(_of("glm4_moe_lite"), (1,), NECK | SHARED_HEAD),
    "glm_ocr": Layout(_of("glm_ocr", "image"), (0,), NECK | SHARED_HEAD, layer="model.language_model.layers.{number}"),
    "hy_v3": Layout(_of("hy_v3"), (1,), NECK | FINAL),
    "mimo_v2_flash": Layout(
        _of("mimo_v2_flash", count=None, mlp_layer_types=["dense", "dense", "sparse"]),
        (1,),
        NECK | FINAL,
        layer="model.mtp.layers.{place}",
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
        slides=True,
        num_layers=2,
    ),
    "qwen3_5": Layout(
        _of("qwen3_5", "image", mtp_num_hidden_layers=1), (3,), ONE_NECK, block="mtp.layers.{place}", gemma_norm=True
    ),
    "qwen3_5_moe": Layout(
        _of("qwen3_5_moe", "image", mtp_num_hidden_layers=1),
        (3,),
        ONE_NECK,
        block="mtp.layers.{place}",
        gemma_norm=True,
    ),
    "qwen3_next": Layout(_of("qwen3_next", count=None), (3,), ONE_NECK, block="mtp.layers.{place}", gemma_norm=True),
}
