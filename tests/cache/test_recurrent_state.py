"""A cache with states that cannot be rolled back: put back exactly, kept whole, and never mixed up with attention."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from hf_specdec.cache.rollback import StateCache, restore, saved


def filled() -> DynamicCache:
    """One recurrent layer and one of attention, three tokens long."""
    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer(), DynamicLayer()]
    write(cache, 3)
    return cache


def write(cache: DynamicCache, tokens: int) -> None:
    """What a forward of so many tokens does to the cache, in place where transformers' layers work in place."""
    cache.update_conv_state(torch.rand(1, 4, tokens + 3), 0, conv_kernel_size=3)
    cache.update_recurrent_state(torch.rand(1, 4, 5), 0)
    cache.update(torch.rand(1, 2, tokens, 6), torch.rand(1, 2, tokens, 6), 1)


def content(cache: DynamicCache) -> list[torch.Tensor]:
    linear, attention = cache.layers
    tensors = [linear.conv_states[0], linear.recurrent_states[0], attention.keys, attention.values]
    return [tensor.clone() for tensor in tensors]


def test_a_rejection_puts_every_state_back() -> None:
    cache = filled()
    before, kept = content(cache), StateCache(cache)
    kept.checkpoint(0)
    write(cache, 4)
    assert kept.commit([[0, 1]], 4) == [0]
    assert all(torch.equal(now, then) for now, then in zip(content(cache), before, strict=True))


def test_the_last_forward_that_nobody_rejects_counts() -> None:
    """Several forwards between two commits: the state goes back as little as it can."""
    cache = filled()
    kept = StateCache(cache)
    kept.checkpoint(0)
    write(cache, 2)
    between = content(cache)
    kept.checkpoint(2)
    write(cache, 3)
    assert kept.commit([[0, 1, 2]], 5) == [2]
    assert all(torch.equal(now, then) for now, then in zip(content(cache), between, strict=True))


def test_a_copy_is_restored_into_the_same_objects() -> None:
    inner = [torch.zeros(2), torch.zeros(3)]
    state = {"a": inner, "b": (torch.zeros(1),), "n": 3}
    copy = saved(state)
    inner[0] += 1
    state["n"] = 5
    inner.append(torch.ones(1))
    restored = restore(state, copy)
    assert restored is state and state["a"] is inner
    assert len(inner) == 2 and not inner[0].any() and state["n"] == 3
