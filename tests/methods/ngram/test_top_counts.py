"""The ranking holds the largest counts, as a full sort does."""

import random
from collections import Counter

import pytest

from hf_specdec.methods.common.ngram.index import TopCounts


@pytest.mark.parametrize("seed", range(20))
def test_the_ranking_holds_the_largest_counts_while_they_grow(seed: int) -> None:
    rng, counts, reference = random.Random(seed), TopCounts(size=4), Counter[int]()
    for _ in range(300):
        token = int(rng.paretovariate(1)) % 12
        counts.add(token)
        reference[token] += 1
        shares = counts.shares()
        assert list(shares.values()) == [
            count / (reference.total() + 4) for count in sorted(reference.values(), reverse=True)[:4]
        ]
        assert all(shares[token] == reference[token] / (reference.total() + 4) for token in shares)
