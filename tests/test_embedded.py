"""The embedded models: what the package ships loads, fits together, and drafts what the target writes."""

from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.support import plain

PROMPT = "def read_lines(path):\n    "


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("method", "name", "accepted_per_step"),
    [("draft_model", "draft", 0.3), ("eagle3", "head", 0.8), ("auto", "head", 0.8)],
)
def test_a_draft_of_the_package_is_accepted(
    method: str, name: str, accepted_per_step: float, target: Any, tokenizer: Any
) -> None:
    load = hf_specdec.AutoDraftHead if name == "head" else hf_specdec.AutoModelForCausalLM
    draft = load.from_pretrained(hf_specdec.embedded.path(name), dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    settings: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
    config = {"num_nodes": 8} if method == "auto" else {}
    how = {"spec_method": method, "assistant_model": draft, "spec_config": config}
    output = target.generate(ids, **settings, **how, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain(target, ids, **settings).tolist()
    assert output.spec_stats.num_accepted_tokens / output.spec_stats.num_drafts > accepted_per_step


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("alone", {"num_branches": 1, "confidence_threshold": 0.0}),
        ("alone", {"num_branches": 3, "use_logits": True}),
        ("auto", {"num_nodes": 8}),
    ],
    ids=["chain", "drawn tree", "auto"],
)
@pytest.mark.parametrize("name", ["draft", "head"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_is_asked_for_no_more_than_the_text_has_room_for(
    do_sample: bool, name: str, method: str, config: Any, target: Any, tokenizer: Any
) -> None:
    load = hf_specdec.AutoDraftHead if name == "head" else hf_specdec.AutoModelForCausalLM
    draft = load.from_pretrained(hf_specdec.embedded.path(name), dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    forwards: list[int] = []
    draft.register_forward_hook(lambda *call: forwards.append(1))
    num_reading = int(name == "draft")  # the first step's, of the prompt; a head reads it with its first draft
    steps: list[tuple[int, int]] = []

    def observe(step: hf_specdec.SpecStep) -> None:
        steps.append((len(forwards), len(step.accepted)))
        forwards.clear()

    own = "eagle3" if name == "head" else "draft_model"
    how: dict[str, Any] = {"spec_method": own if method == "alone" else method, "assistant_model": draft}
    how["spec_config"] = {"draft_len": 4, **config}
    target.generate(ids, max_new_tokens=8, do_sample=do_sample, **how)  # tries forwards out
    for most in range(2, 8):
        torch.manual_seed(most)
        steps.clear()
        forwards.clear()
        target.generate(ids, max_new_tokens=most, do_sample=do_sample, **how, spec_observer=observe)
        left = most - 1 - sum(accepted for _, accepted in steps)
        assert left <= 0
        for place, (number, accepted) in reversed(list(enumerate(steps))):
            left += accepted
            drafting = number - num_reading if place == 0 and number else number
            assert drafting <= min(4, left - 1), (most, steps)


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'draft', 'head', 'smollm2-head', 'target'"):
        hf_specdec.embedded.path("teacher")
