"""Drafters of known texts, and the drafts that tests run through."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.sampler import rejections_of
from hf_specdec.engine.verify import verify_tree
from hf_specdec.methods.common.drafter import BaseDrafter, Drafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits


def drafted_by(drafter: BaseDrafter, budget: int, **fields: Any) -> DraftTree:
    """The tree for a request of this budget and other fields."""
    return drafter.draft_for(DraftRequest(budget, **fields))


def learned(drafter: BaseDrafter, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
    """Tell a drafter what became of its tree."""
    drafter.learn_from(DraftResult(tree, accepted, None if logits is None else NodeLogits(logits)))


class CheckedDrafter(Drafter):
    """Knows the text that plain decoding emits, `expected` (prompt included), and checks what it is told against it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self.text: list[int] = []
        self.num_steps = 0
        self.num_ends = 0
        self.proposed: DraftTree | None = None

    def begin(self, prompt_ids: Sequence[int]) -> None:
        assert not self.text, "begin is called once"
        assert len(prompt_ids) > 0
        self.text = [int(token) for token in prompt_ids]
        self.expected = self.expected[_padding(self.expected, self.text) :]
        assert self.text == self.expected[: len(self.text)]

    def propose(self, budget: int) -> DraftTree:
        assert budget >= 0
        builder = TreeBuilder(self.text[-1])
        self.grow(builder, budget)
        assert len(builder) - 1 <= budget
        self.num_steps += 1
        self.proposed = builder.build()
        return self.proposed

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        assert accepted, "every step emits a token"
        assert tree.tokens[0] == self.text[-1]
        if self.proposed is not None and tree != self.proposed:
            assert tree.num_draft_tokens <= self.proposed.num_draft_tokens
        if self.needs_logits:
            assert logits is not None and logits.shape[0] == len(tree)
        self.text += [int(token) for token in accepted]
        assert self.text == self.expected[: len(self.text)]

    def end(self) -> None:
        assert self.text, "a text ends that has begun"
        assert self.num_ends == 0, "and ends once"
        self.num_ends += 1

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        raise NotImplementedError

    @property
    def coming(self) -> list[int]:
        """What plain decoding emits from here on."""
        return self.expected[len(self.text) :]


def _padding(expected: Sequence[int], prompt: Sequence[int]) -> int:
    """Zeros in front of the prompt, which drafters never see."""
    return next(i for i, token in enumerate(expected) if token == prompt[0]) if not expected[0] else 0


class OracleDrafter(CheckedDrafter):
    """Drafts the true continuation amid wrong siblings.

    On even steps the wrong ones come first and have children that hold the right token, so that the accepted nodes
    lie apart and a `commit` has to move them; on odd steps the right one comes first, so that chains profit as well.
    Depths vary, and every third tree ends on a wrong token.
    """

    vocab_size = 128

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        wrong_first = self.num_steps % 2 == 0
        depth = 1 + self.num_steps % 5
        node = 0
        for level, token in enumerate(self.coming[:depth]):
            if len(builder) + 2 > budget:
                break
            if wrong_first:
                self._add_decoy(builder, node, token)
            if level == depth - 1 and self.num_steps % 3 == 2:
                break
            right = builder.add(node, token)
            if not wrong_first:
                self._add_decoy(builder, node, token)
            node = right

    def _add_decoy(self, builder: TreeBuilder, parent: int, token: int) -> None:
        decoy = builder.add(parent, (token + 1) % self.vocab_size)
        builder.add(decoy, token)


class RandomTreeDrafter(CheckedDrafter):
    """Drafts trees of any shape: bushes, chains, single nodes, nothing; sometimes with the right token at its place."""

    def __init__(self, expected: Sequence[int], *, seed: int = 0, vocab_size: int = 128, hit_rate: float = 0.5) -> None:
        super().__init__(expected)
        self.random = random.Random(seed)
        self.vocab_size, self.hit_rate = vocab_size, hit_rate

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        coming = self.coming
        right_at = {0: 0}  # node on the true path -> its depth
        wanted = self.random.choice((0, 1, 3, 8, 20, budget))
        narrow = self.random.random()
        for _ in range(min(wanted, budget)):
            last = len(builder) - 1
            parent = last if self.random.random() < narrow else self.random.randint(0, last)
            depth = right_at.get(parent)
            hit = depth is not None and depth < len(coming) and self.random.random() < self.hit_rate
            token = coming[depth] if hit else self.random.randrange(self.vocab_size)
            node = builder.add(parent, token)
            if depth is not None and coming[depth : depth + 1] == [token]:
                right_at[node] = depth + 1


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
        self.num_unread = 0
        self.text: list[int] = []
        self.requests: list[DraftTree] = []  # of this round

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text, self.requests = list(prompt_ids), []

    def score(self, tree: DraftTree) -> NodeLogits:
        seen = self.requests[-1] if self.requests else None
        num_known = len(seen) if seen is not None else 0
        assert tree.tokens[0] == self.text[-1], "the root is the last token of the text"
        assert len(tree) > num_known, "a request asks for something new"
        if seen is not None:
            assert tree.tokens[:num_known] == seen.tokens
            assert tree.parents[:num_known] == seen.parents
        assert self.takes_trees or tree.is_chain
        self.requests.append(tree)
        texts = [[*self.text[:-1], *(tree.tokens[n] for n in tree.path(node))] for node in range(num_known, len(tree))]
        return NodeLogits(torch.stack([self.table(tuple(text)) for text in texts]))

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert tree.tokens[0] == self.text[-1]
        assert accepted
        self.text += accepted
        self.requests = []


def verify_drawn(
    tree: DraftTree, distribution: Callable[[list[int]], torch.Tensor], generator: torch.Generator
) -> list[int]:
    """The tokens of one step: at each node one of the drawn children, or another token, as the target would draw it.

    `distribution` gives the target's probabilities behind the drafted tokens of a path.
    """
    rows = [distribution([tree.tokens[step] for step in tree.path(node)[1:]]) for node in range(len(tree))]
    rejections = rejections_of(torch.stack(rows), tree, RandomStream(torch.device("cpu"), generator))
    rejections.load([part.numpy() for part in rejections.result])

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
