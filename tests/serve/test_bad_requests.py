"""Requests that cannot be answered: refused in OpenAI's form, in words that name the field, and the server goes on."""

import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.tools.serve.protocol import CompletionRequest
from hf_specdec.tools.serve.requests import RequestError, RequestReader
from tests.serve.conftest import NAME, serving
from tests.serve.test_server import PROMPTS, expected


def refused(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    with raised.value as error:
        return error.code, json.loads(error.read())["error"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_request"),
        (b"{no json", 400, "invalid_request"),
        (b"[1, 2]", 400, "invalid_request"),
        (b'{"model": "embedded"}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "n": 2, "temperature": 0}', 400, "invalid_value"),
        (b'{"model": "embedded", "prompt": "x", "n": 129}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "logprobs": 21}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "presence_penalty": 3}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "temperature": "hot"}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "max_tokens": 0}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": ""}', 400, "invalid_prompt"),
        (b'{"model": "embedded", "prompt": [99999]}', 400, "invalid_prompt"),
        (b'{"model": "embedded", "prompt": "x", "spec_method": "magic"}', 400, "invalid_value"),
        (b'{"model": "embedded", "prompt": "x", "spec_config": {"wrong": 1}}', 400, "invalid_value"),
        (b'{"model": "embedded", "prompt": "x", "max_tokens": 4000}', 400, "context_length_exceeded"),
        (b'{"model": "gpt-9", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "embedded", "prompt": ["x", "y"]}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": null}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "\\ud800"}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "echo": true}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "best_of": 2}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "seed": 18446744073709551616}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "logit_bias": {"99999": 1}}', 400, "invalid_value"),
        (b'{"model": "embedded", "prompt": "x", "stop": "' + b"ab" * 50_000 + b'"}', 400, "invalid_request"),
    ],
)
def test_a_wrong_body_is_refused_and_the_server_goes_on(
    url: str, client: openai.OpenAI, body: bytes, status: int, code: str
) -> None:
    found, error = refused(url, body)
    assert (found, error["code"]) == (status, code)
    assert error["message"]
    assert client.models.list().data[0].id == NAME


@pytest.mark.parametrize(
    ("fields", "told", "param"),
    [
        ({"prompt": [1, "x"]}, "prompt.1: Input should be a valid integer", "prompt.1"),
        ({"prompt": [1, True]}, "prompt.1: Input should be a valid integer", "prompt.1"),
        ({"stop": ["a", 3]}, "stop.1: Input should be a valid string", "stop.1"),
        ({"stop": ["a"] * 17}, "stop: must be at most 16 texts", "stop"),
        ({"stream_options": {"include_usage": True}}, "body: stream_options must come with stream", None),
        ({"logprobs": True}, "logprobs: Input should be a valid integer", "logprobs"),
        ({"n": 2, "temperature": 0}, "n: must be 1 where nothing is drawn, but is 2; set a temperature", "n"),
        ({"tool_choice": "auto"}, "tool_choice: the server does not know this field", "tool_choice"),
        ({"prompt": 3}, "prompt: Input should be a valid string", "prompt"),
        ({"prompt": ["x", "y"]}, "prompt: must be one prompt; send a request for each", "prompt"),
        ({"temperature": 1e-300}, "temperature: must be 0, or at least 0.000001", "temperature"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias.5: Input should be less than or equal to 100", "logit_bias.5"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: Input should be greater", "repetition_penalty"),
        ({"model": "gpt-9"}, "the model 'gpt-9' does not exist; there is 'embedded'", "model"),
    ],
    ids=[
        "no token",
        "truth for a token",
        "no stop string",
        "many stop strings",
        "usage of no stream",
        "chat's log-probabilities",
        "equal texts",
        "unknown field",
        "no text",
        "two prompts",
        "tiny temperature",
        "infinite bias",
        "tiny penalty",
        "another model",
    ],
)
def test_what_is_wrong_is_named_in_words(url: str, fields: dict[str, Any], told: str, param: str) -> None:
    _, error = refused(url, json.dumps({"model": NAME, "prompt": "x", **fields}).encode())
    assert error["message"].startswith(told)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("reserved", "method", "asked", "told"),
    [
        ([7, 5, 7], "lookahead", [7, 5, 8], "`spec_config.verification_set_size` must be at most 7, as reserved"),
        ([7, 5, 7], "lookahead", [7, 5, 7], None),
        ([7, 5, 7], "prompt_lookup", [12], None),
        (None, "lookahead", [15, 5, 15], None),
        (None, "lookahead", [30, 5, 15], "`spec_config` must compute at most 128 tokens a step on this server"),
        (None, "prompt_lookup", [129], "`spec_config` must compute at most 128 tokens a step on this server"),
        (None, "prompt_lookup", [4, 2, [0]], "`spec_config.device_list` must be unset in a request"),
        (None, "prompt_lookup", {"engine": "assisted"}, "`spec_config.engine` must be unset in a request"),
        (None, "auto", {"max_pool_tokens": 10**9}, "`spec_config.max_pool_tokens` must be unset in a request"),
        (None, "auto", {"max_pool_tokens": 1}, "`spec_config.max_pool_tokens` must be unset in a request"),
    ],
    ids=str,
)
def test_a_request_stays_within_what_the_server_reserves(
    target: Any, chat_tokenizer: Any, reserved: Any, method: str, asked: Any, told: str | None
) -> None:
    limit = None if reserved is None else LookaheadConfig.parse(reserved)
    reader = RequestReader(target, chat_tokenizer, NAME, "lookahead", limit, max_new_tokens=4, reserved=limit)
    request = CompletionRequest(model=NAME, prompt="x", spec_method=method, spec_config=asked)
    if told is None:
        assert reader.read(request)["spec_method"] == method
        return
    with pytest.raises(RequestError, match=re.escape(told)) as raised:
        reader.read(request)
    assert (raised.value.status, raised.value.param) == (400, "spec_config")


