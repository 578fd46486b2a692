"""Where layers of a few tokens take the kernels: in this package's own forwards, and nowhere else."""

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_specdec
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.kernels import cpu
from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from tests.helpers.support import plain
from tests.kernels.layer_cases import has_core, inside, layer, tokens

pytestmark = has_core


def test_outside_of_a_block_and_in_other_threads_torch_computes(products: list[int]) -> None:
    module, inputs = layer(), tokens(3, 256)
    with torch.no_grad(), FewTokenLayers(module):
        thread = threading.Thread(target=lambda: torch.no_grad()(module)(inputs))
        thread.start()
        thread.join()
        assert products == []
        module(inputs)
    assert products == [3]
    module(inputs)
    assert products == [3]


def test_a_copy_made_in_a_block_is_a_layer_as_any_other_after_the_next_block(products: list[int]) -> None:
    module, inputs = layer(), tokens(3, 256)
    with torch.no_grad(), FewTokenLayers(module):
        twin = copy.deepcopy(module)
    assert "forward" not in vars(module)
    assert twin(inputs).equal(module(inputs))
    assert products == []
    inside(twin, inputs)
    assert products == [3]
    assert "forward" not in vars(twin)


def test_a_model_is_no_other_one_while_a_block_is_open() -> None:
    """Another thread's call on it finds what is known of it."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
    before = fingerprint(model)
    with torch.no_grad(), FewTokenLayers(model):
        assert "forward" in vars(model.lm_head)
        assert fingerprint(model) == before


def own_forward(module: torch.nn.Linear) -> None:
    module.forward = lambda input: F.linear(input, module.weight, module.bias)  # type: ignore[method-assign]


def compile_it(module: torch.nn.Linear) -> None:
    module.compile(backend="eager")


def transpose(module: torch.nn.Linear) -> None:
    module.weight.data = module.weight.data.T.contiguous().T


class Traced(torch.Tensor):
    """A tensor that is not torch's own."""


def wrap(module: torch.nn.Linear) -> None:
    module.weight = torch.nn.Parameter(module.weight.data.as_subclass(Traced), requires_grad=False)


def make_sparse(module: torch.nn.Linear) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch's support is in beta
        module.weight = torch.nn.Parameter(module.weight.data.to_sparse_csr(), requires_grad=False)


@pytest.mark.parametrize("change", [own_forward, compile_it, transpose, wrap, make_sparse])
def test_layers_that_are_not_torchs_own_keep_their_forward(
    change: Callable[[torch.nn.Linear], None], products: list[int]
) -> None:
    module, inputs = layer(), tokens(3, 256)
    expected = copy.deepcopy(module)(inputs)
    change(module)
    torch.testing.assert_close(inside(module, inputs).as_subclass(torch.Tensor), expected)
    assert products == []


class Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_classes_derived_from_linear_keep_their_forward(products: list[int]) -> None:
    module, inputs = Doubling(256, 131), tokens(3, 256)
    torch.testing.assert_close(inside(module, inputs), module(inputs))
    assert products == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_emulated", [True, False])
def test_prompts_have_the_kernels_where_these_need_not_be_timed_first(
    is_emulated: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_emulated", lambda dtype: is_emulated and dtype != torch.float32)
    assert FewTokenLayers(layer(dtype=dtype)).reads_prompts is (is_emulated or dtype == torch.float32)


@pytest.mark.parametrize("method", ["plain", "auto"])
def test_a_prompt_of_fp32_is_computed_by_the_core(method: str, products: list[int], norms: list[int]) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype=torch.float32)
    prompt = torch.arange(5, 45)[None]
    result = model.generate(prompt, max_new_tokens=1, do_sample=False, spec_method=method)
    assert {40} <= {*products} & {*norms}
    assert result.tolist() == plain(model, prompt, max_new_tokens=1, do_sample=False).tolist()


@pytest.mark.parametrize("mode", ["gradients", "autocast", "deterministic", "dispatch"])
def test_nothing_is_changed_where_torch_is_watched_or_told_how_to_compute(mode: str, products: list[int]) -> None:
    module, inputs = layer(), tokens(3, 256)
    if mode == "gradients":
        with FewTokenLayers(module.requires_grad_(True)):
            assert module(inputs).requires_grad
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert inside(module, inputs).dtype == torch.bfloat16
    elif mode == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            inside(module, inputs)
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        with FlopCounterMode(display=False) as counter:
            inside(module, inputs)
        assert counter.get_total_flops() == 2 * 3 * 256 * 131
    assert products == []
