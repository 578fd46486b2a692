"""The attention mask of a tree: the model's own mask, evaluated at the nodes' positions, AND the ancestor relation.

Sliding windows, chunks and padding stay the model's business: its mask functions are asked about positions, whatever
they compute. They reach ours through a private copy of the model's configuration that names one of our mask
functions, so nothing global changes and two calls never see one another's tree.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.compat.attention import causal_mask_function, takes_tensor_masks
from hf_specdec.kernels.masks import additive, mark_open
from hf_specdec.transfer import additive_bits, to_device

__all__ = ["TreeMasks", "TreeRows"]

Array = npt.NDArray[Any]
MaskFunction = Callable[..., torch.Tensor]
_register_lock = threading.Lock()


class TreeRows:
    """The columns written since the last commit, C in each row, of which the forward computes the last Q.

    Args:
        starts: each row's length in the cache before its first column.
        depths: each row's C distances from there: position id - start.
        visible: for each row `(Q, C)` bool: which columns each of the last Q sees.
        fixed (`bool`): whether the buffers go on after the columns.

    Attributes:
        shape (`tuple[int, int, int]`): batch, Q and C.
        same_start (`bool`): whether all rows are equally long and the columns are the last ones of the buffers.
        length (`int`): columns of the longest row, those of its text counted.
        common (`int`): columns from the first on that are text in all rows; 0 where shapes may not depend on it.
    """

    def __init__(
        self,
        starts: Sequence[int],
        depths: Sequence[Sequence[int]],
        visible: Sequence[Array],
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self._starts, self._depths, self.device = starts, depths, device
        self._visible = visible[0][None] if len(visible) == 1 else np.stack(visible)  # (batch, Q, C)
        batch, num_queries, num_columns = self._visible.shape
        self.shape = (batch, num_queries, num_columns)
        self.same_start = not fixed and min(starts) == max(starts)
        self.length = max(starts) + len(depths[0])
        self.common = 0 if fixed else min(starts)

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """`(batch, Q, C)` bool."""
        return torch.from_numpy(self._visible).to(self.device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """`(batch,)`."""
        return torch.tensor(self._starts, device=self.device)

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        """`(batch, C)`."""
        return torch.tensor(self._depths, device=self.device)

    def to_device(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By one copy: `visible` `(batch, 1, Q, C)` as a mask of `dtype`, and the starts `(batch, 1)` and places
        `(batch, 1, 1, C)` of the columns.
        """
        starts = np.array(self._starts)[:, None]
        columns = (starts + np.arange(self.shape[2]))[:, None, None]
        block = additive_bits(self._visible[:, None], dtype)
        block_, starts_, columns_ = to_device((block, starts, columns), self.device, (dtype,))
        return block_, starts_, columns_


