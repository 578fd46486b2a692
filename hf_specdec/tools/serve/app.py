"""The server's routes: OpenAI's chat and text completions and responses, streamed or whole, over a `ServingEngine`."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from hf_specdec.errors import MissingExtraError, QueueFullError, SpecError, shown
from hf_specdec.tools.serve.access import Access
from hf_specdec.tools.serve.engine import Answer, ServingEngine
from hf_specdec.tools.serve.metrics import Metrics, RequestTimes
from hf_specdec.tools.serve.requests import RequestError, RequestReader
from hf_specdec.tools.serve.text_stream import TextStream

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    from hf_specdec.tools.serve.protocol import Body, ChatRequest, CompletionRequest, GenerationRequest
    from hf_specdec.tools.serve.reply import Choice, Reply
    from hf_specdec.tools.serve.responses import NAMES, ResponsesReply, ResponsesRequest
except ImportError as error:
    raise MissingExtraError("fastapi", "serve", "The server") from error


ROUTES = (
    "POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/models, GET /health and GET /metrics"
)
READING = ["GET", "HEAD"]  # load balancers ask for the health by HEAD
logger = logging.getLogger("hf_specdec")
AnyBody = TypeVar("AnyBody", bound=Body)
MakeReply = Callable[[Any, Sequence[Choice], int], Reply]  # of the body, its texts and the tokens of the prompt


def build_app(engine: ServingEngine, reader: RequestReader, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application for an ASGI server.

    Args:
        api_keys (`Sequence[str]`, *optional*): of which a request must carry one as its bearer token.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    metrics = Metrics(reader.name)

    app = FastAPI(title="hf_specdec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(engine, reader, metrics)
    model = {"id": reader.name, "object": "model", "created": int(time.time()), "owned_by": "hf_specdec"}

    app.add_middleware(Access, api_keys=api_keys, refuse=_refused, metrics=metrics)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        request.state.told["error"] = error.message
        return _refused(error)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        described = _described(_not_served(request, error.status_code))
        return JSONResponse({"error": described}, status_code=error.status_code, headers=error.headers)

    @app.api_route("/health", methods=READING)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ending"}, 503) if engine.is_ending else JSONResponse({"status": "ok"})

    @app.api_route("/metrics", methods=READING)
    async def all_metrics() -> PlainTextResponse:
        running, waiting = engine.num_running, engine.num_waiting
        text = metrics.text(num_requests_running=running, num_requests_waiting=waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/v1/models", methods=READING)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.api_route("/v1/models/{name:path}", methods=READING)
    async def model_called(name: str) -> dict[str, Any]:
        reader.check_name(name)
        return model

    _add_completions(app, server)
    return app


def _add_completions(app: FastAPI, server: "_Server") -> None:
    """Add the routes that generate."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await server.answer(request, await server.body(request, ChatRequest))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await server.answer(request, await server.body(request, CompletionRequest))

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        asked = await server.body(request, ResponsesRequest)
        try:
            with _checked():
                chat = asked.as_chat()
            return await server.answer(request, chat, functools.partial(ResponsesReply, asked))
        except RequestError as error:
            raise error.renamed(NAMES) from error


