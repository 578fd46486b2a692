"""One attention call: what goes to the kernel and what to torch, that both agree, and what neither knows."""

import logging
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from hf_specdec import UnsupportedModelError
from hf_specdec.kernels.xformers import KernelAttention, kernel_mask
from tests.helpers.attention import StrictKernel
from tests.kernels.families import family_model


def layer_of(family: str) -> torch.nn.Module:
    module: torch.nn.Module = family_model(family).model.layers[0].self_attn
    return module


def arguments(*, queries: int = 5, keys: int = 12, head_dim: int = 16, batch: int = 1) -> dict[str, Any]:
    torch.manual_seed(1)
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    return {
        "query": torch.randn(batch, 4, queries, head_dim),
        "key": torch.randn(batch, 2, keys, head_dim),
        "value": torch.randn(batch, 2, keys, head_dim),
        "attention_mask": mask,
    }


def sdpa(module: torch.nn.Module, **kwargs: Any) -> torch.Tensor:
    output: torch.Tensor = AttentionInterface()["sdpa"](module, **kwargs)[0]
    return output


@pytest.fixture
def attention() -> KernelAttention:
    return KernelAttention("strict", StrictKernel(), "cpu")


def test_a_masked_call_is_the_kernel_s(attention: KernelAttention) -> None:
    inputs = arguments()
    output, weights = attention(layer_of("qwen2"), **inputs, scaling=0.2)
    assert weights is None and output.shape == (1, 5, 4, 16)
    torch.testing.assert_close(output, sdpa(layer_of("qwen2"), **inputs, scaling=0.2))
    assert attention.kernel.calls == [(10, 12, True)]  # type: ignore[attr-defined]


def test_a_prompt_without_a_mask_is_torch_s_causal_kernel(attention: KernelAttention) -> None:
    """It needs no mask and copies no keys; a kernel without a bias would see the future."""
    inputs = arguments(keys=5) | {"attention_mask": None}
    output = attention(layer_of("qwen2"), **inputs)[0]
    assert torch.equal(output, sdpa(layer_of("qwen2"), **inputs))
    assert attention.kernel.calls == []  # type: ignore[attr-defined]


def test_fewer_queries_than_keys_without_a_mask_are_the_last_ones(attention: KernelAttention) -> None:
    """Gemma 4 drops the queries whose logits no one wants, and keeps them for attention that it knows by name."""
    inputs = arguments(queries=12, keys=12) | {"attention_mask": None}
    whole = sdpa(layer_of("qwen2"), **inputs)
    inputs["query"] = inputs["query"][:, :, -3:]
    torch.testing.assert_close(attention(layer_of("qwen2"), **inputs)[0], whole[:, -3:])


def test_a_static_cache_s_first_mask_is_made() -> None:
    """Its last keys are not the text's, so that a missing mask would mean something else."""
    mask = kernel_mask(batch_size=1, q_length=3, kv_length=8)
    assert mask[0, 0].tolist() == torch.ones(3, 8).tril().bool().tolist()
    assert kernel_mask(batch_size=1, q_length=3, kv_length=3) is None, "a prompt's causal mask is left to torch"


@pytest.mark.parametrize("name", ["indices", "block_indices", "softcap", "s_aux"])
def test_what_neither_kernel_knows_is_not_ignored(attention: KernelAttention, name: str) -> None:
    """Chosen keys, soft-capping and sinks: torch's attention raises on them or ignores them without a word."""
    with pytest.raises(UnsupportedModelError, match=f"{name!r}.*sdpa"):
        attention(layer_of("llama"), **arguments(), **{name: torch.zeros(1, 5, 2, dtype=torch.long)})


def test_an_argument_that_the_model_s_own_function_names_is_not_ignored(
    attention: KernelAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever models come to ask for."""

    def with_slope(*args: Any, slope: float | None = None, **kwargs: Any) -> Any: ...

    attention(layer_of("llama"), **arguments(), slope=2.0)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_slope)
    with pytest.raises(UnsupportedModelError, match="asks for 'slope'"):
        attention(layer_of("llama"), **arguments(), slope=2.0)


def test_an_encoder_s_queries_see_everything(attention: KernelAttention) -> None:
    inputs = arguments() | {"attention_mask": None, "is_causal": False}
    torch.testing.assert_close(attention(layer_of("qwen2"), **inputs)[0], sdpa(layer_of("qwen2"), **inputs))
    assert attention.kernel.calls == [(10, 12, False)]  # type: ignore[attr-defined]


DOUBLE = {name: value if name == "attention_mask" else value.double() for name, value in arguments().items()}
BIASED = arguments() | {"position_bias": torch.randn(1, 4, 5, 12)}
REASONS: dict[str, dict[str, Any]] = {
    "xformers' kernels need heads of a multiple of 4 numbers, not 10": arguments(head_dim=10),
    "xformers has no kernel for float64": DOUBLE,
    "dropout or gradients are wanted": arguments() | {"query": torch.randn(1, 4, 5, 16, requires_grad=True)},
    "layers have position biases of their own, or the cache is paged": BIASED,
}


def test_on_a_cpu_all_of_it_is_torch_s() -> None:
    inputs = arguments()
    tensors = (inputs["query"], inputs["key"], inputs["value"])
    assert KernelAttention().reason_against(*tensors, 0.0, {}) == "xformers has no kernel for cpu"


@pytest.mark.parametrize("reason", REASONS)
def test_what_the_kernel_cannot_do_is_torch_s_and_said_once(
    attention: KernelAttention, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            output = attention(layer_of("qwen2"), **REASONS[reason])[0]
    torch.testing.assert_close(output, sdpa(layer_of("qwen2"), **REASONS[reason]))
    assert attention.kernel.calls == []  # type: ignore[attr-defined]
    assert [record.getMessage() for record in caplog.records] == [
        f"'strict' attention uses torch's own instead: {reason}"
    ]
