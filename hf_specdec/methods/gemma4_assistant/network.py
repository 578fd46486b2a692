"""An assistant of Gemma 4 as a head: `assistant_model` of `spec_method="draft_model"`, as in transformers.

The network is transformers' own. Masks are given, so that rows of a batch and siblings of a tree are computed together.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation, text_config
from hf_specdec.compat.gemma_assistant import heads_of_layers, is_gemma_assistant
from hf_specdec.errors import ConfigError
from hf_specdec.methods.draft_head import SharedCacheHead

__all__ = ["GemmaAssistantHead", "gemma_assistant_head_of"]

MASKED = ("sdpa", "eager")


class GemmaAssistantHead(SharedCacheHead):
    """An assistant; its layers have no keys and values of their own.

    Args:
        model: transformers' network.

    Raises:
        ConfigError: its attention takes no masks.
    """

    methods = ("draft_model", "auto")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.embed_tokens = None
        self.model, self.text, self.name_or_path = model, text_config(model.config), model.config.name_or_path
        attention = attention_implementation(model.config)
        if attention not in MASKED:
            rule = f"must be {' or '.join(MASKED)} for an assistant, whose rows see masks"
            raise ConfigError("attn_implementation", rule, attention, "Load the assistant without it.")
        self._is_additive = attention == "eager"

    @property
    def vocab_size(self) -> int:
        """Tokens of the target that it was made for."""
        return int(self.text.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the states, and of the target's embeddings that it reads."""
        return int(self.model.config.backbone_hidden_size)

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return self.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers that one forward computes."""
        return int(self.text.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def windows(self) -> dict[str, int | None]:
        """How far back the layers of each type see; `None` for all of the text."""
        return {
            kind: int(self.text.sliding_window) if kind == "sliding_attention" else None
            for kind in dict.fromkeys(self.text.layer_types)
        }

    @property
    def key_heads(self) -> dict[str, tuple[int, int]]:
        """Key/value heads of the target and their size, by type of layer."""
        return heads_of_layers(self.model.config, {kind: n for n, kind in enumerate(self.text.layer_types)})

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The last hidden state."""
        return (num_layers,)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        keys: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SharedCacheHead.forward`."""
        if self._is_additive:
            least = torch.finfo(states.dtype).min
            masks = {
                kind: torch.zeros_like(seen, dtype=states.dtype).masked_fill(~seen, least)
                for kind, seen in masks.items()
            }
        found = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embeddings, states], dim=-1)),
            attention_mask=dict(masks),
            position_ids=positions,
            shared_kv_states=dict(keys),
            use_cache=False,
            logits_to_keep=None,  # a number, 0 too, makes transformers slice per-layer inputs, which there are none of
        ).last_hidden_state
        return self.model.post_projection(found), found

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """`(N, vocab_size)` of outputs `(N, width)` that `forward` returned."""
        if self.model.masked_embedding is None:
            logits: torch.Tensor = self.model.lm_head(outputs)
            return logits
        ordered: torch.Tensor = self.model.masked_embedding(outputs[None], self.model.lm_head.weight)[0]
        return ordered


def gemma_assistant_head_of(assistant: object) -> GemmaAssistantHead | None:
    """An assistant of Gemma 4 as a head; `None` for anything else."""
    if not isinstance(assistant, PreTrainedModel) or not is_gemma_assistant(assistant.config):
        return None
    return GemmaAssistantHead(assistant)
