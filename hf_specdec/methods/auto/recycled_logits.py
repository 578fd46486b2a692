"""Recycled logits: what the target last thought likely after one, two and three tokens.

Every verified node, kept or rejected, shows the target's best next tokens there, and so does every token of a prompt.
They are kept under the node's last tokens, and are predictions when the same tokens come again. Source:
https://arxiv.org/abs/2408.08696 (Token Recycling), which keys by one token; longer keys know the context better.
Averaging what was seen under one key drafted no better than the newest alone.

A table of fixed size in arrays: a key has four places that it can take, and takes the one not written to for the
longest time. Safe to share between threads: a reader that meets a writer gets an entry of another key at worst.
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_specdec.kernels import native
from hf_specdec.methods.common.node_logits import NodeLogits

MAX_KEY = 3
NUM_KEPT = 16  # next tokens of a node that an entry has room for, as sampled texts go on with unlikely ones
NUM_LIKELIEST = 8  # that greedy texts, draft networks and windows name; 16 drafted no better
FLOOR = 7.0  # evidence is counted from log odds of -7, about 1 in 1,000
LEAST_SHARE = 1e-6  # probabilities nearer to 0 or 1 count as this near
NUM_WAYS = 4  # places that one key can take
FEW_ENTRIES = 64  # of which each may be anywhere
LAST_STAMP = 1 << 30  # far enough from what 32 bits hold for one call's stamps
NOTHING = -1  # fills entries of fewer tokens

Entry = tuple[Sequence[int], Sequence[float]]  # next tokens, likeliest first, and the evidence for each
Rows = npt.NDArray[Any]
ALL = slice(None)


class RecycledLogits:
    """Entries by their last tokens, `MAX_KEY` of them and fewer.

    Args:
        max_entries (`int`): bound of the memory; an entry takes 140 bytes, from the system as it is first written.
    """

    clock: int
    _keys: Rows
    _stamps: Rows
    _tokens: Rows
    _evidence: Rows

    def __init__(self, max_entries: int) -> None:
        self._lock = threading.Lock()
        self._allocate(max_entries)

    @property
    def arrays(self) -> tuple[Rows, Rows, Rows, Rows, int, int]:
        """Keys, stamps, tokens and evidence, sets and ways, as the compiled core takes them."""
        return self._arrays

    def __len__(self) -> int:
        """Entries kept."""
        return int(np.count_nonzero(self._keys))

    def put_nodes(
        self, tokens: Sequence[int], parents: Sequence[int], before: Sequence[int], best: Rows, log_probs: Rows
    ) -> None:
        """Keep what the target thinks likely after every node of a tree, under its last tokens.

        Args:
            tokens, parents: of `N` nodes, the root first, whose parent is -1.
            before: the tokens in front of the root, at least `MAX_KEY - 1` of them where there are so many.
            best, log_probs: `(N, K)`, the best next tokens of each and their log probabilities, at most `NUM_KEPT`.
        """
        assert native.core is not None
        rows = np.ascontiguousarray(best, dtype=np.int32), np.ascontiguousarray(log_probs, dtype=np.float32)
        with self._lock:
            self.renumber_late_stamps()
            self.clock = native.core.put_nodes(self._arrays, self.clock, tokens, parents, before, *rows)

    def export(self) -> dict[str, Rows]:
        """All entries: `places`, `stamps` and `keys` `(N,)`, `tokens` and `evidence` `(N, NUM_KEPT)`."""
        with self._lock:
            (places,) = self._keys.nonzero()
            keys, tokens, evidence = (row[places] for row in self._rows())
            stamps = self._stamps[places]
        return {"places": places, "stamps": stamps, "keys": keys, "tokens": tokens, "evidence": evidence}

    def restore(self, entries: Mapping[str, Rows]) -> None:
        """Hold exactly what a memory of the same bound exported.

        Raises:
            IndexError: a place beyond the bound.
        """
        with self._lock:
            self._allocate(self.max_entries)
            places = entries["places"]
            for row, name in zip((self._stamps, *self._rows()), ("stamps", "keys", "tokens", "evidence"), strict=True):
                row[places] = entries[name]
            self.clock = int(self._stamps.max())

    def renumber_late_stamps(self) -> None:
        """Let time begin anew, in the same order, before a stamp is too large for its 32 bits."""
        if self.clock < LAST_STAMP:
            return
        times, order = np.unique(self._stamps, return_inverse=True)
        self._stamps[:] = order + int(times[0] > 0)  # 0 is of places that hold nothing
        self.clock = int(self._stamps.max())

    def _rows(self) -> tuple[Rows, Rows, Rows]:
        return self._keys, self._tokens, self._evidence

    def _allocate(self, max_entries: int) -> None:
        """An empty table of at most so many entries."""
        self.max_entries, self.clock = max_entries, 0
        self._num_ways = NUM_WAYS if max_entries > FEW_ENTRIES else max_entries
        sets = max_entries // self._num_ways
        self._num_sets = sets - 1 + sets % 2 or 1  # odd, so that all tokens of a key tell sets apart
        count = self._num_sets * self._num_ways
        self._keys, self._stamps = _zeros((count,), np.int64), _zeros((count,), np.int32)
        self._tokens, self._evidence = _zeros((count, NUM_KEPT), np.int32), _zeros((count, NUM_KEPT), np.float32)
        self._arrays = self._keys, self._stamps, self._tokens, self._evidence, self._num_sets, self._num_ways

    def __getstate__(self) -> dict[str, Any]:
        return {"max_entries": self.max_entries, "entries": self.export()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._allocate(state["max_entries"])
        self.restore(state["entries"])


def _zeros(shape: tuple[int, ...], dtype: Any) -> Rows:
    """Zeros in small pages: the first entries lie all over the table, and would have all of it cleared in huge ones."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def best_tokens(logits: NodeLogits, rows: slice | list[int] = ALL) -> Sequence[Entry]:
    """One entry for each of these rows: its likeliest tokens."""
    return entries_of(*logits.top(NUM_LIKELIEST, rows))


def entries_of(tokens: Rows, log_probs: Rows, *, floor: float = 0.0) -> Sequence[Entry]:
    """One entry for each row of `(C, count)` tokens and their log probabilities; no evidence is below `floor`."""
    evidence = log_odds(np.exp(log_probs.astype(np.float64)), floor=floor)
    return list(zip(tokens.tolist(), evidence.tolist(), strict=True))


def log_odds(probabilities: Rows, *, floor: float = 0.0) -> Rows:
    """Evidence that probabilities are: their log odds above -7; none is below `floor`. NaN counts as 0."""
    within = np.clip(np.nan_to_num(probabilities, nan=0.0), LEAST_SHARE, 1.0 - LEAST_SHARE)
    odds: Rows = np.maximum(np.log(within / (1.0 - within)) + FLOOR, floor)
    return odds
