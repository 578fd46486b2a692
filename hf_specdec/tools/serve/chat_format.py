"""Format of a model's reasoning and tool calls, as a response template of transformers.

It says which markers a model writes around them: the tokenizer's own, one of `FORMATS`, or a file.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.tools.serve.chat_parser import REASONING_FIELDS, ChatParser

THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
JSON_CALLS = {"repeats": True, "content": "json", "content_args": {"allow_non_json": True}}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Fields of a response template for the calls of each format, by what the chat templates of its models hold.
FORMATS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "qwen3_coder": (
        ("<function=",),
        {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                },
                "transform": NAMED,
            },
        },
    ),
    "hermes": (
        ("<tool_call>",),
        {"tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **JSON_CALLS}},
    ),
    "mistral": (
        ("[TOOL_CALLS]",),
        {
            "tool_calls": {"open_pattern": r"\s*\[TOOL_CALLS\]\s*(?=\[)", **JSON_CALLS},
            "named_calls": {
                "open_pattern": r"\s*\[TOOL_CALLS\](?=[\w.-]+(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*\{)",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                "repeats": True,
            },
        },
    ),
    "pythonic": (
        ("[func_name1(", "<|tool_call_start|>"),
        {
            "tool_calls": {
                "open_pattern": r"(?:\s*<\|tool_call_start\|>\s*|\A\s*)(?=\[\w[\w.-]*\()",
                "close": "<|tool_call_end|>",
                "repeats": True,
                "content": "python-call-list",
            },
        },
    ),
    "llama3_json": (
        ("<|python_tag|>", '{"name": function name, "parameters": '),
        {
            "tool_calls": {
                "open_pattern": r"(?:\s*<\|python_tag\|>\s*|\A\s*|(?<=\}\s*;\s*))(?=\{)",
                "close_pattern": r"(?<=\})\s*;\s*(?=\{)",
                **JSON_CALLS,
            },
        },
    ),
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markers that a model writes around reasoning and tool calls.

    Attributes:
        name (`str`, *optional*): of its calls' format, where that is one of `FORMATS`.
        template (`dict`): a response template of transformers.
        calls (`tuple[str, ...]`): its fields that hold calls.
        skipped: special tokens that are no markers, without tools and with them.
        has_anchor (`bool`): whether the template finds the beginning of an answer in a prompt by itself.
    """

    tokenizer: Any
    name: str | None
    template: dict[str, Any]
    calls: tuple[str, ...]
    skipped: tuple[frozenset[int], frozenset[int]]
    has_anchor: bool

    @classmethod
    def of(cls, tokenizer: Any, tool_parser: str | None = None) -> "ChatFormat":
        """The format of a tokenizer's model.

        Args:
            tool_parser (`str`, *optional*): a name of `FORMATS` or a JSON file with a response template; by default
                the tokenizer's own template, or what its chat template shows.

        Raises:
            ConfigError: there is no such format, or the file is no response template.
        """
        template = getattr(tokenizer, "response_template", None) if tool_parser is None else None
        if tool_parser is not None and tool_parser.endswith(".json"):
            template = _from_file(Path(tool_parser))
        elif tool_parser is not None and tool_parser not in FORMATS:
            raise unknown_name("--tool-parser", tool_parser, tuple(FORMATS))
        has_anchor, name = template is not None, None
        if template is None:
            name, template = _shown_by(tokenizer, tool_parser)
        try:
            tokenizer.get_response_parser(template, prefix="")
        except (ValueError, AttributeError) as error:
            rule, remedy = "must be a response template that transformers reads", f"{error}"
            raise ConfigError("--tool-parser", rule, tool_parser or "the tokenizer's", remedy) from error
        calls = tuple(name for name in template["fields"] if name not in ("content", *REASONING_FIELDS))
        fields = {name: field for name, field in template["fields"].items() if name not in calls}
        skipped = _skipped(tokenizer, fields), _skipped(tokenizer, template["fields"])
        return cls(tokenizer, name, template, calls, skipped, has_anchor)

    def parser(
        self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]], max_calls: int | None = None
    ) -> ChatParser:
        """A parser for one answer.

        Args:
            prompt_ids: which may open the reasoning.
            tools: as chat templates take them; without any, calls are text.
            max_calls (`int`, *optional*): most calls of the answer; what follows them is dropped.
        """
        fields = {name: field for name, field in self.template["fields"].items() if tools or name not in self.calls}
        if fields.keys() <= {"content"}:
            return ChatParser()
        prefix = self.tokenizer.decode(prompt_ids) if self.has_anchor else self.opened(prompt_ids)
        parser = self.tokenizer.get_response_parser(
            {**self.template, "fields": fields}, prefix=prefix, tools=list(tools)
        )
        return ChatParser(parser, self.skipped[bool(tools)], max_calls)

    def opened(self, prompt_ids: Sequence[int]) -> str:
        """The marker with which a prompt opens the reasoning; empty where it does not."""
        ending = str(self.tokenizer.decode(prompt_ids[-16:])).rstrip()
        is_read = "reasoning_content" in self.template["fields"]
        return next((mark for mark in THINKING if ending.endswith(mark) and is_read), "")


def _shown_by(tokenizer: Any, name: str | None) -> tuple[str | None, dict[str, Any]]:
    """The calls' format and a response template for what the chat template and the vocabulary show.

    Args:
        name: of the calls' format, where it is known.
    """
    text, known = str(tokenizer.chat_template or ""), tokenizer.get_added_vocab()
    found = (name for name, (marks, _) in FORMATS.items() if any(mark in text for mark in marks))
    name = name or next(found, None)
    fields = {} if name is None else dict(FORMATS[name][1])
    for opening, closing in THINKING.items():
        if opening in known or opening in text:
            opened, closed = re.escape(opening), re.escape(closing)
            pattern = {"open_pattern": rf"{opened}\s*", "close_pattern": rf"\s*{closed}\s*"}
            fields.setdefault("reasoning_content", pattern)
    return name, {"start_anchor_pattern": r"\A", "fields": {**fields, "content": {}}}


def _skipped(tokenizer: Any, fields: dict[str, Any]) -> frozenset[int]:
    """Special tokens that are no markers."""
    text = str(fields).replace("\\", "")
    texts = ((token, str(tokenizer.decode([token])).strip()) for token in tokenizer.all_special_ids)
    return frozenset(token for token, special in texts if special not in text)


def _from_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--tool-parser", "must name a JSON file", str(path), str(error)) from error
