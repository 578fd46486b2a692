"""Where the method and its configuration may stand, which of several wins, and what a wrong one is answered with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.drafter import AutoSpecConfig
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.registry import METHODS
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

TINY = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LOOPING = torch.tensor([[5, 6, 7, 8] * 8])


def drafted(model: Any, **kwargs: Any) -> list[int]:
    """Length of each step's draft."""
    lengths: list[int] = []
    kwargs = {"max_new_tokens": 12, "do_sample": False} | kwargs
    output = model.generate(LOOPING, spec_observer=lambda step: lengths.append(step.tree.num_draft_tokens), **kwargs)
    assert output.tolist() == plain(model, LOOPING, max_new_tokens=12, do_sample=False).tolist()
    return lengths


def is_left_to_transformers(model: Any, **kwargs: Any) -> bool:
    output = model.generate(LOOPING, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **kwargs)
    assert output.sequences.tolist() == plain(model, LOOPING, max_new_tokens=12, do_sample=False).tolist()
    return not hasattr(output, "spec_stats")


@pytest.fixture
def own_model() -> Any:
    """A model of the test's own, whose generation configuration may be changed."""
    return hf_specdec.enable(build(FAMILIES["llama"]))


def _without_addresses(value: object) -> str:
    """An id that every process of a test run agrees on."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"spec_method": "prompt_lookup", "spec_config": PromptLookupConfig(max_draft_len=3)},
        {"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 3}},
        {"spec_method": "prompt_lookup", "spec_config": {"prompt_lookup_num_tokens": 3}},
        {"spec_method": "prompt_lookup", "spec_config": [3, 2, ["cpu"]]},
        {"spec_method": "prompt_lookup", "spec_config": "[3, 2, ['cpu']]"},
        {"spec_method": "ngram", "spec_config": [3]},
        {"spec_method": "prompt_lookup", "prompt_lookup_config": [3, 2, ["cpu"]]},
        {"spec_method": "ngram", "ngram_config": [3, 2, ["cpu"]]},
        {"spec_method": "prompt_lookup", "ngram_config": [3, 2, ["cpu"]]},
        {"prompt_lookup_config": [3, 2, ["cpu"]]},
        {"ngram_config": "[3,2,['cpu']]"},
    ],
    ids=str,
)
def test_every_way_to_ask_for_prompt_lookup_means_the_same(model: Any, kwargs: dict[str, Any]) -> None:
    assert max(drafted(model, **kwargs)) == 3


@pytest.mark.parametrize("where", ["argument", "model"])
def test_a_generation_configuration_carries_method_and_settings(own_model: Any, where: str) -> None:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    config.spec_method, config.spec_config = "prompt_lookup", {"max_draft_len": 3}
    if where == "model":
        own_model.generation_config = config
        assert max(drafted(own_model)) == 3
    else:
        assert max(drafted(own_model, generation_config=config)) == 3
    assert (config.spec_method, config.spec_config) == ("prompt_lookup", {"max_draft_len": 3})


def test_arguments_win_over_the_generation_configuration(own_model: Any) -> None:
    own_model.generation_config.spec_method = "prompt_lookup"
    own_model.generation_config.spec_config = {"max_draft_len": 3}
    assert max(drafted(own_model, spec_config={"max_draft_len": 2})) == 2
    assert set(drafted(own_model, spec_method="plain")) == {0}, "which takes no settings of another method"
    assert is_left_to_transformers(own_model, spec_method=None)


def many_drafted(model: Any, prompt: Any = None, **kwargs: Any) -> list[int]:
    """As `drafted`, by `generate_many` of one prompt."""
    lengths: list[int] = []
    kwargs |= {"spec_observer": lambda step: lengths.append(step.tree.num_draft_tokens)}
    (result,) = hf_specdec.generate_many(model, [{"input_ids": LOOPING, **(prompt or {})}], **kwargs)
    assert result.error is None
    expected = plain(model, LOOPING, max_new_tokens=12, do_sample=False, spec_method=None)
    assert result.token_ids == expected[0, LOOPING.shape[1] :].tolist()
    return lengths


def config_of(method: Any, max_draft_len: int | None = None) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    config.spec_method = method
    config.spec_config = None if max_draft_len is None else {"max_draft_len": max_draft_len}
    return config


@pytest.mark.parametrize("where", ["argument", "model", "prompt"])
def test_many_prompts_take_method_and_settings_of_a_generation_configuration(own_model: Any, where: str) -> None:
    config, other = config_of("prompt_lookup", 3), config_of("prompt_lookup", 2)
    own_model.generation_config = config if where == "model" else config_of(None)
    prompt = {"generation_config": config} if where == "prompt" else {}
    job = {"argument": {"generation_config": config}, "prompt": {"generation_config": other}}.get(where, {})
    assert max(many_drafted(own_model, prompt, **job)) == 3


def test_arguments_win_over_the_generation_configuration_of_many_prompts(own_model: Any) -> None:
    own_model.generation_config = config_of("prompt_lookup", 3)
    assert max(many_drafted(own_model, spec_config={"max_draft_len": 2})) == 2
    assert set(many_drafted(own_model, {"generation_config": config_of("plain")})) == {0}
    config = {"generation_config": config_of("plain")}
    assert max(many_drafted(own_model, config, spec_method="prompt_lookup")) == 3


@pytest.mark.parametrize("where", ["model", "prompt"])
def test_many_prompts_are_decoded_without_a_configured_method_that_lacks_its_draft(
    own_model: Any, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """As `generate` does: a default that cannot be honoured decodes plainly."""
    config = config_of("draft_model")
    own_model.generation_config = config if where == "model" else config_of(None)
    assert set(many_drafted(own_model, {"generation_config": config})) == {0}
    assert "decodes without its default spec_method: `assistant_model` must be given" in caplog.text


@pytest.mark.parametrize("name", ["spec_config", "prompt_lookup_config"])
def test_a_configuration_object_is_saved_too(own_model: Any, name: str, tmp_path: Path) -> None:
    own_model.generation_config = GenerationConfig(pad_token_id=0)
    if name == "spec_config":
        own_model.generation_config.spec_method = "prompt_lookup"
    setattr(own_model.generation_config, name, PromptLookupConfig(max_draft_len=3, device_list=("cpu",)))
    own_model.save_pretrained(tmp_path)
    loaded = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert getattr(loaded.generation_config, name) == {"max_draft_len": 3, "device_list": ["cpu"]}
    assert max(drafted(loaded)) == 3


def test_every_configuration_reads_what_it_writes() -> None:
    for method in METHODS.values():
        assert method.config_class().to_dict() == {}
    for config in (
        AutoSpecConfig(max_nodes=9),
        LookaheadConfig.parse([5, 4, 3]),
        DraftModelConfig.parse({"draft_len": 3, "confidence_threshold": 0.25}),
    ):
        saved = json.loads(json.dumps(config.to_dict()))
        assert saved
        assert type(config).parse(saved).to_dict() == config.to_dict()


@pytest.mark.parametrize("of_call", [True, False])
def test_a_method_s_argument_in_a_generation_configuration_names_the_method(own_model: Any, of_call: bool) -> None:
    config = GenerationConfig(pad_token_id=0)
    config.prompt_lookup_config = [3, 2, ["cpu"]]
    if not of_call:
        own_model.generation_config = config
    kwargs = {"generation_config": config} if of_call else {}
    assert max(drafted(own_model, **kwargs)) == 3
    config.spec_method = None  # said so
    assert is_left_to_transformers(own_model, **kwargs)
    assert max(drafted(own_model, **kwargs, spec_method="prompt_lookup")) == 3
    config.prompt_lookup_config = None
    config.spec_config = {"draft_len": 3}
    with pytest.raises(ConfigError, match="`generation_config.spec_config key` must be one of"):
        own_model.generate(PROMPT, **kwargs, spec_method="prompt_lookup")


@pytest.mark.parametrize("method", ["draft_model", "auto"])
@pytest.mark.parametrize(
    ("assistant", "rule"),
    [
        (lambda: LlamaModel(LlamaConfig(**TINY)), "must be a model that generates"),
        (lambda: BertModel(BertConfig(**TINY)), "must be a model that generates"),
        (lambda: LlamaForCausalLM(LlamaConfig(**TINY)).to("meta"), "must have weights, not be on the meta device"),
    ],
    ids=["no output head", "an encoder", "no weights"],
)
def test_an_assistant_that_cannot_draft_is_named(model: Any, method: str, assistant: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"`assistant_model` {rule}"):
        model.generate(PROMPT, max_new_tokens=2, spec_method=method, assistant_model=assistant())


def test_defaults_given_to_enable_are_used_and_overridden() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]), prompt_lookup_config=[3, 2, ["cpu"]])
    assert max(drafted(model, spec_method="prompt_lookup")) == 3
    assert max(drafted(model, spec_method="prompt_lookup", spec_config={"max_draft_len": 2})) == 2
    with pytest.raises(ValueError, match="prompt_lookup_confg"):
        hf_specdec.enable(model, prompt_lookup_confg=[3])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("promt_lookup", "prompt_lookup"),
        ("prompt-lookup", "prompt_lookup"),
        ("n_gram", "ngram"),
        ("PLAIN", "plain"),
        ("None", "none"),
        ("xyz", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("where", ["argument", "generation_config"])
def test_an_unknown_method_is_answered_with_the_nearest_one(
    model: Any, name: str, nearest: str | None, where: str
) -> None:
    kwargs: dict[str, Any] = {"spec_method": name}
    if where == "generation_config":
        config = GenerationConfig(pad_token_id=0)
        config.spec_method = name
        kwargs = {"generation_config": config}
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'" if nearest else "`spec_method` must be") as error:
        model.generate(PROMPT, max_new_tokens=4, **kwargs)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"spec_method": "prompt_lookup", "spec_config": {"draft_len": 3}}, ["draft_len", "max_draft_len"]),
        ({"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 0}}, ["max_draft_len", "at least 1", "0"]),
        ({"spec_method": "prompt_lookup", "spec_config": 5}, ["spec_config", "5"]),
        ({"spec_method": "prompt_lookup", "spec_config": [3], "prompt_lookup_config": [3]}, ["prompt_lookup_config"]),
        ({"spec_method": "plain", "prompt_lookup_config": [3]}, ["prompt_lookup_config", "plain"]),
        ({"prompt_lookup_config": [3], "ngram_config": [3]}, ["ngram_config"]),
        ({"spec_config": {"max_draft_len": 3}}, ["spec_method"]),
        ({"spec_method": "prompt_lookup", "spec_observer": 5}, ["spec_observer", "callable"]),
        ({"spec_method": 5}, ["spec_method", "5"]),
        ({"spec_method": ["prompt_lookup"]}, ["spec_method", "prompt_lookup"]),
        ({"spec_method": lambda: "prompt_lookup"}, ["spec_method", "Drafter"]),
        ({"spec_method": lambda text: None}, ["spec_method", "without arguments"]),
        ({"spec_methd": "prompt_lookup"}, ["spec_methd"]),
    ],
    ids=_without_addresses,
)
def test_a_wrong_request_is_refused_in_the_users_words(model: Any, kwargs: dict[str, Any], words: list[str]) -> None:
    expected = plain(model, PROMPT, max_new_tokens=4, do_sample=False).tolist()
    with pytest.raises(ValueError) as error:
        model.generate(PROMPT, max_new_tokens=4, **kwargs)
    for word in words:
        assert word in str(error.value)
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False, spec_method="ngram").tolist() == expected
