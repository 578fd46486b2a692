"""Counts of tokens with the largest few kept in order, at a bounded cost per change.

Knows nothing about n-grams or models.
"""

__all__ = ["TopCounts"]


class TopCounts:
    """Counts of all tokens, and a ranking of `size` of them, largest first, the earlier one first among equals.

    Args:
        size (`int`): how many tokens are ranked; a change costs at most that many swaps.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[int, int] = {}
        self._total = 0
        self._ranking: list[int] = []
        self._ranks: dict[int, int] = {}

    def add(self, token: int) -> None:
        """Count `token` once more."""
        self._total += 1
        count = self._counts[token] = self._counts.get(token, 0) + 1
        rank = self._ranks.get(token)
        if rank is None:
            if len(self._ranking) < self._size:
                self._ranking.append(token)
            elif count > self._counts[self._ranking[-1]]:
                del self._ranks[self._ranking[-1]]
                self._ranking[-1] = token
            else:
                return
            rank = self._ranks[token] = len(self._ranking) - 1
        while rank > 0 and self._counts[self._ranking[rank - 1]] < count:
            self._swap(rank - 1)
            rank -= 1

    def shares(self) -> dict[int, float]:
        """The ranked tokens, largest count first, each with its share of all counts and `size` unseen ones.

        The unseen ones keep the first few counts from being taken for a distribution.
        """
        return {token: self._counts[token] / (self._total + self._size) for token in self._ranking}

    def _swap(self, rank: int) -> None:
        ranking = self._ranking
        ranking[rank], ranking[rank + 1] = ranking[rank + 1], ranking[rank]
        self._ranks[ranking[rank]], self._ranks[ranking[rank + 1]] = rank, rank + 1
