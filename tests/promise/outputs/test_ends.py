"""However a job of many prompts ends, every drafter is ended, every network that drafts is closed, and nothing that was
allocated stays.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.networks.draft_runner import DraftRunner
from hf_specdec.forward.networks.head_runner import HeadRunner
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, noisy_copy
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
PROMPTS = [PROMPT[0, start:].tolist() for start in range(4)]
NETWORKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda model: {"spec_method": "prompt_lookup"},
    "draft model": lambda model: {"spec_method": "draft_model", "assistant_model": noisy_copy(model)},
    "head": lambda model: {"spec_method": "eagle3", "assistant_model": random_head(model)},
}
RUNNERS = (DraftRunner, HeadRunner)


class Broken(Exception):
    """What a user's own code raises."""


class Open:
    """The networks that were made and neither closed nor taken over by another, and the sequences that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.networks: list[Any] = []
        self.sequences: list[SequenceState] = []
        for cls in RUNNERS:
            self._follow(monkeypatch, cls, "__init__", lambda runner, *_: self.networks.append(runner))
            self._follow(monkeypatch, cls, "close", lambda runner, *_: self._forget(runner))
            self._follow(monkeypatch, cls, "admit", lambda _, other, *__: self._forget(other))
        self._follow(monkeypatch, SequenceState, "begin", lambda sequence, *_: self.sequences.append(sequence))
        self._follow(monkeypatch, SequenceState, "end", lambda sequence, *_: self._forget_sequence(sequence))

    def forget(self) -> None:
        """What was made until now is not looked at."""
        self.networks, self.sequences = [], []

    def _forget(self, runner: Any) -> None:
        self.networks = [other for other in self.networks if other is not runner]

    def _forget_sequence(self, sequence: Any) -> None:
        self.sequences = [other for other in self.sequences if other is not sequence]

    @staticmethod
    def _follow(monkeypatch: pytest.MonkeyPatch, cls: Any, name: str, note: Callable[..., None]) -> None:
        ours = getattr(cls, name)

        def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = ours(self, *args, **kwargs)
            note(self, *args)
            return result

        monkeypatch.setattr(cls, name, followed)


@pytest.fixture
def still_open(monkeypatch: pytest.MonkeyPatch) -> Open:
    return Open(monkeypatch)


def breaking(after: int) -> Callable[..., Any]:
    """What raises when it has been called `after` times."""
    calls: list[int] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise Broken
        return torch.zeros(len(args[0]), dtype=torch.bool) if isinstance(args[0], torch.Tensor) else None

    called.row_safe = True  # type: ignore[attr-defined]
    return called


def many(model: Any, how: dict[str, Any], prompts: list[Any], **kwargs: Any) -> Iterator[Any]:
    return hf_specdec.generate_many(model, prompts, max_batch_size=2, **CALL, **how, **kwargs)


def to_the_end(model: Any, how: dict[str, Any]) -> None:
    assert len(list(many(model, how, PROMPTS))) == 4


def with_own(name: str, value: Any) -> list[Any]:
    """The prompts, of which the second has a setting of its own."""
    return [{"input_ids": torch.tensor([ids]), **({name: value} if at == 1 else {})} for at, ids in enumerate(PROMPTS)]


def one_ends_with_its_first_token(model: Any, how: dict[str, Any]) -> None:
    lengths = [len(result.token_ids) for result in many(model, how, with_own("max_new_tokens", 1))]
    assert sorted(lengths) == [1, 10, 10, 10]


def one_fails(after: int) -> Callable[..., None]:
    def fail(model: Any, how: dict[str, Any]) -> None:
        results = list(many(model, how, with_own("stopping_criteria", [breaking(after)])))
        assert [type(result.error) for result in sorted(results, key=lambda r: r.index)].index(Broken) == 1

    return fail


def all_fails(model: Any, how: dict[str, Any]) -> None:
    with pytest.raises(Broken):
        list(many(model, how, PROMPTS, spec_observer=breaking(3)))


def the_prompts_fail(model: Any, how: dict[str, Any]) -> None:
    def prompts() -> Iterator[Any]:
        yield from PROMPTS[:3]
        raise Broken

    with pytest.raises(Broken):
        list(hf_specdec.generate_many(model, prompts(), max_batch_size=2, **CALL, **how))


def no_room_for_a_row(model: Any, how: dict[str, Any]) -> None:
    def admit(self: Any, *args: Any) -> None:
        raise Broken

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Broken):
        patch.setattr(ModelRunner, "admit", admit)
        list(many(model, how, PROMPTS))


def nobody_asks_for_more(model: Any, how: dict[str, Any]) -> None:
    results = many(model, how, PROMPTS)
    next(results)
    results.close()


def one_is_cancelled_and_the_others_are_left(model: Any, how: dict[str, Any]) -> None:
    batch = SharedBatch(model, max_batch_size=1, **CALL, **how)
    futures = [batch.submit(prompt) for prompt in PROMPTS]
    futures[-1].cancel()
    futures[0].result(60)
    batch.close()
    assert all(future.done() for future in futures)


ENDS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "to the end": to_the_end,
    "one ends with its first token": one_ends_with_its_first_token,
    "one fails at its prompt": one_fails(0),
    "one fails": one_fails(4),
    "all fails": all_fails,
    "the prompts fail": the_prompts_fail,
    "no room for a row": no_room_for_a_row,
    "no one asks for more": nobody_asks_for_more,
    "one is cancelled and the others are left": one_is_cancelled_and_the_others_are_left,
}


@pytest.mark.at_most(5)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_of_a_job_stays(name: str, end: str, still_open: Open, without_collector: None) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    how = NETWORKS[name](model)
    to_the_end(model, how)
    ENDS[end](model, how)
    still_open.forget()
    gc.collect()
    before = {id(item) for item in gc.get_objects() if isinstance(item, torch.Tensor)}
    ENDS[end](model, how)
    assert still_open.networks == []
    assert still_open.sequences == []
    assert [item.shape for item in gc.get_objects() if isinstance(item, torch.Tensor) and id(item) not in before] == []
    to_the_end(model, how)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_call_that_fails_closes_what_it_has_opened(name: str, still_open: Open) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    how = NETWORKS[name](model)
    model.generate(PROMPT, **CALL, **how)
    still_open.forget()
    with pytest.raises(Broken):
        model.generate(PROMPT, **CALL, **how, stopping_criteria=[breaking(4)])
    assert still_open.networks == []
    assert still_open.sequences == []


def test_a_prompts_error_says_where_it_was_raised() -> None:
    """In a note: its traceback would keep the whole batch alive for as long as the result is kept."""
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    cause = ValueError("below")

    def fail(*args: Any) -> Any:
        raise Broken("above") from cause

    fail.row_safe = True  # type: ignore[attr-defined]
    how = {"spec_method": "prompt_lookup"}
    error = next(r.error for r in many(model, how, with_own("stopping_criteria", [fail])) if r.error is not None)
    assert isinstance(error, Broken)
    assert error.__cause__ is cause
    assert error.__traceback__ is cause.__traceback__ is None
    (note,) = error.__notes__
    assert note.startswith("ValueError: below")
    assert note.endswith("Broken: above")
    assert 'in fail\n    raise Broken("above") from cause' in note
