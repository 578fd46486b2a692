"""Lookahead: a window of guesses yields n-grams, a pool keeps them, those that begin with the last token are drafted.

The target computes the window with the draft, in the same forward, so no second model is needed.
Source: https://arxiv.org/abs/2402.02057. Unlike the paper's program, candidates share their prefixes, and a step that
accepts a whole n-gram keeps the token after it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_specdec.common.observer import DraftedNode
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.window import JacobiWindow, TailPool


@dataclass(frozen=True, slots=True)
class LookaheadView:
    """Window and n-grams that a lookahead drafter is about to use.

    Attributes:
        window (`tuple[tuple[int, ...], ...]`): its tokens level by level; level 0 begins with the root.
        pool (`Mapping[int, tuple[tuple[int, ...], ...]]`): for the root and the other tokens of level 0, the tails of
            the n-grams that begin with them, most recently used first. The root's are the next step's candidates.
    """

    window: tuple[tuple[int, ...], ...]
    pool: Mapping[int, tuple[tuple[int, ...], ...]]


class LookaheadDrafter(BaseDrafter):
    """Drafts the n-grams that the window found, and those of the text.

    Args:
        config: see `LookaheadConfig`.
    """

    needs_logits = True
    num_top_logits = 0
    _pool: TailPool
    _window: JacobiWindow
    _candidates: list[tuple[tuple[int, ...], bool]]  # of the last step, for observers

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self.max_extra_tokens = 0 if config.is_plain else config.window_size * (config.ngram_size - 1) - 1
        self._start([-1])

    @property
    def assisted_budget(self) -> int:
        """Most tokens drafted a step inside transformers' loop: those of a tail."""
        return self.config.ngram_size - 1

    @property
    def view(self) -> LookaheadView:
        """The window and the part of the pool that concerns it, as they are now."""
        window = tuple(tuple(level) for level in self._window.levels)
        return LookaheadView(window, self._pool.snapshot(window[0]))

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Draw the window's first level from the prompt, and pool the prompt's n-grams."""
        self._start(prompt_ids)
        self._extend(prompt_ids)

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """Merge the n-grams that begin with the root into a trie; the window goes with them."""
        budget = request.budget
        self._candidates = self._pool.entries(self._root) if budget > 0 else []
        if budget < 1:
            return DraftTree.chain(self._root)
        builder = TreeBuilder(self._root)
        for tail, _ in self._candidates:
            node = 0
            for token in tail:
                if len(builder) > budget:
                    break
                node = builder.add(node, token)
        return builder.build().with_extra(self._window.extra())

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """Names each node's source: an n-gram of this text, or the window alone."""
        builder, described = TreeBuilder(tree.tokens[0]), list[DraftedNode]()
        for tail, is_text in self._candidates:
            builder.add_path(0, tail)
            described += [DraftedNode("text" if is_text else "window")] * (len(builder) - 1 - len(described))
        return tuple([described[node - 1] for node in tree.nodes_in(builder.build())[1:] if node])

    def learn_from(self, result: DraftResult) -> None:
        """Pool what the window yields and what the text gained.

        Where the window was not computed, it stays as it is, but for its root.
        """
        tree, logits = result.tree, result.logits
        if logits is not None and self._was_computed(tree):
            for ngram in self._window.observe(self._next_tokens(logits, tree.num_columns)):
                self._pool.add(ngram)
        self._extend(result.accepted)

    def _was_computed(self, tree: DraftTree) -> bool:
        """True if the forward of `tree` carried the window."""
        return not self.config.is_plain and (tree.extra is not None or self._window.num_extra == 0)

    def _next_tokens(self, logits: NodeLogits, num_columns: int) -> list[int]:
        """The target's tokens after the window's last level, where that is level 0 the root's row first."""
        first = num_columns - self.config.window_size
        if len(self._window.levels) > 1:
            return logits.best(slice(first, num_columns))
        return logits.best([0, *range(first + 1, num_columns)])

    def _start(self, source: Sequence[int]) -> None:
        """An empty text; the window draws its tokens from `source`."""
        config = self.config
        self._root = source[-1]
        self._candidates = []
        self._recent: list[int] = []  # the last N - 1 tokens of the text, fewer at its start
        self._window = JacobiWindow(
            width=config.window_size,
            num_levels=max(config.ngram_size - 1, 1),
            source=source,
            generator=random.Random(0),
        )
        self._pool = TailPool(ngram_size=config.ngram_size, max_tails=config.verification_set_size)

    def _extend(self, tokens: Sequence[int]) -> None:
        """The text has grown by `tokens`."""
        self._root = tokens[-1]
        self._window.set_root(self._root)
        if not self.config.is_plain:
            self._recent += tokens
            self._pool.add_text(self._recent)
            self._recent = self._recent[1 - self.config.ngram_size :]
