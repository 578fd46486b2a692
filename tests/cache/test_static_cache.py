"""`StaticSpecCache` keeps its buffers, whatever is accepted."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StaticCache

from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.text_rows import TokenBuffer
from tests.cache.test_spec_cache import FULL, LAYERS, forward, step
from tests.helpers.support import PROMPT, assert_same_cache, plain

LONGEST = 64


def after_prompt(prompt: Sequence[tuple[torch.Tensor, torch.Tensor]], capacity: int = LONGEST) -> StaticSpecCache:
    ours = StaticSpecCache.of(StaticCache(FULL, max_cache_len=LONGEST), capacity=capacity)
    assert ours is not None
    forward(ours, prompt)
    ours.sync()
    return ours


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
