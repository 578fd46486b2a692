"""Models in PEFT's wrapper whose adapters act on prompts or on single rows."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.forward.capabilities import findings
from hf_specdec.forward.capabilities.probe import probe
from tests.helpers.graphs import counting, on_cpu
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


def poly() -> Any:
    """A model with two tasks."""
    torch.manual_seed(5)
    config = peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, n_tasks=2, n_skills=2)
    return of_some_weight(peft.get_peft_model(build(FAMILIES["llama"]), config))


def of_some_weight(model: Any) -> Any:
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def answer(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **CALL, **kwargs).tolist()
    return found


def test_an_input_preparation_without_ids_is_the_reason_for_plain_decoding() -> None:
    """As PEFT's wrapper for prompt tuning has it under transformers that it does not know."""
    model = build(FAMILIES["llama"])
    prepare = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        ids = inputs.pop("input_ids")
        return {**inputs, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids)}

    model.prepare_inputs_for_generation = prepare_inputs_for_generation
    expected = answer(model, PROMPT)
    output = hf_specdec.enable(model).generate(PROMPT, **CALL, spec_method="auto", return_dict_in_generate=True)
    assert "gives no input_ids" in output.spec_stats.plain_reason
    assert output.sequences.tolist() == expected


@pytest.mark.skipif(not LOSES_TOKENS, reason="PEFT and transformers agree")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_versions_that_lose_virtual_tokens_are_named_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = hf_specdec.enable(with_virtual_tokens(kind).eval())
    for _ in range(2):
        model.generate(input_ids=PROMPT, **CALL, spec_method="prompt_lookup")
    said = [record.getMessage() for record in caplog.records if "virtual tokens" in record.getMessage()]
    assert len(said) == 1 and f"PEFT {peft.__version__}" in said[0] and f"peft>={MIN_PEFT_VERSION}" in said[0]


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


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
def test_transformers_assisted_decoding_knows_no_virtual_tokens(virtual: Any, method: str) -> None:
    given = {"assistant_model": build(FAMILIES["llama"])} if method == "draft_model" else {}
    call: dict[str, Any] = {**CALL, "spec_method": method, "spec_config": {"engine": "assisted"}, **given}
    output = virtual.generate(input_ids=PROMPT, **call, return_dict_in_generate=True)
    assert output.sequences.tolist() == answer(virtual, PROMPT)
    assert "virtual tokens" in output.spec_stats.plain_reason


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


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", ["second", "__base__"])
def test_a_call_has_its_adapter(mixed: Any, name: str) -> None:
    expected = answer(mixed, PROMPT, adapter_names=[name])
    assert expected != answer(mixed, PROMPT)
    method = DRAFTS["oracle"](expected[0])
    output = mixed.generate(input_ids=PROMPT, **CALL, **method, adapter_names=[name], return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert (output.spec_stats.plain_reason, output.spec_stats.num_accepted_tokens > 0) == (None, True)
    assert not any(module._forward_pre_hooks for module in mixed.modules())


@pytest.mark.at_most(1)
def test_each_row_has_its_adapter(mixed: Any) -> None:
    """In a padded batch, whose rows end one after the other."""
    names = ["second", "__base__", "first"]
    whole = answer(mixed, PADDED, adapter_names=names)
    call = {**CALL, "max_new_tokens": 40, "eos_token_id": [whole[0][40], whole[1][43]]}
    call |= {"input_ids": PADDED, "attention_mask": (PADDED != 0).long(), "adapter_names": names}
    expected = mixed.generate(**call).tolist()
    assert mixed.generate(**call, spec_method="auto").tolist() == expected
    output = mixed.generate(**call, spec_method="auto", return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.plain_reason is None


def test_rows_that_end_keep_the_task_ids_of_the_others() -> None:
    model = hf_specdec.enable(poly())
    call = {**CALL, "input_ids": PADDED, "attention_mask": (PADDED != 0).long(), "max_new_tokens": 40}
    call["task_ids"] = torch.tensor([0, 1, 0])
    whole = model.generate(**call)[:, PADDED.shape[1] :].tolist()
    call["eos_token_id"] = next(token for token in whole[1][20:] if token not in whole[1][:20] + whole[0] + whole[2])
    assert model.generate(**call, spec_method="auto").tolist() == model.generate(**call).tolist()


@pytest.mark.wide
def test_what_is_known_of_a_model_with_tasks_holds_for_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT hands each call's tasks to the layers by new hooks; rows decide what can be tried, tasks do not."""
    model = hf_specdec.enable(poly())
    probes: list[Any] = []
    monkeypatch.setattr(findings, "probe", lambda *args: probes.append(args) or probe(*args))
    for tasks in ([0], [1], [0], [1, 0, 1], [0, 0, 1]):
        ids = (PROMPT if len(tasks) == 1 else PADDED).clone()
        call = {"task_ids": torch.tensor(tasks)}
        assert answer(model, ids, **call, spec_method="prompt_lookup") == answer(model, ids, **call)
    assert len(probes) == 2
    model.get_base_model().config.rms_norm_eps *= 2
    answer(model, PROMPT, task_ids=torch.tensor([0]), spec_method="prompt_lookup")
    assert len(probes) == 3


def test_rows_of_different_adapters_that_draft_different_numbers_of_tokens(mixed: Any) -> None:
    """Adapters are given by row, so that no row may be in another's line."""
    names = ["second", "__base__", "first"]
    method = {"spec_method": "auto", "spec_config": {"num_nodes": 9, "pool": "request"}}
    assert answer(mixed, PADDED, adapter_names=names, **method) == answer(mixed, PADDED, adapter_names=names)


@pytest.mark.parametrize("name", ["adapter_names", "task_ids"])
def test_adapters_of_rows_are_no_setting_of_many_prompts(mixed: Any, name: str) -> None:
    """A batch's rows come and go."""
    with pytest.raises(ConfigError, match=f"`{name}` must be unset for many prompts.* Give generate batches") as error:
        hf_specdec.generate_many(mixed, [PROMPT[0]], **CALL, **{name: ["first"]})
    assert "set_adapter" in error.value.remedy
    (result,) = hf_specdec.generate_many(mixed, [{"input_ids": PROMPT[0], name: ["first"]}], **CALL)
    assert isinstance(result.error, ConfigError)


@pytest.mark.wide
def test_a_draft_of_the_model_s_own_layers_has_the_rows_adapters(mixed: Any) -> None:
    names = ["first", "second", "__base__"]
    draft, always = hf_specdec.self_draft(mixed, layers=1), {"confidence_threshold": 0.0}
    expected = answer(mixed, PADDED, adapter_names=names)
    for method in ({"assistant_model": draft, "spec_config": always}, {"spec_config": {"exit_layer": 1, **always}}):
        assert answer(mixed, PADDED, adapter_names=names, spec_method="draft_model", **method) == expected


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of PEFT 0.19, whatever the model has
def test_a_head_drafts_from_adapted_embeddings() -> None:
    model = peft.get_peft_model(build(FAMILIES["llama"]), lora("embed_tokens", r=4))
    hf_specdec.enable(of_some_weight(model))
    head = random_dflash(model.get_base_model())
    assert answer(model, PROMPT, spec_method="dflash", assistant_model=head) == answer(model, PROMPT)


def test_adapters_of_rows_are_not_compiled_in(mixed: Any, caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[Any] = []
    static = {"cache_implementation": "static", "compile_config": on_cpu(counting(graphs))}
    for name in ("first", "second"):
        ours = answer(mixed, PROMPT, adapter_names=[name], spec_method="prompt_lookup", **static)
        assert ours == answer(mixed, PROMPT, adapter_names=[name])
    assert not graphs
    assert "LlamaForCausalLM is not compiled: PEFT's adapter_names" in caplog.text


def test_an_adapter_that_an_invocation_switches_on_decodes_plainly() -> None:
    """PEFT counts its tokens from the end of each forward, also where drafted ones follow them."""
    config = lora("q_proj", "down_proj", r=4, alora_invocation_tokens=[30, 31])
    model = hf_specdec.enable(of_some_weight(peft.get_peft_model(build(FAMILIES["llama"]), config)))
    expected = answer(model, PROMPT)
    assert expected != answer(model.get_base_model(), PROMPT)
    method = DRAFTS["oracle"](expected[0])
    output = model.generate(input_ids=PROMPT, **CALL, **method, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert "aLoRA" in output.spec_stats.plain_reason
    assisted: dict[str, Any] = {"spec_method": "draft_model", "spec_config": {"engine": "assisted"}}
    assert answer(model, PROMPT, **assisted, assistant_model=build(FAMILIES["llama"])) == expected
    (result,) = hf_specdec.generate_many(model, [PROMPT[0]], **CALL)
    assert result.token_ids == expected[0][PROMPT.shape[1] :]
    uninvoked = PROMPT.clone().roll(-1)[:, :20]
    output = model.generate(input_ids=uninvoked, **CALL, spec_method="auto", return_dict_in_generate=True)
    assert (output.sequences.tolist(), output.spec_stats.tier) == (answer(model, uninvoked), "tree")


def test_a_rescaled_adapter_reads_its_prompts_anew() -> None:
    model = hf_specdec.enable(of_some_weight(peft.get_peft_model(build(FAMILIES["llama"]), lora("q_proj", "v_proj"))))
    cache, known = hf_specdec.PrefixCache(), PROMPT.shape[1] - 1
    for scale, num_cached in ((1.0, 0), (3.0, 0), (1.0, known)):
        with peft.helpers.rescale_adapter_scale(model, scale):
            (result,) = hf_specdec.generate_many(model, PROMPT, prefix_cache=cache, max_new_tokens=16, do_sample=False)
            assert result.stats.num_cached_tokens == num_cached
            assert result.token_ids == answer(model, PROMPT)[0][PROMPT.shape[1] :]
