"""The attention mask of a tree: the model's own mask, evaluated at the nodes' positions, AND the ancestor relation.

Sliding windows, chunks and padding stay the model's business: its mask functions are asked about positions, whatever
they compute. They reach ours through a private copy of the model's configuration that names one of our mask
functions, so nothing global changes and two calls never see one another's tree.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import CacheLayerMixin, PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.transfer import Array, HostArrays, to_device
from hf_specdec.compat.attention import (
    attention_implementation,
    drop_empty_layer_types,
    mask_config,
    mask_function_of,
    masks_for_forward,
    register_mask_function,
    set_attention_implementation,
    takes_tensor_masks,
)
from hf_specdec.compat.models import private_config
from hf_specdec.forward.mask_rules import MaskRules, TreeRows, same_masks, window_of
from hf_specdec.kernels.masks import additive

MaskFunction = Callable[..., torch.Tensor]
_Seen = list[tuple[Any, MaskFunction, int | None]]  # what mask functions returned, of which rule, of which window
_register_lock = threading.Lock()


class TreeMasks:
    """Builds the masks of one call's forwards. Not shared between threads.

    Attributes:
        is_asked (`bool`): whether the model makes the next mask.
        rules (`MaskRules | None`): by which all masks are made, once the model has made one; `None` where only it can.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.implementation = attention_implementation(model.config)
        self.supported = takes_tensor_masks(self.implementation)
        self._config: Any = None
        self.rules: MaskRules | None = None
        self.is_asked = True

    def arrays(self, rows: TreeRows, cache: SpecCache, padding: Array | None) -> HostArrays:
        """Arrays that `build` takes as `sent`, to be copied to the rows' device; none if the model makes the mask.

        Args:
            padding: `(batch, P)` bool: which of the first columns are seen, where some are padding.
        """
        if self.rules is None:
            return [], []
        return self.rules.arrays(rows, cache.get_mask_sizes(rows.shape[1], 0)[0], padding)

    def build(
        self,
        rows: TreeRows,
        cache: SpecCache,
        attention_mask: torch.Tensor | None,
        *,
        padding: Array | None = None,
        sent: Sequence[torch.Tensor] = (),
    ) -> Any:
        """The 4-D mask (or dict of masks) for a forward of the last Q columns of `rows`.

        Args:
            cache: the cache before the forward; it holds the rows' first C - Q columns after their text.
            attention_mask: `(batch, longest + C)` with zeros at padding, or `None`.
            padding: as of `arrays`.
            sent: `arrays` on the rows' device.
        """
        batch, num_queries, _ = rows.shape
        if self.rules is not None:
            masks = self.rules.masks(sent)
            return masks.get(None, masks)
        seen: _Seen = []
        config = self._private_config()
        text_config = mask_config(config)
        text_config.hf_specdec_rows, text_config.hf_specdec_seen = rows, seen
        mask = masks_for_forward(
            self.model,
            config,
            shape=(batch, num_queries),
            attention_mask=attention_mask,
            cache=cache,
            position_ids=rows.depths[:, -num_queries:],
        )
        if self.is_asked:
            self.is_asked = False
            self.rules = self._rules_of(mask, seen, rows, cache, padding)
        return _added(mask, *self._form(cache))

    def _rules_of(
        self, mask: Any, seen: _Seen, rows: TreeRows, cache: SpecCache, padding: Array | None
    ) -> MaskRules | None:
        """Rules that make the same masks, now and later; `None` where only the model can."""
        masks = mask if isinstance(mask, dict) else {None: mask}
        # Other layers share keys, or have none.
        attending = [isinstance(layer, CacheLayerMixin) for layer in cache.layers]
        sizes = {cache.get_mask_sizes(rows.shape[1], place) for place, attends in enumerate(attending) if attends}
        if len(sizes) != 1 or sizes != {(next(iter(sizes))[0], 0)}:  # an adopted window has lost its first columns
            return None
        try:
            windows = {kind: _window_of(layer_mask, seen, rows.device) for kind, layer_mask in masks.items()}
        except (ValueError, LookupError, RuntimeError):  # what the mask function says of positions is no rule of ours
            return None
        dtype, lowest = self._form(cache)
        rules = MaskRules(windows, dtype, lowest)
        arrays, dtypes = rules.arrays(rows, next(iter(sizes))[0], padding)
        expected = rules.masks(to_device(arrays, rows.device, dtypes))
        return rules if same_masks(_added(masks, dtype, lowest), expected) else None

    def _form(self, cache: SpecCache) -> tuple[torch.dtype, float]:
        """The dtype of masks, and what those of numbers add where a key is hidden.

        Torch's attention makes a mask of numbers from one of booleans, in every layer anew: it gets it made. Not with
        an encoder: T5Gemma2 joins the mask with the encoder's, which is one of booleans.
        """
        if self.implementation == "eager":
            return self.model.dtype, torch.finfo(self.model.dtype).min
        takes_numbers = self.implementation == "sdpa" and not self.model.config.is_encoder_decoder
        return (cache.dtype, -torch.inf) if takes_numbers and cache.dtype is not None else (torch.bool, -torch.inf)

    def _private_config(self) -> Any:
        if self._config is None:
            name = f"hf_specdec_{self.implementation}"
            with _register_lock:
                if mask_function_of(name) is None:
                    register_mask_function(name, functools.partial(tree_mask, str(self.implementation)))
            self._config = private_config(self.model.config)
            set_attention_implementation(self._config, name)
            drop_empty_layer_types(self._config)
        return self._config


