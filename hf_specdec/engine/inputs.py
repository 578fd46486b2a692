"""What the model's forward gets at each verify step.

The model is asked once what a forward of one token takes; after that only token ids, positions and masks change.
Models whose class prepares its inputs itself are asked at every step.

    inputs = StepInputs(model, model_kwargs, text)
    model(**inputs.of(tree, text), return_dict=True)
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.attention import TreeMasks
from hf_specdec.engine.text import Text
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.tree import DraftTree

__all__ = ["StepInputs"]

RUNWAY = 512  # positions and mask columns prepared at once
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class StepInputs:
    """Builds the arguments of one call's verify steps.

    Args:
        model_kwargs: as `generate` keeps them after the prompt's forward, the root's position and mask included.
        text: the text, which ends with the first root.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: dict[str, Any], text: Text) -> None:
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        self.ids_key, self.mask_key, self.positions_key = (
            f"{prefix}{name}" for name in ("input_ids", "attention_mask", "position_ids")
        )
        self.model, self.kwargs = model, model_kwargs
        self.cache = model_kwargs["past_key_values"]
        self.masks = TreeMasks(model)
        self.asks_model = compat.has_own_input_preparation(model)
        self.template: dict[str, Any] = model.prepare_inputs_for_generation(
            text.ids(), next_sequence_length=1, **model_kwargs
        )
        self.device = self.template[self.ids_key].device
        self.start = len(text)
        self._positions: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def of(self, tree: DraftTree, text: Text) -> dict[str, Any]:
        """Arguments for a forward of the tree's T tokens behind the cached text."""
        num_nodes, behind = len(tree), len(text) - self.start
        inputs = dict(self.template)
        if self.asks_model and (behind or num_nodes > 1):
            inputs = self._asked(tree, text, behind)
        inputs[self.ids_key] = torch.tensor([tree.tokens], device=self.device)
        if self.positions_key in self.template:
            inputs[self.positions_key] = self._positions_of(tree, behind)
        mask = self._mask_of(behind + num_nodes)
        if mask is not None:
            inputs[self.mask_key] = mask
        if not tree.is_chain:
            inputs[self.mask_key] = self.masks.build([tree], self.cache, inputs[self.positions_key], mask)
        for key in TOKEN_TYPES:
            if inputs.get(key) is not None:
                inputs[key] = inputs[key][..., -1:].expand(*inputs[key].shape[:-1], num_nodes)
        return inputs

    def _positions_of(self, tree: DraftTree, behind: int) -> torch.Tensor:
        """The root's position plus each node's depth; `(..., T)` with the model's own leading dimensions."""
        first: torch.Tensor = self.template[self.positions_key]
        if not tree.is_chain:
            return first + behind + torch.tensor(tree.depths, device=first.device)
        end = behind + len(tree)
        if self._positions is None or end > self._positions.shape[-1]:
            self._positions = first + torch.arange(max(RUNWAY, 2 * end), device=first.device)
        return self._positions[..., behind:end]

    def _mask_of(self, num_columns: int) -> torch.Tensor | None:
        """The 2-D mask up to the first root, and ones for the `num_columns` - 1 columns behind it."""
        first: torch.Tensor | None = self.template.get(self.mask_key)
        if first is None:
            return None
        end = first.shape[1] + num_columns - 1
        if self._mask is None or end > self._mask.shape[1]:
            self._mask = torch.cat([first, first.new_ones((len(first), max(RUNWAY, 2 * num_columns)))], dim=1)
        return self._mask[:, :end]

    def _asked(self, tree: DraftTree, text: Text, behind: int) -> dict[str, Any]:
        """Ask the model with the text and the tree as if it were a chain."""
        kwargs = dict(self.kwargs)
        num_columns = behind + len(tree)
        positions = kwargs.get(self.positions_key)
        if positions is not None:
            more = torch.arange(1, num_columns, device=positions.device) + positions[..., -1:]
            kwargs[self.positions_key] = torch.cat([positions, more], dim=-1)
        mask = kwargs.get(self.mask_key)
        if mask is not None:
            kwargs[self.mask_key] = torch.cat([mask, mask.new_ones((len(mask), num_columns - 1))], dim=1)
        ids = text.ids()
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            torch.cat([ids, ids.new_tensor([tree.tokens[1:]])], dim=1), next_sequence_length=len(tree), **kwargs
        )
        if inputs.get("past_key_values") is not self.cache:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} drops its cache at token {len(text)}, which cannot be followed while "
                "several tokens are verified at once. Generate this text with spec_method=None."
            )
        return inputs
