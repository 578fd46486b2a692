"""The ways in: each gives the same text; copies, files and wrappers of the model work as if nothing had been done."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5ForConditionalGeneration

import hf_specdec
from tests.helpers.support import DRAFTS, PROMPT
from tests.helpers.zoo import FAMILIES, build

CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def fresh() -> Any:
    """A Llama that no one has enabled."""
    return build(FAMILIES["llama"])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    ids: list[list[int]] = build(FAMILIES["llama"]).generate(PROMPT, **CALL).tolist()
    return ids


def accepted(model: Any, expected: list[list[int]], **kwargs: Any) -> int:
    """Accepted drafts of a call that must give `expected`; the oracle's, so that there are some."""
    method = kwargs or DRAFTS["oracle"](expected[0])
    output = model.generate(PROMPT, **CALL, return_dict_in_generate=True, **method)
    assert output.sequences.tolist() == expected
    number: int = output.spec_stats.num_accepted_tokens
    return number


def test_enabling_twice_is_enabling_once(fresh: Any, expected: list[list[int]]) -> None:
    hf_specdec.enable(hf_specdec.enable(fresh))
    assert accepted(fresh, expected) > 0
    hf_specdec.disable(fresh)
    with pytest.raises(ValueError, match="spec_method"):
        fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup")


def test_disable_leaves_the_model_as_it_was(fresh: Any, expected: list[list[int]]) -> None:
    """Class, attributes and configuration; also after use, and also on a model never enabled."""
    before = (type(fresh), set(vars(fresh)), fresh.config.to_dict(), fresh.generation_config.to_dict())
    assert hf_specdec.disable(fresh) is fresh
    hf_specdec.enable(fresh)
    accepted(fresh, expected)
    hf_specdec.disable(fresh)
    assert (type(fresh), set(vars(fresh)), fresh.config.to_dict(), fresh.generation_config.to_dict()) == before
    assert fresh.generate(PROMPT, **CALL).tolist() == expected
    assert accepted(hf_specdec.enable(fresh), expected) > 0


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_enabled_and_independent(
    fresh: Any, expected: list[list[int]], duplicate: Callable[[Any], Any], used: bool
) -> None:
    """The copy computes with its own weights, whatever becomes of the original."""
    hf_specdec.enable(fresh, prompt_lookup_config=[3, 2, ["cpu"]])
    if used:
        accepted(fresh, expected, spec_method="prompt_lookup", spec_config={"pool": "shared"})
    twin = duplicate(fresh)
    with torch.no_grad():
        fresh.lm_head.weight.zero_()
    assert accepted(twin, expected) > 0
    assert accepted(twin, expected, spec_method="prompt_lookup") >= 0
    hf_specdec.disable(twin)
    assert fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup").tolist() != expected


