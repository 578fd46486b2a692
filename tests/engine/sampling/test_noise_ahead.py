"""Noise that is made ahead is what `torch.multinomial` divides by, and what it leaves behind."""

import math

import pytest
import torch

from hf_specdec.engine.sampling import noise_ahead
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.random_streams import RandomStream
from tests.helpers.devices import emulate

CPU, VOCAB = torch.device("cpu"), 50
ROWS = torch.randn(6, 1, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)


def noise_of(seed: int | None = 7) -> NoiseAhead:
    """Of a generator of its own, or of the global one."""
    noise = NoiseAhead(RandomStream(CPU, None if seed is None else torch.Generator().manual_seed(seed)))
    noise.vocab_size = VOCAB
    return noise


def multinomials(count: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.multinomial(row, 1, generator=generator)) for row in ROWS[:count]]


def test_rows_say_what_will_be_drawn() -> None:
    """However often they are asked for; the stream stays as it is."""
    noise = noise_of()
    rows = {depth: noise.row(depth) for depth in (0, 2, 0, 1)}
    assert [int((ROWS[depth] / rows[depth]).argmax()) for depth in range(3)] == multinomials(3)
    drawn = [int(torch.multinomial(row, 1, generator=noise._stream.generator)) for row in ROWS]
    assert drawn == multinomials(6)


def test_draws_are_multinomials_and_leave_the_stream_where_those_do() -> None:
    """With rows made before and without, in turns."""
    noise, drawn = noise_of(), []
    for row in ROWS:
        if len(drawn) in (0, 4):
            _, _ = noise.row(0), noise.row(1)
        drawn.append(noise.draw(row))
    assert drawn == multinomials(6)
    expected = torch.Generator().manual_seed(7)
    for row in ROWS:
        torch.multinomial(row, 1, generator=expected)
    assert torch.equal(noise._stream.state, expected.get_state())


@pytest.mark.skipif(not noise_ahead._core_computes_the_same(), reason="the core has no kernels here")
@pytest.mark.parametrize("size", [1, 3, 4, 50_257])
def test_the_core_gives_torchs_numbers(size: int) -> None:
    """Bit by bit, and leaves the generator where torch does."""
    for seed in range(8):
        first, second = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        expected = torch.empty(size).exponential_(generator=first)
        assert torch.equal(noise_ahead._exponential(torch.empty(size), second), expected)
        assert torch.equal(first.get_state(), second.get_state())


@pytest.mark.skipif(not noise_ahead._core_computes_the_same(), reason="the core has no kernels here")
def test_the_core_gives_torchs_numbers_at_the_edges() -> None:
    """Of the least and the greatest uniform numbers, and of those whose results lie between two floats."""
    uniform = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 2.0**-30, 0.25, 1 - 2.0**-30, 0.75], dtype=torch.float64)
    result = torch.empty(len(uniform))
    noise_ahead.core.exponential(uniform.data_ptr(), result.data_ptr(), len(uniform))
    expected = [-math.log1p(-number) for number in uniform.tolist()]
    assert torch.equal(result, torch.tensor(expected, dtype=torch.float64).float())
    assert not torch.signbit(result).any(), "a probability over -0 would never be drawn"


def test_rows_go_on_where_draws_were_made_without_them() -> None:
    """And are made anew where something else was drawn."""
    noise = noise_of(None)
    torch.manual_seed(7)
    _, third = noise.row(0), noise.row(2)
    torch.multinomial(ROWS[0], 1)
    torch.multinomial(ROWS[1], 1)
    assert torch.equal(noise.row(0), third)
    torch.rand(1)
    state = torch.get_rng_state()
    fresh = noise.row(0).clone()
    torch.set_rng_state(state)
    assert torch.equal(torch.empty(VOCAB).exponential_(), fresh)


@pytest.mark.parametrize("broken", ["not a number", "no probability", "another width", "double"])
def test_what_multinomial_decides_otherwise_is_left_to_it(broken: str) -> None:
    noise = noise_of()
    noise.row(0)
    before = noise._stream.state
    rows = {
        "not a number": torch.full((1, VOCAB), torch.nan),
        "no probability": torch.zeros(1, VOCAB),
        "another width": ROWS[0][:, :-1],
        "double": ROWS[0].double(),
    }
    assert noise.draw(rows[broken]) is None
    assert torch.equal(noise._stream.state, before)


def test_on_an_accelerator_rows_come_with_the_read_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and only where a drafter has asked for them."""
    emulate(monkeypatch)
    noise = noise_of()
    assert noise.unread(3) == ()
    assert noise.load(["tokens"]) == ["tokens"]  # type: ignore[list-item]
    assert [noise.on_host(depth) for depth in range(3)] == [None] * 3
    result = noise.unread(1)
    assert 0 < len(result) <= 1 + 1 + 3
    assert noise.load(["tokens", *[row.numpy() for row in result]]) == ["tokens"]  # type: ignore[list-item]
    noise.take()
    for depth, row in enumerate(result[1:4]):
        assert (noise.on_host(depth) == row.numpy()).all()  # type: ignore[union-attr]
    assert not {row.data_ptr() for row in result} & {row.data_ptr() for row in noise.unread(1)}
