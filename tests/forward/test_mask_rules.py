"""Masks by a rule are the masks that the model makes itself: windows, padding, batches, any dtype, any cache."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import StaticCache
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache
from hf_specdec.common.transfer import to_device
from hf_specdec.common.tree import TreeBuilder
from hf_specdec.compat.attention import masks_for_forward
from hf_specdec.forward import tree_mask
from hf_specdec.forward.tree_mask import TreeMasks, TreeRows, window_of
from tests.helpers.zoo import FAMILIES, WINDOW, build

CPU = torch.device("cpu")
CAPACITY = 96
FORMS = [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "eager")]


class Cache(SpecCache):
    """Says how long the rows are, and nothing else of a cache."""

    def __init__(self, lengths: list[int], num_layers: int, *, capacity: int | None) -> None:
        super().__init__([SpecLayer() for _ in range(num_layers)], reserve=0)
        self.lengths, self.capacity, self.dtype = tuple(lengths), capacity, torch.float32

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.capacity or max(self.lengths) + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return max(self.lengths)


def a_tree(generator: np.random.Generator, size: int) -> Any:
    builder = TreeBuilder(5)
    while len(builder.build()) < size:
        builder.add(int(generator.integers(0, len(builder.build()))), int(generator.integers(6, 99)))
    return builder.build()


def rows_of(generator: np.random.Generator, lengths: list[int], size: int) -> TreeRows:
    trees = [a_tree(generator, size) for _ in lengths]
    depths, visible = [tree.column_depths for tree in trees], [tree.visible_array() for tree in trees]
    return TreeRows(lengths, depths, visible, CPU)


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(("family", "attention"), FORMS)
def test_a_rules_mask_is_the_models(family: str, attention: str, pad: int, fixed: bool) -> None:
    """From texts shorter than the window to several windows; what is asked of the model is the reference."""
    model = build(FAMILIES[family])
    model.set_attn_implementation(attention)
    generator = np.random.default_rng(pad + 7 * fixed)
    by_rule = TreeMasks(model)
    for lengths in ([9], [WINDOW], [40], [7, 30], [33, 33], [31, 12]):
        rows = rows_of(generator, lengths, 6)
        cache = Cache(lengths, 3, capacity=CAPACITY if fixed else None)
        mask = torch.ones((len(lengths), max(lengths) + 6), dtype=torch.long)
        mask[0, :pad] = 0
        padding = mask[:, :pad].bool().numpy() if pad else None
        wanted = TreeMasks(model).build(rows, cache, mask if pad else None, padding=padding)
        arrays, dtypes = by_rule.arrays(rows, cache, padding)
        sent = to_device(arrays, CPU, dtypes)
        result = by_rule.build(rows, cache, mask if pad else None, padding=padding, sent=sent)
        assert by_rule.rules is not None
        pairs = [(result[kind], wanted[kind]) for kind in wanted] if isinstance(wanted, dict) else [(result, wanted)]
        for ours, expected in pairs:
            assert ours.dtype == expected.dtype
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_a_window_is_found_by_asking_about_positions() -> None:
    assert window_of(causal_mask_function, None, CPU) is None
    for window in (1, 2, 16, 4096):
        assert window_of(sliding_window_causal_mask_function(window), window, CPU) == window


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long)), 16),
        (sliding_window_causal_mask_function(15), 16),
        (sliding_window_causal_mask_function(17), 16),
        (sliding_window_causal_mask_function(16), None),
        (and_masks(causal_mask_function, lambda batch, head, query, key: key != 3), None),
    ],
    ids=["chunks", "narrower", "wider", "unnamed", "hidden key"],
)
def test_what_is_no_window_is_left_to_the_model(function: Any, window: int | None) -> None:
    with pytest.raises(ValueError, match="neither causal nor that of a window"):
        window_of(function, window, CPU)


def test_a_model_that_changes_its_mask_is_asked_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that hides a key by code of its own, which no mask function tells of."""
    model, generator = build(FAMILIES["llama"]), np.random.default_rng(1)
    inner = masks_for_forward

    def changed(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask = inner(*args, **kwargs).clone()
        mask[..., 2] = False
        return mask

    monkeypatch.setattr(tree_mask, "masks_for_forward", changed)
    masks = TreeMasks(model)
    for length in (12, 13):
        rows = rows_of(generator, [length], 4)
        result = masks.build(rows, Cache([length], 3, capacity=None), None)
        assert bool((result[..., 2] < 0).all())


def test_a_static_caches_windows_need_no_columns_of_their_own() -> None:
    """The sizes that a rule is found by are those of the package's static cache: alike in all layers."""
    model = build(FAMILIES["gemma3"])
    cache = StaticSpecCache.of(StaticCache(config=model.config, max_cache_len=CAPACITY), capacity=CAPACITY)
    assert cache is not None
    assert len({cache.get_mask_sizes(4, layer) for layer in range(len(cache.layers))}) == 1
