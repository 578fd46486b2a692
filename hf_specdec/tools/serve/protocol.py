"""The fields of requests that are obeyed, checked. Any other field is refused by its name, unless it is null."""

from typing import Annotated, Any, Literal, Self

import pydantic
from openai.types.chat import ChatCompletionFunctionTool, ChatCompletionNamedToolChoiceParam
from openai.types.shared import ResponseFormatJSONObject, ResponseFormatJSONSchema, ResponseFormatText
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, Json, StrictInt

from hf_specdec.engine.sampling.grammar import COMPACT
from hf_specdec.methods.common.config import LEAST_TEMPERATURE

MAX_LOGPROBS = 20  # of OpenAI's API
Bias = Annotated[float, Field(ge=-100, le=100)]  # likewise
MAX_TOKENS = AliasChoices("max_tokens", "max_completion_tokens", "max_output_tokens")
ResponseFormat = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema


class Body(BaseModel):
    """A JSON object without further fields."""

    model_config = ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Leave out fields that clients set to `null`."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class TextPart(BaseModel):
    """A piece of a message, or of an item of a response."""

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(BaseModel):
    """The function that an answer called."""

    name: str
    arguments: Json[dict[str, Any]]


class ToolCall(BaseModel):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart], AfterValidator(_joined)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> Self:
        if "content" not in self.model_fields_set and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content must be set, unless an assistant calls tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id must come with the role tool, and only there")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        return {"content": "", **self.model_dump(exclude_defaults=True)}


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class SamplingRequest(Body):
    """Fields of all requests. `user` and what follows it is taken and not kept."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)  # logits times or over much more are infinite
    logit_bias: dict[int, Bias] = {}
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    max_tokens: int | None = Field(None, ge=1, validation_alias=MAX_TOKENS)
    stop: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16), BeforeValidator(_as_list)] = []
    n: Literal[1] = 1
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return arguments of `generate`. Temperature 0 is greedy; `None` leaves it to the model's configuration."""
        samples = None if self.temperature is None else self.temperature >= LEAST_TEMPERATURE
        filters = () if samples is False else ("temperature", "top_p", "top_k", "min_p")
        kwargs = self.model_dump(include={"repetition_penalty", "seed", *filters}, exclude_none=True)
        if samples is not None:
            kwargs["do_sample"] = samples
        if self.logit_bias:
            kwargs["sequence_bias"] = [[[token], bias] for token, bias in self.logit_bias.items()]
        return kwargs


class ChatRequest(SamplingRequest):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: Annotated[ResponseFormat, Field(discriminator="type")] = ResponseFormatText(type="text")
    tools: list[ChatCompletionFunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> Self:
        form = self.response_format
        if isinstance(form, ResponseFormatJSONSchema) and form.json_schema.schema_ is None:
            raise ValueError("response_format.json_schema must hold a schema")
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise ValueError("tool_choice must be one of tools")
        if self.offered_tools and self.grammar_schema is not None:
            raise ValueError("response_format must be text where tools are offered; tool_choice may be 'none'")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as chat templates read them."""
        functions = [] if self.tool_choice == "none" else [tool.function for tool in self.tools]
        return [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in functions]

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Tools of which the answer has to call one."""
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            return [tool for tool in self.offered_tools if tool["function"]["name"] == name]
        return self.offered_tools if self.tool_choice == "required" else []

    @property
    def grammar_schema(self) -> dict[str, Any] | None:
        """The schema of an answer in JSON, with llguidance's options; `None` for text."""
        if isinstance(self.response_format, ResponseFormatText):
            return None
        if isinstance(self.response_format, ResponseFormatJSONObject):
            return {"type": "object", "x-guidance": COMPACT}
        schema = self.response_format.json_schema
        return {"x-guidance": {**COMPACT, "lenient": not schema.strict}, **(schema.schema_ or {})}


def _only_prompt(prompt: Any) -> Any:
    """Take the only prompt of a list, as LangChain's client sends it."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return prompt
    if len(prompt) > 1:
        raise ValueError("must be a single prompt; send a request for each")
    return prompt[0]


class CompletionRequest(SamplingRequest):
    """The body of `/v1/completions`: a prompt, as text or token ids."""

    prompt: Annotated[str | list[StrictInt], BeforeValidator(_only_prompt)]
    echo: Literal[False] = False
    best_of: Literal[1] = 1


AnyRequest = ChatRequest | CompletionRequest
