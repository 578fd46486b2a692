"""Forwards of one width on a CUDA device: a token's logits are the same bits in each. Run with -m gpu."""

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.engine.static_shapes import ORDERED_WIDTH
from tests.helpers.text_order import SHAPES, check_model, check_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
        reason="needs a CUDA device and Triton",
    ),
]
CUDA = torch.device("cuda")
HALVES = [torch.bfloat16, torch.float16]
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup", "spec_config": {"num_branches": 4}},
    "auto": {"spec_method": "auto", "spec_config": {"pool": "request"}},
    "lookahead": {"spec_method": "lookahead"},
}


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (96, 3000, 4), (33, 8000, 1)], ids=str)
def test_a_node_has_the_bits_of_its_token_alone(dtype: torch.dtype, shape: tuple[int, int, int], dim: int) -> None:
    check_nodes(importlib.import_module("hf_specdec.kernels.text_order"), dtype, shape, device=CUDA, dim=dim)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [(4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008), (49152, 576)], ids=str)
def test_a_product_of_one_width_computes_its_rows_alike(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Whatever their place, and whatever the others are."""
    weight = torch.randn(size, device=CUDA, dtype=dtype)
    states = torch.randn(ORDERED_WIDTH, size[1], device=CUDA, dtype=dtype)
    whole, order = torch.nn.functional.linear(states, weight), torch.randperm(ORDERED_WIDTH, device=CUDA)
    assert torch.equal(torch.nn.functional.linear(states[order], weight), whole[order])
    for row in (0, 15, 16, 64, ORDERED_WIDTH - 1):
        others = torch.randn_like(states)
        others[0] = states[row]
        assert torch.equal(torch.nn.functional.linear(others, weight)[0], whole[row])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_logits_of_trees_are_those_of_single_tokens(method: str, do_sample: bool) -> None:
    path = hf_specdec.embedded.path("target")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(CUDA)
    hf_specdec.enable(model, plain_kernels=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer("def main(argv=None):\n    parser = argparse.", return_tensors="pt").input_ids.to(CUDA)
    options = {"max_new_tokens": 64, "do_sample": do_sample, "temperature": 0.7, "cache_implementation": "static"}
    check_model(model, prompt, options, METHODS[method])
