"""Builds the inputs of the model's forward at each verify step, whatever a model calls its arguments.

The model is asked once what a forward of one token takes; after that only token ids, positions and masks change.
Models whose class prepares its inputs itself are asked at every step.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.transfer import HOST, Sender, to_device
from hf_specdec.compat.attention import cache_drop_length
from hf_specdec.compat.caches import cache_name
from hf_specdec.compat.generation import ModelOutput, has_own_input_preparation
from hf_specdec.compat.models import OF_PROMPTS, counts_image_positions, takes_positions
from hf_specdec.compat.state_layers import has_states_alone
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.text_rows import TokenBuffer, TreeLayout
from hf_specdec.forward.tree_mask import TreeMasks, TreeRows

SHORTENED_LOGITS = ("logits_to_keep", "num_logits_to_keep")  # some models ask for the last row only
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
Array = npt.NDArray[Any]
RUNWAY = 512  # mask columns prepared at once


def with_token_types(kwargs: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The arguments with the last token's type for each of `width` tokens."""
    types = {name: kwargs[name] for name in TOKEN_TYPES if kwargs.get(name) is not None}
    return {
        **kwargs,
        **{name: types_of[..., -1:].expand(*types_of.shape[:-1], width) for name, types_of in types.items()},
    }


def rows_of(kwargs: dict[str, Any], rows: Sequence[int], batch: int) -> dict[str, Any]:
    """`rows` of everything in a forward's arguments that has one entry for each of `batch` rows."""
    index = torch.tensor(rows, device=HOST)
    return {
        name: rows_of_value(value, index, batch, -2 if name.endswith("position_ids") else 0)
        for name, value in kwargs.items()
    }


def tensors_of(kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among a forward's arguments and inside of dictionaries and sequences there, each with its path."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, list | tuple):
            tensors |= tensors_of({f"{name}.{i}": item for i, item in enumerate(value)})
        elif isinstance(value, Mapping):
            tensors |= tensors_of({f"{name}.{inner}": item for inner, item in value.items()})
    return tensors


def rows_of_value(value: Any, index: torch.Tensor, batch: int, dim: int) -> Any:
    """The rows `index` of a tensor whose dimension `dim` is the batch, or of all those in an output or a tuple."""
    if isinstance(value, torch.Tensor):
        is_batched = value.ndim >= max(-dim, dim + 1) and value.shape[dim] == batch
        return value.index_select(dim, index.to(value.device)) if is_batched else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: rows_of_value(item, index, batch, dim) for name, item in value.items()})
    if type(value) is tuple:  # what an encoder returns without a dictionary
        return tuple(rows_of_value(item, index, batch, dim) for item in value)
    return value


