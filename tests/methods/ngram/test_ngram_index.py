"""The n-gram index finds what a scan of the whole text finds, and the pool keeps its bound whoever uses it."""

import random
import threading
from collections import Counter
from collections.abc import Iterable

import pytest

from hf_specdec.methods.common.ngrams import NgramIndex, NgramPool, TopCounts


def scanned_places(text: list[int], ngram: list[int], limit: int) -> list[int]:
    """The reference: compare the n-gram with every window that has a token behind it, newest first."""
    ends = range(len(text) - 1, len(ngram) - 1, -1)
    return [end for end in ends if text[end - len(ngram) : end] == ngram][:limit]


def scanned_match_length(text: list[int], place: int, context: list[int], limit: int) -> int:
    """The reference: the longest equal pair of slices."""
    sizes = range(min(limit, place, len(context)) + 1)
    return max(size for size in sizes if text[place - size : place] == context[len(context) - size :])


def random_text(seed: int, length: int, num_tokens: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(num_tokens) for _ in range(length)]


def indexed(text: Iterable[int], max_ngram_size: int = 3) -> NgramIndex:
    index = NgramIndex(max_ngram_size)
    index.extend(text)
    return index


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_of_a_scan(seed: int) -> None:
    """Whatever the pieces in which the text arrived."""
    rng, text = random.Random(seed), random_text(seed, 120)
    index, done = NgramIndex(4), 0
    while done < len(text):
        piece = rng.randrange(1, 9)
        index.extend(text[done : done + piece])
        done = min(done + piece, len(text))
        for size in range(1, min(4, done) + 1):
            for ngram in (text[done - size : done], random_text(seed + done, size)):
                for limit in (1, 3, 1000):
                    assert index.places(ngram, limit) == scanned_places(text[:done], ngram, limit)


@pytest.mark.parametrize("seed", range(10))
def test_match_length_is_that_of_equal_slices(seed: int) -> None:
    text = random_text(seed, 80, num_tokens=2)
    index = indexed(text)
    for place in range(1, len(text)):
        for limit in (1, 4, 100):
            assert index.match_length(place, text, limit) == scanned_match_length(text, place, text, limit)


def test_an_ngram_longer_than_the_text_is_nowhere() -> None:
    assert indexed([5]).places([5, 5], limit=8) == []
    assert indexed([]).places([5], limit=8) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_pool_keeps_its_bound_and_forgets_the_oldest_first(seed: int) -> None:
    """After every text: bounded, the last one findable; in the end the first one gone."""
    rng, pool = random.Random(seed), NgramPool(max_tokens=200)
    for number in range(60):
        marks = [1000 + 10 * number + offset for offset in range(3)]
        pool.add(marks + random_text(number, rng.randrange(1, 40)))
        assert len(pool) <= pool.max_tokens
        assert [index.tokens[place] for index, place in pool.search(marks[:2], limit=8)] == [marks[2]]
    assert pool.search([1000, 1001], limit=8) == []


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_a_text_longer_than_the_pool_keeps_it_bounded(max_tokens: int) -> None:
    pool = NgramPool(max_tokens)
    for _ in range(3):
        pool.add(list(range(50)))
        assert len(pool) <= max_tokens


def test_matches_do_not_cross_from_one_text_into_the_next() -> None:
    pool = NgramPool(max_tokens=100)
    pool.add([5, 6])
    pool.add([7, 8])
    assert pool.search([6, 7], limit=8) == []
    assert pool.search([6], limit=8) == []
    assert [index.tokens[place] for index, place in pool.search([7], limit=8)] == [8]


def test_threads_may_add_and_search_at_once() -> None:
    """Four threads add texts of runs n, n + 1, ... while they search: what is found always follows in a run."""
    pool, failures = NgramPool(max_tokens=400), []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        try:
            for _ in range(400):
                start = rng.randrange(50)
                pool.add(list(range(start, start + 10)))
                for index, place in pool.search([start + 1, start + 2], limit=8):
                    assert index.tokens[place] == start + 3
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(pool) <= pool.max_tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_ranking_holds_the_largest_counts_while_they_grow(seed: int) -> None:
    rng, counts, reference = random.Random(seed), TopCounts(size=4), Counter[int]()
    for _ in range(300):
        token = int(rng.paretovariate(1)) % 12
        counts.add(token)
        reference[token] += 1
        ranking, ranked, total = counts.arrays
        assert [*ranked] == sorted(reference.values(), reverse=True)[:4]
        assert all(reference[token] == count for token, count in zip(ranking, ranked, strict=True))
        assert total == reference.total() + 4
