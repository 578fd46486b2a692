"""The command that runs transformers' own tests: it sees a call that differs from plain `generate`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

import hf_specdec
from tests.helpers.support import PROMPT

CALL = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}


@pytest.fixture
def peers(monkeypatch):
    """The command's modules, which run outside of the package `tests`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "peers"))
    import compare
    import watch

    yield SimpleNamespace(Watch=watch.Watch, difference=compare.difference)
    for name in ("compare", "watch"):
        del sys.modules[name]


def cache(value):
    """A cache of one layer with two tokens."""
    made = DynamicCache()
    made.update(torch.full((1, 1, 2, 4), value), torch.ones(1, 1, 2, 4), 0)
    return made


EQUAL = {
    "tokens": torch.tensor([[1, 2]]),
    "scores": (torch.tensor([[0.5, -float("inf")]]),),
    "cache": cache(1.0),
    "nothing": None,
}


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": torch.tensor([[1, 3]])},
        {"tokens": torch.tensor([[1, 2, 3]])},
        {"scores": (torch.tensor([[0.5002, -float("inf")]]),)},
        {"scores": (torch.tensor([[0.5, 0.0]]),)},
        {"scores": ()},
        {"cache": cache(1.001)},
        {"cache": None},
        {"nothing": 1},
    ],
)
def test_a_difference_is_seen(peers, other):
    assert peers.difference(EQUAL, EQUAL | {"cache": cache(1.0 + 1e-5)}, "output", 1e-4) is None
    assert peers.difference(EQUAL, EQUAL | other, "output", 1e-4).startswith(f"output.{next(iter(other))}")


def test_calls_of_a_test_are_made_with_the_method(peers, model):
    """The test gets the result of the method; the calls that the method makes itself are not counted."""
    watch = peers.Watch("draft_model")
    with watch.watching():
        output = GenerationMixin.generate(model, PROMPT, **CALL)
    assert output.spec_stats.num_draft_tokens
    assert [call["kind"] for call in watch.calls] == ["drafted"] and watch.calls[0]["is_compared"]
    assert not watch.differences


def test_a_refused_call_is_made_with_the_method_as_default(peers, model):
    watch = peers.Watch("prompt_lookup")
    with watch.watching():
        output = GenerationMixin.generate(model, PROMPT, **CALL, num_beams=2)
    assert output.sequences.shape[1] == PROMPT.shape[1] + 8
    assert watch.calls == [{"kind": "refused", "reason": watch.calls[0]["reason"]}] and not watch.differences


@pytest.mark.parametrize("fault", ["tokens", "numbers", "error"])
def test_a_method_that_changes_the_result_is_seen(peers, model, monkeypatch, fault):
    def generate(*args, spec_method, **kwargs):
        output = GenerationMixin.generate(model, *args, **kwargs)
        if fault == "error":
            raise RuntimeError(fault)
        if fault == "numbers":
            torch.rand(1)
        else:
            output.sequences[0, -1] ^= 1
        return output

    watch = peers.Watch("prompt_lookup")
    with watch.watching():
        monkeypatch.setattr(hf_specdec, "enable", lambda _: SimpleNamespace(generate=generate))
        try:
            GenerationMixin.generate(model, PROMPT, **CALL)
        except RuntimeError as error:
            assert str(error) == fault
    assert len(watch.differences) == 1 and ("sequences" if fault == "tokens" else fault) in watch.differences[0]
