"""Quantised weights: speculation gives what plain `generate` gives with the same weights.

Computed in fp32 the tokens are the same. In bf16, which the precisions use, a forward of several tokens rounds
differently from one of a single token; where the texts part, the two tokens are within that rounding of one another.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels.quantization.precision import loading_arguments
from hf_specdec.kernels.quantization.weights import precision_of
from tests.helpers.cover import wide_but
from tests.helpers.support import DRAFTS, PROMPT, computed_by_torch, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, QUICK, build

QUANTISED = ("fp8", "nf4")
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    "lookahead": {"spec_method": "lookahead"},
    "draft_model": {"spec_method": "draft_model"},
    "draft_model tree": {"spec_method": "draft_model", "spec_config": {"num_branches": 3}},
    "plain": {"spec_method": "plain"},
}
# torchao's fp8 takes no layer of GPT-2's, and computes none of Falcon's.
IN_FP8 = [family for family in FAMILIES if family not in ("gpt2", "falcon")]
# A logit's rounding in bf16 over the largest logit: two texts part only where tokens are this close.
NEAR_TIE = 0.03


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's model in fp32."""
    folders: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in folders:
            folders[family] = str(tmp_path_factory.mktemp(family))
            build(FAMILIES[family]).save_pretrained(folders[family])
        return folders[family]

    return folder


def auto(family: str) -> Any:
    seq2seq = FAMILIES[family].is_seq2seq
    return hf_specdec.AutoModelForSeq2SeqLM if seq2seq else hf_specdec.AutoModelForCausalLM


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose layers fill 4-bit blocks of 64 numbers, which every CPU reads rightly."""
    family = FAMILIES["llama"]
    options = dict(family.options) | {"hidden_size": 64, "intermediate_size": 128}
    folder = str(tmp_path_factory.mktemp("whole_blocks"))
    build(dataclasses.replace(family, options=options)).save_pretrained(folder)
    return folder


def load_in_fp32(checkpoint: Callable[[str], str], family: str, precision: str) -> Any:
    """Quantised weights, everything computed in fp32."""
    config = loading_arguments(precision, checkpoint(family), {}, auto(family).auto_class)["quantization_config"]
    if precision == "nf4":
        config.bnb_4bit_compute_dtype = torch.float32
    model = auto(family).from_pretrained(checkpoint(family), quantization_config=config, dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # the packed layout computes in bf16
    return model


@pytest.mark.at_most(1)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", wide_but(QUICK, IN_FP8))
def test_fp8_weights_change_nothing_about_speculation(
    checkpoint: Callable[[str], str], family: str, draft: str
) -> None:
    """Every family at its tier; drafts that are right, wrong and branching."""
    if draft == "lookahead" and FAMILIES[family].tier == "chain":
        return
    model = load_in_fp32(checkpoint, family, "fp8")
    assert precision_of(model) == "fp8"
    assert hf_specdec.capability(model).tier == FAMILIES[family].tier
    expected = plain(model, PROMPT, **SETTINGS)
    output = model.generate(PROMPT, **SETTINGS, **DRAFTS[draft](expected[0].tolist()))
    assert output.tolist() == expected.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp8", "nf4"])
def test_each_method_gives_plain_s_tokens_in_fp32(
    checkpoint: Callable[[str], str], whole_blocks: str, precision: str, method: str
) -> None:
    """int8 is not among them: it rounds tokens to 8 bits, so that the last bit of a sum may become a step."""
    model = load_in_fp32((lambda _: whole_blocks) if precision == "nf4" else checkpoint, "llama", precision)
    how = METHODS[method]
    if how["spec_method"] == "draft_model":
        how = how | {"assistant_model": noisy_copy(build(FAMILIES["llama"]))}
    expected = plain(model, PROMPT, **SETTINGS)
    assert model.generate(PROMPT, **SETTINGS, **how).tolist() == expected.tolist()


@pytest.mark.parametrize("precision", ["fp8", "nf4"])
def test_sampled_tokens_follow_the_seed(checkpoint: Callable[[str], str], whole_blocks: str, precision: str) -> None:
    model = load_in_fp32((lambda _: whole_blocks) if precision == "nf4" else checkpoint, "llama", precision)
    settings = SETTINGS | {"do_sample": True, "temperature": 0.8}
    torch.manual_seed(3)
    expected = plain(model, PROMPT, **settings)
    torch.manual_seed(3)
    assert model.generate(PROMPT, **settings, spec_method="prompt_lookup").tolist() == expected.tolist()


def code(text: str) -> torch.Tensor:
    ids: torch.Tensor = tf.AutoTokenizer.from_pretrained(embedded.path("target"))(text, return_tensors="pt").input_ids
    return ids


def parting(model: Any, expected: list[int], result: list[int]) -> float | None:
    """Distance of the first two tokens that differ, over the largest logit; `None` where none does."""
    at = next((i for i, pair in enumerate(zip(expected, result, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return None
    with torch.no_grad():
        logits = model(torch.tensor([expected[:at]])).logits[0, -1].float()
    return float((logits[expected[at]] - logits[result[at]]).abs() / logits.abs().max())


@pytest.mark.parametrize("precision", QUANTISED)
def test_texts_part_only_at_near_ties_in_bf16(precision: str) -> None:
    """Every method, on a real model of code as `from_pretrained(precision=...)` loads it."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("draft"), precision=precision)
    ids = code("def read(path):\n    ")
    expected = plain(model, ids, **SETTINGS)[0].tolist()
    for method, how in METHODS.items():
        how = how | ({"assistant_model": model} if how["spec_method"] == "draft_model" else {})
        result = model.generate(ids, **SETTINGS, **how)[0].tolist()
        distance = parting(model, expected, result)
        assert distance is None or distance < NEAR_TIE, method
    with computed_by_torch():
        assert model.generate(ids, **SETTINGS, spec_method="plain")[0].tolist() == expected


