"""Sampling with drawn drafts: every token comes as often as the target alone would choose it.

Seeds are fixed, so the tests do not flicker; by chance, a right implementation would fail a comparison for one seed in
a million (`critical_value`). Wrong rules, tested next to the right one, exceed that bound many times over.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from hf_specdec.engine.sampling.rejections import Rejections
from tests.helpers.drafts import chi_square, critical_value, sample

pytestmark = pytest.mark.each_value_in_file

SIZE = 6


def distribution(seed: int, size: int = SIZE, *, zeros: Sequence[int] = ()) -> torch.Tensor:
    row = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1.2).softmax(-1)
    row[list(zeros)] = 0.0
    return row / row.sum()


def choose(p: torch.Tensor, q: torch.Tensor, drawn: Sequence[Sequence[int]], generator: torch.Generator) -> list[int]:
    """The token after each of some nodes."""
    rejections = Rejections(p.expand(len(drawn), -1), [q if tokens else None for tokens in drawn], drawn, generator)
    rejections.load([part.numpy() for part in rejections.result])
    tokens = [rejections.token_after(node) for node in range(len(drawn))]
    return [token for token in tokens if token is not None]


Rule = Callable[[torch.Tensor, torch.Tensor, Sequence[Sequence[int]], torch.Generator], list[int]]


def statistic_of(
    p: torch.Tensor, q: torch.Tensor, num_drawn: int, rule: Rule = choose, count: int = 3_000, seed: int = 0
) -> tuple[float, float]:
    """Chi-square of tokens chosen among `num_drawn` drawn ones against p, and its critical value."""
    generator = torch.Generator().manual_seed(seed)
    rows = q.expand(count, -1)
    drawn = torch.multinomial(rows, num_drawn, generator=generator).tolist() if num_drawn else [[]] * count
    tokens = rule(p, q, [[token for token in tokens if q[token] > 0] for tokens in drawn], generator)
    chosen = iter(tokens)
    seen = sample(count, lambda: (next(chosen),))
    value, degrees = chi_square(seen, {(token,): float(share) for token, share in enumerate(p) if share > 0})
    return value, critical_value(degrees)


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 3, SIZE])
def test_the_token_has_the_target_s_distribution(num_drawn: int) -> None:
    """3,000 draws over six tokens; odds of one in a million."""
    value, bound = statistic_of(distribution(1), distribution(2), num_drawn)
    assert value < bound


@pytest.mark.at_most(3)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        (distribution(1, zeros=[0, 3]), distribution(2)),
        (distribution(1), distribution(2, zeros=[0, 3])),
        (distribution(1, zeros=[0, 1]), distribution(2, zeros=[2, 3])),
        (distribution(1, zeros=[0, 1, 2]), distribution(2, zeros=[3, 4, 5])),
        (distribution(1), distribution(1)),
        (torch.eye(SIZE)[2], distribution(2)),
        (distribution(1), torch.eye(SIZE)[2]),
    ],
    ids=["p-zeros", "q-zeros", "both", "disjoint", "equal", "p-certain", "q-certain"],
)
@pytest.mark.parametrize("num_drawn", [1, 3])
def test_zeros_and_certainties_are_no_exception(p: torch.Tensor, q: torch.Tensor, num_drawn: int) -> None:
    """2,000 draws each; odds of one in a million."""
    generator = torch.Generator().manual_seed(3)
    children = torch.multinomial(q.expand(2_000, -1), num_drawn, generator=generator).tolist()
    drawn = [[token for token in tokens if q[token] > 0] for tokens in children]
    chosen = iter(choose(p, q, drawn, generator))
    seen = sample(2_000, lambda: (next(chosen),))
    if p.max() == 1.0:
        assert seen == {(int(p.argmax()),): 2_000}
        return
    value, degrees = chi_square(seen, {(token,): float(share) for token, share in enumerate(p) if share > 0})
    assert value < critical_value(degrees)


def test_acceptance_is_as_high_as_it_can_be() -> None:
    """The first drawn token is accepted with probability sum(min(p, q)); 12,000 draws, within five standard errors."""
    p, q, generator = distribution(1), distribution(2), torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 12_000, replacement=True, generator=generator).tolist()
    chosen = choose(p, q, [[token] for token in drawn], generator)
    accepted = sum(map(int.__eq__, chosen, drawn)) / 12_000
    overlap = float(torch.minimum(p, q).sum())
    # a rejected token has p < q and nothing left in the rest, so it cannot come back
    assert abs(accepted - overlap) < 5 * (overlap * (1 - overlap) / 12_000) ** 0.5


def test_a_token_that_q_cannot_have_given_is_passed_over() -> None:
    """No bias from it: 3,000 draws with such a token among the children, odds of one in a million."""
    q = distribution(2, zeros=[4])
    value, bound = statistic_of(
        distribution(1),
        q,
        1,
        lambda p, q, drawn, generator: choose(p, q, [[4, *tokens] for tokens in drawn], generator),
    )
    assert value < bound


def test_nodes_of_one_tree_have_each_its_own_children_and_distribution() -> None:
    """2,000 trees of three nodes, with two children, none and one; odds of one in a million for each."""
    targets, drafts = [distribution(1), distribution(3), distribution(4)], [distribution(2), None, distribution(5)]
    generator, counts = torch.Generator().manual_seed(0), [2, 0, 1]
    drawn = [
        [[]] * 2_000 if q is None else torch.multinomial(q.expand(2_000, -1), n, generator=generator).tolist()
        for q, n in zip(drafts, counts, strict=True)
    ]
    nodes = [tokens for tree in zip(*drawn, strict=True) for tokens in tree]
    rejections = Rejections(torch.stack(targets).repeat(2_000, 1), drafts * 2_000, nodes, generator)
    rejections.load([part.numpy() for part in rejections.result])
    for place, p in enumerate(targets):
        chosen = iter([rejections.token_after(node) for node in range(place, len(nodes), 3)])
        seen = sample(2_000, lambda chosen=chosen: (next(chosen),))  # type: ignore[misc]
        value, degrees = chi_square(seen, {(token,): float(share) for token, share in enumerate(p)})
        assert value < critical_value(degrees)


def test_what_is_no_probability_has_no_token() -> None:
    assert choose(torch.full((SIZE,), torch.nan), distribution(2), [[1], []], torch.Generator()) == []


# What must not pass: the test has teeth.
