"""The hash table behind `NgramIndex`: open addressing over one array, a slot an n-gram, without keys of its own.

A slot holds `end * num_orders + size - 1`: the n-gram of `size` tokens that ends before position `end` of the text,
where its tokens are compared. 0 is an empty slot. Every function here has a counterpart in the compiled core that
leaves the same bytes in the same arrays.
"""

from array import array
from collections.abc import Sequence

SEED, FACTOR, WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1


def table(num_slots: int) -> "array[int]":
    """An empty table; the number of slots is a power of two."""
    empty = array("i")
    empty.frombytes(bytes(num_slots * empty.itemsize))
    return empty


def table_for(least: int) -> "array[int]":
    """An empty table of at least so many slots."""
    return table(1 << max(least - 1, 1).bit_length())


def move(tokens: "array[int]", old: "array[int]", new: "array[int]", num_orders: int) -> None:
    """Enter the n-grams of one table in an empty one that has room for them."""
    last = len(new) - 1
    for slot in old:
        if slot:
            end, size = slot // num_orders, slot % num_orders + 1
            place = _hash(tokens[end - size : end]) & last
            while new[place]:
                place = (place + 1) & last
            new[place] = slot


def newest(slots: "array[int]", tokens: "array[int]", num_orders: int, ngram: Sequence[int]) -> int:
    """The newest end of `ngram` in the text, 0 where it is not."""
    if not 0 < len(ngram) <= num_orders:
        return 0
    return _slot(slots, tokens, num_orders, array("i", ngram)) // num_orders


def link(
    tokens: "array[int]", older: "array[int]", slots: "array[int]", num_orders: int, start: int
) -> tuple[int, list[int]]:
    """Enter the n-grams that end with the tokens from `start` on, and link each to the one before it.

    Returns:
        how many n-grams are new, and of the new pairs that begin and end with a token the second token of each, where
        that is no boundary (below 0).
    """
    added, followers, last = 0, [], len(slots) - 1
    for end in range(start + 1, len(tokens) + 1):
        state = SEED
        for size in range(1, min(num_orders, end) + 1):
            product = ((state ^ (tokens[end - size] & 0xFFFFFFFF)) * FACTOR) & WORD  # as `_hash`, a token at a time
            state = product ^ product >> 32
            place = state & last
            known = 0
            while slot := slots[place]:
                if slot % num_orders == size - 1:
                    before = slot // num_orders
                    if tokens[before - size : before] == tokens[end - size : end]:
                        known = before
                        break
                place = (place + 1) & last
            if not known:
                added += 1
                if size == 2 and tokens[end - 1] >= 0:
                    followers.append(tokens[end - 1])
            older[(end - 1) * num_orders + size - 1] = known
            slots[place] = end * num_orders + size - 1
    return added, followers


def _hash(ngram: Sequence[int]) -> int:
    state = SEED
    for token in reversed(ngram):
        product = ((state ^ (token & 0xFFFFFFFF)) * FACTOR) & WORD
        state = product ^ product >> 32
    return state


def _slot(slots: "array[int]", tokens: "array[int]", num_orders: int, ngram: "array[int]") -> int:
    """What stands in the slot of `ngram`: 0 where the text does not have it."""
    size, last = len(ngram), len(slots) - 1
    place = _hash(ngram) & last
    while slot := slots[place]:
        if slot % num_orders == size - 1:
            end = slot // num_orders
            if tokens[end - size : end] == ngram:
                return slot
        place = (place + 1) & last
    return 0
