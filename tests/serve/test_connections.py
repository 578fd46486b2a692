"""Connections: who may ask, clients that hang up, and a server that ends while answers are open."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from hf_specdec.tools.serve.app import _EventStream
from hf_specdec.tools.serve.engine import ServingEngine, _Feed, _StopStrings
from tests.serve.conftest import NAME, serving
from tests.serve.test_server import PROMPTS, expected


def test_an_answer_ends_where_its_first_event_cannot_be_sent() -> None:
    async def events() -> AsyncIterator[str]:
        yield "data: {}\n\n"

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: Any) -> None:
        raise OSError("closed")

    cancelled: list[bool] = []
    answer: Any = SimpleNamespace(cancel=lambda: cancelled.append(True))
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises((OSError, ClientDisconnect)):
        asyncio.run(_EventStream(answer, events())(scope, receive, send))
    assert cancelled


def test_a_client_that_hangs_up_frees_its_place(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Four places are taken by texts of a thousand tokens; a fifth request is served once those clients are gone."""
    streams = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=1000, temperature=0, stream=True)
        for prompt in PROMPTS[:4]
    ]
    for events in streams:
        next(iter(events))
    for events in streams:
        events.close()
    started = time.monotonic()
    answer = client.completions.create(model=NAME, prompt=PROMPTS[5], temperature=0)
    assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[5])
    assert answer.usage is not None and time.monotonic() - started < 60


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_client_that_hangs_up_waiting_for_a_whole_answer_frees_its_place(
    target: Any, chat_tokenizer: Any, is_waiting: bool
) -> None:
    seen: list[int] = []
    with serving(target, chat_tokenizer) as url:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"model": NAME, "prompt": PROMPTS[0], "max_tokens": 1500, "spec_method": "plain"})
        request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        real = _Feed.__call__
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_Feed, "__call__", lambda self, ids, *_, **__: seen.append(1) or real(self, ids, None))
            clients = [socket.create_connection((host, int(port))) for _ in range(8 if is_waiting else 4)]
            for one in clients:
                one.sendall(request.encode())
            while not seen:
                time.sleep(0.01)
            for one in clients:
                one.close()
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                answer = client.completions.create(model=NAME, prompt=PROMPTS[5], temperature=0)
            assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[5])
    assert len(seen) < 1500


def test_an_api_key_is_asked_for(target: Any, chat_tokenizer: Any) -> None:
    with serving(target, chat_tokenizer, api_keys=("secret", "other")) as url:
        for key in ("secret", "other"):
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                assert client.completions.create(model=NAME, prompt="x", max_tokens=2).choices
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.parametrize("header", ["bearer k\u00e4y", "BEARER  k\u00e4y"])
def test_a_key_may_hold_any_character(target: Any, chat_tokenizer: Any, header: str) -> None:
    with serving(target, chat_tokenizer, api_keys=("k\u00e4y",)) as url:
        assert httpx.get(f"{url}/models", headers={b"authorization": header.encode()}).status_code == 200
        for other in ({}, {"authorization": "Bearer"}, {"authorization": "Basic k"}):
            assert httpx.get(f"{url}/models", headers=other).status_code == 401


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_that_are_open_when_the_server_ends_say_so(
    target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    found: list[Any] = []

    def ask(url: str) -> None:
        body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 1500, "stream": is_streamed}
        found.append(httpx.post(f"{url}/completions", json=body | {"spec_method": "plain"}, timeout=60))

    submitted: list[Any] = []
    real = ServingEngine.submit
    monkeypatch.setattr(ServingEngine, "submit", lambda *given: submitted.append(real(*given)) or submitted[-1])
    with serving(target, chat_tokenizer, seconds=0) as url:
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        while len(submitted) < 5:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    for reply in found:
        if is_streamed:
            assert '"code": "server_shutdown"' in reply.text.splitlines()[-2]
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_shutdown")
    assert len(found) == 5


def test_stop_strings_are_prepared_beside_the_loop(
    target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes seconds with large vocabularies, in which no one else would be answered."""
    threads: list[str] = []
    real = _StopStrings.__init__
    monkeypatch.setattr(
        _StopStrings, "__init__", lambda *given: threads.append(threading.current_thread().name) or real(*given)
    )
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        client.completions.create(model=NAME, prompt="import ", max_tokens=8, stop=["\n"])
    assert threads and not any(name.endswith("(run)") for name in threads), "uvicorn's"


def test_the_server_stops_while_texts_are_decoded(target: Any, chat_tokenizer: Any) -> None:
    """The engine's thread ends with it; other tests' servers may have theirs."""
    before = set(threading.enumerate())
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        events = client.completions.create(model=NAME, prompt="import ", max_tokens=500, stream=True)
        next(iter(events))
        events.close()
    begun = set(threading.enumerate()) - before
    assert not [thread.name for thread in begun if thread.name == "hf-specdec-batch"]
