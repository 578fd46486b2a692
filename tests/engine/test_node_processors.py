"""Processors over all nodes of a tree leave each row as one call for that node does, bit for bit, or say where not."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.engine.node_processors import ROUNDING, NodeProcessors
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.tree import DraftTree, TreeBuilder

CPU, VOCAB = torch.device("cpu"), 60
TEXT = TokenBuffer(torch.tensor([[5, 6, 7, 6]]), room=4)
LISTS: dict[str, list[Any]] = {
    "none": [],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(1.3)],
    "top_p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)],
    "two_of_a_kind": [RepetitionPenaltyLogitsProcessor(1.3), RepetitionPenaltyLogitsProcessor(0.8)],
    "all": [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.02),
    ],
}


def tree() -> DraftTree:
    """Nodes of depths 0 to 3; tokens of the text, others, and one that comes again."""
    builder = TreeBuilder(6)
    first, second = builder.add(0, 7), builder.add(0, 9)
    third = builder.add(first, 9)
    builder.add(third, 9)
    builder.add(second, 40)
    return builder.build()


def of(*processors: Any) -> NodeProcessors:
    found = NodeProcessors.of(LogitsProcessorList(processors), CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("name", LISTS)
def test_each_row_is_its_text_s_alone(name: str) -> None:
    nodes, processors = tree(), LogitsProcessorList(LISTS[name])
    logits = torch.randn(len(nodes), VOCAB, generator=torch.Generator().manual_seed(0)) * 3.0
    before = logits.clone()
    scores, _ = of(*processors)(logits, nodes, TEXT)
    assert torch.equal(logits, before)
    for node in range(len(nodes)):
        below = [nodes.tokens[place] for place in nodes.path(node)[1:]]
        ids = torch.tensor([TEXT.tokens + below])
        assert torch.equal(scores[node : node + 1], processors(ids, logits[node : node + 1].clone()))


def test_a_sum_near_the_threshold_is_not_sure() -> None:
    """Half of four equal probabilities are removed at 0.5, or one more: the sum decides by its last bit."""
    logits = torch.full((3, VOCAB), -1e4)
    logits[0, :4] = 0.0
    logits[1, :4] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits[2, :3] = 0.0
    nodes = DraftTree.chain(6, [7, 8])
    _, margins = of(TopPLogitsWarper(0.5))(logits, nodes, TEXT)
    assert margins is not None
    assert [margin > ROUNDING for margin in margins.tolist()] == [False, True, True]
    assert margins[2].item() == pytest.approx(0.5 - 1 / 3, abs=1e-6)
    _, both = of(TopPLogitsWarper(0.5), TopPLogitsWarper(0.9))(logits, nodes, TEXT)
    assert both is not None and bool((both <= margins).all())


@pytest.mark.parametrize("num_sums", [0, 2])
def test_no_row_is_sure_where_a_warper_does_not_add_up_once(monkeypatch: pytest.MonkeyPatch, num_sums: int) -> None:
    """Another version of transformers may compute the same otherwise: each node is then processed alone."""

    def otherwise(warper: TopPLogitsWarper, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for _ in range(num_sums):
            scores.softmax(dim=-1).cumsum(dim=-1)
        return scores

    monkeypatch.setattr(TopPLogitsWarper, "__call__", otherwise)
    _, margins = of(TopPLogitsWarper(0.5))(torch.randn(3, VOCAB), DraftTree.chain(6, [7, 8]), TEXT)
    assert margins is not None and margins.tolist() == [0.0, 0.0, 0.0]


def test_a_row_that_is_sure_has_no_other_order_of_additions() -> None:
    """Sums of one row forwards, by blocks, and in fp64 differ by less than `ROUNDING`, at a vocabulary of 128,000."""
    row = (torch.randn(128_000, generator=torch.Generator().manual_seed(1)) * 3.0).sort().values.softmax(dim=-1)
    exact = row.double().cumsum(dim=-1)
    blocks = row.view(-1, 500).cumsum(dim=-1)
    offsets = torch.cat((torch.zeros(1), blocks[:-1, -1].cumsum(dim=-1)))
    below = exact < 0.2
    assert ((blocks + offsets[:, None]).flatten() - exact)[below].abs().max() < ROUNDING


@pytest.mark.parametrize(
    "processor",
    [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2), lambda ids, s: s],
)
def test_others_are_called_for_each_token(processor: Any) -> None:
    assert NodeProcessors.of(LogitsProcessorList([TemperatureLogitsWarper(0.5), processor]), CPU) is None
