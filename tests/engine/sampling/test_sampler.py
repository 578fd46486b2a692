"""The choice of a token against the lines of plain decoding that it stands for."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.sampling.sampler import Sampler
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.node_logits import NodeLogits

CPU = torch.device("cpu")
ROWS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
TREE = DraftTree.chain(1, [2, 3, 4])
TEXT = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)


def loaded(processors: Any = (), generator: torch.Generator | None = None, **config: Any) -> Sampler:
    options = {"return_dict_in_generate": True, **config}
    sampler = Sampler(LogitsProcessorList(processors), GenerationConfig(**options), CPU, generator)
    sampler.expect(TREE)
    sampler.load(NodeLogits(ROWS))
    return sampler


def test_greedy_is_the_first_of_the_largest() -> None:
    sampler = loaded()
    assert [sampler.choose(node, TEXT) for node in range(4)] == ROWS.argmax(dim=-1).tolist()
    sampler.expect(DraftTree.chain(1))
    sampler.load(NodeLogits(torch.zeros(1, 50)))
    assert sampler.choose(0, TEXT) == 0


def test_a_sampled_token_is_one_draw_from_the_processed_row() -> None:
    """One draw a token, in order, from the generator of the sampler or else the global one."""
    sampler = loaded([TopKLogitsWarper(5)], do_sample=True)
    torch.manual_seed(3)
    chosen = [sampler.choose(node, TEXT) for node in range(4)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    for node, token in enumerate(chosen):
        scores = TopKLogitsWarper(5)(TEXT.ids(), ROWS[node : node + 1])
        assert int(torch.multinomial(scores.softmax(dim=-1), 1)) == token
    assert torch.equal(torch.get_rng_state(), after)
    sampler = loaded([TopKLogitsWarper(5)], torch.Generator().manual_seed(3), do_sample=True)
    torch.manual_seed(99)
    assert [sampler.choose(node, TEXT) for node in range(4)] == chosen


def test_a_processor_cannot_change_the_logits_that_drafters_see() -> None:
    def erase(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0.0)

    before = ROWS.clone()
    loaded([erase]).choose(0, TEXT)
    assert torch.equal(ROWS, before)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("is_sure", [True, False])
def test_what_is_chosen_ahead_counts_where_it_is_sure(is_sure: bool, do_sample: bool) -> None:
    """Elsewhere the row is processed and drawn from alone, as plain decoding does."""
    sampler = loaded([TopPLogitsWarper(0.9)], do_sample=do_sample, return_dict_in_generate=False)
    torch.manual_seed(3)
    expected = sampler.choose(0, TEXT)
    torch.manual_seed(3)
    result = sampler.choose_ahead(ROWS, TEXT)
    assert result is not None
    parts = [part.clone() for part in result]
    tokens, least, most = parts[1:] if do_sample else parts
    tokens[:] = (expected + 1) % 50  # as nothing would have it
    most[:] = least if is_sure else least + 1
    sampler.load(NodeLogits(ROWS, chosen=tuple([part.numpy() for part in parts])))
    assert (sampler.choose(0, TEXT) == expected) is not is_sure


def test_what_is_no_probability_is_left_to_multinomial() -> None:
    """It raises what plain sampling raises."""
    sampler, broken = loaded(do_sample=True, return_dict_in_generate=False), torch.full((4, 50), torch.nan)
    result = sampler.choose_ahead(broken, TEXT)
    assert result is not None
    sampler.load(NodeLogits(broken, chosen=tuple([part.numpy() for part in result])))
    with pytest.raises(RuntimeError, match="probability tensor"):
        sampler.choose(0, TEXT)
