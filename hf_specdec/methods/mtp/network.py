"""MTP layers as a head: each is a stage that reads a token and what the stage before computed.

The layers are transformers' own (`MtpModel`); embeddings and output head are the target's.
"""

import copy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.compat.attention import MASKED, attention_implementation
from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.models import text_config
from hf_specdec.compat.mtp import MtpModel, shared_logits, use_float64_experts, use_mask_attention
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.methods.common.draft_head import PairHead, within
from hf_specdec.methods.mtp.checkpoint import FULL, SLIDING, load_mtp


class MtpHead(PairHead):
    """The MTP layers of one target.

    Args:
        mtp: transformers' layers; their embeddings and output head are the target's, and stay where they are.

    Raises:
        ConfigError: their attention takes no masks.
        UnsupportedModelError: a layer is neither full nor sliding attention.
    """

    methods = ("mtp", "auto")
    skips_embedding_norm = True

    def __init__(self, mtp: MtpModel) -> None:
        use_mask_attention(mtp)
        super().__init__()
        self._mtp = (mtp,)  # a tuple: what it shares with the target is no part of this module
        config, text = mtp.config, text_config(mtp.config)
        attention = attention_implementation(config)
        if attention not in MASKED:
            rule = f"must be {' or '.join(MASKED)} for a draft head, whose rows see masks"
            raise ConfigError("attn_implementation", rule, attention, "Load the head without it.")
        self.embed_tokens, self._is_additive = None, attention == "eager"
        self.name_or_path, self.vocab_size = config.name_or_path, getattr(text, "vocab_size", None)
        self.hidden_size = self.target_hidden_size = int(text.hidden_size)
        kinds = getattr(config, "layer_types", None) or [FULL] * len(mtp.layers)
        others = sorted(set(kinds) - {FULL, SLIDING})
        if others:
            raise UnsupportedModelError(
                f"MTP layers must be of full or sliding attention to follow the accepted path, but some are "
                f"{others[0]}. transformers' own use_mtp=True drafts with them."
            )
        self.layers = mtp.layers
        self.norm = mtp.shared_post_norm if mtp.use_shared_post_norm else None
        self.rotary_emb = copy.deepcopy(mtp.rotary_emb)  # some follow the length of their text
        self.num_stages, self._kinds = len(mtp.layers), tuple(kinds)
        self.num_layers = 1  # one stage is one layer
        self._window = getattr(config, "sliding_window", None) if SLIDING in kinds else None
        self.has_window = self._window is not None
        self._shapes: dict[int, tuple[int, int, int]] = {}

    @classmethod
    def of_checkpoint(cls, target: PreTrainedModel, path: str | None = None) -> "MtpHead":
        """The MTP layers of a target's checkpoint; see `load_mtp`."""
        return cls(load_mtp(target, path))

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The last hidden state."""
        return (num_layers,)

    @property
    def num_weights(self) -> int:
        """Those of one layer and of the target's output head."""
        modules = (self._mtp[0].shared_head, self.layers[0])
        return sum(int(weight.numel()) for module in modules for weight in module.parameters())

    def cache_shapes(self, stage: int) -> dict[int, tuple[int, int, int]]:
        """Shapes of the stage's one layer, found by computing a token with it."""
        if stage not in self._shapes:
            zeros = torch.zeros((1, 1, self.hidden_size), dtype=self.dtype, device=self.device)
            position = torch.zeros((1, 1), dtype=torch.long, device=self.device)
            cache, mask = DynamicCache(), position[None, None] == 0
            with torch.no_grad():
                self(zeros, zeros, position, mask, cache, key_positions=position, stage=stage)
            keys, values = cache.layers[stage].keys, cache.layers[stage].values
            self._shapes[stage] = keys.shape[1], keys.shape[-1], values.shape[-1]
        return {stage: self._shapes[stage]}

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The last hidden state is read as it is."""
        return features

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        key_positions: torch.Tensor | None = None,
        stage: int = 0,
    ) -> torch.Tensor:
        """See `PairHead.forward`; stage s is layer s, which writes to layer s of the cache."""
        if states.dtype == torch.float64:
            use_float64_experts(self._mtp[0])
        kind = self._kinds[stage]
        mask = within(self._window if kind == SLIDING else None, mask, positions, key_positions)
        by_kind = {"layer_type": kind} if self._mtp[0].has_per_layer_rope else {}
        rotary = None
        if self.rotary_emb is not None:
            rotary = self.rotary_emb(embeddings, position_ids=positions, **by_kind)
        computed: torch.Tensor = self.layers[stage](
            embeddings,
            states,
            position_embeddings=rotary,
            attention_mask=self._masked(mask, states.dtype),
            position_ids=positions,
            **{CACHE: cache},
        )
        return computed if self.norm is None else self.norm(computed)

    def _masked(self, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A bool mask as the layers' attention takes it."""
        if not self._is_additive:
            return seen
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., vocab_size)` of what a layer computed."""
        return shared_logits(self._mtp[0], states)
