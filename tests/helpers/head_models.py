"""Tiny DFlash heads."""

from pathlib import Path
from typing import Any

import torch

from hf_specdec.methods.common.head_files import write_head
from hf_specdec.methods.common.layer_head import layer_values
from hf_specdec.methods.dflash.network import DFlashHead, DFlashHeadConfig

MASK_TOKEN = 127
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


# of the files that are published: fields of config.json, and of the layers' configuration
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({"speculators_model_type": "dflash"}, SLIDING),
    "dflash, reduced": ({"speculators_model_type": "dflash", "draft_vocab_size": 64}, {}),
}


def random_dflash(target: Any, *, seed: int = 3, scale: float = 0.3, **fields: Any) -> DFlashHead:
    """A DFlash head whose shape fits `target`: a layer with a window shorter than the prompts, and one without."""
    return random_dflash_head(target, kind="dflash", seed=seed, scale=scale, **fields)


def random_dflash_head(target: Any, *, kind: str, seed: int = 3, scale: float = 0.3, **more: Any) -> DFlashHead:
    """A head of one of the published kinds whose shape fits `target`."""
    config, (fields, layer) = target.config.get_text_config(), HEADS[kind]
    layers = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **layer,
    }
    inputs = {
        "block_size": 6,
        "mask_token_id": MASK_TOKEN,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [1, config.num_hidden_layers],
        "transformer_layer_config": layers,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        is_reduced = fields.get("draft_vocab_size", config.vocab_size) < config.vocab_size
        head = DFlashHead(DFlashHeadConfig.from_dict(inputs | fields | more), has_output_head=is_reduced)
        for name, weight in head.named_parameters():
            weight.normal_(mean=float("norm" in name), std=scale)
        if head.d2t is not None:
            head.d2t.copy_(torch.arange(len(head.d2t)))  # every second token of the target's
    return head.eval().requires_grad_(False)


def save_dflash(head: DFlashHead, folder: Path) -> None:
    """Write a DFlash head without windows in the authors' form."""
    config = head.config
    ours = {"mask_token_id": config.mask_token_id, "target_layer_ids": [layer - 1 for layer in config.layer_ids]}
    values = {**layer_values(config.layer), "block_size": config.block_size, "dflash_config": ours}
    write_head(folder, head, {**values, "architectures": ["DFlashDraftModel"]}, head.state_dict())
