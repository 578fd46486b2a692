"""Counts of tokens with the largest few kept in order, at a bounded cost per change.

Knows nothing about n-grams or models.
"""

from array import array


class TopCounts:
    """Counts of all tokens, and a ranking of `size` of them, largest first, the earlier one first among equals.

    Args:
        size (`int`): how many tokens are ranked; a change costs at most that many swaps.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[int, int] = {}
        self._total = 0
        self._ranking, self._ranked = array("i"), array("q")  # tokens and their counts
        self._ranks: dict[int, int] = {}

    def add(self, token: int) -> None:
        """Count `token` once more."""
        self._total += 1
        count = self._counts[token] = self._counts.get(token, 0) + 1
        rank = self._ranks.get(token)
        if rank is None:
            if len(self._ranking) < self._size:
                self._ranking.append(token)
                self._ranked.append(count)
            elif count > self._ranked[-1]:
                del self._ranks[self._ranking[-1]]
                self._ranking[-1] = token
            else:
                return
            rank = self._ranks[token] = len(self._ranking) - 1
        self._ranked[rank] = count
        while rank > 0 and self._ranked[rank - 1] < count:
            self._swap(rank - 1)
            rank -= 1

    def shares(self) -> dict[int, float]:
        """The ranked tokens, largest count first, each with its share of all counts and `size` unseen ones.

        The unseen ones keep the first few counts from being taken for a distribution.
        """
        ranking, ranked, total = self.arrays
        return {token: count / total for token, count in zip(ranking, ranked, strict=True)}

    @property
    def arrays(self) -> "tuple[array[int], array[int], int]":
        """The ranked tokens, their counts, and the sum of all counts with the unseen ones."""
        return self._ranking, self._ranked, self._total + self._size

    def _swap(self, rank: int) -> None:
        ranking, ranked = self._ranking, self._ranked
        ranking[rank], ranking[rank + 1] = ranking[rank + 1], ranking[rank]
        ranked[rank], ranked[rank + 1] = ranked[rank + 1], ranked[rank]
        self._ranks[ranking[rank]], self._ranks[ranking[rank + 1]] = rank, rank + 1
