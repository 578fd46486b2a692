"""What an observer and the statistics say adds up to the output."""

from collections.abc import Callable
from typing import Any

import pytest

import hf_specdec
from hf_specdec import ConfigError, SpecStep
from tests.helpers.support import DRAFTS, PROMPT, plain, run, speculative
from tests.promise.conftest import Draft


def observed(model: Any, draft: Draft, **kwargs: Any) -> tuple[list[SpecStep], Any]:
    steps: list[SpecStep] = []
    expected = run(model, plain, lambda: dict(kwargs)).ids
    ours = run(model, speculative, lambda: {"spec_observer": steps.append, **kwargs}, **draft(expected))
    assert ours.ids == expected
    return steps, ours


@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_steps_add_up_to_the_output(zoo: Callable[[str], Any], draft: Draft, family: str, do_sample: bool) -> None:
    """The first token comes from the prompt; every other one from exactly one step."""
    model = zoo(family)
    steps, ours = observed(model, draft, do_sample=do_sample)
    prompt_length = 1 if model.config.is_encoder_decoder else PROMPT.shape[1]
    emitted = [token for step in steps for token in step.accepted]
    assert ours.ids[prompt_length + 1 :] == emitted
    assert [step.index for step in steps] == list(range(len(steps)))
    text = ours.ids[: prompt_length + 1]
    for step in steps:
        assert step.tree.tokens[0] == text[-1]
        assert step.path[0] == 0
        assert len(step.path) == len(step.accepted) >= 1
        assert [step.tree.tokens[node] for node in step.path[1:]] == list(step.accepted[:-1])
        assert list(step.path) == step.tree.path(step.path[-1])
        text += step.accepted


def test_the_statistics_are_the_sums_of_the_steps(model: Any, draft: Draft) -> None:
    steps, ours = observed(model, draft, max_new_tokens=24)
    stats = ours.stats
    assert stats.num_drafts == len(steps)
    assert stats.num_tokens == 24 == 1 + sum(len(step.accepted) for step in steps)
    assert stats.num_draft_tokens == sum(step.tree.num_draft_tokens for step in steps)
    assert stats.num_accepted_tokens == sum(len(step.path) - 1 for step in steps) > 0
    assert stats.peak_tree_size == max(len(step.tree) for step in steps)
    assert stats.num_tokens == 1 + stats.num_drafts + stats.num_accepted_tokens
    assert 0 < stats.acceptance_rate <= 1
    assert sum(stats.acceptance_rate_per_position) == pytest.approx(stats.mean_acceptance_length - 1)


def test_the_times_are_parts_of_the_call(model: Any, draft: Draft) -> None:
    steps, ours = observed(model, draft)
    stats = ours.stats
    assert stats.prefill_seconds > 0
    assert stats.verify_seconds > 0
    for name in ("draft_seconds", "verify_seconds", "commit_seconds"):
        total = sum(getattr(step, name) for step in steps)
        assert 0 < total <= getattr(stats, name) + 1e-6


def test_nothing_drafted_is_counted_as_nothing_drafted(model: Any) -> None:
    ours = run(model, speculative, dict, spec_method="plain")
    stats = ours.stats
    assert (stats.method, stats.num_tokens, stats.num_drafts) == ("plain", 16, 15)
    assert (stats.num_draft_tokens, stats.acceptance_rate, stats.mean_acceptance_length) == (0, 0.0, 1.0)


def test_plain_decoding_for_want_of_a_better_way_says_why_once(
    zoo: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is in each call's statistics and once in the log."""
    from tests.helpers.zoo import FALLBACK, build

    model = hf_specdec.enable(build(FALLBACK["recurrent_gemma"]))
    for _ in range(3):
        ours = run(model, speculative, dict, spec_method="prompt_lookup")
        assert ours.stats.tier == "plain"
        assert ours.stats.num_tokens == 16
        assert ours.stats.plain_reason == hf_specdec.capability(model).reason
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_specdec")]
    assert len(messages) == 1
    assert "RecurrentGemmaForCausalLM" in messages[0]


@pytest.mark.parametrize("how", [{}, {"spec_method": None}, {"spec_method": "none"}])
@pytest.mark.parametrize("custom", [{}, {"custom_generate": hf_specdec.decode}])
def test_an_observer_without_a_method_would_see_nothing(
    model: Any, how: dict[str, Any], custom: dict[str, Any]
) -> None:
    """transformers' own loop has no steps; with `"plain"` each token is one."""
    steps: list[SpecStep] = []
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "spec_observer": steps.append, **custom}
    with pytest.raises(ConfigError, match='`spec_observer` must come with a spec_method.*spec_method="auto"'):
        model.generate(PROMPT, **call, **how)
    model.generate(PROMPT, **call, spec_method="plain")
    assert len(steps) == 3


def test_a_drafter_of_ones_own_is_counted_under_its_own_name(model: Any) -> None:
    expected = run(model, plain, dict).ids
    ours = run(model, speculative, dict, **DRAFTS["oracle"](expected))
    assert ours.stats.method == "OracleDrafter"
