"""The server's routes: OpenAI's chat and text completions, streamed or whole, over a `ServingEngine`."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

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
    from hf_specdec.tools.serve.reply import Choice, Reply
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

    def _read(self, body: GenerationRequest, api_key: str | None) -> list[dict[str, Any]]:
        """Inputs for the engine. Stop strings are compared with the whole vocabulary, which may take seconds."""
        return self.reader.each_text(body, self.engine.prepared(self.reader.read(body, api_key)))

    async def answer(self, request: Request, body: GenerationRequest) -> Response:
        texts = await asyncio.to_thread(self._read, body, request.state.api_key)
        reply = self._reply(body, texts)
        try:
            answer = self.engine.submit(texts, asyncio.get_running_loop())
        except QueueFullError as error:
            message = f"the server is busy: {error}"
            raise RequestError(429, message, "rate_limit_exceeded") from error
        if body.stream:
            return _EventStream(answer, _events(answer, reply))
        watcher = asyncio.create_task(_cancel_on_disconnect(request, answer))
        try:
            async for index, new in answer:
                reply.choices[index].push(new)
                if reply.choices[index].parser.is_complete:
                    answer.end_text(index)
        except Exception as error:
            raise _refusal(error) from error
        finally:
            watcher.cancel()
            answer.cancel()
        return JSONResponse(reply.whole(answer.results))

    def _reply(self, body: GenerationRequest, texts: Sequence[dict[str, Any]]) -> Reply:
        reader, prompt_ids = self.reader, texts[0]["input_ids"][0].tolist()
        choices = []
        for index in range(len(texts)):
            parser = reader.chat_parser(body, prompt_ids)
            skipped = None if parser.skipped is None else parser.skipped | reader.end_tokens
            text = TextStream(reader.tokenizer, body.stop_strings, skipped)
            choices.append(Choice(index, text, parser, reader.token_text, reader.end_tokens))
        return Reply(body, choices, len(prompt_ids), texts[0]["max_new_tokens"])


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


async def _events(answer: Answer, reply: Reply) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        for choice in reply.choices:
            yield reply.first_event(choice.index)
        async for index, new in answer:
            event = reply.last_event(index, answer.result(index)) if new is None else reply.event(index, new)
            if event:
                yield event
            if reply.choices[index].parser.is_complete:
                answer.end_text(index)
        if reply.includes_usage:
            yield reply.usage_event(answer.results)
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status is sent already; the client reads it here
        yield f"data: {json.dumps({'error': _described(_refusal(error))})}\n\n"


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
