"""Whatever plain `generate` reads, ours reads: embeddings, masks, positions, batches, several answers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import (
    CHAIN_DRAFTS,
    DRAFTS,
    PROMPT,
    assert_same_run,
    both,
    plain,
    run,
    speculative,
)
from tests.helpers.zoo_wide import inputs, varied
from tests.promise.conftest import Draft

LOOKUP = {"spec_method": "prompt_lookup"}
PAD = 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_embeddings_may_stand_for_the_prompt(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """Without ids the output holds the new tokens only."""
    model = zoo(family)
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    reference, ours = both(model, lambda: {"inputs_embeds": embeddings}, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) == 16


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_ids_beside_the_embeddings_are_part_of_the_output(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    model = zoo(family)
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    reference, ours = both(model, lambda: {"inputs_embeds": embeddings, "input_ids": PROMPT}, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) == 30 + 16


def test_embeddings_that_no_id_has_are_read_as_well(model: Any, draft: Draft) -> None:
    """A soft prompt in front: more embeddings than ids."""
    embeddings = model.get_input_embeddings()(PROMPT).detach()
    soft = torch.cat([torch.randn(1, 5, embeddings.shape[-1]) * 0.1, embeddings], dim=1)
    reference, ours = both(model, lambda: {"inputs_embeds": soft, "do_sample": True}, draft)
    assert_same_run(ours, reference)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral", "gemma3", "bloom"])
def test_a_left_padded_row_is_read_with_its_mask(zoo: Callable[[str], Any], draft: Draft, family: str) -> None:
    """One padded row: the mask reaches every forward, the positions start behind the padding."""
    model = zoo(family)
    padded = torch.cat([torch.full((1, 5), PAD), PROMPT], dim=1)
    mask = (torch.arange(35) >= 5).long()[None]
    reference, ours = both(model, lambda: {"input_ids": padded, "attention_mask": mask}, draft)
    assert_same_run(ours, reference)
    unpadded = run(model, plain, dict)
    assert ours.ids[35:] == unpadded.ids[30:], "the padding was seen"


def test_holes_in_the_mask_are_respected(model: Any, draft: Draft) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, 4:9] = 0
    reference, ours = both(model, lambda: {"attention_mask": mask}, draft)
    assert_same_run(ours, reference)
    assert ours.ids != run(model, plain, dict).ids


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["auto", "random_trees"])
def test_holes_in_a_mask_that_trees_would_miss_are_respected(method: str) -> None:
    """GIT puts columns of an image before the mask that it is given; a tree's mask has none."""
    model = hf_specdec.enable(copy.deepcopy(varied("git", "causal")))
    for hidden in ([3, 4], []):
        mask = torch.ones_like(PROMPT)
        mask[0, hidden] = 0
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
        expected = plain(model, PROMPT, **options)
        drafted = DRAFTS[method](expected[0].tolist())
        output = model.generate(PROMPT, **options, **drafted, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
        reason = "its attention_mask hides tokens, and several sequences at once do not work" if hidden else "None"
        assert str(output.spec_stats.plain_reason).startswith(reason)


def test_positions_of_ones_own_are_continued(model: Any, draft: Draft) -> None:
    positions = torch.arange(30)[None] + 17
    reference, ours = both(model, lambda: {"position_ids": positions}, draft)
    assert_same_run(ours, reference)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "bloom", "t5"])
def test_the_shortest_prompts_work(zoo: Callable[[str], Any], draft: Draft, family: str, length: int) -> None:
    reference, ours = both(zoo(family), lambda: {"input_ids": PROMPT[:, :length]}, draft)
    assert_same_run(ours, reference)


def test_no_prompt_at_all_starts_from_the_first_token(model: Any, draft: Draft) -> None:
    """Plain `generate` puts the begin-of-text token."""
    reference = plain(model, max_new_tokens=8, do_sample=False)
    ours = speculative(model, max_new_tokens=8, do_sample=False, **draft(reference[0].tolist()))
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("draft", CHAIN_DRAFTS, indirect=True)
def test_a_decoder_prompt_is_continued(zoo: Callable[[str], Any], draft: Draft) -> None:
    start = torch.tensor([[0, 48, 34, 125]])
    reference, ours = both(zoo("t5"), lambda: {"decoder_input_ids": start}, draft)
    assert_same_run(ours, reference)
    assert ours.ids[:4] == start[0].tolist()


@pytest.mark.parametrize("draft", CHAIN_DRAFTS, indirect=True)
def test_encoder_outputs_of_ones_own_are_used(zoo: Callable[[str], Any], draft: Draft) -> None:
    model = zoo("t5")
    with torch.no_grad():
        encoded = model.get_encoder()(PROMPT)
    reference, ours = both(model, lambda: {"encoder_outputs": encoded}, draft)
    assert_same_run(ours, reference)


BATCH = torch.cat([PROMPT, PROMPT.roll(3, dims=1), PROMPT.flip(1)])


def test_encoder_outputs_may_be_a_tuple(zoo: Callable[[str], Any]) -> None:
    """As an encoder returns them with `return_dict=False`."""
    model = zoo("bart")
    hf_specdec.enable(hf_specdec.disable(model))
    with torch.no_grad():
        encoded = model.get_encoder()(PROMPT, return_dict=False)
    mask = torch.ones_like(PROMPT)
    call = {"encoder_outputs": encoded, "attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = plain(model, **call).tolist()
    output = model.generate(**call, **LOOKUP, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.plain_reason is None
    assert model.generate(**call, **LOOKUP).tolist() == expected


def test_the_mask_and_the_ids_are_left_alone(model: Any, draft: Draft) -> None:
    ids, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    both(model, lambda: {"input_ids": ids, "attention_mask": mask}, draft)
    assert torch.equal(ids, PROMPT)
    assert torch.equal(mask, torch.ones_like(PROMPT))


def test_ids_of_another_integer_type_are_read(model: Any, draft: Draft) -> None:
    """`int32` ids, as some tokenizers give them."""
    reference, ours = both(model, lambda: {"input_ids": PROMPT.int()}, draft)
    assert_same_run(ours, reference)
    assert ours.output.sequences.dtype == reference.output.sequences.dtype


@pytest.mark.at_most(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_mask_that_one_token_ignores_is_ignored(rows: int) -> None:
    """LED reads it in forwards of several tokens alone."""
    model = hf_specdec.enable(varied("led", "seq2seq"))
    ids = torch.randint(3, 110, (rows, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    call = {**inputs(model, rows=rows), "decoder_input_ids": ids, "max_new_tokens": 20, "do_sample": False}
    expected = plain(model, **call, decoder_attention_mask=mask).tolist()
    assert expected != plain(model, **call).tolist()
    ours = model.generate(
        **call, decoder_attention_mask=mask, spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert ours.sequences.tolist() == expected
    assert "decoder_attention_mask hides tokens" in ours.spec_stats.plain_reason
    full = model.generate(
        **call, decoder_attention_mask=torch.ones_like(ids), spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert (full.spec_stats.plain_reason is None) == (rows == 1), "batches of chains decode plainly"
