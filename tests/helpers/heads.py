"""Tiny random draft heads for the zoo's models, and ones that know what a model will write."""

from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig, default_layer_ids
from hf_specdec.methods.eagle3.network import Eagle3Head

__all__ = ["QWEN3", "random_head"]


def random_head(target: Any, *, seed: int = 5, layer_class: Any = LlamaConfig, **flags: Any) -> Eagle3Head:
    """A head with random weights whose shape fits `target`; it reads the target's embeddings.

    Args:
        flags: fields of `Eagle3HeadConfig`; a `draft_vocab_size` below the target's leaves every other token out.
    """
    config = target.config.get_text_config()
    given = {"layer_types": ["sliding_attention"]} if flags.get("sliding_window") else {}
    layer = layer_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=32,
        num_hidden_layers=flags.pop("num_hidden_layers", 1),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **({"sliding_window": flags.pop("sliding_window"), "use_sliding_window": True} if given else {}),
        **given,
    )
    size = flags.pop("draft_vocab_size", config.vocab_size)
    shape = Eagle3HeadConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=config.hidden_size,
        layer_ids=flags.pop("layer_ids", default_layer_ids(config.num_hidden_layers)),
        **flags,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(shape)
        with torch.no_grad():
            for name, weight in head.named_parameters():
                if "norm" not in name:
                    weight.normal_(std=0.3)
    if size < config.vocab_size:
        head.set_target_ids(torch.arange(size) * (config.vocab_size // size))
    return head.eval().requires_grad_(False)


QWEN3 = Qwen3Config
