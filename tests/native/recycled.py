"""The table of recycled logits in Python: what the compiled core writes and reads, for tests."""

from collections.abc import Sequence

import numpy as np

from hf_specdec.methods.auto.recycled_logits import MAX_KEY, NOTHING, NUM_KEPT, Entry, RecycledLogits, Rows, log_odds

__all__ = ["TOKEN_BITS", "get", "key_of", "keys_of", "longest", "put", "put_nodes", "put_rows"]
TOKEN_BITS = 21  # of a token in a key: three of them fill a whole number of 64 bits


def key_of(tokens: Sequence[int]) -> int:
    """The last tokens of a context, at most `MAX_KEY` of them, as one number above 0."""
    key = 0
    for token in tokens:
        key = (key << TOKEN_BITS) | (token + 1)
    return key


def keys_of(tail: Sequence[int]) -> list[int]:
    """Keys of the last one, two, ... tokens of `tail`."""
    keys = [0]
    for size, token in enumerate(reversed(tail)):
        keys.append(keys[-1] | (token + 1) << size * TOKEN_BITS)
    return keys[1:]


def get(recycled: RecycledLogits, key: int) -> Entry | None:
    """Tokens that the target found likely when it last followed those of `key`, a `key_of`."""
    keys, _, tokens, evidence, num_sets, num_ways = recycled.arrays
    first = key % num_sets * num_ways
    for place in range(first, first + num_ways):
        if keys[place] == key:
            is_token = tokens[place] >= 0
            return tokens[place][is_token].tolist(), evidence[place][is_token].tolist()
    return None


def longest(recycled: RecycledLogits, keys: Sequence[int]) -> Entry | None:
    """Entry of the last of `keys` that is known."""
    return next((entry for key in reversed(keys) if (entry := get(recycled, key)) is not None), None)


def put(recycled: RecycledLogits, tokens: Sequence[int], entry: Entry) -> None:
    """Keep what the target thinks likely after `tokens`, at most `MAX_KEY` of them, and after their ends."""
    keys = np.array([key_of(tokens[start:]) for start in range(len(tokens))], dtype=np.int64)
    rows = filled(np.array([entry[0]]), np.array([entry[1]]))
    put_rows(recycled, keys, *[row.repeat(len(keys), axis=0) for row in rows])


def put_rows(recycled: RecycledLogits, keys: Rows, tokens: Rows, evidence: Rows) -> None:
    """Keep entries: `(N,)` keys, `(N, NUM_KEPT)` tokens and evidence; of equal keys the last one counts."""
    recycled.renumber_late_stamps()
    table_keys, stamps, table_tokens, table_evidence, num_sets, num_ways = recycled.arrays
    while len(keys):
        recycled.clock += 1
        places = (keys % num_sets * num_ways)[:, None] + np.arange(num_ways)  # (N, ways)
        # a key's own place, else an empty one, else the one not written to for the longest time
        ages = np.where(table_keys[places] == keys[:, None], -1, stamps[places])  # (N, ways)
        chosen = places[:, 0] + ages.argmin(axis=1)  # (N,)
        table_keys[chosen], stamps[chosen] = keys, recycled.clock
        table_tokens[chosen], table_evidence[chosen] = tokens, evidence
        lost = table_keys[chosen] != keys  # different keys that chose one place
        keys, tokens, evidence = keys[lost], tokens[lost], evidence[lost]


def put_nodes(
    recycled: RecycledLogits,
    tokens: Sequence[int],
    parents: Sequence[int],
    before: Sequence[int],
    best: Rows,
    log_probs: Rows,
) -> None:
    """`RecycledLogits.put_nodes`."""
    best, evidence = filled(best, log_odds(np.exp(log_probs.astype(np.float64))).astype(np.float32))
    keys = _keys_of_nodes(tokens, parents, before)  # (MAX_KEY, N)
    shape = (keys.size, NUM_KEPT)
    repeated = [np.broadcast_to(row, (*keys.shape, NUM_KEPT)).reshape(shape) for row in (best, evidence)]
    put_rows(recycled, keys.reshape(-1), *repeated)


def _keys_of_nodes(tokens: Sequence[int], parents: Sequence[int], before: Sequence[int]) -> Rows:
    """`(MAX_KEY, N)` keys of a tree's nodes: by one, two and three tokens."""
    keys = np.empty((MAX_KEY, len(tokens)), dtype=np.int64)
    last, above = np.array(tokens, dtype=np.int64) + 1, np.array(parents)
    ends, keys[0] = last, last
    for size in range(1, MAX_KEY):
        ends = ends[above]  # the tokens `size` places earlier
        ends[0] = before[-size] + 1 if size <= len(before) else 0
        keys[size] = keys[size - 1] | ends << size * TOKEN_BITS
    return keys


def filled(tokens: Rows, evidence: Rows) -> tuple[Rows, Rows]:
    """Rows of `NUM_KEPT` of them, where there are fewer."""
    count = tokens.shape[1]
    if count == NUM_KEPT:
        return tokens, evidence
    widths = ((0, 0), (0, NUM_KEPT - count))
    return np.pad(tokens, widths, constant_values=NOTHING), np.pad(evidence, widths)
