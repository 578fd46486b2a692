"""Grammars of outlines and xgrammar in speculative batches: the text of plain generation, a state for each row."""

import re
from collections.abc import Callable
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


@pytest.fixture
def inputs(tokenizer: Any) -> dict[str, Any]:
    encoded = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def xgrammar_processor(tokenizer: Any, patterns: list[str]) -> Callable[[], Any]:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammars = [xgrammar.GrammarCompiler(info).compile_regex(pattern) for pattern in patterns]
    return lambda: xgrammar.contrib.hf.LogitsProcessor(grammars)


@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("patterns", [[PATTERN], [PATTERN, "[0-9]{3,9}"]], ids=["one", "each its own"])
def test_xgrammar_rows_are_plain_generation_s(
    target: Any, tokenizer: Any, inputs: dict[str, Any], patterns: list[str], method: str
) -> None:
    make = xgrammar_processor(tokenizer, patterns)
    expected = plain(target, **inputs, max_new_tokens=12, logits_processor=[make()])
    output = target.generate(
        **inputs, max_new_tokens=12, logits_processor=[make()], spec_method=method, return_dict_in_generate=True
    )
    assert output.spec_stats.plain_reason is None
    assert output.sequences.tolist() == expected.tolist()


def test_outlines_answers_are_plain_generation_s(target: Any, tokenizer: Any) -> None:
    outlines = pytest.importorskip("outlines")
    structured = outlines.from_transformers(target, tokenizer)
    answer = outlines.types.Regex(PATTERN)
    expected = structured.batch(PROMPTS, answer, max_new_tokens=24)
    steps: list[Any] = []
    ours = structured.batch(PROMPTS, answer, max_new_tokens=24, spec_method="auto", spec_observer=steps.append)
    assert ours == expected
    assert steps, "the batch was decoded in this package's loop"
    assert all(re.fullmatch(PATTERN, text) for text in ours)
