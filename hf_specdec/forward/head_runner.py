"""A draft head's side of one call: every row's requests answered by one forward a level of the trees.

A pair is a token of the text beside the target's state of the token before it. The head's cache holds the pairs of
the text and is never rebuilt: each step feeds the pairs of the tokens that were accepted, with the target's own states,
and forgets the drafted columns, which were computed from the head's.
"""

from collections.abc import Callable, Sequence

import torch

from hf_specdec.cache.spec_cache import SpecCache, SpecLayer
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.forward.draft_runner import RowScorer
from hf_specdec.methods.draft_head import DraftHead
from hf_specdec.tree import DraftTree

__all__ = ["HeadRunner"]

CHUNK = 512  # pairs of a prompt that are fed at once
RESERVE = 1024  # cache columns allocated at once behind the prompt, at most


class _Row:
    """One row's text, the states that are not in the cache yet, and the tree of this round.

    Attributes:
        tokens: the text, without padding.
        num_pairs: pairs in the cache.
        first: the token of the first pair, as its index in the text.
        columns: column of each node of the tree, counted from the round's first one; the root's is the last pair's.
        states: `(hidden_size,)` of each node that was scored.
        offset, num_written: where this round has written pairs, the root's the last of them, and how many.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_pairs, self.first = 0, 1
        self._features: list[torch.Tensor] = []
        self._has_read = False
        self.renew()

    def renew(self) -> None:
        """A new round."""
        self.columns: list[list[int]] = []  # of each node: those of its path, the root's left out
        self.states: list[torch.Tensor] = []
        self.offset = self.num_written = 0

    def read(self, features: torch.Tensor) -> None:
        """Take `(n, num_features * target_hidden_size)` states of the text's next tokens; at first its last ones."""
        if not self._has_read:
            features = features[-len(self.tokens) :]
            self.first = len(self.tokens) - len(features) + 1
            self._has_read = True
        self._features.append(features)

    @property
    def num_pending(self) -> int:
        """Pairs of the text that the cache lacks."""
        return len(self.tokens) - self.first - self.num_pairs

    def pending(self, most: int | None = None) -> tuple[list[int], torch.Tensor]:
        """Tokens and `(n, ...)` states of the next pairs; they count as taken."""
        count = self.num_pending if most is None else min(most, self.num_pending)
        start = self.first + self.num_pairs
        features = torch.cat(self._features) if len(self._features) > 1 else self._features[0]
        self._features = [features[count:]]
        return self.tokens[start : start + count], features[:count]


