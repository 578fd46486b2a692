"""`torch.set_default_device` is the user's: tensors of ours are where the model is, or on the host.

A default of `"meta"` shows each tensor that was made without a device, as what is in it cannot be read.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.cover import wide_but
from tests.helpers.heads import CASES, always
from tests.helpers.support import IDS, MASK, PADDED, PROMPT, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, build

pytestmark = pytest.mark.probes_anew
FAMILY_NAMES = ["llama", "bloom", "opt", "qwen3_next", "lfm2", "t5", "gpt_neo"]
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "auto": {"spec_method": "auto"},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"num_branches": 2, "confidence_threshold": 0.0}},
    "lookahead": {"spec_method": "lookahead"},
}
TREES_ONLY = {"lookahead"}
INPUTS: dict[str, dict[str, Any]] = {
    "greedy": {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), "do_sample": False},
    "sampled": {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), "do_sample": True, "top_k": 9},
    "padded batch": {"input_ids": PADDED, "attention_mask": MASK, "do_sample": False},
}
CELLS = [
    (family, method, kind)
    for family in FAMILY_NAMES
    for method in METHODS
    for kind in INPUTS
    if not (method == "draft_model" and family == "t5")
    and not ((method in TREES_ONLY or kind == "padded batch") and (FAMILIES[family].tier == "chain" or family == "t5"))
]
ALWAYS = [cell for cell in CELLS if cell[0] == "llama" and (cell[2] == "padded batch" or cell[1] == "draft_model")]


def both_of(model: Any, how: dict[str, Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Tokens of plain generation, and of ours with another default device."""
    kwargs = {"max_new_tokens": 40, **kwargs}
    torch.manual_seed(5)
    expected = plain(model, **kwargs).tolist()
    with torch.device("meta"):
        torch.manual_seed(5)
        output = model.generate(**kwargs, **how, return_dict_in_generate=True)
    assert output.spec_stats.plain_reason is None
    return expected, output.sequences.tolist()


@pytest.mark.at_most(3)
@pytest.mark.parametrize("cell", wide_but(ALWAYS, CELLS), ids=", ".join)
def test_another_default_device_changes_nothing(cell: tuple[str, str, str]) -> None:
    family, method, kind = cell
    model, how = hf_specdec.enable(build(FAMILIES[family])), METHODS[method]
    if method == "draft_model":
        how = how | {"assistant_model": noisy_copy(model)}
    expected, ours = both_of(model, how, INPUTS[kind])
    assert ours == expected


@pytest.mark.at_most(1)
@pytest.mark.parametrize("kind", ["eagle3, sliding", "mtp, deepseek_v3, 2 layers", "dflash, llama"])
def test_heads_draft_with_another_default_device(zoo: Callable[[str], Any], kind: str) -> None:
    case = CASES[kind]
    model = case.target(zoo)
    how = always(case.method, {"num_branches": 2}) | {"assistant_model": case.head(model)}
    expected, ours = both_of(model, how, INPUTS["padded batch"])
    assert ours == expected


def test_many_prompts_with_another_default_device() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    prompts = [row[4 * place :] for place, row in enumerate(IDS)]
    kwargs = {"max_new_tokens": 40, "do_sample": False}
    expected = [plain(model, prompt[None], **kwargs)[0, len(prompt) :].tolist() for prompt in prompts]
    with torch.device("meta"):
        result = {r.index: r.token_ids for r in hf_specdec.generate_many(model, prompts, max_batch_size=2, **kwargs)}
    assert result == dict(enumerate(expected))
