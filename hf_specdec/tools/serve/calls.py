"""Reasoning and tool calls in a model's text, by the response templates of transformers."""

import json
import re
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in tokenizers' own templates
THINK, END_OF_THINK = "<think>", "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
# For models that transformers has no template for: calls in JSON as Hermes writes them.
HERMES = {
    "start_anchor_pattern": rf"(?s:\A.*?(?=(?:{THINK}\s*)?\Z))",  # the prompt, but for its last marker
    "fields": {
        "reasoning_content": {"open_pattern": rf"{THINK}\s*", "close_pattern": rf"\s*{END_OF_THINK}\s*"},
        "tool_calls": {
            "open_pattern": rf"\s*{CALL}",
            "close": END_OF_CALL,
            "repeats": True,
            "content": "json",
            "content_args": {"allow_non_json": True},
        },
        "content": {},
    },
}
STRING = r'(?s:"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z))'
ESCAPED = {ord(char): f"\\u{ord(char):04x}" for char in set(string.punctuation) - set('"\\/')}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markers that a model writes around its reasoning and tool calls: fields of a template of transformers."""

    tokenizer: Any
    template: dict[str, Any]
    fields: dict[str, dict[str, Any]]
    special: dict[int, str]  # tokens and their texts

    @classmethod
    def of(cls, tokenizer: Any, model: Any) -> "ChatFormat":
        """Take the tokenizer's own template, transformers' for the model's type, or what the chat template shows."""
        template: Any = get_response_template(tokenizer, model) or HERMES
        text = f"{tokenizer.chat_template} {' '.join(tokenizer.get_added_vocab())}"
        is_shown = {"reasoning_content": THINK in text, "tool_calls": CALL in text} if template is HERMES else {}
        fields = {name: field for name, field in template["fields"].items() if is_shown.get(name, True)}
        special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        return cls(tokenizer, template, fields, special)

    @property
    def call_fields(self) -> frozenset[str]:
        """Fields that hold calls."""
        return frozenset(self.fields) - {"content", *REASONING_FIELDS}

    @property
    def is_hermes(self) -> bool:
        """True if calls are JSON between `<tool_call>` and `</tool_call>`."""
        field = self.fields.get("tool_calls", {})
        return field.get("content") == "json" and field.get("close") == END_OF_CALL

    def end_of_reasoning(self, prompt: str) -> str:
        """Return what ends the reasoning that a prompt opens."""
        is_open = "reasoning_content" in self.fields and prompt.rstrip().endswith(THINK)
        return f"\n{END_OF_THINK}\n\n" if is_open else ""

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> "ChatParser":
        """Make a parser for the answer to a prompt. Without tools, as chat templates take them, calls are text."""
        fields = {name: field for name, field in self.fields.items() if tools or name not in self.call_fields}
        if fields.keys() <= {"content"}:
            return ChatParser()
        template, prompt = (
            {**self.template, "fields": fields},
            self.tokenizer.decode(prompt_ids).removesuffix(f"{CALL}\n"),
        )
        return ChatParser(self.tokenizer.get_response_parser(template, prefix=prompt, tools=list(tools)), fields)

    def skipped(self, fields: dict[str, Any]) -> frozenset[int]:
        """Return the special tokens that are no part of a text, since no marker of the fields holds them."""
        marks = str(fields).replace("\\", "")
        return frozenset(token for token, text in self.special.items() if text.strip() not in marks)


class ChatParser:
    """Splits one answer into text, reasoning and tool calls, as OpenAI's deltas. What is no call is text."""

    def __init__(self, parser: Any = None, fields: dict[str, Any] | None = None) -> None:
        self._parser, self.fields = parser, fields or {}
        self._json_fields = {  # with quotes of JSON
            name
            for name, field in self.fields.items()
            if field.get("content") == "json" and "string_delims" not in field.get("content_args", {})
        }
        self._field, self._body = "content", ""  # of the region that is open
        self._text = self._opening = ""  # text that was not fed, and a bracket before it that was fed
        self.num_calls = 0

    def push(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> dict[str, Any]:
        """Take text; return the delta that is certain now. A text that is cut would have gone on after its end."""
        delta: dict[str, Any] = {}
        self._text += text
        while self._parser is not None and (piece := self._next_piece(is_end)):
            self._take(delta, piece)
            if piece in "{[" and self._field in self._json_fields:  # which completed a marker
                self._opening = piece
        if is_end and self._parser is not None:
            self._take(delta, is_cut=is_cut)
        if self._parser is None:
            _add(delta, "content", self._text)
            self._text = ""
        return delta

    def _next_piece(self, is_end: bool) -> str:
        """Cut off what is fed next: whole JSON of a call without markers in its strings, or text up to a bracket."""
        text = self._opening + self._text
        if self._field in self._json_fields and text.startswith(("{", "[")):
            if not (size := _json_size(text)) and not is_end:
                return ""
            size = size or len(text)
            whole = re.sub(STRING, lambda match: match[0].translate(ESCAPED), text[:size])
            piece, self._opening = whole[len(self._opening) :], ""
        else:
            size = next((place for place, char in enumerate(text) if char in "{["), len(text)) or 1
            piece = text[:size]
        self._text = text[size:]
        return piece

    def _take(self, delta: dict[str, Any], piece: str = "", *, is_cut: bool = False) -> None:
        """Add what the parser reads in a piece, or at the end, to a delta."""
        try:
            events = self._parser.feed(piece) if piece else self._parser.finalize()[1]
        except (ValueError, KeyError):  # of a template whose calls have to be well-formed
            self._parser, events = None, [{"type": "region_close", "field": self._field, "value": None}]
        for event in events:
            field, kind = event["field"], event["type"]
            is_text = field == "content" or field in REASONING_FIELDS
            if kind == "region_open":
                self._field, self._body = field, ""
            elif kind == "region_close":
                self._field = "content"
                if not is_text:
                    self._add_calls(delta, field, event["value"], is_cut=is_cut)
            elif not is_text:
                self._body += event["text"]
            elif field in REASONING_FIELDS:
                _add(delta, "reasoning_content", event["text"])
            elif not self.num_calls or (event["text"].strip() and not is_cut):  # no space, or cut marker, after calls
                _add(delta, "content", event["text"])

    def _add_calls(self, delta: dict[str, Any], field: str, value: Any, *, is_cut: bool) -> None:
        """Add the calls of a region, or its text where it holds none."""
        calls = None if is_cut and field not in self._json_fields else _calls(value)
        if calls is None:
            _add(delta, "content", "" if is_cut else self._body)
        for name, arguments in calls or ():
            head = {"index": self.num_calls, "id": uuid.uuid4().hex[:9], "type": "function"}
            delta.setdefault("tool_calls", []).append({**head, "function": {"name": name, "arguments": arguments}})
            self.num_calls += 1


def _add(delta: dict[str, Any], name: str, text: str) -> None:
    if text:
        delta[name] = delta.get(name, "") + text


def _json_size(text: str) -> int | None:
    """Return the length of the JSON that a text begins with; `None` where it goes on."""
    depth = 0
    for match in re.finditer(rf"{STRING}|[\[\]{{}}]", text):
        depth += (match[0] in ("{", "[")) - (match[0] in ("}", "]"))
        if not depth:
            return match.end()
    return None


def _calls(value: Any) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls in a region; `None` where it holds something else."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = call.get("function", call) if isinstance(call, dict) else {}
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls
