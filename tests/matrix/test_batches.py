"""Every method on every family that verifies trees, several rows at once: each is what plain `generate` makes of it.

Rows are padded on the left, end at their own end-of-text tokens and accept different numbers of drafts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.compat.caches import CACHE
from tests.helpers.drafts import RandomTreeDrafter
from tests.helpers.support import PROMPT, assert_same_cache, plain, speculative
from tests.helpers.zoo import FALLBACK, FAMILIES

pytestmark = pytest.mark.each_value_in_file
TREES = [name for name, family in FAMILIES.items() if family.tier == "tree"]
NEW_TOKENS = 24
PADDING = (0, 3, 7, 1)
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"spec_method": "plain"},
    "prompt_lookup": {"spec_method": "prompt_lookup", "spec_config": {"draft_len_per_match": 4}},
    "auto_tree": {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    "lookahead": {"spec_method": "lookahead", "lookahead_config": [4, 3, 5]},
    "auto": {"spec_method": "auto"},
    "auto, 9 nodes": {"spec_method": "auto", "spec_config": {"num_nodes": 9}},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0}},
    "draft_model_tree": {
        "spec_method": "draft_model",
        "spec_config": {"num_branches": 3, "max_nodes": 9, "confidence_threshold": 0.0},
    },
}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4}}


class Batch:
    """One family's batch: inputs, what plain `generate` makes of them, and a draft model."""

    def __init__(self, model: Any, draft: Any, mode: str) -> None:
        self.model, self.draft = model, draft
        rows = [PROMPT[0].roll(3 * row) for row in range(len(PADDING))]
        self.ids = torch.stack(rows)
        self.mask = torch.ones_like(self.ids)
        for row, padding in enumerate(PADDING):
            self.ids[row, :padding] = 0
            self.mask[row, :padding] = 0
        self.options = {"attention_mask": self.mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, **MODES[mode]}
        free = plain(model, self.ids, **self.options)
        self.options["eos_token_id"] = [int(free[0, -9]), int(free[1, -3])]
        self.expected = plain(model, self.ids, **self.options, return_dict_in_generate=True)

    def run(self, method: dict[str, Any], **options: Any) -> Any:
        if method["spec_method"] == "draft_model":
            method = {**method, "assistant_model": self.draft}
        return speculative(self.model, self.ids, **{**self.options, **options}, **method)


@pytest.fixture(scope="session")
def batches(zoo: Callable[[str], Any], draft_of: Callable[[str], Any]) -> Callable[[str, str], Batch]:
    seen: dict[tuple[str, str], Batch] = {}

    def batch(family: str, mode: str) -> Batch:
        if (family, mode) not in seen:
            seen[family, mode] = Batch(zoo(family), draft_of(family), mode)
        return seen[family, mode]

    return batch


@pytest.mark.at_most(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TREES)
def test_each_row_is_plain_generates(batches: Callable[[str, str], Batch], family: str, method: str, mode: str) -> None:
    """Tokens and padding; once as a bare tensor, where finished rows leave the batch, once with the cache."""
    batch = batches(family, mode)
    assert batch.run(METHODS[method]).tolist() == batch.expected.sequences.tolist()

    output = batch.run(METHODS[method], return_dict_in_generate=True)
    assert output.sequences.tolist() == batch.expected.sequences.tolist()
    assert_same_cache(output[CACHE], batch.expected[CACHE])
    stats = output.spec_stats
    assert stats.plain_reason is None
    assert stats.tier == "tree"
    assert stats.num_forwards < stats.num_drafts, "several rows share a forward"
    assert stats.num_draft_tokens > 0 or "draft_model" not in method


def test_rows_end_at_different_places(batches: Callable[[str, str], Batch]) -> None:
    """Else the tests above would not see a row leave."""
    lengths = [(batches("llama", "greedy").expected.sequences[row] != 0).sum() for row in range(len(PADDING))]
    assert len({int(length) + padding for length, padding in zip(lengths, PADDING, strict=True)}) >= 3


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TREES)
def test_a_sampled_row_is_its_prompt_alone(batches: Callable[[str, str], Batch], family: str, method: str) -> None:
    """Row r draws what plain `generate` of its prompt alone draws from seed r, whatever its neighbours are."""
    batch = batches(family, "greedy")
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    torch.manual_seed(5)
    output = batch.run(METHODS[method], return_dict_in_generate=True, **sampling)
    options = {**batch.options, **sampling}
    for row, seed in enumerate(output.spec_stats.seeds):
        torch.manual_seed(seed)
        alone = plain(batch.model, batch.ids[row : row + 1], **options | {"attention_mask": batch.mask[row : row + 1]})
        tokens = output.sequences[row, : alone.shape[1]]
        assert tokens.tolist() == alone[0].tolist()
        assert not output.sequences[row, alone.shape[1] :].any(), "padding follows"


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("method", METHODS)
def test_several_answers_to_each_prompt(batches: Callable[[str, str], Batch], family: str, method: str) -> None:
    batch = batches(family, "greedy")
    output = batch.run(METHODS[method], num_return_sequences=3, do_sample=True, return_dict_in_generate=True)
    assert len(output.sequences) == 3 * len(PADDING)
    assert len({tuple(row) for row in output.sequences.tolist()}) > len(PADDING)
    assert output.spec_stats.plain_reason is None
    torch.manual_seed(output.spec_stats.seeds[4])
    options = {**batch.options, "do_sample": True, "attention_mask": batch.mask[1:2]}
    alone = plain(batch.model, batch.ids[1:2], **options)[0]
    assert output.sequences[4, : len(alone)].tolist() == alone.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", TREES)
def test_random_trees_in_rows(batches: Callable[[str, str], Batch], family: str, seed: int) -> None:
    """Trees of any shape, each row's its own: another row's columns are never seen."""
    batch = batches(family, "greedy")
    texts = iter(batch.expected.sequences.tolist())
    rows = iter(range(len(PADDING)))
    output = batch.run({"spec_method": lambda: RandomTreeDrafter(next(texts), seed=10 * seed + next(rows))})
    assert output.tolist() == batch.expected.sequences.tolist()


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *FALLBACK) if name not in TREES])
def test_a_model_without_trees_decodes_its_batch_plainly(batches: Callable[[str, str], Batch], family: str) -> None:
    batch = batches(family, "greedy")
    output = batch.run(METHODS["prompt_lookup"], return_dict_in_generate=True)
    assert output.sequences.tolist() == batch.expected.sequences.tolist()
    assert output.spec_stats.plain_reason
