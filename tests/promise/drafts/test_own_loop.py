"""A model whose class decodes by a loop of its own, or returns an output of its own, is left to it and says why."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DiaConfig, DiaForConditionalGeneration, LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

import hf_specdec
from hf_specdec.call.rules.model import OWN_LOOP
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


class Refusing(LlamaForCausalLM):
    """Knows its own arguments alone, and no decoding method, as Musicgen's classes."""

    def generate(self, inputs: Any = None, max_new_tokens: int = 4, **kwargs: Any) -> Any:
        is_dict = kwargs.pop("return_dict_in_generate", False)
        self._validate_model_kwargs(kwargs)
        text = inputs
        for _ in range(max_new_tokens):
            text = torch.cat([text, self(text).logits[:, -1:].argmax(-1)], dim=1)
        return GenerateDecoderOnlyOutput(sequences=text) if is_dict else text


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


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_a_class_that_takes_no_decoding_method_writes_its_text(method: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Refusing(LlamaConfig(**DECODER)).eval()
    expected = model.generate(PROMPT, max_new_tokens=6)
    hf_specdec.enable(model)
    output = model.generate(PROMPT, max_new_tokens=6, spec_method=method, return_dict_in_generate=True)
    assert output.sequences.equal(expected)
    assert (output.spec_stats.num_tokens, output.spec_stats.plain_reason) == (6, OWN_LOOP)
    assert model.generate(PROMPT, max_new_tokens=6, spec_method=method).equal(expected)
    assert [OWN_LOOP in message for message in caplog.messages] == [True]
    with pytest.raises(ValueError, match="'no_such_name'"):
        model.generate(PROMPT, max_new_tokens=6, spec_method=method, no_such_name=1)


def test_sound_of_a_loop_of_its_own_comes_with_the_reason() -> None:
    """Dia's codes, of which a prompt has several in each step."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    cross = {
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 8,
        "cross_hidden_size": 32,
    }
    decoder = {**sizes, **heads, **cross, "vocab_size": 50, "num_channels": 3, "max_position_embeddings": 64}
    tokens = {"delay_pattern": [0, 1, 2], "eos_token_id": 47, "pad_token_id": 48, "bos_token_id": 49}
    encoder = {**sizes, **heads, "vocab_size": 60, "max_position_embeddings": 64}
    model = DiaForConditionalGeneration(DiaConfig(encoder_config=encoder, decoder_config=decoder, **tokens)).eval()
    ids = PROMPT[:, :12] % 40 + 3
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    hf_specdec.enable(model)
    output = model.generate(ids, max_new_tokens=6, do_sample=False, spec_method="auto", return_dict_in_generate=True)
    assert output.sequences.equal(expected)
    assert output.spec_stats.plain_reason == OWN_LOOP
    with pytest.raises(hf_specdec.UnsupportedModelError, match="writes no text"):
        list(hf_specdec.generate_many(model, [ids[0]], max_new_tokens=6, do_sample=False))
