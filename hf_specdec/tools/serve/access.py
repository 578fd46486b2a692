"""Check of API keys around the routes, and a name and a line of the log for each request.

Plain ASGI: between a middleware of starlette's `BaseHTTPMiddleware` and a route the message that a client has hung up
is lost.
"""

import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.tools.serve.metrics import Metrics
from hf_specdec.tools.serve.requests import RequestError

MAX_ID = 128  # characters of a request's name
UNLOGGED = ("/health", "/metrics")  # asked for every few seconds
logger = logging.getLogger("hf_specdec")
request_logger = logging.getLogger("hf_specdec.requests")


class Access:
    """An application behind a check of keys; what fails in it before it has answered is an answer of the API's form.

    Each answer has the header `x-request-id` of its request, or a new one, and each request a line of JSON in the log
    `hf_specdec.requests`.

    Args:
        app: an ASGI application. The key of a request is `request.state.api_key`, its name `request_id`, its beginning
            `started`, and what the application puts into `told` is in the log too.
        api_keys (`Sequence[str]`): of which a request must carry one as its bearer token, but for `/health`.
        refuse: makes the response for an error.
        metrics: counts the failures.
    """

    def __init__(
        self, app: Any, *, api_keys: Sequence[str], refuse: Callable[[RequestError], Any], metrics: Metrics
    ) -> None:
        self.app, self.api_keys, self.refuse, self.metrics = app, api_keys, refuse, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started, told = _request_id(scope["headers"]), time.perf_counter(), dict[str, Any]()
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            await send(message)

        given = _bearer_token(scope["headers"])
        key = next((key for key in self.api_keys if hmac.compare_digest(given, key.encode())), None)
        scope.setdefault("state", {}).update(api_key=key, request_id=request_id, started=started, told=told)
        try:
            if self.api_keys and key is None and scope["path"] != "/health":
                wrong = RequestError(401, "the API key is missing or wrong", "invalid_api_key")
                await self.refuse(wrong)(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        except Exception as error:
            if status:
                raise
            logger.error("request %s failed before it was decoded", request_id, exc_info=error)
            failed = RequestError(500, f"{type(error).__name__} in the server", "server_error")
            await self.refuse(failed)(scope, receive, watched)
        finally:
            if status >= 400:
                self.metrics.add("request_failure", status=status)
            if scope["path"] not in UNLOGGED:
                line = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
                seconds = round(time.perf_counter() - started, 4)
                request_logger.info(json.dumps({"time": round(time.time(), 3), **line, "seconds": seconds, **told}))


def _header(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The client's name for the request where it gives a printable one, or a new one."""
    given = _header(headers, b"x-request-id").decode("latin-1")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID else uuid.uuid4().hex


def _bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The token in the bytes in which it was sent; empty where there is none."""
    scheme, _, token = _header(headers, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
