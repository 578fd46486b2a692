"""Reasoning and tool calls in a model's text, by the response templates of transformers."""

import functools
import json
import string
import uuid
from collections.abc import Callable, Sequence
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
# Characters of markers, and what stands for them in strings: code points that no text uses.
HIDDEN = {ord(char): 0x10F000 + ord(char) for char in set(string.punctuation) - set('"\\_-.')}
SHOWN = {hidden: char for char, hidden in HIDDEN.items()}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markers that a model writes around its reasoning and tool calls.

    Attributes:
        fields (`dict`): those of `template`, a response template of transformers.
    """

    tokenizer: Any
    template: dict[str, Any]
    fields: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, tokenizer: Any, model: Any) -> "ChatFormat":
        """Take the tokenizer's own template, transformers' for the model's type, or what the chat template shows."""
        template: Any = get_response_template(tokenizer, model) or HERMES
        text = f"{tokenizer.chat_template} {' '.join(tokenizer.get_added_vocab())}"
        shown = {"reasoning_content": THINK in text, "tool_calls": CALL in text}
        fields = {
            name: field for name, field in template["fields"].items() if template is not HERMES or shown.get(name, True)
        }
        return cls(tokenizer, template, fields)

    @property
    def call_fields(self) -> frozenset[str]:
        """Fields that hold calls."""
        return frozenset(self.fields) - {"content", *REASONING_FIELDS}

    @property
    def is_hermes(self) -> bool:
        """True if calls are JSON between `<tool_call>` and `</tool_call>`."""
        field = self.fields.get("tool_calls", {})
        return field.get("content") == "json" and field.get("close") == END_OF_CALL

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with the beginning of the reasoning."""
        return "reasoning_content" in self.fields and self.tokenizer.decode(prompt_ids).rstrip().endswith(THINK)

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> "ChatParser":
        """Make a parser for the answer to a prompt. Without tools, as chat templates take them, calls are text."""
        fields = {name: field for name, field in self.fields.items() if tools or name not in self.call_fields}
        if fields.keys() <= {"content"}:
            return ChatParser()
        prompt = self.tokenizer.decode(prompt_ids)
        template = {**self.template, "fields": fields}
        parser = self.tokenizer.get_response_parser(template, prefix=prompt, tools=list(tools))
        marks = str(fields).replace("\\", "")
        special = ((token, str(self.tokenizer.decode([token])).strip()) for token in self.tokenizer.all_special_ids)
        return ChatParser(parser, fields, frozenset(token for token, text in special if text not in marks))


class ChatParser:
    """Splits one answer into text, reasoning and tool calls, as OpenAI's deltas. What is no call is text.

    Args:
        parser: of transformers; by default all is text.
        fields: of its response template.
        skipped: tokens that are left out of the text; by default all special ones.

    Attributes:
        num_calls (`int`): calls so far.
    """

    def __init__(
        self, parser: Any = None, fields: dict[str, Any] | None = None, skipped: frozenset[int] | None = None
    ) -> None:
        self._parser, self.skipped = parser, skipped
        self._json_fields = {
            name
            for name, field in (fields or {}).items()
            if field.get("content") == "json" and "string_delims" not in field.get("content_args", {})
        }
        self._field, self._body = "content", ""  # of the region that is open
        self._json = _JsonScanner()
        self.num_calls = 0

    def push(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> dict[str, Any]:
        """Take text, the last of it at the end; return the delta that is certain now.

        Args:
            is_cut (`bool`, *optional*, defaults to `False`): whether the model would have written more.
        """
        delta: dict[str, Any] = {}
        while text and self._parser is not None:
            piece, text = self._next_piece(text)
            self._take(delta, functools.partial(self._parser.feed, piece))
            if piece in "{[" and self._field in self._json_fields and not self._json.depth:
                self._json.depth = 1  # a marker was complete only with what follows it
        if is_end and self._parser is not None:
            self._take(delta, lambda: self._parser.finalize()[1], is_cut=is_cut)
        if self._parser is None:
            _add(delta, "content", text)
        return delta

    def _next_piece(self, text: str) -> tuple[str, str]:
        """Cut off what is fed next: JSON of a call with its strings hidden, or text up to where JSON may begin."""
        if self._json.depth or (self._field in self._json_fields and text[0] in "{["):
            return self._json.hide(text)
        place = next((place for place, char in enumerate(text) if char in "{["), len(text)) or 1
        return text[:place], text[place:]

    def _take(self, delta: dict[str, Any], read: Callable[[], Any], *, is_cut: bool = False) -> None:
        """Add the events that the parser reads to a delta."""
        try:
            events = read()
        except (ValueError, KeyError):  # of a template whose calls have to be well-formed
            self._parser = None
            _add(delta, "content", "" if is_cut else self._body.translate(SHOWN))
            return
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
            _add(delta, "content", "" if is_cut else self._body.translate(SHOWN))
        for name, arguments in calls or ():
            head = {"index": self.num_calls, "id": uuid.uuid4().hex[:9], "type": "function"}
            delta.setdefault("tool_calls", []).append({**head, "function": {"name": name, "arguments": arguments}})
            self.num_calls += 1


class _JsonScanner:
    """Follows JSON to its end, and hides the characters of markers in its strings.

    Attributes:
        depth (`int`): objects and lists that are open.
    """

    def __init__(self) -> None:
        self.depth, self._in_string, self._is_escaped = 0, False, False

    def hide(self, text: str) -> tuple[str, str]:
        """Return the JSON in a text with its strings hidden, and what follows its end."""
        parts = []
        for place, char in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._in_string, self._is_escaped = char != '"', char == "\\"
                char = char.translate(HIDDEN)
            else:
                self._in_string = char == '"'
                self.depth += (char in "{[") - (char in "}]")
            parts.append(char)
            if not self.depth:
                return "".join(parts), text[place:]
        return "".join(parts), ""


def _add(delta: dict[str, Any], name: str, text: str) -> None:
    if text:
        delta[name] = delta.get(name, "") + text


def _calls(value: Any) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls in a region; `None` where it holds something else."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        calls.append((name.translate(SHOWN), json.dumps(arguments, ensure_ascii=False).translate(SHOWN)))
    return calls
