"""An assistant of Gemma 4 as the draft model: the text of plain `generate`, drafts of transformers' own network."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.gemma import build_gemma, draft_chain, fitted_assistant, random_assistant
from tests.helpers.support import PROMPT, plain

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
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered embeddings": {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3},
}


@pytest.fixture(scope="module", params=[2, 0], ids=["shared layers", "no shared layers"])
def model(request: pytest.FixtureRequest) -> Any:
    return build_gemma(num_kv_shared_layers=request.param)


@pytest.fixture(scope="module")
def target() -> Any:
    return build_gemma()


def always(config: dict[str, Any]) -> dict[str, Any]:
    """Drafts at every step, whatever was accepted before."""
    return {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0, **config}}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_greedy_text_is_that_of_plain_generation(model: Any, inputs: str, cache: str, shape: str, kind: str) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, **INPUTS[inputs], **CACHES[cache]}
    ours = model.generate(
        **options,
        assistant_model=random_assistant(**KINDS[kind]),
        return_dict_in_generate=True,
        **always(SHAPES[shape]),
    )
    assert torch.equal(ours.sequences, plain(model, **options))
    assert ours.spec_stats.num_draft_tokens > 0


@pytest.mark.parametrize("cache", CACHES)
def test_a_seed_gives_the_text_that_it_gives_without_drafts(target: Any, cache: str) -> None:
    """One prompt follows plain generation's draws; each row of a batch its own generator, whatever is drafted."""
    assistant = random_assistant()
    for inputs, reference in (("one prompt", None), ("padded batch", "plain")):
        options = {"max_new_tokens": 10, **SAMPLED, **INPUTS[inputs], **CACHES[cache]}
        torch.manual_seed(5)
        expected = plain(target, **options) if reference is None else target.generate(**options, spec_method=reference)
        torch.manual_seed(5)
        assert torch.equal(target.generate(**options, assistant_model=assistant, **always(SHAPES["tree"])), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafts_are_those_of_transformers_network_over_the_targets_keys(target: Any, attention: str) -> None:
    """Each step's chain is what the assistant drafts from keys and states that the target computes anew."""
    assistant = random_assistant()
    assistant.set_attn_implementation(attention)
    steps: list[Any] = []
    out = target.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=assistant,
        spec_observer=steps.append,
        **always({"num_branches": 1}),
    )
    with torch.no_grad():
        read = target(out, output_hidden_states=True, return_shared_kv_states=True)
        length, compared = PROMPT.shape[1] + 1, 0
        for step in steps:
            depth = len(step.tree) - 1
            drafted, _ = draft_chain(assistant, target, out[:, :length], read, depth)
            assert list(step.tree.tokens[1:]) == drafted
            compared += depth
            length += len(step.accepted)
    assert length == out.shape[1]
    assert compared > 20


def test_as_many_drafts_are_accepted_as_in_transformers_own_loop(target: Any) -> None:
    """An assistant that was fitted to the text, the same prompt and length: fewer forwards, or as many."""
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    prompt = PROMPT[:, :12]
    expected = plain(target, prompt, **options)
    assistant = fitted_assistant(target, expected, start=13)
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    theirs = plain(target, prompt, assistant_model=assistant, **options)
    handle.remove()
    assert torch.equal(theirs, expected)
    ours = target.generate(prompt, assistant_model=assistant, return_dict_in_generate=True, **options, **always({}))
    assert torch.equal(ours.sequences, expected)
    assert len(forwards) < 17, "the assistant was fitted, so that transformers' loop accepts"
    assert ours.spec_stats.num_forwards + 1 <= len(forwards)


def test_generate_many_keeps_every_text(target: Any) -> None:
    prompts = [PROMPT[0, start : start + length] for start, length in ((0, 9), (3, 14), (8, 2), (1, 20), (5, 1))]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    expected = [plain(target, prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    found = hf_specdec.generate_many(
        target, prompts, max_batch_size=2, assistant_model=random_assistant(), **options, **always(SHAPES["tree"])
    )
    ours = {result.index: result.token_ids for result in found}
    assert [ours[index] for index in range(len(prompts))] == expected


def test_auto_takes_it_as_one_more_source_from_its_folder(target: Any, tmp_path: Path) -> None:
    random_assistant().save_pretrained(tmp_path)
    head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path)
    expected = plain(target, PROMPT, max_new_tokens=16, do_sample=False)
    config = {"num_nodes": 8, "pool": "request"}
    for how in ({"spec_method": "auto", "spec_config": config}, always({})):
        ours = target.generate(PROMPT, max_new_tokens=16, do_sample=False, assistant_model=head, **how)
        assert torch.equal(ours, expected)


def test_an_assistant_for_another_target_is_refused_with_both_sizes(target: Any, zoo: Any) -> None:
    def generate(assistant: Any, model: Any = target, **options: Any) -> None:
        model.generate(PROMPT, max_new_tokens=4, spec_method="draft_model", assistant_model=assistant, **options)

    with pytest.raises(ConfigError, match=r"hidden_size 48, but is 'a head for 64'"):
        generate(random_assistant(backbone_hidden_size=64))
    with pytest.raises(ConfigError, match=r"sizes .*\(2, 12\).*a head that reads .*\(2, 20\)"):
        generate(random_assistant(text={"head_dim": 20}))
    with pytest.raises(ConfigError, match=r"key/value heads and their sizes \{\}"):
        generate(random_assistant(), zoo("llama"))
    with pytest.raises(ConfigError, match="engine"):
        generate(random_assistant(), spec_config={"engine": "assisted"})
