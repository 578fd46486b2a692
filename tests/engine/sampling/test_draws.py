"""Draws that are made ahead are those of `torch.multinomial`, number for number."""

import pytest
import torch

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.sampling.draws import LEVELS, DrawsAhead
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.random_streams import RandomStream

CPU, VOCAB = torch.device("cpu"), 50
PARENTS = [0, 1, 1, 0, 4, 5, 6]  # of nodes 1 to 7
PATHS = ([0], [0, 1], [0, 1, 3], [0, 4, 5], [0, 1, 2], [0, 4, 5, 6], [0, 4, 5, 6, 7])
PROBABILITIES = torch.randn(len(PARENTS) + 1, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


def tree() -> DraftTree:
    builder = TreeBuilder(0)
    for node, parent in enumerate(PARENTS, 1):
        builder.add(parent, node)
    return builder.build()


def drawn_ahead(stream: RandomStream, probabilities: torch.Tensor = PROBABILITIES, **options: int) -> DrawsAhead:
    """As the samplers have them, after one transfer."""
    draws = DrawsAhead(probabilities, tree(), NoiseAhead(stream), **options)
    draws.load([part.numpy() for part in draws.result])
    return draws


def taken(draws: DrawsAhead, node: int) -> int | None:
    if (result := draws.at(node)) is None:
        return None
    draws.take(node)
    return result[1]


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_draws_along_a_path_are_multinomials(path: list[int], is_global: bool) -> None:
    """The stream stands, after each, where as many draws of plain decoding leave it."""
    generator = None if is_global else torch.Generator()
    stream = RandomStream(CPU, generator)
    seed = torch.manual_seed if generator is None else generator.manual_seed
    seed(7)
    before = stream.state
    draws = drawn_ahead(stream)
    assert torch.equal(stream.state, before)
    drawn = []
    for node in path:
        if draws.at(node) is None:
            draws = drawn_ahead(stream, first=node)
        drawn.append((taken(draws, node), stream.state))
    seed(7)
    for node, (token, after) in zip(path, drawn, strict=True):
        assert token == int(torch.multinomial(PROBABILITIES[node : node + 1], 1, generator=generator))
        assert torch.equal(after, stream.state)


def test_only_the_next_level_is_taken() -> None:
    """Deeper nodes are drawn for when they are reached, with the levels below them."""
    stream = RandomStream(CPU, torch.Generator())
    draws = drawn_ahead(stream)
    assert taken(draws, 1) is None
    for node in (0, 4, 5)[:LEVELS]:
        assert taken(draws, node) is not None
    assert taken(draws, 6) is None
    below = drawn_ahead(stream, first=6)
    assert len(below.result[0]) == 2
    assert [taken(below, node) for node in (0, 7)] == [None, None]
    assert None not in [taken(below, node) for node in (6, 7)]


def test_what_another_thread_has_drawn_is_not_drawn_again() -> None:
    """The global generator stands elsewhere then, and what was made ahead is left alone."""
    draws = drawn_ahead(RandomStream(CPU))
    assert taken(draws, 0) is not None
    torch.rand(1)
    moved = torch.get_rng_state()
    assert taken(draws, 1) is None
    assert torch.equal(torch.get_rng_state(), moved)