def test_what_a_request_leaves_out_is_as_the_server_has_it(target: Any, chat_tokenizer: Any) -> None:
    limit = AutoSpecConfig(max_nodes=9)
    reader = RequestReader(target, chat_tokenizer, NAME, "auto", limit, max_new_tokens=4, reserved=limit)
    asked = {"window_size": 0, "pool": "request"}
    config = reader.read(CompletionRequest(model=NAME, prompt="x", spec_config=asked))["spec_config"]
    assert (config.window_size, config.max_nodes) == (0, 9)


def test_fields_that_ask_for_nothing_are_taken(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Null is no value; a list of one prompt is that prompt."""
    nothing = {"echo": False, "best_of": 1, "logprobs": None, "suffix": None, "n": None, "user": "u", "stop": ""}
    answer = client.completions.create(
        model=NAME, prompt=[PROMPTS[0]], max_tokens=16, temperature=0, frequency_penalty=0, extra_body=nothing
    )
    assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    ids = chat_tokenizer(PROMPTS[0]).input_ids
    body = {"model": NAME, "max_tokens": 16, "temperature": 0}
    assert client.completions.create(**body, prompt=[ids]).choices[0].text == answer.choices[0].text
    messages: Any = [{"role": "user", "content": "x", "name": None}]
    asked: Any = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    first = client.chat.completions.create(**body, messages=messages, **asked).choices[0].message
    assert first.content
    again = client.chat.completions.create(**body, messages=[*messages, first, *messages])
    assert again.choices[0].message.content


def test_a_client_that_hangs_up_before_its_body_is_no_error(
    url: str, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.models.list()  # the server has read it
    client.models.list()
    assert caplog.text == ""


def test_models_and_routes_are_named(client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is 'embedded'"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not served; there are POST /v1/chat"):
        client.embeddings.create(model=NAME, input="x")


@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{NAME}", "/v1/models/other"])
def test_what_can_be_read_can_be_asked_for_by_head(url: str, path: str) -> None:
    """As load balancers do: status and headers of GET, and no body."""
    answers = []
    for method in ("GET", "HEAD"):
        connection = http.client.HTTPConnection(url.removeprefix("http://").removesuffix("/v1"))
        connection.request(method, path)
        answer = connection.getresponse()
        answers.append((answer.status, answer.headers["content-type"], answer.headers["content-length"]))
        assert bool(answer.read()) == (method == "GET")
        connection.close()
    assert answers[0] == answers[1]


def test_a_wrong_method_is_told_the_right_one(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{url}/completions")
    with raised.value as error:
        assert (error.code, error.headers["allow"]) == (405, "POST")


def test_a_chat_that_the_template_refuses_is_the_client_s_error(target: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.config.name_or_path)
    tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    with serving(target, tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="Roles must alternate") as raised:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])
        assert raised.value.param == "messages"


def test_a_fault_of_the_server_is_told_in_the_api_s_form(target: Any, chat_tokenizer: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("disk on fire")

    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_specdec.tools.serve.requests.RequestReader.read", broken)
            with pytest.raises(openai.InternalServerError, match="RuntimeError in the server"):
                client.completions.create(model=NAME, prompt="x")
        assert client.completions.create(model=NAME, prompt="x", max_tokens=2).choices


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt=[5] * 3000)
    assert raised.value.code == "context_length_exceeded"
