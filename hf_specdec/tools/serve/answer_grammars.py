"""Grammars of requests: answers in JSON, and tool calls in the form that the model writes them in."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hf_specdec.engine.sampling.grammar import COMPACT, Grammar, grammar
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.tools.serve.chat_format import THINKING

SPACE = r"/[ \n]{0,4}/"  # between reasoning and an answer


def answer_grammar(
    tokenizer: Any,
    eos_token_id: Collection[int],
    *,
    schema: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    call_format: str | None = None,
    many: bool = False,
    after_text: bool = False,
    opened: str = "",
) -> Grammar:
    """The grammar of JSON, of tool calls, or of either.

    Args:
        schema (`dict`, *optional*): of an answer in JSON, with llguidance's options.
        tools: as chat templates take them; those that may be called. Of a tool that is `strict`, llguidance has to
            follow all parameters.
        call_format (`str`, *optional*): a name of `CALLS`.
        many (`bool`, *optional*, defaults to `False`): whether there may be several calls.
        after_text (`bool`, *optional*, defaults to `False`): whether the model may write text before calls, or alone.
        opened (`str`, *optional*): the marker with which the prompt opens the reasoning, after which the answer begins.

    Raises:
        ConfigError: there is no such format, nothing in it tells calls from text, or the schema or the parameters of a
            tool are invalid, or `strict` and more than llguidance can follow.
        MissingExtraError: llguidance is not installed.
    """
    lark = _Lark(tokenizer)
    answers = [] if schema is None else [lark.json(schema)]
    if tools:
        opening, calls = lark.calls(call_format, tools, many=many)
        answers.append(f"{lark.text_before(opening)} ({calls})?" if after_text else calls)
    start = " | ".join(answers)
    lark.rules.append(f"start: {lark.reasoning(opened)} ({start})" if opened else f"start: {start}")
    return grammar(tokenizer, lark="\n".join(lark.rules), eos_token_id=sorted(eos_token_id) or None)


class _Lark:
    """A Lark grammar that is being written.

    Attributes:
        added: ids of tokens that the vocabulary has besides those of texts; a grammar names them by these.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.rules: list[str] = []
        self.added: dict[str, int] = tokenizer.get_added_vocab()

    def calls(self, call_format: str | None, tools: Sequence[dict[str, Any]], *, many: bool) -> tuple[str, str]:
        """Add rules for calls of these tools; returns how they begin, and their rule."""
        if call_format not in CALLS:
            raise unknown_name("tool_parser", call_format, CALLS)
        opening, write, joint, closing = next(
            parts for mark, parts in CALLS[call_format].items() if not mark or mark in self.added
        )
        call = self.rule(" | ".join([write(tool["function"]["name"], _parameters(tool), self) for tool in tools]))
        more = f"({self.literal(joint)} {call})*" if many else ""
        return opening, self.rule(f"{self.literal(opening)} {call} {more} {self.literal(closing)}")

    def reasoning(self, opened: str) -> str:
        """Add rules for reasoning that has been opened with a marker, and for its end; returns their name."""
        closing = THINKING[opened]
        if closing in self.added:
            return self.rule(f"{self.text_without(closing)} {self.literal(closing)} {SPACE}")
        return f"{self.text_until(closing)} {SPACE}"

    def literal(self, text: str) -> str:
        """Write a text, its added tokens by their ids."""
        marks = sorted(map(re.escape, self.added), key=len, reverse=True)
        parts = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        written = [f"<[{self.added[part]}]>" if part in self.added else json.dumps(part) for part in parts if part]
        return " ".join(written)

    def text_before(self, opening: str) -> str:
        """Add rules for text that calls may follow; returns their name."""
        if (mark := next((one for one in self.added if opening.startswith(one)), None)) is None:
            rule, remedy = "must be unset where no token marks calls among text", "Or set tool_choice to required."
            raise ConfigError("strict", rule, True, remedy)
        return self.text_without(mark)

    def text_without(self, mark: str) -> str:
        """Add rules for text, reasoning in it, that does not hold a mark; returns their name."""
        marks = [self.added[one] for pair in THINKING.items() for one in pair if one in self.added and one != mark]
        thinking = " | ".join(f"<[{token}]>" for token in marks)
        escaped = re.escape(mark).replace("/", r"\/")
        self.rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{escaped}(.|\\n)*/")
        return self.rule(f"TEXT? (({thinking}) TEXT?)*" if thinking else "TEXT?")

    def text_until(self, ending: str) -> str:
        """Add a rule for text up to an ending, and that."""
        return self.rule("/(.|\\n)*/", f"[suffix={json.dumps(ending)}]")

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: dict[str, Any], parameters: Mapping[str, Any] | None = None) -> str:
        """Add a rule for JSON of a schema, which may be one of `parameters` and name their definitions."""
        shared = {name: value for name, value in (parameters or {}).items() if name in ("$defs", "definitions")}
        options = {"x-guidance": (parameters or schema)["x-guidance"]}
        return self.rule(f"%json {json.dumps({**shared, **schema, **options})}")


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Schema of a tool's arguments, with llguidance's options."""
    function = tool["function"]
    options = {**COMPACT, "lenient": not function.get("strict")}
    return {"type": "object", "properties": {}, **(function.get("parameters") or {}), "x-guidance": options}


def _arguments(parameters: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Names and schemas of a function's arguments, and whether each is required; those first."""
    required = parameters.get("required", [])
    for key, schema in sorted(parameters["properties"].items(), key=lambda item: item[0] not in required):
        yield key, schema, key in required


