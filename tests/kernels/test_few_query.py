"""Attention of a few queries by the compiled core: what torch computes, and only where it is known and faster."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import replaced
from hf_specdec.kernels import core_attention, cpu
from hf_specdec.kernels.core_attention import CoreAttention
from hf_specdec.kernels.few_query import FewQueryAttention
from tests.kernels.layer_cases import has_core
from tests.kernels.test_attention_function import arguments, layer_of

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
pytestmark = has_core


def attended(inputs: dict[str, Any], *, inside: bool = True) -> torch.Tensor:
    block = FewQueryAttention()
    with torch.no_grad():
        if inside:
            with block:
                return AttentionInterface()["sdpa"](layer_of("qwen2"), **inputs)[0]
        return AttentionInterface()["sdpa"](layer_of("qwen2"), **inputs)[0]


def case(
    queries: int,
    keys: int,
    dims: tuple[int, int] = (32, 32),
    *,
    heads: tuple[int, int] = (4, 2),
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    mask: str = "bool",
) -> dict[str, Any]:
    """Queries as projections give them, keys and values as a cache does that has room for more."""
    generator = torch.Generator().manual_seed(queries + keys)
    query = torch.randn(batch, queries, heads[0], dims[0], generator=generator).transpose(1, 2)
    key, value = (torch.randn(batch, heads[1], keys + 5, dim, generator=generator)[:, :, :keys] for dim in dims)
    seen = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    seen[..., 0] = True
    masks = {"bool": seen, "added": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype), "none": None}
    return {
        "query": query.to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "attention_mask": masks[mask],
        "scaling": 0.2,
    }


def exact(inputs: dict[str, Any], *, cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64, `(B, M, Hq, Dv)`."""
    query, key, value, mask = (inputs[name] for name in ("query", "key", "value", "attention_mask"))
    groups = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * inputs["scaling"]
    scores = scores if cap is None else cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=3)
    return (scores.softmax(dim=3)[..., : key.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_it_is_the_attention_but_for_its_rounding(
    dtype: torch.dtype, threads: int, calls: list[tuple[int, ...]]
) -> None:
    """Of all remainders of queries, keys and lanes."""
    sizes = itertools.product((1, 2, 5, 33), (1, 7, 96, 97, 300), ((32, 32), (40, 24), (8, 8), (128, 80)))
    for count, (queries, keys, dims) in enumerate(sizes):
        kind = ("bool", "added")[count % 2] if queries > 1 else ("none", "bool")[count % 2]
        heads, batch = ((4, 2), (8, 1), (3, 3))[count % 3], 1 + count % 2 * 2
        inputs = case(queries, keys, dims, heads=heads, batch=batch, dtype=dtype, mask=kind)
        result = attended(inputs)
        assert result.dtype == dtype and result.is_contiguous()
        torch.testing.assert_close(result.double(), exact(inputs), atol=ROUNDING[dtype] * 2, rtol=ROUNDING[dtype])
        assert calls.pop() == (batch, heads[1], heads[0] // heads[1], queries, keys, *dims)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 0.2, 9.0])
@pytest.mark.parametrize("options", [{"cap": 5.0}, {"sinks": 3.0}, {"cap": 50.0, "sinks": -40.0}], ids=str)
def test_scores_have_caps_and_heads_have_sinks(options: dict[str, float], scale: float, dtype: torch.dtype) -> None:
    """Whether scores are small beside the cap or beyond it; and values may stand apart, as parts of a projection."""
    inputs = case(5, 130, (64, 48), dtype=dtype) | {"scaling": scale}
    inputs["value"] = torch.cat([inputs["value"], inputs["value"]], dim=3)[..., 48:]
    sinks = options["sinks"] + torch.randn(4) if "sinks" in options else None
    settings: dict[str, Any] = {"cap": options.get("cap"), "sinks": None if sinks is None else sinks.to(dtype)}
    ours = CoreAttention(*inputs.values(), **settings)
    assert ours.fits and not inputs["value"].is_contiguous()
    expected = exact(inputs, **settings)
    torch.testing.assert_close(ours().double(), expected, atol=ROUNDING[dtype] * 8, rtol=ROUNDING[dtype] * 4)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_query_is_attended_alike_whatever_stands_beside_it(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    """Also where others see keys after those that it sees."""
    inputs = case(7, 150, dtype=dtype)
    inputs["attention_mask"] = torch.ones(7, 150, dtype=torch.bool).tril(143)[None, None]
    together = attended(inputs)
    for place in range(7):
        alone = inputs | {"query": inputs["query"][:, :, place : place + 1]}
        alone |= {name: inputs[name][:, :, : 144 + place] for name in ("key", "value")} | {"attention_mask": None}
        assert torch.equal(attended(alone)[:, 0], together[:, place])
    assert len(calls) == 8


def test_a_mask_of_one_row_serves_a_batch_and_one_is_made_for_all_layers(calls: list[tuple[int, ...]]) -> None:
    inputs = case(4, 20, batch=3)
    inputs["attention_mask"] = inputs["attention_mask"][:1]
    for _ in range(3):
        torch.testing.assert_close(attended(inputs).double(), exact(inputs), atol=1e-6, rtol=1e-5)
    (made,) = inputs["attention_mask"]._hf_specdec_notes.made.values()
    assert made.dtype == torch.float32 and len(calls) == 3


def test_a_query_that_sees_nothing_is_zero_and_leaves_the_others_alone(calls: list[tuple[int, ...]]) -> None:
    inputs = case(3, 120)
    expected = attended(inputs)
    inputs["attention_mask"] = inputs["attention_mask"].clone()
    inputs["attention_mask"][:, :, 1] = False
    result = attended(inputs)
    assert result[:, 1].eq(0).all() and len(calls) == 2
    assert torch.equal(result[:, [0, 2]], expected[:, [0, 2]])


OTHERS: dict[str, dict[str, Any]] = {
    "several queries without a mask": arguments() | {"attention_mask": None},
    "a mask for each head": arguments() | {"attention_mask": torch.zeros(1, 4, 5, 12)},
    "a position bias": arguments() | {"position_bias": torch.zeros(1, 4, 5, 12)},
    "dropout": arguments() | {"dropout": 0.1},
    "fp64": {name: part.double() if name != "attention_mask" else part for name, part in arguments().items()},
    "a width that is no multiple": arguments(head_dim=12),
    "more queries than a few": arguments(queries=core_attention.MOST_QUERIES + 1, keys=140),
    "columns of keys": arguments() | {"key": torch.randn(1, 2, 16, 12).transpose(2, 3)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_core_does_not_know_is_torchs(name: str, calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(3)
    inside = attended(OTHERS[name])
    torch.manual_seed(3)
    torch.testing.assert_close(inside, attended(OTHERS[name], inside=False))
    assert calls == []


def test_the_core_refuses_what_it_cannot_attend_to() -> None:
    numbers = torch.zeros(4096)
    addresses = (numbers.data_ptr(),) * 7
    for dim, value_dim, kind, threads, team in (
        (12, 16, 0, 1, 0),
        (16, 12, 0, 1, 0),
        (16, 16, 3, 1, 0),
        (16, 16, 0, 0, 0),
        (16, 16, 0, 2, 0),
    ):
        with pytest.raises(ValueError, match="no attention"):
            cpu.core.attention(addresses, (1, 1, 1, 1, 4, dim, value_dim), (0,) * 10, (1.0, 0.0), kind, threads, team)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("counts", [(1, 5, 2), (9, 1, 1, 1), (0, 3, 0)], ids=str)
def test_queries_of_packed_rows_are_attended_as_those_of_padded_ones(
    counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """By the core to the last bit, which leaves out the keys after each row's own; by torch as it rounds them."""
    packed = PackedRows(counts, lengths := [7, 100, 40, 33][: len(counts)])
    num_keys = max(lengths) + packed.width
    padded = case(packed.width, num_keys, batch=len(counts), dtype=dtype)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        padded["attention_mask"][row, ..., length + count :] = False
    inputs = {**padded, "query": packed.pack(padded["query"].transpose(1, 2)).transpose(1, 2)}
    attention = FewQueryAttention()
    function = AttentionInterface()["sdpa"]
    with torch.no_grad(), attention:
        whole = function(layer_of("qwen2"), **padded)[0]
        with replaced(packed=packed):
            result = function(layer_of("qwen2"), **inputs)[0]  # (1, N, Hq, Dv)
            inputs["key"] = inputs["key"].transpose(2, 3).contiguous().transpose(2, 3)  # which the core does not read
            by_torch = function(layer_of("qwen2"), **inputs)[0]
    expected = packed.pack(whole)
    if dtype != torch.float32:  # which is torch's in some calls
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(by_torch, expected, atol=4 * ROUNDING[dtype], rtol=4 * ROUNDING[dtype])
    assert torch.equal(packed.pack(packed.pad(result)), result)
