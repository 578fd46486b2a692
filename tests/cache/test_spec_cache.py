"""`SpecCache` and `StaticSpecCache` hold what transformers' caches would hold after the same accepted tokens."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec.cache import spec_layer as blocks_module
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import Blocks, SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache

LAYERS, HEADS, KEY_DIM, VALUE_DIM, LONGEST = 2, 2, 4, 6, 128
SIZES: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
FULL, SLIDING = LlamaConfig(**SIZES), MistralConfig(sliding_window=8, **SIZES)
CACHES: dict[str, Callable[[], Any]] = {
    "full": DynamicCache,
    "sliding": lambda: DynamicCache(config=SLIDING),
    "static": lambda: StaticCache(FULL, max_cache_len=LONGEST),
    "static, sliding": lambda: StaticCache(SLIDING, max_cache_len=LONGEST),
}


def columns(num_tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, HEADS, num_tokens, KEY_DIM), torch.randn(batch, HEADS, num_tokens, VALUE_DIM)


def adopted(cache: Any) -> Any:
    """The package's cache in the place of a caller's."""
    ours = StaticSpecCache.of(cache, capacity=LONGEST) if type(cache) is StaticCache else SpecCache.adopt(cache)
    assert ours is not None
    return ours


def draft(cache: Any, new: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A forward after the prompt's, for which a static cache has its places."""
    if isinstance(cache, StaticSpecCache):
        cache.place(new[0][0].shape[2])
    forward(cache, new)


def forward(cache: Any, new: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple]:
    """What a model's forward does to a cache; returns what each layer attends to."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(new)]


def step(num_tokens: int, batch: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [columns(num_tokens, batch) for _ in range(LAYERS)]


def select(new: Sequence[tuple[torch.Tensor, torch.Tensor]], path: list[int]) -> list[tuple]:
    return [(keys[:, :, path], values[:, :, path]) for keys, values in new]


def content(cache: SpecCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [layer.content() for layer in cache.layers]


def assert_holds(cache: SpecCache, reference: DynamicCache) -> None:
    assert cache.get_seq_length() == reference.get_seq_length()
    for (keys, values), layer in zip(content(cache), reference.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reserve", [0, 10, 500])
def test_many_steps_later_the_content_is_that_of_a_dynamic_cache(seed: int, reserve: int) -> None:
    """Through several growths of the buffers, with rejected columns all the way."""
    rng = random.Random(seed)
    ours, reference = SpecCache(reserve=reserve), DynamicCache()
    prompt = step(2)
    for cache in (ours, reference):
        forward(cache, prompt)
    ours.sync()
    for _ in range(40):
        size = rng.randint(1, 12)
        path = [0, *sorted(rng.sample(range(1, size), rng.randint(0, size - 1)))]
        new = step(size)
        attended = forward(ours, new)
        for (keys, values), (new_keys, new_values) in zip(attended, new, strict=True):
            assert torch.equal(keys[:, :, -size:], new_keys)
            assert torch.equal(values[:, :, -size:], new_values)
        ours.commit([path])
        forward(reference, select(new, path))
        assert_holds(ours, reference)
    assert ours.get_seq_length() > 100


def test_a_forward_attends_to_the_text_and_its_own_columns_only() -> None:
    """Columns rejected earlier are behind the end or overwritten, never in between."""
    ours, reference = SpecCache(), DynamicCache()
    forward(ours, step(1))
    ours.sync()
    forward(ours, step(9))
    ours.commit([[0, 4]])
    kept = [(keys.clone(), values.clone()) for keys, values in content(ours)]
    forward(reference, kept)
    new = step(3)
    for (keys, values), (expected_keys, expected_values) in zip(
        forward(ours, new), forward(reference, new), strict=True
    ):
        assert torch.equal(keys, expected_keys)
        assert torch.equal(values, expected_values)


def test_an_interrupted_forward_is_rolled_back() -> None:
    """Some layers have the new columns, others not; afterwards all have the old text."""
    cache = SpecCache()
    forward(cache, step(6))
    cache.sync()
    before = [(keys.clone(), values.clone()) for keys, values in content(cache)]
    cache.update(*columns(5), 0)
    cache.rollback()
    for (keys, values), (old_keys, old_values) in zip(content(cache), before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6]


@pytest.mark.parametrize("kind", ["full", "static"])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_different_lengths_each_hold_their_own_text(seed: int, kind: str) -> None:
    """Each row is compared with a cache of its own."""
    rng, batch = random.Random(seed), 3
    ours, references = adopted(CACHES[kind]()), [DynamicCache() for _ in range(batch)]
    prompt = step(3, batch)
    forward(ours, prompt)
    ours.sync()
    for row, reference in enumerate(references):
        forward(reference, [(keys[row : row + 1], values[row : row + 1]) for keys, values in prompt])
    for _ in range(12):
        size = rng.randint(1, 8)
        new = step(size, batch)
        paths = [[0, *sorted(rng.sample(range(1, size), rng.randint(0, size - 1)))] for _ in range(batch)]
        draft(ours, new)
        ours.commit(paths)
        for row, reference in enumerate(references):
            mine = [(keys[row : row + 1], values[row : row + 1]) for keys, values in new]
            forward(reference, select(mine, paths[row]))
    assert len(set(ours.lengths)) > 1
    for row, reference in enumerate(references):
        assert ours.lengths[row] == reference.get_seq_length()
        for layer, expected in zip(ours.layers, reference.layers, strict=True):
            assert torch.equal(layer.keys[row : row + 1, :, : ours.lengths[row]], expected.keys)
            assert torch.equal(layer.values[row : row + 1, :, : ours.lengths[row]], expected.values)


@pytest.mark.parametrize("text", [0, 3, 7, 8, 9, 20])
@pytest.mark.parametrize("kind", CACHES)
def test_an_adopted_cache_comes_back_as_plain_decoding_would_have_left_it(kind: str, text: int) -> None:
    """Taken over from plain decoding at any length, around the window's too, and given back after a few steps."""
    theirs, reference = CACHES[kind](), CACHES[kind]()
    if text:
        prompt = step(text)
        for cache in (theirs, reference):
            forward(cache, prompt)
    ours = adopted(theirs)
    assert ours.get_seq_length() == text
    if not text:  # the prompt is ours to read
        prompt = step(1)
        for cache in (ours, reference):
            forward(cache, prompt)
        ours.sync()
        text = 1
    for path in ([0, 2], [0], [0, 1, 4]):
        new = step(5)
        draft(ours, new)
        ours.commit([path])
        for column in path:  # plain decoding: one token after the other
            forward(reference, select(new, [column]))
    ours.export(theirs)
    assert int(theirs.get_seq_length()) == int(reference.get_seq_length()) == text + 6
    following = step(1)
    for mine, other in zip(theirs.layers, reference.layers, strict=True):
        assert list(map(int, mine.get_mask_sizes(1))) == list(map(int, other.get_mask_sizes(1)))
    for mine, other in zip(forward(theirs, following), forward(reference, following), strict=True):
        assert all(map(torch.equal, mine, other))


