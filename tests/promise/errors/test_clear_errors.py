"""Errors that name the field as the user wrote it, the rule, the value and the remedy, in one line."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import PerRow
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.distributed.placement import read_devices
from tests.helpers.support import PROMPT
from tests.helpers.zoo import VOCAB_SIZE

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a length below 1": (
        {"prompt_lookup_config": {"max_draft_len": -3}},
        "`max_draft_len` must be a whole number of at",
    ),
    "a device below 0": ({"prompt_lookup_config": [10, 2, [-1]]}, "`device_list` must"),
    "a method beside none": ({"spec_method": "none", "ngram_config": [3]}, 'Add spec_method="prompt_lookup"'),
    "a configuration of bytes": ({"spec_method": "prompt_lookup", "spec_config": b"[10]"}, "`spec_config` must be"),
    "a key that cannot be one": ({"spec_method": "prompt_lookup", "spec_config": "{[1]: 2}"}, "`spec_config` must be"),
    "a long n-gram": (
        {"prompt_lookup_config": {"max_matching_ngram_size": 10**9}},
        "at most 128, but is 1",
    ),
    "many nodes": (
        {"auto_config": {"max_nodes": 10**9}},
        "`max_nodes` must be a whole number of at least 1 and",
    ),
    "a window without bound": ({"lookahead_config": [4000, 100, 4000]}, "must leave at most 4096 tokens a step"),
    "an alias after its setting": (
        {"prompt_lookup_config": {"max_draft_len": 4, "num_draft_tokens": 5}},
        "`num_draft_tokens` must agree with `max_draft_len`",
    ),
    "a setting after its alias": (
        {"prompt_lookup_config": {"num_draft_tokens": 5, "max_draft_len": 4}},
        "`max_draft_len` must agree with `num_draft_tokens`",
    ),
    "a method's own argument": ({"lookahead_config": [7, 5]}, "`lookahead_config` must have 3 entries"),
    "a key of a method's own argument": ({"lookahead_config": {"window": 5}}, "`lookahead_config key` must be one of"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mistake_is_named(model: Any, call: str) -> None:
    kwargs, message = CALLS[call]
    with pytest.raises(ValueError, match="`") as error:
        model.generate(PROMPT, **({"max_new_tokens": 4} | kwargs))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("undone", [hf_specdec.disable, hf_specdec.enable])
@pytest.mark.parametrize("value", [None, 3, torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_named(undone: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError, match="`model` must be a transformers model"):
        undone(value)


class Drafting(hf_specdec.Drafter):
    """Drafts what a test gives it."""

    def __init__(self, draft: Callable[[int], Any]) -> None:
        self.draft = draft

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.last = prompt_ids[-1]

    def propose(self, budget: int) -> Any:
        return self.draft(self.last)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.last = accepted[-1]


DRAFTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a negative token": (lambda last: DraftTree.chain(last, [-1]), "`tree.tokens` must be at least 0, but is -1"),
    "an element of a tensor": (lambda last: DraftTree.chain(last, [torch.tensor(3)]), "must be whole numbers, but is"),
    "half a token": (lambda last: DraftTree.chain(last, [3.0]), "`tree.tokens` must be whole numbers, but is"),  # type: ignore[list-item]
    "another root": (lambda last: DraftTree.chain(last + 1, [4]), "last token of the text"),
    "nothing": (lambda last: None, "`propose` must return a DraftTree, but is None"),
    "a tree that was not built": (TreeBuilder, "Return builder.build()"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_is_none_is_named(model: Any, name: str) -> None:
    draft, message = DRAFTS[name]
    with pytest.raises(hf_specdec.SpecError) as error:
        model.generate(PROMPT, max_new_tokens=8, do_sample=True, spec_method=lambda: Drafting(draft))
    assert message in str(error.value)


def test_a_draft_of_tokens_beyond_the_vocabulary_leaves_the_text(model: Any) -> None:
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False).tolist()
    drafter = Drafting(lambda last: DraftTree.chain(last, [VOCAB_SIZE + 5, 3]))
    assert model.generate(PROMPT, max_new_tokens=8, do_sample=False, spec_method=drafter).tolist() == expected


def test_a_drafter_may_draft_numpys_integers(model: Any) -> None:
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    following = {int(token): expected[0, place + 1 : place + 2].numpy() for place, token in enumerate(expected[0])}

    def draft(last: int) -> DraftTree:
        return DraftTree.chain(last, following[last])

    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(PROMPT, **call, spec_method=lambda: Drafting(draft))
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > 0


class Unwritten(hf_specdec.Drafter):
    """Lacks two methods."""

    def begin(self, prompt_ids: Sequence[int]) -> None: ...


@pytest.mark.parametrize(
    ("value", "words"), [(Unwritten, "must define observe, propose"), (int, "must return a Drafter, but is 0")]
)
def test_what_makes_no_drafter_is_named(model: Any, value: Any, words: str) -> None:
    with pytest.raises(hf_specdec.ConfigError, match=f"`spec_method` {words}"):
        model.generate(PROMPT, max_new_tokens=4, spec_method=value)


def test_one_drafter_serves_one_of_many_prompts_at_a_time(model: Any) -> None:
    """Two texts at once would be told to it as one."""
    prompts = [[5, 6, 7], [8, 9]]
    job = {"max_new_tokens": 4, "do_sample": False}
    drafter = Drafting(DraftTree.chain)
    with pytest.raises(hf_specdec.ConfigError, match="`spec_method` must make a drafter for each sequence of a batch"):
        list(hf_specdec.generate_many(model, prompts, **job, spec_method=drafter))
    alone = {
        r.index: r.token_ids
        for r in hf_specdec.generate_many(model, prompts, **job, spec_method=lambda: Drafting(DraftTree.chain))
    }
    after = hf_specdec.generate_many(model, prompts, **job, spec_method=drafter, max_batch_size=1)
    assert {r.index: r.token_ids for r in after} == alone


@pytest.mark.parametrize("name", [256, 10**30, "cpu:256", "\udc80"])
def test_a_device_number_that_torch_would_wrap_is_no_device(name: int | str) -> None:
    """torch keeps the last eight bits of a number."""
    with pytest.raises(ValueError, match="`device_list` must name devices"):
        read_devices([name])


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a method while loading": (
        lambda m: hf_specdec.AutoModelForCausalLM.from_pretrained(
            hf_specdec.embedded.path("target"), spec_method="auto"
        ),
        "`spec_method` must be an argument of generate, not of from_pretrained",
    ),
    "a misspelt size": (lambda m: many(m, batch_size=2), "Did you mean 'max_batch_size'"),
    "numbers that are none": (lambda m: many(m, indices=["a"]), "`indices` must hold a whole number for every prompt"),
    "a tokenizer's name as bytes": (lambda m: many(m, tokenizer=b"gpt2"), "`tokenizer` must be a tokenizer, but is b'"),
    "devices as bytes": (
        lambda m: hf_specdec.DraftModelConfig(draft_model_device_list=b"0"),
        "`draft_model_device_list` must be a non-empty list",
    ),
    "a tokenizer's name": (lambda m: many(m, tokenizer="gpt2"), "`tokenizer` must be a tokenizer, but is 'gpt2'"),
    "a row without a processor": (
        lambda m: m.generate(PROMPT, max_length=40, spec_method="auto", logits_processor=[PerRow(lambda row: None)]),
        "`make` must return a processor or a criterion",
    ),
    "a row of many without a processor": (
        lambda m: many(m, logits_processor=[PerRow(lambda row: None)]),
        "`make` must return a processor or a criterion",
    ),
    "no path": (lambda m: hf_specdec.AutoModelForCausalLM.from_pretrained(None), "`path` must be a folder or a name"),
    "a dtype's name": (
        lambda m: hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"), dtype="fp32"),
        "`dtype` must be a torch.dtype",
    ),
    "no target": (lambda m: hf_specdec.AutoDraftHead.from_pretrained("x", target=5), "`target` must be a transformers"),
    "no lookahead": (lambda m: hf_specdec.max_draft_len(0, 5, 5), "`window_size` must be a whole number of at least 1"),
}


def many(model: Any, **kwargs: Any) -> list[hf_specdec.ManyResult]:
    results = list(hf_specdec.generate_many(model, [PROMPT], max_new_tokens=2, **kwargs))
    for result in results:
        if result.error is not None:
            raise result.error
    return results


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_argument_is_named_before_anything_is_computed(model: Any, mistake: str) -> None:
    call, message = WRONG[mistake]
    with pytest.raises(hf_specdec.SpecError) as error:
        call(model)
    assert message in str(error.value)
