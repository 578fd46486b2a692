"""`cache_implementation="static"` and a `StaticCache` of the caller's: plain generate's tokens, shapes that stay."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StaticCache
from transformers.masking_utils import create_masks_for_generate

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.engine.model_state import state_of
from tests.helpers.support import PROMPT, assert_same_cache, assert_same_run, both, noisy_copy, plain, run, speculative
from tests.helpers.zoo import FAMILIES, build
from tests.matrix.test_batches import METHODS
from tests.promise.conftest import Draft

NAMES = ["llama", "qwen3", "gpt2", "mistral", "gemma3", "deepseek_v3", "gpt_oss"]
SEVERAL = ["llama", "mistral", "gemma3", "gpt_oss"]
STATIC = {"cache_implementation": "static"}
MORE = torch.tensor([[8, 9, 10, 5, 6, 7]])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "penalty": {"repetition_penalty": 1.3},
}
OF_OTHER_MODELS = {"block_sequence_ids", "token_type_ids", "mm_token_type_ids", "is_first_iteration"}
Recorded = Callable[[Any], list[dict[str, tuple[int, ...]]]]


@pytest.fixture(scope="session")
def method_of(zoo: Callable[[str], Any]) -> Callable[[str, str], dict[str, Any]]:
    """The arguments of a method on a family, its draft model among them."""
    draft_of = functools.cache(lambda family: noisy_copy(zoo(family)))

    def arguments(family: str, method: str) -> dict[str, Any]:
        draft = {"assistant_model": draft_of(family)} if "draft_model" in method else {}
        return METHODS[method] | draft

    return arguments


@pytest.fixture
def shapes_of() -> Iterator[Recorded]:
    """Records the shapes of all tensors that reach a model's forward."""
    hooks = []

    def record(model: Any) -> list[dict[str, tuple[int, ...]]]:
        shapes: list[dict[str, tuple[int, ...]]] = []

        def look(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            assert not args
            named = {**kwargs, **(kwargs["attention_mask"] if isinstance(kwargs.get("attention_mask"), dict) else {})}
            shapes.append({name: tuple(v.shape) for name, v in named.items() if isinstance(v, torch.Tensor)})

        hooks.append(model.register_forward_pre_hook(look, with_kwargs=True))
        state_of(model).findings.of(model).batch_fallback_reason(model)  # tried now, not in the call
        shapes.clear()
        return shapes

    yield record
    for hook in hooks:
        hook.remove()


def assert_shapes_follow_from_the_width(steps: list[dict[str, tuple[int, ...]]]) -> None:
    """One set of shapes for each width, and few widths: powers of two and the largest."""
    by_width = {step["input_ids"][1]: step for step in steps}
    assert all(step == by_width[step["input_ids"][1]] for step in steps)
    assert sum(width & (width - 1) > 0 for width in by_width) <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", NAMES)
def test_the_tokens_are_plain_generates(
    zoo: Callable[[str], Any],
    method_of: Callable[[str, str], dict[str, Any]],
    shapes_of: Recorded,
    family: str,
    method: str,
    mode: str,
) -> None:
    """The same tokens, draws and cache; after the prompt the shapes of a forward follow from its width."""
    model, arguments = zoo(family), method_of(family, method)
    options = {"max_new_tokens": 20} | STATIC | MODES[mode]
    reference = run(model, plain, lambda: dict(options))
    hf_specdec.capability(model)
    shapes = shapes_of(model)
    ours = run(model, speculative, lambda: dict(options), **arguments)
    assert_same_run(ours, reference)
    assert type(ours.output[CACHE]) is StaticCache
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])
    assert ours.stats.tier == "tree"
    assert ours.stats.plain_reason is None
    measured = method == "auto"  # forwards that were timed, of the same shapes, are not the text's
    assert ours.stats.num_forwards == len(shapes) - 1 or (measured and ours.stats.num_forwards < len(shapes) - 1)
    assert_shapes_follow_from_the_width(shapes[1:])
    assert shapes[1]["input_ids"] == shapes[1]["position_ids"]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "plain"])
