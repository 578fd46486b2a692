"""Replayed answers count steps as a greedy target would take them."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.drafter import BaseDrafter, Drafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.plain.drafter import PlainDrafter
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_specdec.tools.bench.drafting import made_up_text, prompt_lookup_points
from hf_specdec.tools.bench.replay import Record, read_records, replay
from hf_specdec.tools.bench.replay_rows import replay_rows
from hf_specdec.tools.bench.rivals import Racer, SuffixDecoding, SuffixTexts
from hf_specdec.tools.bench.tables import tables
from hf_specdec.tools.bench.transformers_lookup import TransformersPromptLookup


class NeedsLogits(PromptLookupDrafter):
    """A drafter that would look at logits if it was given some."""

    needs_logits = True

    def learn_from(self, result: DraftResult) -> None:
        assert result.logits is None
        super().learn_from(result)


class Fixed(Drafter):
    """Drafts the next `right` tokens of the text it was told, then a wrong one."""

    def __init__(self, record: Record, right: int) -> None:
        self.expected, self.right = [*record.prompt_ids, *record.answer_ids], right

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.length = len(prompt_ids)

    def propose(self, budget: int) -> DraftTree:
        ahead = self.expected[self.length : self.length + self.right]
        return DraftTree.chain(self.expected[self.length - 1], [*ahead, -1][:budget])

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.length += len(accepted)
        assert self.expected[self.length - len(accepted) : self.length] == list(accepted)


def records(seed: int, count: int = 5) -> list[Record]:
    rng = random.Random(seed)
    return [Record(*([rng.randrange(8) for _ in range(rng.randrange(2, 60))] for _ in "pa")) for _ in range(count)]


def steps_of_the_rule(record: Record, size: int, length: int) -> int:
    """The reference: transformers' rule as a scan: longest n-gram first, oldest place, at most `length` tokens."""
    text, rest, steps = [*record.prompt_ids, record.answer_ids[0]], list(record.answer_ids[1:]), 0
    while rest:
        draft: list[int] = []
        for n in range(min(size, len(text) - 1), 0, -1):
            ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
            if ends:
                draft = text[ends[0] : ends[0] + length]
                break
        same = 0
        while same < min(len(draft), len(rest)) and draft[same] == rest[same]:
            same += 1
        text, rest, steps = text + rest[: same + 1], rest[same + 1 :], steps + 1
    return steps


def test_plain_decoding_takes_one_step_a_token() -> None:
    """The first token of an answer is the prompt's and counts as neither."""
    result = replay(PlainDrafter, records(0))
    assert result.num_steps == result.num_tokens == sum(len(record.answer_ids) - 1 for record in records(0))
    assert (result.tokens_per_step, result.nodes_per_step) == (1.0, 0.0)


@pytest.mark.parametrize("right", [0, 1, 3, 100])
def test_a_step_emits_the_accepted_tokens_and_one_more(right: int) -> None:
    record = Record([1, 2], list(range(10, 35)))
    result = replay(lambda: Fixed(record, right), [record])
    assert result.num_tokens == 24
    assert result.num_steps == -(-24 // (right + 1))


def test_the_budget_limits_the_draft() -> None:
    record = Record([1, 2], list(range(10, 35)))
    assert replay(lambda: Fixed(record, 100), [record], budget=3).num_steps == 6


@pytest.mark.parametrize(("size", "length"), [(1, 4), (2, 10), (3, 10)])
def test_transformers_generator_follows_the_rule_that_it_documents(size: int, length: int) -> None:
    for seed in range(5):
        for record in records(seed):
            result = replay(lambda: TransformersPromptLookup(length, size), [record])
            assert result.num_steps == steps_of_the_rule(record, size, length)


def test_a_drafter_that_needs_logits_drafts_from_the_text_alone() -> None:
    blind = replay(lambda: NeedsLogits(PromptLookupConfig()), records(0))
    seeing = replay(lambda: PromptLookupDrafter(PromptLookupConfig()), records(0))
    assert blind.needs_logits and not seeing.needs_logits
    assert blind.num_steps == seeing.num_steps < blind.num_tokens


def test_an_answer_of_one_token_takes_no_step() -> None:
    result = replay(PlainDrafter, [Record([1], [2])])
    assert (result.num_steps, result.tokens_per_step) == (0, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [], "answer_ids": [1]}',
        '{"prompt_ids": [1], "answer_ids": [-1]}',
        '{"prompt_ids": [4294967296], "answer_ids": [1]}',
        '{"prompt_ids": [1], "answer_ids": [true]}',
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt_ids": [1], "answer_ids": [2]}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match="answers.jsonl:2"):
        read_records(file)


def test_a_row_that_is_no_method_is_named() -> None:
    with pytest.raises(ConfigError, match="`row` must be one of .*'prompt_lookup'.* but is 'nosuch'"):
        replay_rows(records(0), ["nosuch"])


def test_the_document_of_replayed_rows_is_what_the_tables_read() -> None:
    document = replay_rows(records(0), ["prompt_lookup=[10, 2]"])
    point = document["tables"][0]["rows"][1]["n10"]
    expected = replay(lambda: PromptLookupDrafter(PromptLookupConfig()), records(0))
    assert point["num_steps"] == expected.num_steps
    assert len(tables(document)[0].rows) == 2


def test_draft_cost_times_both_at_every_length() -> None:
    points = list(prompt_lookup_points(PromptLookupConfig(), context_lengths=(50, 100), num_steps=3))
    assert [point["context_length"] for point in points] == [50, 100]
    assert all(point["microseconds"] > 0 and point["transformers_microseconds"] > 0 for point in points)
    assert made_up_text(500) == made_up_text(500)


@pytest.mark.parametrize("rival", [SuffixDecoding, Racer])
def test_rivals_draft_a_passage_that_comes_again(rival: type[BaseDrafter]) -> None:
    passage = [*range(30)]
    result = replay(rival, [Record([*passage, 40], [0, *passage[1:], 50])], budget=8)
    assert result.num_steps <= 10  # of 30
    assert result.nodes_per_step <= 8


def test_suffix_decoding_knows_earlier_answers_and_not_their_prompts() -> None:
    answer, answers = [*range(10, 30)], SuffixTexts()
    both = [Record([1], answer), Record([2], [3, *answer])]
    alone = replay(SuffixDecoding, both[1:]).num_steps
    assert replay(lambda: SuffixDecoding(answers), both).num_steps == 19 + 2 < 19 + alone
    assert not answers.places[1]


def test_racer_fills_its_budget_with_the_last_logits() -> None:
    racer = Racer()
    racer.begin([5, 6])
    rows = torch.full((1, 20), -9.0)
    rows[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    racer.learn_from(DraftResult(DraftTree.chain(6), [6], NodeLogits(rows)))
    tree = racer.draft_for(DraftRequest(2))
    assert (tree.tokens, tree.parents) == ((6, 7, 8), (-1, 0, 0))