class TreeMasks:
    """Builds the masks of one call's forwards. Not shared between threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.implementation = compat.attention_implementation(model.config)
        self.supported = takes_tensor_masks(self.implementation)
        self._config: Any = None
        self._sees_all_text: bool | None = None
        self._numbers: torch.Tensor | None = None  # 0, 1, 2, ... of the last mask's columns
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None  # what shows and what hides a column

    def build(
        self,
        rows: TreeRows,
        cache: SpecCache,
        attention_mask: torch.Tensor | None,
        *,
        padding: torch.Tensor | None = None,
        within: bool = False,
    ) -> Any:
        """The 4-D mask (or dict of masks) for a forward of the last Q columns of `rows`.

        Args:
            cache: the cache before the forward; it holds the rows' first C - Q columns after their text.
            attention_mask: `(batch, longest + C)` with zeros at padding, or `None`.
            padding: `(batch, P)` bool: which of the first columns are seen, where some are padding.
            within: whether the mask is for the model's layers, not for its forward.
        """
        batch, num_queries, _ = rows.shape
        dtype = self._dtype_of_masks(cache)
        if self._sees_all_text:
            return self._open_mask(rows, cache, dtype, padding)
        config = self._private_config()
        compat.mask_config(config).hf_specdec_rows = rows
        mask = compat.masks_for_forward(
            self.model,
            config,
            shape=(batch, num_queries),
            attention_mask=attention_mask,
            cache=cache,
            position_ids=rows.depths[:, -num_queries:],
            within=within,
        )
        if dtype != torch.bool:
            mask = _added(mask, dtype)
        if self._sees_all_text is None:
            self._sees_all_text = self._is_open(mask, lambda: self._open_mask(rows, cache, dtype, padding))
        return mask

    def _dtype_of_masks(self, cache: SpecCache) -> torch.dtype:
        """Torch's attention makes a mask of numbers from one of booleans, in every layer anew: it gets it made.

        Not beside an encoder: T5Gemma2 joins the mask with the encoder's, which is one of booleans.
        """
        takes_numbers = self.implementation == "sdpa" and not self.model.config.is_encoder_decoder
        return cache.dtype if takes_numbers and cache.dtype is not None else torch.bool

    def _is_open(self, mask: Any, make_open: Callable[[], torch.Tensor]) -> bool:
        """Whether every node sees the whole text, now and later: then the model need not be asked at each step."""
        config = compat.text_config(self.model.config)
        kinds = set(getattr(config, "layer_types", None) or ())
        bounded = any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
        bounded = bounded or compat.has_own_masks(self.model)
        if bounded or kinds - {"full_attention"} or not isinstance(mask, torch.Tensor):
            return False
        expected = make_open()
        return mask.dtype == expected.dtype and torch.equal(mask, expected)

    def _open_mask(
        self, rows: TreeRows, cache: SpecCache, dtype: torch.dtype, padding: torch.Tensor | None
    ) -> torch.Tensor:
        """`(batch, 1, Q, K)`: all of the text but its padding is seen, and of the new columns what `rows` says."""
        batch, num_queries, num_columns = rows.shape
        block, starts, columns = rows.to_device(dtype)
        if rows.same_start and padding is None:
            shown = dtype == torch.bool
            mask = torch.full((batch, 1, num_queries, rows.length), shown, dtype=dtype, device=rows.device)
            mask[..., rows.length - num_columns :] = block
            mark_open(mask, rows.length - num_columns)
            return mask
        length, _ = cache.get_mask_sizes(num_queries, 0)
        if self._numbers is None or len(self._numbers) != length:
            self._numbers = torch.arange(length, device=rows.device)
        text = self._numbers < starts  # (batch, K)
        if padding is not None:
            text[:, : padding.shape[1]] &= padding
        seen = text if dtype == torch.bool else torch.where(text, *self._ends_of(dtype, rows.device))
        mask = seen[:, None, None].expand(-1, -1, num_queries, -1).contiguous()
        mask.scatter_(3, columns.expand(-1, -1, num_queries, -1), block)
        if padding is None:
            mark_open(mask, rows.common)
        return mask

    def _ends_of(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._ends is None:
            shows, hides = (torch.tensor(end, dtype=dtype, device=device) for end in (0.0, -torch.inf))
            self._ends = (shows, hides)
        return self._ends

    def _private_config(self) -> Any:
        if self._config is None:
            name = f"hf_specdec_{self.implementation}"
            with _register_lock:
                if compat.mask_function_of(name) is None:
                    compat.register_mask_function(name, functools.partial(tree_mask, str(self.implementation)))
            self._config = compat.private_config(self.model.config)
            compat.set_attention_implementation(self._config, name)
        return self._config


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """Masks of booleans as masks that are added to the scores."""
    if isinstance(mask, dict):
        return {kind: _added(one, dtype) for kind, one in mask.items()}
    is_bool = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    return additive(mask, dtype, -torch.inf) if is_bool else mask


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
    build = compat.mask_function_of(implementation)
    assert build is not None
    rows: TreeRows = config.hf_specdec_rows
    view = _split_view if rows.same_start and not use_vmap else _general_view
    kwargs["allow_is_causal_skip"] = False
    mask = build(
        mask_function=view(rows, mask_function, q_offset), q_offset=q_offset, use_vmap=use_vmap, config=config, **kwargs
    )
    if mask_function is causal_mask_function and kwargs.get("attention_mask") is None:
        mark_open(mask, rows.common - int(kwargs.get("kv_offset", 0)))
    return mask


def _split_view(rows: TreeRows, mask_function: MaskFunction, q_offset: int) -> MaskFunction:
    """For rows of one length and broadcast indices: text and new columns apart, so that only C need the relation."""
    positions = (rows.starts[:, None] + rows.depths).view(len(rows.depths), 1, 1, -1)
    num_queries, num_columns = rows.visible.shape[1:]
    asking = positions[..., -num_queries:].transpose(2, 3)
    visible_columns = rows.visible.unsqueeze(1)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        text = mask_function(batch, head, asking, key[..., :-num_columns])
        new = mask_function(batch, head, asking, positions) & visible_columns
        return torch.cat([text.expand(*new.shape[:3], -1), new], dim=-1)

    return visible


def _general_view(rows: TreeRows, mask_function: MaskFunction, q_offset: int) -> MaskFunction:
    """For rows of different lengths, and for index-by-index evaluation: every column is looked up."""
    num_queries, num_columns = rows.visible.shape[1:]
    starts = rows.starts

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        start = starts[batch]
        asking = query - q_offset
        column = key - start
        known = column.clamp(0, num_columns - 1)
        is_new = column >= 0
        query_position = start + rows.depths[batch, asking + num_columns - num_queries]
        key_position = torch.where(is_new, start + rows.depths[batch, known], key)
        related = rows.visible[batch, asking, known] & (column < num_columns)
        return mask_function(batch, head, query_position, key_position) & (related | ~is_new)

    return visible
