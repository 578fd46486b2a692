"""What a step says of its drafted nodes, and the counters of a call."""

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import SpecStep, embedded
from hf_specdec.common.stats import SpecStats
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.registry import sources

PROMPT = """    parser.add_argument("-v", "--verbose", action="store_true", default=False,
                        dest="verbose", help="print more messages")
    parser.add_argument("-q", "--quiet", action="store_true", default=False,
"""
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead"},
    "draft_model": {"spec_method": "draft_model"},
    "draft_tree": {"spec_method": "draft_model", "spec_config": {"num_branches": 3}},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 12, "pool": "request"}},
    "auto_drafted": {"spec_method": "auto", "spec_config": {"num_nodes": 12, "pool": "request"}},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")


@pytest.fixture(scope="module")
def draft() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("draft"), precision="fp32")


def steps_of(target: Any, tokenizer: Any, **how: Any) -> list[SpecStep]:
    steps: list[SpecStep] = []
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "spec_observer": steps.append}
    target.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **(options | how))
    return steps


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", METHODS)
def test_every_drafted_node_has_a_source(target: Any, draft: Any, tokenizer: Any, name: str) -> None:
    """Also where the verified tree is a part of what was proposed, or has its nodes in another order."""
    how = METHODS[name] | ({"assistant_model": draft} if "draft" in name else {})
    steps = steps_of(target, tokenizer, **how)
    assert sum(step.tree.num_draft_tokens for step in steps) > 0
    for step in steps:
        assert len(step.nodes) == step.tree.num_draft_tokens
        for node, parent in zip(step.nodes, step.tree.parents[1:], strict=True):
            assert node.source in sources()
            above = step.nodes[parent - 1].probability if parent else 1.0
            if node.probability is not None and above is not None:
                assert 0.0 <= node.probability <= above + 1e-9


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("name", "expected"), [("chain", {"text"}), ("lookahead", {"text", "window"}), ("draft_model", {"draft_model"})]
)
def test_the_sources_are_those_of_the_method(
    target: Any, draft: Any, tokenizer: Any, name: str, expected: set[str]
) -> None:
    how = METHODS[name] | ({"assistant_model": draft} if "draft" in name else {})
    steps = steps_of(target, tokenizer, **how)
    assert {node.source for step in steps for node in step.nodes} == expected


def test_a_head_is_called_by_its_method(target: Any, tokenizer: Any) -> None:
    """Where it drafts alone, and in auto's votes."""
    head = hf_specdec.AutoDraftHead.from_pretrained(embedded.path("head"), dtype=torch.float32)
    alone = steps_of(target, tokenizer, spec_method="eagle3", assistant_model=head)
    assert {node.source for step in alone for node in step.nodes} == {"eagle3"}
    blended = steps_of(target, tokenizer, **METHODS["auto"], assistant_model=head)
    said = {vote.source for step in blended for node in step.nodes for vote in node.votes}
    assert "eagle3" in said
    assert "draft_model" not in said


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("prompt_lookup", {"pool": "shared"}),
        ("auto", {"pool": "shared", "num_nodes": 12}),
    ],
)
def test_earlier_texts_are_a_source_once_there_are_any(
    target: Any, tokenizer: Any, method: str, config: dict[str, Any]
) -> None:
    """A second call copies the first one's answer."""
    hf_specdec.enable(hf_specdec.disable(target))
    try:
        calls = [steps_of(target, tokenizer, spec_method=method, spec_config=config) for _ in range(2)]
    finally:
        hf_specdec.enable(hf_specdec.disable(target))
    sources = [{node.source for step in steps for node in step.nodes} for steps in calls]
    assert "earlier_texts" not in sources[0]
    assert "earlier_texts" in sources[1]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", ["auto", "auto_drafted"])
def test_auto_says_what_each_source_said(target: Any, draft: Any, tokenizer: Any, name: str) -> None:
    """The first vote is the one that weighs most, and names the node's source."""
    how = METHODS[name] | ({"assistant_model": draft} if "draft" in name else {})
    nodes = [node for step in steps_of(target, tokenizer, **how) for node in step.nodes]
    for node in nodes:
        assert node.votes and node.votes[0].source == node.source
        assert [vote.weight for vote in node.votes] == sorted((vote.weight for vote in node.votes), reverse=True)
        assert all(0.0 <= vote.probability < 1.0 for vote in node.votes)
    found = {vote.source for node in nodes for vote in node.votes}
    assert found >= {"text", "recycled_logits"}
    assert ("draft_model" in found) == ("draft" in name)


def test_observing_is_timed_apart(target: Any, tokenizer: Any) -> None:
    """A slow observer's time is in `observer_seconds`, not in the seconds of the steps."""
    steps: list[SpecStep] = []

    def observe(step: SpecStep) -> None:
        steps.append(step)
        time.sleep(0.02)

    steps_of(target, tokenizer, spec_method="auto", spec_observer=observe, max_new_tokens=24)
    for before, after in itertools.pairwise(steps):
        assert after.observer_seconds >= before.observer_seconds + 0.02
    assert steps[0].observer_seconds == 0.0


@pytest.fixture
def undescribed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("no one observes")

    monkeypatch.setattr(AutoDrafter, "describe", refuse)
    yield


@pytest.mark.usefixtures("undescribed")
def test_nothing_is_described_where_nobody_observes(target: Any, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    target.generate(inputs, max_new_tokens=8, do_sample=False, spec_method="auto")
    with pytest.raises(AssertionError, match="no one observes"):
        steps_of(target, tokenizer, spec_method="auto", spec_config={"num_nodes": 4, "pool": "request"})


def test_sampling_is_described_too(target: Any, draft: Any, tokenizer: Any) -> None:
    torch.manual_seed(3)
    how = {"spec_method": "draft_model", "spec_config": {"use_logits": True, "num_branches": 2}}
    steps = steps_of(target, tokenizer, assistant_model=draft, do_sample=True, **how)
    assert {node.source for step in steps for node in step.nodes} == {"draft_model"}


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
