"""What operators see: metrics, names and log lines of requests, limits, and an end that loses no answer."""

import json
import logging
import re
import threading
from typing import Any

import httpx
import openai
import pytest

from hf_specdec.tools.serve.limits import ServerLimits
from hf_specdec.tools.serve.metrics import BUCKETS, HISTOGRAMS, Metrics
from tests.serve.conftest import NAME, serving
from tests.serve.test_server import PROMPTS, expected, streaming

SAMPLE = re.compile(r'^hf_specdec:(\w+)\{model_name="embedded"(?:,(\w+)="([^"]*)")?\} ([\d.e+-]+)$')
BODY: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}


def samples(url: str) -> dict[Any, float]:
    """Values by name, or by name and label; each line is one, or a comment."""
    found: dict[Any, float] = {}
    for line in httpx.get(f"{url.removesuffix('/v1')}/metrics").text.splitlines():
        if not line.startswith("# "):
            match = SAMPLE.match(line)
            assert match is not None, line
            name, _, label, value = match.groups()
            found[name if label is None else (name, label)] = float(value)
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
def test_metrics_count_what_the_answers_tell(target: Any, chat_tokenizer: Any, is_streamed: bool) -> None:
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        answers = [client.completions.create(**BODY, **options, extra_body={"spec_method": "auto"}) for _ in range(2)]
        usages = [list(one)[-1].usage if is_streamed else one.usage for one in answers]
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{**BODY, "max_tokens": 0})
        found = samples(url)
    assert found["prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert found["generation_tokens_total"] == 32
    assert found["request_success_total", "length"] == 2
    assert found["request_failure_total", "400"] == 1
    details = [usage.completion_tokens_details for usage in usages]
    accepted = sum(one.accepted_prediction_tokens for one in details)
    drafted = accepted + sum(one.rejected_prediction_tokens for one in details)
    assert found["spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert found["spec_decode_num_draft_tokens_total"] == drafted
    by_place = [value for name, value in found.items() if "accepted_tokens_per_pos" in name[0]]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    for name, total in (("accepted", accepted), ("draft", drafted)):
        by_source = {
            key[1]: value for key, value in found.items() if key[0] == f"spec_decode_num_{name}_tokens_per_source_total"
        }
        assert sum(by_source.values()) == total
        assert by_source.keys() <= {"text", "earlier_texts", "recycled_logits", "grammar"}
    for name in HISTOGRAMS:
        assert found[f"{name}_count"] == found[f"{name}_bucket", "+Inf"] == 2
        assert found[f"{name}_sum"] > 0
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)


def test_running_and_waiting_texts_are_told_apart(target: Any, chat_tokenizer: Any) -> None:
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        streams = [streaming(client, prompt) for prompt in PROMPTS[:4]]
        waiting = client.completions.create(**{**BODY, "stream": True})
        found = samples(url)
        for events in streams:
            events.close()
        assert list(waiting)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (4, 1)


def test_a_time_is_in_every_bucket_above_it() -> None:
    metrics = Metrics("m")
    for seconds in (BUCKETS[2], 1e9):
        metrics.observe("time_to_first_token_seconds", seconds)
    text = metrics.text(num_requests_running=0, num_requests_waiting=0)
    lines = re.findall(r'time_to_first_token_seconds_bucket\{model_name="m",le="(.*)"\} (.*)', text)
    assert [float(value) for _, value in lines] == [0.0] * 2 + [1.0] * (len(BUCKETS) - 2) + [2.0]
    assert [float(most) for most, _ in lines] == [*BUCKETS, float("inf")]


@pytest.mark.parametrize(("given", "is_kept"), [("abc-1", True), ("x" * 200, False), ("", False)])
def test_each_answer_has_its_request_s_name(url: str, given: str, is_kept: bool) -> None:
    for path, body in (("completions", BODY), ("completions", {"model": "gpt-9", "prompt": "x"}), ("embeddings", {})):
        reply = httpx.post(f"{url}/{path}", json=body, headers={"x-request-id": given} if given else {})
        found = reply.headers["x-request-id"]
        assert found == given if is_kept else re.fullmatch("[0-9a-f]{32}", found)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_is_a_line_of_json_in_the_log(url: str, caplog: pytest.LogCaptureFixture, is_streamed: bool) -> None:
    with caplog.at_level(logging.INFO, logger="hf_specdec.requests"):
        for body in ({**BODY, "stream": is_streamed}, {**BODY, "n": 0}):
            httpx.post(f"{url}/completions", json=body, headers={"x-request-id": "log-1"})
        httpx.get(f"{url.removesuffix('/v1')}/health")
    good, bad = (json.loads(record.message) for record in caplog.records if "log-1" in record.message)
    wanted = {"request_id": "log-1", "method": "POST", "path": "/v1/completions", "status": 200}
    assert good.items() >= wanted.items()
    assert (good["completion_tokens"], good["finish_reasons"], good["stream"]) == (16, ["length"], is_streamed)
    assert 0 < good["seconds_to_first_token"] <= good["seconds"]
    assert PROMPTS[0] not in json.dumps(good), "no text of a client"
    assert bad["status"] == 400 and bad["error"].startswith("n: ")


@pytest.mark.parametrize(
    ("limits", "status", "told"),
    [
        ({"max_body": 40}, 413, "the body must have at most 40 bytes (--max-body)"),
        ({"max_prompt_tokens": 3}, 400, "prompt: must be at most 3 tokens on this server (--max-prompt-tokens)"),
        ({"max_tokens": 15}, 400, "max_tokens: must be at most 15 tokens on this server (--max-tokens), but is 16"),
        ({"request_timeout": 0.0001}, 504, "the answer took more than 0.0001 seconds (--request-timeout)"),
    ],
    ids=str,
)
def test_each_limit_is_named(target: Any, chat_tokenizer: Any, limits: dict[str, Any], status: int, told: str) -> None:
    with serving(target, chat_tokenizer, limits=ServerLimits(**limits)) as url:
        reply = httpx.post(f"{url}/completions", json=BODY)
        streamed = httpx.post(f"{url}/completions", json={**BODY, "stream": True})
    assert reply.status_code == status
    assert reply.json()["error"]["message"].startswith(told)
    assert json.dumps(told)[1:-1] in streamed.text
    assert streamed.status_code == (200 if status == 504 else status)


def test_an_answer_is_as_long_as_the_limit_where_the_request_does_not_say(target: Any, chat_tokenizer: Any) -> None:
    with serving(target, chat_tokenizer, limits=ServerLimits(max_tokens=5, request_timeout=60)) as url:
        reply = httpx.post(f"{url}/completions", json={"model": NAME, "prompt": PROMPTS[0], "temperature": 0})
    assert reply.json()["usage"]["completion_tokens"] == 5


def test_a_server_that_ends_lets_answers_end_and_refuses_new_requests(target: Any, chat_tokenizer: Any) -> None:
    texts: list[str] = []
    refused: list[httpx.Response] = []

    def read(events: Any) -> None:
        texts.append("".join(event.choices[0].text for event in events if event.choices))

    def knock(url: str) -> None:
        health = f"{url.removesuffix('/v1')}/health"
        while httpx.get(health).status_code == 200:
            pass
        refused.append(httpx.post(f"{url}/completions", json=BODY))

    with openai.OpenAI(base_url="http://x", api_key="none", max_retries=0) as client:
        with serving(target, chat_tokenizer) as url:
            client.base_url = url  # type: ignore[assignment]
            options = {**BODY, "max_tokens": 300, "extra_body": {"spec_method": "plain"}}
            threads = [
                threading.Thread(target=read, args=(client.completions.create(**options, stream=True),)),
                threading.Thread(target=knock, args=(url,)),
            ]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
    assert texts == [expected(target, chat_tokenizer, PROMPTS[0], max_new_tokens=300)]
    assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (503, "server_shutdown")
    assert refused[0].headers["retry-after"] == "1"
