"""The compiled core: `link` and `places` of the n-gram index, `put_nodes` of recycled logits, `read_logits`, `auto`'s
search, and, on processors with AVX2, `linear` layers, `rms_norm`s, `attention` and `recur`rences of a few tokens.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Ngrams = tuple[array[int], array[int], array[int], int]  # tokens, older, slots, orders
_Table = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], int, int]
_Learned = tuple[array[float], array[int], array[float], array[float], array[float], array[float]]

INTERFACE: int

def attention(
    addresses: tuple[int, ...],  # of query, key, value, mask, sinks, result, bounds of packed rows
    sizes: tuple[int, int, int, int, int, int, int],
    strides: tuple[int, ...],
    scale_and_cap: tuple[float, float],
    kind: int,
    num_threads: int,
    team: int,
    /,
) -> None: ...
def has_kernels() -> bool:
    """Returns whether there are kernels for this processor."""

def linear(
    tokens: int,
    weights: int,
    bias: int,
    out: int,
    num_tokens: int,
    num_out: int,
    num_in: int,
    kind: int,
    is_transposed: bool,
    num_threads: int,
    team: int,
    /,
) -> None: ...
def link(
    tokens: array[int], older: array[int], slots: array[int], num_orders: int, start: int, /
) -> tuple[int, list[int]]: ...
def packed_linear(
    tokens: int,
    weights: int,
    bias: int,
    out: int,
    num_tokens: int,
    num_out: int,
    num_in: int,
    kind: int,
    format: int,
    num_threads: int,
    team: int,
    /,
) -> None: ...
def packed_rows(
    rows: int, weights: int, out: int, count: int, num_rows: int, num_in: int, kind: int, format: int, /
) -> None: ...
def places(
    tokens: array[int],
    older: array[int],
    slots: array[int],
    num_orders: int,
    ngram: tuple[int, ...],
    limit: int,
    /,
) -> list[int]: ...
def put_nodes(
    table: _Table,
    clock: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    before: Sequence[int],
    best: npt.NDArray[Any],
    log_probs: npt.NDArray[Any],
    /,
) -> int: ...
def read_logits(logits: npt.NDArray[Any], read: npt.NDArray[np.float32], width: int, count: int, /) -> bool: ...
def recur(
    addresses: tuple[int, ...],  # of state, result, room for each thread, query, key, value, decay, beta, parents
    sizes: tuple[int, int, int, int, int, int],  # batch, heads, key_heads, columns, value_dim, key_dim
    num_threads: int,
    team: int,
    /,
) -> None: ...
def huge_pages(start: int, end: int, is_file: bool, /) -> int: ...
def replay(
    code: int,
    size: int,
    bases: int,
    layers: int,
    masks: int,
    rows: int,
    columns: int,
    packed: int,
    packed_width: int,
    counters: int,
    num_counters: int,
    room: int,
    room_size: int,
    num_threads: int,
    team: int,
    team_size: int,
    /,
) -> None: ...
def same_values(groups: tuple[dict[Any, Any], ...], values: tuple[object, ...], skipped: type[object], /) -> bool:
    """Returns whether the dictionaries hold these objects, in this order; those of the class `skipped` do not count."""

def exponential(uniform: int, out: int, count: int, /) -> None: ...
def rms_norm(tokens: int, weights: int, out: int, count: int, size: int, epsilon: float, kind: int, /) -> None: ...

class Search:
    def __init__(
        self,
        own: _Ngrams,
        young: _Ngrams | None,
        old: _Ngrams | None,
        recycled: _Table | None,
        learned: _Learned,
        common: tuple[array[int], array[int], int],
        takes_trees: bool,
        max_depth: int,
        noise: tuple[npt.NDArray[np.float32], ...],
        /,
    ) -> None: ...
    def likeliest(
        self, budget: int, floor: float, /
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[int, ...]]: ...
    def token(self, node: int, /) -> int: ...
    def parent(self, node: int, /) -> int: ...
    def probability(self, node: int, /) -> float: ...
    def child(self, node: int, token: int, /) -> int: ...
    def score(self, node: int, tokens: list[int], evidence: list[float], /) -> None: ...
    def value(self, nodes: list[int], /) -> float: ...
    def follow(self, tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int], /) -> None: ...
    def said(self, node: int, /) -> tuple[list[tuple[int, list[int], list[float]]], list[float]]: ...
