"""Agreement of several processes on a token and on a text's end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.shared_processes import AgreedSampler, AgreedStopCheck
from hf_specdec.errors import RankError
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.methods.common.node_logits import NodeLogits

TEXT = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)


class Follower:
    """Another process has decided; records whether this one computes its own answer all the same."""

    def __init__(self, decided: int) -> None:
        self.decided, self.is_watched = decided, False

    def decide(self, make: Callable[[], int], *, is_watched: bool = True, confirm: Any = None) -> int:
        self.is_watched = is_watched
        if is_watched and int(make()) != self.decided and confirm is not None:
            confirm(self.decided)
        return self.decided


def sampler_following(decided: int, row: list[float], processors: Any = (), **config: Any) -> AgreedSampler:
    settings = GenerationConfig(return_dict_in_generate=True, **config)
    follower: Any = Follower(decided)
    sampler = AgreedSampler(LogitsProcessorList(processors), settings, torch.device("cpu"), None, rank_sync=follower)
    sampler.expect(DraftTree.chain(1))
    sampler.load(NodeLogits(torch.tensor([row])))
    return sampler


def test_a_near_tie_confirms_and_a_clear_difference_does_not() -> None:
    row = [1.0, 1.0 - 1e-5, 0.5]
    assert sampler_following(1, row).choose(0, TEXT) == 1
    with pytest.raises(RankError, match="here 0 leads"):
        sampler_following(2, row).choose(0, TEXT)


def test_a_process_draws_nothing_that_no_one_sees() -> None:
    def keep(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    for processors, config, is_watched in [
        ((), {}, True),
        ((), {"do_sample": True}, False),
        ((), {"do_sample": True, "output_scores": True}, True),
        ([keep], {"do_sample": True}, True),
    ]:
        sampler: Any = sampler_following(0, [1.0, 0.0], processors, **config)
        assert sampler.choose(0, TEXT) == 0
        assert sampler._rank_sync.is_watched is is_watched


@pytest.mark.parametrize("has_own", [False, True])
def test_criteria_of_the_users_own_are_asked_in_every_process(has_own: bool) -> None:
    wanted: list[int] = []
    criteria: list[Any] = [lambda ids, scores: wanted.append(1) or False] if has_own else []
    follower: Any = Follower(1)
    assert AgreedStopCheck(StoppingCriteriaList(criteria), follower)(TEXT, None) is True
    assert len(wanted) == has_own
