"""`PrefixCache` finds the longest beginning of a text among those that were put, by a list of all of them."""

import random

import torch

from hf_specdec.cache.prefix_cache import KeysValues, PrefixCache


def columns_of(text: list[int]) -> KeysValues:
    """Columns of two layers, of different dimensions, that tell a token and its place."""
    marks = torch.tensor([token + 10.0 * place for place, token in enumerate(text)])[None, None, :, None]
    return {0: (marks.repeat(1, 2, 1, 3), -marks), 2: (marks * 2, marks * 3)}


def put(cache: PrefixCache, key: str, text: list[int]) -> None:
    def cut(start: int, end: int) -> KeysValues:
        return {
            layer: (k[:, :, start:end].clone(), v[:, :, start:end].clone())
            for layer, (k, v) in columns_of(text).items()
        }

    cache.put(key, text, cut)


def num_shared(text: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def test_it_finds_what_a_search_of_all_texts_finds() -> None:
    rng, cache, kept = random.Random(0), PrefixCache(), {"a": list[list[int]](), "b": list[list[int]]()}
    for _ in range(300):
        key, text = rng.choice("ab"), [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        step = rng.choice([1, 1, 4])
        longest = max((num_shared(text, other) for other in kept[key]), default=0)
        result = cache.find(key, text, step=step)
        assert (result.num_shared, result.length) == (longest, longest // step * step)
        for layer, (keys, values) in result.columns.items():
            expected = columns_of(text[: result.length])[layer]
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
        put(cache, key, text)
        kept[key].append(text)


def test_a_beginning_is_held_once() -> None:
    cache, texts = PrefixCache(), [[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4, 6]]
    for text in texts:
        put(cache, "", text)
    item = sum(tensor.nbytes for pair in columns_of([1]).values() for tensor in pair)
    assert cache.num_bytes == item * len({tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)})


def test_texts_that_were_not_used_for_longest_leave_first() -> None:
    item = sum(tensor.nbytes for pair in columns_of([1]).values() for tensor in pair)
    rng, cache, used = random.Random(1), PrefixCache(30 * item), list[int]()
    for _ in range(200):
        text = rng.randrange(12)
        put(cache, "", [text] * 5)
        used = [other for other in used if other != text] + [text]
        assert cache.num_bytes <= cache.max_bytes
        held = [other for other in used if cache.find("", [other]).num_shared]
        assert held == used[-6:]
        for other in used:  # in the order of their use
            cache.find("", [other])