def test_a_prompt_that_was_not_read_to_its_end_is_forgotten() -> None:
    """Nothing was committed yet, so nothing is left."""
    cache = SpecCache()
    cache.update(*columns(5), 0)
    cache.rollback()
    assert cache.get_seq_length() == 0


def test_a_sliding_layer_stays_sliding_and_a_full_one_full() -> None:
    theirs = CACHES["sliding"]()
    ours = adopted(theirs)
    forward(ours, step(20))
    ours.sync()
    ours.export(theirs)
    assert all(type(layer) is DynamicSlidingWindowLayer for layer in theirs.layers)
    full = DynamicCache(config=FULL)
    again = adopted(full)
    forward(again, step(20))
    again.sync()
    again.export(full)
    assert all(type(layer) is DynamicLayer for layer in full.layers)
    assert full.get_seq_length() == 20


def one_row(length: int, value: float) -> SpecCache:
    """A committed text of its own."""
    cache = SpecCache([SpecLayer() for _ in range(2)])
    for layer in range(2):
        columns = torch.full((1, 2, length, 4), value + layer)
        cache.update(columns, -columns, layer)
    cache.sync()
    return cache


def test_rows_are_allocated_once_and_keep_their_content() -> None:
    """Whoever comes and goes, the buffers stay where they are, and each row holds its own text."""
    cache = one_row(5, 1.0)
    cache.reserve_rows(4, 4 * 64)
    cache.admit(one_row(7, 10.0))
    buffers = [layer.keys.data_ptr() for layer in cache.layers]
    assert [layer.keys.shape[0] for layer in cache.layers] == [4, 4]
    cache.admit(one_row(3, 20.0))
    cache.admit(one_row(9, 30.0))
    cache.select([0, 2, 3])
    cache.admit(one_row(4, 40.0))
    cache.admit(one_row(6, 50.0), 1)
    assert [layer.keys.data_ptr() for layer in cache.layers] == buffers
    assert cache.lengths == (5, 6, 9, 4)
    for layer, extra in zip(cache.layers, (0.0, 1.0), strict=True):
        for row, (length, value) in enumerate(zip(cache.lengths, (1.0, 50.0, 30.0, 40.0), strict=True)):
            assert (layer.keys[row, :, :length] == value + extra).all()
            assert (layer.values[row, :, :length] == -value - extra).all()
    keys, _ = cache.update(torch.zeros(4, 2, 3, 4), torch.zeros(4, 2, 3, 4), 0)
    assert keys.shape == (4, 2, 12, 4), "spare rows and columns are not attended to"


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
