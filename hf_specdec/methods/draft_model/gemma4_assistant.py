"""An assistant of Gemma 4 as a head: `assistant_model` of `spec_method="draft_model"`, as in transformers.

The network is transformers' own. Masks are given, so that rows of a batch and siblings of a tree are computed together.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.compat.gemma_assistant import heads_of_layers, with_shared_layers
from hf_specdec.methods.common.draft_head import SharedCacheHead
from hf_specdec.methods.common.wrapped_head import WrappedHead

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


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


def is_gemma_assistant(values: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of an assistant."""
    return values.get("model_type") in MODEL_TYPES


def load_assistant(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> GemmaAssistantHead:
    """Read an assistant from a folder or from the hub; arguments are those of transformers' `from_pretrained`."""
    config = with_shared_layers(AutoConfig.from_pretrained(path, **hub))
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype or "auto", **hub)
    return GemmaAssistantHead(model.eval())


def head_of_assistant(model: object) -> GemmaAssistantHead | None:
    """Wrap an assistant of Gemma 4 as a head; `None` for anything else."""
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in MODEL_TYPES:
        return None
    return GemmaAssistantHead(model)
