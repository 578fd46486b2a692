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
from hf_specdec.kernels.quantization.bnb import bnb_config
from hf_specdec.kernels.quantization.e4m3 import CODES
from hf_specdec.kernels.quantization.fp8 import fp8_config
from hf_specdec.kernels.quantization.fp8_linear import Fp8Linear
from hf_specdec.kernels.quantization.report import precision_of
from tests.helpers.cover import wide_but
from tests.helpers.support import DRAFTS, PROMPT, computed_by_torch, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, QUICK, build

QUANTISED = ("fp8", "int8", "nf4")
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "prompt_lookup tree": {"spec_method": "prompt_lookup", "spec_config": {"num_branches": 4}},
    "lookahead": {"spec_method": "lookahead"},
    "draft_model": {"spec_method": "draft_model"},
    "draft_model tree": {"spec_method": "draft_model", "spec_config": {"num_branches": 3}},
    "plain": {"spec_method": "plain"},
}
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
    config = fp8_config() if precision == "fp8" else bnb_config(precision)
    if precision == "nf4":
        config.bnb_4bit_compute_dtype = torch.float32
    model = auto(family).from_pretrained(checkpoint(family), quantization_config=config, dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # the packed layout computes in bf16
    return model


@pytest.mark.at_most(1)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", wide_but(QUICK, FAMILIES))
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
    """int8 is not among them: it rounds activations to 8 bits, so that the last bit of a sum may become a step."""
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


@pytest.mark.wide
@pytest.mark.parametrize("precision", QUANTISED)
def test_a_draft_has_a_precision_of_its_own(precision: str) -> None:
    """Whatever the draft's weights, the target's tokens are the target's."""
    load = hf_specdec.AutoModelForCausalLM.from_pretrained
    target = load(embedded.path("target"), precision="fp32")
    draft = load(embedded.path("draft"), precision=precision)
    ids = code("def read(path):\n    ")
    expected = plain(target, ids, **SETTINGS)
    output = target.generate(
        ids, **SETTINGS, spec_method="draft_model", assistant_model=draft, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > 0


def code(text: str) -> torch.Tensor:
    ids: torch.Tensor = tf.AutoTokenizer.from_pretrained(embedded.path("target"))(text, return_tensors="pt").input_ids
    return ids


def parting(model: Any, expected: list[int], found: list[int]) -> float | None:
    """Distance of the first two tokens that differ, over the largest logit; `None` where none does."""
    at = next((i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return None
    with torch.no_grad():
        logits = model(torch.tensor([expected[:at]])).logits[0, -1].float()
    return float((logits[expected[at]] - logits[found[at]]).abs() / logits.abs().max())


@pytest.mark.parametrize("precision", QUANTISED)
def test_texts_part_only_at_near_ties_in_bf16(precision: str) -> None:
    """Every method, on a real model of code as `from_pretrained(precision=...)` loads it."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("draft"), precision=precision)
    ids = code("def read(path):\n    ")
    expected = plain(model, ids, **SETTINGS)[0].tolist()
    for method, how in METHODS.items():
        how = how | ({"assistant_model": model} if how["spec_method"] == "draft_model" else {})
        found = model.generate(ids, **SETTINGS, **how)[0].tolist()
        distance = parting(model, expected, found)
        assert distance is None or distance < NEAR_TIE, method
    with computed_by_torch():
        assert model.generate(ids, **SETTINGS, spec_method="plain")[0].tolist() == expected


SAVED = ("llama", "gpt2", "mixtral", "t5")  # a plain one, one without the format, experts, an encoder


@pytest.mark.at_most(1)
@pytest.mark.parametrize("family", wide_but(SAVED, FAMILIES))
def test_a_saved_fp8_model_loads_again(checkpoint: Callable[[str], str], tmp_path: Path, family: str) -> None:
    """The same codes, scales and logits, with `precision` or without."""
    model = auto(family).from_pretrained(checkpoint(family), precision="fp8")
    if family == "gpt2":
        with pytest.raises(hf_specdec.UnsupportedModelError, match='no FP8 format .* Save the model in "bf16"'):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    for precision in (None, "auto", "fp8"):
        again = auto(family).from_pretrained(tmp_path, precision=precision)
        states = [each.state_dict() for each in (model, again)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            other = states[1][name]
            assert other.dtype == value.dtype, name
            same = (value.view(torch.int8), other.view(torch.int8)) if value.dtype == CODES else (value, other)
            assert torch.equal(*same), name
    assert plain(again, PROMPT, **SETTINGS).tolist() == plain(model, PROMPT, **SETTINGS).tolist()


def test_a_saved_fp8_model_is_a_compressed_tensors_checkpoint(checkpoint: Callable[[str], str], tmp_path: Path) -> None:
    """transformers by itself reads the same weights, and bf16 here widens them."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(checkpoint("llama"), precision="fp8")
    model.save_pretrained(tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config["dequantize"] = True
    plainly = tf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    widened = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, precision="fp32")
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            expected = module.weight.float() * module.weight_scale
            for other in (plainly, widened):
                assert torch.equal(other.get_submodule(name).weight, expected), name


def test_what_is_left_in_full_precision_is_said(checkpoint: Callable[[str], str]) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(checkpoint("mixtral"), precision="fp8")
    kinds = {type(module).__name__: module for module in model.modules()}
    assert "Linear" not in kinds, "the output layer has a weight of its own, so it is quantised too"
    tied = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp8")
    assert tied.hf_quantizer.quantization_config.left == {"lm_head": "its weight is another layer's too"}
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_quantised_weights_are_never_trained(checkpoint: Callable[[str], str]) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(checkpoint("llama"), precision="fp8")
    assert not any(p.requires_grad for m in model.modules() if isinstance(m, Fp8Linear) for p in m.parameters())


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
