"""The target model behind one call: the prompt's forward, then forwards of trees, then what stays in the cache.

Knows nothing about drafters, sampling or stopping. After `prefill` (or `forward`) the cache holds the text but for
its last token; `forward` takes a tree whose root is that token.

    target = Target(model, input_ids, generation_config, model_kwargs, tier="tree")
    outputs = target.prefill()
    outputs = target.forward(tree, text)    # outputs.logits: (1, T, vocab_size)
    target.commit(verdict.path)
    target.close()
"""

from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.attention import TreeMasks
from hf_specdec.cache import SpecCache
from hf_specdec.engine.text import Text
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.tree import DraftTree

__all__ = ["Target", "Tier"]

Tier = Literal["tree", "chain", "plain"]
RESERVE = 1024  # tokens of room allocated at once behind the prompt, at most


class KeptCache(Protocol):
    """What the engine asks of a cache around a forward of T tokens."""

    model_cache: Any

    def settle(self) -> None:
        """Take over the prompt's columns."""

    def commit(self, path: list[int], num_nodes: int) -> None:
        """Keep the columns in `path` of the `num_nodes` written last."""

    def rollback(self) -> None:
        """Forget a forward that did not finish."""

    def close(self) -> None:
        """Leave the caller's cache as plain generation would."""


class Target:
    """One call's target.

    Args:
        model_kwargs: those that `generate` hands to a decoding method.
        tier: `"tree"` or `"chain"`, as the model's capability says.
        keep_cache: whether anybody will look at the cache in `model_kwargs` afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *,
        tier: Tier,
        keep_cache: bool = True,
    ) -> None:
        self.model, self.input_ids, self.generation_config = model, input_ids, generation_config
        self.tier, self.keep_cache = tier, keep_cache
        self.kwargs = dict(model_kwargs)
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        prefix = "decoder_" if self.is_encoder_decoder else ""
        self.ids_key, self.mask_key = f"{prefix}input_ids", f"{prefix}attention_mask"
        self.positions_key = f"{prefix}position_ids"
        self.cache = _kept_cache(self.kwargs.get("past_key_values"), input_ids, generation_config)
        if self.cache is None:
            raise UnsupportedModelError("the cache is not one of transformers' dynamic key/value caches")
        self.kwargs["past_key_values"] = self.cache.model_cache
        self.masks = TreeMasks(model)
        self.asks_model = compat.has_own_input_preparation(model)
        self._template: dict[str, Any] | None = None
        self._template_length = 0
        self._ones: torch.Tensor | None = None

    def prefill(self) -> Any:
        """The prompt's forward. `outputs.logits[:, -1]` decides the first token."""
        try:
            outputs = compat.prefill(self.model, self.input_ids, self.generation_config, self.kwargs)
        except BaseException:
            self.cache.rollback()
            raise
        self.cache.settle()
        self.kwargs = compat.updated_kwargs(self.model, outputs, self.kwargs)
        self.kwargs["past_key_values"] = self.cache.model_cache
        self.kwargs.pop("logits_to_keep", None)
        return outputs

    def forward(self, tree: DraftTree, text: Text) -> Any:
        """One forward of the tree's T tokens behind the cached text. `outputs.logits` is `(1, T, vocab_size)`."""
        inputs = self._inputs(tree, text)
        try:
            return self.model(**inputs, return_dict=True)
        except BaseException:
            self.cache.rollback()
            raise

    def commit(self, path: list[int], num_nodes: int) -> None:
        """Keep the keys and values of the nodes in `path`, of the `num_nodes` verified last."""
        self.cache.commit(path, num_nodes)

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it."""
        if self.keep_cache:
            self.cache.close()

    def _inputs(self, tree: DraftTree, text: Text) -> dict[str, Any]:
        if self._template is None:
            self._begin(text)
        assert self._template is not None
        device = self._template[self.ids_key].device
        inputs = dict(self._template)
        inputs[self.ids_key] = torch.tensor([tree.tokens], device=device)
        length = len(text) - self._template_length  # tokens since the template was made
        if self.asks_model and (length or len(tree) > 1):
            inputs = self._asked_inputs(tree, text, length)
        positions = self._template.get(self.positions_key)
        if positions is not None:
            depths = torch.tensor(tree.depths, device=positions.device, dtype=positions.dtype)
            inputs[self.positions_key] = positions + (depths + length)
        mask = self._padding_mask(length + len(tree))
        if mask is not None:
            inputs[self.mask_key] = mask
        if not tree.is_chain:
            spec_cache = self.cache.model_cache
            inputs[self.mask_key] = self.masks.build([tree], spec_cache, inputs[self.positions_key], mask)
        for key in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if inputs.get(key) is not None:
                inputs[key] = inputs[key][..., -1:].expand(*inputs[key].shape[:-1], len(tree))
        return inputs

    def _begin(self, text: Text) -> None:
        """Ask the model once what a forward of one token takes; later forwards change ids, positions and mask."""
        self._template = self.model.prepare_inputs_for_generation(text.ids(), next_sequence_length=1, **self.kwargs)
        self._template_length = len(text)
        mask = self._template.get(self.mask_key)
        if mask is not None:
            self._ones = mask.new_ones((mask.shape[0], RESERVE))

    def _asked_inputs(self, tree: DraftTree, text: Text, length: int) -> dict[str, Any]:
        """For models that prepare their inputs themselves: ask with the whole text and the tree as if it were a chain."""
        kwargs = dict(self.kwargs)
        extra = length + len(tree) - 1
        for key in (self.positions_key, self.mask_key):
            if (value := kwargs.get(key)) is not None:
                more = torch.arange(1, extra + 1, device=value.device, dtype=value.dtype)
                more = value[..., -1:] + more if key == self.positions_key else torch.ones_like(more).expand(len(value), -1)
                kwargs[key] = torch.cat([value, more.expand(*value.shape[:-1], -1)], dim=-1)
        ids = text.ids()
        drafted = ids.new_tensor([tree.tokens[1:]])
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            torch.cat([ids, drafted], dim=1), next_sequence_length=len(tree), **kwargs
        )
        if inputs.get("past_key_values") is not self.cache.model_cache:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} drops its cache at token {len(text)}, which cannot be followed while "
                "several tokens are verified at once. Generate this text with spec_method=None."
            )
        return inputs

    def _padding_mask(self, extra: int) -> torch.Tensor | None:
        """The 2-D mask of the template, which ends with the root, with ones for `extra` - 1 more tokens."""
        assert self._template is not None
        mask: torch.Tensor | None = self._template.get(self.mask_key)
        if mask is None or self._ones is None:
            return None
        if extra - 1 > self._ones.shape[1]:
            self._ones = mask.new_ones((mask.shape[0], 2 * extra))
        return torch.cat([mask, self._ones[:, : extra - 1]], dim=1)


class _SpecKept:
    """Attention only: a `SpecCache` in place of the model's own cache."""

    def __init__(self, original: Any, spec: SpecCache) -> None:
        self.original, self.spec = original, spec
        self.self_attention = getattr(original, "self_attention_cache", original)
        self.model_cache: Any = spec
        if isinstance(original, compat.EncoderDecoderCache):
            self.model_cache = compat.EncoderDecoderCache(spec, original.cross_attention_cache)
            self.model_cache.is_updated = original.is_updated
        self._lengths = spec.lengths

    def settle(self) -> None:
        self._lengths = self.spec.lengths

    def commit(self, path: list[int], num_nodes: int) -> None:
        self.spec.commit([path])
        self._lengths = self.spec.lengths

    def rollback(self) -> None:
        lengths = self.spec.lengths
        self.spec.rollback(self._lengths or (0,) * len(lengths))

    def close(self) -> None:
        self.spec.hand_back(self.self_attention)


