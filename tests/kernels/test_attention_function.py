"""One attention call: what goes to the kernel, to torch, to the model's own function, and that all of them agree."""

import logging
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from hf_specdec import UnsupportedModelError
from hf_specdec.kernels.attention import KernelAttention, kernel_mask
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
    return KernelAttention("strict", StrictKernel())


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
    torch.testing.assert_close(attention(layer_of("gemma2"), **inputs, softcap=1e6)[0], whole[:, -3:])


def test_a_static_cache_s_first_mask_is_made() -> None:
    """Its last keys are not the text's, so that a missing mask would mean something else."""
    mask = kernel_mask(batch_size=1, q_length=3, kv_length=8)
    assert mask[0, 0].tolist() == torch.ones(3, 8).tril().bool().tolist()
    assert kernel_mask(batch_size=1, q_length=3, kv_length=3) is None, "a prompt's causal mask is left to torch"


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_the_model_chose_are_not_ignored(attention: KernelAttention, name: str) -> None:
    """Sparse attention hides the others only in the masks of attention that it knows by name."""
    with pytest.raises(UnsupportedModelError, match=f"{name!r}.*sdpa"):
        attention(layer_of("llama"), **arguments(), **{name: torch.zeros(1, 5, 2, dtype=torch.long)})


def test_an_encoder_s_queries_see_everything(attention: KernelAttention) -> None:
    inputs = arguments() | {"attention_mask": None, "is_causal": False}
    torch.testing.assert_close(attention(layer_of("qwen2"), **inputs)[0], sdpa(layer_of("qwen2"), **inputs))
    assert attention.kernel.calls == [(10, 12, False)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("masked", [True, False])
def test_soft_capping_is_the_model_s_own(attention: KernelAttention, masked: bool) -> None:
    """torch's attention raises on it. Where transformers leaves out a causal mask, the model's function gets one."""
    inputs = arguments(keys=12 if masked else 5)
    full = torch.zeros(inputs["attention_mask"].shape).masked_fill_(~inputs["attention_mask"], torch.finfo().min)
    expected = modeling_gemma2.eager_attention_forward(
        layer_of("gemma2"), *list(inputs.values())[:3], full, scaling=0.2, softcap=3.0
    )[0]
    if not masked:
        inputs["attention_mask"] = None
    output = attention(layer_of("gemma2"), **inputs, scaling=0.2, softcap=3.0)[0]
    torch.testing.assert_close(output, expected)
    with pytest.raises(ValueError, match="softcap"):
        sdpa(layer_of("gemma2"), **inputs, scaling=0.2, softcap=3.0)


def test_sinks_are_the_model_s_own(attention: KernelAttention) -> None:
    """torch's attention ignores them without a word."""
    module = layer_of("gpt_oss")
    inputs = arguments()
    sinks = module.sinks
    output = attention(module, **inputs, scaling=0.2, s_aux=sinks)[0]
    ignored = sdpa(module, **inputs, scaling=0.2, s_aux=sinks)
    assert not torch.allclose(output, ignored, atol=1e-2)
    weights = torch.einsum("bhmd,bhkd->bhmk", inputs["query"], inputs["key"].repeat_interleave(2, dim=1)) * 0.2
    weights = weights.masked_fill(~inputs["attention_mask"], -torch.inf)
    weights = torch.cat([weights, sinks.view(1, -1, 1, 1).expand(1, 4, 5, 1)], dim=-1).softmax(-1)[..., :-1]
    expected = torch.einsum("bhmk,bhkd->bmhd", weights, inputs["value"].repeat_interleave(2, dim=1))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_an_argument_that_only_the_model_s_function_names_is_its_own(
    attention: KernelAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever models come to ask for: what their own function names is not ignored here."""
    ours = modeling_llama.eager_attention_forward

    def with_slope(*args: Any, slope: float | None = None, **kwargs: Any) -> Any:
        output, weights = ours(*args, **kwargs)
        return output * (1.0 if slope is None else slope), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_slope)
    plainly = attention(layer_of("llama"), **arguments())[0]
    torch.testing.assert_close(attention(layer_of("llama"), **arguments(), scaling=0.25, slope=2.0)[0], plainly * 2.0)


REASONS: dict[str, dict[str, Any]] = {
    "heads of this size": arguments(head_dim=10),
    "dropout is wanted": arguments() | {"dropout": 1e-12},
    "each layer has a position bias of its own": arguments() | {"position_bias": torch.randn(1, 4, 5, 12)},
    "gradients are wanted": arguments() | {"query": torch.randn(1, 4, 5, 16, requires_grad=True)},
}


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


def test_a_kernel_that_refuses_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """xformers composes a long message each time; layers of another head size may fare better."""

    class Refusing(StrictKernel):
        def __call__(self, query: torch.Tensor, *args: Any) -> Any:
            self.calls.append((query.shape[1], 0, False))
            if query.shape[-1] == 16:
                raise NotImplementedError("No operator found\n  for this")
            return super().__call__(query, *args)

    kernel = Refusing()
    attention = KernelAttention("refusing", kernel)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for head_dim in (16, 16, 8):
            inputs = arguments(head_dim=head_dim)
            torch.testing.assert_close(attention(layer_of("qwen2"), **inputs)[0], sdpa(layer_of("qwen2"), **inputs))
    assert kernel.calls == [(10, 0, False), (10, 0, False), (10, 12, True)]
    assert [record.getMessage() for record in caplog.records] == [
        "'refusing' attention uses torch's own instead: No operator found for this"
    ]
