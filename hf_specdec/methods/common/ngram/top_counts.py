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

    def add(self, token: int) -> None:
        """Count `token` once more."""
        ranking, ranked = self._ranking, self._ranked
        self._total += 1
        count = self._counts[token] = self._counts.get(token, 0) + 1
        rank = ranking.index(token) if token in ranking else len(ranking)
        if rank == len(ranking) < self._size:
            ranking.append(token)
            ranked.append(count)
        elif rank == len(ranking):
            if count <= ranked[-1]:
                return
            rank -= 1
        while rank > 0 and ranked[rank - 1] < count:
            ranking[rank], ranked[rank] = ranking[rank - 1], ranked[rank - 1]
            rank -= 1
        ranking[rank], ranked[rank] = token, count

    def shares(self) -> dict[int, float]:
        """Share of each ranked token, largest first, in all counts and `size` unseen ones.

        The unseen ones keep the first few counts from being taken for a distribution.
        """
        ranking, ranked, total = self.arrays
        return {token: count / total for token, count in zip(ranking, ranked, strict=True)}

    @property
    def arrays(self) -> "tuple[array[int], array[int], int]":
        """The ranked tokens, their counts, and the sum of all counts with the unseen ones."""
        return self._ranking, self._ranked, self._total + self._size
