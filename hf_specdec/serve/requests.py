"""From a request's body to `generate`'s inputs, and the errors that a client sees. Knows nothing of HTTP."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import resolve
from hf_specdec.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

__all__ = ["RequestError", "RequestReader"]


class RequestError(Exception):
    """What a client did wrong.

    Args:
        status (`int`): of HTTP.
        code (`str`): OpenAI's code, or one in its manner.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model.

    Attributes:
        name (`str`): what clients call the model.
        spec_method (`str`): of a request that names none; `spec_config` is its configuration.
        draft_model: for methods that take one.
        max_new_tokens (`int`): of a request that does not say how many it wants.
        is_memory_shared (`bool`): whether a method may keep what it learns from one request for the next.
    """

    model: Any
    tokenizer: Any
    name: str
    spec_method: str
    spec_config: Any
    max_new_tokens: int
    draft_model: Any = None
    is_memory_shared: bool = False

    def read(self, request: GenerationRequest) -> dict[str, Any]:
        """Inputs of `generate` for one sequence, `(1, length)` ids among them.

        Raises:
            RequestError: an unknown model or method, or a prompt that the model cannot read.
        """
        if request.model != self.name:
            raise RequestError(404, f"the model {request.model!r} does not exist", "model_not_found", "model")
        ids = self._token_ids(request)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
        inputs["max_new_tokens"] = self._limit(request, len(ids))
        inputs |= request.sampling() | self._method(request)
        if request.stop_strings:
            inputs["stop_strings"] = request.stop_strings
        return inputs if request.seed is None else {**inputs, "seed": request.seed}

    def _token_ids(self, request: GenerationRequest) -> list[int]:
        ids = self._encode(request)
        vocab_size = compat.text_config(self.model.config).vocab_size
        if not ids:
            raise RequestError(400, "the prompt must hold at least one token", "invalid_prompt", "prompt")
        if not all(0 <= token < vocab_size for token in ids):
            raise RequestError(400, f"token ids must be below {vocab_size}", "invalid_prompt", "prompt")
        return ids

    def _encode(self, request: GenerationRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            if getattr(self.tokenizer, "chat_template", None) is None:
                message = "the model has no chat template; use /v1/completions"
                raise RequestError(400, message, "chat_not_supported", "messages")
            messages = [{"role": message.role, "content": message.text} for message in request.messages]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert isinstance(request, CompletionRequest)
        return list(self.tokenizer(request.prompt)["input_ids"]) if isinstance(request.prompt, str) else request.prompt

    def _limit(self, request: GenerationRequest, length: int) -> int:
        """New tokens that the model has positions for."""
        positions = compat.max_positions(self.model.config)
        wanted = request.limit
        room = None if positions is None else positions - length
        if room is not None and (room < 1 or (wanted is not None and wanted > room)):
            asked = f"{length} tokens in the prompt and {wanted or 1} new ones"
            message = f"the model has {positions} positions, but the request needs more: {asked}"
            raise RequestError(400, message, "context_length_exceeded", "prompt")
        wanted = self.max_new_tokens if wanted is None else wanted
        return wanted if room is None else min(wanted, room)

    def _method(self, request: GenerationRequest) -> dict[str, Any]:
        """The method, with a memory of the request's own unless the server shares it."""
        try:
            asked = request.spec_method
            method = resolve(self.spec_method if asked is None else "plain" if asked == "none" else asked)
            given = request.spec_config if request.spec_config is not None else self._default_config(method.name)
            config = method.config_class.parse(given)
            if not self.is_memory_shared and getattr(config, "pool", None) == "shared":
                config = dataclasses.replace(config, pool="request")  # type: ignore[call-arg]  # it has one
        except (ConfigError, TypeError) as error:
            raise RequestError(400, " ".join(str(error).split()), "invalid_value", "spec_method") from error
        if method.needs_draft_model and self.draft_model is None:
            raise RequestError(400, f"the server has no draft model for {method.name}", "invalid_value", "spec_method")
        draft = (
            {"assistant_model": self.draft_model} if method.takes_draft_model and self.draft_model is not None else {}
        )
        return {"spec_method": method.name, "spec_config": config, **draft}

    def _default_config(self, method: str) -> Any:
        return self.spec_config if method == resolve(self.spec_method).name else None
