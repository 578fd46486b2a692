"""Check of API keys around the routes.

Plain ASGI: between a middleware of starlette's `BaseHTTPMiddleware` and a route the message that a client has hung up
is lost.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.tools.serve.requests import RequestError

logger = logging.getLogger("hf_specdec")


class Access:
    """An application behind a check of keys; what fails in it before it has answered is an answer of the API's form.

    Args:
        app: an ASGI application. The key of a request is `request.state.api_key`.
        api_keys (`Sequence[str]`): of which a request must carry one as its bearer token, but for `/health`.
        refuse: makes the response for an error.
    """

    def __init__(self, app: Any, *, api_keys: Sequence[str], refuse: Callable[[RequestError], Any]) -> None:
        self.app, self.api_keys, self.refuse = app, api_keys, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = _bearer_token(scope["headers"])
        key = next((key for key in self.api_keys if hmac.compare_digest(given, key.encode())), None)
        scope.setdefault("state", {})["api_key"] = key
        if self.api_keys and key is None and scope["path"] != "/health":
            wrong = RequestError(401, "the API key is missing or wrong", "invalid_api_key")
            await self.refuse(wrong)(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if has_begun:
                raise
            logger.error("a request failed before it was decoded", exc_info=error)
            failed = RequestError(500, f"{type(error).__name__} in the server", "server_error")
            await self.refuse(failed)(scope, receive, send)


def _bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The token in the bytes in which it was sent; empty where there is none."""
    header = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = header.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
