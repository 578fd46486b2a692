"""From a request's body to `generate`'s inputs, and the errors that a client sees. Knows nothing of HTTP."""

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from hf_specdec import compat
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.call.arguments import NONE
from hf_specdec.errors import ConfigError, MissingExtraError, counted
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.serve.calls import CALL, ChatFormat, ChatParser
from hf_specdec.tools.serve.grammars import answer_grammar
from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

MAX_STEP_BUDGET = 128  # tokens that a step of a request with its own configuration computes
OF_THE_SERVER = ("engine", "costs", "max_pool_tokens", "max_recycled", "max_keys")  # next to device lists


class RequestError(Exception):
    """Error of a client's request.

    Args:
        status (`int`): of HTTP.
        code (`str`): OpenAI's code, or one in its manner.
        param (`str`, *optional*): the field.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @classmethod
    def of_field(cls, field: str, message: str, code: str = "invalid_value") -> "RequestError":
        """Make an error for a field, which the message names."""
        return cls(400, f"{field}: {message}", code, field)

    def described(self) -> dict[str, Any]:
        """Return the error as OpenAI's API writes it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model.

    Attributes:
        name (`str`): what clients call the model.
        spec_method (`str`): of a request that names none; `spec_config` is its configuration.
        max_new_tokens (`int`): of a request that does not say how many it wants.
        draft_model: for methods that take one; `draft_tokenizer` is its own, where that is not the target's.
        shares_texts (`bool`): whether methods draft from earlier requests, and prompts begin with the keys and values
            of all; else only with those of the same API key.
    """

    model: Any
    tokenizer: Any
    name: str
    spec_method: str
    spec_config: Any
    max_new_tokens: int
    draft_model: Any = None
    draft_tokenizer: Any = None
    shares_texts: bool = False
    chat_format: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat_format", ChatFormat.of(self.tokenizer, self.model))

    def read(self, request: GenerationRequest, api_key: str | None = None) -> dict[str, Any]:
        """Return inputs of `generate` for one sequence, `(1, length)` ids among them.

        Raises:
            RequestError: an unknown model or method, or a field that the model cannot obey.
        """
        self.check_name(request.model)
        ids = self._token_ids(request)
        self._check_tokens("prompt", ids)
        self._check_tokens("logit_bias", request.logit_bias)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)).long(),
            "max_new_tokens": self._limit(request, len(ids)),
            "cache_salt": None if self.shares_texts else api_key,
            **request.sampling(),
            **self._method(request),
        }
        if request.stop:
            inputs["stop_strings"] = request.stop
        grammar = self._grammar(request, ids) if isinstance(request, ChatRequest) else None
        if grammar is not None:
            inputs["logits_processor"] = [grammar]
        if isinstance(request, ChatRequest) and request.logprobs:
            inputs |= self._after_recorder(inputs)
            inputs["num_logprobs"] = request.top_logprobs or 0
        return inputs

    def chat_parser(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> ChatParser:
        """Make a parser of one answer's reasoning and tool calls."""
        if not isinstance(request, ChatRequest):
            return ChatParser()
        return self.chat_format.parser(prompt_ids, request.offered_tools)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])

    def check_name(self, name: str) -> None:
        """Raise RequestError unless it is the model's."""
        if name != self.name:
            message = f"the model {name!r} does not exist; there is {self.name!r}"
            raise RequestError(404, message, "model_not_found", "model")

    def _check_tokens(self, field: str, ids: Iterable[int]) -> None:
        vocab_size = compat.text_config(self.model.config).vocab_size
        if not all(0 <= token < vocab_size for token in ids):
            raise RequestError.of_field(field, f"token ids must be 0 to {vocab_size - 1}")

    def _token_ids(self, request: GenerationRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            ids = self.tokenizer(self._chat_text(request), add_special_tokens=False)["input_ids"]
        else:
            assert isinstance(request, CompletionRequest)
            prompt = request.prompt
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError.of_field("prompt", "must hold at least one token")
        return list(ids)

    def _chat_text(self, request: ChatRequest) -> str:
        options, tools = request.chat_template_kwargs, request.offered_tools
        if self.tokenizer.chat_template is None:
            raise RequestError.of_field("messages", "the model has no chat template; use /v1/completions")
        if taken := sorted(options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()):
            message = f"must be variables of the template, but holds {taken[0]!r}"
            raise RequestError.of_field("chat_template_kwargs", message)
        if tools:
            if "tools" not in self.tokenizer.get_chat_template(tools=tools):
                raise RequestError.of_field("tools", "the model's chat template takes none. Leave them out")
            if not self.chat_format.call_fields:
                message = f"the tokenizer has no response_template and its chat template no {CALL} that shows calls"
                raise RequestError.of_field("tools", message)
            options = {"tools": tools, **options}
        try:
            return chat_text(self.tokenizer, [message.for_template() for message in request.messages], **options)
        except ValueError as error:
            raise RequestError.of_field("messages", str(error)) from error

    def _limit(self, request: GenerationRequest, length: int) -> int:
        """Return the most new tokens, for which the model has positions."""
        positions = compat.max_positions(self.model.config)
        field, most = request.limit
        room = None if positions is None else positions - length
        if room is not None and room < (most or 1):
            wanted = f"{counted(length, 'token')} in the prompt and {counted(most or 1, 'new token')}"
            message = f"the model has {positions} positions, but the request needs more: {wanted}"
            param = "prompt" if room < 1 or most is None else field
            raise RequestError(400, message, "context_length_exceeded", param)
        return most or min(self.max_new_tokens, room or self.max_new_tokens)

    def _after_recorder(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the processors that generate makes of settings as the caller's, since a recorder comes first."""
        bias = inputs.get("sequence_bias")
        penalty = inputs.get("repetition_penalty", self.model.generation_config.repetition_penalty)
        processors: list[Any] = [] if bias is None else [SequenceBiasLogitsProcessor(bias)]
        if penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        processors += inputs.get("logits_processor", [])
        return {"repetition_penalty": 1.0, "sequence_bias": None, "logits_processor": processors}

    def _grammar(self, request: ChatRequest, prompt_ids: Sequence[int]) -> Any:
        """Make the grammar of a request's answer; `None` without one."""
        forced = request.forced_tools
        schema = None if forced else request.grammar_schema
        is_strict = any(tool["function"].get("strict") for tool in request.offered_tools)
        tools = forced or (request.offered_tools if is_strict or schema is not None else [])
        if not tools and schema is None:
            return None
        param = "tool_choice" if forced else "response_format" if schema is not None else "tools"
        if tools and not self.chat_format.is_hermes:
            message = (
                f"no calls can be required, strict or beside a response_format, since the model's are not in {CALL}"
            )
            raise RequestError.of_field(param, f"{message}. Set tool_choice to 'auto' or 'none', and strict to false")
        try:
            return answer_grammar(
                self.tokenizer,
                self.end_tokens,
                schema=schema,
                tools=tools,
                many=request.parallel_tool_calls and request.tool_choice in ("auto", "required"),
                after_text=not forced and schema is None,
                after_reasoning=self.chat_format.opens_reasoning(prompt_ids),
            )
        except (ConfigError, MissingExtraError) as error:
            message = f"{error.rule}. {error.remedy}" if isinstance(error, ConfigError) else str(error)
            raise RequestError.of_field(param, " ".join(message.split())) from error

    def _method(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the method, its configuration and its draft model. A method without its draft is generate's error."""
        try:
            name = request.spec_method or self.spec_method
            method = resolve("plain" if name == NONE else name)
            config = self._config(method, request.spec_config)
        except (ConfigError, TypeError) as error:
            param = "spec_method" if getattr(error, "field", None) == "spec_method" else "spec_config"
            raise RequestError.of_field(param, " ".join(str(error).split())) from error
        kwargs: dict[str, Any] = {"spec_method": method.name, "spec_config": config}
        draft, is_head = self.draft_model, isinstance(self.draft_model, DraftHead)
        takes_draft = method.name in draft.methods if is_head else draft is not None and method.takes_draft_model
        if takes_draft and config.drafting_layers is None:
            kwargs["assistant_model"] = draft
            if self.draft_tokenizer is not None:
                kwargs["assistant_tokenizer"] = self.draft_tokenizer
        return kwargs

    def _config(self, method: Method, value: Any) -> SpecConfig:
        """Return a method's configuration.

        Raises:
            ConfigError: it asks for too much, or sets what is the server's to set.
        """
        is_default = value is None and method is resolve(self.spec_method)
        config = method.config_class.parse(self.spec_config if is_default else value)
        defaults = method.config_class()
        for name in () if is_default else (*OF_THE_SERVER, *config.device_fields.values()):
            if (setting := getattr(config, name, None)) != getattr(defaults, name, None):
                rule = "must be unset in a request: the server sets it"
                raise ConfigError(f"spec_config.{name}", rule, setting, "Leave it out.")
        if not is_default and config.step_budget > MAX_STEP_BUDGET:
            rule = f"must compute at most {MAX_STEP_BUDGET} tokens a step on a server"
            raise ConfigError("spec_config", rule, config.step_budget, "Ask for shorter drafts or fewer branches.")
        if not self.shares_texts and getattr(config, "pool", None) == "shared":
            return dataclasses.replace(config, pool="request")  # type: ignore[call-arg]  # it has a pool
        return config
