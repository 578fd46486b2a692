"""A draft model as its users meet it: pairs that go together or not, what a draft costs, and lossless sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import ConfigError, UnsupportedModelError
from tests.helpers.distributions import Comparison, compare_pairs
from tests.helpers.support import PROMPT, noisy_copy, plain
from tests.helpers.zoo import BASE, DECODER, FAMILIES, VOCAB_SIZE, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
ALWAYS: dict[str, Any] = {"confidence_threshold": 0.0}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    return model, noisy_copy(model)


def other(vocab_size: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": vocab_size})).eval()


def test_a_call_without_a_draft_model_says_what_to_pass(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"`assistant_model` must be given .*a smaller model"):
        pair[0].generate(PROMPT, spec_method="draft_model", **OPTIONS)
    with pytest.raises(ConfigError, match="must be a model that generates, but is 'str'"):
        pair[0].generate(PROMPT, spec_method="draft_model", assistant_model="gpt2", **OPTIONS)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 64, VOCAB_SIZE - 60])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "use_logits": True}])
def test_vocabularies_that_differ_by_padding_go_together(
    pair: tuple[Any, Any], vocab_size: int, sampling: dict[str, Any]
) -> None:
    """The draft's extra ids are never drafted, and the target's extra ones are never missed."""
    model, steps = pair[0], []
    options = {**OPTIONS, "do_sample": bool(sampling)}
    config = {**ALWAYS, "use_logits": bool(sampling)}
    torch.manual_seed(0)
    output = model.generate(
        PROMPT,
        spec_method="draft_model",
        assistant_model=other(vocab_size),
        spec_config=config,
        spec_observer=steps.append,
        **options,
    )
    assert all(token < VOCAB_SIZE for step in steps for token in step.tree.tokens)
    assert sum(step.tree.num_draft_tokens for step in steps) > 20
    if not sampling:
        assert output.tolist() == plain(model, PROMPT, **options).tolist()


def test_vocabularies_of_different_tokenizers_are_refused_with_both_sizes(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="the target has 128 token ids, the draft 5000.*assistant_tokenizer"):
        pair[0].generate(PROMPT, spec_method="draft_model", assistant_model=other(5000), **OPTIONS)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_draft_with_an_encoder_of_its_own_is_refused(zoo: Callable[[str], Any], family: str) -> None:
    with pytest.raises(ConfigError, match="must be a decoder, with no encoder of its own.*WhisperForCausalLM"):
        zoo(family).generate(PROMPT, spec_method="draft_model", assistant_model=build(FAMILIES["t5"]), **OPTIONS)


def test_a_draft_that_cannot_forget_is_refused(pair: tuple[Any, Any], zoo: Callable[[str], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="forget rejected tokens, but RecurrentGemmaForCausalLM is not"):
        pair[0].generate(PROMPT, spec_method="draft_model", assistant_model=zoo("recurrent_gemma"), **OPTIONS)


def test_a_draft_that_returns_nan_is_refused_by_that_name(pair: tuple[Any, Any]) -> None:
    draft = noisy_copy(pair[0])
    torch.nn.init.constant_(draft.model.norm.weight, float("nan"))
    with pytest.raises(UnsupportedModelError, match="its logits are NaN. Check its weights"):
        pair[0].generate(PROMPT, spec_method="draft_model", assistant_model=draft, **OPTIONS)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("config", [ALWAYS, {**ALWAYS, "num_branches": 3, "max_nodes": 10}])
def test_the_drafts_cache_is_never_rebuilt(pair: tuple[Any, Any], config: dict[str, Any]) -> None:
    """It reads the prompt once; after that each token of the text at most once, and the nodes of its trees."""
    model, draft = pair
    fed: list[int] = []
    handle = draft.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    hf_specdec.capability(draft)
    fed.clear()
    steps: list[Any] = []
    try:
        model.generate(
            PROMPT,
            spec_method="draft_model",
            assistant_model=draft,
            spec_config=config,
            spec_observer=steps.append,
            **OPTIONS,
        )
    finally:
        handle.remove()
    assert fed.count(PROMPT.shape[1]) == 1, "the prompt was read once"
    drafted = sum(step.tree.num_draft_tokens for step in steps)
    assert sum(fed) - PROMPT.shape[1] <= OPTIONS["max_new_tokens"] + 2 * drafted
    assert len(fed) - 1 <= 4 * len(steps), "at most draft_len forwards a step"


def test_a_prompt_that_the_draft_has_no_positions_for_is_decoded_without_drafts(pair: tuple[Any, Any]) -> None:
    model = pair[0]
    torch.manual_seed(0)
    short = GPT2LMHeadModel(GPT2Config(**{**BASE, "max_position_embeddings": PROMPT.shape[1] - 4})).eval()
    for ids in (PROMPT, torch.cat([PROMPT, PROMPT.roll(2, dims=1)])):
        wanted = {"assistant_model": short, "return_dict_in_generate": True, **OPTIONS}
        output = model.generate(ids, spec_method="draft_model", spec_config=ALWAYS, **wanted)
        assert output.sequences.tolist() == plain(model, ids, **OPTIONS).tolist()
        assert output.spec_stats.plan.plain_reason == "the draft model has no positions for all of its prompt"
        output = model.generate(ids, spec_method="auto", **wanted)
        assert output.sequences.tolist() == plain(model, ids, **OPTIONS).tolist()
        assert (output.spec_stats.plan.way, output.spec_stats.plan.network) == ("tree", None)


def test_a_draft_that_reads_no_encoder_is_refused_beside_one(zoo: Callable[[str], Any], pair: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="must read the target's encoder.*without one"):
        zoo("t5").generate(PROMPT, spec_method="draft_model", assistant_model=pair[1], **OPTIONS)


# Losslessness: 2 tokens out of the 4 likeliest, 16 cells.
NUM_TEXTS = 1600
WARPS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5, "top_k": 4},
    "top_p": {"temperature": 2.0, "top_k": 4, "top_p": 0.95},
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"draft_len": 3},
    "tree": {"draft_len": 2, "num_branches": 3, "max_nodes": 9},
}


@pytest.fixture(scope="module")
def far_pair() -> tuple[Any, Any]:
    """A draft that is wrong more often than right, where a wrong rule has the most to spoil."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    return model, noisy_copy(model, noise=0.5)


def compared(pair: tuple[Any, Any], logits_processor: str, shape: str) -> Comparison:
    """Texts whose drafts were drawn."""
    config = {**ALWAYS, "use_logits": True, **SHAPES[shape]}
    how = {"spec_method": "draft_model", "spec_config": config, "assistant_model": pair[1]}
    return compare_pairs(pair[0], WARPS[logits_processor], num_texts=NUM_TEXTS, **how)


@pytest.mark.wide
@pytest.mark.parametrize("logits_processor", WARPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_sampling_leaves_the_targets_distribution(
    far_pair: tuple[Any, Any], logits_processor: str, shape: str
) -> None:
    """Odds of a right run failing: one in a million."""
    result = compared(far_pair, logits_processor, shape)
    assert result.statistic < result.bound
    assert result.num_accepted > NUM_TEXTS / 20, "some drafts are accepted"
