"""The server's routes: OpenAI's chat and text completions and responses, streamed or whole, over a `SharedBatch`."""

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.errors import QueueFullError, SpecError, shown
from hf_specdec.tools.serve.engine import Answer
from hf_specdec.tools.serve.metrics import Metrics
from hf_specdec.tools.serve.protocol import Body, ChatRequest, CompletionRequest, GenerationRequest
from hf_specdec.tools.serve.reply import AnswerText, Reply
from hf_specdec.tools.serve.requests import RequestError, RequestReader
from hf_specdec.tools.serve.responses import NAMES, ResponsesReply, ResponsesRequest

READING = ["GET", "HEAD"]  # load balancers ask for the health by HEAD
logger = logging.getLogger("hf_specdec")
AnyBody = TypeVar("AnyBody", bound=Body)


def build_app(batch: SharedBatch, reader: RequestReader, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """Build the application for an ASGI server, which closes the batch at its end.

    Args:
        api_keys (`Sequence[str]`, *optional*): of which a request must carry one as its bearer token.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batch.close)

    def check_key(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        sent = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        request.state.api_key = next((key for key in api_keys if hmac.compare_digest(sent, key.encode())), None)
        if api_keys and request.state.api_key is None:
            raise RequestError(401, "the API key is missing or wrong", "invalid_api_key")

    metrics = Metrics(reader.name, batch)
    server = _Server(batch, reader, metrics)
    app = FastAPI(title="hf_specdec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    routes = APIRouter(dependencies=[Depends(check_key)])
    model = {"id": reader.name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    @app.api_route("/health", methods=READING)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.api_route("/metrics", methods=READING)
    async def all_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.api_route("/v1/models", methods=READING)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @routes.api_route("/v1/models/{name:path}", methods=READING)
    async def model_by_name(name: str) -> dict[str, Any]:
        reader.check_name(name)
        return model

    routes.post("/v1/chat/completions")(server.chat)
    routes.post("/v1/completions")(server.complete)
    routes.post("/v1/responses")(server.respond)
    app.include_router(routes)
    _add_errors(app, metrics)
    return app


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer errors in the API's form."""

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        metrics.add("request_failure", 1, error.status)
        headers = {"retry-after": "1"} if error.status == 429 else None
        return JSONResponse({"error": error.described()}, status_code=error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        refusal = RequestError(error.status_code, f"{request.method} {request.url.path} is not served", "unknown_url")
        return JSONResponse({"error": refusal.described()}, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def leave(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, RequestError(500, f"{type(error).__name__} in the server", "server_error"))


class _Server:
    """Answers requests for completions and responses."""

    def __init__(self, batch: SharedBatch, reader: RequestReader, metrics: Metrics) -> None:
        self.batch, self.reader, self.metrics = batch, reader, metrics

    async def chat(self, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        return await self._answer(request, _checked(ChatRequest, await request.body()), Reply)

    async def complete(self, request: Request) -> Response:
        """Answer `/v1/completions`."""
        return await self._answer(request, _checked(CompletionRequest, await request.body()), Reply)

    async def respond(self, request: Request) -> Response:
        """Answer `/v1/responses`."""
        body = _checked(ResponsesRequest, await request.body())
        try:
            chat = _checked(ChatRequest, body.as_chat)
            return await self._answer(request, chat, functools.partial(ResponsesReply, body))
        except RequestError as error:
            for name, other in NAMES.items():
                if error.param is not None and f"{error.param}.".startswith(f"{name}."):
                    message, param = (text.replace(name, other, 1) for text in (error.message, error.param))
                    raise RequestError(error.status, message, error.code, param) from error
            raise

    async def _answer(self, request: Request, body: GenerationRequest, make_reply: Callable[..., Reply]) -> Response:
        started = time.perf_counter()
        inputs = await asyncio.to_thread(self.reader.read, body, request.state.api_key)
        prompt_ids = inputs["input_ids"][0].tolist()
        text = AnswerText(self.reader, body, prompt_ids, inputs["max_new_tokens"])
        reply = make_reply(body, text, len(prompt_ids))
        try:
            answer = Answer(self.batch, inputs, self.reader.tokenizer)
        except QueueFullError as error:
            raise RequestError(429, f"the server is busy: {error}", "rate_limit_exceeded") from error
        self.metrics.add("prompt_tokens", len(prompt_ids))
        deltas = self._deltas(answer, text, started)
        if body.stream:
            return _EventStream(answer, _events(answer, reply, deltas))
        watcher = asyncio.create_task(_cancel_on_disconnect(request, answer))
        try:
            async for _ in deltas:
                pass
            return Response(
                reply.whole(answer.result).model_dump_json(exclude_unset=True, by_alias=True),
                media_type="application/json",
            )
        except Exception as error:
            raise _refusal(error) from error
        finally:
            watcher.cancel()
            answer.cancel()

    async def _deltas(self, answer: Answer, text: AnswerText, started: float) -> AsyncIterator[dict[str, Any]]:
        """Yield what is certain of the answer, counted; it ends with as many calls as it may have."""
        first = 0.0
        async for new in answer:
            first = first or time.perf_counter()
            yield text.push(new)
            if text.is_complete:
                answer.end()
        yield text.end(answer.result.token_ids)
        self.metrics.add_answer(answer.result, text.finish_reason, started, first)


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


async def _events(answer: Answer, reply: Reply, deltas: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events."""
    try:
        yield reply.first_events()
        async for delta in deltas:
            if delta:
                yield reply.event(delta)
        yield reply.last_events(answer.result)
    except Exception as error:  # noqa: BLE001 - the status is sent already; the client reads it here
        yield reply.error_event(_refusal(error).described())


def _checked(kind: type[AnyBody], body: bytes | Callable[[], AnyBody]) -> AnyBody:
    """Check a body; the first field that is wrong is a RequestError."""
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else body()
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise RequestError(400, str(error), "invalid_request", str(error).partition(" ")[0]) from error
        errors = error.errors(include_url=False, include_context=False)
    first, place = errors[0], errors[0]["loc"][:-1]
    inside = [error for error in errors if error["loc"][: len(place)] == place]
    first = max(inside, key=lambda error: len(error["loc"]))  # of a union's types the one that was read furthest
    parts = [str(part) for part in first["loc"]]
    field = ".".join(part for part in parts if part != "str" and "[" not in part)  # of a union pydantic names the type
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "the server does not know this field, and would ignore it. Leave it out"
    elif first["type"] != "value_error" and parts:  # ours show the value where it tells something
        message = f"{message}, but is {shown(first['input'])}"
    raise RequestError(400, f"{field or 'body'}: {message}", "invalid_request", field or None)


def _refusal(error: Exception) -> RequestError:
    """Return the error for a request that failed while it was decoded."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError) or type(error) is SpecError:  # SpecError: of a grammar that allows no token more
        return RequestError(400, " ".join(str(error).split()), "invalid_request")
    if not isinstance(error, CancelledError):  # of a client that has hung up
        logger.error("a request failed while it was decoded", exc_info=error)
    return RequestError(500, f"{type(error).__name__} while decoding", "server_error")