class HeadRunner:
    """A draft head with the texts of all rows; the same to drafters and the engine as a `DraftRunner`.

    Args:
        prompts: each row's prompt, without padding.
        embed: token ids to embeddings, where the head has none of its own.
        hidden_layers: the hidden states of the target that it reads.
        vocab_size (`int`): of the target's logits.
        relative_cost (`float`): a forward of the head over one of the target, roughly.
        device: where the logits go.
        room (`int`): tokens that the texts may get.
    """

    takes_trees = True
    reads_prompt = True
    is_shared = False

    def __init__(
        self,
        head: DraftHead,
        prompts: Sequence[Sequence[int]],
        embed: Callable[[torch.Tensor], torch.Tensor],
        *,
        hidden_layers: Sequence[int],
        vocab_size: int,
        relative_cost: float,
        device: torch.device,
        room: int = RESERVE,
    ) -> None:
        self.head, self.embed, self.hidden_layers = head, head.embed_tokens or embed, tuple(hidden_layers)
        self.vocab_size, self.relative_cost, self.device = vocab_size, relative_cost, device
        self.rank_sync = RankSync()
        self._rows = [_Row(list(prompt)) for prompt in prompts]
        self._scorers: list[RowScorer | None] = [None] * len(self._rows)
        self._target_ids = head.target_ids.to(device)
        self._width = 0  # columns that this round has written
        self._has_ended = False
        reserve = max(map(len, prompts), default=0) + min(room, RESERVE)
        num_layers, num_heads, head_dim = head.cache_shape
        self._cache = SpecCache([SpecLayer(reserve=reserve) for _ in range(num_layers)], reserve=reserve)
        none = torch.empty((len(self._rows), num_heads, 0, head_dim), dtype=head.dtype, device=head.device)
        for layer in self._cache.layers:
            layer.lazy_initialization(none, none)
        self._cache.sync()

    @property
    def num_rows(self) -> int:
        """Rows left."""
        return len(self._rows)

    def row(self, index: int) -> RowScorer:
        """The head as the drafter of row `index` sees it."""
        scorer = self._scorers[index] = RowScorer(self, index)
        return scorer

    def room(self) -> int:
        """How many tokens may be drafted below the root: rotary positions have no end."""
        return 1 << 30

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """Take the target's states of the text's next tokens, `(n, target_hidden_size)` for each of `hidden_layers`.

        The first call brings those of the prompt's last tokens, padding in front of them.
        """
        features = torch.cat([layer.to(self.head.device, self.head.dtype) for layer in states], dim=-1)
        self._rows[place].read(features)

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on."""
        self._rows[place].tokens += accepted
        self._has_ended = True

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """For each row left, `(new nodes, target's vocab_size)` fp32 logits of the nodes not yet scored."""
        self._sync()
        known = [len(row.states) for row in self._rows]
        while (wave := self._wave(trees)) is not None:
            self._compute(wave, trees)
        scored = []
        for row, count in zip(self._rows, known, strict=True):
            fresh = row.states[count:]
            states = torch.stack(fresh) if fresh else self._no_states(0)
            scored.append(self._like_the_targets(self.head.logits(states)))
        return scored

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""
        self._sync()
        self._cache.select(rows)
        self._rows = [self._rows[row] for row in rows]
        self._scorers = [self._scorers[row] for row in rows]
        self._renew()

    def pause(self, places: Sequence[int], *, ahead: int) -> None:
        """Rows whose texts have ended ask for nothing, and nothing waits for them."""

    def admit(self, other: "HeadRunner", place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""
        self._sync()
        other._sync()  # noqa: SLF001 another of the same class
        self._cache.admit(other._cache, place)  # noqa: SLF001
        at = len(self._rows) if place is None else place
        self._rows[at : at + 1] = other._rows  # noqa: SLF001
        self._scorers[at : at + 1] = other._scorers  # noqa: SLF001
        self._renew()

    def _renew(self) -> None:
        for row in self._rows:
            row.renew()
        self._width = 0
        for place, scorer in enumerate(self._scorers):
            if scorer is not None:
                scorer.draft_model, scorer.place = self, place

    def _sync(self) -> None:
        """After a round, keep the pairs that it has written; before the first, feed all but the last of a long text."""
        if self._has_ended:
            self._has_ended = False
            self._commit()
        while not self._width and any(row.num_pending > CHUNK for row in self._rows):
            self._feed([row.pending(CHUNK) if row.num_pending > CHUNK else None for row in self._rows])
            self._commit()

    def _commit(self) -> None:
        self._cache.commit([range(row.offset, row.offset + row.num_written) for row in self._rows])
        for row in self._rows:
            row.num_pairs += row.num_written
        self._renew()

    def _wave(self, trees: Sequence[DraftTree | None]) -> list[list[int]] | None:
        """For each row the nodes that can be computed now, those whose parents are; `None` where nothing is left."""
        wave = []
        for row, tree in zip(self._rows, trees, strict=True):
            known, nodes = len(row.states), []
            if tree is not None and known == 0:
                nodes = [0]
            elif tree is not None:
                # a prefix, so that states stand in the order of the nodes
                while known + len(nodes) < len(tree) and tree.parents[known + len(nodes)] < known:
                    nodes.append(known + len(nodes))
            wave.append(nodes)
        return wave if any(wave) else None

    def _compute(self, wave: Sequence[Sequence[int]], trees: Sequence[DraftTree | None]) -> None:
        """One forward of the roots' pairs, or of nodes below computed ones."""
        pairs = [row.pending() if list(nodes) == [0] else None for row, nodes in zip(self._rows, wave, strict=True)]
        if any(pairs):
            # The rows' rounds begin together; a row that joins later has its root to itself.
            wave = [nodes if pair is not None else [] for nodes, pair in zip(wave, pairs, strict=True)]
            states = self._feed(pairs)
            for place, (row, pair) in enumerate(zip(self._rows, pairs, strict=True)):
                if pair is not None:
                    row.columns.append([])
                    row.states.append(states[place, len(pair[0]) - 1])
            return
        self._descend(wave, trees)

    def _feed(self, pairs: Sequence[tuple[list[int], torch.Tensor] | None]) -> torch.Tensor:
        """One forward of pairs of the text, which stay in the cache; returns `(rows, Q, hidden_size)`."""
        width = max(len(pair[0]) for pair in pairs if pair is not None)
        tokens, states = [[0] * width for _ in pairs], self._no_states(len(pairs), width)
        positions = [[0] * width for _ in pairs]
        mask = self._mask(width)
        for place, (row, pair) in enumerate(zip(self._rows, pairs, strict=True)):
            if pair is None:
                continue
            ids, features = pair
            count, start = len(ids), row.first + row.num_pairs
            tokens[place][:count] = ids
            positions[place][:count] = range(start, start + count)
            states[place, :count] = self.head.fuse(features)
            first = self._starts[place] + self._width
            mask[place, 0, :count, first : first + count] = torch.ones(count, count, dtype=torch.bool).tril()
            row.num_written = count
            row.offset = self._width
        return self._forward(tokens, states, positions, mask)

    def _descend(self, wave: Sequence[Sequence[int]], trees: Sequence[DraftTree | None]) -> None:
        """One forward of drafted nodes, each beside its parent's state."""
        width = max(map(len, wave))
        tokens, states = [[0] * width for _ in wave], self._no_states(len(wave), width)
        positions = [[0] * width for _ in wave]
        mask = self._mask(width)
        for place, (row, nodes, tree) in enumerate(zip(self._rows, wave, trees, strict=True)):
            if not nodes:
                continue
            assert tree is not None
            start = self._starts[place]
            states[place, : len(nodes)] = torch.stack([row.states[tree.parents[node]] for node in nodes])
            mask[place, 0, : len(nodes), start + row.offset : start + row.offset + row.num_written] = True
            for column, node in enumerate(nodes):
                tokens[place][column] = tree.tokens[node]
                positions[place][column] = len(row.tokens) - 1 + tree.depths[node]
                path = [*row.columns[tree.parents[node]], self._width + column]
                row.columns.append(path)
                mask[place, 0, column, [start + seen for seen in path]] = True
        computed = self._forward(tokens, states, positions, mask)
        for place, (row, nodes) in enumerate(zip(self._rows, wave, strict=True)):
            row.states += computed[place, : len(nodes)].unbind()

    @property
    def _starts(self) -> tuple[int, ...]:
        """Pairs of each row in the cache, where its columns of this round begin."""
        return self._cache.lengths

    def _mask(self, width: int) -> torch.Tensor:
        """`(rows, 1, width, K)`: everybody sees the text before this round, and itself."""
        total = max(self._starts) + self._width + width
        starts = torch.tensor(self._starts)[:, None, None, None]
        mask = torch.arange(total).expand(len(self._rows), 1, width, total) < starts
        own = starts + self._width + torch.arange(width)[:, None]
        return mask.scatter(-1, own, True)

    def _forward(
        self, tokens: list[list[int]], states: torch.Tensor, positions: list[list[int]], mask: torch.Tensor
    ) -> torch.Tensor:
        head = self.head
        ids = torch.tensor(tokens, device=self.device)
        embeddings = self.embed(ids.to(head.device) if head.embed_tokens is not None else ids)
        places = torch.tensor(positions, device=head.device)
        out: torch.Tensor = head(
            embeddings.to(head.device, head.dtype),
            states,
            places,
            mask.to(head.device),
            self._cache,
            key_positions=self._key_positions(positions, mask.shape[-1]) if head.has_window else None,
        )
        self._width += states.shape[1]
        return out

    def _key_positions(self, positions: list[list[int]], total: int) -> torch.Tensor:
        """`(rows, K)`: where each key stands in its text."""
        firsts = torch.tensor([row.first for row in self._rows])[:, None]
        found = firsts + torch.arange(total).expand(len(self._rows), total)
        for place, row in enumerate(self._rows):
            start = self._starts[place]
            for path in row.columns:
                for depth, column in enumerate(path, start=1):
                    found[place, start + column] = len(row.tokens) - 1 + depth
            new = torch.tensor(positions[place])
            found[place, start + self._width : start + self._width + len(new)] = new
        return found.to(self.head.device)

    def _no_states(self, *shape: int) -> torch.Tensor:
        return torch.zeros((*shape, self.head.hidden_size), dtype=self.head.dtype, device=self.head.device)

    def _like_the_targets(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 on the target's device over all of its tokens; those that the head cannot draft are impossible."""
        full = torch.full((len(rows), self.vocab_size), float("-inf"), device=self.device)
        return full.index_copy_(1, self._target_ids, rows.to(device=self.device, dtype=torch.float32))
