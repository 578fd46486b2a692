"""From a request's body to `generate`'s inputs. Knows nothing of HTTP."""

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from hf_specdec import compat
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.call.arguments import NONE
from hf_specdec.errors import ConfigError, counted
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.serve.calls import CALL, ChatFormat
from hf_specdec.tools.serve.grammars import answer_grammar
from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest, SamplingRequest

MAX_STEP_BUDGET = 128  # tokens that a step of a request with its own configuration computes
OF_THE_SERVER = ("engine", "costs", "max_pool_tokens", "max_recycled", "max_keys")  # next to device lists


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

    def read(self, request: SamplingRequest, api_key: str | None = None) -> dict[str, Any]:
        """Return inputs of `generate` for one sequence, `(1, length)` ids among them.

        Raises:
            ConfigError: an unknown method, or a field that the model cannot obey.
        """
        ids = self._token_ids(request)
        self._check_tokens("prompt", ids)
        self._check_tokens("logit_bias", request.logit_bias)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)).long(),
            "max_new_tokens": self._limit(request.max_tokens, len(ids)),
            "cache_salt": None if self.shares_texts else api_key,
            **request.sampling(),
            **self._method(request),
        }
        if request.stop:
            inputs["stop_strings"] = request.stop
        if isinstance(request, ChatRequest):
            if (grammar := self._grammar(request, ids)) is not None:
                inputs["logits_processor"] = [grammar]
            if request.logprobs:
                inputs |= self._after_recorder(inputs) | {"num_logprobs": request.top_logprobs or 0}
        return inputs

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])

    def _check_tokens(self, field: str, ids: Collection[int]) -> None:
        vocab_size = compat.text_config(self.model.config).vocab_size
        if not all(0 <= token < vocab_size for token in ids):
            rule = f"must hold token ids from 0 to {vocab_size - 1}"
            raise ConfigError(field, rule, max(ids, key=abs), "Use the ids of the model's tokenizer.")

    def _token_ids(self, request: SamplingRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            ids = self.tokenizer(self._chat_text(request), add_special_tokens=False)["input_ids"]
        else:
            assert isinstance(request, CompletionRequest)
            prompt = request.prompt
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise ConfigError("prompt", "must hold at least one token", "", "Write something.")
        return list(ids)

    def _chat_text(self, request: ChatRequest) -> str:
        options, tools = request.chat_template_kwargs, request.offered_tools
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "messages", "must be unset: the model has no chat template", "set", "Use /v1/completions."
            )
        if taken := sorted(options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()):
            raise ConfigError("chat_template_kwargs", "must be variables of the template", taken[0], "Leave it out.")
        if tools:
            names = [tool["function"]["name"] for tool in tools]
            if "tools" not in self.tokenizer.get_chat_template(tools=tools):
                raise ConfigError("tools", "must be unset: the chat template takes none", names, "Leave them out.")
            if not self.chat_format.call_fields:
                rule = f"must be unset: the tokenizer has no response_template, and its chat template no {CALL}"
                raise ConfigError("tools", rule, names, "Leave them out.")
            options = {"tools": tools, **options}
        return chat_text(self.tokenizer, [message.for_template() for message in request.messages], **options)

    def _limit(self, max_tokens: int | None, length: int) -> int:
        """Return the most new tokens, for which the model has positions."""
        positions = compat.max_positions(self.model.config)
        room = self.max_new_tokens if positions is None else positions - length
        if positions is not None and room < (max_tokens or 1):
            rule = f"must leave room for {counted(max_tokens or 1, 'new token')}: the model has {positions} positions"
            raise ConfigError("prompt", rule, length, "Shorten it, or lower max_tokens.")
        return max_tokens or min(self.max_new_tokens, room)

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
        field = "tool_choice" if forced else "response_format" if schema is not None else "tools"
        if tools and not self.chat_format.is_hermes:
            rule = f"must not require calls, be strict or come with a response_format: the model's are not in {CALL}"
            raise ConfigError(
                field, rule, request.tool_choice, "Set tool_choice to 'auto' or 'none', and strict to false."
            )
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
        except ConfigError as error:
            raise ConfigError(
                field, error.rule, schema or [tool["function"]["name"] for tool in tools], error.remedy
            ) from error

    def _method(self, request: SamplingRequest) -> dict[str, Any]:
        """Return the method, its configuration and its draft model. A method without its draft is generate's error."""
        name = request.spec_method or self.spec_method
        method = resolve("plain" if name == NONE else name)
        try:
            config = self._config(method, request.spec_config)
        except TypeError as error:  # an unknown field
            remedy = "Leave it out."
            raise ConfigError(
                "spec_config", f"must be a configuration of {method.name} ({error})", request.spec_config, remedy
            ) from error
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
