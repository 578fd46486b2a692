"""The compiled core: `link`, `move` and `places` of the n-gram index, `put_nodes` and `log_odds` of recycled
logits, `top` of logits, and `auto`'s search.
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

def link(
    tokens: array[int], older: array[int], slots: array[int], num_orders: int, start: int, /
) -> tuple[int, list[int]]: ...
def move(tokens: array[int], old: array[int], new: array[int], num_orders: int, /) -> None: ...
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
    evidence: npt.NDArray[Any],
    /,
) -> int: ...
def log_odds(log_probs: npt.NDArray[np.float32], /) -> None: ...
def top(
    logits: npt.NDArray[Any], width: int, tokens: npt.NDArray[np.int64], values: npt.NDArray[np.float32], /
) -> bool: ...

class Search:
    def __init__(
        self,
        own: _Ngrams,
        young: _Ngrams | None,
        old: _Ngrams | None,
        recycled: _Table | None,
        found: _Table | None,
        learned: _Learned,
        common: list[int],
        evidence: list[float],
        takes_trees: bool,
        /,
    ) -> None: ...
    def likeliest(
        self, budget: int, floor: float, /
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...], tuple[float, ...]]: ...
    def token(self, node: int, /) -> int: ...
    def parent(self, node: int, /) -> int: ...
    def probability(self, node: int, /) -> float: ...
    def child(self, node: int, token: int, /) -> int: ...
    def share(self, node: int, token: int, uses_found: bool = True, /) -> float: ...
    def score(self, node: int, tokens: list[int], evidence: list[float], /) -> None: ...
    def value(self, nodes: list[int], /) -> float: ...
    def learn(self, node: int, token: int, drafted: Sequence[int], /) -> None: ...
    def said(self, node: int, /) -> tuple[list[tuple[int, list[int], list[float]]], list[float]]: ...