class _CroppedCache:
    """Convolution states beside attention: the model's own cache, cropped after each forward."""

    def __init__(self, original: Any) -> None:
        self.model_cache = original
        self.inner = getattr(original, "self_attention_cache", original)
        self._recorded = [getattr(layer, "record_past", None) for layer in self.inner.layers]
        original.activate_past_recording()

    def settle(self) -> None:
        if not self.model_cache.is_croppable:
            raise UnsupportedModelError("a recurrent state cannot be rolled back")
        self.model_cache.crop(0)

    def commit(self, path: list[int], num_nodes: int) -> None:
        if path != list(range(len(path))):
            raise UnsupportedModelError("Only a chain can be kept in a cache that is cropped.")
        self.model_cache.crop(len(path) - num_nodes)

    def rollback(self) -> None:
        """Nothing can be said of a half-written state; the caller sees the exception, as in plain generation."""

    def close(self) -> None:
        for layer, recorded in zip(self.inner.layers, self._recorded, strict=False):
            if recorded is not None:
                layer.record_past = recorded


def _kept_cache(cache: Any, input_ids: torch.Tensor, config: GenerationConfig) -> Any:
    inner = getattr(cache, "self_attention_cache", cache)
    if not isinstance(inner, compat.DynamicCache) or (inner.layers and all(inner.is_linear)):
        return None
    reserve = input_ids.shape[1] + RESERVE
    if config.max_length is not None:
        reserve = min(reserve, max(config.max_length, input_ids.shape[1]) + 64)
    spec = SpecCache.adopt(inner, reserve=reserve)
    return _SpecKept(cache, spec) if spec is not None else _CroppedCache(cache)
