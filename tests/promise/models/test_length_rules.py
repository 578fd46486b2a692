"""Models that change how they compute at some length in ways of their own: plain's text, by trees or plainly."""

from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LogitsProcessor,
)

import hf_specdec
from tests.helpers.support import DRAFTS, PROMPT, plain
from tests.helpers.zoo_wide import build as built
from tests.helpers.zoo_wide import inputs as inputs_of
from tests.helpers.zoo_wide import shrunk

TREES = ("prompt_lookup", "auto", "lookahead")
NEW: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
MADE_ANEW = pytest.mark.filterwarnings("ignore")  # what default configurations leave out


def compared(model: Any, *methods: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[Any]:
    """The statistics of calls that write plain's text."""
    expected = plain(model, prompt, **NEW, **options)
    hf_specdec.enable(model)
    outputs = [
        model.generate(prompt, **NEW, **options, spec_method=method, return_dict_in_generate=True) for method in methods
    ]
    assert all(torch.equal(output.sequences, expected) for output in outputs)
    return [output.spec_stats for output in outputs]


def varied(model: Any, scale: float) -> Any:
    """The model with weights that make its text vary."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=scale)
    return model.eval()


def llama4(floor_scale: int) -> Any:
    config = Llama4TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        max_position_embeddings=1024,
        attention_chunk_size=1024,
        no_rope_layers=[0, 0],
        layer_types=["full_attention"] * 2,
        moe_layers=[],
        floor_scale=floor_scale,
        attn_scale=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = varied(Llama4ForCausalLM(config), 0.25)
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize(("floor_scale", "tier"), [(40, "plain"), (500, "plain"), (8192, "tree")])
def test_attention_that_is_scaled_by_columns(floor_scale: int, tier: str) -> None:
    """A prompt alone, a padded batch, and a long prompt next to short ones; far below the length they are trees.

    Of the 54 tokens of a text some are scaled at 40; at 500 columns of a step might be.
    """
    model, ids = llama4(floor_scale), PROMPT.repeat(2, 1)
    ids[1, :9] = 0
    for method in TREES:
        alone = compared(model, method)[0]
        batch = compared(model, method, prompt=ids, attention_mask=(ids != 0).long())[0]
        assert (alone.tier, batch.tier) == (tier, tier)
    prompts = [PROMPT.repeat(1, 4)[0].tolist(), PROMPT[0, :7].tolist()]
    expected = [plain(model, torch.tensor([ids]), **NEW)[0].tolist() for ids in prompts]
    for result in hf_specdec.generate_many(model, prompts, **NEW):
        assert prompts[result.index] + list(result.token_ids) == expected[result.index]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("window", [256, 1100])
def test_a_window_that_is_cut_out_of_a_table_of_masks(window: int) -> None:
    """GPT-Neo counts its window in columns, whatever a short prompt and sharp attention show of it."""
    config = GPTNeoConfig(
        vocab_size=128,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=4096,
        intermediate_size=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = varied(GPTNeoForCausalLM(config), 0.3)
    model.generation_config.eos_token_id = None
    prompt = PROMPT.repeat(1, 2 * window // PROMPT.shape[1])[:, : window + 40]
    hits = compared(model, "prompt_lookup", "auto", prompt=prompt)
    assert [stats.tier for stats in hits] == ["chain"] * 2
    expected = plain(model, prompt, **NEW)[0].tolist()
    output = model.generate(prompt, **NEW, **DRAFTS["random_trees"](expected), return_dict_in_generate=True)
    assert output.sequences[0].tolist() == expected
    prompts = [prompt[0].tolist(), prompt[0, 3:].tolist(), PROMPT[0, :7].tolist()]
    texts = [plain(model, torch.tensor([ids]), **NEW)[0].tolist() for ids in prompts]
    for result in hf_specdec.generate_many(model, prompts, **NEW):
        assert prompts[result.index] + list(result.token_ids) == texts[result.index]


@MADE_ANEW
def test_a_chain_with_a_token_of_padding_in_it() -> None:
    """Kosmos-2.5 counts the tokens before each one that are not padding, in a forward of several otherwise."""
    model = built(shrunk("kosmos-2.5"), "image", 0.15)
    inputs = inputs_of(model, rows=1)
    expected = plain(model, **inputs, **NEW, logits_processor=[Padding()])
    hf_specdec.enable(model)
    draft = DRAFTS["oracle"](expected[0].tolist())
    output = model.generate(**inputs, **NEW, **draft, logits_processor=[Padding()], return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert "token of padding" in output.spec_stats.plain_reason


class Padding(LogitsProcessor):
    """Every fifth token is one of padding."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        if input_ids.shape[1] % 5 == 0:
            scores = scores.clone()
            scores[:, 1] = 1e4
        return scores
