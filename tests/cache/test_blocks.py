"""Buffers of equal shape share blocks of memory, and what is handed out is never handed out again."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from hf_specdec.cache import spec_layer as blocks_module
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import Blocks

SHAPE = (1, 2, 8, 4)
LIKE = torch.zeros(1)


def test_the_buffers_of_all_layers_are_one_block() -> None:
    blocks = Blocks(3)
    taken = [blocks.take(SHAPE, LIKE, per_layer=2) for _ in range(6)]
    assert len({id(block) for _, block in taken}) == 1
    assert taken[0][1].shape == (6, *SHAPE)
    for number, (buffer, _) in enumerate(taken):
        buffer.fill_(number + 1)
    assert taken[0][1].flatten(1).unique(dim=1).tolist() == [[number + 1.0] for number in range(6)]


def test_other_shapes_types_and_layers_beyond_the_number_are_apart() -> None:
    blocks = Blocks(1)
    others = [(SHAPE, LIKE), ((1, 2, 8, 5), LIKE), (SHAPE, LIKE.half()), (SHAPE, LIKE)]
    taken = [blocks.take(*other)[1] for other in others]
    assert len({block.data_ptr() for block in taken}) == 4


@pytest.mark.parametrize("num_bytes", [1, 3 * 2 * 64 * 4 * 4, 1 << 30])
def test_columns_move_in_every_layer_however_many_blocks_there_are(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", num_bytes)
    config = LlamaConfig(num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
    cache = SpecCache.adopt(DynamicCache(config=config))
    assert cache is not None
    states = [(torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)) for _ in range(5)]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys[:, :, :3], values[:, :, :3], layer)
    cache.sync()
    for layer, (keys, values) in enumerate(states):
        cache.update(keys[:, :, 3:], values[:, :, 3:], layer)
    cache.commit([[0, 2, 5], [1, 4]])
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        for row, columns in enumerate(([0, 1, 2, 3, 5, 8], [0, 1, 2, 4, 7])):
            assert torch.equal(layer.keys[row, :, : len(columns)], keys[row][:, columns])
            assert torch.equal(layer.values[row, :, : len(columns)], values[row][:, columns])
