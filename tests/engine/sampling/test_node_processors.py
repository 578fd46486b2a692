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

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.sampling.node_processors import NodeProcessors
from hf_specdec.forward.text_rows import MAX_UNWRITTEN, TokenBuffer

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
    result = NodeProcessors.of(LogitsProcessorList(processors), CPU)
    assert result is not None
    return result


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_a_penalty_is_transformers_own_bit_for_bit(penalty: float) -> None:
    """Of zeros and infinite scores too, and where the text holds ids that the vocabulary does not."""
    processor, nodes = RepetitionPenaltyLogitsProcessor(penalty), DraftTree.chain(6, [7])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    for tokens in ([0, 1, 2, 3, 20, 21, 6], [0, VOCAB + 5, 20, 6]):
        scores, _ = of(processor)(logits, nodes, TokenBuffer(torch.tensor([tokens]), room=4))
        for node, below in enumerate(([], [7])):
            alone = processor(torch.tensor([tokens + below]), logits[node : node + 1])
            assert torch.equal(scores[node : node + 1].view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("num_new", [0, 2, MAX_UNWRITTEN + 1])
def test_each_row_is_its_text_s_alone(name: str, num_new: int) -> None:
    """New tokens of the text, which are not written on the device yet, among it."""
    text = TokenBuffer(torch.tensor([[5, 6, 7, 6]]), room=1)
    for token in range(40 - num_new, 40):
        text.append(token)
    nodes, processors = tree(), LogitsProcessorList(LISTS[name])
    logits = torch.randn(len(nodes), VOCAB, generator=torch.Generator().manual_seed(0)) * 3.0
    before = logits.clone()
    scores, _ = of(*processors)(logits, nodes, text)
    assert torch.equal(logits, before)
    for node in range(len(nodes)):
        below = [nodes.tokens[place] for place in nodes.path(node)[1:]]
        ids = torch.tensor([text.tokens + below])
        assert torch.equal(scores[node : node + 1], processors(ids, logits[node : node + 1].clone()))


def test_a_sum_near_the_threshold_is_not_sure() -> None:
    """Half of four equal probabilities are removed at 0.5, or one more: the sum decides by its last bit."""
    logits = torch.full((3, VOCAB), -1e4)
    logits[0, :4] = 0.0
    logits[1, :4] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    logits[2, :3] = 0.0
    nodes = DraftTree.chain(6, [7, 8])
    for processors in ([TopPLogitsWarper(0.5)], [TopPLogitsWarper(0.5), TopPLogitsWarper(0.9)]):
        _, pairs = of(*processors)(logits, nodes, TEXT)
        assert len(pairs) == 2 * len(processors)
        assert (pairs[0] == pairs[1]).tolist() == [False, True, True]
        assert torch.equal(pairs[0][1:] - (VOCAB - 4), torch.tensor([3, 2])), "of the last sums those below 0.5"


@pytest.mark.parametrize("num_sums", [0, 2])
def test_no_row_is_sure_where_a_warper_does_not_add_up_once(monkeypatch: pytest.MonkeyPatch, num_sums: int) -> None:
    """Another version of transformers may compute the same otherwise: each node is then processed alone."""

    def otherwise(warper: TopPLogitsWarper, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for _ in range(num_sums):
            scores.softmax(dim=-1).cumsum(dim=-1)
        return scores

    monkeypatch.setattr(TopPLogitsWarper, "__call__", otherwise)
    _, (least, most) = of(TopPLogitsWarper(0.5))(torch.randn(3, VOCAB), DraftTree.chain(6, [7, 8]), TEXT)
    assert not bool((least == most).any())


@pytest.mark.parametrize(
    "processor",
    [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2), lambda ids, s: s],
)
def test_others_are_called_for_each_token(processor: Any) -> None:
    assert NodeProcessors.of(LogitsProcessorList([TemperatureLogitsWarper(0.5), processor]), CPU) is None
