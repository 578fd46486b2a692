"""What a rollout over whole texts counts is what a head does that drafts token by token; its loss is the paper's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from hf_specdec.methods.eagle3.network import load_head
from hf_specdec.tools.train import HeadReport
from hf_specdec.tools.train.examples import Example, Texts, collated
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.writing import read_texts
from tests.helpers.heads import random_head
from tests.training.conftest import CONFIG

LAYERS = (1, 2, 3)


def rollout_of(head: Any, target: LlamaForCausalLM, steps: int = 3, decay: float = 1.0) -> HeadRollout:
    return HeadRollout(head, target, LAYERS, steps=steps, decay=decay)


@torch.no_grad()
def outcome_of(rollout: HeadRollout, *examples: Example) -> dict[str, torch.Tensor]:
    texts = Texts(examples)
    return rollout(**collated([texts[place] for place in range(len(texts))]))


@pytest.fixture(scope="module")
def examples(trained: tuple[Path, HeadReport]) -> list[Example]:
    return [example for text in read_texts(trained[0] / "work" / "texts.jsonl") for example in text]


@pytest.mark.parametrize("num_prompt_tokens", [1, 4])
@torch.no_grad()
def test_counted_acceptance_is_that_of_drafting_token_by_token(
    trained: tuple[Path, HeadReport], target: LlamaForCausalLM, examples: list[Example], num_prompt_tokens: int
) -> None:
    head, ids = load_head(trained[0]), examples[0].ids
    outcome = outcome_of(rollout_of(head, target), Example(ids, num_prompt_tokens))
    text, embed = torch.tensor([ids]), target.get_input_embeddings()
    states_of = target(text, output_hidden_states=True).hidden_states
    fused = head.fuse(torch.cat([states_of[layer] for layer in LAYERS], dim=-1))
    accepted = torch.zeros(3, dtype=torch.long)
    for start in range(num_prompt_tokens, len(ids) - 1):  # the pairs 1..start are known; the chain begins after them
        cache, states, tokens = DynamicCache(), fused[:, :start], text[:, 1 : start + 1]
        positions = torch.arange(1, start + 1)[None]
        for step in range(3):
            width = cache.get_seq_length() + tokens.shape[1]
            mask = torch.ones(tokens.shape[1], width).tril(width - tokens.shape[1]).bool()[None, None]
            states = head(embed(tokens), states, positions, mask, cache)[:, -1:]
            token, place = int(head.target_ids[head.logits(states)[0, -1].argmax()]), start + 1 + step
            if place >= len(ids) or token != ids[place]:
                break
            accepted[step] += 1
            tokens, positions = text[:, place : place + 1], positions[:, -1:] + 1
    assert accepted[0] > 0
    assert outcome["accepted"][0].tolist() == accepted.tolist()
    assert int(outcome["num_positions"][0]) == len(range(num_prompt_tokens, len(ids) - 1))


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_under_the_target_over_what_the_head_drafts(
    target: LlamaForCausalLM, examples: list[Example]
) -> None:
    """Of the first step; positions whose likeliest token the head cannot draft have none."""
    head, example = random_head(target, draft_vocab_size=20), examples[1]
    text, first = torch.tensor([example.ids]), example.num_prompt_tokens
    outputs = target(text, output_hidden_states=True)
    states = head.fuse(torch.cat([outputs.hidden_states[layer] for layer in LAYERS], dim=-1))[:, :-1]
    length = states.shape[1]
    mask = torch.ones(length, length).tril().bool()[None, None]
    positions = torch.arange(1, length + 1)[None]
    drafted = head(target.get_input_embeddings()(text[:, 1:]), states, positions, mask, DynamicCache())
    logits = head.logits(drafted)[0, first - 1 : -1]  # of the tokens after the first one that is learned
    expected = outputs.logits[0, first:-1]
    labels = expected[:, head.target_ids].softmax(-1)
    is_used = torch.isin(expected.argmax(-1), head.target_ids)
    assert 0 < int(is_used.sum()) < len(is_used)
    nats = torch.nn.functional.cross_entropy(logits[is_used], labels[is_used])
    torch.testing.assert_close(outcome_of(rollout_of(head, target, steps=1), example)["loss"], nats)


def test_later_steps_weigh_less(target: LlamaForCausalLM, examples: list[Example]) -> None:
    head = random_head(target)
    losses = [float(outcome_of(rollout_of(head, target, 2, decay), examples[0])["loss"]) for decay in (0.0, 0.5, 1.0)]
    assert losses[1] == pytest.approx((losses[0] + losses[2]) / 2)
    assert losses[2] > losses[0]


def test_padding_changes_nothing(target: LlamaForCausalLM, examples: list[Example]) -> None:
    """Texts with prompts and answers of several lengths, together and alone."""
    rows = [Example(examples[0].ids, 4), Example(examples[1].ids[:12], 1), Example(examples[2].ids[3:18], 6)]
    rollout = rollout_of(random_head(target), target, CONFIG.rollout_steps)
    together, alone = outcome_of(rollout, *rows), [outcome_of(rollout, row) for row in rows]
    for name in ("accepted", "num_positions"):
        assert together[name].tolist() == [outcome[name][0].tolist() for outcome in alone]
    rollout = rollout_of(random_head(target), target, 1)
    sizes = torch.tensor([float(outcome["num_positions"]) for outcome in alone])
    mean = sum(size * outcome_of(rollout, row)["loss"] for size, row in zip(sizes, rows, strict=True)) / sizes.sum()
    torch.testing.assert_close(outcome_of(rollout, *rows)["loss"], mean)
