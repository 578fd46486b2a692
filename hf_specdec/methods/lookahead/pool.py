"""The pool of lookahead: n-grams by their first token, a bounded number a token, the least recently used out first.

Knows nothing about windows, trees or models.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_KEYS = 16_384  # first tokens


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
