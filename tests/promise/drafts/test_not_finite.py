"""Drafted tokens whose forwards are not finite: columns that a text rejects never reach a token of it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import StaticCache

import hf_specdec
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.caches import CACHE
from tests.helpers.support import MASK, PADDED, PROMPT, plain, results_of
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

CALL: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}


class BrokenDrafter(hf_specdec.Drafter):
    """Drafts a token that has no embedding, before and after others, at every second step."""

    def __init__(self, token: int) -> None:
        self.token, self.text, self.steps = token, [0], 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text = list(prompt_ids)

    def propose(self, budget: int) -> DraftTree:
        self.steps += 1
        builder = TreeBuilder(self.text[-1])
        builder.add(0, self.token if self.steps % 2 else 7)
        builder.add(builder.add(0, 9), 11)
        return builder.build()

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.text += accepted


def broken(family: str, text: Sequence[int], number: float) -> tuple[Any, int]:
    """The enabled model with such numbers in the embedding of a token that is not in `text`, and the token."""
    model, token = build(FAMILIES[family]), next(item for item in range(3, VOCAB_SIZE) if item not in text)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = number
    return hf_specdec.enable(model), token


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e38], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "lfm2", "minimax", "bloom", "bart"])
def test_a_draft_that_is_not_finite_leaves_the_text_as_it_is(family: str, number: float) -> None:
    expected = plain(build(FAMILIES[family]), PROMPT, **CALL)[0].tolist()
    model, token = broken(family, [*expected, *PROMPT[0].tolist()], number)
    drafter = BrokenDrafter(token)
    output = model.generate(PROMPT, spec_method=lambda: drafter, return_dict_in_generate=True, **CALL)
    assert output.sequences[0].tolist() == expected
    assert output.spec_stats.plain_reason is None
    assert output.spec_stats.num_draft_tokens > 0


@pytest.mark.parametrize("way", ["batch", "many", "static", "sampled"])
def test_nor_does_it_reach_another_row_or_step(way: str) -> None:
    """Rows of different lengths and static caches have columns that a forward hides."""
    clean = build(FAMILIES["llama"])
    rows = plain(clean, PADDED, attention_mask=MASK, **CALL)
    torch.manual_seed(1)
    sampled = plain(clean, PROMPT, max_new_tokens=14, do_sample=True)
    model, token = broken("llama", [*rows.flatten().tolist(), *sampled[0].tolist()], float("nan"))
    method: dict[str, Any] = {"spec_method": lambda: BrokenDrafter(token)}
    if way == "batch":
        assert torch.equal(model.generate(PADDED, attention_mask=MASK, **method, **CALL), rows)
    elif way == "many":
        prompts = [row[mask.bool()] for row, mask in zip(PADDED, MASK, strict=True)]
        hits = {
            result.index: result.token_ids for result in results_of(model, prompts, max_batch_size=2, **method, **CALL)
        }
        assert [hits[row] for row in range(len(rows))] == rows[:, PADDED.shape[1] :].tolist()
    elif way == "static":
        cache = StaticCache(config=model.config, max_cache_len=96)
        output = model.generate(PROMPT, **{CACHE: cache}, **method, **CALL)
        assert torch.equal(output[0, PROMPT.shape[1] :], rows[0, PROMPT.shape[1] :])
    else:
        torch.manual_seed(1)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=14, do_sample=True, **method), sampled)
