"""Serves a page: on this machine alone unless told otherwise, with nothing that the page does not need."""

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from hf_specdec.tools.demo.page import Page

ASSETS = Path(__file__).parent / "assets"
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONO_FONTS = ("ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
MAX_BODY = 262_144  # bytes of one request
MAX_SESSIONS = 200  # whose last race is kept
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
PAGES = ("/", "/config", "/config/", "/favicon.ico", "/manifest.json", "/robots.txt", "/theme.css", "/login_check")
FOLDERS = ("/assets/", "/static/", "/svelte/")
API = "/gradio_api/"
CALLS = ("info", "queue/", "call/", "run/", "api/", "heartbeat/", "cancel", "reset", "file=", "startup-events")
OTHERS = ("app_id", "theme.css", "login_check", "openapi.json")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """Lets through what the page uses, so no uploads, proxies or monitoring, in requests of a bounded size.

    Browsers are told to load nothing from elsewhere.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, as ASGI hands it over."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope)
        if refused is not None:
            await send({"type": "http.response.start", "status": refused, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        await self.app(scope, receive, send_guarded)

    @staticmethod
    def _refused(scope: Message) -> int | None:
        """The status that refuses a request, if it is refused."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        call = path.removeprefix(API) if path.startswith(API) else None
        if path not in PAGES and not path.startswith(FOLDERS) and not (call and call.startswith((*CALLS, *OTHERS))):
            return 404
        headers = dict(scope["headers"])
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            return 411
        length = headers.get(b"content-length", b"0")
        return None if length.isdigit() and int(length) <= MAX_BODY else 413


def launch(
    page: Page, *, host: str = "127.0.0.1", port: int | None = 7860, share: bool = False, blocks_thread: bool = True
) -> tuple[Any, str, str]:
    """Serve the page until it is interrupted; returns Gradio's application, the local address, and the shared one.

    Args:
        host (`str`): address to listen at; others than this machine's let other people in.
        port (`int | None`): `None` is the first free one from 7860 on.
        share (`bool`): also publish the page at a gradio.live address.
        blocks_thread (`bool`): whether to stay until interrupted.
    """
    page.blocks.queue(max_size=page.racer.limits.queue_size, default_concurrency_limit=4)
    theme = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONTS, font_mono=MONO_FONTS)
    served: tuple[Any, str, str] = page.blocks.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=not blocks_thread,
        quiet=not blocks_thread,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        max_file_size="1kb",
        state_session_capacity=MAX_SESSIONS,
        app_kwargs={"middleware": [Middleware(Guard)], "docs_url": None, "redoc_url": None},
        theme=theme,
        css=(ASSETS / "style.css").read_text(encoding="utf-8"),
        js=(ASSETS / "player.js").read_text(encoding="utf-8"),
    )
    return served
