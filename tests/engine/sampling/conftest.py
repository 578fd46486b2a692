"""Grammars, prompts and the embedded pair in fp32."""

from collections.abc import Callable
from typing import Any

import pytest

import hf_specdec

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "catfish", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PATTERN = r"[a-z]{2,6}\([a-z]{1,3}, [0-9]\)"
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": PATTERN},
    "lark": {"lark": 'start: "(" (start | WORD) ")"\nWORD: /[a-z]+/'},
}
PROMPTS = ["x = ", "def add(a, b):\n    return ", "for item in items:\n    "]


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


@pytest.fixture(scope="module")
def draft() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("draft"), precision="fp32")


@pytest.fixture
def make(tokenizer: Any) -> Callable[..., Any]:
    return lambda name="schema", **more: hf_specdec.grammar(tokenizer, **GRAMMARS[name], **more)


@pytest.fixture
def batch(tokenizer: Any) -> dict[str, Any]:
    encoded = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture
def prompt(tokenizer: Any) -> dict[str, Any]:
    return {"input_ids": tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]}
