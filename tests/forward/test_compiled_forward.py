"""A model's compiled forwards: one graph for each shape, however many there are; the cache that a call leaves."""

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from hf_specdec.cache.static_cache import StaticSpecCache, StaticSpecLayer
from hf_specdec.forward.compiled_forward import CompiledForward
from tests.helpers.graphs import counting


class Model(torch.nn.Module):
    """Logits of columns and a buffer, as a forward over a static cache."""

    device = torch.device("cpu")

    def forward(self, columns: torch.Tensor, buffer: torch.Tensor, return_dict: bool) -> Any:
        return CausalLMOutput(logits=columns[..., None] * 2.0 + buffer.sum())


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_each_shape_has_one_graph_however_many_there_are() -> None:
    """Torch stops compiling a function after 8 graphs, and runs it as it is written."""
    graphs: list[Any] = []
    forward = CompiledForward(Model(), {"backend": counting(graphs), "dynamic": False})
    for capacity in [*range(64, 74), 64]:
        inputs = {"columns": torch.ones(1, 2), "buffer": torch.ones(capacity)}
        outputs, best = forward((1, 2, capacity), inputs)
        assert outputs.logits.flatten().tolist() == [2.0 + capacity] * 2
        assert best is not None
    assert len(graphs) == len(forward.shapes) == 10
    assert forward.reason is None


def a_cache(rows: int) -> StaticSpecCache:
    cache = StaticSpecCache([StaticSpecLayer(reserve=64)], reserve=64)
    cache.update(torch.ones(rows, 1, 5, 4), torch.ones(rows, 1, 5, 4), 0)
    cache.sync()
    cache.place(2)
    return cache


def test_a_cache_that_a_call_leaves_is_the_next_ones_and_empty() -> None:
    forward, cache = CompiledForward(Model(), {}), a_cache(rows=2)
    keys = cache.layers[0].keys
    forward.keep_cache(cache)
    assert forward.take_cache(1, 64) is None, "another batch"
    assert forward.take_cache(2, 128) is None, "another capacity"
    assert forward.take_cache(2, 64) is cache
    assert forward.take_cache(2, 64) is None, "taken"
    assert cache.layers[0].keys is keys
    assert not keys.any()
    assert cache.lengths == ()
    cache.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    cache.sync()
    assert cache.lengths == (3, 3)


def test_a_kept_cache_follows_a_model_that_was_moved() -> None:
    forward, cache = CompiledForward(Model(), {}), a_cache(rows=1)
    forward.keep_cache(cache)
    again = forward.take_cache(1, 64)
    assert again is cache
    again.update(*(torch.ones(1, 1, 3, 4, dtype=torch.bfloat16) for _ in range(2)), 0)
    assert again.layers[0].keys.dtype == torch.bfloat16


def test_the_places_to_write_share_what_does_not_depend_on_the_width() -> None:
    cache = a_cache(rows=2)
    first = cache.layers[0].static_index
    cache.place(3, written=2)
    second = cache.layers[0].static_index
    assert first is not None and second is not None
    assert second.columns.tolist() == [[7, 8, 9], [7, 8, 9]]
    assert first.length is second.length
    assert int(second.length) == 7
