"""From a request's body to `generate`'s arguments. Knows nothing of HTTP."""

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.call.arguments import NONE
from hf_specdec.errors import ConfigError, counted
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.serve.calls import CALL, ChatFormat
from hf_specdec.tools.serve.grammars import answer_grammar
from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest, SamplingRequest


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
        """Return arguments of `generate` for one sequence, `(1, length)` ids among them.

        Raises:
            ConfigError: an unknown method, or a field that the model cannot obey.
        """
        ids = self._token_ids(request)
        self._check_tokens("prompt", ids)
        self._check_tokens("logit_bias", request.logit_bias)
        grammar = self._grammar(request, ids) if isinstance(request, ChatRequest) else {}
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)).long(),
            "max_new_tokens": self._limit(request.max_tokens, len(ids)),
            "cache_salt": None if self.shares_texts else api_key,
            **request.sampling(),
            **grammar,
            **self._method(request.spec_method),
        }

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
            rule = "must be unset: the model has no chat template"
            raise ConfigError("messages", rule, "set", "Use /v1/completions.")
        if taken := sorted(options.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()):
            raise ConfigError("chat_template_kwargs", "must be variables of the template", taken[0], "Leave it out.")
        if tools:
            names, remedy = [tool["function"]["name"] for tool in tools], "Leave them out."
            if "tools" not in self.tokenizer.get_chat_template(tools=tools):
                raise ConfigError("tools", "must be unset: the chat template takes none", names, remedy)
            if not self.chat_format.call_fields:
                rule = f"must be unset: the tokenizer has no response_template, and its chat template no {CALL}"
                raise ConfigError("tools", rule, names, remedy)
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

    def _grammar(self, request: ChatRequest, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return the logits processor of a request's grammar, if it has any."""
        forced, schema = request.forced_tools, None if request.forced_tools else request.grammar_schema
        is_strict = any(tool["function"].get("strict") for tool in request.offered_tools)
        tools = forced or (request.offered_tools if is_strict or schema is not None else [])
        if not tools and schema is None:
            return {}
        field = "tool_choice" if forced else "tools" if schema is None else "response_format"
        if tools and not self.chat_format.is_hermes:
            rule = f"must not require calls, be strict or come with a response_format: the model's are not in {CALL}"
            remedy = "Set tool_choice to 'auto' or 'none', and strict to false."
            raise ConfigError(field, rule, request.tool_choice, remedy)
        try:
            grammar = answer_grammar(
                self.tokenizer,
                self.end_tokens,
                schema=schema,
                tools=tools,
                many=request.parallel_tool_calls and request.tool_choice in ("auto", "required"),
                after_text=not forced and schema is None,
                after_reasoning=self.chat_format.opens_reasoning(prompt_ids),
            )
        except ConfigError as error:
            raise ConfigError(field, error.rule, schema or tools, error.remedy) from error
        return {"logits_processor": [grammar]}

    def _method(self, name: str | None) -> dict[str, Any]:
        """Return a method, its configuration and its draft model. A method without its draft is generate's error."""
        usual = resolve(self.spec_method)
        method = usual if name is None else resolve("plain" if name == NONE else name)
        config = method.config_class.parse(self.spec_config if method is usual else None)
        if not self.shares_texts and getattr(config, "pool", None) == "shared":
            config = dataclasses.replace(config, pool="request")  # type: ignore[call-arg]  # it has a pool
        kwargs: dict[str, Any] = {"spec_method": method.name, "spec_config": config}
        draft, is_head = self.draft_model, isinstance(self.draft_model, DraftHead)
        takes_draft = method.name in draft.methods if is_head else draft is not None and method.takes_draft_model
        if takes_draft and config.drafting_layers is None:
            kwargs["assistant_model"] = draft
            if self.draft_tokenizer is not None:
                kwargs["assistant_tokenizer"] = self.draft_tokenizer
        return kwargs