def _not_served(request: Request, status: int) -> RequestError:
    """Error for a path or a method that is not served."""
    message = f"{request.method} {request.url.path} is not served; there are {ROUTES}"
    return RequestError(status, message, "unknown_url")


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Raise RequestError for the first field that is wrong."""
    try:
        yield
    except ValidationError as error:
        raise _wrong_field(error) from error


def _wrong_field(error: ValidationError) -> RequestError:
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

    def __init__(self, engine: ServingEngine, reader: RequestReader, metrics: Metrics) -> None:
        self.engine, self.reader, self.metrics = engine, reader, metrics

    async def body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """The checked body.

        Raises:
            RequestError: it is too large or no JSON, a field is wrong or unknown, the server ends, or the client has
                hung up.
        """
        if self.engine.is_ending:
            raise RequestError(503, "the server ends", "server_shutdown")
        found, most = bytearray(), self.reader.limits.max_body
        try:
            async for part in request.stream():
                found += part
                if len(found) > most:
                    message = f"the body must have at most {most:,} bytes (--max-body)"
                    raise RequestError(413, message, "request_too_large")
        except ClientDisconnect as error:
            raise RequestError(499, "the client has hung up", "client_closed_request") from error
        with _checked():
            return kind.model_validate_json(bytes(found))

    def _read(self, body: GenerationRequest, api_key: str | None) -> list[dict[str, Any]]:
        """Inputs for the engine. Stop strings are compared with the whole vocabulary, which may take seconds."""
        inputs = {**self.reader.read(body, api_key), "spec_observer": self.metrics.add_step}
        return self.reader.each_text(body, self.engine.prepared(inputs))

    async def answer(self, request: Request, body: GenerationRequest, make_reply: MakeReply = Reply) -> Response:
        """Answer a checked request."""
        texts = await asyncio.to_thread(self._read, body, request.state.api_key)
        reply = make_reply(body, *self._choices(body, texts))
        request.state.told.update(prompt_tokens=reply.prompt_tokens, model=body.model, stream=bool(body.stream))
        try:
            answer = self.engine.submit(texts, asyncio.get_running_loop())
        except QueueFullError as error:
            message = f"the server is busy: {error}"
            raise RequestError(429, message, "rate_limit_exceeded") from error
        self.metrics.add("prompt_tokens", reply.prompt_tokens)
        if (seconds := self.reader.limits.request_timeout) is not None:
            message = f"the answer took more than {seconds:g} seconds (--request-timeout)"
            answer.end_after(seconds, RequestError(504, message, "request_timeout"))
        times = RequestTimes(self.metrics, request.state.told, request.state.started)
        pieces = _pieces(answer, reply, times)
        if body.stream:
            return _EventStream(answer, _events(answer, reply, pieces, times))
        watcher = asyncio.create_task(_cancel_on_disconnect(request, answer))
        try:
            async for _ in pieces:
                pass
        except Exception as error:
            raise _refusal(error) from error
        finally:
            watcher.cancel()
            answer.cancel()
        return JSONResponse(reply.whole(answer.results))

    def _choices(self, body: GenerationRequest, texts: Sequence[dict[str, Any]]) -> tuple[list[Choice], int]:
        """The texts that are to come, and the tokens of their prompt."""
        reader, prompt_ids = self.reader, texts[0]["input_ids"][0].tolist()
        choices = []
        for index in range(len(texts)):
            parser = reader.chat_parser(body, prompt_ids)
            skipped = None if parser.skipped is None else parser.skipped | reader.end_tokens
            text = TextStream(reader.tokenizer, body.stop_strings, skipped)
            limit = texts[index]["max_new_tokens"]
            choices.append(Choice(index, text, parser, reader.token_text, reader.end_tokens, limit))
        return choices, len(prompt_ids)


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


Certain = tuple[dict[str, Any], list[dict[str, Any]]]  # a delta and its log-probabilities
Pieces = AsyncIterator[tuple[int, Certain, bool]]  # of a text by its number, and whether it ends here


async def _pieces(answer: Answer, reply: Reply, times: RequestTimes) -> Pieces:
    """Yield what is certain of the answer's texts, counted; a text that has as many calls as it may ends."""
    async for index, new in answer:
        choice = reply.choices[index]
        if new is not None:
            times.add_tokens(index, len(new.token_ids))
            yield index, choice.push(new), False
            if choice.parser.is_complete:
                answer.end_text(index)
        else:
            result = answer.result(index)
            yield index, choice.end(result), True
            times.end_text(index, result.stats, len(result.token_ids), choice.finish_reason)


async def _events(answer: Answer, reply: Reply, pieces: Pieces, times: RequestTimes) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        yield reply.first_events()
        async for index, (delta, logprobs), is_end in pieces:
            if delta or logprobs:
                yield reply.event(index, delta, logprobs)
            if is_end:
                yield reply.last_event(index)
        yield reply.last_events(answer.results)
    except Exception as error:  # noqa: BLE001 - the status is sent already; the client reads it here
        refusal = _refusal(error)
        times.told["error"] = refusal.message
        yield reply.error_event(_described(refusal))


def _refusal(error: Exception) -> RequestError:
    """Error for a request that failed while it was decoded."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError) or type(error) is SpecError:  # SpecError: of a grammar that allows no token more
        return RequestError(400, " ".join(str(error).split()), "invalid_request")
    if not isinstance(error, CancelledError):  # of a client that has hung up
        logger.error("a request failed while it was decoded", exc_info=error)
    return RequestError(500, f"{type(error).__name__} while decoding", "server_error")


def _refused(error: RequestError) -> JSONResponse:
    headers = {429: {"retry-after": "1"}, 503: {"retry-after": "1"}, 504: {"x-should-retry": "false"}}
    return JSONResponse({"error": _described(error)}, status_code=error.status, headers=headers.get(error.status))


def _described(error: RequestError) -> dict[str, Any]:
    kinds = {429: "rate_limit_error"}
    kind = kinds.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}
