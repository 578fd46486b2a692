"""Drafters that only tests use: one that knows the answer, one that drafts at random.

Both check the engine's side of the drafter's contract while they run: one `begin`, budgets respected, every tree that
comes back is one they proposed, and the text they are told of is the text of plain `generate`.

    model.generate(ids, spec_method=lambda: OracleDrafter(expected_ids))
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.drafter import BaseDrafter, Drafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits

__all__ = ["CheckedDrafter", "OracleDrafter", "RandomTreeDrafter", "drafted_by", "learned"]


def drafted_by(drafter: BaseDrafter, budget: int, **fields: Any) -> DraftTree:
    """The tree for a request of this budget and other fields."""
    return drafter.draft_for(DraftRequest(budget, **fields))


def learned(drafter: BaseDrafter, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
    """Tell a drafter what became of its tree."""
    drafter.learn_from(DraftResult(tree, accepted, None if logits is None else NodeLogits(logits)))


class CheckedDrafter(Drafter):
    """Knows the text that plain decoding emits, `expected` (prompt included), and checks what it is told against it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self.text: list[int] = []
        self.num_steps = 0
        self.num_ends = 0
        self.proposed: DraftTree | None = None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        assert not self.text, "begin is called once"
        assert len(prompt_ids) > 0
        self.text = [int(token) for token in prompt_ids]
        self.expected = self.expected[_padding(self.expected, self.text) :]
        assert self.text == self.expected[: len(self.text)]

    def propose(self, budget: int) -> DraftTree:
        assert budget >= 0
        builder = TreeBuilder(self.text[-1])
        self.grow(builder, budget)
        assert len(builder) - 1 <= budget
        self.num_steps += 1
        self.proposed = builder.build()
        return self.proposed

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        assert accepted, "every step emits a token"
        assert tree.tokens[0] == self.text[-1]
        if self.proposed is not None and tree != self.proposed:
            assert tree.num_draft_tokens <= self.proposed.num_draft_tokens
        if self.needs_logits:
            assert logits is not None and logits.shape[0] == len(tree)
        self.text += [int(token) for token in accepted]
        assert self.text == self.expected[: len(self.text)]

    def end(self) -> None:
        assert self.text, "a text ends that has begun"
        assert self.num_ends == 0, "and ends once"
        self.num_ends += 1

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        raise NotImplementedError

    @property
    def coming(self) -> list[int]:
        """What plain decoding emits from here on."""
        return self.expected[len(self.text) :]


def _padding(expected: Sequence[int], prompt: Sequence[int]) -> int:
    """Zeros in front of the prompt, which drafters never see."""
    return next(i for i, token in enumerate(expected) if token == prompt[0]) if not expected[0] else 0


class OracleDrafter(CheckedDrafter):
    """Drafts the true continuation amid wrong siblings.

    On even steps the wrong ones come first and have children that hold the right token, so that the accepted nodes
    lie apart and a `commit` has to move them; on odd steps the right one comes first, so that chains profit as well.
    Depths vary, and every third tree ends on a wrong token.
    """

    vocab_size = 128

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        wrong_first = self.num_steps % 2 == 0
        depth = 1 + self.num_steps % 5
        node = 0
        for level, token in enumerate(self.coming[:depth]):
            if len(builder) + 2 > budget:
                break
            if wrong_first:
                self._add_decoy(builder, node, token)
            if level == depth - 1 and self.num_steps % 3 == 2:
                break
            right = builder.add(node, token)
            if not wrong_first:
                self._add_decoy(builder, node, token)
            node = right

    def _add_decoy(self, builder: TreeBuilder, parent: int, token: int) -> None:
        decoy = builder.add(parent, (token + 1) % self.vocab_size)
        builder.add(decoy, token)


class RandomTreeDrafter(CheckedDrafter):
    """Drafts trees of any shape: bushes, chains, single nodes, nothing; sometimes with the right token at its place."""

    def __init__(self, expected: Sequence[int], *, seed: int = 0, vocab_size: int = 128, hit_rate: float = 0.5) -> None:
        super().__init__(expected)
        self.random = random.Random(seed)
        self.vocab_size, self.hit_rate = vocab_size, hit_rate

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        coming = self.coming
        right_at = {0: 0}  # node on the true path -> its depth
        wanted = self.random.choice((0, 1, 3, 8, 20, budget))
        narrow = self.random.random()
        for _ in range(min(wanted, budget)):
            last = len(builder) - 1
            parent = last if self.random.random() < narrow else self.random.randint(0, last)
            depth = right_at.get(parent)
            hit = depth is not None and depth < len(coming) and self.random.random() < self.hit_rate
            token = coming[depth] if hit else self.random.randrange(self.vocab_size)
            node = builder.add(parent, token)
            if depth is not None and coming[depth : depth + 1] == [token]:
                right_at[node] = depth + 1
