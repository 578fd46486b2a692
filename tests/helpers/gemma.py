"""Tiny random Gemma 4 targets and assistants, and assistants that have learned a text."""

from typing import Any

import torch
import transformers as tf

import hf_specdec
from hf_specdec.compat.gemma_assistant import with_shared_layers
from tests.helpers.zoo import DECODER, WINDOW

__all__ = ["build_gemma", "draft_chain", "fitted_assistant", "random_assistant"]

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
