"""Grouped heads under a mask: the same attention without copies of keys and values, in the package's own forwards."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from hf_specdec.compat import compiling
from hf_specdec.kernels import cpu
from hf_specdec.kernels.few_query import FewQueryAttention
from tests.helpers.graphs import STATIC, on_cpu
from tests.kernels.families import family_model, implementation
from tests.kernels.test_attention_function import arguments, layer_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes all attention."""
    monkeypatch.setattr(cpu, "core", None)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Heads of the keys and rows of the queries of every call of torch's attention."""
    seen: list[tuple[int, int]] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def noting(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((key.shape[1], query.shape[2]))
        return original(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    yield seen


def attention(inputs: dict[str, Any], *, inside: bool, module: torch.nn.Module | None = None) -> torch.Tensor:
    block = FewQueryAttention()
    function = AttentionInterface()["sdpa"]
    module = module or layer_of("qwen2")
    if not inside:
        return function(module, **inputs)[0]
    with block:
        return function(module, **inputs)[0]


def masks(batch: int) -> dict[str, torch.Tensor]:
    seen = torch.rand(batch, 1, 5, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[..., -5:] |= torch.eye(5, dtype=torch.bool)
    return {"bool": seen, "added": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_it_is_the_same_attention_without_copies(
    kind: str, rows: int, dtype: torch.dtype, keys: list[tuple[int, int]]
) -> None:
    mask = masks(rows)[kind]
    mask = mask if kind == "bool" else mask.to(dtype)
    inputs = {name: tensor.to(dtype) for name, tensor in arguments(batch=rows).items()} | {"attention_mask": mask}
    folded, expected = (attention(inputs | {"scaling": 0.3}, inside=inside) for inside in (True, False))
    torch.testing.assert_close(folded, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert folded.is_contiguous() and folded.dtype == dtype
    assert keys == [(2, 10), (4, 5)]


def test_every_layer_uses_one_folded_mask(keys: list[tuple[int, int]]) -> None:
    inputs = arguments()
    for _ in range(3):
        attention(inputs, inside=True)
    (made,) = inputs["attention_mask"]._hf_specdec_notes.made.values()
    assert made.shape == (1, 1, 10, 12)
    assert keys == [(2, 10)] * 3


OTHERS: dict[str, dict[str, Any]] = {
    "no mask": arguments() | {"attention_mask": None},
    "one query": arguments(queries=1),
    "dropout": arguments() | {"dropout": 0.1},
    "a bias for each head": arguments() | {"attention_mask": torch.zeros(1, 4, 5, 12)},
    "a position bias": arguments() | {"position_bias": torch.zeros(1, 4, 5, 12)},
    "a long padded prompt": arguments(queries=64, keys=64),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_folded_is_transformers_own(case: str) -> None:
    torch.manual_seed(3)
    inside = attention(OTHERS[case], inside=True)
    torch.manual_seed(3)
    assert torch.equal(inside, attention(OTHERS[case], inside=False))


def test_a_compiled_forward_stays_in_one_piece() -> None:
    inputs = arguments()
    with FewQueryAttention():
        compiled = torch.compile(AttentionInterface()["sdpa"], backend="eager", fullgraph=True)
        output = compiled(layer_of("qwen2"), **inputs)[0]
    assert torch.equal(output, attention(inputs, inside=False))


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_callers_own_graph_is_transformers_also_beside_one_of_ours(
    is_broken: bool, keys: list[tuple[int, int]]
) -> None:
    """Of functions that torch compiles piece by piece, it uses a piece in the graphs of both.

    Outside of graphs nothing is folded for one query.
    """
    FewQueryAttention(is_compiled=True)
    inputs, attend = arguments(queries=1), AttentionInterface()["sdpa"]

    def layer(*args: Any, **inputs: Any) -> Any:
        if is_broken:
            torch._dynamo.graph_break()
        return attend(*args, **inputs)

    def forward(*args: Any, **inputs: Any) -> Any:
        return layer(*args, **inputs)

    expected = attention(inputs, inside=False)
    keys.clear()
    compiling.compiled(forward, {"backend": "eager"})(layer_of("qwen2"), **inputs)
    assert keys == [(4, 1) if is_broken else (2, 2)]
    theirs = torch.compile(forward, backend="eager")(layer_of("qwen2"), **inputs)[0]
    torch.testing.assert_close(theirs, expected)
    assert keys[1:] == [(4, 1)]


@pytest.mark.wide
def test_the_steps_over_a_static_cache_copy_no_keys(keys: list[tuple[int, int]]) -> None:
    torch._dynamo.reset()
    model, prompt = family_model("llama"), torch.tensor([[5, 6, 7, 8] * 6])
    how: dict[str, Any] = {"max_new_tokens": 8, **STATIC, "compile_config": on_cpu("eager")}
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    keys.clear()
    drafts = {"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 3}}
    assert torch.equal(model.generate(prompt, **drafts, **how), expected)
    kv_heads, num_layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    assert kv_heads < model.config.num_attention_heads
    assert {heads for heads, _ in keys[num_layers:]} == {kv_heads}, "after the prompt"


def test_a_model_of_other_attention_enters_no_block() -> None:
    """Its own functions are the core's on a CPU, where nothing is compiled."""
    model = family_model("llama")
    with implementation(model, "strict"):
        assert not FewQueryAttention(model).is_used
    with implementation(model, "eager"):
        assert FewQueryAttention(model).is_used
        assert not FewQueryAttention(model, is_compiled=True).is_used
    assert FewQueryAttention(model).is_used


def test_off_the_cpu_nothing_is_wrapped() -> None:
    assert FewQueryAttention().is_used
    assert not FewQueryAttention(device="meta").is_used
    assert FewQueryAttention(device="meta", is_compiled=True).is_used, "but in graphs"
    assert not FewQueryAttention(copy.deepcopy(family_model("llama")).to("meta")).is_used
