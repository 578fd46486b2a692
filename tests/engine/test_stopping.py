"""The stop check against the lines of plain decoding that it stands for."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specdec.engine.stopping import StopCheck
from hf_specdec.forward.text_rows import TokenBuffer

TEXT = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)


@pytest.mark.parametrize(("tokens", "length", "stops"), [([8], 9, False), ([8, 2], 9, True), ([8, 8], 5, True)])
def test_length_and_end_of_text_stop_without_a_tensor(tokens: list[int], length: int, stops: bool) -> None:
    check = StopCheck(StoppingCriteriaList([MaxLengthCriteria(length), EosTokenCriteria(torch.tensor([2, 3]))]))
    text = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)
    for token in tokens:
        text.append(token)
    assert check(text, None) is stops
    assert (check.max_length, check.eos) == (length, {2, 3})


def test_every_other_criterion_is_asked_once_whatever_the_others_say() -> None:
    wanted: list[tuple[int, Any]] = []

    def criterion(ids: torch.Tensor, scores: Any) -> bool:
        wanted.append((ids.shape[1], scores))
        return len(wanted) == 1

    check = StopCheck(StoppingCriteriaList([criterion, MaxLengthCriteria(9), criterion]))
    score = torch.zeros(1, 3)
    assert check(TEXT, [score]) is True
    assert [(length, scores[0] is score) for length, scores in wanted] == [(3, True), (3, True)]
