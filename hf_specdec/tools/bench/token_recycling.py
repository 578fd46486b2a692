"""Token Recycling, written from its paper and its authors' program, to be measured next to this package's methods.

An adjacency matrix holds, for every token of the vocabulary, the eight tokens that the target last thought likeliest
to come after it. A static tree of 80 nodes is filled from it, breadth first, and every verified node, kept or rejected,
overwrites its token's row. Source: https://arxiv.org/abs/2408.08696, https://github.com/Luowaterbi/TokenRecycling
(tree "2.2.2", eight candidates). As there, the prompt's positions but the last one teach it nothing.

What the sources leave open: of several nodes that hold the same token, the last in breadth-first order writes the row
(the program leaves that to the GPU); a token without a row has no children (the program fills them with token 0).
"""

import dataclasses
from collections.abc import Sequence

import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.drafter import Drafter
from hf_specdec.methods.common.entry import DrafterContext, Method

NUM_CANDIDATES = 8
UNKNOWN = -1

# Level by level: how many children the nodes of the level above have, in their order; what is left out has none.
# A node's children hold the likeliest candidates of its token, so the first nodes of a level are its likeliest ones.
STATIC_TREE: tuple[tuple[int, ...], ...] = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1),
    (2, 0, 0, 1),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingConfig(SpecConfig):
    """Configuration of Token Recycling.

    Args:
        hot_start (`bool`, *optional*, defaults to `True`): whether a call begins with the matrix that the one before
            it left, as in the paper, or with an empty one.
    """

    hot_start: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.hot_start, bool):
            raise ConfigError("hot_start", "must be True or False", self.hot_start, "True is the paper's choice.")
        SpecConfig.__post_init__(self)
        if self.engine != "loop":
            remedy = "It learns from the target's logits, which transformers' loop does not hand over."
            raise ConfigError("engine", 'must be "loop" for token_recycling', self.engine, remedy)

    @property
    def node_budget(self) -> int:
        """Nodes of the static tree, the root not counted."""
        return len(_PARENTS)


class AdjacencyMatrix:
    """For each token the candidates that follow it, likeliest first; made at the first update, where the logits are."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None  # (vocab_size + 1, 8); the last row stands for tokens not known
        self._levels: list[tuple[torch.Tensor, ...]] = []  # for each level its nodes' parents and ranks

    def candidates(self, token: int) -> list[int]:
        """The candidates of `token`, likeliest first; none where it has no row yet."""
        row = [] if self._rows is None else self._rows[token].tolist()
        return [candidate for candidate in row if candidate != UNKNOWN]

    def update(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Overwrite the rows of `tokens`; of equal tokens the last one counts.

        Args:
            tokens: C token ids.
            logits: `(C, vocab_size)`, the target's after each of them.
        """
        if self._rows is None:
            shape = (logits.shape[-1] + 1, NUM_CANDIDATES)
            self._rows = torch.full(shape, UNKNOWN, dtype=torch.long, device=logits.device)
            self._levels = [tuple(torch.tensor(part, device=logits.device) for part in level) for level in _LEVELS]
        places = {token: place for place, token in enumerate(tokens)}
        count = min(NUM_CANDIDATES, logits.shape[-1])
        likeliest = logits[list(places.values())].topk(count, dim=-1).indices  # (distinct tokens, 8)
        self._rows[list(places), :count] = likeliest.to(self._rows.device)

    def fill(self, root: int) -> list[int]:
        """Tokens of the static tree's nodes below `root`, breadth first; -1 where a token has no such candidate."""
        if self._rows is None:
            return [UNKNOWN] * len(_PARENTS)
        tokens = torch.full((1,), root, device=self._rows.device)
        for parents, ranks in self._levels:
            tokens = torch.cat([tokens, self._rows[tokens[parents], ranks]])  # row -1 is the last one: unknown
        found: list[int] = tokens[1:].tolist()
        return found


class TokenRecyclingDrafter(Drafter):
    """Fills the static tree from `matrix` and teaches it what the target says after every node.

    Args:
        matrix: shared by calls for a hot start; one of its own otherwise.
    """

    needs_logits = True

    def __init__(self, matrix: AdjacencyMatrix | None = None) -> None:
        self.matrix = AdjacencyMatrix() if matrix is None else matrix
        self._root = UNKNOWN

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start behind the prompt's last token."""
        self._root = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        """The static tree's first `budget` nodes, those that nothing is known for left out."""
        builder = TreeBuilder(self._root)
        nodes = {0: 0}
        drafted = self.matrix.fill(self._root) if budget > 0 else []
        for place, (parent, token) in enumerate(zip(_PARENTS, drafted, strict=False), 1):
            if len(builder) > budget:
                break
            if token != UNKNOWN:
                nodes[place] = builder.add(nodes[parent], token)
        return builder.build()

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Overwrite the rows of all verified nodes, the rejected ones too."""
        if logits is not None:
            self.matrix.update(tree.tokens, logits[: len(tree)])
        self._root = accepted[-1]


def _levels() -> tuple[tuple[list[int], list[int]], ...]:
    """For each level of the static tree the places of its nodes' parents, and the ranks of their candidates."""
    levels, above, count = [], [0], 1
    for children in STATIC_TREE:
        pairs = [(parent, rank) for parent, many in zip(above, children, strict=False) for rank in range(many)]
        levels.append(([parent for parent, _ in pairs], [rank for _, rank in pairs]))
        above = list(range(count, count + len(pairs)))
        count += len(pairs)
    return tuple(levels)


def _make(config: TokenRecyclingConfig, context: DrafterContext) -> Drafter:
    if not config.hot_start:
        return TokenRecyclingDrafter()
    return TokenRecyclingDrafter(context.state.of(TOKEN_RECYCLING.name, AdjacencyMatrix))


_LEVELS = _levels()
_PARENTS = [parent for parents, _ in _LEVELS for parent in parents]

TOKEN_RECYCLING = Method(
    name="token_recycling",
    config_class=TokenRecyclingConfig,
    summary="fills a static tree from the target's likeliest tokens after each token",
    make=_make,
    needs_tree=True,
)
