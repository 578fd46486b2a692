"""What somebody has put in the place of torch's or transformers' functions is called; no kernel computes past it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from hf_specdec.kernels.few_query import FewQueryAttention
from tests.kernels.layer_cases import has_core, inside, layer, tokens, transposed
from tests.kernels.test_attention_function import arguments, layer_of

pytestmark = has_core


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) / 2


class Halving(TorchFunctionMode):
    """Products and attention of half the size."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        return result / 2 if function in (torch._C._nn.linear, torch._C._nn.scaled_dot_product_attention) else result


@pytest.fixture
def sdpa() -> Iterator[Any]:
    """transformers' attention function, which is registered again at the end."""
    registered = AttentionInterface()["sdpa"]
    yield getattr(registered, "original", registered)
    AttentionInterface.register("sdpa", registered)


@torch.no_grad()
def attended() -> torch.Tensor:
    with FewQueryAttention():
        result: torch.Tensor = AttentionInterface()["sdpa"](layer_of("qwen2"), **arguments())[0]
    return result


@pytest.mark.parametrize(("make", "cls"), [(layer, torch.nn.Linear), (transposed, Conv1D)])
def test_a_forward_replaced_on_the_class(
    make: Any, cls: Any, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = make(), tokens(3, 256)
    expected = module(inputs) / 2
    monkeypatch.setattr(cls, "forward", halved(cls.forward))
    torch.testing.assert_close(inside(module, inputs), expected)
    assert products == []


@pytest.mark.parametrize("way", ["function", "mode"])
def test_a_replaced_function_of_torch_and_a_mode(
    way: str, products: list[int], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = layer(), tokens(3, 256)
    expected = module(inputs) / 2, attended() / 2
    assert calls
    calls.clear()
    if way == "mode":
        with Halving():
            result = inside(module, inputs), attended()
    else:
        for name in ("linear", "scaled_dot_product_attention"):
            monkeypatch.setattr(torch.nn.functional, name, halved(getattr(torch.nn.functional, name)))
        result = inside(module, inputs), attended()
    torch.testing.assert_close(result, expected)
    assert products == calls == []


def test_a_default_device_replaces_nothing(products: list[int]) -> None:
    with torch.device("cpu"):
        inside(layer(), tokens(3, 256))
    assert products == [3]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attention_function_that_somebody_registers(when: str, sdpa: Any, calls: list[Any]) -> None:
    """Under transformers' own name, before this package's first forward or later."""
    AttentionInterface.register("sdpa", sdpa)
    expected = attended() / 2
    assert len(calls) == 1
    if when == "before":
        AttentionInterface.register("sdpa", sdpa)
    AttentionInterface.register("sdpa", lambda *args, **kwargs: (sdpa(*args, **kwargs)[0] / 2, None))
    torch.testing.assert_close(attended(), expected)
    assert len(calls) == 1


def test_an_attention_function_around_the_registered_one(sdpa: Any, calls: list[Any]) -> None:
    """It is called, and what it calls may take the faster way."""
    AttentionInterface.register("sdpa", sdpa)
    expected, inner = attended() / 2, AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", lambda *args, **kwargs: (inner(*args, **kwargs)[0] / 2, None))
    torch.testing.assert_close(attended(), expected)
    assert len(calls) == 2
