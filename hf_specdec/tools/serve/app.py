"""The server's routes: OpenAI's chat and text completions and responses, streamed or whole, over a `SharedBatch`."""

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException as RouteError
from starlette.requests import ClientDisconnect

from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.errors import QueueFullError, SpecError, shown
from hf_specdec.tools.serve.answer import Answer, Delta
from hf_specdec.tools.serve.metrics import Metrics
from hf_specdec.tools.serve.protocol import AnyRequest, ChatRequest, CompletionRequest
from hf_specdec.tools.serve.reply import Reply
from hf_specdec.tools.serve.requests import RequestReader
from hf_specdec.tools.serve.responses import ResponsesReply, ResponsesRequest

READING = ["GET", "HEAD"]  # load balancers ask for the health by HEAD
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded", 500: "server_error"}
KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
STATUSES = ((QueueFullError, 429), (ClientDisconnect, 499), (CancelledError, 499), (ValueError, 400))
logger = logging.getLogger("hf_specdec")


def build_app(batch: SharedBatch, reader: RequestReader, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """Build the application for an ASGI server; a request carries one of the keys, and the batch closes at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batch.close)

    def check_key(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        sent = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        request.state.api_key = next((key for key in api_keys if hmac.compare_digest(sent, key.encode())), None)
        if api_keys and request.state.api_key is None:
            raise HTTPException(401, "the API key is missing or wrong")

    metrics = Metrics(reader.name, batch)
    server = _Server(batch, reader, metrics)
    app = FastAPI(title="hf_specdec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (RouteError, ValueError, SpecError, ClientDisconnect, CancelledError, Exception):
        app.add_exception_handler(kind, server.fail)
    routes = APIRouter(dependencies=[Depends(check_key)])
    model = {"id": reader.name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    @app.api_route("/health", methods=READING)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.api_route("/metrics", methods=READING)
    async def all_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.api_route("/v1/models", methods=READING)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @routes.api_route("/v1/models/{name:path}", methods=READING)
    async def model_by_name(name: str) -> dict[str, Any]:
        server.check_name(name)
        return model

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.respond(request, ChatRequest.model_validate_json(await request.body()), Reply)

    @routes.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await server.respond(request, CompletionRequest.model_validate_json(await request.body()), Reply)

    @routes.post("/v1/responses")
    async def respond(request: Request) -> Response:
        body = ResponsesRequest.model_validate_json(await request.body())
        return await server.respond(request, body.as_chat(), functools.partial(ResponsesReply, body))

    app.include_router(routes)
    return app


class _Server:
    """Answers requests, each by its place in the batch."""

    def __init__(self, batch: SharedBatch, reader: RequestReader, metrics: Metrics) -> None:
        self.batch, self.reader, self.metrics = batch, reader, metrics

    def check_name(self, name: str) -> None:
        """Raise HTTPException unless it is the model's."""
        if name != self.reader.name:
            raise HTTPException(404, f"the model {name!r} does not exist; there is {self.reader.name!r}")

    async def fail(self, request: Request, error: Exception) -> JSONResponse:
        """Answer a request that is refused or failed."""
        status, described = _described(error)
        self.metrics.add("request_failure", 1, status)
        headers = {"retry-after": "1"} if status == 429 else getattr(error, "headers", None)
        return JSONResponse({"error": described}, status_code=status, headers=headers)

    async def respond(self, request: Request, body: AnyRequest, make_reply: Callable[..., Reply]) -> Response:
        """Answer a request, streamed or whole; one whose client disconnects leaves the batch."""
        started = time.perf_counter()
        self.check_name(body.model)
        inputs = await asyncio.to_thread(self.reader.read, body, request.state.api_key)
        answer = Answer(self.batch, self.reader, body, inputs)
        self.metrics.add("prompt_tokens", answer.prompt_tokens)
        request.state.watcher = asyncio.create_task(_cancel_on_disconnect(request, answer))
        reply, deltas = make_reply(body, answer), self._deltas(answer, started)
        if body.stream:
            return StreamingResponse(_events(reply, deltas), media_type="text/event-stream")
        async for _ in deltas:
            pass
        return Response(to_json(reply.whole(), inf_nan_mode="null"), media_type="application/json")

    async def _deltas(self, answer: Answer, started: float) -> AsyncIterator[Delta]:
        async for delta in answer.deltas():
            yield delta
        self.metrics.add_answer(answer.result, answer.finish_reason, started, answer.first_token_time)


async def _cancel_on_disconnect(request: Request, answer: Answer) -> None:
    while (await request.receive())["type"] != "http.disconnect":  # the body has been read
        pass
    answer.cancel()


async def _events(reply: Reply, deltas: AsyncIterator[Delta]) -> AsyncIterator[str]:
    """Yield server-sent events."""
    try:
        yield reply.first_events()
        async for delta in deltas:
            if delta:
                yield reply.events(delta)
        yield reply.last_events()
    except Exception as error:
        status, described = _described(error)
        if status == 500:
            logger.error("an answer failed while it was decoded", exc_info=error)
        yield reply.error_event(described)


def _described(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status of an error, and the error as OpenAI's API writes it."""
    message, param = " ".join(str(error).split()), getattr(error, "field", None)
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    if isinstance(error, RouteError):
        status, message = error.status_code, error.detail
    elif isinstance(error, ValidationError):
        param, message = _first_error(error)
    elif type(error) is SpecError:  # of a grammar that allows no token more
        status = 400
    elif status == 500:
        message = f"{type(error).__name__} in the server"
    code, kind = CODES.get(status, "invalid_value"), KINDS.get(status, "invalid_request_error")
    return status, {"message": message, "type": kind, "param": param, "code": code}


def _first_error(error: ValidationError) -> tuple[str | None, str]:
    """Return a field that is wrong, and a message that names it."""
    errors = error.errors(include_url=False, include_context=False)
    first = max(errors, key=lambda other: len(other["loc"]))  # of a union's types the one that was read furthest
    parts = [str(part) for part in first["loc"]]
    field = ".".join(part for part in parts if part != "str" and "[" not in part)  # of a union pydantic names the type
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "the server does not know this field, and would ignore it. Leave it out"
    elif first["type"] != "value_error" and parts:  # ours show the value where it tells something
        message = f"{message}, but is {shown(first['input'])}"
    return field or None, f"{field or 'body'}: {message}"
