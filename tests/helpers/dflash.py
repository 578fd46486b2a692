"""Tiny random DFlash models and heads, and models that have learned a text."""

from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from hf_specdec.compat import CACHE
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead

__all__ = ["HEADS", "draft_block", "fitted_dflash", "random_dflash", "random_dflash_head"]

MASK_TOKEN = 127
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
# of the files that are published: fields of config.json, and of the layers' configuration
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({"speculators_model_type": "dflash"}, SLIDING),
    "dflash2": ({"speculators_model_type": "dflash2", "selector_rank": 8, "selector_top_k": 6}, {}),
    "dspark": ({"speculators_model_type": "dspark", "markov_rank": 8, "draft_vocab_size": 64}, {}),
    "dspark, rnn": ({"speculators_model_type": "dspark", "markov_rank": 8, "markov_head_type": "rnn"}, SLIDING),
}


def random_dflash(target: Any, *, seed: int = 3, scale: float = 0.15, **fields: Any) -> MuseGlimmerAssistantModel:
    """A DFlash model whose shape fits `target`: a layer with a window shorter than the prompts, and one without."""
    config = target.config.get_text_config()
    given: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "block_size": 6,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [0, config.num_hidden_layers - 1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**given | fields))
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=scale)
    return model.eval().requires_grad_(False)


def random_dflash_head(target: Any, *, kind: str, seed: int = 3, scale: float = 0.3) -> DFlashHead:
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
    given = {
        "block_size": 6,
        "mask_token_id": MASK_TOKEN,
        "conv_group_size": 8,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [1, config.num_hidden_layers],
        "transformer_layer_config": layers,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        is_reduced = fields.get("draft_vocab_size", config.vocab_size) < config.vocab_size
        head = DFlashHead(DFlashHeadConfig.from_dict(given | fields), has_output_head=is_reduced)
        for name, weight in head.named_parameters():
            weight.normal_(mean=float("norm" in name), std=scale)
        if head.d2t is not None:
            head.d2t.copy_(torch.arange(len(head.d2t)))  # every second token of the target's
    return head.eval().requires_grad_(False)


def draft_block(dflash: Any, target: Any, text: torch.Tensor, hidden: Any) -> torch.Tensor:
    """`(1, block_size - 1, vocab_size)` of logits after a text `(1, length)`, every state and key made anew.

    Args:
        hidden: all hidden states of the target over at least `length` - 1 tokens of the text.
    """
    count, size = text.shape[1] - 1, dflash.config.block_size
    features = torch.cat([hidden[layer + 1][:, :count] for layer in dflash.config.target_layer_ids], dim=-1)
    tokens = torch.full((1, size), dflash.config.mask_token_id)
    tokens[0, 0] = text[0, -1]
    cache = DFlashCache(config=dflash.config)
    cache.set_previous_accepted_tokens(count)
    states = dflash(
        noise_embeds=target.get_input_embeddings()(tokens),
        context_hidden_states=features,
        position_ids=torch.arange(count + size)[None],
        **{CACHE: cache},
    ).last_hidden_state
    logits: torch.Tensor = target.get_output_embeddings()(states[:, 1:])
    return logits


def fitted_dflash(target: Any, text: torch.Tensor, *, start: int, steps: int = 24, **fields: Any) -> Any:
    """A DFlash model that has learned by heart what follows every place of one text from `start` on."""
    dflash = random_dflash(target, scale=0.05, **fields)
    with torch.no_grad():
        hidden = target(text, output_hidden_states=True).hidden_states
    dflash.requires_grad_(True)
    optimizer = torch.optim.Adam(dflash.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for length in range(start, text.shape[1]):
            coming = text[0, length : length + dflash.config.block_size - 1]
            logits = draft_block(dflash, target, text[:, :length], hidden)
            loss = loss + torch.nn.functional.cross_entropy(logits[0, : len(coming)], coming)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dflash.eval().requires_grad_(False)
