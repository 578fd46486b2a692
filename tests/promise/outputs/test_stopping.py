"""The text ends exactly where plain decoding ends it, and every criterion is asked once per emitted token."""

import time
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from tests.helpers.support import PROMPT, assert_same_run, both, plain, run
from tests.helpers.tokenizers import characters
from tests.promise.conftest import Draft

LENGTH = PROMPT.shape[1]


class Recorder(StoppingCriteria):
    """Remembers the texts it was asked about; says stop at a given number of new tokens."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.texts: list[list[int]] = []
        self.num_scores: list[int | None] = []
        self.stop_after = stop_after

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.texts.append(input_ids[0].tolist())
        self.num_scores.append(None if scores is None else len(scores))
        stop = self.stop_after is not None and input_ids.shape[1] >= LENGTH + self.stop_after
        return torch.full((input_ids.shape[0],), stop, dtype=torch.bool)


class SaysBool(Recorder):
    """Answers with a Python bool, which plain decoding accepts."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        return bool(super().__call__(input_ids, scores)[0])


@pytest.fixture(scope="module")
def coming(zoo: Any) -> list[int]:
    """What plain decoding writes when nothing stops it: drafters know the text beyond its end."""
    return run(zoo("llama"), plain, lambda: {"max_new_tokens": 40}).ids


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 8, 13, None])
@pytest.mark.parametrize("criterion", [Recorder, SaysBool])
def test_a_criterion_is_asked_once_per_token_and_obeyed_at_once(
    model: Any, draft: Draft, coming: list[int], criterion: type[Recorder], stop_after: int | None
) -> None:
    reference, ours = both(
        model, lambda: {"stopping_criteria": StoppingCriteriaList([criterion(stop_after)])}, draft, coming
    )
    assert_same_run(ours, reference)
    assert len(ours.ids) == LENGTH + (stop_after or 16)
    assert ours.kwargs["stopping_criteria"][0].texts == reference.kwargs["stopping_criteria"][0].texts


def test_every_criterion_is_asked_even_when_another_one_stops(model: Any, draft: Draft, coming: list[int]) -> None:
    reference, ours = both(
        model, lambda: {"stopping_criteria": StoppingCriteriaList([Recorder(4), Recorder()])}, draft, coming
    )
    for mine, other in zip(ours.kwargs["stopping_criteria"], reference.kwargs["stopping_criteria"], strict=True):
        assert mine.texts == other.texts


def test_criteria_see_the_scores_so_far(model: Any, draft: Draft) -> None:
    reference, ours = both(
        model, lambda: {"stopping_criteria": StoppingCriteriaList([Recorder()]), "output_scores": True}, draft
    )
    assert ours.kwargs["stopping_criteria"][0].num_scores == reference.kwargs["stopping_criteria"][0].num_scores
    assert ours.kwargs["stopping_criteria"][0].num_scores == list(range(1, 17))


@pytest.mark.parametrize("position", [1, 2, 6, 7, 11])
def test_the_text_ends_on_an_end_of_text_token_wherever_it_falls(
    model: Any, draft: Draft, coming: list[int], position: int
) -> None:
    token = coming[LENGTH + position - 1]
    first = coming[LENGTH:].index(token) + 1
    reference, ours = both(model, lambda: {"eos_token_id": token}, draft, coming)
    assert_same_run(ours, reference)
    assert len(ours.ids) == LENGTH + first


def test_several_end_of_text_tokens_all_end_it(model: Any, draft: Draft, coming: list[int]) -> None:
    tokens = [127, coming[LENGTH + 9], coming[LENGTH + 5]]
    reference, ours = both(model, lambda: {"eos_token_id": tokens}, draft, coming)
    assert_same_run(ours, reference)
    assert len(ours.ids) < LENGTH + 16


@pytest.mark.parametrize("setting", [{"min_new_tokens": 9}, {"min_length": LENGTH + 9}])
def test_a_minimal_length_keeps_the_end_away(
    model: Any, draft: Draft, coming: list[int], setting: dict[str, int]
) -> None:
    """The end-of-text token is suppressed up to that length, so the text differs from the one without."""
    eos = coming[LENGTH + 3]
    reference, ours = both(model, lambda: {"eos_token_id": eos, **setting}, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) >= LENGTH + 9


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_the_text_is_never_longer_than_asked_for(model: Any, draft: Draft, coming: list[int], length: int) -> None:
    for setting in ({"max_new_tokens": length}, {"max_length": LENGTH + length, "max_new_tokens": None}):
        reference, ours = both(model, lambda setting=setting: setting, draft, coming)
        assert_same_run(ours, reference)
        assert len(ours.ids) == LENGTH + length


class Slow(Recorder):
    """Takes its time, so that `max_time` strikes after a known number of tokens."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        time.sleep(0.05)
        return super().__call__(input_ids, scores, **kwargs)


def test_time_is_checked_for_each_token(model: Any, draft: Draft, coming: list[int]) -> None:
    """Within a block of accepted tokens as well: with 50 ms a token, 0.2 s end after a handful of tokens."""
    _, ours = both(
        model,
        lambda: {"max_time": 0.2, "stopping_criteria": StoppingCriteriaList([Slow()]), "max_new_tokens": 40},
        draft,
        coming,
    )
    assert 2 <= len(ours.ids) - LENGTH <= 6
    assert ours.ids == coming[: len(ours.ids)]


@pytest.fixture(scope="module")
def speaker(tokenizer: Any) -> Any:
    """The embedded target, which writes real text."""
    import hf_specdec
    from hf_specdec import embedded

    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), dtype="float32")


@pytest.mark.at_most(1)
@pytest.mark.parametrize("num_strings", [1, 2])
def test_stop_strings_end_the_text_where_plain_decoding_does(
    speaker: Any, tokenizer: Any, draft: Draft, num_strings: int
) -> None:
    """Stop strings that fall across token borders, taken from the middle of the text."""
    ids = tokenizer("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", return_tensors="pt").input_ids
    long = run(speaker, plain, lambda: {"input_ids": ids, "max_new_tokens": 40})
    written = tokenizer.decode(long.ids[ids.shape[1] :])
    strings = [written[25:29], written[40:43]][:num_strings]

    def make() -> dict[str, Any]:
        return {"input_ids": ids, "max_new_tokens": 40, "stop_strings": strings, "tokenizer": tokenizer}

    reference, ours = both(speaker, make, draft, long.ids)
    assert_same_run(ours, reference)
    assert len(ours.ids) < len(long.ids)


def test_a_criterion_for_stop_strings_of_the_users_own_takes_precedence(model: Any, draft: Draft) -> None:
    """transformers says so, and leaves out the one that it would make."""
    tokenizer = characters()
    written = [tokenizer.decode(token) for token in run(model, plain, dict).ids[LENGTH:]]
    first, later = (letter for place, letter in enumerate(filter(None, written)) if place in (0, 3))

    def make() -> dict[str, Any]:
        mine = StoppingCriteriaList([StopStringCriteria(tokenizer, later)])
        return {"stop_strings": first, "tokenizer": tokenizer, "stopping_criteria": mine}

    reference, ours = both(model, make, draft)
    assert_same_run(ours, reference)
    assert len(ours.ids) == LENGTH + written.index(later) + 1 > LENGTH + written.index(first) + 1


def test_stop_strings_without_a_tokenizer_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(PROMPT, max_new_tokens=4, stop_strings=["x"], spec_method="prompt_lookup")
