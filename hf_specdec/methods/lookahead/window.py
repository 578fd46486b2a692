"""Lookahead's window of guesses about the text to come, refined by Jacobi iteration, and its pool of n-grams.

The window has W columns by N - 1 levels. Level l, column i is l + i positions after the root, the text's last token,
which is itself level 0, column 0. Read upwards, a column is a piece of text: level l + 1 holds what the target said
comes after level l. The pool keeps n-grams by their first token, a bounded number a token, the least recently used out
first. Knows nothing about drafts or models.
"""

import functools
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hf_specdec.common.tree import ExtraTokens

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

    def tails(self, key: int) -> list[tuple[int, ...]]:
        """The tails of the n-grams that begin with `key`, most recently used first."""
        return list(reversed(self._tails.get(key, ())))

    def entries(self, key: int) -> list[tuple[tuple[int, ...], bool]]:
        """As `tails`, each with whether it stood in a text; else a window alone found it."""
        return list(reversed(self._tails.get(key, OrderedDict[tuple[int, ...], bool]()).items()))

    def snapshot(self, keys: Iterable[int]) -> dict[int, tuple[tuple[int, ...], ...]]:
        """The tails of those of `keys` that have any."""
        return {key: tuple(self.tails(key)) for key in keys if key in self._tails}
