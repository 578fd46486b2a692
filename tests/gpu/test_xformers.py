"""xformers' real kernels against torch's attention, and whole models on them. Run with -m gpu."""

import copy
import logging
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.compat.attention import attention_function_of
from hf_specdec.kernels.xformers import attend, xformers_kernel
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.support import PROMPT, plain
from tests.kernels.families import OFFERED, family_model, padded
from tests.kernels.test_layout import DTYPES, HEADS, expected, tensors, tree_mask

pytest.importorskip("xformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {"fp32": 2e-3, "bf16": 2e-2, "fp16": 4e-3}  # in fp32 the operators multiply in TF32 or three times that
SAID = "'xformers' attention uses torch's own instead"


def on_gpu(*given: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in given]


@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_masked_attention_is_torch_s(heads: str, dtype: str, queries: int, head_dim: int) -> None:
    given = tensors(heads, dtype, queries=queries, keys=queries + 301, head_dim=head_dim, value_dim=head_dim)
    query, key, value, mask = on_gpu(*given, tree_mask(2, queries, queries + 301, text=3))
    output = attend(xformers_kernel, query, key, value, mask, 0.3)
    wanted = expected(query, key, value, mask)
    torch.testing.assert_close(output.float(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("family", OFFERED)
def test_speculation_on_the_kernel_gives_plain_generate_s_text(family: str) -> None:
    """In fp32, alone and padded, against the model's own attention."""
    model = copy.deepcopy(family_model(family)).cuda()
    for rows in (1, 3):
        inputs = {name: value.cuda() for name, value in padded(PROMPT, rows=rows).items()}
        model.set_attn_implementation("eager")
        wanted = plain(model, **inputs, max_new_tokens=16, do_sample=False)
        model.set_attn_implementation("xformers")
        for drafter in (OracleDrafter, RandomTreeDrafter):
            texts = iter(wanted.tolist())
            output = model.generate(
                **inputs,
                max_new_tokens=16,
                do_sample=False,
                spec_method=lambda: drafter(next(texts)),  # noqa: B023
            )
            assert output.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama_mha", "llama_mqa", "qwen2", "qwen3_moe", "gemma3_wide", "mistral_wide"])
def test_the_kernel_is_used_and_trees_are_found(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    attention: Any = attention_function_of("xformers")
    attention._said.clear()
    model = copy.deepcopy(family_model(family)).to("cuda", dtype)
    model.set_attn_implementation("xformers")
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assert hf_specdec.capability(model).tier == "tree"
        model.generate(PROMPT.cuda(), max_new_tokens=16, do_sample=False, spec_method="prompt_lookup")
    assert not [record for record in caplog.records if record.getMessage().startswith(SAID)]
