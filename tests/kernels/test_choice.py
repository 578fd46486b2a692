"""`attn_implementation="xformers"`: the ways in, what is refused, and what reaches xformers, by its own checks."""

import importlib.util
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import ConfigError, MissingExtraError
from hf_specdec.compat.attention import attention_function_of
from hf_specdec.kernels.xformers import attend, xformers_kernel
from tests.helpers.attention import StrictKernel
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.kernels.families import ALL, REFUSED
from tests.kernels.test_layout import DTYPES, HEADS, expected, tensors, tree_mask

pytest.importorskip("xformers")
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
ASKED = {"str": "xformers", "dict": {"": "xformers"}}


def attention_of(model: Any) -> str:
    name: str = model.config._attn_implementation
    return name


@pytest.fixture
def model() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.fixture
def without_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    result = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "xformers" else result(name, *rest)
    )


@pytest.mark.parametrize("wanted", ASKED.values(), ids=ASKED)
def test_an_enabled_model_takes_it(model: Any, wanted: Any) -> None:
    """On a CPU torch's attention computes it: the text is that of the model as it was."""
    expected = plain(model, PROMPT, **SETTINGS)
    model.set_attn_implementation(wanted)
    assert attention_of(model) == "xformers"
    assert torch.equal(plain(model, PROMPT, **SETTINGS), expected)
    for method in ("prompt_lookup", "lookahead"):
        assert torch.equal(model.generate(PROMPT, **SETTINGS, spec_method=method), expected)
    assert hf_specdec.capability(model).tier == "tree"
    model.set_attn_implementation("eager")
    assert attention_of(model) == "eager"


def test_why_torch_computes_it_is_said_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    attention = attention_function_of("xformers")
    attention._said.clear()  # type: ignore[union-attr]
    model.set_attn_implementation("xformers")
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            model.generate(PROMPT, **SETTINGS, spec_method="prompt_lookup")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["'xformers' attention uses torch's own instead: xformers has no kernel for cpu"]


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_with_attention_code_of_its_own_is_refused(family: str, tmp_path: Path) -> None:
    """transformers would only log a line, or hand the model masks that its code takes for others."""
    model = hf_specdec.enable(build(ALL[family]))
    before = attention_of(model)
    with pytest.raises(ConfigError, match="attn_implementation.*own code.*Leave it out"):
        model.set_attn_implementation("xformers")
    assert attention_of(model) == before
    hf_specdec.disable(model).save_pretrained(tmp_path)
    auto = hf_specdec.AutoModelForSeq2SeqLM if ALL[family].is_seq2seq else hf_specdec.AutoModelForCausalLM
    with pytest.raises(ConfigError, match="attn_implementation.*own code.*Leave it out"):
        auto.from_pretrained(tmp_path, attn_implementation="xformers")


def test_a_model_that_was_loaded_with_it_by_transformers_is_refused_too(tmp_path: Path) -> None:
    """Once the name is known, transformers gives it to BLOOM, whose code adds the booleans of the mask."""
    build(ALL["bloom"]).save_pretrained(tmp_path)
    hf_specdec.enable(build(FAMILIES["llama"]))
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="xformers")
    with pytest.raises(ConfigError, match="attn_implementation"):
        hf_specdec.enable(model)


def test_without_xformers_the_error_installs_it(model: Any, without_xformers: None) -> None:
    """When it is asked for, before anything is loaded."""
    with pytest.raises(MissingExtraError, match=r'pip install "hf_specdec\[xformers\]"'):
        model.set_attn_implementation("xformers")
    assert attention_of(model) == "sdpa"
    with pytest.raises(MissingExtraError, match=r'pip install "hf_specdec\[xformers\]"'):
        hf_specdec.AutoModelForCausalLM.from_pretrained("/no/such/folder", attn_implementation="xformers")
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(PROMPT, **SETTINGS, spec_method="plain"), plain(model, PROMPT, **SETTINGS))


def test_disabling_gives_the_class_s_own_method_back(model: Any) -> None:
    hf_specdec.disable(model)
    method = model.set_attn_implementation.__func__
    assert hf_specdec.enable(hf_specdec.enable(model)).set_attn_implementation.__func__ is not method
    assert hf_specdec.disable(model).set_attn_implementation.__func__ is method


OF_THIS_MACHINE = ("device=cpu", "bf16 is only supported", "operator wasn't built", "xFormers wasn't build")


class Asking(StrictKernel):
    """Asks xformers about everything that it computes."""

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> None:
        assert not reasons(query, key, value, bias)


def reasons(*tensors: Any) -> list[str]:
    """Why the CUTLASS operator would not take these on a GPU of compute capability 8 or 9."""
    from xformers.ops.fmha import common, cutlass

    inputs = common.Inputs(*tensors, scale=0.3)
    inputs.validate_inputs()
    step = 16 // tensors[0].dtype.itemsize
    with mock.patch.object(cutlass, "_minimum_gemm_alignment", lambda _: step):
        result = cutlass.FwOp.not_supported_reasons(inputs)
    return [reason for reason in result if not reason.startswith(OF_THIS_MACHINE)]


@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_xformers_takes_what_it_is_given(heads: str, dtype: str, queries: int) -> None:
    query, key, value = tensors(heads, dtype, queries=queries, keys=queries + 14)
    mask = tree_mask(2, queries, queries + 14, text=3)
    kernel = Asking()
    output = attend(kernel, query, key, value, mask, 0.3)
    torch.testing.assert_close(output.float(), expected(query, key, value, mask), atol=2e-2, rtol=2e-2)
    assert len(kernel.calls) == 1


def test_the_operators_are_called_as_xformers_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a torch of another CUDA version than the wheel's they are not refused."""
    from xformers.ops import fmha

    scales: list[float] = []

    def apply(inputs: Any, needs_gradient: bool) -> Any:
        scales.append(inputs.scale)
        scores = torch.einsum("bmhd,bkhd->bhmk", inputs.query, inputs.key) * inputs.scale + inputs.attn_bias
        return torch.einsum("bhmk,bkhd->bmhd", scores.softmax(-1), inputs.value), None

    monkeypatch.setattr(fmha.common, "_built_with_cuda", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fmha, "_dispatch_fw", lambda inputs, needs_gradient: mock.Mock(apply=apply))
    query, key, value = tensors("gqa", "fp32")
    mask = tree_mask(2, 5, 23, text=9)
    output = attend(xformers_kernel, query, key, value, mask, 0.3)
    torch.testing.assert_close(output, expected(query, key, value, mask), atol=1e-5, rtol=1e-5)
    assert fmha.common._built_with_cuda is True
    assert scales == [0.3]
