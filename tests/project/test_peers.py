"""The command that runs transformers' own tests: it sees a call that differs from plain `generate`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationMixin

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


def test_calls_of_a_test_are_made_with_the_method(peers, model):
    """The test gets the result of the method; the calls that the method makes itself are not counted."""
    watch = peers.Watch("draft_model")
    with watch.watching():
        output = GenerationMixin.generate(model, PROMPT, **CALL)
    assert output.spec_stats.num_draft_tokens
    assert [call["kind"] for call in watch.calls] == ["drafted"] and watch.calls[0]["is_compared"]
    assert not watch.differences


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
