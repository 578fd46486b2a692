"""Likeliest tokens after each token of a prompt are those of the model's own logits, or are not given."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RemBertConfig,
    RemBertForCausalLM,
)

import hf_specdec
from hf_specdec.forward import prompt
from hf_specdec.methods.auto.drafter import AutoDrafter, AutoSpecConfig
from hf_specdec.methods.common.node_logits import Array
from tests.native.recycled import get, key_of

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PROMPTS = [[5, 9, 9, 3, 40, 7], [0, 0, 0, 8, 2, 61]]  # the second padded
PADDING = 3


class Told(AutoDrafter):
    """Keeps what it is told of its prompt."""

    heard: tuple[Array, Array] | None = None

    def learn_prompt(self, tokens: Array, log_probs: Array) -> None:
        self.heard = tokens, log_probs
        super().learn_prompt(tokens, log_probs)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return hf_specdec.enable(LlamaForCausalLM(LlamaConfig(**SIZES)).eval())


def drafters_of(model: PreTrainedModel) -> list[Told]:
    """The drafters of a batch of both prompts."""
    made: list[Told] = []

    def make() -> Told:
        made.append(Told(AutoSpecConfig(num_nodes=4)))
        return made[-1]

    ids = torch.tensor(PROMPTS)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    model.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=2, do_sample=False, spec_method=make)
    return made[-2:]


def expected_of(model: PreTrainedModel, tokens: Sequence[int], looked_at: Sequence[int]) -> tuple[Array, Array]:
    """The eight likeliest of the tokens looked at after each token but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1, list(looked_at)]
    top = logits.log_softmax(-1).topk(8)
    return np.array(looked_at)[top.indices.numpy()], top.values.numpy()


def test_each_row_is_told_of_its_own_prompt(model: PreTrainedModel) -> None:
    for drafter, tokens in zip(drafters_of(model), (PROMPTS[0], PROMPTS[1][PADDING:]), strict=True):
        assert drafter.heard is not None
        likeliest, log_probs = expected_of(model, tokens, range(64))
        assert drafter.heard[0].tolist() == likeliest.tolist()
        np.testing.assert_allclose(drafter.heard[1], log_probs, atol=1e-4)


def test_of_many_tokens_the_first_ids_and_the_prompt_s_own_are_looked_at(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt, "NUM_FREQUENT", 8)
    message = drafters_of(model)[0].heard
    assert message is not None
    assert message[0].tolist() == expected_of(model, PROMPTS[0], [*range(8), 9, 40])[0].tolist()


def test_logits_that_the_model_scales_are_left_alone() -> None:
    model = hf_specdec.enable(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)).eval())
    assert [drafter.heard for drafter in drafters_of(model)] == [None, None]


def test_states_that_the_head_reads_projected_are_left_alone() -> None:
    config = RemBertConfig(**SIZES, input_embedding_size=8, output_embedding_size=32, is_decoder=True)
    model = hf_specdec.enable(RemBertForCausalLM(config).eval())
    assert [drafter.heard for drafter in drafters_of(model)] == [None, None]


def test_what_a_prompt_tells_is_found_under_its_tokens() -> None:
    drafter = AutoDrafter(AutoSpecConfig(num_nodes=4))
    drafter.begin([5, 6, 7, 8])
    drafter.learn_prompt(np.array([[1, 2], [3, 4]]), np.log([[0.5, 0.2], [0.6, 0.1]]).astype(np.float32))
    recycled = drafter.memory.recycled
    entries = [get(recycled, key_of(key)) for key in ([5], [6], [5, 6], [7], [5, 6, 7], [8])]
    assert [entry and entry[0] for entry in entries] == [None, [1, 2], [1, 2], [3, 4], [3, 4], None]
