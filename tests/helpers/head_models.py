"""Tiny DFlash heads and Gemma 4 assistants."""

from typing import Any

import torch
import transformers as tf
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.compat.gemma_assistant import with_shared_layers
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead
from tests.helpers.zoo import DECODER, WINDOW

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


TEXT: dict[str, Any] = DECODER | {
    "head_dim": 12,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
}


TARGET: dict[str, Any] = TEXT | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}


def _vary(model: Any, *, scale: float, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=scale)
    return model.eval().requires_grad_(False)


def build_gemma(**fields: Any) -> Any:
    """A target; half of its layers read the keys of earlier ones."""
    model = tf.AutoModelForCausalLM.from_config(tf.Gemma4TextConfig(**TARGET | fields))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return hf_specdec.enable(_vary(model, scale=0.12, seed=1))


def random_assistant(*, seed: int = 4, scale: float = 0.12, text: dict[str, Any] | None = None, **fields: Any) -> Any:
    """An assistant for those targets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = {
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
        text_config = tf.Gemma4TextConfig(**TEXT | own | (text or {}))
        config = tf.Gemma4AssistantConfig(text_config=text_config, **{"backbone_hidden_size": 48} | fields)
        model = tf.Gemma4AssistantForCausalLM(with_shared_layers(config))
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(128, generator=torch.Generator().manual_seed(seed)))
    model.generation_config.num_assistant_tokens = 4
    return _vary(model, scale=scale, seed=seed)


def draft_chain(assistant: Any, target: Any, text: torch.Tensor, read: Any, count: int) -> tuple[list[int], Any]:
    """Tokens and logits of a chain after a text `(1, length)`, as transformers' own loop computes them.

    Args:
        read: the target's output over at least `length` - 1 tokens of the text, with hidden states and shared keys.
    """
    length = text.shape[1]
    keys = {kind: (k[:, :, : length - 1], v[:, :, : length - 1]) for kind, (k, v) in read.shared_kv_states.items()}
    state, token, drafted, rows = read.hidden_states[-1][:, length - 2 : length - 1], text[:, -1:], [], []
    for _ in range(count):
        out = assistant(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), state], dim=-1),
            position_ids=torch.tensor([[length - 1]]),
            shared_kv_states=keys,
        )
        state, token = out.last_hidden_state, out.logits.argmax(-1)
        drafted.append(int(token))
        rows.append(out.logits[0, -1])
    return drafted, torch.stack(rows) if rows else torch.empty(0)


def fitted_assistant(target: Any, text: torch.Tensor, *, start: int, steps: int = 30) -> Any:
    """An assistant that has learned by heart the next two tokens at every place of one text from `start` on."""
    assistant = random_assistant(scale=0.08)
    with torch.no_grad():
        read = target(text, output_hidden_states=True, return_shared_kv_states=True)
    assistant.requires_grad_(True)
    optimizer = torch.optim.Adam(assistant.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = torch.zeros(())
        for length in range(start, text.shape[1]):
            coming = text[0, length : length + 2]
            _, rows = draft_chain(assistant, target, text[:, :length], read, len(coming))
            loss = loss + torch.nn.functional.cross_entropy(rows, coming)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return assistant.eval().requires_grad_(False)
