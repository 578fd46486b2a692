"""Filters on the host keep the token that plain decoding draws, or give no answer."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.engine.sampling import row_filters
from hf_specdec.engine.sampling.row_filters import MOST_TOP_K, NUM_RANKS, ROUNDING, RowFilters

NO_IDS = torch.empty((1, 0), dtype=torch.long)
FILTERS: dict[str, list[Any]] = {
    "top_k": [TopKLogitsWarper(5)],
    "top_k beyond the vocabulary": [TopKLogitsWarper(500)],
    "top_p": [TopPLogitsWarper(0.8)],
    "least top_p": [TopPLogitsWarper(0.0)],
    "min_p": [MinPLogitsWarper(0.1)],
    "top_k, top_p": [TopKLogitsWarper(50), TopPLogitsWarper(0.9)],
    "top_p, min_p": [TopPLogitsWarper(0.95), MinPLogitsWarper(0.05)],
    "all": [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
}
ROWS: dict[str, tuple[int, float, torch.dtype]] = {  # vocabulary, spread, precision of the logits
    "small": (60, 2.0, torch.float32),
    "large": (2_000, 3.0, torch.float32),
    "flat": (2_000, 0.5, torch.float32),
    "many ties": (300, 1.0, torch.bfloat16),
}


def found(filters: list[Any], scores: torch.Tensor, noise: torch.Tensor) -> list[int | None]:
    """The tokens of `(T, vocab_size)` scores, drawn with exponentials of the same shape."""
    by_rows = RowFilters.of(filters)
    assert by_rows is not None
    probabilities, vocab_size = scores.softmax(dim=-1), scores.shape[-1]
    drawn = (probabilities / noise).topk(min(NUM_RANKS, vocab_size), dim=-1)
    read = [part.float().numpy() for part in (*drawn, *by_rows.wanted(scores, probabilities))]
    return [
        by_rows.first_kept(*[part[n] for part in read[:2]], [part[n] for part in read[2:]], vocab_size)
        for n in range(len(scores))
    ]


def drawn_by_plain(filters: list[Any], scores: torch.Tensor, noise: torch.Tensor) -> list[int]:
    rows = [LogitsProcessorList(filters)(NO_IDS, row[None]).softmax(dim=-1) for row in scores]
    return (torch.cat(rows) / noise).argmax(dim=-1).tolist()


def random_rows(kind: str, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size, spread, dtype = ROWS[kind]
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, vocab_size, generator=generator) * spread).to(dtype).float()
    return logits, torch.empty_like(logits).exponential_(generator=generator)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FILTERS)
def test_the_token_is_the_one_that_plain_decoding_draws(name: str, rows: str) -> None:
    """Wherever there is one; without ties and with a preference for some tokens, nearly everywhere."""
    logits, noise = random_rows(rows, 40)
    scores = TemperatureLogitsWarper(0.7)(NO_IDS, logits)
    tokens, expected = found(FILTERS[name], scores, noise), drawn_by_plain(FILTERS[name], scores, noise)
    sure = [token == right for token, right in zip(tokens, expected, strict=True) if token is not None]
    assert all(sure)
    if rows in ("small", "large"):
        assert len(sure) > 36


def test_a_token_that_ties_with_the_last_of_top_p_is_not_sure() -> None:
    """The sort decides which of the equal ones are kept; those before them are, and those after them are not."""
    scores = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.06, 0.04]).log().expand(6, -1)
    noise = torch.full((6, 6), 1e3).fill_diagonal_(1e-3)  # each row draws another token first
    noise[:, 0] = torch.where(torch.arange(6) > 3, 1.0, noise[:, 0])  # and the last ones then the first
    assert found([TopPLogitsWarper(0.6)], scores, noise) == [0, None, None, None, 0, 0]


@pytest.mark.parametrize("distance", [0.2 * ROUNDING, -0.2 * ROUNDING, 5 * ROUNDING, -5 * ROUNDING])
@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_what_rounding_decides_is_not_sure(name: str, distance: float) -> None:
    """The second of three tokens is kept up to 0.5 above it, or down to half of the best."""
    shares = [0.5 + distance, 0.3 - distance, 0.2] if name == "top_p" else [0.5, 0.25 * (1 - distance), 0.1]
    filters = [TopPLogitsWarper(0.5)] if name == "top_p" else [MinPLogitsWarper(0.5)]
    (token,) = found(filters, torch.tensor([shares]).log(), torch.tensor([[1.0, 1e-3, 1.0]]))
    assert token == (None if abs(distance) < ROUNDING else 0 if distance > 0 else 1)


def test_two_draws_that_rounding_can_exchange_are_not_sure() -> None:
    scores = torch.tensor([0.5, 0.25, 0.25]).log()
    noise = torch.tensor([[1.0, 0.5 * (1 + 0.2 * ROUNDING), 1.0], [1.0, 0.5 * (1 + 5 * ROUNDING), 1.0]])
    assert found([TopKLogitsWarper(3)], scores.expand(2, -1), noise) == [None, 0]


def test_ties_with_the_last_of_top_k_are_kept() -> None:
    """However many: where not all of them were read, a token that is none of the best is not sure."""
    scores = torch.zeros(2, 200)
    scores[:, 0] = 3.0
    noise = torch.full((2, 200), 1e3)
    noise[0, 0] = noise[1, 199] = 1e-3
    assert drawn_by_plain([TopKLogitsWarper(2)], scores, noise) == [0, 199]
    assert found([TopKLogitsWarper(2)], scores, noise) in ([0, None], [0, 199])
    assert found([TopKLogitsWarper(2), TopPLogitsWarper(0.9)], scores, noise)[1] is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_best_score_has_no_token(value: float) -> None:
    for filters in FILTERS.values():
        assert found(filters, torch.full((1, 20), value), torch.ones(1, 20)) == [None]


@pytest.mark.parametrize(
    "filters",
    [
        [],
        [TopPLogitsWarper(0.9), TopKLogitsWarper(5)],
        [TopPLogitsWarper(0.9), TopPLogitsWarper(0.8)],
        [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [MinPLogitsWarper(0.1, filter_value=-1e4)],
        [TopKLogitsWarper(MOST_TOP_K + 1)],
        [TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)],
    ],
)
def test_other_filters_are_processors(filters: list[Any]) -> None:
    assert RowFilters.of(filters) is None


@pytest.mark.parametrize("changed", [TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper])
def test_filters_of_another_transformers_are_processors(changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps the best token alone, whatever it is set to."""
    assert RowFilters.of([TopKLogitsWarper(5)]) is not None

    def keeps_best(_: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True), float("-inf"))

    monkeypatch.setattr(changed, "__call__", keeps_best)
    row_filters._rules_hold.cache_clear()
    try:
        assert RowFilters.of([TopKLogitsWarper(5)]) is None
    finally:
        row_filters._rules_hold.cache_clear()
