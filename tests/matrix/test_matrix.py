"""Every method on every family, in every mode: the same tokens as plain `generate`, seed for seed.

A further family is a line of `tests/helpers/zoo.py`, a further method a line of `METHODS`.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.compat.caches import CACHE
from hf_specdec.errors import SpecError
from tests.helpers.support import DRAFTS, PROMPT, assert_same_cache, plain, speculative
from tests.helpers.zoo import FALLBACK, FAMILIES, Family

NEW_TOKENS = 20
METHODS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "plain": lambda _: {"spec_method": "plain"},
    "prompt_lookup": lambda _: {"spec_method": "prompt_lookup", "spec_config": {"draft_len_per_match": 4}},
    "auto_tree": lambda _: {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    "lookahead": lambda _: {"spec_method": "lookahead", "lookahead_config": [4, 3, 5]},
    "auto": lambda _: {"spec_method": "auto"},
    "auto, 9 nodes": lambda _: {"spec_method": "auto", "spec_config": {"num_nodes": 9}},
    "draft_model": lambda _: {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0}},
    "draft_model_tree": lambda _: {
        "spec_method": "draft_model",
        "spec_config": {"num_branches": 3, "confidence_threshold": 0.0},
    },
    "oracle": DRAFTS["oracle"],
    "random_trees": DRAFTS["random_trees"],
}
TREES_ONLY = ("lookahead",)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
}
CACHES = ("no_cache", "cache")
RETURN = {"return_dict_in_generate": True, "max_new_tokens": NEW_TOKENS}


def is_refused(method: str, family: Family) -> bool:
    """Whether a method has no use on chains, or its draft would have an encoder of its own."""
    has_two_encoders = "draft_model" in method and family.is_seq2seq
    return has_two_encoders or (method in TREES_ONLY and family.tier == "chain")


class Cell:
    """One family in one mode: the inputs, and what plain `generate` makes of them. Built once for all tests."""

    def __init__(self, model: Any, draft: Any, mode: str, cache: str) -> None:
        self.model, self.draft, self.mode = model, draft, MODES[mode]
        self.inputs = _chat_turn(model) if cache == "cache" else {"input_ids": PROMPT}
        self.expected, self.random_state, self.cache = self.run(plain, {})

    @property
    def expected_ids(self) -> list[int]:
        ids: list[int] = self.expected.sequences[0].tolist()
        return ids

    def run(self, generate: Callable[..., Any], method: dict[str, Any]) -> tuple[Any, torch.Tensor, Any]:
        """The output, the random generator's state after it, and the cache that was passed in."""
        inputs = copy.deepcopy(self.inputs)
        torch.manual_seed(7)
        if method.get("spec_method") == "draft_model":
            method = {**method, "assistant_model": self.draft}
        output = generate(self.model, **inputs, **self.mode, **RETURN, **method)
        return output, torch.get_rng_state(), inputs.get(CACHE)


def _chat_turn(model: Any) -> dict[str, Any]:
    """Inputs of a second chat turn: the first one's text and cache, with a few tokens more."""
    first = plain(model, PROMPT, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    text = torch.cat([first.sequences, torch.tensor([[8, 9, 10, 5, 6, 7]])], dim=1)
    inputs: dict[str, Any] = {CACHE: first[CACHE]}
    if model.config.is_encoder_decoder:
        return inputs | {
            "input_ids": PROMPT,
            "decoder_input_ids": text,
            "decoder_attention_mask": torch.ones_like(text),
        }
    return inputs | {"input_ids": text}


@pytest.fixture(scope="session")
def cells(zoo: Callable[[str], Any], draft_of: Callable[[str], Any]) -> Callable[[str, str, str], Cell]:
    seen: dict[tuple[str, str, str], Cell] = {}

    def cell(family: str, mode: str, cache: str) -> Cell:
        key = (family, mode, cache)
        if key not in seen:
            seen[key] = Cell(zoo(family), draft_of(family), mode, cache)
        return seen[key]

    return cell


@pytest.mark.pairwise("method", "mode")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_nothing(
    cells: Callable[[str, str, str], Cell], family: str, method: str, mode: str, cache: str
) -> None:
    """The same tokens, the same draws, the same cache as plain `generate`."""
    cell = cells(family, mode, cache)
    if is_refused(method, FAMILIES[family]):
        with pytest.raises(SpecError, match="prompt_lookup|no encoder of its own"):
            cell.run(speculative, METHODS[method](cell.expected_ids))
        return
    output, random_state, used_cache = cell.run(speculative, METHODS[method](cell.expected_ids))

    assert output.sequences.tolist() == cell.expected.sequences.tolist()
    assert torch.equal(random_state, cell.random_state)
    assert type(output) is type(cell.expected) or isinstance(output, type(cell.expected))
    assert_same_cache(output[CACHE], cell.expected[CACHE])
    if used_cache is not None:
        assert_same_cache(used_cache, cell.cache)

    stats = output.spec_stats
    assert stats.num_tokens == NEW_TOKENS
    if method == "plain":
        assert stats.num_draft_tokens == 0
        return
    assert stats.tier == FAMILIES[family].tier, stats.plain_reason
    assert stats.plain_reason is None
    if method == "oracle":
        assert stats.num_accepted_tokens >= NEW_TOKENS // 4


# Whether auto without a fixed number of nodes drafts in so short a text depends on the clock.
@pytest.mark.at_most(10)
@pytest.mark.each_value
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("plain", "auto")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_method_accepts_drafts_on_this_family(
    cells: Callable[[str, str, str], Cell], family: str, method: str
) -> None:
    """Equality without a single accepted token would prove nothing."""
    if is_refused(method, FAMILIES[family]):
        return
    runs = (
        (cell := cells(family, mode, "no_cache")).run(speculative, METHODS[method](cell.expected_ids)) for mode in MODES
    )
    assert any(output.spec_stats.num_accepted_tokens for output, _, _ in runs)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.tier == "tree"])
def test_accepted_nodes_lie_apart_in_the_tree(cells: Callable[[str, str, str], Cell], family: str) -> None:
    """On the tree tier the oracle's right tokens stand behind wrong ones, so the cache's columns have to move."""
    cell, paths = cells(family, "greedy", "no_cache"), []
    cell.run(
        speculative, METHODS["oracle"](cell.expected_ids) | {"spec_observer": lambda step: paths.append(step.path)}
    )
    assert any(path != tuple(range(len(path))) for path in paths)
    assert max(len(path) for path in paths) >= 4


@pytest.mark.each_value
@pytest.mark.parametrize("family", FALLBACK)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_cannot_speculate_decodes_plainly(
    cells: Callable[[str, str, str], Cell], family: str, method: str, mode: str
) -> None:
    """The same result, and the reason in the statistics."""
    cell = cells(family, mode, "no_cache")
    if is_refused(method, FALLBACK[family]):
        with pytest.raises(SpecError, match="no encoder of its own"):
            cell.run(speculative, METHODS[method](cell.expected_ids))
        return
    output, random_state, _ = cell.run(speculative, METHODS[method](cell.expected_ids))
    assert output.sequences.tolist() == cell.expected.sequences.tolist()
    assert torch.equal(random_state, cell.random_state)
    assert output.spec_stats.tier == "plain"
    assert output.spec_stats.plain_reason
    assert output.spec_stats.num_draft_tokens == 0
