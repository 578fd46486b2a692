"""Models in PEFT's wrapper whose adapters act on prompts or on single rows."""

from typing import Any

import peft
import pytest
import torch

import hf_specdec
from tests.helpers.batches import IDS, PADDED
from tests.helpers.support import DRAFTS, PROMPT
from tests.helpers.zoo import FAMILIES, build

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Position ids are not supported"
)
CALL: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
KINDS = {"prefix tuning": peft.PrefixTuningConfig, "prompt tuning": peft.PromptTuningConfig}


@pytest.fixture(params=KINDS)
def virtual(request: pytest.FixtureRequest) -> Any:
    """An enabled model with five virtual tokens before each prompt, which change its text."""
    model = peft.get_peft_model(
        build(FAMILIES["llama"]), KINDS[request.param](task_type="CAUSAL_LM", num_virtual_tokens=5)
    )
    torch.manual_seed(3)
    torch.nn.init.normal_(model.prompt_encoder["default"].embedding.weight)
    assert answer(model, PROMPT) != answer(model.get_base_model(), PROMPT)
    return hf_specdec.enable(model.eval())


def answer(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **CALL, **kwargs).tolist()
    return found


def test_trees_are_verified_after_virtual_tokens(virtual: Any) -> None:
    expected = answer(virtual, PROMPT)
    method = DRAFTS["oracle"](expected[0])
    output = virtual.generate(input_ids=PROMPT, **CALL, **method, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert (output.spec_stats.tier, output.spec_stats.num_accepted_tokens > 0) == ("tree", True)
    with virtual.disable_adapter():
        assert answer(virtual, PROMPT, spec_method="auto") == answer(virtual.get_base_model(), PROMPT)


def test_padded_rows_are_verified_after_virtual_tokens(virtual: Any) -> None:
    assert answer(virtual, PADDED, spec_method="auto") == answer(virtual, PADDED)


def test_many_prompts_have_virtual_tokens(virtual: Any) -> None:
    """One by one: the model inside the wrapper knows nothing of them."""
    prompts = [IDS[0], IDS[1, :7]]
    results = hf_specdec.generate_many(virtual, prompts, **CALL)
    assert [result.token_ids for result in results] == [answer(virtual, ids[None])[0][len(ids) :] for ids in prompts]