def test_drafts_are_accepted(
    zoo: Callable[[str], Any], method_of: Callable[[str, str], dict[str, Any]], family: str, method: str
) -> None:
    """Equality without a single accepted token would prove nothing."""
    settings = ({"max_new_tokens": 20} | STATIC | mode for mode in MODES.values())
    arguments = method_of(family, method)
    runs = (run(zoo(family), speculative, functools.partial(dict, options), **arguments) for options in settings)
    assert any(ours.stats.num_accepted_tokens for ours in runs)


def padded_batch() -> dict[str, Any]:
    """Three rows, two of them padded on the left."""
    ids = torch.stack([PROMPT[0].roll(3 * row) for row in range(3)])
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 7, 2)):
        ids[row, :padding] = mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", NAMES)
def test_a_padded_batch_is_plain_generates(
    zoo: Callable[[str], Any],
    method_of: Callable[[str, str], dict[str, Any]],
    shapes_of: Recorded,
    family: str,
    method: str,
) -> None:
    """Rows accept different numbers of drafts and end at different places; none leaves, so the shapes stay."""
    model, arguments = zoo(family), method_of(family, method)
    batch = padded_batch()
    options = {**batch, **STATIC, "max_new_tokens": 24, "do_sample": False}
    free = plain(model, **options)
    options["eos_token_id"] = [int(free[0, -9]), int(free[1, -3])]
    reference = plain(model, **options, return_dict_in_generate=True)
    speculative(model, **options | {"max_new_tokens": 1}, **arguments)  # the probes
    shapes, steps = shapes_of(model), []
    output = speculative(
        model, **options, return_dict_in_generate=True, spec_observer=lambda step: steps.append(step), **arguments
    )
    assert output.sequences.tolist() == reference.sequences.tolist()
    assert_same_cache(output[CACHE], reference[CACHE])
    assert output.spec_stats.plain_reason is None
    assert_shapes_follow_from_the_width(shapes[1:])
    assert shapes[1]["input_ids"][0] == 3
    assert speculative(model, **options, **arguments).tolist() == reference.sequences.tolist()
    counts = [[len(step.accepted) for step in steps if step.index == index] for index in {step.index for step in steps}]
    if method == "draft_model":
        assert any(len(set(count)) > 1 for count in counts), "rows must differ"


