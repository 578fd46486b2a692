"""Tokens that a grammar forces are drafted in place of others; a device masks all nodes at once."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import hf_specdec
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.methods.common.drafter import DraftCost
from tests.helpers.devices import DEVICE, EmulatedDevice, moved
from tests.helpers.support import plain, seed

pytest.importorskip("llguidance")

TREES: dict[str, dict[str, Any]] = {"tree": {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}}}


def test_forced_tokens_are_drafted_accepted_and_counted(target: Any, prompt: Any, make: Any) -> None:
    steps: list[Any] = []
    output = target.generate(
        **prompt,
        max_new_tokens=60,
        logits_processor=[make()],
        spec_method="prompt_lookup",
        spec_observer=steps.append,
        return_dict_in_generate=True,
    )
    stats = output.spec_stats
    described = [(step, node, number) for step in steps for number, node in enumerate(step.nodes, 1)]
    forced = [(step, number) for step, node, number in described if node.source == "grammar"]
    assert len(described) == stats.num_draft_tokens
    assert len(forced) == stats.num_forced_tokens
    assert sum(number in step.path for step, number in forced) == stats.num_accepted_forced_tokens
    at_root = [step for step in steps if step.nodes and step.nodes[0].source == "grammar"]
    assert at_root and all(len(step.path) > 1 for step in at_root), "a forced token is never rejected"
    alone = target.generate(
        **prompt, max_new_tokens=60, logits_processor=[make()], spec_method="plain", return_dict_in_generate=True
    )
    assert alone.spec_stats.num_draft_tokens == 0
    assert stats.num_forwards < 0.6 * alone.spec_stats.num_forwards


class Counted:
    """A matcher that counts what it has consumed."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.text = matcher, list[int]()
        self.seen: Counter[tuple[int, ...]] = Counter()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        count: int = self.matcher.try_consume_tokens(tokens)
        self.seen[(*self.text, *tokens)] += 1
        self.text += tokens[:count]
        return count

    def rollback(self, count: int) -> bool:
        del self.text[len(self.text) - count :]
        return bool(self.matcher.rollback(count))

    def reset(self) -> bool:
        self.text = []
        return bool(self.matcher.reset())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def test_the_matcher_sees_no_rejected_token_twice(target: Any, prompt: Any, make: Any) -> None:
    processor = make()
    row = processor.of_row(0)
    counted = row._matcher = Counted(row._matcher)
    ids = target.generate(**prompt, max_new_tokens=60, logits_processor=[processor], **TREES["tree"])
    text = tuple(ids[0, prompt["input_ids"].shape[1] :].tolist())
    rejected = {path: count for path, count in counted.seen.items() if text[: len(path)] != path}
    assert rejected and set(rejected.values()) == {1}
    assert max(counted.seen.values()) <= 2, "once as a draft, once as a part of the text"


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_on_a_device_all_nodes_are_masked_at_once_with_one_read_a_step(
    target: Any, prompt: Any, make: Any, do_sample: bool
) -> None:
    with EmulatedDevice() as device:
        model, ids = moved(target, DEVICE), prompt["input_ids"].to(DEVICE)
        options: dict[str, Any] = {"do_sample": do_sample, "return_dict_in_generate": True}
        model.generate(ids, max_new_tokens=2, **options, logits_processor=[make()], spec_method="prompt_lookup")
        reads, forwards, length = [], [], 0
        for length in (8, 20):
            seed(5)
            expected = plain(model, ids, max_new_tokens=length, **options, logits_processor=[make()])
            seed(5)
            device.reads.clear()
            output = model.generate(
                ids, max_new_tokens=length, **options, logits_processor=[make()], spec_method="prompt_lookup"
            )
            reads.append(len(device.reads))
            forwards.append(output.spec_stats.num_forwards)
            assert output.sequences.tolist() == expected.sequences.tolist()
            assert output.spec_stats.num_accepted_forced_tokens > 0
        if not do_sample:  # draws below the first levels have a read of their own
            assert reads[1] - reads[0] == forwards[1] - forwards[0] < 12


class Reader(hf_specdec.Drafter):
    """Keeps the text that it is told of, and drafts one token after it."""

    texts: ClassVar[list[list[int]]] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text = list(prompt_ids)

    def propose(self, budget: int) -> Any:
        return hf_specdec.DraftTree.chain(self.text[-1], [self.text[0]][:budget])

    def observe(self, tree: Any, logits: Any, accepted: Sequence[int]) -> None:
        assert tree.tokens[0] == self.text[-1]
        self.text += accepted

    def end(self) -> None:
        self.texts.append(self.text)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_new_tokens": 3}, {"max_new_tokens": 12}, {"stop_strings": ["nam"]}, {"stop_strings": ['kind": "']}],
    ids=str,
)
def test_a_drafter_knows_the_text_in_the_end(
    target: Any, prompt: Any, make: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    Reader.texts = []
    options = {"max_new_tokens": 60, "tokenizer": tokenizer, "logits_processor": [make()], **options}
    ids = target.generate(**prompt, **options, spec_method=Reader)
    assert ids.tolist() == plain(target, **prompt, **(options | {"logits_processor": [make()]})).tolist()
    assert Reader.texts == ids.tolist()


def test_another_processor_may_have_its_way(target: Any, prompt: Any, make: Any) -> None:
    """The token that it sets is none of the grammar, which begins anew; the drafter learns what the text is."""

    def sets_a_token(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 7:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([70]), 0.0)

    Reader.texts = []
    expected = plain(target, **prompt, max_new_tokens=24, logits_processor=[make(), sets_a_token])
    for method in ("prompt_lookup", "auto", Reader):
        processors = [make(), sets_a_token]
        ids = target.generate(**prompt, max_new_tokens=24, logits_processor=processors, spec_method=method)
        assert ids.tolist() == expected.tolist()
    assert Reader.texts == expected.tolist()


def test_auto_drafts_what_is_forced_while_it_is_paused(target: Any, prompt: Any, make: Any) -> None:
    with mock.patch.object(Budget, "draft_cost", lambda *_: DraftCost(of_node=math.inf, of_forward=math.inf)):
        output = target.generate(
            **prompt, max_new_tokens=40, logits_processor=[make()], spec_method="auto", return_dict_in_generate=True
        )
    assert output.spec_stats.num_accepted_forced_tokens > 5
