"""Recurrent states of trees, and functions of single numbers, have the bits that they have for one token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_specdec.compat.modules import ROUNDED_ACTIVATIONS
from hf_specdec.kernels.products import BY_VECTORS, SERIAL, by_vectors
from hf_specdec.kernels.recurrences import StateColumns
from tests.kernels.layer_cases import draw, has_core, inside, sizes, tokens

pytestmark = has_core
KINDS = {  # sizes of a head's state, whether it moves by the delta rule, and the decays that it has
    "duality": (48, 17, False, "head"),
    "delta rule": (32, 24, True, "head"),
    "by key": (24, 16, True, "key"),
}


@pytest.mark.usefixtures("shared_threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_recurrent_states_follow_from_their_path_alone(kind: str, seed: int) -> None:
    """A node of any tree reads what single tokens read, and leaves their state."""
    at = sizes(seed)
    key_dim, value_dim, has_delta, decays = KINDS[kind]
    batch, count, key_heads = draw(at, 1, 4), draw(at, 1, 65), draw(at, 1, 3)
    heads = key_heads * draw(at, 1, 4)
    query, key = (torch.randn(batch, count, key_heads, key_dim, generator=at) for _ in range(2))
    value = torch.randn(batch, count, heads, value_dim, generator=at)
    decay = torch.rand(batch, count, heads, key_dim if decays == "key" else 1, generator=at)
    decay = decay.expand(batch, count, heads, key_dim)
    beta = torch.rand(batch, count, heads, 1, generator=at) if has_delta else None
    inputs = [query, key, value, decay.contiguous(), beta]
    state = torch.randn(batch, heads, *((key_dim, value_dim) if has_delta else (value_dim, key_dim)), generator=at)
    parents = np.array([[draw(at, max(-1, c - 6), c) for c in range(count)] for _ in range(batch)])
    result = StateColumns(*inputs, has_delta).read(state, parents)
    for _ in range(4):
        row, node = draw(at, 0, batch), draw(at, 0, count)
        path = [node]
        while parents[row, path[0]] >= 0:
            path.insert(0, parents[row, path[0]])
        alone = state[row : row + 1].clone()
        for column in path:
            item = [None if part is None else part[row : row + 1, column : column + 1].contiguous() for part in inputs]
            single, first = StateColumns(*item, has_delta), np.array([[-1]])
            assert torch.equal(single.read(alone, first)[0, 0], result[row, column])
            alone = single.state_after(alone, SimpleNamespace(parents=first))
        kept = np.full_like(parents, -2)
        kept[row, path] = parents[row, path]
        after = StateColumns(*inputs, has_delta).state_after(state.clone(), SimpleNamespace(parents=kept))
        assert torch.equal(after[row : row + 1], alone)
        assert torch.equal(after[:row], state[:row])


@pytest.mark.usefixtures("shared_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [*BY_VECTORS, torch.exp, torch.log], ids=lambda item: item.__name__)
def test_functions_of_single_numbers_have_one_rounding(function: Any, dtype: torch.dtype) -> None:
    """Whatever the place of a number in memory, and how many there are."""
    numbers = tokens(3, 3 * SERIAL, dtype=dtype).abs()
    whole = by_vectors(function, numbers)
    torch.testing.assert_close(whole, function(numbers))
    for count in (1, 7, 63, SERIAL + 5):
        assert torch.equal(by_vectors(function, numbers[:, :count]), whole[:, :count])
        assert torch.equal(by_vectors(function, numbers.T[:count]).T, whole[:, :count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [*ROUNDED_ACTIVATIONS, torch.nn.GELU, torch.nn.SiLU])
def test_an_activation_of_half_a_layer_computes_a_token_alike(activation: Any, dtype: torch.dtype) -> None:
    """Gate and values come from one product."""
    gate = tokens(400, 192, dtype=dtype).chunk(2, dim=1)[0]
    module = torch.nn.Sequential(activation()).to(dtype)
    module.dtype, module.device = dtype, gate.device
    whole = inside(module, gate)
    assert torch.equal(torch.cat([inside(module, token) for token in gate.split(1)]), whole)
