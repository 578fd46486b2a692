"""The attention mask of a tree: the model's own mask, evaluated at the nodes' positions, AND the ancestor relation.

Sliding windows, chunks and padding stay the model's business: its mask functions are asked about positions, whatever
they compute. They reach ours through a private copy of the model's configuration that names one of our mask
functions, so nothing global changes and two calls never see one another's tree.

Where the mask is found to be a rule, each column seeing all of the text or a window of it, later masks of the call are
made by the rule on the host, without the model.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import CacheLayerMixin, PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.transfer import Array, HostArrays, additive_bits, to_device
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
from hf_specdec.kernels.core_attention import additive

Kind = str | None  # of layer; `None` where all layers have one mask
Masks = dict[Kind, torch.Tensor]
FIRST = 16  # positions that are all tried
MaskFunction = Callable[..., torch.Tensor]
_Seen = list[tuple[Any, MaskFunction, int | None]]  # what mask functions returned, of which rule, of which window
_register_lock = threading.Lock()


class TreeRows:
    """The columns written since the last commit, C in each row, of which the forward computes the last Q.

    Args:
        starts: each row's length in the cache before its first column.
        depths: each row's C distances from there: position id - start.
        visible: for each row `(Q, C)` bool: which columns each of the last Q sees.

    Attributes:
        shape (`tuple[int, int, int]`): batch, Q and C.
        host_starts, host_depths, host_visible (`ndarray`): `(batch,)`, `(batch, C)` and `(batch, Q, C)` bool.
    """

    def __init__(
        self, starts: Sequence[int], depths: Sequence[Sequence[int]], visible: Sequence[Array], device: torch.device
    ) -> None:
        self.device = device
        self.host_starts, self.host_depths = np.array(starts), np.array(depths)
        self.host_visible = visible[0][None] if len(visible) == 1 else np.stack(visible)
        batch, num_queries, num_columns = self.host_visible.shape
        self.shape = (batch, num_queries, num_columns)

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """`(batch, Q, C)` bool."""
        return torch.from_numpy(self.host_visible).to(self.device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """`(batch,)`."""
        return torch.from_numpy(self.host_starts).to(self.device)

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        """`(batch, C)`."""
        return torch.from_numpy(self.host_depths).to(self.device)

    def seen(self, window: int | None, num_keys: int, padding: Array | None) -> Array:
        """`(batch, 1, Q, num_keys)` bool: what each of the last Q columns sees of the buffers.

        Args:
            window: how many positions back a column sees, its own counted; `None` for all.
            padding: `(batch, P)` bool: which of the first keys are seen; `None` where all are.
        """
        batch, num_queries, num_columns = self.shape
        seen = np.zeros((batch, 1, num_queries, num_keys), dtype=np.bool_)
        asking, new = self.host_depths[:, -num_queries:, None], self.host_visible  # (batch, Q, 1), (batch, Q, C)
        if window is not None:
            new = new & (self.host_depths[:, None] > asking - window)
        for row, start in enumerate(self.host_starts):
            text = seen[row, 0, :, :start]
            text[...] = True if window is None else np.arange(start) > start + asking[row] - window
            if padding is not None:
                shown = padding[row, :start]
                text[:, : len(shown)] &= shown
            seen[row, 0, :, start : start + num_columns] = new[row]
        return seen


def window_of(mask_function: Callable[..., torch.Tensor], window: int | None, device: torch.device) -> int | None:
    """`window` where a mask function in transformers' sense is causal and shows that many positions, `None` for all.

    Raises:
        ValueError: it shows something else at some of the positions that are tried.
    """
    reach = window or FIRST
    around = sorted({*range(FIRST), *(max(k * reach + near, 0) for k in range(4) for near in (-2, -1, 0, 1, 2))})
    places = torch.tensor(around, device=device)
    query, key = places.view(1, 1, -1, 1), places.view(1, 1, 1, -1)
    nothing = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    expected = key <= query if window is None else (key <= query) & (key > query - window)
    mask = mask_function(nothing, nothing, query, key)
    if mask.shape != expected.shape or not torch.equal(mask, expected):
        raise ValueError("the mask is neither causal nor that of a window")
    return window


class MaskRules:
    """The masks of one call's forwards by rules.

    Args:
        windows: for each kind of layer how many positions back a query sees, its own counted; `None` for all.
        dtype: `torch.bool`, or that of masks which are added to the scores.
        lowest (`float`): what such a mask adds where a key is hidden.
    """

    def __init__(self, windows: Mapping[Kind, int | None], dtype: torch.dtype, lowest: float) -> None:
        self.windows, self.dtype, self.lowest = dict(windows), dtype, lowest
        self._distinct = list(dict.fromkeys(self.windows.values()))

    def arrays(self, rows: TreeRows, num_keys: int, padding: Array | None) -> HostArrays:
        """`(batch, 1, Q, num_keys)` for each window, to be brought to the rows' device."""
        seen = [rows.seen(window, num_keys, padding) for window in self._distinct]
        return [additive_bits(mask, self.dtype, self.lowest) for mask in seen], [self.dtype] * len(seen)

    def masks(self, sent: Sequence[torch.Tensor]) -> Masks:
        """The mask of each kind, out of `arrays` on a device."""
        return {kind: sent[self._distinct.index(window)] for kind, window in self.windows.items()}


def same_masks(masks: Masks, expected: Masks) -> bool:
    """Returns whether they are the same masks, element by element."""
    return masks.keys() == expected.keys() and all(
        mask.dtype == expected[kind].dtype and torch.equal(mask, expected[kind]) for kind, mask in masks.items()
    )


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
