"""Lookahead: a window of guesses yields n-grams, a pool keeps them, those that begin with the last token are drafted.

The window, of W columns by N - 1 levels, is refined by Jacobi iteration. Level l, column i is l + i positions after the
root, the text's last token, which is itself level 0, column 0. Read upwards, a column is a piece of text: level l + 1
holds what the target said comes after level l. The target computes the window with the draft, in the same forward. The
pool keeps n-grams by their first token, a bounded number a token, the least recently used out first.

Source: https://arxiv.org/abs/2402.02057. Unlike the paper's program, candidates share their prefixes, and a step that
accepts a whole n-gram keeps the token after it.
"""

import functools
import random
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree, ExtraTokens, TreeBuilder
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.lookahead.config import LookaheadConfig

MAX_KEYS = 16_384  # first tokens


class JacobiWindow:
    """The tokens of a window, level by level.

    Each step moves it on by one position, whatever the step emitted. Moving it by the emitted tokens gave 2 to 4 %
    fewer tokens per step: the columns that come in at its end know nothing.

    Args:
        width (`int`): columns W.
        num_levels (`int`): levels when full, N - 1.
        source (`Sequence[int]`): tokens to draw from where nothing is known, at least one.
        generator (`random.Random`): draws them.

    Attributes:
        levels (`list[list[int]]`): the levels present, W tokens each; `levels[0][0]` is the root.
    """

    def __init__(self, *, width: int, num_levels: int, source: Sequence[int], generator: random.Random) -> None:
        self.width, self.num_levels = width, num_levels
        self._source, self._generator = source, generator
        self.levels = [[self._draw() for _ in range(width)]]

    @property
    def num_extra(self) -> int:
        """Tokens besides the root."""
        return len(self.levels) * self.width - 1

    def extra(self) -> ExtraTokens | None:
        """The window without its root as tokens of a forward, level by level; `None` where the root is all of it."""
        if not self.num_extra:
            return None
        tokens = tuple([token for level in self.levels for token in level][1:])
        return ExtraTokens(tokens, *window_places(self.width, len(self.levels)))

    def set_root(self, token: int) -> None:
        """Make `token`, the text's new last one, the root."""
        self.levels[0][0] = token

    def observe(self, next_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Put what the target said on top, and move on by one position; `set_root` must follow.

        A full window lets go of its lowest level; one that is still filling, of its first column.

        Args:
            next_tokens: what comes after the last level present, one token a column.

        Returns:
            The columns with their next token, W n-grams of N tokens, if the window was full; else none.
        """
        self.levels.append(list(next_tokens))
        if len(self.levels) > self.num_levels:
            ngrams = list(zip(*self.levels, strict=True))
            del self.levels[0]
            return ngrams
        self.levels = [[*level[1:], self._draw()] for level in self.levels]
        return []

    def _draw(self) -> int:
        return self._generator.choice(self._source)


@functools.lru_cache(maxsize=64)
def window_places(width: int, num_levels: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """`ExtraTokens.depths` and `ExtraTokens.visible` of a window with `num_levels` levels. Not to be written to.

    Level 0, column i sees columns up to i of level 0; level l, column i also column i of levels 1 to l.
    """
    places = [(level, column) for level in range(num_levels) for column in range(width)]
    visible = np.zeros((len(places), len(places)), dtype=np.bool_)
    for row, (level, column) in enumerate(places):
        visible[row, : column + 1] = True
        visible[row, width + column : row + 1 : width] = level > 0
    return tuple([level + column for level, column in places[1:]]), torch.from_numpy(visible[1:])


class TailPool:
    """N-grams of one size, cut into a first token, the key, and a tail.

    Args:
        ngram_size (`int`): tokens of an n-gram, at least 2.
        max_tails (`int`): most tails kept for one key.
    """

    def __init__(self, *, ngram_size: int, max_tails: int) -> None:
        self.ngram_size, self.max_tails = ngram_size, max_tails
        # Both orders are orders of use, the most recent last.
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], bool]] = OrderedDict()  # tail: stood in a text

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._tails)

    def add(self, ngram: Sequence[int], *, is_text: bool = False) -> None:
        """Keep an n-gram; one that is there already counts as used. `is_text` says that it stood in a text."""
        key, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.get(key)
        if tails is None:
            if len(self._tails) >= MAX_KEYS:
                self._tails.popitem(last=False)
            self._tails[key] = OrderedDict({tail: is_text})
            return
        self._tails.move_to_end(key)
        if tail in tails:
            tails.move_to_end(tail)
            tails[tail] = tails[tail] or is_text
            return
        if len(tails) >= self.max_tails:
            tails.popitem(last=False)
        tails[tail] = is_text

    def add_text(self, tokens: Sequence[int]) -> None:
        """Keep every n-gram of a text, the last one as the most recently used."""
        for end in range(self.ngram_size, len(tokens) + 1):
            self.add(tokens[end - self.ngram_size : end], is_text=True)

    def entries(self, key: int) -> list[tuple[tuple[int, ...], bool]]:
        """The tails of n-grams that begin with `key`, most recently used first, and whether each stood in a text."""
        return list(reversed(self._tails.get(key, OrderedDict[tuple[int, ...], bool]()).items()))


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
