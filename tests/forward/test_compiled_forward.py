"""A model's compiled forwards: how many graphs there are; the buffers that they read, and the cache a call leaves."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, StaticCache
from transformers.modeling_outputs import CausalLMOutput

from hf_specdec.cache.static_cache import StaticSpecCache, StaticSpecLayer
from hf_specdec.compat import compiling
from hf_specdec.forward.compiled_forward import CheckedSteps, CompiledForward, StepKind, _form
from tests.helpers.graphs import counting


class Model(torch.nn.Module):
    """Logits of columns and a buffer, as a forward over a static cache."""

    device = torch.device("cpu")

    def forward(self, columns: torch.Tensor, buffer: torch.Tensor) -> Any:
        return CausalLMOutput(logits=columns[..., None] * 2.0 + buffer.sum())


def logits_step(model: Model) -> Any:
    def step(**inputs: Any) -> tuple[Any, torch.Tensor]:
        logits = model(**inputs).logits
        return logits, logits.argmax(-1)

    return step


KIND = StepKind(logits_step, {"columns": 1})


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_each_shape_has_one_graph_however_many_there_are() -> None:
    """Torch stops compiling a function after 8 graphs, and runs it as it is written."""
    graphs: list[Any] = []
    forward = CompiledForward(Model(), {"backend": counting(graphs), "dynamic": False}, KIND)
    for capacity in [*range(64, 73), 64]:
        run(forward, width=2, capacity=capacity)
    assert len(graphs) == forward.num_graphs == len(forward.shapes) == 9


def run(forward: CompiledForward, width: int, capacity: int) -> None:
    """Some forward, compiled, whose logits are right."""
    inputs = {"columns": torch.ones(1, width), "buffer": torch.ones(capacity)}
    logits, _ = forward((1, width, capacity), inputs)
    assert logits.flatten().tolist() == [2.0 + capacity] * width
    assert forward.reason is None


@pytest.mark.parametrize("first", [2, 7, 64])
def test_one_graph_serves_all_widths_and_a_second_one_all_lengths(first: int) -> None:
    graphs: list[Any] = []
    forward = CompiledForward(Model(), {"backend": counting(graphs)}, KIND)
    numbers = []
    for capacity in (128, 192, 64, 320):
        for width in (first, 2, 9, 33, 64, first):
            run(forward, width, capacity)
        numbers.append(len(graphs))
    assert numbers == [1, 2, 2, 2]
    assert forward.num_graphs == 2
    run(forward, 1, 128)
    assert len(graphs) == 3, "torch compiles one token apart"


def test_a_function_that_breaks_into_several_graphs_keeps_its_guards() -> None:
    """What follows a break is compiled code of its own, which runs as it is written without torch's compiler."""
    graphs: list[Any] = []

    def whole(**inputs: torch.Tensor) -> torch.Tensor:
        return inputs["x"] * 2

    def broken(**inputs: torch.Tensor) -> torch.Tensor:
        doubled = inputs["x"] * 2
        torch._dynamo.graph_break()
        return doubled + 1

    inputs = {"x": torch.ones(3)}
    for function, expected in ((whole, 2.0), (broken, None)):
        step = compiling.compiled(function, {"backend": counting(graphs)})
        assert compiling.without_guards(step, inputs) is None, "it has not run"
        step(**inputs)
        direct = compiling.without_guards(step, inputs)
        assert (None if direct is None else float(direct(**inputs)[0])) == expected
        assert compiling.without_guards(step, {"x": torch.ones(3, dtype=torch.int)}) is None, "another argument"
        with torch.compiler.set_stance("force_eager"):
            assert compiling.without_guards(step, inputs) is None, "the caller wants code as it is written"
    assert compiling.without_guards(whole, inputs) is None, "not compiled"


def test_graphs_go_with_the_forwards_that_they_were_made_for() -> None:
    """Torch keeps the code that it compiles, and the graphs of it, beyond the function's own life."""
    codes = []
    for _ in range(4):
        forward = CompiledForward(Model(), {"backend": "eager"}, KIND)
        for width in (1, 3):
            run(forward, width=width, capacity=64)
        codes += [weakref.ref(step._torchdynamo_orig_callable.__code__) for step in forward._steps.values()]
        del forward
        gc.collect()
        gc.collect()  # what a finalizer has freed
    assert len(codes) == 8
    assert sum(code() is not None for code in codes) <= 2  # torch holds on to the last ones


def test_a_step_that_keeps_its_guards_is_asked_for_others_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Any] = []
    monkeypatch.setattr(compiling, "without_guards", lambda *arguments: wanted.append(arguments))
    steps, inputs = CheckedSteps(), {"columns": torch.ones(1, 2)}
    for _ in range(3):
        steps.run(lambda columns: (None, columns), (1, 2), inputs, list)
    assert len(wanted) == 2, "before it has run, and after"


def test_arguments_are_alike_that_guards_cannot_tell_apart() -> None:
    def likeness(value: Any) -> Any:
        objects: list[int] = []
        form = _form(value, objects)
        hash(form)
        return form, objects

    item = {"ids": torch.zeros(1, 3), "cache": [object()], "names": ("a", 1), "masks": {"full": torch.zeros(2)}}
    again = item | {"ids": torch.ones(1, 3), "masks": {"full": torch.ones(2)}}
    assert likeness(item) == likeness(again)
    others: list[dict[str, Any]] = [
        {"ids": torch.zeros(1, 4)},
        {"ids": torch.zeros(3, 1).t().contiguous().as_strided((1, 3), (1, 1))},
        {"ids": torch.zeros(1, 3, dtype=torch.long)},
        {"names": ("a", True)},
        {"names": ("b", 1)},
        {"masks": {"sliding": torch.zeros(2)}},
        {"masks": None},
        {"more": None},
        {"cache": [CompiledForward(Model(), {})]},
    ]
    for other in others:
        assert likeness(item)[0] != likeness(item | other)[0]
    form, objects = likeness(item | {"cache": [object()]})
    assert form == likeness(item)[0]
    assert objects != likeness(item)[1]


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


def test_buffers_of_a_layer_have_storages_of_their_own_and_one_block_of_memory() -> None:
    """Torch's compiler would keep a symbol for each place in a block; columns move by one operation for all layers."""
    cache = StaticSpecCache.of(StaticCache(LlamaConfig(num_hidden_layers=3), max_cache_len=64), capacity=64)
    assert cache is not None
    for number in range(3):
        cache.update(torch.full((1, 2, 5, 4), float(number)), torch.full((1, 2, 5, 4), -float(number)), number)
    cache.sync()
    cache.place(2)
    buffers = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in buffers)
    (block,) = {id(block): block for layer in cache.layers for block in layer.buffers}.values()
    assert [tensor.data_ptr() for tensor in buffers] == [view.data_ptr() for view in block]
    kept = [tensor.data_ptr() for tensor in buffers]
    cache.place(7)
    assert [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)] == kept
    block.fill_(3.0)
    assert all((tensor == 3.0).all() for tensor in buffers)
    del block, cache
    gc.collect()
    assert all((tensor == 3.0).all() for tensor in buffers), "each keeps the memory"
