"""A model whose class decodes by a loop of its own, or returns an output of its own, is left to it and says why."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import ModelOutput

import hf_specdec
from tests.helpers.support import PROMPT, plain, results_of
from tests.helpers.zoo import DECODER


class Counting(LlamaForCausalLM):
    """Its loop gives each token twice, as no verification of transformers' logits would."""

    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super()._sample(input_ids, **kwargs)
        text = output if isinstance(output, torch.Tensor) else output.sequences
        doubled = torch.cat([input_ids, text[:, input_ids.shape[1] :].repeat_interleave(2, dim=1)], dim=1)
        if isinstance(output, torch.Tensor):
            return doubled
        output.sequences = doubled
        return output


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return hf_specdec.enable(Counting(LlamaConfig(**DECODER)).eval())


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "auto"])
def test_its_loop_writes_the_text(model: Any, method: str) -> None:
    expected = plain(model, PROMPT, max_new_tokens=40)
    output = model.generate(
        PROMPT, max_new_tokens=40, do_sample=False, spec_method=method, return_dict_in_generate=True
    )
    assert output.sequences.equal(expected)
    assert "a loop of its own" in output.spec_stats.plain_reason


def test_many_prompts_go_through_it_one_by_one(model: Any) -> None:
    expected = plain(model, PROMPT, max_new_tokens=6)[0, PROMPT.shape[1] :].tolist()
    results = results_of(model, [PROMPT[0].tolist()] * 2, max_new_tokens=6, do_sample=False)
    assert [result.token_ids for result in results] == [expected] * 2


@dataclass
class OwnOutput(ModelOutput):
    """Text and what the class makes of it."""

    sequences: torch.Tensor | None = None
    length: int | None = None


class Rebuilding(LlamaForCausalLM):
    """Puts its output together itself, as Csm's, Moshi's and SeamlessM4T's classes."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = super().generate(*args, **kwargs)
        return output if isinstance(output, torch.Tensor) else OwnOutput(output.sequences, output.sequences.shape[1])


@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_an_output_of_the_class_s_own_tells_what_was_drafted(method: str) -> None:
    torch.manual_seed(0)
    model = Rebuilding(LlamaConfig(**DECODER)).eval()
    expected = plain(model, PROMPT, max_new_tokens=12, do_sample=False)
    hf_specdec.enable(model)
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "spec_method": method}
    output = model.generate(PROMPT, **how, return_dict_in_generate=True)
    assert isinstance(output, OwnOutput)
    assert output.sequences.equal(expected)
    assert (output.spec_stats.num_tokens, output.spec_stats.plain_reason) == (12, None)
    assert model.generate(PROMPT, **how).equal(expected)
