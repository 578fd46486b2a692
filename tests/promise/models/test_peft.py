"""Models in PEFT's wrapper whose adapters act on prompts or on single rows."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_specdec
from hf_specdec.errors import ConfigError
from tests.helpers.head_models import random_dflash
from tests.helpers.support import DRAFTS, IDS, PADDED, PROMPT
from tests.helpers.zoo import FAMILIES, build

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Position ids are not supported"
)
CALL: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
KINDS = {"prefix tuning": peft.PrefixTuningConfig, "prompt tuning": peft.PromptTuningConfig}
LOSES_TOKENS = Version(peft.__version__) < Version(MIN_PEFT_VERSION)


def with_virtual_tokens(kind: str) -> Any:
    """A model with five virtual tokens before each prompt."""
    model = peft.get_peft_model(build(FAMILIES["llama"]), KINDS[kind](task_type="CAUSAL_LM", num_virtual_tokens=5))
    torch.manual_seed(3)
    torch.nn.init.normal_(model.prompt_encoder["default"].embedding.weight)
    return model


@pytest.fixture(params=KINDS)
def virtual(request: pytest.FixtureRequest) -> Any:
    """An enabled model with five virtual tokens before each prompt, which change its text."""
    if LOSES_TOKENS:
        pytest.skip(f"this transformers loses PEFT's virtual tokens before PEFT {MIN_PEFT_VERSION}")
    model = with_virtual_tokens(request.param)
    assert answer(model, PROMPT) != answer(model.get_base_model(), PROMPT)
    return hf_specdec.enable(model.eval())


@pytest.fixture
def mixed() -> Any:
    """An enabled model with two LoRA adapters, of other modules and ranks, that change its text."""
    model = peft.get_peft_model(build(FAMILIES["llama"]), lora("q_proj", "down_proj", r=4), adapter_name="first")
    model.add_adapter("second", lora("v_proj", r=8))
    return hf_specdec.enable(of_some_weight(model))


def lora(*modules: str, **kwargs: Any) -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(modules), **kwargs)


def of_some_weight(model: Any) -> Any:
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def answer(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    result: list[list[int]] = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **CALL, **kwargs).tolist()
    return result


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


def test_a_draft_has_no_virtual_tokens(virtual: Any) -> None:
    target = hf_specdec.enable(build(FAMILIES["llama"]))
    call: dict[str, Any] = {**CALL, "spec_method": "draft_model"}
    with pytest.raises(ConfigError, match=r"`assistant_model` must have no virtual tokens .* Pass its get_base_model"):
        target.generate(PROMPT, **call, assistant_model=virtual)
    base = virtual.get_base_model()
    assert target.generate(PROMPT, **call, assistant_model=base).tolist() == target.generate(PROMPT, **CALL).tolist()


def test_many_prompts_have_virtual_tokens(virtual: Any) -> None:
    """One by one: the model inside the wrapper knows nothing of them."""
    prompts = [IDS[0], IDS[1, :7]]
    results = hf_specdec.generate_many(virtual, prompts, **CALL)
    assert [result.token_ids for result in results] == [answer(virtual, ids[None])[0][len(ids) :] for ids in prompts]


@pytest.mark.parametrize("names", [["second"], ["second", "__base__", "first"]])
def test_adapters_of_a_calls_rows_decode_plainly(mixed: Any, names: list[str]) -> None:
    """PEFT hands them to the layers by hooks of the call."""
    ids = PROMPT if len(names) == 1 else PADDED
    call = CALL | {"input_ids": ids, "attention_mask": (ids != 0).long(), "adapter_names": names}
    expected = mixed.generate(**call).tolist()
    assert expected != answer(mixed, ids)
    output = mixed.generate(**call, spec_method="auto", return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert "PEFT's hook _adapter_names_pre_forward_hook" in output.spec_stats.plain_reason
    assert not any(module._forward_pre_hooks for module in mixed.modules())
    assert answer(mixed, ids, spec_method="auto") == answer(mixed, ids)


@pytest.mark.parametrize("name", ["adapter_names", "task_ids"])
def test_adapters_of_rows_are_no_setting_of_many_prompts(mixed: Any, name: str) -> None:
    """A batch's rows come and go."""
    with pytest.raises(ConfigError, match=f"`{name}` must be an argument or a setting of generate"):
        hf_specdec.generate_many(mixed, [PROMPT[0]], **CALL, **{name: ["first"]})
    (result,) = hf_specdec.generate_many(mixed, [{"input_ids": PROMPT[0], name: ["first"]}], **CALL)
    assert isinstance(result.error, ConfigError)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of PEFT 0.19, whatever the model has
def test_a_head_drafts_from_adapted_embeddings() -> None:
    model = peft.get_peft_model(build(FAMILIES["llama"]), lora("embed_tokens", r=4))
    hf_specdec.enable(of_some_weight(model))
    head = random_dflash(model.get_base_model())
    assert answer(model, PROMPT, spec_method="dflash", assistant_model=head) == answer(model, PROMPT)


def test_an_adapter_that_an_invocation_switches_on_decodes_plainly() -> None:
    """PEFT counts its tokens from the end of each forward, also where drafted ones follow them."""
    config = lora("q_proj", "down_proj", r=4, alora_invocation_tokens=[30, 31])
    model = hf_specdec.enable(of_some_weight(peft.get_peft_model(build(FAMILIES["llama"]), config)))
    expected = answer(model, PROMPT)
    assert expected != answer(model.get_base_model(), PROMPT)
    method = DRAFTS["oracle"](expected[0])
    output = model.generate(input_ids=PROMPT, **CALL, **method, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert "PEFT's hook _alora" in output.spec_stats.plain_reason
    (result,) = hf_specdec.generate_many(model, [PROMPT[0]], **CALL)
    assert result.token_ids == expected[0][PROMPT.shape[1] :]


def test_a_rescaled_adapter_reads_its_prompts_anew() -> None:
    model = hf_specdec.enable(of_some_weight(peft.get_peft_model(build(FAMILIES["llama"]), lora("q_proj", "v_proj"))))
    cache, seen = hf_specdec.PrefixCache(), PROMPT.shape[1] - 1
    for scale, num_cached in ((1.0, 0), (3.0, 0), (1.0, seen)):
        with peft.helpers.rescale_adapter_scale(model, scale):
            (result,) = hf_specdec.generate_many(model, PROMPT, prefix_cache=cache, max_new_tokens=16, do_sample=False)
            assert result.stats.num_cached_tokens == num_cached
            assert result.token_ids == answer(model, PROMPT)[0][PROMPT.shape[1] :]
