"""Grammars of requests: answers in JSON, and tool calls in the form that the model writes them in."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hf_specdec.engine.sampling.grammar import COMPACT, Grammar, grammar
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.tools.serve.chat_format import THINKING
from hf_specdec.tools.serve.protocol import ResponseFormat

OPTIONS = {"x-guidance": {**COMPACT, "lenient": True}}  # what llguidance cannot follow of a schema is left to the model


def answer_grammar(tokenizer: Any, asked: ResponseFormat | None, eos_token_id: Collection[int]) -> Grammar | None:
    """The grammar of a `response_format`; `None` for text.

    Raises:
        ConfigError: the schema is invalid, or `strict` and more than llguidance can follow.
        MissingExtraError: llguidance is not installed.
    """
    if asked is None or asked.type == "text":
        return None
    ends = sorted(eos_token_id) or None
    if asked.json_schema is None:
        return grammar(tokenizer, json_object=True, eos_token_id=ends)
    options = {} if asked.json_schema.strict else OPTIONS
    return grammar(tokenizer, json_schema={**asked.json_schema.definition, **options}, eos_token_id=ends)


def tool_call_grammar(
    tokenizer: Any,
    call_format: str,
    tools: Sequence[dict[str, Any]],
    eos_token_id: Collection[int],
    *,
    many: bool,
    after_text: bool = False,
) -> Grammar:
    """The grammar of one call, or of one or more where `many`, of these tools; or of text and perhaps such calls.

    Args:
        call_format (`str`): a name of `CALLS`.
        tools: as chat templates take them; those that may be called. Of a tool that is `strict`, llguidance has to
            follow all parameters.
        after_text (`bool`, *optional*, defaults to `False`): whether the model may write text before calls, or alone.

    Raises:
        ConfigError: there is no such format, llguidance cannot follow the parameters of a tool, or nothing in the
            format tells calls from text.
        MissingExtraError: llguidance is not installed.
    """
    if call_format not in CALLS:
        raise unknown_name("tool_parser", call_format, CALLS)
    lark = _Lark(tokenizer)
    opening, write, joint, closing = next(
        parts for mark, parts in CALLS[call_format].items() if not mark or mark in lark.added
    )
    calls = [write(tool["function"]["name"], _parameters(tool), lark) for tool in tools]
    more = f"({lark.literal(joint)} call)*" if many else ""
    start = f"{lark.literal(opening)} call {more} {lark.literal(closing)}"
    if after_text:
        if (mark := next((one for one in lark.added if opening.startswith(one)), None)) is None:
            rule, remedy = "must be unset where no token marks calls among text", "Or set tool_choice to required."
            raise ConfigError("strict", rule, True, remedy)
        start = f"{lark.text_without(mark)} ({start})?"
    lark.rules += [f"call: {' | '.join(calls)}", f"start: {start}"]
    return grammar(tokenizer, lark="\n".join(lark.rules), eos_token_id=sorted(eos_token_id) or None)


class _Lark:
    """A Lark grammar that is being written.

    Attributes:
        added: ids of tokens that the vocabulary has besides those of texts; a grammar names them by these.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.rules: list[str] = []
        self.added: dict[str, int] = tokenizer.get_added_vocab()

    def literal(self, text: str) -> str:
        """Write a text, its added tokens by their ids."""
        marks = sorted(map(re.escape, self.added), key=len, reverse=True)
        parts = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        written = [f"<[{self.added[part]}]>" if part in self.added else json.dumps(part) for part in parts if part]
        return " ".join(written)

    def text_without(self, mark: str) -> str:
        """Add rules for text, reasoning in it, that does not hold a mark; returns their name."""
        marks = [self.added[one] for pair in THINKING.items() for one in pair if one in self.added]
        thinking = " | ".join(f"<[{token}]>" for token in marks)
        self.rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{re.escape(mark)}(.|\\n)*/")
        return self.rule(f"TEXT? (({thinking}) TEXT?)*" if thinking else "TEXT?")

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
        return f"""{lark.literal(f'{{"name": {json.dumps(name)}, "{field}": ')} {lark.json(parameters)} "}}\""""

    return write


def _after_name(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
    """A call as a name and its arguments in JSON."""
    return f"{lark.literal(f'{name}[ARGS]')} {lark.json(parameters)}"


def _in_tags(name: str, parameters: dict[str, Any], lark: _Lark) -> str:
    """A call whose arguments stand between tags, texts as they are and the rest in JSON."""
    parts, ending = [lark.literal(f"{name}>\n")], "\n</parameter>\n"
    for key, schema, is_required in _arguments(parameters):
        if schema.get("type") == "string" and "enum" not in schema:
            value = lark.rule("/(.|\\n)*/", f"[suffix={json.dumps(ending)}]")
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
