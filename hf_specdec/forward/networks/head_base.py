"""Base of the runners of all draft heads: each row's text, and logits over the target's tokens."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, Self, TypeVar

import torch

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import Blocks, SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache, StaticSpecLayer
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.compiled_forward import CompiledShapes
from hf_specdec.forward.networks.runner_base import BaseDraftRunner, network_of, of_each_row
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.node_logits import NodeLogits

RESERVE = 1024  # cache columns allocated at once after the prompt, at most

Head = TypeVar("Head", bound=DraftHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCall:
    """Facts of one call that a head needs.

    Attributes:
        prompts: each row's prompt, without padding.
        embed: token ids to embeddings, for heads that have none of their own.
        hidden_layers: the hidden states of the target that the head reads.
        vocab_size (`int`): of the target's logits.
        relative_cost (`float`): a forward of the head over one of the target, roughly.
        device: where token ids are read, and where logits go.
        is_shared (`bool`): whether the head's forwards are collectives of several processes.
        room (`int`): tokens that the texts may get.
        shapes: of the forwards after the prompt's, where these are compiled.
        output_head: the target's, for heads that have none of their own.
    """

    prompts: Sequence[Sequence[int]]
    embed: Callable[[torch.Tensor], torch.Tensor]
    hidden_layers: tuple[int, ...]
    vocab_size: int
    relative_cost: float
    device: torch.device
    is_shared: bool = False
    room: int = RESERVE
    shapes: CompiledShapes | None = None
    output_head: torch.nn.Module | None = None

    @property
    def reserve(self) -> int:
        """Cache columns to begin with."""
        return max(map(len, self.prompts), default=0) + min(self.room, RESERVE)


def head_cache(
    head: DraftHead,
    shapes: Mapping[int, tuple[int, int, int]],
    to_run: CompiledShapes | None,
    *,
    num_rows: int,
    reserve: int,
    part: int = 0,
) -> SpecCache:
    """Makes an empty cache for layers of a head; for compiled forwards with the buffers that the last call has left.

    Args:
        shapes: key/value heads, key size and value size of each layer, by its number.
        to_run: the compiled forwards, whose buffers have a fixed shape; `None` where nothing is compiled.
        reserve: columns to allocate at once where nothing is compiled.
        part: which of the head's caches.
    """
    cache: SpecCache
    if to_run is None:
        cache = SpecCache([SpecLayer(reserve=reserve) for _ in range(max(shapes) + 1)], reserve=reserve)
    else:
        capacity = to_run.fixed.capacity
        left = to_run.compiled.take_cache(num_rows, capacity, part)
        if left is not None:
            keys = left.layers[min(shapes)].keys
            if (keys.dtype, keys.device) == (head.dtype, head.device):  # the head has not been moved since
                left.sync()
                return left
        blocks = Blocks(len(shapes))
        layers = [StaticSpecLayer(reserve=capacity, blocks=blocks) for _ in range(max(shapes) + 1)]
        cache = StaticSpecCache(layers, reserve=capacity)
    for number, (heads, *dims) in shapes.items():
        keys, values = (torch.empty((num_rows, heads, 0, dim), dtype=head.dtype, device=head.device) for dim in dims)
        cache.layers[number].lazy_initialization(keys, values)
    cache.sync()
    return cache


def _embeddings_of(
    embed: Callable[[torch.Tensor], torch.Tensor],
    reads_on: torch.device,
    device: torch.device,
    dtype: torch.dtype,
    most: int | None,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """`(..., hidden_size)` of token ids, on the `device` and in the `dtype` of a head.

    Args:
        embed: the head's own embeddings, or the target's; they read ids on `reads_on`.
        most: the first id that they do not have, which is read as 0 like those after it; `None` where they have all.
    """
    tokens = tokens.to(reads_on)
    if most is not None:
        tokens = tokens.where(tokens < most, 0)
    return embed(tokens).to(device, dtype)


class BaseHeadRunner(BaseDraftRunner, Generic[Head]):
    """A draft head with the texts of all rows; the same to drafters and the engine as a `DraftRunner`.

    Attributes:
        texts (`list[list[int]]`): the rows' tokens, without padding.
        head_device, head_dtype: of the head's weights; asking the head takes a walk over its modules.
        per_row (`tuple[str, ...]`): a subclass's attributes that have an item for each row.
    """

    per_row: ClassVar[tuple[str, ...]] = ()

    def __init__(self, head: Head, call: HeadCall) -> None:
        super().__init__(len(call.prompts), is_shared=call.is_shared)
        self.head, self.hidden_layers, self.network = head, call.hidden_layers, network_of(head)
        self.compiled = None if call.shapes is None else call.shapes.compiled
        self.head_device, self.head_dtype = head.device, head.dtype
        own = head.embed_tokens
        embed, reads_on = (call.embed, call.device) if own is None else (own, self.head_device)
        most = None if own is None or own.num_embeddings >= call.vocab_size else own.num_embeddings
        self._embeddings = partial(_embeddings_of, embed, reads_on, self.head_device, self.head_dtype, most)
        self.vocab_size, self.relative_cost, self.device = call.vocab_size, call.relative_cost, call.device
        self.source = head.methods[0]
        self.texts = [list(prompt) for prompt in call.prompts]
        target_ids = head.target_ids
        self._target_ids = None if target_ids is None else target_ids.to(call.device)
        self._num_scored = [0] * len(self.texts)  # nodes of each row's tree in this round
        self._has_ended = False
        computing = head if call.output_head is None else torch.nn.ModuleList([head, call.output_head])
        self._kernels = CpuKernels(computing, device=self.head_device, is_compiled=self.compiled is not None)

    def room(self) -> int:
        """Number of tokens that may be drafted below the root: rotary positions have no end."""
        return 1 << 30

    @torch.no_grad()
    def _answers(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """See `BaseDraftRunner`."""
        self._end_round()
        counts = [0 if tree is None else len(tree) - known for tree, known in zip(trees, self._num_scored, strict=True)]
        with self._kernels:
            rows = of_each_row(self._like_the_targets(self._score(trees)), counts)
        for place, tree in enumerate(trees):
            if tree is not None:
                self._num_scored[place] = len(tree)
        return rows

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on."""
        self.texts[place] += accepted
        self._has_ended = True

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""
        self._end_round()
        self._select(rows)
        for name in ("texts", *self.per_row):
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        super().select(rows)

    def admit(self, other: Self, place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""
        self._end_round()
        other._end_round()
        self._admit(other, place)
        at = self.num_rows if place is None else place
        for name in ("texts", *self.per_row):
            getattr(self, name)[at : at + 1] = getattr(other, name)
        super().admit(other, place)

    @abstractmethod
    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's states of the text's next tokens, `(n, target_hidden_size)` for each of `hidden_layers`.

        The first call brings those of the prompt's last tokens, padding in front of them. The next forward of the
        target may write over them.
        """

    @abstractmethod
    def _score(self, trees: Sequence[DraftTree | None]) -> torch.Tensor:
        """`(new nodes of all rows, draft_vocab_size)` of the head's own logits, row after row."""

    @abstractmethod
    def _renew_round(self) -> None:
        """A round has ended: keep what it computed of the text, forget its tree."""

    def _select(self, rows: Sequence[int]) -> None:
        """As `select`, of caches."""
        return

    def _admit(self, other: Self, place: int | None) -> None:
        """As `admit`, of caches."""
        return

    def _features(self, place: int, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """`(n, num_features * target_hidden_size)` of the text's next tokens, as the head reads them.

        Raises:
            UnsupportedModelError: the target's layers pass on something else than states of its hidden_size.
        """
        wanted = self.head.target_hidden_size
        if (strange := next((layer.shape[-1] for layer in states if layer.shape[-1] != wanted), None)) is not None:
            message = f"Draft heads read states as wide as the target's hidden_size {wanted}"
            raise UnsupportedModelError(f"{message}, but one of its layers passes on {strange} numbers a token.")
        joined = torch.cat([layer.to(self.head_device, self.head_dtype) for layer in states], dim=-1)
        return joined[-len(self.texts[place]) :]

    @staticmethod
    def _next_nodes(known: int, tree: DraftTree | None) -> range:
        """The nodes that can be computed after the first `known` ones: the root, or those whose parents are known.

        They are the next ones, so that rows of logits are in the order of the nodes.
        """
        if tree is None or known == 0:
            return range(known, known if tree is None else 1)
        end = known
        while end < len(tree) and tree.parents[end] < known:
            end += 1
        return range(known, end)

    def _end_round(self) -> None:
        if self._has_ended:
            self._has_ended = False
            self._renew_round()
            self._forget_round()

    def _forget_round(self) -> None:
        self._num_scored = [0] * self.num_rows

    def _like_the_targets(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 on the target's device over all of its tokens; those that the head cannot draft are impossible."""
        rows = rows.to(device=self.device, dtype=torch.float32)
        if self._target_ids is None and rows.shape[1] == self.vocab_size:
            return rows
        full = rows.new_full((len(rows), self.vocab_size), float("-inf"))
        if self._target_ids is not None:
            return full.index_copy_(1, self._target_ids, rows)
        width = min(rows.shape[1], self.vocab_size)
        full[:, :width] = rows[:, :width]
        return full
