"""Draws that are made ahead are those of `torch.multinomial`, number for number."""

import pytest
import torch

from hf_specdec.engine.draws import LEVELS, DrawsAhead
from hf_specdec.engine.random_streams import OwnDraws, RandomStream

CPU, VOCAB = torch.device("cpu"), 50
DEPTHS = [0, 1, 2, 2, 1, 2, 3, 4]  # depth-first
PATHS = ([0], [0, 1], [0, 1, 3], [0, 4, 5], [0, 1, 2])
PROBABILITIES = torch.randn(len(DEPTHS), VOCAB, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


def at(draws: DrawsAhead, node: int) -> list[float]:
    """As the samplers get it, after one transfer."""
    return [float(found[node]) for found in draws.found]


def drawn_ahead(probabilities: torch.Tensor, depths: list[int], stream: RandomStream) -> DrawsAhead:
    return DrawsAhead(probabilities, depths, stream, torch.empty(LEVELS, VOCAB))


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_draws_along_a_path_are_multinomials(path: list[int], is_global: bool) -> None:
    """The stream stands, after each, where as many draws of plain decoding leave it."""
    generator = None if is_global else torch.Generator()
    stream = RandomStream(CPU, generator)
    seed = torch.manual_seed if generator is None else generator.manual_seed
    seed(7)
    before = stream.state
    draws = drawn_ahead(PROBABILITIES, DEPTHS, stream)
    assert torch.equal(stream.state, before)
    taken = []
    for node in path:
        taken.append((draws.take(node, at(draws, node)), stream.state))
    seed(7)
    for node, (token, after) in zip(path, taken, strict=True):
        assert token == int(torch.multinomial(PROBABILITIES[node : node + 1], 1, generator=generator))
        assert torch.equal(after, stream.state)


def test_only_the_next_level_is_taken() -> None:
    """Deeper nodes are drawn for when they are reached."""
    draws = drawn_ahead(PROBABILITIES, DEPTHS, RandomStream(CPU, torch.Generator()))
    assert draws.take(1, at(draws, 1)) is None
    for node in (0, 1, 2)[:LEVELS]:
        assert draws.take(node, at(draws, node)) is not None
    assert draws.take(6, at(draws, 6)) is None


def test_what_is_no_probability_is_left_to_multinomial() -> None:
    """It raises what plain sampling raises."""
    broken = torch.full((1, VOCAB), torch.nan)
    stream = RandomStream(CPU, torch.Generator().manual_seed(1))
    before = stream.state
    draws = drawn_ahead(broken, [0], stream)
    assert draws.take(0, at(draws, 0)) is None
    assert torch.equal(stream.state, before)


def test_a_stream_of_a_call_s_own_is_drawn_from() -> None:
    """As by the call's other draws; the global generator stays as it is."""
    before = torch.get_rng_state()
    with OwnDraws(seed=9):
        draws = drawn_ahead(PROBABILITIES, DEPTHS, RandomStream(CPU))
        first, then = draws.take(0, at(draws, 0)), int(torch.multinomial(PROBABILITIES[1:2], 1))
    assert torch.equal(torch.get_rng_state(), before)
    with OwnDraws(seed=9):
        assert [first, then] == [int(torch.multinomial(row[None], 1)) for row in PROBABILITIES[:2]]


def test_what_another_thread_has_drawn_is_not_drawn_again() -> None:
    """The global generator stands elsewhere then, and what was made ahead is left alone."""
    draws = drawn_ahead(PROBABILITIES, DEPTHS, RandomStream(CPU))
    assert draws.take(0, at(draws, 0)) is not None
    torch.rand(1)
    moved = torch.get_rng_state()
    assert draws.take(1, at(draws, 1)) is None
    assert torch.equal(torch.get_rng_state(), moved)
