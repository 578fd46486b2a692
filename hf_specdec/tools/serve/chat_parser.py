"""Splits a model's text into content, reasoning and tool calls while it is written, by a parser of transformers."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import regex

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in tokenizers' own templates
# What a model writes before the arguments of a call in JSON: `{"name": "f", "arguments": ` or `f[ARGS]`.
HEAD = regex.compile(
    r'[\s\[\]},;]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)|\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)'
)


class ChatParser:
    """Splits one answer into text, reasoning and tool calls, as OpenAI's deltas. What is no call is text.

    Arguments that are written as JSON are told as they come, others at the end of their call.

    Args:
        parser: of transformers; by default all is text.
        skipped: tokens that are left out of the text; by default all special ones.
        max_calls (`int`, *optional*): most calls; what follows them is dropped.

    Attributes:
        num_calls (`int`): calls whose arguments have ended.
        is_complete (`bool`): whether the answer has as many calls as it may.
    """

    def __init__(self, parser: Any = None, skipped: frozenset[int] | None = None, max_calls: int | None = None) -> None:
        self._parser, self.skipped, self._max_calls = parser, skipped, max_calls
        self._region = _CallRegion()
        self._num_begun = self.num_calls = 0
        self.is_complete = False

    def push(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> dict[str, Any]:
        """Take text, the last of it at the end; returns the delta that is certain now.

        Args:
            is_cut (`bool`, *optional*, defaults to `False`): whether the model would have written more.
        """
        if self._parser is None:
            return {"content": text} if text else {}
        delta: dict[str, Any] = {}
        try:
            events = self._parser.feed(text)
            last_events = self._parser.finalize()[1] if is_end else []
        except ValueError:  # of a parser whose content has to be well-formed
            self._parser = None
            return {} if is_cut or self._region.num_begun else {"content": self._region.body + text}
        for event in events:
            self._take(event, delta)
        for event in last_events:
            self._take(event, delta, is_cut=is_cut)
        return {name: value for name, value in delta.items() if value}

    def _take(self, event: dict[str, Any], delta: dict[str, Any], *, is_cut: bool = False) -> None:
        field = event["field"]
        if self.is_complete:
            return
        if field == "content" or field in REASONING_FIELDS:
            name = "content" if field == "content" else "reasoning_content"
            text = event["text"] if event["type"] == "region_chunk" else ""
            if (text.strip() and not is_cut) or not self._num_begun:  # a cut marker of the next call is no text
                delta[name] = delta.get(name, "") + text
        elif event["type"] == "region_open":
            self._region = _CallRegion()
        elif event["type"] == "region_chunk":
            for part in self._region.push(event["text"]):
                self._tell(delta, *part)
        else:
            self._close(event["value"], delta, is_cut=is_cut)

    def _close(self, value: Any, delta: dict[str, Any], *, is_cut: bool) -> None:
        """End a region: its calls that have not been told, or its text where it holds none."""
        calls, region = _calls(value), self._region
        if calls is not None and not (is_cut and not region.holds_json):
            for name, arguments in calls[region.num_begun :]:
                self._tell(delta, name, arguments, is_end=True)
        elif not region.num_begun and not (is_cut and region.may_become_call):
            delta["content"] = delta.get("content", "") + region.body
        self._region = _CallRegion()
        self.is_complete = self.num_calls == self._max_calls

    def _tell(self, delta: dict[str, Any], name: str | None, arguments: str, is_end: bool = False) -> None:
        """Add to a delta the name of a call that begins, and arguments of the last one."""
        self.is_complete = self.is_complete or (name is not None and self._num_begun == self._max_calls)
        if self.is_complete:
            return
        calls = delta.setdefault("tool_calls", [])
        if name is not None:
            head = {"index": self._num_begun, "id": uuid.uuid4().hex[:9], "type": "function"}
            calls.append({**head, "function": {"name": name, "arguments": ""}})
            self._num_begun += 1
        elif not calls:
            calls.append({"index": self._num_begun - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += arguments
        self.num_calls += is_end


class _CallRegion:
    """Text between the markers of calls, with the names and arguments in it where these are JSON.

    Attributes:
        body (`str`): all of it.
        num_begun (`int`): calls whose names have been found.
    """

    def __init__(self) -> None:
        self.body = ""
        self.num_begun = 0
        self._read, self._begin = 0, -1  # characters that have been read; where the arguments of the call begin

    @property
    def holds_json(self) -> bool:
        """Returns whether it is JSON, which tells by itself that it is whole."""
        return self.body.lstrip("[ \t\r\n").startswith("{")

    @property
    def may_become_call(self) -> bool:
        """Returns whether a call may be on the way."""
        return not self.holds_json or HEAD.fullmatch(self.body, partial=True) is not None

    def push(self, text: str) -> Iterator[tuple[str | None, str, bool]]:
        """Take text; yields the name of each call that begins, arguments, and whether they end here."""
        self.body += text
        while self._read < len(self.body):
            if self._begin < 0:
                if (head := HEAD.match(self.body, self._read)) is None:
                    return
                self._read = self._begin = head.end()
                self.num_begun += 1
                yield head["name"], "", False
            start, end = self._read, _end_of_json(self.body, self._begin) if "}" in text else None
            self._read = len(self.body) if end is None else end
            if end is not None:
                self._begin = -1
            yield None, self.body[start : self._read], end is not None


def _end_of_json(text: str, begin: int) -> int | None:
    """Place after the JSON that begins at a place; `None` where it goes on."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, begin)[1]
    except ValueError:
        return None


def _calls(value: Any) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls in a region; `None` where it holds something else."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        call = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        found.append((name, json.dumps(arguments, ensure_ascii=False)))
    return found