@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.parametrize("method", METHODS)
def test_a_sampled_row_is_its_prompt_alone(
    zoo: Callable[[str], Any], method_of: Callable[[str, str], dict[str, Any]], family: str, method: str
) -> None:
    model, batch = zoo(family), padded_batch()
    options = {**STATIC, "max_new_tokens": 16, "do_sample": True, "top_k": 20}
    output = speculative(model, **batch, **options, return_dict_in_generate=True, **method_of(family, method))
    for row, seed in enumerate(output.spec_stats.seeds):
        torch.manual_seed(seed)
        alone = plain(model, **{name: value[row : row + 1] for name, value in batch.items()}, **options)
        assert output.sequences[row].tolist() == alone[0].tolist()


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("length", [5, 10, 30])
@pytest.mark.parametrize("ours", [(1,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_a_conversation_with_one_cache_is_the_same_whoever_answers(
    zoo: Callable[[str], Any], draft: Draft, family: str, length: int, ours: tuple[int, ...]
) -> None:
    """Four turns from before the window is full to far beyond it; in `ours` the turns that are drafted."""
    model = zoo(family)
    cache, expected_cache = (StaticCache(model.config, max_cache_len=128) for _ in range(2))
    text = PROMPT[:, :length]
    for turn in range(4):
        options = {"max_new_tokens": 8, "do_sample": False}
        expected = plain(model, text, **{CACHE: expected_cache}, **options)
        method = draft(expected[0].tolist()) if turn in ours else {}
        answer = speculative(model, text, **{CACHE: cache}, **options, **method)
        assert answer.tolist() == expected.tolist()
        assert_same_cache(cache, expected_cache)
        text = torch.cat([answer, MORE], dim=1)


def test_the_callers_buffers_are_written_in_place(model: Any, draft: Draft) -> None:
    """A compiled plain decoding that goes on with the cache finds it where it was."""
    cache = StaticCache(model.config, max_cache_len=64)
    first = plain(model, PROMPT, **{CACHE: cache}, max_new_tokens=4, do_sample=False)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    expected = plain(model, first, max_new_tokens=8, do_sample=False)
    output = speculative(
        model,
        first,
        **{CACHE: cache},
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        **draft(expected[0].tolist()),
    )
    assert output.sequences.tolist() == expected.tolist()
    assert output[CACHE] is cache
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


@pytest.mark.parametrize("family", SEVERAL)
def test_only_the_new_tokens_may_be_given_with_a_full_mask(
    zoo: Callable[[str], Any], draft: Draft, family: str
) -> None:
    model = zoo(family)
    first = run(model, plain, lambda: {CACHE: StaticCache(model.config, max_cache_len=64)})
    new = torch.cat([first.output.sequences[:, -1:], MORE], dim=1)
    total = int(first.output[CACHE].get_seq_length()) + new.shape[1]

    def make() -> dict[str, Any]:
        return {
            "input_ids": new,
            "attention_mask": torch.ones(1, total, dtype=torch.long),
            CACHE: copy.deepcopy(first.output[CACHE]),
            "max_new_tokens": 64 - total + 1,  # the last of them needs no column
        }

    reference, ours = both(model, make, draft)
    assert_same_run(ours, reference)
    assert_same_cache(ours.output[CACHE], reference.output[CACHE])
    if family == "mistral":  # all its layers have a window, which no text outgrows
        return
    with pytest.raises(hf_specdec.ConfigError, match="at least 65"):
        run(model, speculative, lambda: make() | {"max_new_tokens": 64 - total + 2}, **draft(reference.ids))


@pytest.mark.at_most(3)
@pytest.mark.parametrize("by", ["generation_config", "model", "custom_generate", "chunks", "embeddings"])
def test_every_way_in_is_served(model: Any, draft: Draft, by: str) -> None:
    def make() -> dict[str, Any]:
        if by == "generation_config":
            settings = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 16, "pad_token_id": 0}
            return {"generation_config": GenerationConfig(**STATIC, **settings)}
        if by == "chunks":
            return STATIC | {"prefill_chunk_size": 7}
        if by == "embeddings":
            return STATIC | {"inputs_embeds": model.get_input_embeddings()(PROMPT).detach()}
        return {} if by == "model" else dict(STATIC)

    before = model.generation_config
    if by == "model":
        model.generation_config = GenerationConfig(**STATIC, pad_token_id=0)
    try:
        reference = run(model, plain, make)
        coming = (PROMPT[0].tolist() if by == "embeddings" else []) + reference.ids
        method = draft(coming) if by != "embeddings" else METHODS["prompt_lookup"]
        if by == "custom_generate":
            ours = run(hf_specdec.disable(model), plain, make, custom_generate=hf_specdec.decode, **method)
        else:
            ours = run(model, speculative, make, **method)
    finally:
        model.generation_config = before
        hf_specdec.enable(model)
    assert_same_run(ours, reference)
    assert type(ours.output[CACHE]) is StaticCache
    assert ours.stats.plain_reason is None


def test_what_is_returned_of_every_token_is_the_same(model: Any, draft: Draft) -> None:
    options = STATIC | {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    reference, ours = both(model, lambda: dict(options), draft)
    for name in ("scores", "logits"):
        for mine, other in zip(getattr(ours.output, name), getattr(reference.output, name), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    for mine, other in zip(ours.output.hidden_states, reference.output.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], other[-1], atol=1e-4, rtol=1e-4)


def test_a_prompts_mask_is_the_one_made_for_static_caches() -> None:
    """PaliGemma and its like have a function of their own for it, whose mask differs from their forward's."""
    model = build(FAMILIES["llama"])

    def seen_whole(inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        seen = {name: value for name, value in kwargs.items() if name not in OF_OTHER_MODELS}
        blocks = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long)
        return create_masks_for_generate(inputs_embeds=inputs_embeds, block_sequence_ids=blocks, **seen)

    model.create_masks_for_generate = seen_whole
    hf_specdec.enable(model)
    expected, ours = both(model, lambda: STATIC, lambda _: {"spec_method": "prompt_lookup"})
    assert expected.ids != run(model, plain, dict).ids
    assert_same_run(ours, expected)
