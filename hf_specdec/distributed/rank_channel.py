"""What the processes of one tensor-parallel model tell one another: integers, by one collective at a time.

Knows nothing about decoding. The first process speaks; with every message each of the others says whether all is well
with it, so that a failure anywhere is heard everywhere, at the same place.

    wire = RankChannel(process_group, device)
    wire.exchange([1, 2, 3])            # in the first process; the others: wire.exchange(None) -> [1, 2, 3]
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_specdec.errors import RankError
from hf_specdec.tree import DraftTree, ExtraTokens, TreeBuilder

__all__ = ["RankChannel", "Reader", "write_text", "write_trees"]

CAPACITY = 256  # integers of a message that one collective carries; longer ones take a second
TEXT_BYTES = 400  # of an error's text
BITS = 48  # of a mask, in one integer


class RankChannel:
    """The processes of one group.

    Args:
        group: the process group of the model's shards.
        device: where its collectives take their tensors.

    Attributes:
        rank (`int`): of this process; 0 speaks.
        size (`int`): number of processes.
        intact (`bool`): whether all are well; once not, nothing is exchanged any more.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.intact = True
        self._capacity = CAPACITY

    def exchange(self, body: Sequence[int] | None, pending_error: BaseException | None = None) -> list[int]:
        """The first process's `body`, in every process; the others pass `None`, and so does one that has only trouble.

        Raises:
            RankError: another process is in trouble, or this one is: then with its own trouble as the cause.
        """
        first = [0] * (self.size + 1 + self._capacity)
        first[self.rank] = int(pending_error is not None)
        if body is not None:
            first[self.size] = len(body)
            first[self.size + 1 : self.size + 1 + len(body)] = body[: self._capacity]
            del first[self.size + 1 + self._capacity :]
        values = self.sum(first)
        if any(values[: self.size]):
            self._end(pending_error)
        length, found = values[self.size], values[self.size + 1 :]
        if length > self._capacity:
            rest = length - self._capacity
            found += self.sum(body[self._capacity :] if body is not None else [0] * rest)
            self._capacity = 1 << length.bit_length()
        return found[:length]

    def sum(self, values: Sequence[int]) -> list[int]:
        """The sums over all processes; as many values in each."""
        tensor = torch.tensor(values, dtype=torch.int64).to(self.device)
        dist.all_reduce(tensor, group=self.group)
        total: list[int] = tensor.tolist()
        return total

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first process's tensor; alike in shape and dtype in all."""
        there = tensor.to(self.device)
        dist.broadcast(there, src=dist.get_global_rank(self.group, 0), group=self.group)
        return there.to(tensor.device)

    def table(self, row: Sequence[int]) -> list[list[int]]:
        """Every process's `row`, all of one length."""
        width = len(row)
        values = [0] * (self.size * width)
        values[self.rank * width : (self.rank + 1) * width] = row
        values = self.sum(values)
        return [values[start : start + width] for start in range(0, len(values), width)]

    def _end(self, pending_error: BaseException | None) -> None:
        """All processes raise, each knowing the others' reasons."""
        self.intact = False
        own = b"" if pending_error is None else describe(pending_error).encode()[:TEXT_BYTES]
        texts = [bytes(row).rstrip(b"\0") for row in self.table(list(own.ljust(TEXT_BYTES, b"\0")))]
        reasons = [f"rank {rank}: {text.decode(errors='replace')}" for rank, text in enumerate(texts) if text]
        raise RankError(f"The processes of the model cannot go on together. {' | '.join(reasons)}") from pending_error


class Reader:
    """Reads what was written, from the front."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.values, self.place = values, 0

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return self.place < len(self.values)

    def integer(self) -> int:
        """The next integer."""
        self.place += 1
        return self.values[self.place - 1]

    def integers(self) -> Sequence[int]:
        """A sequence that was written with its length in front."""
        count = self.integer()
        self.place += count
        return self.values[self.place - count : self.place]

    def text(self) -> str:
        """What `write_text` wrote."""
        return bytes(self.integers()).decode(errors="replace")

    def trees(self) -> list[DraftTree | None]:
        """What `write_trees` wrote."""
        return [self._tree() for _ in range(self.integer())]

    def _tree(self) -> DraftTree | None:
        tokens = self.integers()
        if not tokens:
            return None
        builder = TreeBuilder(tokens[0])
        for token, parent in zip(tokens[1:], self.integers(), strict=True):
            builder.add(parent, token)
        tree = builder.build()
        extra = tuple(self.integers())
        if not extra:
            return tree
        depths, width = tuple(self.integers()), 1 + len(extra)
        bits = [word >> bit & 1 for word in self.integers() for bit in range(BITS)][: len(extra) * width]
        return tree.with_extra(ExtraTokens(extra, depths, torch.tensor(bits, dtype=torch.bool).view(-1, width)))


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def write_text(error: BaseException) -> list[int]:
    """An error's line, as integers."""
    text = describe(error).encode()[:TEXT_BYTES]
    return [len(text), *text]


def write_trees(trees: Sequence[DraftTree | None]) -> list[int]:
    """Trees with their extra tokens, as integers; what their children were drawn from is left out."""
    out = [len(trees)]
    for tree in trees:
        if tree is None:
            out.append(0)
            continue
        out += [len(tree), *tree.tokens, len(tree) - 1, *tree.parents[1:]]
        if tree.extra is None:
            out.append(0)
            continue
        count, bits = len(tree.extra), tree.extra.visible.flatten().tolist()
        words = [_word(bits[start : start + BITS]) for start in range(0, len(bits), BITS)]
        out += [count, *tree.extra.tokens, count, *tree.extra.depths, len(words), *words]
    return out


def _word(bits: Sequence[bool]) -> int:
    return sum(1 << place for place, bit in enumerate(bits) if bit)
