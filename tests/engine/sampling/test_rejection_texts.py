"""Whole steps with drawn drafts, drafter, tree and walk: every text comes as often as the target alone would write it.

Seeds are fixed, so the tests do not flicker; by chance, a right implementation would fail a comparison for one seed in
a million (`critical_value`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.cover import wide_but
from tests.helpers.drafts import (
    Table,
    TableScorer,
    chi_square,
    critical_value,
    drafted_by,
    learned,
    random_table,
    sample,
    verify_drawn,
)

pytestmark = pytest.mark.each_value_in_file
LogitsProcessorFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIZE = 6


def temperature(value: float) -> LogitsProcessorFn:
    return lambda ids, row: row / value


def top_p(value: float) -> LogitsProcessorFn:
    """Keeps the likeliest tokens until they make up `value`."""

    def logits_processor(ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        probabilities, order = row.softmax(-1).sort(descending=True)
        dropped = probabilities.cumsum(-1) - probabilities >= value
        return row.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)

    return logits_processor


def probabilities_of(table: Table, logits_processor: LogitsProcessorFn, text: Sequence[int]) -> torch.Tensor:
    return logits_processor(torch.tensor([list(text)]), table(tuple(text)).unsqueeze(0)).softmax(-1)[0]


def texts_of(
    config: DraftModelConfig,
    draft: Table,
    target: Table,
    warps: tuple[LogitsProcessorFn, LogitsProcessorFn],
    *,
    length: int,
    count: int,
    seed: int = 0,
    budget: int = 100,
    max_nodes: int | None = None,
    drawn_as: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
) -> dict[tuple[int, ...], int]:
    """How often each text of `length` tokens is written by steps of draft and target."""
    generator = torch.Generator().manual_seed(seed)
    scorer = TableScorer(draft, vocab_size=SIZE)
    drafter = DraftModelDrafter(config, scorer, logits_processor=warps[0], generator=generator)
    target_row: dict[tuple[int, ...], torch.Tensor] = {}

    def target_distribution(text: list[int]) -> torch.Tensor:
        key = tuple(text)
        if key not in target_row:
            target_row[key] = probabilities_of(target, warps[1], text)
        return target_row[key]

    def write() -> tuple[int, ...]:
        drafter.begin([0])
        text = [0]
        while len(text) <= length:
            tree = drafted_by(drafter, budget).truncated(max_nodes=max_nodes)
            declared = {node: drawn_as(q) for node, q in (tree.drafted_from or {}).items()}
            tree = dataclasses.replace(tree, drafted_from=declared)
            so_far = list(text)
            tokens = verify_drawn(tree, lambda path: target_distribution(so_far + path), generator)  # noqa: B023
            learned(drafter, tree, None, tokens)
            text += tokens
        return tuple(text[1 : length + 1])

    return sample(count, write)


def true_probabilities(target: Table, logits_processor: LogitsProcessorFn, length: int) -> dict[tuple[int, ...], float]:
    """Probability of each text of `length` tokens behind token 0."""
    expected: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(SIZE), repeat=length):
        share = 1.0
        for place, token in enumerate(text):
            share *= float(probabilities_of(target, logits_processor, [0, *text[:place]])[token])
        expected[text] = share
    return expected


DRAFT, TARGET = random_table(11, SIZE), random_table(12, SIZE)
SHAPES = {
    "chain": {"draft_len": 3, "confidence_threshold": 0.0},
    "stopping chain": {"draft_len": 3, "confidence_threshold": 0.35},
    "learning chain": {"draft_len": 3},
}
WARPS = {  # of the draft, of the target
    "hot draft": (temperature(1.5), temperature(0.5)),
    "cold draft": (temperature(0.4), temperature(1.3)),
    "top p": (top_p(0.8), top_p(0.7)),
    "narrow draft": (top_p(0.5), temperature(1.0)),
    "narrow target": (temperature(1.0), top_p(0.5)),
}


@pytest.mark.at_most(1)
@pytest.mark.parametrize("shape", wide_but(["stopping chain"], SHAPES))
def test_texts_have_the_target_s_distribution(shape: str) -> None:
    """1,500 texts of two tokens, 36 different ones; odds of one in a million."""
    warps = temperature(0.9), temperature(0.8)
    config = DraftModelConfig(use_logits=True, **SHAPES[shape])
    seen = texts_of(config, DRAFT, TARGET, warps, length=2, count=1_500)
    value, degrees = chi_square(seen, true_probabilities(TARGET, warps[1], 2))
    assert value < critical_value(degrees)


@pytest.mark.wide
@pytest.mark.parametrize("case", WARPS)
def test_temperature_and_top_p_of_either_model_are_followed(case: str) -> None:
    """1,500 texts of two tokens; odds of one in a million."""
    warps = WARPS[case]
    config = DraftModelConfig(use_logits=True, **SHAPES["stopping chain"])
    seen = texts_of(config, DRAFT, TARGET, warps, length=2, count=1_500)
    value, degrees = chi_square(seen, true_probabilities(TARGET, warps[1], 2))
    assert value < critical_value(degrees)


@pytest.mark.wide
@pytest.mark.parametrize("max_nodes", [1, 2])
def test_a_chain_cut_short_stays_true(max_nodes: int) -> None:
    """1,500 texts of two tokens, the loop keeping the first nodes only; odds of one in a million."""
    warps = temperature(0.9), temperature(0.8)
    config = DraftModelConfig(use_logits=True, **SHAPES["stopping chain"])
    seen = texts_of(config, DRAFT, TARGET, warps, length=2, count=1_500, max_nodes=max_nodes)
    value, degrees = chi_square(seen, true_probabilities(TARGET, warps[1], 2))
    assert value < critical_value(degrees)


@pytest.mark.wide
def test_a_draft_that_states_the_wrong_distribution_is_found_out() -> None:
    """The same chains, drawn from q and declared as drawn from a hotter one."""
    warps = temperature(0.9), temperature(0.8)
    config = DraftModelConfig(use_logits=True, **SHAPES["chain"])
    seen = texts_of(config, DRAFT, TARGET, warps, length=2, count=2_000, drawn_as=lambda q: (q.log() / 3.0).softmax(-1))
    value, degrees = chi_square(seen, true_probabilities(TARGET, warps[1], 2))
    assert value > 2 * critical_value(degrees)
