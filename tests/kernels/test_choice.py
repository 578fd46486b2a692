"""Asking for `attn_implementation="xformers"`: the ways in, what is refused, what it costs to have it on offer."""

import copy
import functools
import importlib.util
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import ConfigError, MissingExtraError, embedded
from hf_specdec.compat import mask_function_of
from hf_specdec.compat.attention import attention_function_of
from hf_specdec.kernels.attention import kernel_mask
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build
from tests.kernels.families import ALL, REFUSED

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
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "xformers" else found(name, *rest)
    )


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_an_enabled_model_takes_it(model: Any, asked: Any) -> None:
    """On a CPU torch's attention computes it: the text is that of the model as it was."""
    expected = plain(model, PROMPT, **SETTINGS)
    model.set_attn_implementation(asked)
    assert attention_of(model) == "xformers"
    assert torch.equal(plain(model, PROMPT, **SETTINGS), expected)
    for method in ("prompt_lookup", "lookahead"):
        assert torch.equal(model.generate(PROMPT, **SETTINGS, spec_method=method), expected)
    assert hf_specdec.capability(model).tier == "tree"
    model.set_attn_implementation("eager")
    assert attention_of(model) == "eager"


@pytest.mark.wide
def test_it_is_an_argument_of_loading() -> None:
    load = functools.partial(hf_specdec.AutoModelForCausalLM.from_pretrained, precision="fp32")
    path = embedded.path("target")
    expected = plain(load(path), PROMPT, **SETTINGS)
    for asked in ("xformers", {"": "xformers"}):
        model = load(path, attn_implementation=asked)
        assert attention_of(model) == "xformers"
        assert torch.equal(model.generate(PROMPT, **SETTINGS, spec_method="prompt_lookup"), expected)
    assert attention_of(load(path, attn_implementation="eager")) == "eager"


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


def test_masks_are_registered_with_the_attention(model: Any) -> None:
    """transformers hands no mask at all to an attention that has no mask function."""
    assert attention_function_of("xformers") is not None
    assert mask_function_of("xformers") is kernel_mask


def test_disabling_gives_the_class_s_own_method_back(model: Any) -> None:
    hf_specdec.disable(model)
    method = model.set_attn_implementation.__func__
    assert hf_specdec.enable(hf_specdec.enable(model)).set_attn_implementation.__func__ is not method
    assert hf_specdec.disable(model).set_attn_implementation.__func__ is method


def test_a_copy_asks_for_itself(model: Any) -> None:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("xformers")
    assert (attention_of(twin), attention_of(model)) == ("xformers", "sdpa")


def run(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.wide
def test_having_it_on_offer_costs_nothing() -> None:
    """Importing the package registers nothing; enabling a model imports no xformers."""
    code = """
import sys, transformers, hf_specdec
from transformers import AttentionInterface
print("xformers" in AttentionInterface())
config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = hf_specdec.enable(transformers.LlamaForCausalLM(config))
model.set_attn_implementation("xformers")
print("xformers" in AttentionInterface(), "xformers" in sys.modules)
"""
    assert run(code).split() == ["False", "True", "False"]


@pytest.mark.wide
def test_a_pickled_model_works_in_another_process(model: Any, tmp_path: Path) -> None:
    model.set_attn_implementation("xformers")
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    expected = plain(model, PROMPT, **SETTINGS)
    code = f"""
import pickle, torch
from pathlib import Path
model = pickle.loads(Path({str(tmp_path / "model")!r}).read_bytes())
print(model.generate(torch.tensor({PROMPT.tolist()}), max_new_tokens=12, do_sample=False, spec_method="plain").tolist())
"""
    assert run(code) == str(expected.tolist())
