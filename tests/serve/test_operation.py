"""What operators see: metrics, clients that hang up, and an end that loses no answer."""

import json
import re
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from hf_specdec.tools.serve.answer import Answer
from hf_specdec.tools.serve.metrics import HISTOGRAMS
from tests.serve.conftest import NAME, serving
from tests.serve.test_server import GREEDY, PROMPTS, expected, streaming

SAMPLE = re.compile(
    r'^hf_specdec:(\w+)\{(?:(\w+)="([^"]*)",)?model_name="embedded"(?:,(\w+)="([^"]*)")?\} ([\d.e+-]+)$'
)


def samples(url: str) -> dict[Any, float]:
    """Values by name, or by name and label; each line is one, or a comment."""
    values: dict[Any, float] = {}
    for line in httpx.get(f"{url.removesuffix('/v1')}/metrics").text.splitlines():
        if not line.startswith("# "):
            match = SAMPLE.match(line)
            assert match is not None, line
            label = match[3] or match[5]
            values[match[1] if label is None else (match[1], label)] = float(match[6])
    return values


@pytest.mark.parametrize("is_streamed", [False, True])
def test_metrics_count_what_the_answers_tell(target: Any, chat_tokenizer: Any, is_streamed: bool) -> None:
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        answers: Any = [client.completions.create(**GREEDY, **options) for _ in range(2)]
        usages = [list(answer)[-1].usage if is_streamed else answer.usage for answer in answers]
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**GREEDY, max_tokens=0)
        values = samples(url)
    assert values["prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert values["generation_tokens_total"] == 32
    assert (values["request_success_total", "length"], values["request_failure_total", "400"]) == (2, 1)
    details = [usage.completion_tokens_details for usage in usages]
    accepted = sum(detail.accepted_prediction_tokens for detail in details)
    assert values["spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert values["spec_decode_num_draft_tokens_total"] == accepted + sum(
        detail.rejected_prediction_tokens for detail in details
    )
    by_place = [value for name, value in values.items() if name[0] == "spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(by_place) == accepted
    for name in HISTOGRAMS:
        assert values[f"{name}_count"] == values[f"{name}_bucket", "+Inf"] == 2
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (0, 0)


def test_running_and_waiting_texts_are_told_apart(target: Any, chat_tokenizer: Any) -> None:
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        streams = [streaming(client, prompt) for prompt in PROMPTS[:4]]
        waiting = client.completions.create(**GREEDY, stream=True)
        values = samples(url)
        for events in streams:
            events.close()
        assert list(waiting)
    assert (values["num_requests_running"], values["num_requests_waiting"]) == (4, 1)


@pytest.mark.parametrize("num_clients", [4, 8], ids=["decoded", "waiting too"])
def test_clients_that_hang_up_free_their_places(
    target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, num_clients: int
) -> None:
    seen: list[int] = []
    real = Answer.__call__
    monkeypatch.setattr(Answer, "__call__", lambda self, ids, *_, **__: seen.append(1) or real(self, ids, None))
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        body = json.dumps({"model": NAME, "prompt": PROMPTS[0], "max_tokens": 1500})
        request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        clients = [socket.create_connection((host, int(port))) for _ in range(num_clients)]
        for connection in clients:
            connection.sendall(request.encode())
        while not seen:
            time.sleep(0.01)
        for connection in clients:
            connection.close()
        assert client.completions.create(**GREEDY).choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    assert len(seen) < 1500


def test_a_client_that_hangs_up_before_its_body_is_no_error(
    url: str, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.models.list()  # the server has read it
    client.models.list()
    assert caplog.text == ""


@pytest.mark.parametrize("seconds", [30, 0])
def test_a_server_that_ends_gives_open_answers_their_time(target: Any, chat_tokenizer: Any, seconds: int) -> None:
    """And ends the others with its thread."""
    before, texts = set(threading.enumerate()), list[str]()
    max_tokens = 100 if seconds else 1500

    def read(url: str) -> None:
        body = {**GREEDY, "max_tokens": max_tokens, "stream": True}
        try:
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as reply:
                lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
            texts.append("".join(json.loads(line)["choices"][0]["text"] for line in lines if "choices" in line))
        except httpx.HTTPError:
            texts.append("")

    with serving(target, chat_tokenizer, seconds=seconds) as url:
        reader = threading.Thread(target=read, args=(url,))
        reader.start()
        while samples(url)["num_requests_running"] < 1:
            time.sleep(0.01)
    reader.join()
    assert texts == ([expected(target, chat_tokenizer, PROMPTS[0], max_new_tokens=100)] if seconds else [""])
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "hf-specdec-batch"]
