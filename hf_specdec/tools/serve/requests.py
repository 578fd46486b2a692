"""From a request's body to `generate`'s arguments. Knows nothing of HTTP."""

import dataclasses
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.compat.models import max_positions, text_config
from hf_specdec.engine.sampling.grammar import COMPACT, grammar
from hf_specdec.errors import ConfigError, counted
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.serve.calls import CALL, END_OF_CALL, END_OF_THINK, THINK, ChatFormat
from hf_specdec.tools.serve.protocol import AnyRequest, ChatRequest, CompletionRequest

TRIAL_TOKENS = 24


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model.

    Attributes:
        name (`str`): what clients call the model.
        max_new_tokens (`int`): of a request that does not say how many it wants.
        shares_texts (`bool`): whether prompts begin with the keys and values of all requests; else only with those of
            the same API key.
    """

    model: Any
    tokenizer: Any
    name: str
    max_new_tokens: int
    shares_texts: bool = False
    chat_format: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat_format", ChatFormat.of(self.tokenizer, self.model))

    def read(self, request: AnyRequest, api_key: str | None = None) -> dict[str, Any]:
        """Return arguments of `generate` for one sequence; raises ConfigError where the model cannot obey a field."""
        ids = self._token_ids(request)
        self._check_tokens("prompt", ids)
        self._check_tokens("logit_bias", request.logit_bias)
        processors = self._grammar(request) if isinstance(request, ChatRequest) else {}
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)).long(),
            "max_new_tokens": self._limit(request.max_tokens, len(ids)),
            "cache_salt": None if self.shares_texts else api_key,
            **request.sampling(),
            **processors,
        }

    def trial(self) -> dict[str, Any]:
        """Return arguments of a short text by which the method tries the model."""
        fields = {"model": self.name, "prompt": "one two one two", "max_tokens": TRIAL_TOKENS, "temperature": 0}
        return self.read(CompletionRequest.model_validate(fields))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])

    def _check_tokens(self, field: str, ids: Collection[int]) -> None:
        vocab_size = text_config(self.model.config).vocab_size
        if not all(0 <= token < vocab_size for token in ids):
            rule = f"must hold token ids from 0 to {vocab_size - 1}"
            raise ConfigError(field, rule, max(ids, key=abs), "Use the ids of the model's tokenizer.")

    def _token_ids(self, request: AnyRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            ids = self.tokenizer(self._chat_text(request), add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(request.prompt)["input_ids"] if isinstance(request.prompt, str) else request.prompt
        if not ids:
            raise ConfigError("prompt", "must hold at least one token", "", "Write something.")
        return list(ids)

    def _chat_text(self, request: ChatRequest) -> str:
        options, tools = request.chat_template_kwargs, request.offered_tools
        if self.tokenizer.chat_template is None:
            rule = "must be unset: the model has no chat template"
            raise ConfigError("messages", rule, "set", "Use /v1/completions.")
        if taken := sorted(options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()):
            raise ConfigError("chat_template_kwargs", "must be variables of the template", taken[0], "Leave it out.")
        if tools:
            template = self.tokenizer.get_chat_template(tools=tools)
            if "tools" not in template or not self.chat_format.call_fields:
                rule = "must be unset: the chat template takes none, or no template shows how calls are written"
                raise ConfigError("tools", rule, [tool["function"]["name"] for tool in tools], "Leave them out.")
            options = {"tools": tools, **options}
        text = chat_text(self.tokenizer, [message.for_template() for message in request.messages], **options)
        if request.grammar_schema is not None or request.forced_tools:
            text += self.chat_format.end_of_reasoning(text)
        return f"{text}{CALL}\n" if request.forced_tools else text

    def _limit(self, max_tokens: int | None, length: int) -> int:
        """Return the most new tokens, for which the model has positions."""
        positions = max_positions(self.model.config)
        room = self.max_new_tokens if positions is None else positions - length
        if positions is not None and room < (max_tokens or 1):
            rule = f"must leave room for {counted(max_tokens or 1, 'new token')}: the model has {positions} positions"
            raise ConfigError("prompt", rule, length, "Shorten it, or lower max_tokens.")
        return max_tokens or min(self.max_new_tokens, room)

    def _grammar(self, request: ChatRequest) -> dict[str, Any]:
        """Return the logits processor of an answer in JSON, of a call that is required, or of calls of strict tools."""
        forced, tools, schema = request.forced_tools, request.offered_tools, request.grammar_schema
        if schema is None and not forced and not any(tool["function"].get("strict") for tool in tools):
            return {}
        field = "response_format" if schema else "tool_choice" if forced else "tools"
        if schema is None and not self.chat_format.is_hermes:
            rule = f"must not require calls, nor be strict: the model's calls are not in {CALL}"
            raise ConfigError(field, rule, request.tool_choice, "Set tool_choice to 'auto', and strict to false.")
        calls = " | ".join(_call(tool["function"]) for tool in forced or tools)
        lark = f"start: %json {json.dumps(schema)}" if schema else f"start: {calls}" if forced else self._text_or(calls)
        try:
            processor = grammar(self.tokenizer, lark=lark, eos_token_id=sorted(self.end_tokens) or None)
        except ConfigError as error:
            raise ConfigError(field, error.rule, schema or request.tool_choice, error.remedy) from error
        return {"logits_processor": [processor]}

    def _text_or(self, calls: str) -> str:
        """Lark for text, reasoning in it, and calls at its end."""
        added = self.tokenizer.get_added_vocab()
        if CALL not in added:
            rule = f"must not be strict where {CALL} is no token"
            raise ConfigError("tools", rule, True, "Set strict to false, or require a call.")
        marks = (THINK, END_OF_THINK, CALL, END_OF_CALL)
        think, end, call, end_of_call = (f"<[{added[mark]}]>" if mark in added else json.dumps(mark) for mark in marks)
        return f"""TEXT: /(.|\\n)+/ & ~/(.|\\n)*{CALL}(.|\\n)*/
            text: TEXT? (({think} | {end}) TEXT?)*
            call: {call} "\\n" ({calls}) "\\n" {end_of_call}
            start: text (call ("\\n" call)*)?"""


def method_arguments(arguments: Mapping[str, Any], *, shares_texts: bool) -> dict[str, Any]:
    """Return the arguments of `generate` that name a method, for all requests of a server.

    Args:
        shares_texts (`bool`): whether it may draft from earlier requests.
    """
    method = resolve(arguments.get("spec_method") or "plain")
    config = method.config_class.parse(arguments.get("spec_config"))
    if not shares_texts and getattr(config, "pool", None) == "shared":
        config = dataclasses.replace(config, pool="request")  # type: ignore[call-arg]  # it has a pool
    return {**arguments, "spec_method": method.name, "spec_config": config}


def _call(function: dict[str, Any]) -> str:
    """Lark for a call of a function, as Hermes writes it between its markers."""
    begin = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    options = {"x-guidance": {**COMPACT, "lenient": not function.get("strict")}}
    schema = {"type": "object", "properties": {}, **function.get("parameters", {}), **options}
    return f'{json.dumps(begin)} %json {json.dumps(schema)} "}}"'
