"""The side of one call of a head that reads the target's keys and values: one forward a level of all rows' trees.

It keeps nothing of the text but its tokens and the target's last state; the target's cache follows the accepted path.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.transfer import to_device
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.compiled_forward import Step, StepKind
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.networks.head_base import BaseHeadRunner, HeadCall
from hf_specdec.methods.common.draft_head import SharedCacheHead

Array = npt.NDArray[Any]


class SharedCacheRunner(BaseHeadRunner[SharedCacheHead]):
    """A head that reads the target's cache, with the texts of all rows.

    Args:
        own_layers: the layer of the target's cache that layers of each type read.
    """

    per_row = ("_last", "_states", "_outputs")

    def __init__(self, head: SharedCacheHead, call: HeadCall, own_layers: Mapping[str, int]) -> None:
        super().__init__(head, call)
        self.own_layers = own_layers
        self._target: ModelRunner | None = None
        self._last: list[torch.Tensor | None] = [None] * self.num_rows  # (hidden_size,) the target's, before the root
        self._states: list[list[torch.Tensor]] = [[] for _ in self.texts]  # after each node of this round
        self._outputs: list[list[torch.Tensor]] = [[] for _ in self.texts]
        self._shapes = call.shapes

    def bind(self, target: ModelRunner) -> None:
        """Read the cache of this target, whose rows are this runner's."""
        self._target = target

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's states of the text's next tokens; the last of them is read."""
        self._last[place] = states[0][-1].to(self.head_device, self.head_dtype, copy=True)

    def _score(self, trees: Sequence[DraftTree | None]) -> torch.Tensor:
        while any(tree is not None and len(self._states[place]) < len(tree) for place, tree in enumerate(trees)):
            self._compute(trees)
        rows = zip(trees, self._outputs, self._num_scored, strict=True)
        fresh = [state for tree, outputs, known in rows if tree is not None for state in outputs[known : len(tree)]]
        return self.head.logits(torch.stack(fresh))

    def _compute(self, trees: Sequence[DraftTree | None]) -> None:
        """One forward of the nodes whose parents are computed; they see the text, and none of the others."""
        waves = [self._next_nodes(len(known), tree) for known, tree in zip(self._states, trees, strict=True)]
        width = max(map(len, waves))
        if self._shapes is not None:
            width = self._shapes.fixed.width_of(width)
        tokens = np.zeros((len(waves), width), dtype=np.int64)
        positions = np.array([len(text) - 1 for text in self.texts])[:, None].repeat(width, axis=1)
        states = torch.zeros((len(waves), width, self.head.hidden_size), dtype=self.head_dtype, device=self.head_device)
        for place, (nodes, tree) in enumerate(zip(waves, trees, strict=True)):
            if tree is None or not nodes:
                continue
            tokens[place, : len(nodes)] = [tree.tokens[node] for node in nodes]
            root = self._last[place]
            assert root is not None
            before = [self._states[place][tree.parents[node]] if node else root for node in nodes]
            states[place, : len(nodes)] = torch.stack(before)
        keys, seen = self._keys(width)
        ids, at, *masks = to_device([tokens, positions, *seen.values()], self.head_device)
        inputs = {
            "embeddings": self._embeddings(ids),
            "states": states,
            "positions": at,
            "masks": dict(zip(seen, masks, strict=True)),
            "keys": keys,
        }
        computed, outputs = self._run(inputs)
        for place, nodes in enumerate(waves):
            self._states[place] += computed[place, : len(nodes)].unbind()
            self._outputs[place] += outputs[place, : len(nodes)].unbind()

    def _run(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Result of the head's forward."""
        if self._shapes is None:
            found: tuple[torch.Tensor, torch.Tensor] = self.head(**inputs)
            return found
        lengths = [pair[0].shape[-2] for pair in inputs["keys"].values()]
        return self._shapes.run((*inputs["positions"].shape, *lengths), inputs)

    def _keys(self, width: int) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, Array]]:
        """The target's keys and values `(rows, heads, K, size)`, and those of each row's text `(rows, 1, width, K)`."""
        assert self._target is not None
        cache, target = self._target.cache.spec, self._target
        if cache is None:
            raise UnsupportedModelError("An assistant reads the target's keys and values, but its cache has none.")
        ends = np.array([target.rows.num_cached[place] for place in range(len(self.texts))])[:, None]
        padding = np.array([len(buffer) - len(text) for buffer, text in zip(target.texts, self.texts, strict=True)])
        keys, masks = {}, {}
        for kind, window in self.head.windows.items():
            keys[kind], first = self._columns(cache, self.own_layers[kind], int(ends.max()))
            columns = first + np.arange(keys[kind][0].shape[-2])
            distances = ends - 1 - columns  # (rows, K): 0 is the text's last cached token
            seen = (distances >= 0) & (columns >= padding[:, None])
            if window is not None:
                seen &= distances <= window
            masks[kind] = seen[:, None, None].repeat(width, axis=2)
        return keys, masks

    def _columns(self, cache: SpecCache, number: int, end: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """Keys and values of one layer up to the longest row's end, and the number of their first column.

        Buffers of fixed shape are read as a whole: a CUDA graph reads them where they are.
        """
        layer = cache.layers[number]
        buffers = [layer.keys, layer.values]
        if self._shapes is None:
            buffers = [buffer[: len(self.texts), :, : end - layer.offset] for buffer in buffers]
        keys, values = (buffer.to(self.head_device, self.head_dtype) for buffer in buffers)
        return (keys, values), layer.offset

    def _renew_round(self) -> None:
        self._states, self._outputs = [[] for _ in self.texts], [[] for _ in self.texts]


def _shared_step(head: SharedCacheHead) -> Step:
    """A head's forward, as a function of one shape; ordered embeddings, which read numbers, are left out."""

    def step(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        computed, outputs = head(**inputs)  # (rows, Q, hidden_size), (rows, Q, width)
        return computed, outputs

    return step


SHARED_STEP = StepKind(_shared_step, {"embeddings": 1, "states": 1, "positions": 1, "masks": 2})
