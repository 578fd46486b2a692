"""The server over loopback, through the real client: plain generation's texts, whoever else is being served."""

import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from tests.helpers.heads import random_head
from tests.helpers.support import plain
from tests.serve.conftest import NAME, serving

PROMPTS = [f"def function_{number}(items):\n    return " for number in range(20)]


def expected(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """What plain generation writes after the prompt."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = plain(model, ids, **{"max_new_tokens": 16, "do_sample": False, **options})[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto", "none"])
def test_a_completion_is_plain_generation_s(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, method: str
) -> None:
    answer = client.completions.create(
        model=NAME, prompt=PROMPTS[0], max_tokens=16, temperature=0, extra_body={"spec_method": method}
    )
    assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    extra = answer.usage.model_extra or {}
    assert extra["spec_stats"]["method"] == ("plain" if method == "none" else method)
    assert extra["spec_stats"]["plain_reason"] is None


def test_a_chat_is_asked_through_the_template(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "write a stack"}]}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=12, temperature=0)
    wanted = expected(target, chat_tokenizer, "# user: write a stack\n# assistant:", max_new_tokens=12)
    assert answer.choices[0].message.content == wanted


def test_twenty_streams_at_once_are_twenty_answers(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Nothing of one is in another, and each arrives in pieces."""

    def stream(prompt: str) -> tuple[str, int]:
        events = client.completions.create(model=NAME, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        pieces = [event.choices[0].text for event in events]
        return "".join(pieces), sum(bool(piece) for piece in pieces)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(stream, PROMPTS))
    assert [text for text, _ in answers] == [expected(target, chat_tokenizer, prompt) for prompt in PROMPTS]
    assert all(num_pieces > 1 for _, num_pieces in answers)


def test_a_stream_ends_with_usage_if_it_is_wanted(client: openai.OpenAI) -> None:
    events = list(
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, stream: bool
) -> None:
    whole = expected(target, chat_tokenizer, PROMPTS[0])
    stop = whole[5:8]
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0, "stop": stop}
    if stream:
        events = list(client.completions.create(**options, stream=True))
        text, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**options)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_a_seed_gives_plain_generation_s_sample(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], max_tokens=12, temperature=0.8, seed=11)
    torch.manual_seed(11)
    wanted = expected(target, chat_tokenizer, PROMPTS[1], max_new_tokens=12, do_sample=True, temperature=0.8)
    assert answer.choices[0].text == wanted


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
        (b'{"model": "embedded", "prompt": "x", "n": 2}', 400, "invalid_request"),
        (b'{"model": "embedded", "prompt": "x", "logprobs": 3}', 400, "invalid_request"),
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
        ({"tool_choice": "auto"}, "tool_choice: the server does not know this field", "tool_choice"),
        ({"prompt": 3}, "prompt: Input should be a valid string", "prompt"),
        ({"prompt": ["x", "y"]}, "prompt: must be one prompt; send a request for each", "prompt"),
        ({"model": "gpt-9"}, "the model 'gpt-9' does not exist; there is 'embedded'", "model"),
    ],
    ids=["unknown field", "no text", "two prompts", "another model"],
)
def test_what_is_wrong_is_named_in_words(url: str, fields: dict[str, Any], told: str, param: str) -> None:
    _, error = refused(url, json.dumps({"model": NAME, "prompt": "x", **fields}).encode())
    assert error["message"].startswith(told)
    assert error["param"] == param


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
    asked: Any = {"tools": [], "response_format": {"type": "text"}, "logprobs": False}
    first = client.chat.completions.create(**body, messages=messages, **asked).choices[0].message
    assert first.content
    again = client.chat.completions.create(**body, messages=[*messages, first, *messages])
    assert again.choices[0].message.content


def test_models_and_routes_are_named(client: openai.OpenAI) -> None:
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is 'embedded'"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not served; there are POST /v1/chat"):
        client.embeddings.create(model=NAME, input="x")


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
            patch.setattr("hf_specdec.serve.requests.RequestReader.read", broken)
            with pytest.raises(openai.InternalServerError, match="RuntimeError in the server"):
                client.completions.create(model=NAME, prompt="x")
        assert client.completions.create(model=NAME, prompt="x", max_tokens=2).choices


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt=[5] * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_no_request_learns_from_another(client: openai.OpenAI) -> None:
    """The same prompt twice takes the same steps: auto drafts nothing from the first answer."""
    body = {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "shared"}}
    steps = []
    for _ in range(2):
        answer = client.completions.create(model=NAME, prompt=PROMPTS[3], max_tokens=16, temperature=0, extra_body=body)
        assert answer.usage is not None and answer.usage.model_extra is not None
        steps.append(answer.usage.model_extra["spec_stats"]["num_drafts"])
    assert steps[0] == steps[1]


