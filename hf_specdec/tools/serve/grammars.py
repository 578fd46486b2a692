"""Grammars of requests: answers in JSON, or calls in JSON between `<tool_call>` and `</tool_call>`."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from hf_specdec.engine.sampling.grammar import COMPACT, Grammar, grammar
from hf_specdec.errors import ConfigError
from hf_specdec.tools.serve.calls import CALL, END_OF_CALL, END_OF_THINK, THINK

SPACE = r"/[ \n]{0,4}/"  # between reasoning and an answer


def answer_grammar(
    tokenizer: Any,
    eos_token_id: Collection[int],
    *,
    schema: dict[str, Any] | None = None,
    tools: Sequence[dict[str, Any]] = (),
    many: bool = False,
    after_text: bool = False,
    after_reasoning: bool = False,
) -> Grammar:
    """Make the grammar of JSON, of tool calls, or of either.

    Args:
        schema (`dict`, *optional*): of an answer in JSON, with llguidance's options.
        tools: as chat templates take them; those that may be called. Of a tool that is `strict`, llguidance has to
            follow all parameters.
        many (`bool`, *optional*, defaults to `False`): whether there may be several calls.
        after_text (`bool`, *optional*, defaults to `False`): whether the model may write text before calls, or alone.
        after_reasoning (`bool`, *optional*, defaults to `False`): whether the prompt has opened the reasoning.

    Raises:
        ConfigError: the schema or the parameters of a tool are invalid, or `strict` and more than llguidance can
            follow; or no token marks calls among text.
        MissingExtraError: llguidance is not installed.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    rules, answers = [], [] if schema is None else [f"%json {json.dumps(schema)}"]
    if tools:
        rules.append(f"call: {' | '.join(_call(tool['function'], added) for tool in tools)}")
        answers.append('call ("\\n" call)*' if many else "call")
    start = " | ".join(answers)
    if after_text:
        if CALL not in added:
            raise ConfigError("strict", f"must be unset where {CALL} is no token", True, "Or require a call.")
        rules += _text_without(CALL, added)
        start = f"text ({start})?"
    elif after_reasoning and END_OF_THINK in added:
        rules += _text_without(END_OF_THINK, added)
        start = f"text <[{added[END_OF_THINK]}]> {SPACE} ({start})"
    elif after_reasoning:
        rules.append(f"reasoning[suffix={json.dumps(END_OF_THINK)}]: /(.|\\n)*/")
        start = f"reasoning {SPACE} ({start})"
    return grammar(tokenizer, lark="\n".join([*rules, f"start: {start}"]), eos_token_id=sorted(eos_token_id) or None)


def _call(function: dict[str, Any], added: dict[str, int]) -> str:
    """A call of a function, its markers by their ids where they are tokens."""
    opening, closing = (f"<[{added[mark]}]>" if mark in added else json.dumps(mark) for mark in (CALL, END_OF_CALL))
    begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
    options = {"x-guidance": {**COMPACT, "lenient": not function.get("strict")}}
    schema = {"type": "object", "properties": {}, **function.get("parameters", {}), **options}
    return f'{opening} {json.dumps(begin)} %json {json.dumps(schema)} "}}\\n" {closing}'


def _text_without(mark: str, added: dict[str, int]) -> list[str]:
    """Rules for text, reasoning in it, that does not hold a mark."""
    marks = [f"<[{added[text]}]>" for text in (THINK, END_OF_THINK) if text in added and text != mark]
    thinking = f" (({' | '.join(marks)}) TEXT?)*" if marks else ""
    escaped = re.escape(mark).replace("/", r"\/")
    return [f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{escaped}(.|\\n)*/", f"text: TEXT?{thinking}"]
