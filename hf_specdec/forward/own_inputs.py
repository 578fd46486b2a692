"""Inputs that code from outside of transformers prepares: it may change positions and masks at any length of the text.

Such code is asked for each token as plain generation asks it. Several tokens are computed at once only while it goes on
linearly: positions that count on, and a mask that hides the prompt's padding alone.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.token_buffer import TokenBuffer

AHEAD = 16  # tokens after the text that it is asked for


class OwnInputs:
    """The arguments of plain generation's forwards of one token each, for a text that grows.

    Args:
        kwargs: as `generate` keeps them after the prompt's forward.
        start (`int`): tokens in the cache then.
        mask_key, positions_key: names of two arguments of the forward.

    Attributes:
        parts_at (`int | None`): first number of tokens whose next forward does not go on linearly, once one was met.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kwargs: dict[str, Any],
        text: TokenBuffer,
        start: int,
        mask_key: str,
        positions_key: str,
    ) -> None:
        self.model, self.text, self.start = model, text, start
        self.parts_at: int | None = None
        self._mask_key, self._positions_key = mask_key, positions_key
        self._cache = kwargs[compat.cache_name(kwargs)]
        self._kwargs, self._linear = {start: dict(kwargs)}, dict[int, bool]()
        self._first = self.at(start)

    @property
    def note(self) -> str | None:
        """Reason why tokens were computed one by one from some length on, or `None`."""
        if self.parts_at is None or self.parts_at >= len(self.text) - 1:
            return None
        return f"its own code prepares other inputs from token {self.parts_at} on: one token is computed at a time"

    def at(self, num_cached: int) -> dict[str, Any]:
        """The arguments of the forward after so many cached tokens."""
        for count in range(max(self._kwargs), num_cached):
            self._kwargs[count + 1] = compat.next_kwargs(self.model, dict(self._kwargs[count]))
        ids, missing = self.text.ids()[:, : num_cached + 1], num_cached + 1 - len(self.text)
        if missing > 0:  # a token to come; any stands for it
            ids = torch.cat([ids, ids[:, -1:].expand(-1, missing)], dim=1)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, **self._kwargs[num_cached]
        )
        if not any(value is self._cache for value in inputs.values()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} drops its cache at token {num_cached}, which cannot be followed. "
                "Generate this text with spec_method=None."
            )
        return inputs

    def room(self, num_cached: int) -> int:
        """Number of tokens after the next one that can be computed with it; -1 where that one stands alone."""
        ahead = range(num_cached, num_cached + AHEAD + 1)
        linear = next((count - num_cached - 1 for count in ahead if not self._is_linear(count)), AHEAD)
        for old in [count for count in self._kwargs if count < num_cached]:
            del self._kwargs[old]
            self._linear.pop(old, None)
        return linear

    def _is_linear(self, num_cached: int) -> bool:
        if (is_linear := self._linear.get(num_cached)) is None:
            inputs, step = self.at(num_cached), num_cached - self.start
            is_linear = self._linear[num_cached] = self._counts_on(inputs, step) and self._sees_all(inputs, step)
            if not is_linear and self.parts_at is None:
                self.parts_at = num_cached
        return is_linear

    def _counts_on(self, inputs: dict[str, Any], step: int) -> bool:
        first, positions = self._first.get(self._positions_key), inputs.get(self._positions_key)
        return positions is first if first is None or positions is None else torch.equal(positions, first + step)

    def _sees_all(self, inputs: dict[str, Any], step: int) -> bool:
        first, mask = self._first.get(self._mask_key), inputs.get(self._mask_key)
        if first is None or mask is None:
            return first is mask
        is_flat = isinstance(mask, torch.Tensor) and isinstance(first, torch.Tensor) and mask.ndim == first.ndim == 2
        return is_flat and torch.equal(mask, torch.cat([first, first.new_ones((len(first), step))], dim=1))
