"""RMSNorm of a few tokens: the kernel computes what transformers' classes do."""

import itertools

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_specdec.kernels import cpu, layers
from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from tests.kernels.layer_cases import has_core, inside, tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a result, relative: sums of squares in another order; in halves those may round to the neighbouring number, twice.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
pytestmark = has_core


def norm(size: int = 256, dtype: torch.dtype = torch.float32, epsilon: float = 1e-6) -> LlamaRMSNorm:
    module = LlamaRMSNorm(size, epsilon)
    torch.nn.init.normal_(module.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_the_classs_but_for_its_rounding(dtype: torch.dtype, norms: list[int]) -> None:
    """Of all remainders of what is added up at once, from tiny numbers to those whose squares are large."""
    for size, scale in itertools.product((8, 24, 40, 256, 1288), (1e-3, 1.0, 1e2)):
        module, inputs = norm(size, dtype, 1e-5), (tokens(2, 3, size) * scale).to(dtype)
        result = inside(module, inputs)
        assert result.dtype == dtype and result.shape == inputs.shape
        torch.testing.assert_close(result, module(inputs), atol=0.0, rtol=ROUNDING[dtype])
        assert norms.pop() == 6


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_halves_are_rounded_where_the_class_rounds_them(dtype: torch.dtype, norms: list[int]) -> None:
    """Numbers whose squares add up exactly, in any order, give the same bits."""
    module = norm(64, dtype)
    inputs = torch.randint(-8, 8, (40, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    once = (
        module.weight.double() * inputs.double() * (inputs.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    ).to(dtype)
    expected = module(inputs)
    assert not torch.equal(once, expected)
    assert torch.equal(inside(module, inputs), expected)
    assert norms == [40]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_computed_alike_whatever_stands_beside_it(dtype: torch.dtype, norms: list[int]) -> None:
    module, inputs = norm(dtype=dtype), tokens(9, 256, dtype=dtype)
    together = inside(module, inputs)
    for place, alone in enumerate(inputs):
        assert torch.equal(inside(module, alone), together[place])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_what_is_no_number_stay_so(dtype: torch.dtype, norms: list[int]) -> None:
    module, inputs = norm(dtype=dtype), tokens(4, 256, dtype=dtype)
    inputs[0, 5], inputs[1, 7], inputs[2] = float("nan"), float("inf"), 0.0
    torch.testing.assert_close(inside(module, inputs), module(inputs), equal_nan=True, atol=0.0, rtol=ROUNDING[dtype])
    assert norms == [4]


def test_any_shape_and_layout_of_tokens(norms: list[int]) -> None:
    """Norms of queries and keys get a token's heads, one after the other."""
    module = norm()
    for inputs in (tokens(2, 3, 4, 256), tokens(256), tokens(2, 9, 256)[:, ::3], tokens(256, 5).T, tokens(0, 256)):
        torch.testing.assert_close(inside(module, inputs), module(inputs))
    assert norms == [24, 1, 6, 5]


@pytest.mark.parametrize("kind", [MistralRMSNorm, Qwen3RMSNorm])
def test_classes_with_the_code_of_llamas_are_computed_too(kind: type[torch.nn.Module], norms: list[int]) -> None:
    module, inputs = kind(256).requires_grad_(False), tokens(3, 256)
    torch.testing.assert_close(inside(module, inputs), module(inputs))
    assert norms == [3]


class Twice(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class InHalves(LlamaRMSNorm):
    """As Llama's, but for the precision that it computes in."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float16)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Twice, InHalves, torch.nn.RMSNorm])
def test_classes_that_compute_anything_else_keep_their_forward(kind: type[torch.nn.Module], norms: list[int]) -> None:
    module, inputs = kind(256).requires_grad_(False), tokens(3, 256)
    torch.testing.assert_close(inside(module, inputs), module(inputs))
    assert norms == []


def test_a_class_whose_forward_was_replaced_keeps_it(norms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = norm(), tokens(3, 256)
    inside(module, inputs)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden_states: hidden_states + 1)
    assert torch.equal(inside(module, inputs), inputs + 1)
    assert norms == [3]


def test_a_weight_that_changes_after_the_block_was_made_is_the_one_that_counts(norms: list[int]) -> None:
    module, inputs = norm(), tokens(3, 256)
    block = FewTokenLayers(module)
    module.weight = torch.nn.Parameter(2 * module.weight, requires_grad=False)
    with torch.no_grad(), block:
        replaced = module(inputs)
    torch.testing.assert_close(replaced, module(inputs))
    block = FewTokenLayers(module)
    module.weight.data = module.weight.data.double()
    with torch.no_grad(), block:
        assert module(inputs).dtype == torch.float64
    assert norms == []


def test_torch_computes_many_tokens(norms: list[int]) -> None:
    most, module = layers.MOST_NUMBERS // 256, norm()
    for count in (most, most + 1):
        inside(module, tokens(count, 256))
    assert norms == [most]


def test_hooks_see_the_norm(norms: list[int]) -> None:
    module, inputs, seen = norm(), tokens(3, 256), []
    module.register_forward_hook(lambda _module, _args, result: seen.append(result))
    assert seen == [] and inside(module, inputs) is seen[0]
    assert norms == [3]


def test_the_core_refuses_what_it_cannot_norm() -> None:
    inputs, weight, out = tokens(2, 256), norm().weight, torch.empty(2, 256)
    place = inputs.data_ptr(), weight.data_ptr(), out.data_ptr()
    for sizes in ((2, 252, 1e-6, 0), (2, 0, 1e-6, 0), (2, 256, 1e-6, 3)):
        with pytest.raises(ValueError, match="no norm"):
            cpu.core.rms_norm(*place, *sizes)