def test_a_saved_fp8_model_loads_again(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    """The same text, with `precision` or without."""
    model = auto("llama").from_pretrained(checkpoint("llama"), precision="fp8")
    expected = plain(model, PROMPT, **SETTINGS).tolist()
    model.save_pretrained(tmp_path)
    for precision in (None, "auto", "fp8"):
        again = auto("llama").from_pretrained(tmp_path, precision=precision)
        assert precision_of(again) == "fp8"
        assert plain(again, PROMPT, **SETTINGS).tolist() == expected


def test_a_model_without_layers_that_fp8_takes_is_refused(checkpoint: Callable[[str], str]) -> None:
    with pytest.raises(
        hf_specdec.UnsupportedModelError, match='has none besides its output layer. Load it with "bf16"'
    ):
        auto("gpt2").from_pretrained(checkpoint("gpt2"), precision="fp8")


@pytest.mark.parametrize("shape", [(128, 256), (48, 64)], ids=["packed", "general"])
def test_nf4_is_saved_before_its_first_forward_or_not_at_all(tmp_path: Path, shape: tuple[int, int]) -> None:
    """bitsandbytes packs the weights in place; its state dict is wrong after that, and so is the model."""
    hidden, inner = shape
    sizes = {"vocab_size": 64, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 2}
    config = tf.LlamaConfig(**sizes, num_hidden_layers=1)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "fp32")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", precision="nf4")
    model.save_pretrained(tmp_path / "nf4")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = model(ids).logits
    packed = any(
        getattr(module.weight.quant_state, "packing_format_for_cpu", False)
        for module in model.modules()
        if type(module).__name__ == "Linear4bit"
    )
    if packed:
        with pytest.raises(hf_specdec.UnsupportedModelError, match="Save the model right after loading it"):
            model.save_pretrained(tmp_path / "late")
    else:
        model.save_pretrained(tmp_path / "late")
    for folder in ("nf4",) if packed else ("nf4", "late"):
        again = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path / folder, precision="nf4")
        with torch.no_grad():
            assert torch.equal(again(ids).logits, logits)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits), "refusing has not changed the model"
