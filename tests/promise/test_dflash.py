"""`spec_method="dflash"`: the text of plain `generate`, drafts of transformers' own network, one forward a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.dflash import draft_block, fitted_dflash, random_dflash
from tests.helpers.support import PROMPT, plain

Zoo = Callable[[str], Any]
TARGETS = ("llama", "gemma3", "qwen3")
SHAPES = {"chain": {"num_branches": 1}, "tree": {"num_branches": 3, "draft_len": 4, "max_nodes": 9}}
BATCH = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [0, 0, 0, 0, 21, 22]])
INPUTS: dict[str, dict[str, Any]] = {
    "one prompt": {"input_ids": PROMPT},
    "padded batch": {"input_ids": BATCH, "attention_mask": (BATCH != 0).long()},
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


def always(config: dict[str, Any]) -> dict[str, Any]:
    """Drafts at every step, whatever was accepted before."""
    return {"spec_method": "dflash", "spec_config": {"confidence_threshold": 0.0, **config}}


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("family", TARGETS)
def test_greedy_text_is_that_of_plain_generation(zoo: Zoo, family: str, inputs: str, cache: str, shape: str) -> None:
    model = zoo(family)
    options = {"max_new_tokens": 14, "do_sample": False, **INPUTS[inputs], **CACHES[cache]}
    dflash = random_dflash(model)
    ours = model.generate(**options, assistant_model=dflash, return_dict_in_generate=True, **always(SHAPES[shape]))
    assert torch.equal(ours.sequences, plain(model, **options))
    assert ours.spec_stats.num_draft_tokens > 0


@pytest.mark.each_value
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", TARGETS)
def test_a_seed_gives_the_text_that_it_gives_without_drafts(zoo: Zoo, family: str, cache: str) -> None:
    """One prompt follows plain generation's draws; each row of a batch its own generator, whatever is drafted."""
    model = zoo(family)
    dflash = random_dflash(model)
    for inputs, reference in (("one prompt", None), ("padded batch", "plain")):
        options = {"max_new_tokens": 10, **SAMPLED, **INPUTS[inputs], **CACHES[cache]}
        torch.manual_seed(5)
        expected = plain(model, **options) if reference is None else model.generate(**options, spec_method=reference)
        torch.manual_seed(5)
        assert torch.equal(model.generate(**options, assistant_model=dflash, **always(SHAPES["tree"])), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafts_are_those_of_transformers_network_over_the_whole_text(model: Any, attention: str) -> None:
    """Each step's chain is what the network drafts with a cache made anew, windows included."""
    dflash = random_dflash(model)
    dflash.set_attn_implementation(attention)
    steps: list[Any] = []
    out = model.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=dflash,
        spec_observer=steps.append,
        **always({"num_branches": 1}),
    )
    with torch.no_grad():
        hidden = model(out, output_hidden_states=True).hidden_states
        length, compared = PROMPT.shape[1] + 1, 0
        for step in steps:
            drafted = draft_block(dflash, model, out[:, :length], hidden).argmax(-1)[0]
            depth = len(step.tree) - 1
            assert list(step.tree.tokens[1:]) == drafted[:depth].tolist()
            compared += depth
            length += len(step.accepted)
    assert length == out.shape[1]
    assert compared > 20


def test_as_many_drafts_are_accepted_as_in_transformers_own_loop(model: Any) -> None:
    """A head that was fitted to the text, the same prompt and length: fewer forwards of the target, or as many."""
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    prompt = PROMPT[:, :12]
    expected = plain(model, prompt, **options)
    dflash = fitted_dflash(model, expected, start=13)
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    theirs = plain(model, prompt, assistant_model=dflash, speculation_type="dflash", **options)
    handle.remove()
    assert torch.equal(theirs, expected)
    ours = model.generate(prompt, assistant_model=dflash, return_dict_in_generate=True, **options, **always({}))
    assert torch.equal(ours.sequences, expected)
    assert len(forwards) < 16, "the head was fitted, so that transformers' loop accepts"
    assert ours.spec_stats.num_forwards + 1 <= len(forwards)


def test_a_step_takes_one_forward_of_the_head_and_feeds_every_token_once(model: Any) -> None:
    dflash = random_dflash(model)
    fed: list[int] = []
    dflash.encoder.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    steps: list[Any] = []
    out = model.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=dflash,
        spec_observer=steps.append,
        **always(SHAPES["tree"]),
    )
    assert len(fed) <= len(steps)
    assert sum(fed) <= out.shape[1] - 1


def test_generate_many_keeps_every_text(model: Any) -> None:
    dflash = random_dflash(model)
    prompts = [PROMPT[0, start : start + length] for start, length in ((0, 9), (3, 14), (8, 2), (1, 20), (5, 1))]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    expected = [plain(model, prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    found = hf_specdec.generate_many(
        model, prompts, max_batch_size=2, assistant_model=dflash, **options, **always(SHAPES["tree"])
    )
    ours = {result.index: result.token_ids for result in found}
    assert [ours[index] for index in range(len(prompts))] == expected


def test_auto_takes_it_as_one_more_source_from_its_folder(model: Any, tmp_path: Path) -> None:
    random_dflash(model).save_pretrained(tmp_path)
    head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path)
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False)
    config = {"num_nodes": 8, "pool": "request"}
    for how in ({"spec_method": "auto", "spec_config": config}, always({})):
        assert torch.equal(
            model.generate(PROMPT, max_new_tokens=16, do_sample=False, assistant_model=head, **how), expected
        )


def test_a_head_for_another_target_is_refused_with_both_sizes(model: Any) -> None:
    def generate(head: Any, method: str = "dflash") -> None:
        model.generate(PROMPT, max_new_tokens=4, spec_method=method, assistant_model=head)

    with pytest.raises(ConfigError, match=r"hidden_size 48, but is 'a head for 64'"):
        generate(random_dflash(model, hidden_size=64))
    with pytest.raises(ConfigError, match=r"number of layers 3, but is 'a head that reads \(1, 10\)'"):
        generate(random_dflash(model, target_layer_ids=[0, 9]))
    with pytest.raises(ConfigError, match=r"vocab_size 128, but is 'a head with mask_token_id 500'"):
        generate(random_dflash(model, mask_token_id=500))
    with pytest.raises(ConfigError, match=r'spec_method="dflash" for a head of this kind'):
        generate(random_dflash(model), "draft_model")
