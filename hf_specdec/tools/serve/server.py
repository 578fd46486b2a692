"""The server's process: it listens until it is told to end, and then gives open answers their time."""

import asyncio
import time
from typing import Any

import uvicorn

from hf_specdec.tools.serve.engine import ServingEngine
from hf_specdec.tools.serve.requests import RequestError

SECONDS_TO_TELL = 2  # after the open answers' time, before connections are cut


class EndingServer(uvicorn.Server):
    """Refuses new requests once it is told to stop, and ends answers that take too long with an error of the API.

    Args:
        app: an ASGI application.
        engine: decodes its answers.
        seconds (`int`): that open answers may take after the signal to end.
        settings: of `uvicorn.Config`.
    """

    def __init__(self, app: Any, engine: ServingEngine, *, seconds: int, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_TELL, **settings))
        self._engine, self._seconds = engine, seconds

    async def shutdown(self, sockets: Any = None) -> None:
        """Wait for the open answers, refusing new requests, and take no connections any more."""
        self._engine.is_ending, ending = True, RequestError(503, "the server ends", "server_shutdown")
        last = time.monotonic() + self._seconds
        while self._engine.is_busy and time.monotonic() < last and not self.force_exit:
            await asyncio.sleep(0.05)
        self._engine.end_answers(ending)
        await super().shutdown(sockets)
