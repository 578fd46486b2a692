"""The bodies of requests, as OpenAI's clients send them, checked.

A field that would be ignored is refused, unless its value asks for nothing: `null`, or what is the case anyway.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator
from pydantic_core import from_json

from hf_specdec.engine.sampling.grammar import COMPACT
from hf_specdec.errors import shown
from hf_specdec.methods.common.config import LEAST_TEMPERATURE

MAX_SEED = (1 << 63) - 1  # of OpenAI's API
MAX_BIAS = 100.0  # likewise
MAX_STOP, MAX_STOPS = 1000, 16  # characters and texts; transformers compares each with all tokens at first
MAX_TEXTS = 128  # answers to one request, of OpenAI's API
MAX_LOGPROBS = 20  # likewise, of chats
LEAST_PENALTY, MAX_PENALTY = 0.01, 100.0  # logits times or over much more are infinite


class Body(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Clients send `null` for what they do not ask for."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchema(Body):
    """A schema that an answer follows."""

    name: str
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool = False

    @field_validator("definition")
    @classmethod
    def _has_options(cls, definition: dict[str, Any]) -> dict[str, Any]:
        """Refuse options of llguidance that are none."""
        if not isinstance(options := definition.get("x-guidance", {}), dict):
            raise ValueError(f"x-guidance must be an object, but is {shown(options)}")
        return definition


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        """Refuse a schema that is missing, or is not asked for."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must come with the type json_schema, and only there")
        return self

    @property
    def schema_in_json(self) -> dict[str, Any] | None:
        """The schema of an answer in JSON, with llguidance's options; `None` for text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return {"type": "object", "x-guidance": COMPACT}
        definition = self.json_schema.definition
        options = {**COMPACT, "lenient": not self.json_schema.strict, **definition.get("x-guidance", {})}
        return {**definition, "x-guidance": options}


class TextPart(Body):
    """One piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        """Refuse what chat templates cannot write."""
        try:
            is_object = isinstance(from_json(arguments), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError(f"must be a JSON object, but is {shown(arguments)}")
        return arguments


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        """Refuse a message that says nothing, and an answer of a tool to no call."""
        if "content" not in self.model_fields_set and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content must be given, unless an assistant calls tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id must come with the role tool, and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        found = {**self.model_dump(exclude_none=True), "content": text}
        if self.tool_calls:
            for call in found["tool_calls"]:
                call["function"]["arguments"] = from_json(call["function"]["arguments"])
        else:
            found.pop("tool_calls", None)
        return found


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: FunctionName


class SamplingRequest(Body):
    """Fields that all requests share. `user` and what follows it is accepted and not kept."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=LEAST_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED - MAX_TEXTS)
    stop: str | list[str] | None = None
    stream: bool | None = False
    spec_method: str | None = None
    spec_config: dict[str, Any] | list[Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @field_validator("stop")
    @classmethod
    def _is_short(cls, stop: str | list[str] | None) -> str | list[str] | None:
        """Refuse texts that would keep all requests waiting while they are prepared."""
        if sum(map(len, stop or ())) > MAX_STOP:
            raise ValueError(f"must have at most {MAX_STOP:,} characters, all texts together")
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"must be at most {MAX_STOPS} texts")
        return stop

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float | None) -> float | None:
        """Refuse a temperature above 0 that makes logits infinite."""
        if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, or at least {LEAST_TEMPERATURE:f}")
        return temperature


class GenerationRequest(SamplingRequest):
    """Fields that the bodies of completions share."""

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_TEXTS)
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        """Refuse what a whole answer does not tell."""
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options must come with stream; a whole answer has its usage anyway")
        return self

    @property
    def stop_strings(self) -> list[str]:
        """Texts at which the answer ends."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to tell beside each token; `None` where no log-probabilities are asked for."""
        raise NotImplementedError

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many new tokens there may be, and its value."""
        names = ("max_completion_tokens", "max_tokens")
        return next(((name, most) for name in names if (most := getattr(self, name, None))), ("max_tokens", None))

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`. Temperature 0 is greedy decoding; none leaves it to the model's configuration."""
        names = ("top_p", "top_k", "min_p") if self.temperature != 0 else ()
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.temperature is not None:
            found["do_sample"] = self.temperature > 0
            if self.temperature > 0:
                found["temperature"] = self.temperature
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            found["sequence_bias"] = [[[token], bias] for token, bias in self.logit_bias.items()]
        return found


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _tells_logprobs(self) -> Self:
        """Refuse what is told beside log-probabilities that are not asked for."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs must come with logprobs")
        return self

    @model_validator(mode="after")
    def _offers_its_choice(self) -> Self:
        """Refuse a choice of tools that are not offered."""
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise ValueError("tool_choice must be one of tools")
        return self

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Tools of which the answer has to call one."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        is_forced = named is not None or self.tool_choice == "required"
        return [tool for tool in self.offered_tools if is_forced and named in (None, tool["function"]["name"])]

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as chat templates read them."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def num_logprobs(self) -> int | None:
        """As `top_logprobs` says."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`: one prompt, as text or token ids."""

    prompt: str | list[StrictInt]
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_prompt(cls, prompt: Any) -> Any:
        """Take the only prompt of a list, as LangChain's client sends it."""
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return prompt
        if len(prompt) > 1:
            raise ValueError("must be one prompt; send a request for each")
        return prompt[0]

    @property
    def num_logprobs(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs
