"""Keys, values and states of texts that were read, for prompts that begin alike: a radix tree, bounded in bytes.

cache = hf_specdec.PrefixCache(max_bytes=4 << 30)
for result in hf_specdec.generate_many(model, prompts, prefix_cache=cache):
    print(result.stats.num_cached_tokens)

A node holds the columns of some tokens after those of its parent, and the states of layers without attention after the
last of them where they were seen. The form is that of RadixAttention: Zheng et al., SGLang, arXiv:2312.07104.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hf_specdec.cache.state_layer import StateLayer
from hf_specdec.compat.caches import contents
from hf_specdec.compat.modules import saved_weights, write_count
from hf_specdec.errors import ConfigError

DEFAULT_BYTES = 1 << 30
KeysValues = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer, (1, heads, tokens, head_dim) each
States = dict[int, StateLayer]  # by layer, of one row


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a prompt that was read before.

    Attributes:
        length (`int`): its tokens; 0 where no states are known that it needs.
        num_shared (`int`): tokens that a text has in common with the prompt, at least `length`.
    """

    length: int = 0
    num_shared: int = 0
    columns: KeysValues = field(default_factory=dict)
    states: States = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Node:
    tokens: npt.NDArray[np.int64]
    columns: KeysValues
    parent: "weakref.ref[_Node] | None" = None  # weak, so that the texts are freed with their cache
    states: States = field(default_factory=dict)
    children: "dict[int, _Node]" = field(default_factory=dict)  # by their first token
    last_used: int = 0
    num_bytes: int = 0

    def cut(self, start: int, end: int) -> KeysValues:
        """Copies of the columns of some of its tokens."""
        return {
            layer: (keys[:, :, start:end].clone(), values[:, :, start:end].clone())
            for layer, (keys, values) in self.columns.items()
        }


class PrefixCache:
    """Keeps keys and values of texts, and drops those that were not used for longest. Safe to share between threads.

    Texts serve prompts of the same model in the same state (weights, adapters, dtype, hooks); `clear` it where weights
    are written through `.data`, which no one can see.

    Args:
        max_bytes (`int`, *optional*, defaults to 1 GiB): bound on what is kept, on the model's device; 0 keeps nothing.

    Attributes:
        num_bytes (`int`): of what is kept.

    Raises:
        ConfigError: `max_bytes` is no number of bytes.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise ConfigError("max_bytes", "must be a whole number of at least 0", max_bytes, "1 << 30 is 1 GiB.")
        self.max_bytes, self._lock = max_bytes, threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._roots: dict[Hashable, _Node] = {}
            self._nodes: dict[_Node, None] = {}  # all but the roots
            self.num_bytes = self._time = 0

    def find(self, key: Hashable, tokens: Sequence[int], *, step: int = 1, needs_states: bool = False) -> Prefix:
        """Find the longest beginning of `tokens` that is kept under `key`.

        Args:
            step (`int`): its length is a multiple of it.
            needs_states (`bool`): whether it has to end where states are known.
        """
        with self._lock:
            path = self._path(key, np.asarray(tokens))
            shared = length = sum(count for _, count in path)
            parts, states, start = list[tuple[KeysValues, int]](), States(), 0
            if needs_states:
                length = 0
                for node, count in path:
                    start += count
                    if node.states and count == len(node.tokens):
                        length, states = start, node.states
            start, length = 0, length // step * step
            for node, count in path:
                if start < length:
                    parts.append((node.columns, min(count, length - start)))
                start += count
        columns = {
            layer: (
                torch.cat([part[layer][0][:, :, :count] for part, count in parts], dim=2),
                torch.cat([part[layer][1][:, :, :count] for part, count in parts], dim=2),
            )
            for layer in (parts[0][0] if parts else ())
        }  # (1, heads, length, head_dim)
        return Prefix(length, shared, columns, states)

    def put(
        self,
        key: Hashable,
        tokens: Sequence[int],
        columns: Callable[[int, int], KeysValues],
        states: States | None = None,
    ) -> None:
        """Keep a text.

        Args:
            columns: copies those from one token to another, of what is not kept yet.
            states: after its last token.
        """
        if not self.max_bytes or not tokens:
            return
        with self._lock:
            ids, start = np.asarray(tokens), 0
            node = self._roots.setdefault(key, _Node(ids[:0], {}))
            for node, count in self._path(key, ids):
                start += count
                if count < len(node.tokens):
                    node = self._split(node, count)
            if start < len(ids):
                node = self._add(_Node(ids[start:].copy(), columns(start, len(ids)), weakref.ref(node)))
            if states and not node.states:
                node.states = states
                self._weigh(node)
            while self.num_bytes > self.max_bytes:
                self._remove(min((leaf for leaf in self._nodes if not leaf.children), key=lambda leaf: leaf.last_used))

    def _path(self, key: Hashable, tokens: npt.NDArray[np.int64]) -> list[tuple[_Node, int]]:
        """The nodes that `tokens` lead through, each with how many of its own; all count as used now."""
        self._time += 1
        node, start, path = self._roots.get(key), 0, list[tuple[_Node, int]]()
        while node is not None and start < len(tokens):
            node = node.children.get(int(tokens[start]))
            if node is not None:
                rest = tokens[start : start + len(node.tokens)]
                differs = node.tokens[: len(rest)] != rest
                count = int(differs.argmax()) if differs.any() else len(rest)
                node.last_used = self._time
                path.append((node, count))
                start += count
                node = node if count == len(node.tokens) else None
        return path

    def _add(self, node: _Node) -> _Node:
        node.last_used = self._time
        _parent_of(node).children[int(node.tokens[0])] = node
        self._nodes[node] = None
        self._weigh(node)
        return node

    def _split(self, node: _Node, count: int) -> _Node:
        """Give the first `count` tokens of a node to a new parent, which is returned."""
        upper = self._add(_Node(node.tokens[:count], node.cut(0, count), node.parent))
        node.columns, node.tokens = node.cut(count, len(node.tokens)), node.tokens[count:]
        node.parent = weakref.ref(upper)
        upper.children[int(node.tokens[0])] = node
        self._weigh(node)
        return upper

    def _weigh(self, node: _Node) -> None:
        before, node.num_bytes = node.num_bytes, sum(tensor.nbytes for tensor in contents([node.columns, node.states]))
        self.num_bytes += node.num_bytes - before

    def _remove(self, node: _Node) -> None:
        del self._nodes[node], _parent_of(node).children[int(node.tokens[0])]
        self.num_bytes -= node.num_bytes


def _parent_of(node: _Node) -> _Node:
    parent = None if node.parent is None else node.parent()
    assert parent is not None
    return parent


class WeightsVersion:
    """Identifies the weights that a model has at a moment.

    Sees a parameter or saved buffer that was replaced, given other memory, or written over in place, as by an optimizer
    or `load_state_dict`. Does not see writes through `.data`, which torch does not count either.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        self._version = object()

    def of(self, model: torch.nn.Module) -> object:
        """The object that stands for the model's weights, another one after each change."""
        weights = saved_weights(model)
        seen = [(reference(), *numbers) for reference, *numbers in self._seen]
        same = len(weights) == len(seen) and all(
            weight is before and write_count(weight) == tuple(numbers)
            for weight, (before, *numbers) in zip(weights, seen, strict=True)
        )
        if not same:
            self._seen = [(weakref.ref(weight), *write_count(weight)) for weight in weights]
            self._version = object()
        return self._version