def _window_of(mask: Any, seen: _Seen, device: torch.device) -> int | None:
    """By which window `mask` was made; `None` for all of the text.

    Raises:
        LookupError: it is no mask that one of our mask functions has returned.
        ValueError: it is made by another rule.
    """
    function, window = next(((function, size) for made, function, size in seen if made is mask), (None, None))
    if function is None:
        raise LookupError("the model changes the mask")
    return window_of(function, window, device)


def _added(mask: Any, dtype: torch.dtype, lowest: float) -> Any:
    """Masks of booleans as masks that are added to the scores, where `dtype` is not theirs."""
    if isinstance(mask, dict):
        return {kind: _added(layer_mask, dtype, lowest) for kind, layer_mask in mask.items()}
    is_bool = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and dtype != torch.bool
    return additive(mask, dtype, lowest) if is_bool else mask


def tree_mask(
    implementation: str,
    *,
    config: Any,
    mask_function: MaskFunction,
    q_offset: int,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Any:
    """A mask function in transformers' sense: `implementation`'s own, over `mask_function` seen from the tree."""
    build = mask_function_of(implementation)
    assert build is not None
    rows: TreeRows = config.hf_specdec_rows
    kwargs["allow_is_causal_skip"] = False
    view = _view(rows, mask_function, q_offset)
    mask = build(mask_function=view, q_offset=q_offset, use_vmap=use_vmap, config=config, **kwargs)
    if not use_vmap:
        config.hf_specdec_seen.append((mask, mask_function, kwargs.get("local_size")))
    return mask


def _view(rows: TreeRows, mask_function: MaskFunction, q_offset: int) -> MaskFunction:
    """The mask function of columns, each looked up in its row."""
    num_queries, num_columns = rows.visible.shape[1:]
    starts = rows.starts

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        start = starts[batch]
        asking = query - q_offset
        column = key - start
        place = column.clamp(0, num_columns - 1)
        is_new = column >= 0
        query_position = start + rows.depths[batch, asking + num_columns - num_queries]
        key_position = torch.where(is_new, start + rows.depths[batch, place], key)
        related = rows.visible[batch, asking, place] & (column < num_columns)
        return mask_function(batch, head, query_position, key_position) & (related | ~is_new)

    return visible
