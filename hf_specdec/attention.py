"""The attention mask of a tree: the model's own mask, evaluated at the nodes' positions, AND the ancestor relation.

Sliding windows, chunks and padding stay the model's business: its mask functions are asked about positions, whatever
they compute. They reach ours through a private copy of the model's configuration that names one of our mask
functions, so nothing global changes and two calls never see one another's tree.

    masks = TreeMasks(model)
    masks.supported                                     # whether this attention implementation takes any mask
    attention_mask = masks.build(trees, cache, position_ids, attention_mask_2d)
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache import SpecCache
from hf_specdec.tree import DraftTree

__all__ = ["TreeMasks", "TreeRows"]

# Implementations whose kernels take an arbitrary mask. FlashAttention takes none; flex needs a compiled block mask.
MASKABLE = ("sdpa", "eager", "xformers")
MaskFunction = Callable[..., torch.Tensor]
_register_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The trees of one forward, one a row, T nodes each.

    Attributes:
        starts (`Tensor`): `(batch, 1, 1, 1)`, each row's length before the forward: the position of its root.
        depths (`Tensor`): `(batch, T)`.
        ancestors (`Tensor`): `(batch, T, T)` bool, see `DraftTree.visible`.
    """

    starts: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


class TreeMasks:
    """Builds the masks of one call's forwards. Not shared between threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.implementation = compat.attention_implementation(model.config)
        self.supported = self.implementation in MASKABLE
        self._config: Any = None

    def build(
        self,
        trees: Sequence[DraftTree],
        cache: SpecCache,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> Any:
        """The 4-D mask (or dict of masks) for a forward of `trees`, all of T nodes, one a row.

        Args:
            cache: the cache before the forward.
            position_ids: `(batch, T)`; only its device matters here.
            attention_mask: `(batch, length + T)` with zeros at padding, or `None`.
        """
        device = position_ids.device
        lengths = cache.lengths or (0,) * len(trees)
        rows = TreeRows(
            starts=torch.tensor(lengths, device=device).view(-1, 1, 1, 1),
            depths=torch.tensor([tree.depths for tree in trees], device=device),
            ancestors=torch.stack([tree.visible().to(device) for tree in trees]),
        )
        config = self._private_config()
        compat.text_config(config).hf_specdec_rows = rows
        return compat.masks_for_forward(
            self.model,
            config,
            shape=(len(trees), len(trees[0])),
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )

    def _private_config(self) -> Any:
        if self._config is None:
            name = f"hf_specdec_{self.implementation}"
            with _register_lock:
                if compat.mask_function_of(name) is None:
                    compat.register_mask_function(name, functools.partial(tree_mask, str(self.implementation)))
            self._config = compat.private_config(self.model.config)
            compat.set_attention_implementation(self._config, name)
        return self._config


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
    view = _one_row_view if len(rows.starts) == 1 and not use_vmap else _general_view
    kwargs["allow_is_causal_skip"] = False
    return build(
        mask_function=view(rows, mask_function, q_offset), q_offset=q_offset, use_vmap=use_vmap, config=config, **kwargs
    )


def _one_row_view(rows: TreeRows, mask_function: MaskFunction, q_offset: int) -> MaskFunction:
    """For one row and broadcast indices: prefix and tree columns apart, so that only T columns need the relation."""
    positions = (rows.depths[0] + q_offset).view(1, 1, -1, 1)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        num_nodes = positions.shape[2]
        prefix = mask_function(batch, head, positions, key[..., :-num_nodes])
        inside = mask_function(batch, head, positions, positions.view(1, 1, 1, -1)) & rows.ancestors
        return torch.cat([prefix.expand(1, 1, num_nodes, -1), inside.expand(1, 1, num_nodes, -1)], dim=-1)

    return visible


def _general_view(rows: TreeRows, mask_function: MaskFunction, q_offset: int) -> MaskFunction:
    """For rows of different lengths, and for index-by-index evaluation: every column looked up by its node."""
    num_nodes = rows.depths.shape[1]
    starts = rows.starts.view(-1)

    def visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        start = starts[batch]
        query_node = query - q_offset
        column = key - start
        key_node = column.clamp(0, num_nodes - 1)
        in_tree = column >= 0
        query_position = start + rows.depths[batch, query_node]
        key_position = torch.where(in_tree, start + rows.depths[batch, key_node], key)
        related = rows.ancestors[batch, query_node, key_node] & (column < num_nodes)
        return mask_function(batch, head, query_position, key_position) & (related | ~in_tree)

    return visible
