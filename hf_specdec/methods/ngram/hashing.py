"""The hash table behind `NgramIndex`: open addressing over one array, a slot an n-gram, without keys of its own.

A slot holds `end * num_orders + size - 1`: the n-gram of `size` tokens that ends before position `end` of the text,
where its tokens are compared. 0 is an empty slot. Every function here has a counterpart in the compiled core that
leaves the same bytes in the same arrays.
"""

from array import array
from collections.abc import Sequence

__all__ = ["grown", "link", "newest", "table"]

SEED, FACTOR, WORD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1


def table(num_slots: int) -> "array[int]":
    """An empty table; the number of slots is a power of two."""
    empty = array("i")
    empty.frombytes(bytes(num_slots * empty.itemsize))
    return empty


def grown(old: "array[int]", tokens: "array[int]", num_orders: int, least: int) -> "array[int]":
    """The same n-grams in a table of at least so many slots."""
    new = table(1 << max(least - 1, 1).bit_length())
    for slot in old:
        if slot:
            end, size = slot // num_orders, slot % num_orders + 1
            new[_free(new, _hash(tokens[end - size : end]))] = slot
    return new


def newest(slots: "array[int]", tokens: "array[int]", num_orders: int, ngram: Sequence[int]) -> int:
    """The newest end of `ngram` in the text, 0 where it is not."""
    if not 0 < len(ngram) <= num_orders:
        return 0
    return slots[_slot(slots, tokens, num_orders, array("i", ngram), _hash(ngram))] // num_orders


def link(
    tokens: "array[int]", older: "array[int]", slots: "array[int]", num_orders: int, start: int
) -> tuple[int, list[int]]:
    """Enter the n-grams that end with the tokens from `start` on, and link each to the one before it.

    Returns:
        how many n-grams are new, and of the new pairs that begin and end with a token the second token of each, where
        that is no boundary (below 0).
    """
    added, followers = 0, []
    for end in range(start + 1, len(tokens) + 1):
        state = SEED
        for size in range(1, min(num_orders, end) + 1):
            state = _mixed(state, tokens[end - size])
            place = _slot(slots, tokens, num_orders, tokens[end - size : end], state)
            known = slots[place] // num_orders
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
        state = _mixed(state, token)
    return state


def _mixed(state: int, token: int) -> int:
    """The hash of an n-gram with `token` in front of it."""
    product = ((state ^ (token & 0xFFFFFFFF)) * FACTOR) & WORD
    return product ^ product >> 32


def _slot(slots: "array[int]", tokens: "array[int]", num_orders: int, ngram: "array[int]", state: int) -> int:
    """Where `ngram` stands, or else the empty slot that it would take."""
    size, last = len(ngram), len(slots) - 1
    place = state & last
    while slot := slots[place]:
        if slot % num_orders == size - 1:
            end = slot // num_orders
            if tokens[end - size : end] == ngram:
                return place
        place = (place + 1) & last
    return place


def _free(slots: "array[int]", state: int) -> int:
    """The first empty slot from where the hash points."""
    last = len(slots) - 1
    place = state & last
    while slots[place]:
        place = (place + 1) & last
    return place
