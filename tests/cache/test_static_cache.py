"""`StaticSpecCache` holds what a `StaticCache` would hold after the same accepted tokens, in buffers that stay."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, MistralConfig, StaticCache

from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.text_rows import TokenBuffer
from tests.helpers.support import PROMPT, assert_same_cache, plain

LAYERS, HEADS, HEAD_DIM, LONGEST = 2, 2, 4, 64
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_size": HEADS * HEAD_DIM,
}
CONFIGS = {"full": LlamaConfig(**SIZES), "sliding": MistralConfig(sliding_window=8, **SIZES)}


def step(num_tokens: int, batch: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (batch, HEADS, num_tokens, HEAD_DIM)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]


def forward(cache: Any, new: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a model's forward does to a cache; returns what each layer attends to."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(new)]


def after_prompt(prompt: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int = LONGEST) -> StaticSpecCache:
    ours = StaticSpecCache.of(StaticCache(CONFIGS["full"], max_cache_len=LONGEST), capacity=capacity)
    assert ours is not None
    forward(ours, prompt)
    ours.sync()
    return ours


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("text", [0, 3, 7, 8, 9, 20])
def test_an_adopted_cache_comes_back_as_plain_decoding_would_have_left_it(kind: str, text: int) -> None:
    """Taken over at any length, around the window's too, and given back after a few steps."""
    theirs, reference = (StaticCache(CONFIGS[kind], max_cache_len=LONGEST) for _ in range(2))
    if text:
        prompt = step(text)
        for cache in (theirs, reference):
            forward(cache, prompt)
    ours = StaticSpecCache.of(theirs, capacity=LONGEST)
    assert ours is not None
    assert ours.get_seq_length() == text
    if not text:  # the prompt is ours to read
        prompt = step(1)
        for cache in (ours, reference):
            forward(cache, prompt)
        ours.sync()
    for path in ([0, 2], [0], [0, 1, 4]):
        draft = step(5)
        ours.place(5)
        forward(ours, draft)
        ours.commit([path])
        for column in path:  # plain decoding: one token after the other
            forward(reference, [(keys[:, :, [column]], values[:, :, [column]]) for keys, values in draft])
    ours.export(theirs)
    following = step(1)
    for _ in range(2):
        for (keys, values), (expected_keys, expected_values) in zip(
            forward(theirs, following), forward(reference, following), strict=True
        ):
            assert torch.equal(keys, expected_keys)
            assert torch.equal(values, expected_values)
        assert int(theirs.get_seq_length()) == int(reference.get_seq_length())


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_different_lengths_each_hold_their_own_text(seed: int) -> None:
    """Each row is compared with the columns that were accepted for it, one after the other."""
    rng, batch, width = random.Random(seed), 3, 4
    prompt = step(3, batch)
    ours = after_prompt(prompt)
    expected = [[(keys[row], values[row]) for keys, values in prompt] for row in range(batch)]
    for _ in range(10):
        new = step(width, batch)
        paths = [[0, *sorted(rng.sample(range(1, width), rng.randint(0, width - 1)))] for _ in range(batch)]
        ours.place(width)
        forward(ours, new)
        ours.commit(paths)
        for row, path in enumerate(paths):
            expected[row] = [
                (torch.cat([old_keys, keys[row][:, path]], dim=1), torch.cat([old_values, values[row][:, path]], dim=1))
                for (old_keys, old_values), (keys, values) in zip(expected[row], new, strict=True)
            ]
    assert len(set(ours.lengths)) > 1
    for row in range(batch):
        for layer, (keys, values) in zip(ours.layers, expected[row], strict=True):
            assert torch.equal(layer.keys[row, :, : ours.lengths[row]], keys)
            assert torch.equal(layer.values[row, :, : ours.lengths[row]], values)


def test_every_forward_attends_to_the_same_memory() -> None:
    """Whatever was accepted: the same addresses and shapes, and no number on a layer that changes in a forward."""
    ours = after_prompt(step(3))
    seen = set()
    for path in ([0], [0, 1, 2], [0, 3]):
        ours.place(4)
        before = [dict(vars(layer)) for layer in ours.layers]
        for keys, values in forward(ours, step(4)):
            seen.add((keys.data_ptr(), values.data_ptr(), keys.shape, values.shape))
        assert [vars(layer) for layer in ours.layers] == before
        assert isinstance(ours.get_seq_length(), torch.Tensor), "a compiled forward must not depend on its value"
        assert int(ours.get_seq_length()) == ours.lengths[0]
        assert ours.get_mask_sizes(4, 0) == (LONGEST, 0)
        ours.commit([path])
        assert ours.lengths == (int(ours.layers[0].lengths[0]),)
    assert len(seen) == LAYERS


def test_a_text_that_is_far_ahead_is_fed_in_forwards_of_the_same_width(model: Any) -> None:
    """Rows of a batch may end far apart, and the shorter ones are padded in the end."""
    cache, reference = (StaticCache(model.config, max_cache_len=LONGEST) for _ in range(2))
    kwargs = {CACHE: cache, "position_ids": torch.arange(PROMPT.shape[1])[None], "use_cache": True}
    text, widths = TokenBuffer(PROMPT, room=16), []
    config, fixed = GenerationConfig(max_length=LONGEST), FixedShapes(widths=(4,), capacity=LONGEST)
    target = ModelRunner(model, PROMPT, config, kwargs, [text], tier="tree", fixed=fixed)
    expected = plain(model, PROMPT, **{CACHE: reference}, max_new_tokens=11, do_sample=False)[0].tolist()
    with torch.no_grad():
        target.prefill()
        for token in expected[PROMPT.shape[1] :]:
            text.append(token)
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        target.catch_up(len(text))
        hook.remove()
        target.close()
    assert widths == [4, 4, 4]
    assert_same_cache(cache, reference)


def test_buffers_that_grow_within_a_round_keep_what_it_has_written() -> None:
    """And the columns after it are written where they belong."""
    ours = after_prompt(step(5))
    first, second = step(3), step(4)
    ours.place(3)
    forward(ours, first)
    ours.place(4, written=LONGEST)  # as if the round had written as many
    kept = ours.layers[0].keys[:, :, 5:8]
    assert ours.capacity > LONGEST
    assert torch.equal(kept, first[0][0])
    attended = forward(ours, second)
    assert torch.equal(attended[1][0][:, :, 5 + LONGEST : 9 + LONGEST], second[1][0])


def test_forwards_of_any_width_follow_once_places_are_given_up() -> None:
    ours, prompt, text = after_prompt(step(5)), step(2), step(3)
    ours.place(2)
    forward(ours, prompt)
    ours.commit([[0, 1]])
    ours.unplace()
    attended = forward(ours, text)
    assert attended[0][0].shape[-2] == 10
    assert torch.equal(attended[0][0][:, :, 5:], torch.cat([prompt[0][0], text[0][0]], dim=-2))
    ours.commit([[0, 1, 2]])
    assert ours.lengths == (10,)
