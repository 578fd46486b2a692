"""The counters of a call agree with a plain list of its steps."""

import json

import pytest

from hf_specdec.common.stats import SpecStats

# (drafted, accepted) of each verify step
CALLS = [
    [],
    [(0, 0)],
    [(10, 0), (10, 0)],
    [(10, 3), (0, 0), (5, 5), (32, 1)],
    [(4, 4)] * 3,
]


def recorded(steps: list[tuple[int, int]]) -> SpecStats:
    stats = SpecStats(method="prompt_lookup", tier="tree")
    for drafted, accepted in steps:
        stats.record_step(drafted, accepted)
    return stats


@pytest.mark.parametrize("steps", CALLS)
def test_rates_follow_vllms_rule(steps: list[tuple[int, int]]) -> None:
    """Mean acceptance length counts the token after the drafts; positions are shares of all steps."""
    stats = recorded(steps)
    drafted = sum(drafted for drafted, _ in steps)
    accepted = sum(accepted for _, accepted in steps)
    assert stats.acceptance_rate == (accepted / drafted if drafted else 0.0)
    assert stats.mean_acceptance_length == (1 + accepted / len(steps) if steps else 1.0)
    deepest = max((accepted for _, accepted in steps), default=0)
    expected = [sum(accepted > depth for _, accepted in steps) / len(steps) for depth in range(deepest)]
    assert stats.acceptance_rate_per_position == pytest.approx(expected)
    assert sum(stats.acceptance_rate_per_position) == pytest.approx(stats.mean_acceptance_length - 1)


@pytest.mark.parametrize("steps", CALLS)
def test_the_dictionary_is_json_and_complete(steps: list[tuple[int, int]]) -> None:
    stats = recorded(steps)
    data = json.loads(json.dumps(stats.to_dict()))
    assert data["method"] == "prompt_lookup"
    assert data["plain_reason"] is None
    assert data["num_accepted_tokens"] == stats.num_accepted_tokens
    assert data["mean_acceptance_length"] == stats.mean_acceptance_length
    assert data["acceptance_rate_per_position"] == stats.acceptance_rate_per_position
    assert {"prefill_seconds", "draft_seconds", "verify_seconds", "commit_seconds", "tier"} <= data.keys()
