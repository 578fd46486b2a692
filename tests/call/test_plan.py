"""One plan a call: which request is decoded in which way, and why."""

import dataclasses
import json
import os
import sys
from types import FrameType
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.call.generate import prepared_request
from hf_specdec.call.plan import plan_call
from tests.helpers.support import PROMPT

PACKAGE = os.path.dirname(hf_specdec.__file__)
BATCH = PROMPT.repeat(2, 1)


class Streamer:
    """Reads tokens."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


# family, arguments of generate, way, whose loop, how the reason begins
TABLE: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "trees where the probe finds them right": ("llama", {}, "tree", "spec", "a tree of tokens gives the logits"),
    "chains where siblings would mix": ("minimax", {}, "chain", "spec", "several tokens in sequence work; no tree"),
    "a static cache": ("llama", {"cache_implementation": "static"}, "tree", "spec", "a tree of tokens"),
    "rows at their own pace": ("llama", {"inputs": BATCH}, "tree", "spec", "a tree of tokens"),
    "no rows of chains": (
        "gpt_neo",
        {"inputs": BATCH},
        "plain",
        "transformers",
        "rows of one batch each have a length",
    ),
    "no states in a static cache": (
        "lfm2",
        {"cache_implementation": "static"},
        "plain",
        "transformers",
        "its static cache holds more than keys and values",
    ),
    "no scores of a batch": (
        "llama",
        {"inputs": BATCH, "return_dict_in_generate": True, "output_scores": True},
        "plain",
        "transformers",
        "output_scores of a batch",
    ),
    "a batch without an end token": (
        "llama",
        {"inputs": BATCH, "max_time": 100.0, "eos_token_id": None},
        "plain",
        "transformers",
        "without an end-of-text token",
    ),
    "transformers' assisted loop": ("llama", {"spec_config": {"engine": "assisted"}}, "tree", "assisted", "a tree"),
    "no static cache in that loop": (
        "llama",
        {"spec_config": {"engine": "assisted"}, "cache_implementation": "static"},
        "plain",
        "transformers",
        "transformers' assisted decoding takes a text of token ids",
    ),
    "a cache that repeats the text": (
        "llama",
        {"use_cache": None},
        "plain",
        "transformers",
        "with use_cache=None transformers caches the whole text again",
    ),
}


def planned(model: Any, **kwargs: Any) -> Any:
    arguments = {"inputs": PROMPT, "max_new_tokens": 8, "do_sample": False, "spec_method": "prompt_lookup"}
    return plan_call(prepared_request(model, arguments | kwargs))


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_a_request_has_one_way(row: tuple[str, dict[str, Any], str, str, str], zoo: Any) -> None:
    family, kwargs, way, loop, reason = row
    plan = planned(zoo(family), **kwargs)
    assert (plan.way, plan.loop) == (way, loop), plan
    assert plan.reason.startswith(reason)
    assert (plan.plain_reason is None) == (loop != "transformers")
    assert f"{way}: {reason}" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["way"] == way


def test_the_same_call_has_the_same_plan_and_nothing_of_it_changes(model: Any) -> None:
    arguments = {"inputs": PROMPT, "max_new_tokens": 8, "spec_method": "prompt_lookup", "spec_config": [4, 2]}
    before = dict(arguments)
    request = prepared_request(model, arguments)
    first, second = plan_call(request), plan_call(request)
    assert first == second
    assert arguments == before
    for frozen, field in ((first, "way"), (request, "budget")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, None)


def test_the_statistics_show_the_plan_that_was_carried_out(model: Any) -> None:
    output = model.generate(
        PROMPT, max_new_tokens=8, do_sample=False, spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert output.spec_stats.plan == planned(model, return_dict_in_generate=True)
    assert output.spec_stats.to_dict()["plan"]["method"] == "prompt_lookup"
    results = list(hf_specdec.generate_many(model, [PROMPT], max_new_tokens=4, spec_method="prompt_lookup"))
    assert results[0].stats.plan is not None and results[0].stats.plan.shares_batch


def test_a_warm_call_enters_few_files_and_decides_nothing_once_its_prompt_is_read(model: Any) -> None:
    before, after = set[str](), set[str]()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        file = os.path.relpath(frame.f_code.co_filename, PACKAGE)
        if event == "call" and not file.startswith(".."):
            is_after = bool(after) or frame.f_code.co_qualname == "ModelRunner.prefill"
            (after if is_after else before).add(file)

    inputs = {"inputs": PROMPT, "max_new_tokens": 4, "do_sample": False, "spec_method": "auto"}
    model.generate(**inputs)
    sys.setprofile(profile)
    try:
        model.generate(**inputs)
    finally:
        sys.setprofile(None)
    assert len(before | after) <= 80, len(before | after)
    assert any(file.startswith("call/") for file in before)
    assert not {file for file in after if file.startswith("call/")}


def test_torch_draws_nothing_while_a_plan_is_made(model: Any) -> None:
    state = torch.get_rng_state()
    planned(model)
    assert torch.equal(torch.get_rng_state(), state)
