"""The server's process: it listens until it is told to end, and then gives open answers their time."""

import asyncio
from typing import Any

import uvicorn

from hf_specdec.tools.serve.engine import ServingEngine
from hf_specdec.tools.serve.requests import RequestError

SECONDS_TO_TELL = 2  # after the open answers' time, before connections are cut


class EndingServer(uvicorn.Server):
    """Ends answers that take too long once it is told to stop, so that each client gets an error of the API's form.

    Args:
        app: an ASGI application.
        engine: decodes its answers.
        seconds (`int`): that open answers may take after the signal to end.
        settings: of `uvicorn.Config`.
    """

    def __init__(self, app: Any, engine: ServingEngine, *, seconds: int, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=seconds + SECONDS_TO_TELL, **settings))
        self._engine, self._seconds = engine, seconds

    async def shutdown(self, sockets: Any = None) -> None:
        """Take no new requests, and wait for the open ones."""
        ending = RequestError(503, "the server ends", "server_shutdown")
        timer = asyncio.get_running_loop().call_later(self._seconds, self._engine.end_answers, ending)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
