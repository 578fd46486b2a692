"""The server's routes: OpenAI's chat and text completions, streamed or whole, over a `ServingEngine`."""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.errors import MissingExtraError, QueueFullError, shown
from hf_specdec.tools.serve.access import Access
from hf_specdec.tools.serve.engine import Answer, ServingEngine
from hf_specdec.tools.serve.requests import RequestError, RequestReader
from hf_specdec.tools.serve.text_stream import TextStream

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
except ImportError as error:
    raise MissingExtraError("fastapi", "serve", "The server") from error


ROUTES = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health"
READING = ["GET", "HEAD"]  # load balancers ask for the health by HEAD
logger = logging.getLogger("hf_specdec")
Body = TypeVar("Body", bound=GenerationRequest)


def build_app(engine: ServingEngine, reader: RequestReader, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application for an ASGI server.

    Args:
        api_keys (`Sequence[str]`, *optional*): of which a request must carry one as its bearer token.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="hf_specdec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(engine, reader)
    model = {"id": reader.name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    app.add_middleware(Access, api_keys=api_keys, refuse=_refused)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return _refused(error)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        described = _described(_not_served(request, error.status_code))
        return JSONResponse({"error": described}, status_code=error.status_code, headers=error.headers)

    @app.api_route("/health", methods=READING)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/v1/models", methods=READING)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.api_route("/v1/models/{name:path}", methods=READING)
    async def model_called(name: str) -> dict[str, Any]:
        reader.check_name(name)
        return model

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.answer(request, await _body(request, ChatRequest))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await server.answer(request, await _body(request, CompletionRequest))

    return app


def _not_served(request: Request, status: int) -> RequestError:
    """Error for a path or a method that is not served."""
    message = f"{request.method} {request.url.path} is not served; there are {ROUTES}"
    return RequestError(status, message, "unknown_url")


async def _body(request: Request, kind: type[Body]) -> Body:
    """The checked body.

    Raises:
        RequestError: it is no JSON, a field is wrong or unknown, or the client has hung up.
    """
    try:
        return kind.model_validate_json(await request.body())
    except ClientDisconnect as error:
        raise RequestError(499, "the client has hung up", "client_closed_request") from error
    except ValidationError as error:
        raise _wrong_field(error) from error


def _wrong_field(error: ValidationError) -> RequestError:
    """Error for the first field that is wrong."""
    found = error.errors(include_url=False, include_context=False)
    first, place = found[0], found[0]["loc"][:-1]
    if found[0]["loc"][-1:] == ("str",):  # one type of a union: the error of the type that was read furthest counts
        first = max((one for one in found if one["loc"][: len(place)] == place), key=lambda one: len(one["loc"]))
    parts = [str(part) for part in first["loc"]]
    field = ".".join(part for part in parts if part != "str" and "[" not in part)  # of a union pydantic names the type
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "the server does not know this field, and would ignore it"
    elif first["type"] != "value_error" and parts:  # ours show the value where it tells something
        message = f"{message}, but is {shown(first['input'])}"
    return RequestError(400, f"{field or 'body'}: {message}", "invalid_request", field or None)


class _Server:
    """Answers checked requests."""

    def __init__(self, engine: ServingEngine, reader: RequestReader) -> None:
        self.engine, self.reader = engine, reader

    def _read(self, body: GenerationRequest, api_key: str | None) -> dict[str, Any]:
        """Inputs for the engine. Stop strings are compared with the whole vocabulary, which may take seconds."""
        return self.engine.prepared(self.reader.read(body, api_key))

    async def answer(self, request: Request, body: GenerationRequest) -> Response:
        inputs = await asyncio.to_thread(self._read, body, request.state.api_key)
        try:
            answer = self.engine.submit(inputs, asyncio.get_running_loop())
        except QueueFullError as error:
            message = f"the server is busy: {error}"
            raise RequestError(429, message, "rate_limit_exceeded") from error
        reply = _Reply(body, len(inputs["input_ids"][0]), inputs["max_new_tokens"], self.reader.end_tokens)
        text = TextStream(self.reader.tokenizer, body.stop_strings)
        if body.stream:
            return _EventStream(answer, _events(answer, text, reply))
        watcher = asyncio.create_task(_cancel_on_disconnect(request, answer))
        try:
            pieces = [text.push(token_ids) async for token_ids in answer]
        except Exception as error:
            raise _refusal(error) from error
        finally:
            watcher.cancel()
            answer.cancel()
        return JSONResponse(reply.whole("".join(pieces) + text.end(), answer.result, text.has_stopped))


class _EventStream(StreamingResponse):
    """Sends the events of an answer, which ends where they cannot be sent any more, be it the first of them."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._answer.cancel()


async def _cancel_on_disconnect(request: Request, answer: Answer) -> None:
    while (await request.receive())["type"] != "http.disconnect":  # the body has been read
        pass
    answer.cancel()


async def _events(answer: Answer, text: TextStream, reply: "_Reply") -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        yield reply.event("", is_first=True)
        async for token_ids in answer:
            if piece := text.push(token_ids):
                yield reply.event(piece)
        if rest := text.end():
            yield reply.event(rest)
        yield reply.event("", finish=reply.finish_reason(answer.result, text.has_stopped))
        if reply.includes_usage:
            yield reply.usage_event(answer.result)
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status is sent already; the client reads it here
        yield f"data: {json.dumps({'error': _described(_refusal(error))})}\n\n"


class _Reply:
    """OpenAI's objects for one request."""

    def __init__(
        self, body: GenerationRequest, prompt_tokens: int, max_new_tokens: int, end_tokens: frozenset[int]
    ) -> None:
        self.is_chat, self.end_tokens = isinstance(body, ChatRequest), end_tokens
        self.prompt_tokens, self.max_new_tokens = prompt_tokens, max_new_tokens
        self.includes_usage = body.stream_options is not None and body.stream_options.include_usage
        self._kind = "chat.completion" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    def finish_reason(self, result: ManyResult, has_stopped: bool) -> str:
        token_ids = result.token_ids
        is_cut = len(token_ids) >= self.max_new_tokens and token_ids[-1] not in self.end_tokens
        return "length" if is_cut and not has_stopped else "stop"

    def whole(self, text: str, result: ManyResult, has_stopped: bool) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.finish_reason(result, has_stopped)}
        return {**self._head, "object": self._kind, "choices": [choice], "usage": self._usage(result)}

    def event(self, text: str, *, is_first: bool = False, finish: str | None = None) -> str:
        delta: dict[str, str] = ({"role": "assistant"} if is_first else {}) | ({} if finish else {"content": text})
        content: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": text}
        return self._event([{"index": 0, **content, "logprobs": None, "finish_reason": finish}], None)

    def usage_event(self, result: ManyResult) -> str:
        return self._event([], self._usage(result))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> str:
        kind = f"{self._kind}.chunk" if self.is_chat else self._kind
        document = {**self._head, "object": kind, "choices": choices, **({"usage": usage} if usage else {})}
        return f"data: {json.dumps(document)}\n\n"

    def _usage(self, result: ManyResult) -> dict[str, Any]:
        """Token counts, with OpenAI's names for drafts; `spec_stats` has the rest."""
        stats, new = result.stats, len(result.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.num_accepted_tokens,
                "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
            },
            "spec_stats": {
                "method": stats.method,
                "num_drafts": stats.num_drafts,
                "acceptance_rate": stats.acceptance_rate,
                "mean_acceptance_length": stats.mean_acceptance_length,
                "plain_reason": stats.plain_reason,
                "plan": None if stats.plan is None else stats.plan.to_dict(),
            },
        }


def _refusal(error: Exception) -> RequestError:
    """Error for a request that failed while it was decoded."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(400, " ".join(str(error).split()), "invalid_request")
    if not isinstance(error, CancelledError):  # of a client that has hung up
        logger.error("a request failed while it was decoded", exc_info=error)
    return RequestError(500, f"{type(error).__name__} while decoding", "server_error")


def _refused(error: RequestError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse({"error": _described(error)}, status_code=error.status, headers=headers)


def _described(error: RequestError) -> dict[str, Any]:
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}