def streaming(client: openai.OpenAI, prompt: str) -> openai.Stream[Any]:
    """A long answer that has a place in the batch: its first token is here."""
    events: openai.Stream[Any] = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=1000, temperature=0, stream=True
    )
    next(events), next(events)  # the first event comes before any token
    return events


def test_texts_are_remembered_by_api_key(target: Any, chat_tokenizer: Any) -> None:
    """The second answer of a key takes fewer steps, and the first of another as many as the first of all."""

    def steps(key: str, method: str) -> int:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            config = {"num_nodes": 8} if method == "auto" else {"pool": "shared"}
            body = {"spec_method": method, "spec_config": config}
            answer = client.completions.create(
                model=NAME, prompt=PROMPTS[3], max_tokens=16, temperature=0, extra_body=body
            )
        assert answer.usage is not None and answer.usage.model_extra is not None
        assert answer.choices[0].text == wanted
        return int(answer.usage.model_extra["spec_stats"]["num_drafts"])

    wanted = expected(target, chat_tokenizer, PROMPTS[3])
    with serving(target, chat_tokenizer, api_keys=("ann", "bob"), memory="key") as url:
        for method in ("auto", "prompt_lookup"):
            first, second, other = steps("ann", method), steps("ann", method), steps("bob", method)
            assert second < first
            assert other == first


def test_more_requests_than_may_wait_are_refused(target: Any, chat_tokenizer: Any) -> None:
    """Four are decoded and one waits; the sixth is told to come back, and is served once there is room."""
    with (
        serving(target, chat_tokenizer, max_queue=1) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        streams = [streaming(client, prompt) for prompt in PROMPTS[:4]]
        waiting = client.completions.create(model=NAME, prompt=PROMPTS[4], max_tokens=4, stream=True)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model=NAME, prompt=PROMPTS[5], max_tokens=4)
        assert raised.value.code == "rate_limit_exceeded"
        assert "max_queue is 1" in raised.value.message
        assert raised.value.response.headers["retry-after"] == "1"
        for events in streams:
            events.close()
        assert list(waiting)[-1].choices[0].finish_reason
        assert client.completions.create(model=NAME, prompt=PROMPTS[5], max_tokens=4, temperature=0).choices[0].text


def test_a_forward_that_fails_ends_its_requests_alone(
    target: Any, chat_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts that shared the forward end with an error; what comes after is served."""

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        raise RuntimeError("CUDA out of memory")

    with (
        serving(target, chat_tokenizer) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        streams = [streaming(client, prompt) for prompt in PROMPTS[:2]]
        hook = target.register_forward_pre_hook(fail, with_kwargs=True)
        for events in streams:
            with pytest.raises(openai.APIError, match="RuntimeError while decoding"):
                list(events)
        answer = client.completions.create(model=NAME, prompt=PROMPTS[2], temperature=0)
        assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[2])
    assert "CUDA out of memory" in caplog.text


def test_a_draft_head_drafts_for_the_methods_that_take_one(target: Any, chat_tokenizer: Any) -> None:
    options: dict[str, Any] = {"draft_model": random_head(target), "spec_method": "eagle3"}
    with (
        serving(target, chat_tokenizer, **options) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model=NAME, prompt=PROMPTS[0], temperature=0)
        assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
        stats = answer.usage.model_extra["spec_stats"]  # type: ignore[union-attr, index]
        assert (stats["method"], stats["plain_reason"]) == ("eagle3", None)
        assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0  # type: ignore[union-attr, operator]
        with pytest.raises(openai.BadRequestError, match="no draft model for draft_model"):
            client.completions.create(model=NAME, prompt="x", extra_body={"spec_method": "draft_model"})


def test_a_head_is_asked_for_where_there_is_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no draft head for eagle3"):
        client.completions.create(model=NAME, prompt="x", extra_body={"spec_method": "eagle3"})


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


def test_the_server_stops_while_texts_are_decoded(target: Any, chat_tokenizer: Any) -> None:
    """The engine's thread ends with it."""
    with serving(target, chat_tokenizer) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        events = client.completions.create(model=NAME, prompt="import ", max_tokens=500, stream=True)
        next(iter(events))
        events.close()
    alive = [thread.name for thread in threading.enumerate() if thread.name == "hf-specdec-batch"]
    assert len(alive) <= 1  # that of the other tests' server
