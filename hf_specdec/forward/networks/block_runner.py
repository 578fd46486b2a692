"""The side of one call of a head that drafts a block at once: one forward a step answers every request of all rows.

Its cache holds the target's states of the accepted tokens as the head's layers read them; each step adds those of the
tokens that were accepted and forgets the block. The tokens of a block are drafted without knowing one another: what
follows a node of a tree depends on its depth alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.common.transfer import to_device
from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.compiled_forward import Step, StepKind
from hf_specdec.forward.networks.head_base import BaseHeadRunner, HeadCall, head_cache
from hf_specdec.methods.common.draft_head import AttentionSpan, BlockHead

Array = npt.NDArray[Any]


class BlockRunner(BaseHeadRunner[BlockHead]):
    """A head that drafts blocks, with the texts of all rows.

    Args:
        project: states of the head to logits, the target's or those of the head's own vocabulary.
    """

    per_row = ("_firsts", "_unread", "_blocks")

    def __init__(self, head: BlockHead, call: HeadCall, project: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(head, call)
        self.project, self.max_draft_len = project, head.num_drafted
        self._firsts = [0] * self.num_rows  # position of each row's first state
        self._unread: list[list[torch.Tensor]] = [[] for _ in self.texts]  # features that the cache lacks
        self._blocks: list[torch.Tensor | None] = [None] * self.num_rows  # of this round: (num_drafted, vocab) logits
        reserve, shapes, self._shapes = call.reserve + head.block_size, head.cache_shapes(), call.shapes
        self._cache = head_cache(head, shapes, call.shapes, num_rows=self.num_rows, reserve=reserve)

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """See `BaseHeadRunner.read`."""
        features = self._features(place, states)
        if not self._cache.lengths[place] and not self._unread[place]:
            self._firsts[place] = len(self.texts[place]) - len(features)
        self._unread[place].append(features)

    def cost_of_request(self, place: int) -> float:
        """Cost of a row's next request: nothing once the block of this round is computed."""
        is_computed = self._blocks[place] is not None and not self._has_ended
        return 0.0 if is_computed else self.relative_cost

    def num_unread(self, place: int) -> int:
        """States of a row's text that are not in the cache."""
        return sum(map(len, self._unread[place]))

    def _score(self, trees: Sequence[DraftTree | None]) -> torch.Tensor:
        wanted = [tree is not None and block is None for tree, block in zip(trees, self._blocks, strict=True)]
        if any(wanted):
            self._compute(wanted)
        scored = []
        for tree, known, block in zip(trees, self._num_scored, self._blocks, strict=True):
            if block is None or tree is None or len(tree) == known:
                continue
            flat = block.new_zeros((1, block.shape[1]))  # beyond the block any token is as likely as any other
            depths = torch.tensor(tree.depths[known:], device=block.device).clamp(max=len(block))
            scored.append(torch.cat([block, flat])[depths])
        return torch.cat(scored)

    def _compute(self, wanted: Sequence[bool]) -> None:
        """One forward: new states of the text, C columns a row, and the wanted rows' blocks of N tokens."""
        head, size = self.head, self.head.block_size
        contexts = [
            torch.cat(features) if want and features else None
            for want, features in zip(wanted, self._unread, strict=True)
        ]
        counts = [0 if context is None else len(context) for context in contexts]
        width, num_keys, is_fixed = self._place(max(max(counts), 1))
        num_features = next(context.shape[1] for context in contexts if context is not None)
        features = torch.zeros((len(wanted), width, num_features), dtype=self.head_dtype, device=self.head_device)
        tokens, starts = np.full((len(wanted), size), head.mask_token_id), np.array(self._cache.lengths)
        positions = np.empty((len(wanted), width + size), dtype=np.int64)
        for place, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            if context is not None:
                features[place, :count] = context
            first, last = self._firsts[place] + int(starts[place]), len(self.texts[place]) - 1
            tokens[place, 0] = self.texts[place][-1]
            positions[place, :width] = np.arange(first, first + width)
            positions[place, width:] = np.arange(last, last + size)
        spans = [head.span] if head.sliding_span is None else [head.span, head.sliding_span]
        seen = self._masks(spans, starts, np.array(counts), positions, num_keys)
        ids, places, *masks = to_device([tokens, positions, *seen], self.head_device)
        inputs = {
            "embeddings": self._embeddings(ids),
            "features": features,
            "positions": places,
            "mask": masks[0],
            "sliding_mask": masks[-1],
            "cache": self._cache,
        }
        if self.compiled is None or self._shapes is None or not is_fixed:
            states = head(**inputs)
        else:
            _, states = self.compiled((len(wanted), width, num_keys), inputs, self._shapes.checked)
        states = states[:, size - head.num_drafted :]
        logits = self.project(states)  # (rows, num_drafted, draft_vocab_size)
        self._cache.commit([range(count) for count in counts])
        for place, want in enumerate(wanted):
            if want:
                self._unread[place] = []
                self._blocks[place] = logits[place]

    def _place(self, num_new: int) -> tuple[int, int, bool]:
        """C for so many new states, K, and whether both are fixed; says where the cache writes the C + N columns."""
        cache, size = self._cache, self.head.block_size
        if self._shapes is not None and isinstance(cache, StaticSpecCache):
            width = self._shapes.fixed.width_of(num_new)
            if width in self._shapes.fixed.widths:
                cache.place(width + size)
                return width, cache.capacity, True
            cache.unplace()
        return num_new, max(cache.lengths) + num_new + size, False

    def _masks(
        self, spans: Sequence[AttentionSpan], starts: Array, counts: Array, positions: Array, num_keys: int
    ) -> list[Array]:
        """`(rows, 1, N, K)` for each span: a block sees the text, its own new states and itself, within the span."""
        size = self.head.block_size
        width = positions.shape[1] - size
        new = np.arange(num_keys) - starts[:, None]
        keys = (new < counts[:, None]) | ((new >= width) & (new < width + size))
        mask = keys[:, None, None].repeat(size, axis=2)
        if all(span.is_all for span in spans):
            return [mask]
        places = np.array(self._firsts)[:, None] + np.arange(num_keys)  # (rows, K)
        written = starts[:, None] + np.arange(positions.shape[1])
        np.put_along_axis(places, written.clip(max=num_keys - 1), positions, axis=1)
        distances = positions[:, None, width:, None] - places[:, None, None, :]
        return [mask & span.sees(distances) for span in spans]

    def close(self) -> None:
        """The call has ended; buffers of compiled forwards are kept for the next one."""
        if self.compiled is not None and isinstance(self._cache, StaticSpecCache):
            self.compiled.keep_cache(self._cache)

    def _renew_round(self) -> None:
        self._blocks = [None] * len(self.texts)

    def _select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)

    def _admit(self, other: "BlockRunner", place: int | None) -> None:
        self._cache.admit(other._cache, place)  # noqa: SLF001 another of the same class


def _block_step(head: BlockHead) -> Step:
    """A head's forward, as a function of one shape; the target's output head reads the states."""

    def step(**inputs: Any) -> tuple[None, torch.Tensor]:
        return None, head(**inputs)  # (rows, N, hidden_size)

    return step


BLOCK_STEP = StepKind(_block_step, {"features": 1, "positions": 1})