def _in_json(field: str) -> Callable[[str, dict[str, Any], _Lark], str]:
    """Calls as JSON objects of a name and, in `field`, arguments."""

    def write(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
        parts = (
            "{",
            '"name"',
            ": ",
            json.dumps(name),
            ", ",
            f'"{field}"',
            ": ",
        )  # words of JSON, as answers in JSON may be
        return f"""{" ".join(map(lark.literal, parts))} {lark.json(parameters)} "}}\""""

    return write


def _after_name(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
    """A call as a name and its arguments in JSON."""
    return f"{lark.literal(f'{name}[ARGS]')} {lark.json(parameters)}"


def _in_tags(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
    """A call whose arguments stand between tags, texts as they are and the rest in JSON."""
    parts, ending = [lark.literal(f"{name}>\n")], "\n</parameter>\n"
    for key, schema, is_required in _arguments(parameters):
        if schema.get("type") == "string" and "enum" not in schema:
            value = lark.text_until(ending)
        else:
            value = f"{lark.json(schema, parameters)} {lark.literal(ending)}"
        before = f"<parameter={key}>\n"
        parts.append(f"({lark.literal(before)} {value}){'' if is_required else '?'}")
    return " ".join(parts)


def _in_python(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
    """A call as Python writes it, with arguments by name."""
    parts: list[str] = []
    for key, schema, is_required in _arguments(parameters):
        value = '("True" | "False")' if schema.get("type") == "boolean" else lark.json(schema, parameters)
        before = f"{', ' if parts else ''}{key}="
        parts.append(f"({lark.literal(before)} {value}){'' if is_required or not parts else '?'}")
    is_empty_allowed = not parameters.get("required") and parts
    arguments = f"({' '.join(parts)})?" if is_empty_allowed else " ".join(parts)
    return f'{lark.literal(name)} "(" {arguments} ")"'


Parts = tuple[str, Callable[[str, dict[str, Any], _Lark], str], str, str]  # before, of, between and after the calls
END_OF_FUNCTION = "</function>\n</tool_call>"
BEGIN_OF_FUNCTION = "<tool_call>\n<function="
# Forms of the calls of each format, by an added token that a vocabulary with this form has; "" for any.
CALLS: dict[str, dict[str, Parts]] = {
    "hermes": {"": ("<tool_call>\n", _in_json("arguments"), "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")},
    "llama3_json": {"": ("", _in_json("parameters"), "; ", "")},
    "mistral": {
        "[ARGS]": ("[TOOL_CALLS]", _after_name, "[TOOL_CALLS]", ""),
        "": ("[TOOL_CALLS][", _in_json("arguments"), ", ", "]"),
    },
    "pythonic": {
        "<|tool_call_start|>": ("<|tool_call_start|>[", _in_python, ", ", "]<|tool_call_end|>"),
        "": ("[", _in_python, ", ", "]"),
    },
    "qwen3_coder": {
        "": (BEGIN_OF_FUNCTION, _in_tags, f"{END_OF_FUNCTION}\n{BEGIN_OF_FUNCTION}", END_OF_FUNCTION),
    },
}
