"""Sampling with drawn drafts: every token comes as often as the target alone would choose it.

Seeds are fixed, so the tests do not flicker; by chance, a right implementation would fail a comparison for one seed in
a million (`critical_value`). Wrong rules, tested next to the right one, exceed that bound many times over.
"""

from collections.abc import Sequence

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


def choose(p: torch.Tensor, q: torch.Tensor, drawn: Sequence[int | None], generator: torch.Generator) -> list[int]:
    """The token after each of some nodes, with a drawn child or without one."""
    drafted_from, tokens = [None if token is None else q for token in drawn], [token or 0 for token in drawn]
    rejections = Rejections(p.expand(len(drawn), -1), drafted_from, tokens, generator)
    rejections.load([part.numpy() for part in rejections.result])
    chosen = [rejections.token_after(node) for node in range(len(drawn))]
    return [token for token in chosen if token is not None]


def assert_distributed_as(p: torch.Tensor, tokens: Sequence[int]) -> None:
    """Tokens come as often as `p` says; odds of one in a million."""
    chosen = iter(tokens)
    seen = sample(len(tokens), lambda: (next(chosen),))
    value, degrees = chi_square(seen, {(token,): float(share) for token, share in enumerate(p) if share > 0})
    assert value < critical_value(degrees)


@pytest.mark.parametrize("is_drafted", [False, True])
def test_the_token_has_the_target_s_distribution(is_drafted: bool) -> None:
    """3,000 draws over six tokens."""
    p, q, generator = distribution(1), distribution(2), torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 3_000, replacement=True, generator=generator).tolist()
    assert_distributed_as(p, choose(p, q, drawn if is_drafted else [None] * 3_000, generator))


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
def test_zeros_and_certainties_are_no_exception(p: torch.Tensor, q: torch.Tensor) -> None:
    """2,000 draws each."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(q, 2_000, replacement=True, generator=generator).tolist()
    chosen = choose(p, q, drawn, generator)
    if p.max() == 1.0:
        assert set(chosen) == {int(p.argmax())}
    else:
        assert_distributed_as(p, chosen)


def test_acceptance_is_as_high_as_it_can_be() -> None:
    """A drawn token is accepted with probability sum(min(p, q)); 12,000 draws, within five standard errors."""
    p, q, generator = distribution(1), distribution(2), torch.Generator().manual_seed(0)
    drawn = torch.multinomial(q, 12_000, replacement=True, generator=generator).tolist()
    chosen = choose(p, q, drawn, generator)
    accepted = sum(map(int.__eq__, chosen, drawn)) / 12_000
    overlap = float(torch.minimum(p, q).sum())
    # a rejected token has p < q and nothing left in the rest, so it cannot come back
    assert abs(accepted - overlap) < 5 * (overlap * (1 - overlap) / 12_000) ** 0.5


def test_a_token_that_q_cannot_have_given_is_passed_over() -> None:
    """No bias from it: 3,000 draws with such a token as the child."""
    q, generator = distribution(2, zeros=[4]), torch.Generator().manual_seed(0)
    assert_distributed_as(distribution(1), choose(distribution(1), q, [4] * 3_000, generator))


def test_each_node_of_a_chain_has_its_own_child_and_distribution() -> None:
    """2,000 chains of three nodes, the last without a child."""
    targets, drafts = [distribution(1), distribution(3), distribution(4)], [distribution(2), distribution(5), None]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        [0] * 2_000 if q is None else torch.multinomial(q, 2_000, replacement=True, generator=generator).tolist()
        for q in drafts
    ]
    nodes = [token for chain in zip(*drawn, strict=True) for token in chain]
    rejections = Rejections(torch.stack(targets).repeat(2_000, 1), drafts * 2_000, nodes, generator)
    rejections.load([part.numpy() for part in rejections.result])
    for place, p in enumerate(targets):
        chosen = [rejections.token_after(node) for node in range(place, len(nodes), 3)]
        assert_distributed_as(p, [token for token in chosen if token is not None])


def test_what_is_no_probability_has_no_token() -> None:
    assert choose(torch.full((SIZE,), torch.nan), distribution(2), [1, None], torch.Generator()) == []
