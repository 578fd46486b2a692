"""Heads with token embeddings of their own, and a target with tokens that were added after they were made."""

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.eagle3.network import Eagle3Head
from tests.helpers.head_models import HEADS, random_dflash_head
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain, results_of
from tests.helpers.zoo import FAMILIES, VOCAB_SIZE, build

ADDED = VOCAB_SIZE + 3
PROMPTS = {
    "in the middle": torch.cat([PROMPT[:, :4], torch.tensor([[ADDED]]), PROMPT[:, 4:9]], dim=1),
    "at the end": torch.cat([PROMPT[:, :9], torch.tensor([[ADDED]])], dim=1),
}
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def written_at(length: int) -> Any:
    """A processor that lets the target write an added token after so many."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([ADDED]), 1e4) if ids.shape[1] == length else scores

    return [process]


@pytest.fixture(params=["eagle3", *HEADS])
def pair(request: pytest.FixtureRequest) -> tuple[Any, DraftHead]:
    target = build(FAMILIES["llama"])
    head: Any
    if request.param == "eagle3":
        result: Any = random_head(target)
        head = Eagle3Head(result.config, has_embedding=True)
    else:
        result = random_dflash_head(target, kind=request.param)
        head = DFlashHead(result.config, has_embedding=True, has_output_head=result.lm_head is not None)
    head.load_state_dict(result.state_dict(), strict=False)
    head.eval().requires_grad_(False).embed_tokens.weight.normal_(std=0.3)
    target.resize_token_embeddings(VOCAB_SIZE + 8)
    return hf_specdec.enable(target), head


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_holds_one(pair: tuple[Any, DraftHead], prompt: str) -> None:
    target, head = pair
    how = {"spec_method": head.methods[0], "assistant_model": head, "spec_config": {"confidence_threshold": 0.0}}
    expected = plain(target, PROMPTS[prompt], **HOW)
    assert torch.equal(target.generate(PROMPTS[prompt], **HOW, **how), expected)
    assert torch.equal(target.generate(PROMPTS[prompt], **HOW, spec_method="auto", assistant_model=head), expected)


def test_the_target_writes_one(pair: tuple[Any, DraftHead]) -> None:
    target, head = pair
    prompt = PROMPT[:, :6]
    how = {"spec_method": head.methods[0], "assistant_model": head, "spec_config": {"confidence_threshold": 0.0}}
    ours = target.generate(prompt, **HOW, **how, logits_processor=written_at(10))
    assert int(ours[0, 10]) == ADDED
    assert torch.equal(ours, plain(target, prompt, **HOW, logits_processor=written_at(10)))


def test_one_of_many_prompts_holds_one(pair: tuple[Any, DraftHead]) -> None:
    target, head = pair
    prompts = [PROMPT[0, :5].tolist(), PROMPTS["in the middle"][0].tolist(), PROMPTS["at the end"][0].tolist()]
    how = {"spec_method": head.methods[0], "assistant_model": head}
    for result in results_of(target, prompts, max_batch_size=3, **HOW, **how):
        alone = plain(target, torch.tensor([prompts[result.index]]), **HOW)[0, len(prompts[result.index]) :]
        assert list(result.token_ids) == alone.tolist()
