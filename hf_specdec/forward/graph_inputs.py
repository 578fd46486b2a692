"""Arguments of compiled steps over a static cache: tensors that stay, with values that one copy brings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.common.transfer import Array, is_host, to_device
from hf_specdec.compat.models import OF_PROMPTS
from hf_specdec.forward.forward_arguments import SHORTENED_LOGITS, KeptArguments, with_token_types
from hf_specdec.forward.graph_masks import TREE
from hf_specdec.forward.mask_rules import RuleMasks
from hf_specdec.forward.tree_layout import TreeLayout
from hf_specdec.forward.tree_rows import TreeRows


class GraphInputs:
    """Builds the arguments of steps that make their masks as of `graph_masks`.

    Args:
        template: arguments of a forward of one token.
        names: the forward's own for ids, positions and masks.
        rules: of the masks.
        padding: `(batch, P)` bool: which of the prompt's columns are seen; `None` where none is padding.
        reuses_tensors: whether the next arguments may be written over the last ones, which no one keeps.
    """

    def __init__(
        self,
        cache: StaticSpecCache,
        template: Mapping[str, Any],
        names: tuple[str, str, str],
        rules: RuleMasks,
        padding: torch.Tensor | None,
        *,
        reuses_tensors: bool,
    ) -> None:
        self._cache, self._names, self._rules, self._padding = cache, names, rules, padding
        left_out = (*names, *SHORTENED_LOGITS, *OF_PROMPTS)
        self._others = {name: value for name, value in template.items() if name not in left_out}
        self._device: torch.device = template[names[0]].device
        self._keeps = reuses_tensors and not is_host(self._device)
        self._seen: torch.Tensor | None = None  # `padding` over all columns
        self._made: dict[tuple[int, int], KeptArguments] = {}  # by width and columns of the buffers

    def of(self, layouts: Sequence[TreeLayout], positions: Array, rows: TreeRows) -> dict[str, Any]:
        """Arguments for a forward of the rows' columns, the same dictionary for each forward of a width.

        Args:
            positions: `(..., batch, Q)`.
        """
        cache, width = self._cache, len(layouts[0])
        arrays = [np.array([layout.new_tokens for layout in layouts]), positions, cache.next_columns(width)]
        arrays += self._rules.tree_arrays(rows)
        sent = cache.sender(self._device)(arrays) if self._keeps else to_device(arrays, self._device)
        cache.place(width, columns=sent[2])
        key = width, cache.capacity
        if key not in self._made or not self._keeps:
            self._made[key] = self._arguments(sent, width, len(layouts))
        return self._made[key] if self._keeps else dict(self._made[key])

    def _arguments(self, sent: Sequence[torch.Tensor], width: int, batch: int) -> KeptArguments:
        num_keys, (ids, positions, mask) = self._cache.capacity, self._names
        if self._seen is None or self._seen.shape[1] != num_keys:  # also without padding: one graph takes both
            self._seen = torch.ones((batch, num_keys), dtype=torch.bool, device=self._device)
            if self._padding is not None:
                self._seen[:, : self._padding.shape[1]] = self._padding
        tree = self._rules.tree(sent[3:], self._cache.columns_on(self._device), self._seen, num_keys)
        others = with_token_types(self._others, width)
        return KeptArguments({**others, ids: sent[0], positions: sent[1], TREE: {"name": mask, **tree}})
