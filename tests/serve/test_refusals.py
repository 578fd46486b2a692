"""Requests that cannot be answered: refused in OpenAI's form, in words that name the field, and the server goes on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest
from hf_specdec.tools.serve.requests import RequestReader
from hf_specdec.tools.serve.responses import ResponsesRequest
from tests.serve.conftest import NAME, connected, serving
from tests.serve.test_server import CHAT_PROMPT, PROMPTS, expected

BODY: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 2}


@pytest.mark.parametrize("body", [b"", b"{no json", b"[1, 2]", b'{"model": "embedded", "prompt": "\\ud800"}', b"\xff"])
def test_what_is_no_json_is_refused(url: str, body: bytes) -> None:
    for path in ("completions", "chat/completions", "responses"):
        reply = httpx.post(f"{url}/{path}", content=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        ({"prompt": None}, "prompt: Field required", "prompt"),
        ({"prompt": 3}, "prompt: Input should be a valid string", "prompt"),
        ({"prompt": ""}, "`prompt` must hold at least one token", "prompt"),
        ({"prompt": [1, "x"]}, "prompt.1: Input should be a valid integer", "prompt.1"),
        ({"prompt": [99999]}, "`prompt` must hold token ids from 0 to 4095, but is 99999", "prompt"),
        ({"prompt": ["x", "y"]}, "prompt: must be a single prompt; send a request for each", "prompt"),
        (
            {"prompt": [5] * 3000},
            "`prompt` must leave room for 2 new tokens: the model has 2048 positions",
            "prompt",
        ),
        ({"max_tokens": 4000}, "`prompt` must leave room for 4,000 new tokens: the model has 2048 positions", "prompt"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater", "max_tokens"),
        ({"stop": ["a", 3]}, "stop.1: Input should be a valid string", "stop.1"),
        ({"n": 2}, "n: Input should be 1, but is 2", "n"),
        ({"echo": True}, "echo: Input should be False", "echo"),
        ({"logprobs": 2}, "logprobs: the server does not know this field", "logprobs"),
        ({"presence_penalty": 1}, "presence_penalty: the server does not know this field", "presence_penalty"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number", "temperature"),
        ({"seed": 1 << 64}, "seed: Input should be less than", "seed"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias.5: Input should be less than or equal to 100", "logit_bias.5"),
        ({"logit_bias": {"99999": 1}}, "`logit_bias` must hold token ids from 0 to 4095", "logit_bias"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: Input should be greater", "repetition_penalty"),
        ({"spec_config": [7]}, "spec_config: the server does not know this field", "spec_config"),
        ({"spec_method": "auto"}, "spec_method: the server does not know this field", "spec_method"),
        ({"model": "gpt-9"}, "the model 'gpt-9' does not exist; there is 'embedded'", None),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_in_words(url: str, fields: dict[str, Any], text: str, param: str) -> None:
    reply = httpx.post(f"{url}/completions", json={**BODY, **fields})
    error = reply.json()["error"]
    assert error["message"].startswith(text)
    assert (reply.status_code, error["param"]) == (404 if "model" in fields else 400, param)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.json_schema: Field required"),
        ({"response_format": {"type": "xml"}}, "response_format: Input tag 'xml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "none"}}}},
            "Invalid",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: Input should be 'system'"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"modalities": ["audio"]}, "modalities: the server does not know this field"),
    ],
    ids=str,
)
def test_what_is_wrong_about_a_chat_is_named(client: openai.OpenAI, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(text)):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], extra_body=fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.floats() | st.text(max_size=5) | st.just(NAME),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "x"]), inner),
    max_leaves=6,
)
PATHS = {"completions": CompletionRequest, "chat/completions": ChatRequest, "responses": ResponsesRequest}
GOOD: dict[str, dict[str, Any]] = {
    "completions": BODY,
    "chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "responses": {"model": NAME, "input": [{"role": "user", "content": "x"}], "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_body_is_the_server_s_error(http: httpx.Client, data: st.DataObject) -> None:
    """A right body in which some fields have odd values is answered or refused."""
    path = data.draw(st.sampled_from(sorted(PATHS)))
    names = st.sampled_from(sorted(PATHS[path].model_fields))
    body = {**GOOD[path], **data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=2))}
    reply = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404), (body, reply.text)
    assert reply.status_code == 200 or reply.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Null is no value; a list of one prompt is that prompt."""
    nothing: dict[str, Any] = {"echo": False, "best_of": 1, "logprobs": None, "suffix": None, "user": "u", "stop": ""}
    options: dict[str, Any] = {"model": NAME, "max_tokens": 16, "temperature": 0}
    wanted = expected(target, chat_tokenizer, PROMPTS[0])
    for prompt in ([PROMPTS[0]], [chat_tokenizer(PROMPTS[0]).input_ids]):
        assert client.completions.create(**options, prompt=prompt, extra_body=nothing).choices[0].text == wanted
    messages: Any = [{"role": "user", "content": "write a stack", "name": None}]
    fields: Any = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    first = client.chat.completions.create(**options, messages=messages, **fields).choices[0].message
    assert first.content == expected(target, chat_tokenizer, CHAT_PROMPT)
    assert client.chat.completions.create(**options, messages=[*messages, first, *messages]).choices[0].message.content


def test_models_and_routes_are_named(client: openai.OpenAI, url: str) -> None:
    assert client.models.retrieve(NAME).id == client.models.list().data[0].id == NAME
    with pytest.raises(openai.NotFoundError, match="there is 'embedded'"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model=NAME, input="x")
    reply = httpx.get(f"{url}/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_the_template_s_errors_are_the_client_s_and_faults_are_told(target: Any, chat_tokenizer: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("disk on fire")

    with connected(target, chat_tokenizer) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_tokenizer, "chat_template", "{{ raise_exception('Roles must alternate') }}")
        with pytest.raises(openai.BadRequestError, match="Roles must alternate"):
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
        patch.setattr(RequestReader, "read", broken)
        with pytest.raises(openai.InternalServerError, match="RuntimeError in the server"):
            client.completions.create(**BODY)


@pytest.mark.parametrize("header", ["bearer k\u00e4y", "BEARER  k\u00e4y"])
def test_an_api_key_is_asked_for(target: Any, chat_tokenizer: Any, header: str) -> None:
    with serving(target, chat_tokenizer, api_keys=("other", "k\u00e4y")) as url:
        for good in (header.encode(), b"Bearer other"):
            assert httpx.get(f"{url}/models", headers={b"authorization": good}).status_code == 200
        for wrong in ({}, {"authorization": "Bearer"}, {"authorization": "Basic other"}):
            assert httpx.get(f"{url}/models", headers=wrong).status_code == 401
        assert httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200


def test_the_guide_names_each_field_and_no_other() -> None:
    """Its tables have the fields of every endpoint."""
    guide = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text("utf-8")
    taken = {name for body in PATHS.values() for name in body.model_fields}
    rows = [line for line in guide.splitlines() if line.startswith("| ") and not line.startswith("| refused")]
    assert taken <= {name.partition(".")[0] for row in rows for name in re.findall(r"`([a-z_.]+)", row)}
