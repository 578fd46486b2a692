"""Models that are tables, and the walk that verifies drafts with one: for tests of drafters that ask a draft model.

draft = TableScorer(random_table(seed=1, vocab_size=6))
drafter = DraftModelDrafter(DraftModelConfig(), draft)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.rejections import rejection_sample
from hf_specdec.engine.sampling.tokens_ahead import rejections_of
from hf_specdec.engine.verify import verify_tree
from hf_specdec.methods.common.node_logits import NodeLogits

__all__ = [
    "Table",
    "TableScorer",
    "chi_square",
    "critical_value",
    "random_table",
    "sample",
    "verify_at_once",
    "verify_by_drawing",
]

Table = Callable[[tuple[int, ...]], torch.Tensor]  # text -> (vocab_size,) logits


def random_table(seed: int, vocab_size: int, *, scale: float = 1.5, window: int = 2) -> Table:
    """Logits that depend on the last `window` tokens."""

    @cache
    def of_window(last: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, last)) % 2**62)
        return torch.randn(vocab_size, generator=generator) * scale

    return lambda text: of_window(text[-window:])


class TableScorer:
    """A `DraftScorer` that looks logits up, counts requests and checks how it is asked."""

    def __init__(
        self, table: Table, *, vocab_size: int = 6, takes_trees: bool = True, relative_cost: float = 0.0
    ) -> None:
        self.table, self.vocab_size = table, vocab_size
        self.takes_trees, self.relative_cost, self.source = takes_trees, relative_cost, "draft_model"
        self.num_unread = self.num_skippable = 0
        self.text: list[int] = []
        self.requests: list[DraftTree] = []  # of this round

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text, self.requests = list(prompt_ids), []

    def skip(self, count: int) -> None:
        self.num_unread -= count
        self.num_skippable -= count

    def score(self, tree: DraftTree) -> NodeLogits:
        known = self.requests[-1] if self.requests else None
        num_known = len(known) if known is not None else 0
        assert tree.tokens[0] == self.text[-1], "the root is the last token of the text"
        assert len(tree) > num_known, "a request asks for something new"
        if known is not None:
            assert tree.tokens[:num_known] == known.tokens
            assert tree.parents[:num_known] == known.parents
        assert self.takes_trees or tree.is_chain
        self.requests.append(tree)
        texts = [[*self.text[:-1], *(tree.tokens[n] for n in tree.path(node))] for node in range(num_known, len(tree))]
        return NodeLogits(torch.stack([self.table(tuple(text)) for text in texts]))

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert tree.tokens[0] == self.text[-1]
        assert accepted
        self.text += accepted
        self.requests = []


def verify_by_drawing(
    tree: DraftTree, distribution: Callable[[list[int]], torch.Tensor], generator: torch.Generator
) -> list[int]:
    """The tokens of one step: at each node one of the drawn children, or another token, as the target would draw it.

    `distribution` gives the target's probabilities behind the drafted tokens of a path.
    """
    drafted_from: Mapping[int, torch.Tensor] = tree.drafted_from or {}

    def choose(node: int) -> tuple[int, bool]:
        p = distribution([tree.tokens[step] for step in tree.path(node)[1:]])
        drawn = [tree.tokens[child] for child in tree.children(node)]
        q = drafted_from.get(node, torch.zeros_like(p))
        return rejection_sample(p, q, drawn, generator), False

    return verify_tree(tree, choose).tokens


def verify_at_once(
    tree: DraftTree, distribution: Callable[[list[int]], torch.Tensor], generator: torch.Generator
) -> list[int]:
    """The same as on an accelerator, where every node's token is found before the first is looked at."""
    rows = [distribution([tree.tokens[step] for step in tree.path(node)[1:]]) for node in range(len(tree))]
    rejections = rejections_of(torch.stack(rows), tree, RandomStream(torch.device("cpu"), generator))
    rejections.load([part.numpy() for part in rejections.found])

    def choose(node: int) -> tuple[int, bool]:
        token = rejections.token_after(node)
        assert token is not None
        return token, False

    return verify_tree(tree, choose).tokens


def sample(count: int, draw: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """How often each outcome came in `count` draws."""
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(count):
        outcome = draw()
        seen[outcome] = seen.get(outcome, 0) + 1
    return seen


def chi_square(
    seen: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float], *, smallest: float = 5.0
) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes expected less than `smallest` times share one cell.

    An outcome that cannot happen makes the statistic infinite.
    """
    total = sum(seen.values())
    if any(expected.get(outcome, 0.0) == 0.0 for outcome in seen):
        return math.inf, 1
    cells: list[tuple[float, float]] = []
    rare_seen = rare_expected = 0.0
    for outcome, probability in expected.items():
        if probability * total < smallest:
            rare_seen += seen.get(outcome, 0)
            rare_expected += probability * total
        else:
            cells.append((seen.get(outcome, 0), probability * total))
    if rare_expected > 0.0:
        cells.append((rare_seen, rare_expected))
    return sum((have - want) ** 2 / want for have, want in cells), len(cells) - 1


def critical_value(degrees: int, *, z: float = 4.753) -> float:
    """What chi-square exceeds by chance once in a million (z = 4.753), by Wilson and Hilferty's approximation."""
    ninth = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - ninth + z * math.sqrt(ninth)) ** 3
