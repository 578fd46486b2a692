"""Heads that leave out the beginning of a prompt: they score as if they had only got the states of its end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.networks.block_runner import BlockRunner
from hf_specdec.forward.networks.head_base import BaseHeadRunner, HeadCall
from hf_specdec.forward.networks.head_runner import HeadRunner
from hf_specdec.methods.common.draft_head import BlockHead
from hf_specdec.methods.registry import as_head
from tests.helpers.heads import CASES, Zoo

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
KEPT, NUM_FEATURES = 5, 3


@pytest.fixture(params=["eagle3, llama", "eagle3, sliding", "mtp, glm4_moe, 3 layers", "dflash, llama"])
def runner_of(zoo: Zoo, request: pytest.FixtureRequest) -> Callable[[int], BaseHeadRunner[Any]]:
    """A runner that got the states of so many last tokens of the prompt, and its first token after it."""
    case = CASES[request.param]
    target = case.target(zoo)
    head = as_head(case.head(target))
    config = target.config.get_text_config()
    layers = head.layer_ids(config.num_hidden_layers)

    def make(count: int) -> BaseHeadRunner[Any]:
        call = HeadCall(
            prompts=[PROMPT],
            embed=target.get_input_embeddings(),
            hidden_layers=layers,
            vocab_size=config.vocab_size,
            relative_cost=0.1,
            device=torch.device("cpu"),
        )
        is_block = isinstance(head, BlockHead)
        made = BlockRunner(head, call, target.get_output_embeddings()) if is_block else HeadRunner(head, call)
        generator = torch.Generator().manual_seed(1)
        states = [torch.randn(len(PROMPT), config.hidden_size, generator=generator)[-count:] for _ in layers]
        made.read(0, states)
        made.keep(0, [9])
        return made

    return make


@torch.no_grad()
def test_what_is_skipped_is_as_if_it_had_never_come(runner_of: Callable[[int], BaseHeadRunner[Any]]) -> None:
    tree = DraftTree.chain(9, [4, 5])
    runner, expected = runner_of(len(PROMPT)), runner_of(KEPT)
    unread = runner.num_unread(0)
    assert runner.num_skippable(0) == runner.row(0).num_skippable == unread - 1
    runner.is_shared = True
    assert runner.row(0).num_skippable == 0, "the other processes read the whole prompt"
    runner.is_shared = False
    runner.skip(0, unread - expected.num_unread(0))
    assert runner.num_unread(0) == expected.num_unread(0) > 0
    wanted = expected.score([tree])[0].logits
    torch.testing.assert_close(runner.score([tree])[0].logits, wanted)
    assert not torch.allclose(runner_of(len(PROMPT)).score([tree])[0].logits, wanted)
    runner.keep(0, [4])
    assert runner.num_unread(0) == runner.num_skippable(0) == 0, "what was read stays"