def without_prompts(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward without those that leave out logits, or belong to a prompt alone."""
    return {name: value for name, value in inputs.items() if name not in (*SHORTENED_LOGITS, *OF_PROMPTS)}


class StepInputs:
    """Builds the arguments of one call's verify steps.

    Args:
        model_kwargs: as `generate` keeps them after the prompt's forward, the root's position and mask included.
        texts: one a row.
        num_cached (`int`): how many tokens of each text are in the cache.
        reuses_tensors: whether the next arguments may be written over the last ones, which no one keeps.
        always_masks: whether chains of rows of one length get masks of ours too, which a recorded forward needs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        texts: Sequence[TokenBuffer],
        num_cached: int,
        *,
        reuses_tensors: bool = False,
        always_masks: bool = False,
    ) -> None:
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self.ids_key, self.mask_key, self.positions_key = (
            f"{prefix}{name}" for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.model, self.kwargs, self.texts = model, model_kwargs, list(texts)
        self.cache_name = cache_name(model_kwargs)
        self.cache = model_kwargs[self.cache_name]
        self.is_fixed = isinstance(self.cache, StaticSpecCache)  # then every forward gets positions and masks of ours
        self.attention_cache = getattr(self.cache, "self_attention_cache", self.cache)
        self.attends = takes_positions(model) or not has_states_alone(model)
        self.masks = TreeMasks(model)
        self.asks_model = has_own_input_preparation(model) and cache_drop_length(model) is None
        ids = torch.cat([text.ids()[:, : num_cached + 1] for text in texts])
        self.template: dict[str, Any] = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        # A class may still call it otherwise in its forward than transformers does from 5.24 on.
        names = (name for name, value in self.template.items() if value is self.cache)
        self.cache_argument = next(names, self.cache_name)
        if self.template.get(self.cache_argument) is not self.cache:  # a model that would compute its cache anew here
            self.template[self.cache_argument] = self.cache
            for key in (self.ids_key, self.positions_key):
                if self.template.get(key) is not None:
                    self.template[key] = self.template[key][..., -1:]
        if self.template.get(self.ids_key) is None:  # PEFT 0.21's virtual tokens
            raise UnsupportedModelError(f"its prepare_inputs_for_generation gives no {self.ids_key}")
        self.device = self.template[self.ids_key].device
        self._reuses_tensors = reuses_tensors
        self._send = Sender(self.device) if reuses_tensors else functools.partial(to_device, device=self.device)
        self.start = num_cached
        positions = self.template.get(self.positions_key)
        self.base = None if positions is None else positions - num_cached
        takes_masks = isinstance(self.attention_cache, SpecCache) and self.attends and self.masks.supported
        self._always_masks = always_masks and takes_masks and self.base is not None
        self._keeps_positions = positions is None and counts_image_positions(model)
        self._first_positions: Array | None = None  # `base` on the host
        self._mask: torch.Tensor | None = None
        self._padding: Array | None = None  # `(batch, P)` bool: which of the prompt's columns are seen
        self._knows_padding = False

    def of(
        self,
        layouts: Sequence[TreeLayout],
        num_cached: Sequence[int],
        packed: PackedRows | None = None,
    ) -> dict[str, Any]:
        """Arguments for a forward of the rows' new columns.

        Args:
            layouts: what each row has written since its last commit, and what it writes now; all equally wide.
            num_cached: how many tokens of each row's text are in the cache.
            packed: the rows without their padding, as ids and positions are to be; where `takes_packed_rows`.
        """
        first, total = layouts[0].first_new, len(layouts[0])
        ahead = [count - self.start for count in num_cached]
        if isinstance(self.cache, StaticSpecCache):
            self.cache.place(total - first, written=first)
        is_even = packed is None and not self.is_fixed and min(num_cached) == max(num_cached)
        in_sequence = is_even and not self._always_masks and all(row.is_chain for row in layouts)
        inputs = dict(self.template)
        if self.asks_model and (ahead[0] or total > 1):
            inputs = self._asked(layouts, num_cached[0])
        inputs = without_prompts(inputs)
        rows = self._rows_of(layouts) if self.attends and not in_sequence else None
        keys, arrays = [self.ids_key], [np.array([row.new_tokens for row in layouts])]
        if self.template.get(self.positions_key) is not None:
            keys.append(self.positions_key)
            arrays.append(self._positions_of(layouts, num_cached, in_sequence))
        padding = None if rows is None else self._prompt_padding()
        of_mask, dtypes = ([], []) if rows is None else self.masks.arrays(rows, self.attention_cache, padding)
        tensors = self._send(arrays + of_mask, dtypes=[None] * len(arrays) + dtypes)
        inputs.update(zip(keys, tensors, strict=False))
        mask = self._mask_of(max(ahead) + total)
        if mask is not None:
            inputs[self.mask_key] = mask
        if rows is not None:
            sent = tensors[len(keys) :]
            inputs[self.mask_key] = self.masks.build(rows, self.attention_cache, mask, padding=padding, sent=sent)
            if self.base is None:
                inputs[self.positions_key] = self._tree_positions(rows)
        if packed is not None:
            inputs |= {key: packed.pack(inputs[key]) for key in (self.ids_key, self.positions_key)}  # (1, N)
        return with_token_types(inputs, total - first)

    @property
    def takes_packed_rows(self) -> bool:
        """Returns whether the forward takes nothing of each row but its ids, its positions and a mask."""
        names = {self.ids_key, self.positions_key, self.mask_key, *SHORTENED_LOGITS, *OF_PROMPTS}
        has_positions = takes_positions(self.model) and (self.base is None or self.base.ndim == 2)
        others = self.asks_model or self.is_fixed or self.model.config.is_encoder_decoder
        return tensors_of(self.template).keys() <= names and has_positions and not others

    def _rows_of(self, layouts: Sequence[TreeLayout]) -> TreeRows:
        starts = self.attention_cache.lengths or [0] * len(layouts)
        depths, visible = [row.depths for row in layouts], [row.visible() for row in layouts]
        return TreeRows(starts, depths, visible, self.device)

    def _tree_positions(self, rows: TreeRows) -> torch.Tensor:
        """`(batch, Q)`: the columns' positions, for a forward that the model's preparation hands none."""
        if self._keeps_positions:
            raise UnsupportedModelError("its forward counts an image's positions itself, in the order of the columns")
        if not takes_positions(self.model):
            raise UnsupportedModelError("Its forward takes no positions. Use spec_method=None.")
        return rows.starts[:, None] + rows.depths[:, -rows.shape[1] :]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        batch = len(self.texts)
        self.template = rows_of(self.template, rows, batch)
        self.kwargs = rows_of(self.kwargs, rows, batch)
        self.texts = [self.texts[row] for row in rows]
        if self.base is not None:
            self.base = rows_of_value(self.base, torch.tensor(rows, device=HOST), batch, -2)
        self._first_positions = self._mask = None
        self._knows_padding = False

    def admit(self, other: "StepInputs", row: int | None) -> None:
        """Take over the one row of `other`, in the place of row `row` or after the last; no row is padded.

        Raises:
            UnsupportedModelError: the model's forward takes more of each row than ids and positions.
        """
        for inputs in (self, other):
            inputs.forget_mask()
        at = len(self.texts) if row is None else row
        self.texts[at : at + 1] = other.texts
        if self.base is not None:
            assert other.base is not None
            self.base = torch.cat([self.base[..., :at, :], other.base, self.base[..., at + 1 :, :]], dim=-2)
        self._first_positions = None

    def forget_mask(self) -> None:
        """Go on without the 2-D mask of the prompt, which masks nothing."""
        mask = self.template.pop(self.mask_key, None)
        self._knows_padding = False
        names = (self.ids_key, self.positions_key, self.mask_key)
        others = [name for name, value in self.template.items() if isinstance(value, torch.Tensor)]
        if (mask is not None and not bool(mask.all())) or not set(others) <= set(names) or self.asks_model:
            raise UnsupportedModelError("its forward takes more of each row than ids and positions")

    def _positions_of(self, layouts: Sequence[TreeLayout], num_cached: Sequence[int], in_sequence: bool) -> Array:
        """The first column's position plus each new column's depth; `(..., Q)` with the model's own leading ones."""
        if self._first_positions is None:
            assert self.base is not None
            self._first_positions = self.base.cpu().numpy()  # (..., batch, 1)
        steps = [
            [cached + depth for depth in (range(row.first_new, len(row)) if in_sequence else row.new_depths)]
            for row, cached in zip(layouts, num_cached, strict=True)
        ]
        positions: Array = self._first_positions + np.array(steps)  # (..., batch, Q)
        return positions

    def _prompt_padding(self) -> Array | None:
        """`(batch, P)` bool: which of the prompt's columns are seen; `None` where none is padding."""
        if not self._knows_padding:
            mask: torch.Tensor | None = self.template.get(self.mask_key)
            self._padding = None if mask is None or bool(mask.all()) else mask.bool().cpu().numpy()
            self._knows_padding = True
        return self._padding

    def _mask_of(self, num_columns: int) -> torch.Tensor | None:
        """The 2-D mask up to the first root, and ones for the `num_columns` - 1 columns after it."""
        first: torch.Tensor | None = self.template.get(self.mask_key)
        if first is None:
            return None
        end = first.shape[1] + num_columns - 1
        if self._mask is None or end > self._mask.shape[1]:
            self._mask = torch.cat([first, first.new_ones((len(first), max(RUNWAY, 2 * num_columns)))], dim=1)
        return self._mask[:, :end]

    def _asked(self, layouts: Sequence[TreeLayout], num_cached: int) -> dict[str, Any]:
        """Ask the model with the texts and the new columns as if they were chains."""
        kwargs = dict(self.kwargs)
        num_columns = num_cached - self.start + len(layouts[0])
        positions = kwargs.get(self.positions_key)
        if positions is not None:
            more = torch.arange(1, num_columns, device=positions.device) + positions[..., -1:]
            kwargs[self.positions_key] = torch.cat([positions, more], dim=-1)
        mask = kwargs.get(self.mask_key)
        if mask is not None:
            kwargs[self.mask_key] = torch.cat([mask, mask.new_ones((len(mask), num_columns - 1))], dim=1)
        before = num_cached + layouts[0].first_new
        ids = torch.cat([text.beginning(before) for text in self.texts])  # zeros where a round has written columns
        ids = torch.cat([ids, ids.new_tensor([row.new_tokens for row in layouts])], dim=1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=len(layouts[0].new_tokens), **kwargs
        )
        if inputs.get(self.cache_argument) is not self.cache:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} drops its cache at token {before}, which cannot be followed while "
                "several tokens are verified at once. Generate this text with spec_method=None."
            )
        return inputs
