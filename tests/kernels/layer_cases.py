"""Layers, tokens for them, and what they compute inside a block."""

from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

import hf_specdec
from hf_specdec.kernels import cpu
from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from tests.helpers.support import PROMPT, plain

__all__ = ["draw", "has_core", "inside", "layer", "sizes", "tokens", "transposed", "writes_plains_text"]
has_core = pytest.mark.skipif(
    cpu.core is None or not cpu.core.has_kernels(), reason="no compiled core, or a processor that it does not know"
)


def layer(num_in: int = 256, num_out: int = 131, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(num_in, num_out, dtype=dtype, **kwargs).requires_grad_(False)


def transposed(num_in: int = 256, num_out: int = 144, dtype: torch.dtype = torch.float32) -> Conv1D:
    torch.manual_seed(0)
    module = Conv1D(num_out, num_in)
    torch.nn.init.normal_(module.bias, std=0.1)
    return module.to(dtype).requires_grad_(False)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def inside(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with FewTokenLayers(module):
        result: torch.Tensor = module(inputs)
    return result


def writes_plains_text(method: str) -> None:
    """Fail where the embedded models write another text than plain `generate`, greedily or sampled, in fp32."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype=torch.float32)
    drafts = {
        "draft_model": lambda: hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("draft")),
        "eagle3": lambda: hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head")),
    }
    how = {"assistant_model": drafts[method]().float()} if method in drafts else {}
    for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        torch.manual_seed(3)
        expected = plain(model, PROMPT, max_new_tokens=24, **settings)
        torch.manual_seed(3)
        result = model.generate(
            PROMPT, max_new_tokens=24, spec_method=method, return_dict_in_generate=True, **how, **settings
        )
        assert result.sequences.tolist() == expected.tolist()
        assert result.spec_stats.plain_reason is None


def sizes(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=generator))
