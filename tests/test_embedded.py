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


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft, head, target|'draft', 'head', 'target'"):
        hf_specdec.embedded.path("teacher")
