"""From a request's body to `generate`'s inputs, and the errors that a client sees. Knows nothing of HTTP."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from hf_specdec import compat
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.call.arguments import NONE
from hf_specdec.errors import ConfigError, MissingExtraError, counted
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import Method, MethodState
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.serve.answer_grammars import answer_grammar
from hf_specdec.tools.serve.chat_format import FORMATS, ChatFormat
from hf_specdec.tools.serve.chat_parser import ChatParser
from hf_specdec.tools.serve.limits import ServerLimits, check_request
from hf_specdec.tools.serve.processors import GeneratedTokenPenalties
from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

Memory = Literal["request", "key", "shared"]


class RequestError(Exception):
    """Error of a client's request.

    Args:
        status (`int`): of HTTP.
        code (`str`): OpenAI's code, or one in its manner.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @classmethod
    def of_field(cls, field: str, message: str, code: str = "invalid_value") -> "RequestError":
        """Error for a field, which the message names."""
        return cls(400, f"{field}: {message}", code, field)

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """The same error, its field under another name where `names` has one."""
        field = next((name for name in names if f"{self.param}.".startswith(f"{name}.")), None)
        if field is None or self.param is None:
            return self
        message = self.message.replace(field, names[field], 1)
        return RequestError(self.status, message, self.code, self.param.replace(field, names[field], 1))


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model.

    Attributes:
        name (`str`): what clients call the model.
        spec_method (`str`): of a request that names none; `spec_config` is its configuration.
        reserved (`SpecConfig`, *optional*): the maximum of requests for its method, see `check_request`.
        draft_model: for methods that take one.
        draft_tokenizer: its own, where that is not the target's.
        max_new_tokens (`int`): of a request that does not say how many it wants.
        memory (`str`): what methods draft from next to the request's own text: `"request"` for nothing, `"key"` for
            earlier requests of the same API key, `"shared"` for those of all. With `"shared"`, prompts also begin with
            the keys and values of all, else with those of the same API key.
        limits (`ServerLimits`): the most that a request may ask for.
        tool_parser (`str`, *optional*): how the model writes tool calls, see `ChatFormat.of`.
        chat_format (`ChatFormat`): of its answers.
    """

    model: Any
    tokenizer: Any
    name: str
    spec_method: str
    spec_config: Any
    max_new_tokens: int
    reserved: SpecConfig | None = None
    draft_model: Any = None
    draft_tokenizer: Any = None
    memory: Memory = "request"
    limits: ServerLimits = field(default_factory=ServerLimits)
    tool_parser: str | None = None
    chat_format: ChatFormat = field(init=False)
    _method_states: dict[str, MethodState] = field(default_factory=dict)  # by API key

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat_format", ChatFormat.of(self.tokenizer, self.tool_parser))

    def read(self, request: GenerationRequest, api_key: str | None = None) -> dict[str, Any]:
        """Inputs of `generate` for one sequence, `(1, length)` ids among them.

        Raises:
            RequestError: an unknown model or method, or a prompt that the model cannot read.
        """
        self.check_name(request.model)
        ids = self._token_ids(request)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
        inputs["max_new_tokens"] = self._limit(request, len(ids))
        inputs["cache_salt"] = None if self.memory == "shared" else api_key
        inputs |= request.sampling() | self._method(request, api_key)
        self._check_tokens("logit_bias", request.logit_bias or {}, "invalid_value")
        if request.presence_penalty or request.frequency_penalty:
            penalties = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
            inputs["logits_processor"] = [GeneratedTokenPenalties(*penalties, prompt_length=len(ids))]
        if (grammar := self._grammar(request, ids)) is not None:
            inputs["logits_processor"] = [*inputs.get("logits_processor", ()), grammar]
        if request.num_logprobs is not None:
            inputs |= self._after_recorder(inputs) | {"num_logprobs": request.num_logprobs}
        if request.stop_strings:
            inputs["stop_strings"] = request.stop_strings
        return inputs if request.seed is None else {**inputs, "seed": request.seed}

    def each_text(self, request: GenerationRequest, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Inputs of each of the request's `n` texts; text i has the request's seed + i.

        Raises:
            RequestError: several texts are asked for where all would be the same.
        """
        if request.n > 1 and not inputs.get("do_sample", self.model.generation_config.do_sample):
            message = f"must be 1 where nothing is drawn, but is {request.n}; set a temperature above 0"
            raise RequestError.of_field("n", message)
        if request.seed is None:
            return [inputs] * request.n
        return [{**inputs, "seed": request.seed + index} for index in range(request.n)]

    def _grammar(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Any:
        """The grammar of a request's answer; `None` without one."""
        if not isinstance(request, ChatRequest):
            return None
        forced, form = request.forced_tools, request.response_format
        schema = None if form is None or forced else form.schema_in_json
        is_strict = any(tool["function"].get("strict") for tool in request.offered_tools)
        tools = forced or (request.offered_tools if is_strict or schema is not None else [])
        if not tools and schema is None:
            return None
        field = "tool_choice" if forced else "response_format" if schema is not None else "tools"
        after_text = not forced and schema is None
        try:
            if tools and self.chat_format.name is None:
                rule = f"must name one of {', '.join(FORMATS)} for grammars of calls"
                raise ConfigError("--tool-parser", rule, self.tool_parser, "It is an option of the server.")
            found = answer_grammar(
                self.tokenizer,
                self.end_tokens,
                schema=schema,
                tools=tools,
                call_format=self.chat_format.name,
                many=request.parallel_tool_calls and (not forced or request.tool_choice == "required"),
                after_text=after_text,
                opened="" if after_text else self.chat_format.opened(prompt_ids),
            )
        except (ConfigError, MissingExtraError) as error:
            message = " ".join(str(error).split())
            if isinstance(error, ConfigError) and error.field == "lark":
                message = f"{error.rule}. {error.remedy}"
            raise RequestError.of_field(field, message) from error
        return found

    def _after_recorder(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The processors that generate makes of settings, as processors of the caller's: a recorder comes first."""
        penalty, bias = inputs.get("repetition_penalty"), inputs.get("sequence_bias")
        config = self.model.generation_config
        penalty = config.repetition_penalty if penalty is None else penalty
        processors: list[Any] = [] if bias is None else [SequenceBiasLogitsProcessor(bias)]
        if penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        processors += inputs.get("logits_processor", [])
        return {"repetition_penalty": 1.0, "sequence_bias": None, "logits_processor": processors}

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])

    def token_text(self, token: int) -> str:
        """The text of one token."""
        return str(self.tokenizer.decode([token]))

    def check_name(self, name: str) -> None:
        """Raise RequestError unless it is the model's."""
        if name != self.name:
            message = f"the model {name!r} does not exist; there is {self.name!r}"
            raise RequestError(404, message, "model_not_found", "model")

    def _token_ids(self, request: GenerationRequest) -> list[int]:
        ids = self._encode(request)
        if not ids:
            raise RequestError(400, "the prompt must hold at least one token", "invalid_prompt", "prompt")
        self._check_tokens("prompt", ids, "invalid_prompt")
        return ids

    def _check_tokens(self, field: str, ids: Iterable[int], code: str) -> None:
        vocab_size = compat.text_config(self.model.config).vocab_size
        if not all(0 <= token < vocab_size for token in ids):
            raise RequestError.of_field(field, f"token ids must be 0 to {vocab_size - 1}", code)

    def _encode(self, request: GenerationRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            if getattr(self.tokenizer, "chat_template", None) is None:
                message = "the model has no chat template; use /v1/completions"
                raise RequestError(400, message, "chat_not_supported", "messages")
            messages = [message.for_template() for message in request.messages]
            try:
                text = chat_text(self.tokenizer, messages, **self._template_options(request))
            except ConfigError as error:
                raise RequestError(400, str(error), "invalid_prompt", "messages") from error
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert isinstance(request, CompletionRequest)
        return list(self.tokenizer(request.prompt)["input_ids"]) if isinstance(request.prompt, str) else request.prompt

    def _template_options(self, request: ChatRequest) -> dict[str, Any]:
        """Options of the chat template."""
        options, tools = request.chat_template_kwargs, request.offered_tools
        known = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := sorted(options.keys() & known.keys()):
            message = f"must be variables of the template, but holds {taken[0]!r}"
            raise RequestError.of_field("chat_template_kwargs", message)
        if not tools:
            return options
        if "tools" not in self.tokenizer.get_chat_template(tools=tools):
            raise RequestError.of_field("tools", "the model's chat template takes none", "tools_not_supported")
        if not self.chat_format.calls:
            message = "the chat template does not show how the model writes calls; --tool-parser of hf-specdec serve "
            message += f"names one of {', '.join(FORMATS)}, or a response template"
            raise RequestError.of_field("tools", message, "tools_not_supported")
        return {"tools": tools, **options}

    def chat_parser(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> ChatParser:
        """A parser of one answer's reasoning and tool calls."""
        if not isinstance(request, ChatRequest):
            return ChatParser()
        most = None if request.parallel_tool_calls else 1
        return self.chat_format.parser(prompt_ids, request.offered_tools, most)

    def _limit(self, request: GenerationRequest, length: int) -> int:
        """New tokens that the model has positions for."""
        positions = compat.max_positions(self.model.config)
        limit_field, wanted = request.limit
        for found, most, name, option in (
            (length, self.limits.max_prompt_tokens, "prompt", "--max-prompt-tokens"),
            (wanted, self.limits.max_tokens, limit_field, "--max-tokens"),
        ):
            if most is not None and (found or 0) > most:
                message = f"must be at most {counted(most, 'token')} on this server ({option}), but is {found}"
                raise RequestError.of_field(name, message)
        room = None if positions is None else positions - length
        if room is not None and (room < 1 or (wanted is not None and wanted > room)):
            asked = f"{counted(length, 'token')} in the prompt and {counted(wanted or 1, 'new one')}"
            message = f"the model has {positions} positions, but the request needs more: {asked}"
            field = "prompt" if room < 1 or wanted is None else limit_field
            raise RequestError(400, message, "context_length_exceeded", field)
        wanted = min(self.max_new_tokens, self.limits.max_tokens or self.max_new_tokens) if wanted is None else wanted
        return wanted if room is None else min(wanted, room)

    def _method(self, request: GenerationRequest, api_key: str | None) -> dict[str, Any]:
        """The method, its configuration and its draft model, with the memory that is the request's to use."""
        try:
            asked = request.spec_method
            method = resolve(self.spec_method if asked is None else "plain" if asked == NONE else asked)
            own = self.spec_config if method.name == resolve(self.spec_method).name else None
            config = method.config_class.parse(own)
            if request.spec_config is not None:
                base = config if type(self.reserved) is type(config) else None
                config = method.config_class.parse(request.spec_config, base=base)
                check_request(config, self.reserved)
            keeps_texts = self.memory == "shared" or (self.memory == "key" and api_key is not None)
            if not keeps_texts and getattr(config, "pool", None) == "shared":
                config = dataclasses.replace(config, pool="request")  # type: ignore[call-arg]  # it has one
        except (ConfigError, TypeError) as error:
            param = "spec_method" if getattr(error, "field", None) == "spec_method" else "spec_config"
            raise RequestError(400, " ".join(str(error).split()), "invalid_value", param) from error
        drafts_itself = config.drafting_layers is not None
        takes_draft = self._has_draft_for(method) and not drafts_itself
        if method.needs_assistant and not takes_draft and not drafts_itself:
            kind = "head" if method.needs_draft_head else "model"
            message = f"the server has no draft {kind} for {method.name}; --draft-model of hf-specdec serve names one"
            raise RequestError(400, message, "invalid_value", "spec_method")
        found: dict[str, Any] = {"spec_method": method.name, "spec_config": config}
        if self.memory == "key" and api_key is not None:
            found["spec_method"] = method.with_state(self._method_states.setdefault(api_key, MethodState()))
        if takes_draft:
            found["assistant_model"] = self.draft_model
            if self.draft_tokenizer is not None:
                found["assistant_tokenizer"] = self.draft_tokenizer
        return found

    def _has_draft_for(self, method: Method) -> bool:
        """Tell methods that draft with the server's draft model or head."""
        if isinstance(self.draft_model, DraftHead):
            return method.name in self.draft_model.methods
        return self.draft_model is not None and method.takes_draft_model