def test_saving_writes_what_it_would_have_written(fresh: Any, expected: list[list[int]], tmp_path: Path) -> None:
    """The same files with the same contents, loadable without this package; `enable` leaves one mark.

    A generation configuration made from the model's own is marked as one with settings, so that a default survives.
    """
    fresh.generation_config._from_model_config = False
    fresh.save_pretrained(tmp_path / "before")
    hf_specdec.enable(fresh)
    accepted(fresh, expected)
    fresh.save_pretrained(tmp_path / "after")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "after").iterdir()) == names
    for name in names:
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    assert json.loads((tmp_path / "after" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "after").generate(PROMPT, **CALL).tolist() == expected


# peft asks transformers for a name that transformers has given up.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def lora(model: Any) -> Any:
    """A LoRA adapter that changes the model's text."""
    peft = pytest.importorskip("peft")

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


@pytest.mark.at_most(1)
@peft_warns
@pytest.mark.parametrize("order", ["enable, wrap", "wrap, enable"])
def test_a_lora_model_speculates_with_its_adapter(fresh: Any, expected: list[list[int]], order: str) -> None:
    if order == "enable, wrap":
        model = lora(hf_specdec.enable(fresh))
    else:
        model = lora(fresh)
        assert hf_specdec.enable(model) is model
    adapted = build_adapted().generate(PROMPT, **CALL).tolist()
    assert adapted != expected, "the adapter makes a difference"
    assert accepted(model, adapted) > 0
    with model.disable_adapter():
        assert accepted(model, expected) > 0
    assert accepted(model, adapted) > 0
    hf_specdec.disable(model)
    with pytest.raises(ValueError, match="spec_method"):
        model.generate(PROMPT, **CALL, spec_method="prompt_lookup")


def build_adapted() -> Any:
    return lora(build(FAMILIES["llama"]))


@pytest.mark.parametrize("order", ["enable, compile", "compile, enable"])
def test_a_compiled_model_speculates(fresh: Any, expected: list[list[int]], order: str) -> None:
    """The wrapper of `torch.compile`, here with the backend that compiles nothing."""
    if order == "compile, enable":
        model = torch.compile(fresh, backend="eager")
        assert hf_specdec.enable(model) is model
    else:
        model = torch.compile(hf_specdec.enable(fresh), backend="eager")
    assert accepted(model, expected) > 0
    assert model.generate(PROMPT, **CALL).tolist() == expected


@pytest.mark.wide
def test_a_model_compiled_in_place_speculates(fresh: Any, expected: list[list[int]]) -> None:
    hf_specdec.enable(fresh).compile(backend="eager")
    call = {"max_new_tokens": 5, "do_sample": False}
    output = fresh.generate(PROMPT, **call, return_dict_in_generate=True, **DRAFTS["oracle"](expected[0]))
    assert output.sequences[0].tolist() == expected[0][:35]
    assert output.spec_stats.num_accepted_tokens > 0


class OwnLlama(hf_specdec.SpecGenerationMixin, LlamaForCausalLM):
    """A class of one's own."""


def test_the_mixin_gives_a_class_the_argument(fresh: Any, expected: list[list[int]]) -> None:
    model = OwnLlama(fresh.config).eval()
    model.load_state_dict(fresh.state_dict())
    model.generation_config = fresh.generation_config
    assert accepted(model, expected) > 0
    assert model.generate(PROMPT, **CALL).tolist() == expected
    assert accepted(hf_specdec.enable(model), expected) > 0
    assert accepted(hf_specdec.disable(model), expected) > 0, "the class still has it"
    assert accepted(copy.deepcopy(model), expected) > 0


def test_decode_needs_no_enabling(fresh: Any, expected: list[list[int]]) -> None:
    """`generate(custom_generate=...)` is transformers' own way in; the model is not patched."""
    method = DRAFTS["oracle"](expected[0]) | {"custom_generate": hf_specdec.decode}
    assert accepted(fresh, expected, **method) > 0
    assert "generate" not in vars(fresh)
    output = fresh.generate(
        PROMPT, **CALL, custom_generate=hf_specdec.decode, prompt_lookup_config=[3, 2, ["cpu"]], spec_method="ngram"
    )
    assert output.tolist() == expected


def test_a_call_of_decode_stays_as_it_is_when_the_model_is_enabled(fresh: Any, expected: list[list[int]]) -> None:
    """With the names under which transformers drops neither the streamer nor the draft model."""

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    for enable in (lambda model: model, hf_specdec.enable):
        streamer, draft = Streamer(), build(FAMILIES["llama"])
        method = {"custom_generate": hf_specdec.decode, "draft_model_config": {"confidence_threshold": 0.0}}
        inputs = {"spec_assistant_model": draft, "spec_streamer": streamer}
        assert accepted(enable(fresh), expected, **method, **inputs) > 0
        assert streamer.tokens == [*expected[0], -1]


def test_decode_without_a_method_is_plain_decoding(fresh: Any, expected: list[list[int]]) -> None:
    assert fresh.generate(PROMPT, **CALL, custom_generate=hf_specdec.decode).tolist() == expected


def test_the_auto_classes_load_and_enable(fresh: Any, expected: list[list[int]], tmp_path: Path) -> None:
    fresh.save_pretrained(tmp_path)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.__class__ is LlamaForCausalLM
    assert accepted(model, expected) > 0
    half = hf_specdec.AutoModelForCausalLM.from_pretrained(str(tmp_path), precision="bf16")
    assert half.dtype == torch.bfloat16
    assert half.generate(PROMPT, **CALL, spec_method="prompt_lookup").shape == (1, 42)


def test_the_auto_class_for_seq2seq_loads_and_enables(tmp_path: Path) -> None:
    model = build(FAMILIES["t5"])
    expected = model.generate(PROMPT, **CALL).tolist()
    model.save_pretrained(tmp_path)
    loaded = hf_specdec.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, precision="fp32")
    assert loaded.__class__ is T5ForConditionalGeneration
    assert accepted(loaded, expected) > 0


def test_capability_says_what_the_model_can_do(fresh: Any) -> None:
    """Found without disturbing model, cache or random numbers."""
    state = torch.get_rng_state()
    result = hf_specdec.capability(fresh)
    assert torch.equal(torch.get_rng_state(), state)
    assert (result.tier, result.attention, result.dtype) == ("tree", "sdpa", "float32")
    assert result.reason
    assert hf_specdec.capability(fresh) is result
    assert json.loads(json.dumps(result.to_dict()))["tier"] == "tree"
