"""Grammars of outlines and xgrammar: the text of plain generation, speculative for one prompt."""

import re
from typing import Any

import pytest

import hf_specdec
from tests.helpers.support import plain

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of their imports
PATTERN = r"[a-z]{2,6}\([a-z]{1,3}, [0-9]\)"
PROMPTS = ["def add(a, b):\n    return ", "for item in items:\n    "]


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "batch"])
def test_xgrammar_is_plain_generation_s(target: Any, tokenizer: Any, prompts: list[str], method: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammar = xgrammar.GrammarCompiler(info).compile_regex(PATTERN)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"max_new_tokens": 12}
    expected = plain(target, **inputs, logits_processor=[xgrammar.contrib.hf.LogitsProcessor(grammar)])
    inputs |= {"logits_processor": [xgrammar.contrib.hf.LogitsProcessor(grammar)], "spec_method": method}
    output = target.generate(**inputs, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert (output.spec_stats.plain_reason is None) == (len(prompts) == 1)


def test_outlines_answers_are_plain_generation_s(target: Any, tokenizer: Any) -> None:
    outlines = pytest.importorskip("outlines")
    structured = outlines.from_transformers(target, tokenizer)
    answer = outlines.types.Regex(PATTERN)
    expected = structured(PROMPTS[0], answer, max_new_tokens=24)
    steps: list[Any] = []
    ours = structured(PROMPTS[0], answer, max_new_tokens=24, spec_method="auto", spec_observer=steps.append)
    assert ours == expected
    assert steps, "the prompt was decoded in this package's loop"
    assert re.fullmatch(PATTERN, ours)
