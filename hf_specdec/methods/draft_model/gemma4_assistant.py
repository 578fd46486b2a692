"""An assistant of Gemma 4 as a head: `assistant_model` of `spec_method="draft_model"`, as in transformers.

The network is transformers' own. Masks are given, so that rows of a batch and siblings of a tree are computed together.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from hf_specdec.compat.gemma_assistant import heads_of_layers, is_gemma_assistant
from hf_specdec.methods.common.draft_head import SharedCacheHead
from hf_specdec.methods.common.wrapped_head import WrappedHead


class GemmaAssistantHead(WrappedHead, SharedCacheHead):
    """An assistant; its layers have no keys and values of their own.

    Args:
        model: transformers' network.

    Raises:
        ConfigError: its attention takes no masks.
    """

    methods = ("draft_model", "auto")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.config)
        self.model = model
        self.hidden_size = self.target_hidden_size = int(model.config.backbone_hidden_size)
        kinds = self.text.layer_types
        self.windows = {
            kind: int(self.text.sliding_window) if kind == "sliding_attention" else None
            for kind in dict.fromkeys(kinds)
        }
        self.key_heads = heads_of_layers(model.config, {kind: number for number, kind in enumerate(kinds)})

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        keys: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SharedCacheHead.forward`."""
        found = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embeddings, states], dim=-1)),
            attention_mask={kind: self._mask(seen, states.dtype) for kind, seen in masks.items()},
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
